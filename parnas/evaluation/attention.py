"""Attention weights: their distribution over old and new positions, and maps of single texts.

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
"""Buckets of each part, as in Rae et al. 2020 (arXiv 1911.05507, figure 2), which has three parts."""
_SEGMENTS = 64  # the least number to average the weights over
_MAX_TEXT = 512  # tokens
COMPRESSED = "…"  # label of a compressed position


def attention_by_age(runs: Sequence[EvalRun], split: str) -> pd.DataFrame:
    """Return the share of attention by run, block with attention and bucket of keys.

    The keys of each part (compressed memory, memory, segment) are divided into `_BUCKETS` of nearly equal size, the
    oldest first. `block` is the position in the architecture, from 1. `weight` is the mean over heads and over all
    queries of at least `_SEGMENTS` segments, read with full memory; the weights of a block add up to 1. `per_position`
    divides it by the keys of the bucket: uniform attention would make all equal, except for later positions of the
    segment, which fewer queries see.
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
    """Return position, counted from 1, and name of each layer that a discrete network has."""
    return [(number, name) for number, name in enumerate(architecture, 1) if name != IDENTITY]


def _compressed_lengths(network: TransformerXL, memory: Memory | None) -> list[int]:
    """Return the number of positions of compressed memory that each block sees."""
    blocks = cast(list[Block], list(network.blocks))
    memories = memory or (None,) * len(blocks)
    return [block.key_lengths(block_memory).compressed for block, block_memory in zip(blocks, memories, strict=True)]


@torch.no_grad()
def _mean_weights(network: TransformerXL, run: EvalRun, split: str) -> list[dict[str, np.ndarray]]:
    """Return for each block, by part of the keys, the mean weight of each key, [K]; empty without attention."""
    tokens, eos_id = run.streams.tokens(split), run.streams.tokenizer.eos_id
    warm_up = network.burn_in(run.tgt_len, run.reach)  # no less than the segments until all memory is full
    sums: list[dict[str, torch.Tensor]] = [{} for _ in network.blocks]
    memory: Memory | None = None
    segments = 0
    shape = run.loaded.config.evaluation.batch_size, run.tgt_len
    for step, batch in enumerate(evaluation_batches(tokens, eos_id, *shape, warm_up, network.alignment())):
        inputs = torch.from_numpy(batch.inputs).to(run.device.device)
        sampled = step >= warm_up and bool(batch.scored.all())
        with run.device.autocast():
            output = network(inputs, memory, reach=run.reach, inference=True, with_weights=sampled)
        if sampled:
            segments += len(inputs)
            compressed_lengths = _compressed_lengths(network, memory)
            for block_sums, weights, compressed in zip(sums, output.weights, compressed_lengths, strict=True):
                if weights is not None:
                    mean = weights.float().mean(dim=(0, 2)).sum(dim=0)  # over heads and queries, then rows: [K]
                    _add_by_part(block_sums, mean, compressed, run.tgt_len)
        memory = output.memory
        if segments >= _SEGMENTS:
            break
    if not segments:
        raise ParnasError(
            f"The {split} split of {run.name} ends before its memory is full; give a shorter memory or more text."
        )
    return [{part: (weights / segments).cpu().numpy() for part, weights in block_sums.items()} for block_sums in sums]


def _add_by_part(sums: dict[str, torch.Tensor], weights: torch.Tensor, compressed: int, tgt_len: int) -> None:
    """Add weights [K] part by part; where the length of a memory varies, the newest positions are aligned."""
    lengths = [compressed, len(weights) - compressed - tgt_len, tgt_len]
    for part, new in zip(_PARTS, weights.split(lengths), strict=True):
        if len(new):
            total = sums.get(part, new.new_zeros(len(new)))
            longest = max(len(total), len(new))
            padded_total, padded_new = (F.pad(each, (longest - len(each), 0)) for each in (total, new))
            sums[part] = padded_total + padded_new


@torch.no_grad()
def attention_maps(loaded: LoadedRun, text: str, before: str = "") -> list[AttentionMap]:
    """Return the attention maps of each layer with attention for a text read as one segment.

    A search is represented by its derived network.

    Args:
        loaded: the run.
        text: of 1 to 512 tokens.
        before: a text that is read first, to fill the memory.

    Raises:
        ParnasError: the text is empty or too long, or the network has no attention.
    """
    network = loaded.discrete()
    ids, ids_before = (torch.tensor([loaded.tokenizer.encode(part)], dtype=torch.long) for part in (text, before))
    tgt_len = ids.shape[1]
    if not 1 <= tgt_len <= _MAX_TEXT:
        raise ParnasError(f"The text has {tgt_len} tokens; give one of 1 to {_MAX_TEXT}.")
    # 1. Fill the memory, then read the text at once.
    memory: Memory | None = None
    for segment in ids_before.split(loaded.config.data.tgt_len, dim=1) if ids_before.shape[1] else ():
        memory = network(segment, memory).memory
    output = network(ids, memory, with_weights=True)
    # 2. Name the keys of each layer: it sees the last tokens before the text, and the text.
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
        raise ParnasError(f"{loaded.architecture} has no layer with attention.")
    return maps
