"""The interface of a block, and the residual connection with LayerNorm that most layers share.

Shapes: B batch, T segment, M memory, K = M + T keys, H heads, E head width, D model width.
"""

import copy
import math
from collections.abc import Iterable
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from parnas.config.schema import ModelConfig, Reach
from parnas.model import fused
from parnas.model.memory import BlockMemory, KeyLengths, append_memory

__all__ = ["Block", "BlockOutput", "Context"]


class Context(NamedTuple):
    """Arguments that all layers of one forward pass receive."""

    distances: Tensor  # [K, D] sinusoids of the distances K-1 … 0, after dropout; K for the longest memory
    u: Tensor | None  # [H, E] content bias shared by the layers; `None` if every layer has its own
    v: Tensor | None  # [H, E] distance bias, likewise
    reach: Reach = Reach()  # memory lengths
    inference: bool = False  # whether memory holds keys and values instead of inputs
    far: Tensor | None = None  # [L, D] sinusoids for compressed memory with `memory.distance: tokens`


class BlockOutput(NamedTuple):
    """The output of a block for one segment."""

    hidden: Tensor  # [B, T, D]
    memory: BlockMemory = None  # for the segment after this one
    loss: Tensor | None = None  # auxiliary, a scalar: trains the compression of memory only
    weights: Tensor | None = None  # [H, B, T, K] of attention to compressed memory, memory and segment, no gradient


def add_up(losses: Iterable[Tensor | None]) -> Tensor | None:
    """Return the sum of `losses`, a scalar, without those that are `None` (no loss); `None` if all are `None`."""
    terms = [loss for loss in losses if loss is not None]
    return torch.stack(terms).sum() if terms else None


class Dropout(nn.Module):
    """Dropout with probability `p` in training; see `fused.dropout`."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Apply dropout to a tensor of any shape."""
        return fused.dropout(x, self.p) if self.training and self.p else x


class Block(nn.Module):
    """Base class of layers and stochastic blocks, which a network calls as `block(x, memory, context)`."""

    uses_memory = False
    position_wise = False  # whether the output at a position depends on the input at that position alone
    shares_biases = False  # whether it needs the u and v of the context
    config: ModelConfig  # the network's; set by `make_layer`

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:
        """Return the output for a segment `x`, both [B, T, D], and the memory for the next segment.

        `memory` is the memory returned for the previous segment; `None` at the start of a text.
        """
        raise NotImplementedError

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:
        """Return the memory for the next segment when a stochastic block runs another candidate instead of this one."""
        return append_memory(memory, x, context.reach.mem_len) if self.uses_memory else None

    def share_weights(self, larger: "Block") -> None:
        """Replace weights by those of a layer of the same letter, or by slices of them; by default do nothing.

        A SuperNet calls it for candidates of a block, with the one that has the most weights.
        """

    def prepare(self, memory: BlockMemory, reach: Reach) -> BlockMemory:  # noqa: ARG002
        """Return the memory to pass to `forward`, by default `memory` itself; called before each segment."""
        return memory

    def key_lengths(self, memory: BlockMemory) -> KeyLengths:
        """Return the number of plain and of compressed positions in `memory` that the block attends to."""
        return KeyLengths(memory.shape[1]) if isinstance(memory, Tensor) else KeyLengths()

    def memory_tokens(self, reach: Reach) -> int:
        """Return the number of tokens that the block's memory covers when it is full."""
        return reach.mem_len if self.uses_memory else 0

    def look_back(self, tokens: int, reach: Reach, tgt_len: int) -> int:
        """Return how far before a segment, in tokens, inputs of this block influence the network's output.

        By default each position reads its own segment and the memory of that segment. A layer whose positions read a
        fixed number of positions before their own overrides this method.

        Args:
            tokens: how far before the segment the blocks above read the outputs of this block.
            reach: memory lengths.
            tgt_len: tokens of a segment.
        """
        if self.position_wise:
            return tokens
        return math.ceil(tokens / tgt_len) * tgt_len + self.memory_tokens(reach)

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:
        """Return the multiply-adds per token of the matrix products in inference, at batch size 1 with full memory.

        Keys and values of memory are cached, so their computation does not count. This method runs a copy of the layer,
        which `make_layer` must have created, and counts its matrix products and convolutions; built-in layers override
        it with a formula.
        """
        from torch.utils.flop_counter import FlopCounterMode

        # 1. Copy the layer to the CPU, since a layer may route tokens by values; one on `meta` gets weights of zero.
        block = copy.deepcopy(self)
        if any(parameter.is_meta for parameter in block.parameters()):
            block = block.to_empty(device="cpu")
            for parameter in block.parameters():
                nn.init.zeros_(parameter)
        block.cpu().float().eval()
        x = torch.zeros(1, tgt_len, self.config.d_model)
        biases = torch.zeros(self.config.n_heads, self.config.head_width)
        # 2. Run segments until memory is full, and count the last one.
        memory: BlockMemory = None
        for _ in range(1 + math.ceil(self.memory_tokens(reach) / tgt_len)):
            memory = block.prepare(memory, reach)
            distances = torch.zeros(tgt_len + sum(block.key_lengths(memory)), self.config.d_model)
            context = Context(distances, biases, biases, reach, inference=True)
            with torch.no_grad(), FlopCounterMode(display=False) as counter:
                memory = block(x, memory, context).memory
        return float(counter.get_total_flops()) / 2 / tgt_len  # a multiply-add is two operations


class ResidualLayer(Block):
    """A layer that returns x + transform(LayerNorm(x)) with `norm: pre`, or LayerNorm(x + transform(x)) with `post`."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.pre_norm = config.norm == "pre"

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:
        """Return the layer's output for `x` [B, T, D]; `memory` [B, M, D] holds the layer's earlier inputs."""
        inputs = None if memory is None else self.normed(memory)
        hidden = self.joined(x, self.transform(self.normed(x), inputs, context))
        return BlockOutput(hidden, self.skip(x, memory, context))

    def transform(self, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:
        """Return the change [B, T, D] that the layer adds to its input; implemented by subclasses.

        With `norm: pre`, `x` [B, T, D] and `memory` [B, M, D] are already normalised.
        """
        raise NotImplementedError

    def normed(self, x: Tensor) -> Tensor:
        """Return `x` as the transformation receives it: normalised with `norm: pre`, else unchanged."""
        normed: Tensor = self.layer_norm(x) if self.pre_norm else x
        return normed

    def joined(self, x: Tensor, change: Tensor) -> Tensor:
        """Return x + dropout(change), the residual connection; with `norm: post` the LayerNorm of this sum."""
        result: Tensor = x + self.dropout(change)
        return result if self.pre_norm else cast(Tensor, self.layer_norm(result))
