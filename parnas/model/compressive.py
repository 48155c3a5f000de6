"""Attention over compressive memory: old positions are compressed instead of dropped (Rae et al. 2020).

Compressive Transformers for Long-Range Sequence Modelling, arXiv 1911.05507. Attention sees, oldest first:

    compressed memory, up to `cmem_len`  |  memory, `mem_len` and an incomplete group  |  segment
    one position for R tokens            |  one position per token

When a segment is appended, the positions before the last `mem_len` leave memory: R = `ratio` of them are compressed
into one position, which enters a queue of `cmem_len` compressed positions; the oldest in the queue are dropped. So a
key of compressed memory covers R tokens for the price of one. If fewer than R positions are to leave, they stay in
memory, where queries can still see them, until their group is complete.

The distance between a query and a compressed position is either the number of keys between them (`distance: slots`, as
in the paper), so that all distances occur in every step; or the mean distance of the R tokens that the position was
made from (`tokens`), which tells attention how old it is, but needs R times as many distances.

Shapes: B batch, T segment, P memory, C compressed memory, R ratio, N positions to compress, D model width, H heads,
E head width.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parnas.config.schema import ModelConfig, Reach
from parnas.model import fused
from parnas.model.attention import SelfAttention, in_product_dtype
from parnas.model.blocks import BlockOutput, Context
from parnas.model.memory import BlockMemory, KeyLengths, join


class _Compressor(nn.Module):
    """Compresses positions of memory [B, N, D] to [B, N / R, D], R = `ratio` (Rae et al. 2020, section 3.1)."""

    trained = False  # whether it has parameters
    needs_usage = False  # whether it selects positions by the attention that they received
    mixes_groups = False  # whether a group's result depends on the other groups that leave memory at the same time

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.ratio, self.width = config.memory.ratio, config.d_model

    def forward(self, old: Tensor, usage: Tensor | None = None) -> Tensor:
        """Compress `old`; `usage` [B, N], given if `needs_usage`, is the attention that each position received."""
        raise NotImplementedError

    def initialise(self) -> None:
        """Set the initial weights, if the compressor has any; called when the network is created."""

    def grouped(self, old: Tensor) -> Tensor:
        """Return the positions `old` [B, N, D] in groups of R neighbours, [B, N / R, R, D]."""
        groups: Tensor = old.unflatten(1, (-1, self.ratio))
        return groups


class _MaxPool(_Compressor):
    """Compress a group of R positions to the maximum of each feature."""

    def forward(self, old: Tensor, usage: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return the maxima of `old` [B, N, D] over each group, [B, N / R, D]."""
        return self.grouped(old).amax(dim=2)


