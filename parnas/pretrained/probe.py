"""Probe: what a trained model loses if one of its layers is left out or replaced by a cheaper one, without training.

For each layer and each replacement the model reads a held-out text, and two figures are measured, in nats per token:
how much the loss rises, and the KL divergence of the next-token distribution from that of the unchanged model (as in
KL-guided selection of layers, arXiv 2512.20569). With an adaptive softmax this is the divergence of the head's
distribution plus that within the cluster of the next token, as in `parnas/training/distillation.py`. The inputs of all
layers are stored once, so that only the layers after the replaced one run.

Losses of several replacements add up approximately; `Pair` checks how well. With this, and with costs of layers, the
best network within any budget is a knapsack problem (`parnas/nas/knapsack.py`).

Shapes: R rows of text, L tokens of a row, D model width, V vocabulary.
"""

import math
import random
from collections.abc import Callable, Iterable, Sequence
from itertools import combinations, islice
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from parnas.architecture import IDENTITY
from parnas.data.streams import Tokens
from parnas.pretrained.parent import Parent

_ROWS = 512  # tokens whose logits are in memory at once: those of 50,000 ids take 100 MB
_NETWORKS = 4  # whose logits are computed at once


class Change(NamedTuple):
    """What a network loses relative to the unchanged model, in nats per token."""

    loss: float  # rise of the loss
    kl: float  # KL divergence of the next-token distribution from that of the unchanged model


class Pair(NamedTuple):
    """Two layers that are left out together."""

    first: int  # number of a layer, from 0
    second: int
    both: Change
    predicted: Change  # the sum of both, each left out alone


class Probe(NamedTuple):
    """The results of a probe."""

    layers: tuple[str, ...]
    loss: float  # of the unchanged model, nats per token
    tokens: int  # that were scored
    changes: tuple[dict[str, Change], ...]  # for each layer, by the name of its replacement
    pairs: tuple[Pair, ...]


@torch.no_grad()
def probe(parent: Parent, ids: Tensor, note: Callable[[str], None], pairs: int = 0, seed: int = 1) -> Probe:
    """Measure what each replacement of a layer costs.

    Args:
        parent: the trained model.
        ids: held-out text [R, L + 1].
        note: receives a line for each layer.
        pairs: number of pairs of layers, drawn at random, that are left out together.
        seed: of the pairs.
    """
    inputs_of_text, targets = ids[:, :-1], ids[:, 1:]
    # 1. Run the unchanged model and store the input of each layer.
    parent.measure_importance(inputs_of_text)
    inputs = [parent.embed(inputs_of_text)]
    for number in range(len(parent.layers)):
        inputs.append(parent.run(number, inputs[-1]))
    reference = parent.finish(inputs.pop())

    def run_from(number: int, names: Sequence[str | None]) -> Tensor:
        """Return the hidden states for the softmax with `names` for the layers from `number` on; further ones stay."""
        x = inputs[number]
        for place in range(number, len(parent.layers)):
            name = names[place - number] if place - number < len(names) else None
            x = parent.run(place, x, name)
        return parent.finish(x)

    # 2. Replace one layer after the other: the layers before it need not run.
    changes = []
    for number, names in enumerate(parent.alternatives):
        found = compare(parent, (run_from(number, [name]) for name in names), reference, targets)
        changes.append(dict(zip(names, found, strict=True)))
        note(f"layer {number + 1} of {len(parent.layers)} ({parent.layers[number]}): " + describe(changes[-1]))
    # 3. Leave out two layers together.
    possible = list(combinations(range(len(parent.layers)), 2))
    drawn = random.Random(seed).sample(possible, min(pairs, len(possible)))
    hidden = (run_from(first, [IDENTITY, *[None] * (second - first - 1), IDENTITY]) for first, second in drawn)
    measured = []
    for (first, second), both in zip(drawn, compare(parent, hidden, reference, targets), strict=True):
        one, other = changes[first][IDENTITY], changes[second][IDENTITY]
        measured.append(Pair(first, second, both, Change(one.loss + other.loss, one.kl + other.kl)))
    return Probe(parent.layers, mean_loss(parent, reference, targets), targets.numel(), tuple(changes), tuple(measured))


