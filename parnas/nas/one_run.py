"""One-run training: the search is the first part of the training, and the derived network inherits its weights.

The two parts are runs of `search` and `retrain` in two folders; this module makes their configurations from that of the
whole training.
"""

from collections.abc import Sequence
from pathlib import Path

from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.runs.run import Run

__all__ = ["second_part", "split_front", "split_training"]

_FRONT_SHARE = 0.25  # steps of a network of a front, as a share of train.steps
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
    steps = _search_steps(config)
    return _short_search(config, steps, steps), inheriting(config, folder, config.train.steps - steps)


def split_front(config: Config, folder: Path, targets: Sequence[float]) -> tuple[Config, Config]:
    """Return the configurations of a search for several cost targets, and of the retraining of each of its networks.

    The search takes `train.steps` steps. In the share `search.share` it is that of `split_training`; then a network is
    selected within each target, and each further step trains one of them, at the peak of the rate. The retraining, a
    quarter of `train.steps`, is for each network by itself.

    Args:
        config: the configuration of the whole training.
        folder: the run folder of the search.
        targets: cost targets, ascending.

    Raises:
        ParnasError: `train.steps` is too small to be divided.
    """
    total = config.train.steps
    first = _short_search(config, _search_steps(config), total, targets)
    return first, inheriting(config, folder, max(1, round(_FRONT_SHARE * total)))


def _search_steps(config: Config) -> int:
    """Return the number of steps in which a one-run training trains sampled paths."""
    steps = config.train.steps
    if steps < _LEAST_STEPS:
        raise ParnasError(f"train.steps is {steps}; a one-run training needs {_LEAST_STEPS} steps or more.")
    return min(steps - 1, max(4, round(config.search.share * steps)))


def _short_search(config: Config, sampling: int, steps: int, targets: Sequence[float] = ()) -> Config:
    """Return the configuration of a search that trains sampled paths for `sampling` steps, and selected ones after."""
    train, search = config.train, config.search
    # Settings that the configuration leaves open: a short search needs fast steps, and little time at its end.
    defaults = {
        "gate_samples": 1,
        "paths_within_target": search.estimator == "uniform" and bool(targets or search.cost.target),
        "rerank_top_k": min(_RERANKED, search.rerank_count),
        "rerank_tokens": _RERANK_TOKENS,
        "evolution_steps": _EVOLVED * search.blocks,
        "block_ridge": _BLOCK_RIDGE if search.estimator == "uniform" else None,
        "least_attention": min(1, search.attention_blocks),
    }
    # Alpha is trained often, in the second half: in a short search, what layers contribute to the loss changes fast.
    # Its rate falls linearly to zero, so that n updates of Adam move it by up to about n/2 times the first rate.
    start, every = sampling // 2, min(search.alpha_every, _ALPHA_EVERY)
    updates = -(-(sampling - start) // (every if search.alpha_share else 1))
    # The rate must not rise faster than in the whole training: weights that this ruins do not recover later. A search
    # that ends before the warm-up does not reach the peak.
    warmup_steps = min(train.warmup_steps, sampling - 1)
    return config.replace(
        search__front=tuple(targets),
        search__cost__target=max(targets, default=search.cost.target),
        search__steps=steps,
        search__lr=train.lr * (warmup_steps / train.warmup_steps if train.warmup_steps else 1),
        search__lr_decay=False,
        search__warmup_steps=warmup_steps,
        search__alpha_start_step=start,
        search__alpha_every=every,
        search__alpha_lr=max(search.alpha_lr, 2 * _ALPHA_RANGE / updates),
        search__uniform_fraction=sampling / steps,
        **{f"search__{name}": value for name, value in defaults.items() if getattr(search, name) is None},
    )


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


def inheriting(config: Config, search: Path, steps: int) -> Config:
    """Return the configuration of a training of `steps` steps that starts from the weights of a search."""
    warmup_steps = min(config.train.warmup_steps, round(_REWARMED * steps))
    return config.replace(train__inherit=str(search), train__steps=steps, train__warmup_steps=warmup_steps)
