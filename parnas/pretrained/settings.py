"""Settings of a compression: those of the search in a trained network, and of the healing of what it finds."""

from pathlib import Path
from typing import cast

from parnas.architecture import ATTENTION, CONVOLUTION, RECURRENCE, drop_identity
from parnas.config.loader import Config
from parnas.config.schema import CostConfig, ModelConfig, SearchConfig
from parnas.errors import ParnasError
from parnas.nas.knapsack import is_limited
from parnas.nas.one_run import inheriting
from parnas.pretrained.parent import cheaper_layers
from parnas.runs.run import Run
from parnas.training.loaded_run import run_architecture

__all__ = ["heal_settings", "heal_settings_or_none", "search_settings"]

_SCORED_TOKENS, _RERANKED = 8192, 6  # held-out text of the scores, and networks that are compared as a whole
_SEARCH_SHARE, _HEALING_SHARE = 0.1, 0.2  # of the steps of the parent's training
_HEALING_RATE = 0.7  # of the learning rate of the parent's training


def refuse_pointer(model: ModelConfig, folder: Path) -> None:
    """Raise `ParnasError` if the trained network in a folder has a pointer."""
    if model.pointer_len:
        raise ParnasError(
            f"{folder} has a pointer (model.pointer_len: {model.pointer_len}), for which probe, compress and search "
            "--from do not work; train a network with model.pointer_len: 0."
        )


def search_settings(parent: Run) -> Config:
    """Return the configuration of a search in the network of a finished retraining: its own, with a new section search.

    An attention layer may be replaced by cheaper ones of its kind (`cheaper_layers`), a convolution, a recurrence or
    identity, any other layer by cheaper ones of its kind or identity. Local distillation takes a tenth of the steps of
    the retraining.
    """
    refuse_unfinished(parent)
    config = parent.config()
    refuse_pointer(config.model, parent.folder)
    model, layers = config.model, drop_identity(run_architecture(config))
    space: list[tuple[str, ...]] = []
    for name in layers:
        *cheaper, identity = cheaper_layers(name, model, config.data.tgt_len)
        new = (CONVOLUTION, RECURRENCE) if is_limited(name, ATTENTION) else ()
        space.append((name, *cheaper, *new, identity))
    steps = max(8, round(_SEARCH_SHARE * config.train.steps))
    return config.from_scratch(
        model__arch=None,
        train__teachers=(),
        search=SearchConfig(
            parent=str(parent.folder.resolve()),
            blocks=len(layers),
            space=tuple(space),
            steps=steps,
            warmup_steps=steps // 20,
            alpha_start_step=0,
            lr=config.train.lr,
            cost=CostConfig(metric=config.search.cost.metric, table=config.search.cost.table),
            # Scores, for small budgets in steps (`nas/stepwise.py`), leave few networks to be compared as a whole.
            rerank_tokens=_SCORED_TOKENS,
            rerank_top_k=_RERANKED,
            evolution_steps=len(layers),
        ),
    )


def heal_settings(search: Run) -> Config:
    """Return the configuration of the training of a network that a search in a trained network has found.

    It starts from the weights of that search, has the parent as its teacher, and takes a part of the steps of the
    parent's training, at a lower rate. Embedding and softmax stay those of the parent if they have most of its
    parameters: a step is faster then. With a small vocabulary it is not, and training them lowers the loss further.
    """
    config = search.config()
    summary = Run(Path(cast(str, config.search.parent))).summary()
    in_blocks = summary.parameters_without_embeddings or summary.parameters
    return inheriting(config, search.folder, max(1, round(_HEALING_SHARE * config.train.steps))).replace(
        train__lr=_HEALING_RATE * config.train.lr,
        train__freeze_embedding=summary.parameters > 2 * in_blocks,
        train__teachers=(config.search.parent,),
        search__parent=None,
    )


def heal_settings_or_none(run: Run) -> Config | None:
    """Return `heal_settings` if a run is a search in a trained network, else `None`."""
    return heal_settings(run) if run.kind() == "search" and run.config().search.parent is not None else None


def refuse_unfinished(parent: Run) -> None:
    """Raise `ParnasError` if a run is not a finished retraining."""
    if parent.kind() != "retrain" or not parent.finished():
        raise ParnasError(f"{parent.folder} is not a finished retraining; train it to its end by parnas retrain.")
