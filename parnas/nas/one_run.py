"""One-run training: the search is the first part of the training, and the derived network inherits its weights.

The two parts are runs of `search` and `retrain` in two folders; this module makes their configurations from that of the
whole training.
"""

from pathlib import Path

from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.runs.run import Run

__all__ = ["healing", "inheriting", "second_part", "split_training"]

_HEALING_SHARE = 0.25  # steps in which a network recovers from the loss of layers, as a share of train.steps
_HEALING_RATE = 0.375  # peak of the learning rate in these steps, as a share of train.lr
_RERANKED, _EVOLVED = 6, 1  # networks to re-rank, and steps of the evolutionary search for each block
_RERANK_TOKENS = 8192  # the weights of a short search predict too little for a longer text to matter
_BLOCK_RIDGE = 100.0  # of greatest marginal likelihood in searches of 600 steps
_ALPHA_EVERY = 2  # weight steps per architecture step, or fewer
_ALPHA_RANGE = 6.0  # how far alpha must be able to move, in nats
_LEAST_STEPS = 8
_REWARMED = 0.02  # warm-up of a training that inherits weights, as a share of its steps


def split_training(config: Config, folder: Path) -> tuple[Config, Config]:
    """Return the configurations of search and retraining, which together take `train.steps` steps.

    The schedule of the learning rate is that of one training: warm-up, constant, decay. In the search, the share
    `search.share` of the steps, the rate rises and stays at its peak. Settings of the search that concern its steps and
    its rates are replaced. By default, each step trains one path, the paths are within the cost target on average,
    blocks share an estimate of what a layer contributes, the network has attention, and few networks are re-ranked.

    The retraining starts from the weights that the derived network has in the SuperNet, while the rate falls; it begins
    with a short warm-up, since the optimizer has no momentum yet, and with the batch whose number follows that of the
    search.

    Args:
        config: the configuration of the whole training.
        folder: the run folder of the search.

    Raises:
        ParnasError: `train.steps` is too small to be divided.
    """
    train, search = config.train, config.search
    if train.steps < _LEAST_STEPS:
        raise ParnasError(f"train.steps is {train.steps}; a one-run training needs {_LEAST_STEPS} steps or more.")
    steps = min(train.steps - 1, max(4, round(search.share * train.steps)))
    # Settings that the configuration leaves open: a short search needs fast steps, and little time at its end.
    defaults = {
        "gate_samples": 1,
        "paths_within_target": search.estimator == "uniform" and search.cost.target is not None,
        "rerank_top_k": min(_RERANKED, search.rerank_count),
        "rerank_tokens": _RERANK_TOKENS,
        "evolution_steps": _EVOLVED * search.blocks,
        "block_ridge": _BLOCK_RIDGE if search.estimator == "uniform" else None,
        "least_attention": min(1, search.attention_blocks),
    }
    # Alpha is trained often, in the second half: in a short search, what layers contribute to the loss changes fast.
    # Its rate falls linearly to zero, so that n updates of Adam move it by up to about n/2 times the first rate.
    start, every = steps // 2, min(search.alpha_every, _ALPHA_EVERY)
    updates = -(-(steps - start) // (every if search.alpha_share else 1))
    # The rate must not rise faster than in the whole training: weights that this ruins do not recover later. A search
    # that ends before the warm-up does not reach the peak.
    warmup_steps = min(train.warmup_steps, steps - 1)
    first = config.replace(
        search__steps=steps,
        search__lr=train.lr * (warmup_steps / train.warmup_steps if train.warmup_steps else 1),
        search__lr_decay=False,
        search__warmup_steps=warmup_steps,
        search__alpha_start_step=start,
        search__alpha_every=every,
        search__alpha_lr=max(search.alpha_lr, 2 * _ALPHA_RANGE / updates),
        search__uniform_fraction=1.0,
        **{f"search__{name}": value for name, value in defaults.items() if getattr(search, name) is None},
    )
    second = inheriting(config, folder, train.steps - steps)
    if (left := train.warmup_steps - steps) > second.train.warmup_steps:  # the search ended within the warm-up
        second = second.replace(train__warmup_steps=left)
    return first, second


def second_part(config: Config, folder: Path) -> Config:
    """Return the configuration of the retraining of a one-run training, after the search in `folder`.

    Raises:
        ParnasError: the search was not the first part of such a training.
    """
    first, second = split_training(config, folder)
    search = Run(folder).config().search
    if (search.steps, search.lr_decay) != (first.search.steps, False):
        raise ParnasError(
            f"{folder} has {search.steps} search steps and is not the first part of a one-run training, which has "
            f"{first.search.steps} here; search with --one-run, or leave out --one-run."
        )
    return second


def healing(config: Config, folder: Path, steps: int | None = None) -> Config:
    """Return the configuration of the training of a network that is a part of the one in the run folder `folder`.

    It takes `steps` steps, by default a quarter of `train.steps`, at a lower rate than a training from scratch: the
    higher rate would undo what the larger network has learnt.
    """
    steps = max(1, round(_HEALING_SHARE * config.train.steps)) if steps is None else steps
    return inheriting(config, folder, steps).replace(train__lr=_HEALING_RATE * config.train.lr)


def inheriting(config: Config, folder: Path, steps: int) -> Config:
    """Return the configuration of a training of `steps` steps that starts from the weights of a run."""
    warmup_steps = min(config.train.warmup_steps, round(_REWARMED * steps))
    return config.replace(train__inherit=str(folder), train__steps=steps, train__warmup_steps=warmup_steps)
