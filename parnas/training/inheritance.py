"""Inherited weights: start a training from the weights of the SuperNet of a search, or of a larger network.

In a search, each path is trained in a part of the steps only, so the network is worse than one trained from scratch for
as many steps, but better than an untrained one (once-for-all, Cai et al. 2020, arXiv 1908.09791, trains a SuperNet to
use its networks directly). From a trained network, a part of the layers can be inherited (see `parnas/nas/shrink.py`).
"""

from collections.abc import Sequence
from pathlib import Path

import torch

from parnas.architecture import IDENTITY, Architecture, drop_identity
from parnas.config.schema import DistillConfig
from parnas.data.streams import StreamHeader
from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.records import InheritedWeights, RunSummary
from parnas.runs.run import Run
from parnas.training.checkpoints import hash_of_weights
from parnas.training.distillation import Teachers
from parnas.training.loaded_run import LoadedRun, load
from parnas.training.session import check_same_text

__all__ = ["inherited_from"]


def inherit(network: TransformerXL, architecture: Architecture, folder: Path, header: StreamHeader) -> InheritedWeights:
    """Copy the weights of an architecture in the run `folder` into `network`; return where they are from.

    Args:
        network: the discrete network of `architecture`.
        architecture: a layer or identity for each block of the SuperNet or of the larger network.
        folder: the run folder of a finished search or retraining.
        header: the text of the training, which must be that of the run.

    Raises:
        ParnasError: the run is not finished, its text or the shapes of its weights differ, or the architecture is not
            in the search space, or has other layers than the larger network.
    """
    run = Run(folder)
    summary = run.summary()
    is_search = run.kind() == "search"
    loaded, source = _load_selected(run, summary, architecture) if is_search else _load_part(run, architecture)
    check_same_text(header, loaded.header, str(folder))
    inherited = loaded.model.extract(source).state_dict()
    own = network.state_dict()
    if differing := [name for name in own.keys() | inherited.keys() if _shape(own, name) != _shape(inherited, name)]:
        raise ParnasError(
            f"The network does not fit the weights of {folder}: {len(differing)} tensors differ in shape, such as "
            f"{min(differing)}; use the settings of that run in the section model."
        )
    network.load_state_dict(inherited)
    return inherited_from(loaded, run)


def inherited_from(loaded: LoadedRun, run: Run) -> InheritedWeights:
    """Return where the weights of a loaded run are from, with the steps and seconds that trained them."""
    summary = run.summary()
    # The run may have inherited weights itself.
    steps, seconds = (0, 0.0) if summary.inherited is None else (summary.inherited.steps, summary.inherited.seconds)
    return InheritedWeights(
        run=str(run.folder),
        steps=steps + loaded.step,
        seconds=seconds + summary.seconds,
        sha256=hash_of_weights(loaded.checkpoint),
    )


def load_teachers(
    folders: Sequence[str], settings: DistillConfig, header: StreamHeader, bounds: Sequence[int], device: torch.device
) -> Teachers | None:
    """Return the teachers in run folders, on a device; `None` if there are none.

    `header` is the text of the training, `bounds` are those of the clusters of the trained network's softmax.

    Raises:
        ParnasError: a run is not finished, has another text or tokenizer, or other clusters of its softmax.
    """
    networks = []
    for folder in folders:
        Run(Path(folder)).summary()  # raises if the run is not finished
        with torch.random.fork_rng(devices=[]):  # the teacher's initial weights must cost no random number
            loaded = load(folder)
        check_same_text(header, loaded.header, folder)
        teacher = loaded.discrete()
        if teacher.pointer is not None:
            raise ParnasError(f"The teacher {folder} has a pointer, which distillation does not support; give another.")
        if teacher.head.bounds != bounds:
            raise ParnasError(
                f"The softmax of the teacher {folder} has the cutoffs {teacher.head.bounds[1:-1]}, not "
                f"{bounds[1:-1]}; set model.cutoffs to those of the teacher."
            )
        networks.append(teacher.to(device).requires_grad_(False))
    return Teachers(networks, settings) if networks else None


def _load_selected(run: Run, summary: RunSummary, architecture: Architecture) -> tuple[LoadedRun, Architecture]:
    """Return a search with the weights for an architecture, and this architecture as the search writes it.

    The network that the search selected may have been fine-tuned at its end; the weights of all others are those that
    were stored before the fine-tuning. Without it, blocks are taken as given: other positions of identity are other
    weights.
    """
    own = Architecture.parse(summary.arch)
    selected = drop_identity(own) == drop_identity(architecture)
    if selected and (run.supernet.is_dir() or len(architecture) != len(own)):
        return load(run.folder, by_pi=True), own
    return load(run.folder, supernet_weights=True, by_pi=True), architecture


def _load_part(run: Run, architecture: Architecture) -> tuple[LoadedRun, Architecture]:
    """Return a retraining, and an architecture that has some of its layers, with identity for the others."""
    loaded = load(run.folder)
    layers = drop_identity(loaded.architecture)
    if drop_identity(architecture) == layers:
        return loaded, Architecture(layers)
    if len(architecture) != len(layers) or any(
        name not in (IDENTITY, layer) for name, layer in zip(architecture, layers, strict=True)
    ):
        raise ParnasError(
            f"{architecture} is not a part of {Architecture(layers)}, the network of {run.folder}; give the layers of "
            "this network, with i in place of those that are left out."
        )
    return loaded, architecture


def _shape(state: dict[str, object], name: str) -> object:
    return getattr(state.get(name), "shape", None)