def mean_loss(parent: Parent, hidden: Tensor, targets: Tensor) -> float:
    """Return the loss in nats per token for hidden states [R, L, D]; `targets` [R, L] are the ids that follow."""
    total = 0.0
    for states, ids in zip(*(each.flatten(0, 1).split(_ROWS) for each in (hidden, targets)), strict=True):
        for cluster, rows, within in parent.by_cluster(ids):
            logits = parent.logits(states if rows is None else states[rows], cluster).float()
            nll = logits.logsumexp(dim=-1) - logits.gather(1, within[:, None]).squeeze(1)
            total += float(nll.double().sum())
    return total / targets.numel()


def compare(parent: Parent, networks: Iterable[Tensor], reference: Tensor, targets: Tensor) -> list[Change]:
    """Return the change of each network relative to the model.

    Args:
        parent: the model.
        networks: the hidden states of each network for the softmax, [R, L, D]; few of them are in memory at once.
        reference: those of the model, [R, L, D].
        targets: the ids that follow, [R, L].
    """
    remaining, changes = iter(networks), list[Change]()
    while group := list(islice(remaining, _NETWORKS)):
        changes += compare_group(parent, group, reference, targets)
    return changes


def compare_group(parent: Parent, networks: Sequence[Tensor], reference: Tensor, targets: Tensor) -> list[Change]:
    """Return the changes of networks as `compare` does, with one product for the logits of all of them."""
    losses, divergences = ([0.0] * len(networks) for _ in range(2))
    of_all = [each.flatten(0, 1).split(_ROWS) for each in (targets, reference, *networks)]
    for ids, *hidden in zip(*of_all, strict=True):
        for cluster, rows, within in parent.by_cluster(ids):
            theirs, *ours = hidden if rows is None else [each[rows] for each in hidden]
            logits = parent.logits(theirs, cluster).float()  # z, [rows, ids of the cluster]
            normaliser, probabilities = logits.logsumexp(dim=-1), logits.softmax(dim=-1)  # log Σ exp(z), p
            # Logits are linear in the hidden states. The change d is computed instead of the changed logits, since
            # products in bf16 round it relative to its own size.
            changes = parent.logit_changes(torch.stack(ours) - theirs, cluster)  # [networks, rows, ids]
            for index, change in enumerate(map(Tensor.float, changes)):
                rise = (logits + change).logsumexp(dim=-1) - normaliser  # log Σ exp(z + d) - log Σ exp(z)
                losses[index] += float((rise - change.gather(1, within[:, None]).squeeze(1)).double().sum())
                expected = (probabilities * change).sum(dim=-1)  # not vecdot, which autocast computes in bf16
                divergences[index] += float((rise - expected).double().sum())
    count = targets.numel()
    return [Change(loss / count, kl / count) for loss, kl in zip(losses, divergences, strict=True)]


@torch.no_grad()
def measure_networks(parent: Parent, ids: Tensor, networks: Sequence[Sequence[str]]) -> list[Change]:
    """Return what whole networks lose, each given by a name for every layer: that of the layer, or of a replacement."""
    x, targets = parent.embed(ids[:, :-1]), ids[:, 1:]
    hidden = (
        parent.hidden(x, [None if name == own else name for name, own in zip(names, parent.layers, strict=True)])
        for names in networks
    )
    return compare(parent, hidden, parent.hidden(x), targets)


def describe(changes: dict[str, Change]) -> str:
    """Return the changes of one layer in a line."""
    return ", ".join(f"{name} {change.loss:+.3f}" for name, change in changes.items())


def rows_of(tokens: Tokens, rows: int, tgt_len: int, mem_len: int = 0) -> Tensor:
    """Return a text as `rows` rows, [R, L + 1], of which L is a multiple of a segment; the rest is left out.

    Each row begins with the last token of the row before. Fewer rows are returned for a short text, so that at least
    half of the segments of a row have a full memory of `mem_len` tokens. Of a text that is shorter than a segment one
    row is returned, as long as it is.
    """
    segments = max(1, 2 * math.ceil(mem_len / tgt_len))
    rows = max(1, min(rows, (len(tokens) - 1) // (tgt_len * segments)))
    length = (len(tokens) - 1) // rows // tgt_len * tgt_len or len(tokens) - 1
    starts = np.arange(rows)[:, None] * length
    return torch.from_numpy(np.asarray(tokens)[starts + np.arange(length + 1)].astype(np.int64))
