"""What is exported: the discrete network of a run."""

from dataclasses import dataclass

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.run import Run
from parnas.training.phases import LoadedRun, load

EXTRA = "pip install -e '.[export]' in the repository of parnas"


@dataclass(frozen=True)
class Source:
    """A network with float32 weights on the CPU, in evaluation mode, and the run that it is from."""

    run: Run
    loaded: LoadedRun
    network: TransformerXL
    architecture: Architecture  # without identity: a layer for each block of the network


def open_source(run: Run, best: bool = False) -> Source:
    """The network of a retraining; of a search the derived one, with the SuperNet's weights.

    best: with the weights of the least validation loss. Raises `ParnasError` where the run cannot be loaded.
    """
    loaded = load(run.folder, best=best)
    return Source(run, loaded, loaded.discrete().float(), loaded.architecture.canonical())


def need(package: str, target: str) -> None:
    """Raise where a package that a target takes is not installed."""
    from importlib.util import find_spec

    if find_spec(package) is None:
        raise ParnasError(f"--to {target} needs {package.replace('_', '-')}, which is not installed: {EXTRA}")
