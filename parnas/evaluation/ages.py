"""How much attention goes to what is how old: over compressed memory, memory and segment, block by block."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from parnas.architecture import IDENTITY
from parnas.data.batching import evaluation_batches
from parnas.errors import ParnasError
from parnas.evaluation.entries import Entry
from parnas.model.blocks import Block
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL

PARTS = "compressed memory", "memory", "segment"
BUCKETS = 6
"""Of each part, as in Rae et al. 2020 (arXiv 1911.05507, figure 2): eighteen where there is compressed memory."""
SEGMENTS = 64
"""That the weights are averaged over, at least."""


def attention_by_age(entries: Sequence[Entry], split: str) -> pd.DataFrame:
    """For each run, block with attention (its place in the string) and bucket: the share of attention that goes there.

    The keys of each part (compressed memory, memory, segment) are divided in order, the oldest first, into `BUCKETS` as
    equal as can be. `weight` is the mean over heads and over all queries of `SEGMENTS` segments or more, read with full
    memory; those of a block add up to 1. `per_position` divides it by the keys of the bucket, so that of equal interest
    all would be equal, but for later positions of the segment, which fewer queries see.
    """
    return pd.DataFrame([row for entry in entries for row in _rows(entry, split)])


def _rows(entry: Entry, split: str) -> list[dict[str, object]]:
    network = entry.loaded.discrete().to(entry.device.device)
    rows = []
    places = [(place, name) for place, name in enumerate(entry.loaded.architecture, 1) if name != IDENTITY]
    for (place, layer), parts in zip(places, _mean_weights(network, entry, split), strict=True):
        for part, weights in parts.items():
            for bucket, keys in enumerate(np.array_split(weights, BUCKETS), 1):
                if len(keys):
                    row = {"run": entry.name, "block": place, "layer": layer, "part": part, "bucket": bucket}
                    share = float(keys.sum())
                    rows.append(row | {"positions": len(keys), "weight": share, "per_position": share / len(keys)})
    return rows


@torch.no_grad()
def _mean_weights(network: TransformerXL, entry: Entry, split: str) -> list[dict[str, np.ndarray]]:
    """For each block the mean weight of each key, by part; nothing for blocks without attention."""
    tokens, eos_id = entry.streams.tokens(split), entry.streams.tokenizer.eos_id
    fill = network.burn_in(entry.tgt_len, entry.reach)  # longer than it takes until all memory is full
    sums: list[dict[str, torch.Tensor]] = [{} for _ in network.blocks]
    memory: Memory | None = None
    segments = 0
    shape = entry.loaded.config.evaluation.batch_size, entry.tgt_len
    for step, batch in enumerate(evaluation_batches(tokens, eos_id, *shape, fill, network.alignment())):
        inputs = torch.from_numpy(batch.inputs).to(entry.device.device)
        sample = step >= fill and bool(batch.scored.all())
        with entry.device.autocast():
            output = network(inputs, memory, reach=entry.reach, inference=True, with_weights=sample)
        if sample:
            segments += len(inputs)
            blocks = cast(list[Block], list(network.blocks))
            lengths = [
                block.key_lengths(kept) for block, kept in zip(blocks, memory or (None,) * len(blocks), strict=True)
            ]
            for of, weights, (_, slots) in zip(sums, output.weights, lengths, strict=True):
                if weights is not None:
                    mean = weights.float().mean(dim=(0, 2)).sum(dim=0)  # over heads and queries, then rows: [K]
                    _add(of, mean, slots, entry.tgt_len)
        memory = output.memory
        if segments >= SEGMENTS:
            break
    if not segments:
        raise ParnasError(
            f"The {split} split of {entry.name} ends before its memory is full; give a shorter memory or more text."
        )
    return [{part: (weights / segments).cpu().numpy() for part, weights in of.items()} for of in sums]


def _add(sums: dict[str, torch.Tensor], weights: torch.Tensor, slots: int, tgt_len: int) -> None:
    """Add weights [K] part by part; of a memory that is longer now and then, the newest positions line up."""
    memory = len(weights) - slots - tgt_len
    for part, of in zip(PARTS, weights.split([slots, memory, tgt_len]), strict=True):
        if len(of):
            known = sums.get(part, of.new_zeros(len(of)))
            longest = max(len(known), len(of))
            one, other = (F.pad(each, (longest - len(each), 0)) for each in (known, of))
            sums[part] = one + other
