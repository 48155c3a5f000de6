"""What every block of a network has in common: how it is called, what it gives, its residual connection and LayerNorm.

Shapes: B batch, T segment, M memory, K = M + T keys, H heads, E width of a head, D model width.
"""

from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from parnas.errors import NotCounted
from parnas.model import fused
from parnas.model.memory import BlockMemory, KeyLengths, remember
from parnas.sections import ModelConfig, Reach


class Context(NamedTuple):
    """What the layers of one forward pass have in common."""

    distances: Tensor  # [K, D] sinusoids of the distances K-1 … 0, after dropout; K of the longest memory
    u: Tensor | None  # [H, E] content bias of all layers that share one; none where each has its own
    v: Tensor | None  # [H, E] position bias
    reach: Reach = Reach()
    inference: bool = False  # whether memory is kept as keys and values
    far: Tensor | None = None  # [L, D] as `distances`, of compressed memory where its distances count tokens


class BlockOutput(NamedTuple):
    """What a block makes of a segment."""

    hidden: Tensor  # [B, T, D]
    memory: BlockMemory = None  # for the segment after this one
    loss: Tensor | None = None  # auxiliary, a scalar: trains the compression of memory and nothing else
    weights: Tensor | None = None  # [H, B, T, K] of attention to compressed memory, memory and segment, no gradient


def add_up(losses: Iterable[Tensor | None]) -> Tensor | None:
    """The sum of auxiliary losses, scalars; none where there is none."""
    given = [loss for loss in losses if loss is not None]
    return torch.stack(given).sum() if given else None


class Dropout(nn.Module):
    """Dropout of probability `p` while training; see `fused.dropout`."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return fused.dropout(x, self.p) if self.training and self.p else x


class Block(nn.Module):
    """One position of the stack, called as `block(x, memory, context)`."""

    uses_memory = False
    shares_biases = False  # whether it needs the u and v of the context

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:
        """[B, T, D] to [B, T, D], and what it remembers; `memory` is what it remembered before, none at the start."""
        raise NotImplementedError

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:
        """What it remembers where another candidate of a stochastic block ran in its place."""
        return remember(memory, x, context.reach.mem_len) if self.uses_memory else None

    def prepare(self, memory: BlockMemory, reach: Reach) -> BlockMemory:  # noqa: ARG002
        """Memory as the block sees it; before each segment."""
        return memory

    def key_lengths(self, memory: BlockMemory) -> KeyLengths:
        """How many positions of a memory the block sees."""
        return KeyLengths(memory.shape[1]) if isinstance(memory, Tensor) else KeyLengths()

    def memory_tokens(self, reach: Reach) -> int:
        """Tokens that its memory stands for when it is full."""
        return reach.mem_len if self.uses_memory else 0

    def look_back(self, reach: Reach, tgt_len: int) -> int:  # noqa: ARG002
        """Tokens before a segment that it depends on, where all segments have `tgt_len`."""
        return self.memory_tokens(reach)

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """Multiply-adds of the matrix products per token, reading segments of one row with full memory.

        Keys and values of memory are not computed anew: it is what inference costs. Raises `NotCounted` for a layer
        that does not say.
        """
        raise NotCounted(f"{type(self).__name__} does not count its multiply-adds; give it a method multiply_adds.")


class ResidualLayer(Block):
    """A transformation with dropout, residual and LayerNorm, after it (post) or before it (pre)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.pre_norm = config.norm == "pre"

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:
        """As `Block.forward`; `memory` [B, M, D] is what this block was given before."""
        given = None if memory is None else self.normed(memory)
        hidden = self.joined(x, self.transform(self.normed(x), given, context))
        return BlockOutput(hidden, self.skip(x, memory, context))

    def transform(self, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:
        """The layer proper, [B, T, D] to [B, T, D]."""
        raise NotImplementedError

    def normed(self, x: Tensor) -> Tensor:
        """What the layer proper is given for `x`."""
        normed: Tensor = self.layer_norm(x) if self.pre_norm else x
        return normed

    def joined(self, x: Tensor, change: Tensor) -> Tensor:
        """`x` and what the layer proper made of it."""
        result: Tensor = x + self.dropout(change)
        return result if self.pre_norm else cast(Tensor, self.layer_norm(result))
