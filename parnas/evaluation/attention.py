"""Attention weights: their distribution over older and newer positions, and maps of the weights for a single text.

Shapes: B batch, H heads, T tokens of a segment or text, K keys (compressed memory, memory, segment).
"""

from collections.abc import Sequence
from typing import cast

import numpy as np
import pandas as pd
import torch
from torch.nn import functional as F

from parnas.architecture import IDENTITY, Architecture
from parnas.data.batching import evaluation_batches
from parnas.errors import ParnasError
from parnas.evaluation.loading import EvalRun
from parnas.figures.attention_maps import AttentionMap
from parnas.model.blocks import Block
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL
from parnas.training.loaded_run import LoadedRun

_PARTS = "compressed memory", "memory", "segment"
_BUCKETS = 6
"""Buckets into which the keys of each part are divided, as in Rae et al. 2020 (arXiv 1911.05507, figure 2)."""
_SEGMENTS = 64  # weights are averaged over at least this many segments
_MAX_TEXT = 512  # largest number of tokens of a text for `attention_maps`
COMPRESSED = "…"  # label of a compressed position in a map


def attention_by_age(runs: Sequence[EvalRun], split: str) -> pd.DataFrame:
    """Return a table of the attention weight that older and newer keys receive in each block with attention.

    The keys of each part (compressed memory, memory, segment) are divided into `_BUCKETS` buckets of nearly equal size,
    numbered from the oldest keys on. Each row is one bucket of a block of a run:

    * `block`: the position in the architecture, counted from 1; `positions`: the number of keys in the bucket
    * `weight`: the attention weight of all keys of the bucket together, averaged over heads and over the queries of at
      least `_SEGMENTS` segments that are read with full memory; the weights of a block add up to 1
    * `per_position`: `weight` divided by `positions`. Uniform attention would make it equal in all buckets, except
      that fewer queries see the later positions of the segment.
    """
    rows: list[tuple[object, ...]] = []
    for run in runs:
        network = run.loaded.discrete().to(run.device.device)
        layers = _numbered_layers(run.loaded.architecture)
        for (block, layer), parts in zip(layers, _mean_weights(network, run, split), strict=True):
            for part, weights in parts.items():
                for bucket, keys in enumerate(np.array_split(weights, _BUCKETS), 1):
                    if len(keys):
                        rows.append((run.name, block, layer, part, bucket, len(keys), float(keys.sum())))
    columns = ["run", "block", "layer", "part", "bucket", "positions", "weight"]
    table = pd.DataFrame(rows, columns=columns)
    return table.assign(per_position=table["weight"] / table["positions"])


def _numbered_layers(architecture: Architecture) -> list[tuple[int, str]]:
    """Return the block number, counted from 1, and the name of each layer of an architecture except identity."""
    return [(number, name) for number, name in enumerate(architecture, 1) if name != IDENTITY]


def _compressed_lengths(network: TransformerXL, memory: Memory | None) -> list[int]:
    """Return the number of compressed positions in each block's memory; `memory` is `None` if no text was read."""
    blocks = cast(list[Block], list(network.blocks))
    memories = (memory or (None,) * len(blocks))[: len(blocks)]
    return [block.key_lengths(block_memory).compressed for block, block_memory in zip(blocks, memories, strict=True)]


