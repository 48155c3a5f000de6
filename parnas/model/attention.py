"""Relative multi-head attention over memory and segment (Dai et al. 2019, arXiv 1901.02860, §3.3).

Shapes: B batch, T segment, M memory, K = M + T keys, H heads, E width of a head, D model width.
"""

import torch
from torch import Tensor, nn

from parnas.model import fused
from parnas.model.blocks import BlockOutput, Context, ResidualLayer
from parnas.model.memory import BlockMemory, join, remember
from parnas.sections import ModelConfig, Reach


@fused.made_once
def encode_distances(
    count: int, width: int, device: torch.device, least: float = 0.0, clamp_len: int | None = None
) -> Tensor:
    """Sinusoids of the distances `least + count - 1` … `least`, [count, width]: sines first, then cosines.

    Dai et al. 2019, §3.3. Distances beyond `clamp_len` count as that. Made once for each shape, and so not to be
    changed in place.
    """
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
        """Attend from the segment to memory and segment; memory is as `parnas.model.memory` says."""
        segment = in_product_dtype(self.normed(x))
        if context.inference:
            keys = join(memory, self.key_value(segment))  # [B, K, 2·H·E]
            kept = remember(None, keys, context.reach.mem_len)
        else:
            given = None if memory is None else self.normed(memory).to(segment.dtype)
            keys = self.key_value(join(given, segment))
            kept = remember(memory, x, context.reach.mem_len)
        change, weights = self.attend(self.query(segment), keys, context, context.reach.mem_len)
        return BlockOutput(self.joined(x, change), kept, weights=weights)

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:
        """As if it had run."""
        seen = self.key_value(in_product_dtype(self.normed(x))) if context.inference else x
        return remember(memory, seen, context.reach.mem_len)

    def attend(
        self, query: Tensor, keys: Tensor, context: Context, window: int, far_keys: int = 0, step: int = 1
    ) -> tuple[Tensor, Tensor]:
        """From queries [B, T, H·E] to keys and values [B, K, 2·H·E]: the output [B, T, D] and the weights [H, B, T, K].

        Distances are those of the context; the first `far_keys` keys have those of `context.far`, in steps of `step`.
        With `same_length` a query sees what is less than `window` before it.
        """
        u, v = (context.u, context.v) if self.u is None else (self.u, self.v)
        assert u is not None
        assert v is not None
        near_keys = keys.shape[1] - far_keys
        far = None
        if far_keys:
            assert context.far is not None
            far = fused.Far(self._heads(self.position(context.far.to(query.dtype))), far_keys, step)
        hidden = None
        if context.reach.same_length:
            hidden = beyond_window(query.shape[1], near_keys, far_keys, step, window, query.device)
        seen, weights = fused.relative_attention(
            self._heads(query),  # [B, T, H, E]
            self._heads(keys.unflatten(-1, (2, -1))),  # [B, K, 2, H, E]
            self._heads(self.position(context.distances[-near_keys:].to(query.dtype))),  # [K, H, E]
            u,
            v,
            self.attention_dropout if self.training else 0.0,
            far,
            hidden,
        )
        change: Tensor = self.output(seen.flatten(2))
        return change, weights

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:
        """Distances are projected anew for each segment; masked scores are computed too."""
        d_model, inner, keys = self.query.in_features, self.query.out_features, tgt_len + reach.mem_len
        return 4 * d_model * inner + d_model * inner * keys / tgt_len + 3 * keys * inner

    def _heads(self, x: Tensor) -> Tensor:
        """[…, H·E] to […, H, E]."""
        by_head: Tensor = x.unflatten(-1, (self.n_heads, -1))
        return by_head


def relative_biases(config: ModelConfig) -> tuple[nn.Parameter, nn.Parameter]:
    """The biases u (content) and v (position), each [H, E], in place of the query's own position."""
    shape = config.n_heads, config.head_width
    return nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))


def in_product_dtype(x: Tensor) -> Tensor:
    """`x` in the type that matrix products are computed in."""
    return x.to(fused.product_dtype(x))


@fused.made_once
def beyond_window(tgt_len: int, near_keys: int, far_keys: int, step: int, window: int, device: torch.device) -> Tensor:
    """[T, C + K] mask of the keys that are `window` or more before the query; C of them are far."""
    near = torch.arange(near_keys - tgt_len, -tgt_len, -1, device=device)  # distances from the first query
    far = near_keys - tgt_len + (step + 1) / 2 + step * torch.arange(far_keys - 1, -1, -1, device=device)
    return torch.arange(tgt_len, device=device)[:, None] + torch.cat([far, near]) >= window
