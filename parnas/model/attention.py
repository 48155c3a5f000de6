"""Relative multi-head attention over memory and segment (Dai et al. 2019, arXiv 1901.02860, section 3.3).

Vanilla attention adds position embeddings to the tokens; with memory, the same embedding would then mean different
positions in different segments. Relative attention encodes the distance between query and key instead. The score of
query i and key j is, for each head,

    (q_i + u)ᵀ k_j + (q_i + v)ᵀ W r_{i-j}

where r is the sinusoid of the distance and W projects it. The learned biases u (content) and v (distance) replace the
terms of vanilla attention with the position of the query. W r depends on i - j only, so K vectors are projected instead
of T · K: `fused.relative_attention` multiplies all queries with all distances once, and then shifts each row so that
columns stand for keys.

With the option `window=N` a query sees N keys only: itself and the N - 1 positions before it. Then only a band of the
[T, K] scores is needed. The segment is cut into blocks of N queries, and each block attends to its own positions and to
those of the block before it: 2 N keys, however long segment and memory are. The blocks are independent of each other,
so that they are computed as rows of a larger batch.

With the option `kv_heads=G` there are G heads of keys and values, and H / G consecutive heads of queries use the same
one (grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245). In generation, memory is H / G times smaller.

Shapes: B batch, T segment, M memory, K = M + T keys, H heads, G heads of keys and values, E head width, D model width;
C compressed positions.
"""

import math
from typing import cast

import torch
from torch import Tensor, nn

from parnas.config.schema import ModelConfig, Reach
from parnas.errors import ParnasError
from parnas.model import fused
from parnas.model.blocks import Block, BlockOutput, Context, ResidualLayer
from parnas.model.memory import BlockMemory, KeyLengths, append_memory, join
from parnas.model.slices import SlicedLinear

__all__ = ["SelfAttention", "encode_distances"]


@fused.cache_tensors
def encode_distances(
    count: int, width: int, device: torch.device, least: float = 0.0, clamp_len: int | None = None
) -> Tensor:
    """Return the sinusoids of the distances `least + count - 1` … `least`, [count, width].

    A row has the sines of one distance, then the cosines. Distances above `clamp_len` count as `clamp_len`. Results are
    cached by arguments: do not change them in place.
    """
    # Vaswani et al. 2017, section 3.5. Distances fall along the rows, as keys are ordered: the oldest key comes first.
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    distances = torch.arange(count - 1, -1, -1, device=device) + least
    if clamp_len is not None:
        distances = distances.clamp(max=clamp_len)
    angles = torch.outer(distances, frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]


