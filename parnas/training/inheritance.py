"""Inherited weights: start the training of a discrete network from the weights that it has in the SuperNet of a search.

In the search, each path is trained in a part of the steps only, so the network is worse than one trained from scratch
for as many steps, but better than an untrained one (once-for-all, Cai et al. 2020, arXiv 1908.09791, trains a SuperNet
to use its networks directly).
"""

from pathlib import Path

from parnas.architecture import Architecture, drop_identity
from parnas.data.streams import StreamHeader
from parnas.errors import ParnasError
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.records import InheritedWeights
from parnas.runs.run import Run
from parnas.training.checkpoints import hash_of_weights
from parnas.training.loaded_run import load
from parnas.training.session import check_same_text


def inherit(network: TransformerXL, architecture: Architecture, folder: Path, header: StreamHeader) -> InheritedWeights:
    """Copy the weights of an architecture in the SuperNet of a search into `network`; return where they are from.

    A network that the search selected has been fine-tuned at the end of the search; the weights of all others are those
    that were stored before the fine-tuning.

    Args:
        network: the discrete network of `architecture`.
        architecture: a layer for each block of the SuperNet, identity included.
        folder: the run folder of the finished search.
        header: the text of the training, which must be that of the search.

    Raises:
        ParnasError: the run is not a finished search, its text or the shapes of its weights differ, or the architecture
            is not in the search space.
    """
    search = Run(folder)
    if search.kind() != "search":
        raise ParnasError(f"{folder} is a {search.kind()} run; weights are inherited from a search (train.inherit).")
    summary = search.summary()
    selected = [
        own
        for own in map(Architecture.parse, [*summary.selected, summary.arch])
        if drop_identity(own) == drop_identity(architecture)
    ]
    loaded = load(folder, supernet_weights=not selected, by_pi=True)
    check_same_text(header, loaded.header, str(folder))
    assert isinstance(loaded.model, SuperNet)
    inherited = loaded.model.extract(selected[0] if selected else architecture).state_dict()
    own = network.state_dict()
    if differing := [name for name in own.keys() | inherited.keys() if _shape(own, name) != _shape(inherited, name)]:
        raise ParnasError(
            f"The network does not fit the weights of {folder}: {len(differing)} tensors differ in shape, such as "
            f"{min(differing)}; use the search's settings of the section model."
        )
    network.load_state_dict(inherited)
    weights = hash_of_weights(loaded.checkpoint)
    return InheritedWeights(run=str(folder), steps=loaded.step, seconds=summary.seconds, sha256=weights)


def _shape(state: dict[str, object], name: str) -> object:
    return getattr(state.get(name), "shape", None)
