"""Evolutionary search over architectures by shared-weight loss (Guo et al. 2020, arXiv 1904.00420, section 3.4).

pi describes each block by itself, averaged over what the other blocks may be. Evolution compares whole networks: it
starts from the most probable ones, changes one or two blocks of a good one, makes others identity where the cost target
demands it, and keeps what has the better score.
"""

import math
import random
from collections.abc import Callable, Sequence
from typing import TypeAlias

from parnas.architecture import IDENTITY

Layers: TypeAlias = tuple[str, ...]
"""An architecture, one layer name per block."""

_PARENTS = 8  # the best networks so far, of which children are made
_ATTEMPTS = 200  # to make a child that is new and allowed


def evolve(
    start: Sequence[Layers],
    score: Callable[[Layers], float],
    block_spaces: Sequence[Sequence[str]],
    is_allowed: Callable[[Layers], bool],
    steps: int,
    seed: int,
) -> list[Layers]:
    """Return the architectures `start` and those of `steps` more evaluations, best first.

    Each step makes one child of one of the best architectures so far. The search ends early if no new child is found.

    Args:
        start: the first architectures, one or more.
        score: returns the score of an architecture; lower is better, NaN is worst. It is called once for each.
        block_spaces: names of the candidates of each block.
        is_allowed: tells whether an architecture keeps to the constraints.
        steps: number of architectures to evaluate after `start`.
        seed: seed of the random changes.
    """
    generator = random.Random(seed)  # its own, so that the result does not depend on what else draws random numbers
    scores: dict[Layers, float] = {}

    def evaluate(layers: Layers) -> None:
        loss = score(layers)
        scores[layers] = math.inf if math.isnan(loss) else loss

    # 1. The first population.
    for layers in start:
        evaluate(layers)
    for _ in range(steps):
        # 2. Choose a parent among the best; the better of two is taken, so that good ones have more children.
        parents = sorted(scores, key=scores.__getitem__)[:_PARENTS]
        for _ in range(_ATTEMPTS):
            parent = parents[min(generator.randrange(len(parents)), generator.randrange(len(parents)))]
            # 3. Change it, and keep to the constraints; reject what is known, not allowed or empty.
            child = repair(mutate(parent, block_spaces, generator), parent, block_spaces, is_allowed, generator)
            if child not in scores and set(child) != {IDENTITY} and is_allowed(child):
                evaluate(child)
                break
        else:
            break
    return sorted(scores, key=scores.__getitem__)


def repair(
    child: Layers,
    parent: Layers,
    block_spaces: Sequence[Sequence[str]],
    is_allowed: Callable[[Layers], bool],
    generator: random.Random,
) -> Layers:
    """Return `child` with as many further blocks made identity, in random order, as the constraints demand.

    Without this, an expensive layer could hardly enter a network within a tight target: several others have to leave at
    once. Blocks in which `child` differs from `parent` stay. The result breaks the constraints if that is not enough.
    """
    removable = [
        block
        for block, (ours, theirs) in enumerate(zip(child, parent, strict=True))
        if ours == theirs and ours != IDENTITY and IDENTITY in block_spaces[block]
    ]
    generator.shuffle(removable)
    while not is_allowed(child) and removable:
        block = removable.pop()
        child = (*child[:block], IDENTITY, *child[block + 1 :])
    return child


def mutate(layers: Layers, block_spaces: Sequence[Sequence[str]], generator: random.Random) -> Layers:
    """Return `layers` with the layers of two blocks exchanged, or with new layers in one or two blocks.

    The result can equal `layers`.
    """
    child = list(layers)
    blocks = generator.sample(range(len(layers)), min(2, len(layers)))
    if generator.random() < 0.5:
        # An exchange keeps the cost: within a tight target most other changes are rejected.
        child[blocks[0]], child[blocks[-1]] = layers[blocks[-1]], layers[blocks[0]]
        return tuple(child) if all(child[block] in block_spaces[block] for block in blocks) else layers
    for block in blocks[: generator.choice((1, 2))]:
        child[block] = generator.choice(block_spaces[block])
    return tuple(child)
