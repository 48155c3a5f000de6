"""What each head attends to in a text, token by token."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray

from parnas.architecture import IDENTITY
from parnas.errors import ParnasError
from parnas.model.blocks import Block
from parnas.model.memory import Memory
from parnas.training.phases import LoadedRun

LONGEST = 512  # tokens
COMPRESSED = "…"  # the label of a compressed position


@dataclass(frozen=True)
class AttentionMap:
    """The weights of one layer with attention."""

    block: int  # its place in the string, from 1
    layer: str
    weights: NDArray[np.float32]  # [H, T, K]; those of a query add up to 1, and are 0 for keys after it
    queries: tuple[str, ...]  # [T] the tokens of the text
    keys: tuple[str, ...]  # [K] what is seen: compressed memory, memory of the text before, and the text


@torch.no_grad()
def attention_maps(loaded: LoadedRun, text: str, before: str = "") -> list[AttentionMap]:
    """The attention of each layer that has some, while a text is read at once; of a search in the derived network.

    before: a text that is read first, so that it is in memory. Raises `ParnasError` for a text without tokens, or one
    of more than 512, and for a network without attention.
    """
    network = loaded.discrete()
    ids, earlier = (torch.tensor([loaded.tokenizer.encode(part)], dtype=torch.long) for part in (text, before))
    if not 1 <= ids.shape[1] <= LONGEST:
        raise ParnasError(f"The text has {ids.shape[1]} tokens; give one of 1 to {LONGEST}.")
    memory: Memory | None = None
    for segment in earlier.split(loaded.config.data.tgt_len, dim=1) if earlier.shape[1] else ():
        memory = network(segment, memory).memory
    output = network(ids, memory, with_weights=True)
    spellings = loaded.tokenizer.spellings()
    names = [spellings[each] for each in (*earlier[0].tolist(), *ids[0].tolist())]
    kept = memory or (None,) * len(network.blocks)
    places = [(place, name) for place, name in enumerate(loaded.architecture, 1) if name != IDENTITY]
    slots = [cast(Block, block).key_lengths(of).compressed for block, of in zip(network.blocks, kept, strict=True)]
    found = list(_maps(places, output.weights, slots, names, ids.shape[1]))
    if not found:
        raise ParnasError(f"{loaded.architecture} has no layer with attention.")
    return found


def _maps(
    places: list[tuple[int, str]],
    weights: tuple[torch.Tensor | None, ...],
    slots: list[int],
    names: list[str],
    queries: int,
) -> Iterator[AttentionMap]:
    """`names` are the tokens before and of the text, of which a layer sees the last ones."""
    for (place, layer), of, compressed in zip(places, weights, slots, strict=True):
        if of is not None:
            seen = of[:, 0].float().numpy()  # [H, T, K]
            keys = [COMPRESSED] * compressed + names[len(names) - (seen.shape[-1] - compressed) :]
            yield AttentionMap(place, layer, seen, tuple(names[len(names) - queries :]), tuple(keys))