@torch.no_grad()
def _mean_weights(network: TransformerXL, run: EvalRun, split: str) -> list[dict[str, np.ndarray]]:
    """Return for each block the mean attention weight of each key, [keys of the part], by part of the keys (`_PARTS`).

    Means are over heads, queries and segments. A block without attention has an empty mapping. Raises `ParnasError` if
    the split is too short to fill the memory.
    """
    tokens, eos_id = run.streams.tokens(split), run.streams.tokenizer.eos_id
    batch_size, tgt_len, reach = run.shape
    of_blocks = reach._replace(pointer_len=0)  # attention does not depend on the pointer
    warm_up = network.burn_in(tgt_len, of_blocks)
    if warm_up * tgt_len >= len(tokens):  # as with a recurrence, whose output depends on the whole text before
        warm_up = network.memory_segments(tgt_len, of_blocks)
    sums: list[dict[str, torch.Tensor]] = [{} for _ in network.blocks]
    memory: Memory | None = None
    segments = 0
    batches = evaluation_batches(tokens, eos_id, batch_size, tgt_len, warm_up, network.alignment())
    for step, batch in enumerate(batches):
        inputs = torch.from_numpy(batch.inputs).to(run.device.device)
        sampled = step >= warm_up and bool(batch.scored.all())
        with run.device.autocast():
            output = network(inputs, memory, reach=reach, inference=True, with_weights=sampled)
        if sampled:
            segments += len(inputs)
            compressed_lengths = _compressed_lengths(network, memory)
            for block_sums, weights, compressed in zip(sums, output.weights, compressed_lengths, strict=True):
                if weights is not None:
                    mean = weights.float().mean(dim=(0, 2)).sum(dim=0)  # over heads and queries, then rows: [K]
                    _add_by_part(block_sums, mean, compressed, tgt_len)
        memory = output.memory
        if segments >= _SEGMENTS:
            break
    if not segments:
        raise ParnasError(
            f"The {split} split is too short to fill the memory of {run.name}, and attention is measured with full "
            "memory; give a shorter memory (--mem-len, --cmem-len) or a longer split (--split)."
        )
    return [{part: (weights / segments).cpu().numpy() for part, weights in block_sums.items()} for block_sums in sums]


def _add_by_part(sums: dict[str, torch.Tensor], weights: torch.Tensor, compressed: int, tgt_len: int) -> None:
    """Split the attention weights of all keys, [K], into parts (`_PARTS`) and add each part to its entry in `sums`.

    `compressed` is the number of keys of compressed memory. If a part has another number of keys in `sums` than in
    `weights`, both are aligned at the newest key, and missing oldest keys count as weight 0.
    """
    lengths = [compressed, len(weights) - compressed - tgt_len, tgt_len]
    for part, new in zip(_PARTS, weights.split(lengths), strict=True):
        if len(new):
            total = sums.get(part, new.new_zeros(len(new)))
            longest = max(len(total), len(new))
            padded_total, padded_new = (F.pad(each, (longest - len(each), 0)) for each in (total, new))
            sums[part] = padded_total + padded_new


@torch.no_grad()
def attention_maps(loaded: LoadedRun, text: str, before: str = "") -> list[AttentionMap]:
    """Read a text of 1 to 512 tokens as one segment and return the attention maps of each layer with attention.

    The text `before` is read first, to fill the memory. For a search, the derived network reads both texts. Raises
    `ParnasError` if `text` is empty or too long, or if the network has no attention.
    """
    network = loaded.discrete()
    ids, ids_before = (torch.tensor([loaded.tokenizer.encode(part)], dtype=torch.long) for part in (text, before))
    tgt_len = ids.shape[1]
    if not 1 <= tgt_len <= _MAX_TEXT:
        raise ParnasError(f"The text has {tgt_len} tokens; give a text of 1 to {_MAX_TEXT} tokens.")
    # 1. Fill the memory, then read the text at once.
    memory: Memory | None = None
    for segment in ids_before.split(loaded.config.data.tgt_len, dim=1) if ids_before.shape[1] else ():
        memory = network(segment, memory).memory
    output = network(ids, memory, with_weights=True)
    # 2. Label the keys of each layer: the last tokens of `before`, then the tokens of the text.
    spellings = loaded.tokenizer.spellings()
    names = [spellings[token] for token in (*ids_before[0].tolist(), *ids[0].tolist())]
    maps = []
    layers = zip(
        _numbered_layers(loaded.architecture), output.weights, _compressed_lengths(network, memory), strict=True
    )
    for (block, layer), weights, compressed in layers:
        if weights is not None:
            by_head = weights[:, 0].float().numpy()  # [H, T, K]
            keys = [COMPRESSED] * compressed + names[len(names) - (by_head.shape[-1] - compressed) :]
            maps.append(AttentionMap(block, layer, by_head, tuple(names[-tgt_len:]), tuple(keys)))
    if not maps:
        raise ParnasError(
            f"The network {loaded.architecture} has no attention layer without a window to draw; choose another run."
        )
    return maps
