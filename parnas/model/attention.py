"""Relative multi-head attention over memory and segment (Dai et al. 2019, arXiv 1901.02860, section 3.3).

Vanilla attention adds position embeddings to the tokens; with memory, the same embedding would then mean different
positions in different segments. Relative attention encodes the distance between query and key instead. The score of
query i and key j is, for each head,

    (q_i + u)ᵀ k_j + (q_i + v)ᵀ W r_{i-j}

where r is the sinusoid of the distance and W projects it. The learned biases u (content) and v (distance) replace the
terms of vanilla attention with the position of the query. W r depends on i - j only, so K vectors are projected instead
of T · K: `fused.relative_attention` multiplies all queries with all distances once, and then shifts each row so that
columns stand for keys.

Shapes: B batch, T segment, M memory, K = M + T keys, H heads, E head width, D model width; C compressed positions.
"""

from typing import cast

import torch
from torch import Tensor, nn

from parnas.config.schema import ModelConfig, Reach
from parnas.model import fused
from parnas.model.blocks import BlockOutput, Context, ResidualLayer
from parnas.model.memory import BlockMemory, append_memory, join

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

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.n_heads, self.head_width = config.n_heads, config.head_width
        inner = self.n_heads * self.head_width
        self.query = nn.Linear(config.d_model, inner, bias=False)
        self.key_value = nn.Linear(config.d_model, 2 * inner, bias=False)
        self.position = nn.Linear(config.d_model, inner, bias=False)
        self.output = nn.Linear(inner, config.d_model, bias=False)
        self.attention_dropout = config.attention_dropout
        self.u: nn.Parameter | None = None
        self.v: nn.Parameter | None = None
        self.shares_biases = config.share_biases
        if not config.share_biases:
            self.u, self.v = relative_biases(config)

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:
        """Let the segment `x` [B, T, D] attend to memory and itself; return the output [B, T, D] and the new memory."""
        segment = in_product_dtype(self.normed(x))
        # 1. Keys and values of memory and segment, [B, K, 2·H·E].
        if context.inference:
            # The weights do not change, so memory stores keys and values themselves (a KV cache).
            keys = join(memory, self.key_value(segment))
            new_memory = append_memory(None, keys, context.reach.mem_len)
        else:
            # The weights change at every step, so memory stores inputs, and keys and values are computed again: W_k and
            # W_v get a gradient from memory positions too, although memory itself is detached.
            inputs = None if memory is None else self.normed(memory).to(segment.dtype)
            keys = self.key_value(join(inputs, segment))
            new_memory = append_memory(memory, x, context.reach.mem_len)
        # 2. Attend, then add to the input (residual connection).
        change, weights = self.attend(self.query(segment), keys, context, context.reach.mem_len)
        return BlockOutput(self.joined(x, change), new_memory, weights=weights)

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:
        """Return the memory that `forward` would return, without computing attention."""
        new = self.key_value(in_product_dtype(self.normed(x))) if context.inference else x
        return append_memory(memory, new, context.reach.mem_len)

    def attend(
        self, query: Tensor, keys: Tensor, context: Context, window: int, far_keys: int = 0, step: int = 1
    ) -> tuple[Tensor, Tensor]:
        """Compute attention; return its output projection [B, T, D] and the attention weights [H, B, T, K].

        Args:
            query: queries [B, T, H·E].
            keys: keys and values [B, K, 2·H·E].
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
            self._heads(keys.unflatten(-1, (2, -1))),  # [B, K, 2, H, E]
            self._heads(self.position(context.distances[-near_keys:].to(query.dtype))),  # [K - C, H, E]
            cast(Tensor, u),
            cast(Tensor, v),
            self.attention_dropout if self.training else 0.0,
            far,
            masked,
        )
        change: Tensor = self.output(values.flatten(2))  # [B, T, H·E] to [B, T, D]
        return change, weights

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:
        """Return multiply-adds per token: scores of masked keys included, distances projected once per segment."""
        d_model, inner, keys = self.query.in_features, self.query.out_features, tgt_len + reach.mem_len
        # Query, key, value and output matrices; position matrix; content scores, position scores and weighted sum.
        return 4 * d_model * inner + d_model * inner * keys / tgt_len + 3 * keys * inner

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