class _MeanPool(_Compressor):
    """Compress a group of R positions to the mean of each feature."""

    def forward(self, old: Tensor, usage: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return the means of `old` [B, N, D] over each group, [B, N / R, D]."""
        return self.grouped(old).mean(dim=2)


class _Convolution(_Compressor):
    """Compress by a convolution of width R and stride R, initialised as the mean."""

    trained = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.mix = nn.Linear(self.ratio * self.width, self.width)

    def forward(self, old: Tensor, usage: Tensor | None = None) -> Tensor:  # noqa: ARG002
        """Return the convolution of `old` [B, N, D], [B, N / R, D]."""
        compressed: Tensor = self.mix(self.windows(old).flatten(2))
        return compressed

    def windows(self, old: Tensor) -> Tensor:
        """Return the R inputs of the convolution for each compressed position, [B, N / R, R, D]."""
        return self.grouped(old)

    def initialise(self) -> None:
        """Set the weights so that the convolution is the mean: R identity matrices side by side, divided by R."""
        with torch.no_grad():
            self.mix.weight.copy_(torch.eye(self.width).repeat(1, self.ratio) / self.ratio)


class _DilatedConvolution(_Convolution):
    """Compress by a convolution of width R, stride R and dilation 2, so that neighbouring windows overlap by half.

    Windows that extend beyond the positions to compress are padded with zeros.
    """

    mixes_groups = True

    def windows(self, old: Tensor) -> Tensor:
        """Return the R inputs of the convolution for each compressed position, [B, N / R, R, D]."""
        # Windows of 2R - 1 positions, R apart, every second position of each: R inputs. Padding centres them.
        before = (self.ratio - 1) // 2
        padded = F.pad(old, (0, 0, before, self.ratio - 1 - before))
        return padded.unfold(1, 2 * self.ratio - 1, self.ratio)[..., ::2].transpose(2, 3)


class _MostUsed(_Compressor):
    """Keep, unchanged and in order, those N / R of the N positions that received the most attention."""

    needs_usage = mixes_groups = True

    def forward(self, old: Tensor, usage: Tensor | None = None) -> Tensor:
        """Return the N / R positions of `old` [B, N, D] with the largest `usage` [B, N]."""
        assert usage is not None
        places = usage.topk(old.shape[1] // self.ratio, dim=1).indices.sort(dim=1).values  # [B, N / R]
        return old.gather(1, places[..., None].expand(-1, -1, old.shape[2]))


COMPRESSORS: dict[str, type[_Compressor]] = {
    "max_pool": _MaxPool,
    "mean_pool": _MeanPool,
    "conv": _Convolution,
    "dilated_conv": _DilatedConvolution,
    "most_used": _MostUsed,
}


class Compression(nn.Module):
    """A compressor and, with `memory.loss: autoencode`, the decoder that reconstructs the compressor's input."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.compressor = COMPRESSORS[config.memory.function](config)
        self.loss = config.memory.loss if self.compressor.trained else None
        width, ratio = config.d_model, config.memory.ratio
        self.decoder = nn.Linear(width, ratio * width) if self.loss == "autoencode" else None

    def initialise(self) -> None:
        """Set the initial weights; those of the decoder make it repeat each compressed position R times."""
        self.compressor.initialise()
        if self.decoder is not None:
            with torch.no_grad():
                width = self.decoder.in_features
                self.decoder.weight.copy_(torch.eye(width).repeat(self.compressor.ratio, 1))

    def rebuilding_loss(self, old: Tensor, new: Tensor) -> Tensor:
        """Return the mean squared error, a scalar, of reconstructing `old` [B, N, D] from `new` [B, N / R, D]."""
        assert self.decoder is not None
        rebuilt = self.decoder(new).unflatten(-1, (self.compressor.ratio, -1)).flatten(1, 2)
        return F.mse_loss(rebuilt.to(old.dtype), old)


class _CompressiveMemory(NamedTuple):
    """The memory of compressive attention, detached from the graph; checkpoints store it as a plain tuple."""

    inputs: Tensor | None = None  # [B, P, D] the block's inputs; in inference too, since they are to be compressed
    keys: Tensor | None = None  # [B, P, 2·H·E] their keys and values, in inference only
    compressed: Tensor | None = None  # [B, C, D], or in inference its keys and values, [B, C, 2·H·E]


class CompressiveAttention(SelfAttention):
    """Relative multi-head attention over compressed memory, memory and segment (Rae et al. 2020, algorithm 1).

    A compressed position is attended to one step after it was made, and memory carries no gradient from step to step.
    So the loss of the network would not train the compressor. `memory.loss` selects one of two remedies:

    - `autoencode` or `attention`, an auxiliary loss when positions leave memory (algorithm 2): `autoencode`
      reconstructs them from their compressed form, `attention` compares the result of attending to them with the result
      of attending to their compressed form;
    - `bptt`: positions are compressed at the beginning of the next step (`prepare`), which attends to the result.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.compression = Compression(config)
        self.ratio, self.in_tokens = config.memory.ratio, config.memory.distance == "tokens"

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:
        """Let the segment `x` [B, T, D] attend to compressed memory, memory and itself, then update both memories.

        `memory` is a `_CompressiveMemory`, or `None` at the start of a text.
        """
        inputs, old_keys, compressed = memory or _CompressiveMemory()
        # 1. Keys and values of compressed memory, memory and segment, [B, C + P + T, 2·H·E].
        segment, reach = in_product_dtype(self.normed(x)), context.reach
        if context.inference:
            new_keys = self.key_value(segment)
            keys = join(compressed, old_keys, new_keys)
        else:
            old = [None if part is None else self.normed(part).to(segment.dtype) for part in (compressed, inputs)]
            keys = self.key_value(join(*old, segment))
        # 2. Attend. With `distance: tokens`, compressed positions are R tokens apart and have distances of their own.
        slots = 0 if compressed is None else compressed.shape[1]
        far = slots if self.in_tokens else 0
        window = self.memory_tokens(reach) if self.in_tokens else reach.mem_len + reach.cmem_len
        query = self.query(segment)
        change, weights = self.attend(query, keys, context, window, far, self.ratio)
        # 3. Append the segment to memory, and compress what leaves it. `x` is detached: otherwise the graphs of all
        #    earlier segments would stay alive.
        written = join(inputs, x.detach())  # [B, P + T, D]
        leaving = self._leaving(written.shape[1], reach)
        usage = _usage(weights[..., slots:], leaving) if self.compression.compressor.needs_usage else None
        plain_keys = keys[:, slots:].detach()
        new_memory, new = self._push(written, plain_keys if context.inference else None, compressed, usage, reach)
        # 4. Auxiliary loss of the compressor, if anything was compressed with a gradient.
        loss = None if new is None or not new.requires_grad else self._loss(written, new, query, plain_keys)
        return BlockOutput(self.joined(x, change), new_memory, loss, weights)

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:
        """Return the memory that `forward` would return; without attention, unless the compressor has `needs_usage`."""
        with torch.no_grad():
            if self.compression.compressor.needs_usage:
                return self(x, memory, context).memory
            inputs, keys, compressed = memory or _CompressiveMemory()
            if context.inference:
                keys = join(keys, self.key_value(in_product_dtype(self.normed(x))))
            return self._push(join(inputs, x.detach()), keys, compressed, None, context.reach)[0]

    def prepare(self, memory: BlockMemory, reach: Reach) -> BlockMemory:
        """Return the memory to pass to `forward`: with `memory.loss: bptt`, compress what is older than `mem_len`.

        The step that follows attends to the compressed positions, so the gradient of its loss trains the compressor.
        With another loss `memory` is returned unchanged, since `forward` has already compressed these positions.
        """
        inputs, keys, compressed = memory or _CompressiveMemory()
        leaving = 0 if inputs is None else self._leaving(inputs.shape[1], reach)
        if inputs is None or not leaving or self.compression.loss != "bptt":
            return memory
        # Made within this step, the new positions are part of its graph: loss -> attention -> keys -> compressor. The
        # gradient ends there, as `inputs` is detached, and `_push` detaches the positions for the steps after this one.
        new = self.compression.compressor(inputs[:, :leaving]).to(inputs.dtype)
        return _CompressiveMemory(inputs[:, leaving:], keys, _queue(compressed, new, reach))

    def key_lengths(self, memory: BlockMemory) -> KeyLengths:
        """Return the number of positions in memory and the number in compressed memory."""
        inputs, _, compressed = memory or _CompressiveMemory()
        return KeyLengths(*(0 if part is None else part.shape[1] for part in (inputs, compressed)))

    def memory_tokens(self, reach: Reach) -> int:
        """Return the number of tokens that memory and compressed memory cover together when full."""
        return reach.mem_len + self.ratio * reach.cmem_len

    def look_back(self, tokens: int, reach: Reach, tgt_len: int) -> int:
        """Return how far before a segment, in tokens, inputs matter; compressed positions and waiting ones included."""
        furthest = super().look_back(tokens, reach, tgt_len)  # `memory_tokens` counts compressed positions too
        if not reach.cmem_len:
            return furthest
        # Up to R - 1 positions may wait in memory. A compressor that mixes groups also depends on what left memory
        # together with the oldest group, that is on one segment more.
        return furthest + self.ratio - 1 + (tgt_len if self.compression.compressor.mixes_groups else 0)

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:
        """Return multiply-adds per token, compression included, with memory and compressed memory full.

        The formula assumes that `tgt_len` is a multiple of the ratio R.
        """
        d_model, inner = self.query.in_features, self.query.out_features
        plain, slots = tgt_len + reach.mem_len, reach.cmem_len
        # With distances in slots there is one per key; in tokens the C positions need R (C - 1) + T of their own.
        distances = plain + (self.ratio * (slots - 1) + tgt_len if self.in_tokens and slots else slots)
        scores = (2 * (plain + slots) + distances) * inner
        attention = 4 * d_model * inner + d_model * inner * distances / tgt_len + scores
        if not slots:
            return attention
        compressed = min(1 / self.ratio, slots / tgt_len)  # new compressed positions per token
        convolution = self.ratio * d_model * d_model if self.compression.compressor.trained else 0
        return attention + compressed * (convolution + 2 * d_model * inner)

    def _push(
        self, inputs: Tensor, keys: Tensor | None, compressed: Tensor | None, usage: Tensor | None, reach: Reach
    ) -> tuple[_CompressiveMemory, Tensor | None]:
        """Compress the N oldest positions of `inputs`, which leave memory.

        Return the new memory, and the compressed positions [B, N / R, D], or `None` if nothing was compressed.

        Args:
            inputs: [B, P + T, D], memory with the segment appended.
            keys: [B, P + T, 2·H·E], keys and values of `inputs`, in inference only.
            compressed: compressed memory so far, as in `_CompressiveMemory`.
            usage: [B, N], the attention that the N positions received; `None` if the compressor does not need it.
            reach: lengths of memory and compressed memory.
        """
        compressor, leaving = self.compression.compressor, self._leaving(inputs.shape[1], reach)
        slots = None if compressed is None else compressed.detach()
        if not reach.cmem_len:  # plain memory: positions that leave are dropped
            last = [None if part is None or not reach.mem_len else part[:, -reach.mem_len :] for part in (inputs, keys)]
            return _CompressiveMemory(*last), None
        if not leaving or (self.training and self.compression.loss == "bptt"):  # left to the next step's `prepare`
            return _CompressiveMemory(inputs, keys, slots), None
        # An auxiliary loss needs the gradient of the new positions; the memory that they enter must not have it.
        with torch.set_grad_enabled(torch.is_grad_enabled() and self.training and self.compression.loss is not None):
            new = compressor(inputs[:, :leaving], usage).to(inputs.dtype)
        written = new.detach()
        if keys is not None:  # in inference the queue holds keys and values, computed once here
            written = self.key_value(in_product_dtype(self.normed(written)))
            keys = keys[:, leaving:]
        return _CompressiveMemory(inputs[:, leaving:], keys, _queue(slots, written, reach)), new

    def _loss(self, inputs: Tensor, new: Tensor, query: Tensor, keys: Tensor) -> Tensor:
        """Return the auxiliary loss of the compressor, a scalar mean squared error (algorithm 2).

        With `memory.loss: attention`, the queries attend by content, once to the N oldest positions of `inputs` and
        once to their compressed form `new`; the loss is the error between the two results. With `autoencode` the loss
        is the error of reconstructing the N positions from `new`. Only `new` carries a gradient: the loss trains the
        compressor, and must not teach the network to make its states easier to compress.

        Args:
            inputs: [B, P + T, D], memory with the segment appended.
            new: [B, N / R, D], the compressed positions.
            query: [B, T, H·E], queries of the segment.
            keys: [B, P + T, 2·H·E], keys and values of `inputs`.
        """
        leaving = new.shape[1] * self.ratio
        if self.compression.loss == "autoencode":
            return self.compression.rebuilding_loss(inputs[:, :leaving], new)
        if self.pre_norm:  # LayerNorm by constant weights
            norm = self.layer_norm
            new = F.layer_norm(new, norm.normalized_shape, norm.weight.detach(), norm.bias.detach(), norm.eps)
        new_keys = F.linear(in_product_dtype(new), self.key_value.weight.to(query.dtype).detach())
        before, after = (self._read(query.detach(), each) for each in (keys[:, :leaving], new_keys))
        return F.mse_loss(after, before)

    def _read(self, query: Tensor, keys: Tensor) -> Tensor:
        """Return attention by content alone, softmax(q kᵀ / √E) v, for each head, [B·H, T, E], in float32 or float64.

        `query` is [B, T, H·E], `keys` [B, N, 2·H·E] holds keys and values; there are no distances and no masks.
        """
        # Two products, since the backward pass of torch's fused attention takes six times as long in bf16 on a CPU.
        key, value = self._heads(keys.unflatten(-1, (2, -1))).permute(2, 0, 3, 1, 4).flatten(1, 2)  # [B·H, N, E] each
        scaled = self._heads(query / math.sqrt(self.head_width)).transpose(1, 2).flatten(0, 1)
        read = torch.bmm(torch.bmm(scaled, key.mT).softmax(dim=-1), value)
        return read.to(fused.sum_dtype(read.dtype))

    def _leaving(self, positions: int, reach: Reach) -> int:
        """Return N, how many of `positions` positions to compress: all whole groups of R before the last `mem_len`."""
        return max(0, positions - reach.mem_len) // self.ratio * self.ratio


def _queue(compressed: Tensor | None, new: Tensor, reach: Reach) -> Tensor:
    """Append `new` to `compressed`, and return the newest `cmem_len` positions, [B, C, D]."""
    return join(compressed, new)[:, -reach.cmem_len :]


def _usage(weights: Tensor, positions: int) -> Tensor:
    """Return the mean attention that each of the oldest `positions` of memory and segment received, [B, positions].

    The mean is over heads, and over the queries that could see the position. `weights` [H, B, T, P + T] is the
    attention to memory and segment. Each query's weights are rescaled to sum to 1: otherwise they would depend on the
    attention to compressed memory, and so on the whole text before the segment.
    """
    tgt_len = weights.shape[2]
    memory = weights.shape[3] - tgt_len  # P
    weights = weights.float()
    shares = weights / weights.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    received = shares[..., :positions].mean(dim=0).sum(dim=1)  # [B, positions], sum over queries
    # A position of memory is seen by all T queries, the nth position of the segment by T - n of them (n from 0).
    places = torch.arange(positions, device=weights.device)
    return received / (tgt_len - (places - memory).clamp(min=0))