class SelfAttention(ResidualLayer):
    """Relative multi-head attention over memory and segment (Dai et al. 2019, §3.3)."""

    uses_memory = True

    def __init__(self, config: ModelConfig, window: int | None = None, kv_heads: int | None = None) -> None:
        """Create the layer.

        Args:
            config: the model's configuration.
            window: number N of positions to attend to, and of positions in memory; `None`: all of memory and segment.
            kv_heads: number G of heads of keys and values; `None`: as many as heads of queries.

        Raises:
            ParnasError: `kv_heads` does not divide the number of heads.
        """
        super().__init__(config)
        self.window = window
        self.n_heads, self.head_width = config.n_heads, config.head_width
        self.kv_heads = kv_heads or self.n_heads
        if self.n_heads % self.kv_heads:
            raise ParnasError(
                f"kv_heads={kv_heads} does not divide the {self.n_heads} heads of the attention layer; give a divisor."
            )
        inner = self.n_heads * self.head_width
        self.query: nn.Linear | SlicedLinear = nn.Linear(config.d_model, inner, bias=False)
        self.key_value: nn.Linear | SlicedLinear = nn.Linear(
            config.d_model, 2 * self.kv_heads * self.head_width, bias=False
        )
        self.position: nn.Linear | SlicedLinear = nn.Linear(config.d_model, inner, bias=False)
        self.output: nn.Linear | SlicedLinear = nn.Linear(inner, config.d_model, bias=False)
        self.attention_dropout = config.attention_dropout
        self.u: nn.Parameter | None = None
        self.v: nn.Parameter | None = None
        self.shares_biases = config.share_biases
        if not config.share_biases:
            self.u, self.v = relative_biases(config)

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:
        """Let the segment `x` [B, T, D] attend to memory and itself; return the output [B, T, D] and the new memory."""
        segment = in_product_dtype(self.normed(x))
        mem_len = self.memory_tokens(context.reach)
        # 1. Keys and values of memory and segment, [B, K, 2·G·E].
        if context.inference:
            # The weights do not change, so memory stores keys and values themselves (a KV cache).
            keys = join(memory, self.key_value(segment))
            new_memory = append_memory(None, keys, mem_len)
        else:
            # The weights change at every step, so memory stores inputs, and keys and values are computed again: W_k and
            # W_v get a gradient from memory positions too, although memory itself is detached.
            inputs = None if memory is None else self.normed(memory).to(segment.dtype)
            keys = self.key_value(join(inputs, segment))
            new_memory = append_memory(memory, x, mem_len)
        # 2. Attend, then add to the input (residual connection).
        if self.window is not None:
            return BlockOutput(self.joined(x, self._attend_in_window(self.query(segment), keys, context)), new_memory)
        change, weights = self.attend(self.query(segment), keys, context, mem_len)
        return BlockOutput(self.joined(x, change), new_memory, weights=weights)

    def share_weights(self, larger: Block) -> None:
        """Use the weights of a layer that differs in its window, or the first heads of one with more heads.

        A layer with fewer heads than the model keeps biases u and v of its own. Keys and values are shared only if as
        many heads of queries use each of them in both layers.
        """
        if not isinstance(larger, SelfAttention) or larger.head_width != self.head_width:
            return
        grouped_alike = self.n_heads * larger.kv_heads == larger.n_heads * self.kv_heads
        if larger.n_heads == self.n_heads:
            for key, part in [*larger.named_children(), *larger.named_parameters(recurse=False)]:
                if key != "key_value" or grouped_alike:
                    setattr(self, key, part)
            return
        own = self.n_heads * self.head_width
        self.layer_norm = larger.layer_norm
        self.query = SlicedLinear(larger.query, [(0, own)])
        if grouped_alike:
            keys, all_keys = self.kv_heads * self.head_width, larger.kv_heads * larger.head_width
            self.key_value = SlicedLinear(larger.key_value, [(0, keys), (all_keys, all_keys + keys)])
        self.position = SlicedLinear(larger.position, [(0, own)])
        self.output = SlicedLinear(larger.output, None, [(0, own)])

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:
        """Return the memory that `forward` would return, without computing attention."""
        new = self.key_value(in_product_dtype(self.normed(x))) if context.inference else x
        return append_memory(memory, new, self.memory_tokens(context.reach))

    def key_lengths(self, memory: BlockMemory) -> KeyLengths:
        """Return the number of positions in memory; zero with a window, which encodes its distances itself."""
        return KeyLengths() if self.window is not None else super().key_lengths(memory)

    def memory_tokens(self, reach: Reach) -> int:
        """Return the length of a full memory: `mem_len` or, with a window, the window."""
        return reach.mem_len if self.window is None else self.window

    def look_back(self, tokens: int, reach: Reach, tgt_len: int) -> int:
        """As of `Block`; with a window of N, each position reads N - 1 positions before it."""
        return super().look_back(tokens, reach, tgt_len) if self.window is None else tokens + self.window - 1

    def attend(
        self, query: Tensor, keys: Tensor, context: Context, window: int, far_keys: int = 0, step: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Compute attention; return its output projection [B, T, D] and the attention weights [H, B, T, K].

        Args:
            query: queries [B, T, H·E].
            keys: keys and values [B, K, 2·G·E].
            context: distances and biases.
            window: with `same_length`, a query sees only the keys that are less than `window` tokens before it.
            far_keys: number C of compressed positions with distances of their own: the first C keys. The sinusoids of
                these distances are in `context.far`.
            step: number of tokens from one compressed position to the next.
        """
        u, v = (context.u, context.v) if self.u is None else (self.u, self.v)
        near_keys = keys.shape[1] - far_keys
        far = masked = None
        if far_keys:
            far = fused.Far(self._heads(self.position(cast(Tensor, context.far).to(query.dtype))), far_keys, step)
        # Causal masking lets late queries of a segment see more keys than early ones; `same_length` evens that out.
        if context.reach.same_length:
            masked = _beyond_window(query.shape[1], near_keys, far_keys, step, window, query.device)
        # Distances are encoded for the longest memory of the network; rows are in falling order, so this layer's, which
        # may be shorter, uses the last ones.
        values, weights = fused.relative_attention(
            self._heads(query),  # [B, T, H, E]
            self.keys_by_head(keys),  # [B, K, 2, H, E]
            self._heads(self.position(context.distances[-near_keys:].to(query.dtype))),  # [K - C, H, E]
            cast(Tensor, u),
            cast(Tensor, v),
            self.attention_dropout if self.training else 0.0,
            far,
            masked,
        )
        change: Tensor = self.output(values.flatten(2))  # [B, T, H·E] to [B, T, D]
        return change, weights

    def _attend_in_window(self, query: Tensor, keys: Tensor, context: Context) -> Tensor:
        """Compute attention to the last `window` positions; return its output projection [B, T, D].

        `query` is [B, T, H·E]; `keys` [B, M + T, 2·G·E] holds keys and values of memory and segment, M <= window.
        """
        window, (batch, length, _) = cast(int, self.window), query.shape
        before = keys.shape[1] - length  # M
        # 1. Encode the distances N - 1 … 0 here: they do not depend on the lengths of memory and segment.
        encoded = encode_distances(window, self.query.in_features, query.device, 0.0, context.reach.clamp_len)
        position = self._heads(self.position(self.dropout(encoded).to(query.dtype)))  # [N, H, E]
        # 2. A short segment, and the first N queries while memory is not full, have fewer keys: one block of their own.
        first = length if length <= window else window if before < window else 0
        values = []
        if first:
            values.append(self._attend_block(query[:, :first], keys[:, : before + first], position, context))
        # 3. All other queries in blocks of N, [B · blocks, N, H·E], with 2 N keys each; zeros fill up the last block.
        #    Its additional queries are cut off again, and the additional keys come after all queries that are not.
        if rest := length - first:
            blocks = -(-rest // window)
            begin = before + first - window  # of the keys that the first of these blocks sees
            queries, near = query[:, first:], keys[:, begin:]
            if missing := blocks * window - rest:
                queries, near = (nn.functional.pad(each, (0, 0, 0, missing)) for each in (queries, near))
            queries = queries.unflatten(1, (blocks, window))
            near = fused.overlapping_blocks(near, window)  # [B, blocks, 2 N, 2·G·E], a view
            blockwise = self._attend_block(queries.flatten(0, 1), near, position, context)
            values.append(blockwise.reshape(batch, blocks * window, *blockwise.shape[2:])[:, :rest])
        change: Tensor = self.output(join(*values).flatten(2))
        return change

    def _attend_block(self, query: Tensor, keys: Tensor, position: Tensor, context: Context) -> Tensor:
        """Return the values [B, T, H, E] that queries [B, T, H·E] receive from keys and values [B, K, 2·G·E].

        The dimension B of the keys may be two, as in `fused.relative_attention`.

        The last T keys are at the positions of the queries; `position` [N, H, E] encodes the distances N - 1 … 0, and
        keys that are farther away are masked.
        """
        u, v = (context.u, context.v) if self.u is None else (self.u, self.v)
        values: Tensor = fused.relative_attention(
            self._heads(query),
            self.keys_by_head(keys),
            position[-keys.shape[-2] :],
            cast(Tensor, u),
            cast(Tensor, v),
            self.attention_dropout if self.training else 0.0,
        ).values
        return values

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:
        """Return multiply-adds per token: scores of masked keys included, distances projected once per segment."""
        d_model, inner, queries = self.query.in_features, self.query.out_features, tgt_len
        keys = distances = tgt_len + self.memory_tokens(reach)
        if self.window is not None:
            distances = self.window
            if tgt_len > self.window:
                keys, queries = 2 * self.window, math.ceil(tgt_len / self.window) * self.window  # the last is filled up
        # Query, key, value and output matrices; position matrix; content scores and weighted sum, position scores.
        products = d_model * (2 * inner + self.key_value.out_features + inner * distances / tgt_len)
        return products + (2 * keys + min(keys, distances)) * inner * queries / tgt_len

    def keys_by_head(self, keys: Tensor) -> Tensor:
        """Split keys and values […, 2·G·E] by head of the queries that use them, […, 2, H, E]."""
        by_head: Tensor = keys.unflatten(-1, (2, self.kv_heads, self.head_width))
        if self.kv_heads < self.n_heads:
            by_head = by_head.repeat_interleave(self.n_heads // self.kv_heads, dim=-2)
        return by_head

    def _heads(self, x: Tensor) -> Tensor:
        """Split the last dimension by head: […, H·E] to […, H, E]."""
        by_head: Tensor = x.unflatten(-1, (self.n_heads, -1))
        return by_head


def relative_biases(config: ModelConfig) -> tuple[nn.Parameter, nn.Parameter]:
    """Create the learned biases u (content) and v (distance), [H, E] each, with the initial value zero."""
    shape = config.n_heads, config.head_width
    return nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))


def in_product_dtype(x: Tensor) -> Tensor:
    """Return `x` in the dtype of autocast, in which its matrix products run; unchanged if autocast is disabled."""
    return x.to(fused.product_dtype(x))


@fused.cache_tensors
def _beyond_window(tgt_len: int, near_keys: int, far_keys: int, step: int, window: int, device: torch.device) -> Tensor:
    """Return a mask [T, K], true for keys that are `window` tokens or more before the query.

    The first `far_keys` keys are compressed positions, `step` tokens apart; the `near_keys` after them are one token
    apart.
    """
    # Distances from the first query; each later query adds 1. A compressed key counts by the mean of its `step` tokens.
    near = torch.arange(near_keys - tgt_len, -tgt_len, -1, device=device)
    far = near_keys - tgt_len + (step + 1) / 2 + step * torch.arange(far_keys - 1, -1, -1, device=device)
    return torch.arange(tgt_len, device=device)[:, None] + torch.cat([far, near]) >= window
