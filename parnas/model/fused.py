"""Operations with gradients written by hand, where autograd would copy and zero-fill more than it computes.

Their plain twins are in `benchmarks/plain.py`; the tests compare the two, the benchmarks say what they gain.
Shapes: B batch, T segment, K = M + T keys, H heads, E width of a head, N rows, V symbols.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BITS = 16  # random bits for each element of a dropout mask


class RelativeAttention(torch.autograd.Function):
    """softmax(((q + u) kᵀ + shift((q + v) rᵀ)) / √E + bias) values, for all heads (Dai et al. 2019, §3.3).

    The relative shift is a view: in the flat [T·K] scores by distance, column k of row t lies at t (K - 1) + k + T - 1,
    so that all but the last key of all rows are one contiguous piece, and of the last key only the last row is seen.
    Heads come before rows, so that (q + v) rᵀ is one product for the whole batch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_value: Tensor,
        position: Tensor,
        u: Tensor,
        v: Tensor,
        bias: Tensor,
        dropout: float,
    ) -> Tensor:
        """[B, T, H, E], given query [B, T, H, E], key_value [B, K, 2, H, E], position [K, H, E] and bias [T, K]."""
        batch, tgt_len, heads, width = query.shape
        keys, dtype, scale = key_value.shape[1], query.dtype, 1 / math.sqrt(width)
        by_head = query.permute(2, 0, 1, 3)  # [H, B, T, E]
        qu = torch.mul(by_head + u.to(dtype)[:, None, None], scale).reshape(-1, tgt_len, width)
        qv = torch.mul(by_head + v.to(dtype)[:, None, None], scale).reshape(heads, -1, width)
        key, value = key_value.permute(2, 3, 0, 1, 4).reshape(2, -1, keys, width)  # [H B, K, E] each
        position = position.transpose(0, 1).contiguous()  # [H, K, E]
        by_distance = torch.bmm(qv, position.transpose(1, 2)).view(-1, tgt_len * keys)
        scores = torch.baddbmm(bias.to(dtype).expand(len(key), -1, -1), qu, key.transpose(1, 2))
        scores[:, :, :-1] += by_distance[:, tgt_len - 1 : -1].view(len(key), tgt_len, keys - 1)
        scores[:, -1, -1] += by_distance[:, -1]
        weights = scores.softmax(dim=-1, dtype=exact(dtype)).to(dtype)
        kept = keep_mask(weights, dropout) if dropout else None
        dropped = weights if kept is None else weights * kept / (1 - dropout)
        seen = torch.bmm(dropped, value)  # [H B, T, E]
        ctx.save_for_backward(qu, qv, key, value, position, weights, kept)
        ctx.dropout, ctx.scale = dropout, scale
        return seen.view(heads, batch, tgt_len, width).permute(1, 2, 0, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all but the bias and the dropout."""
        qu, qv, key, value, position, weights, kept = ctx.saved_tensors
        batch, tgt_len, heads, width = grad.shape
        keys = key.shape[1]
        grad = grad.permute(2, 0, 1, 3).reshape(-1, tgt_len, width)  # [H B, T, E]
        d_weights = torch.bmm(grad, value.transpose(1, 2))
        dropped = weights
        if kept is not None:
            dropped = weights * kept / (1 - ctx.dropout)
            d_weights = d_weights * kept / (1 - ctx.dropout)
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, weights.dtype)
        d_distance = torch.empty_like(d_scores).view(-1, tgt_len * keys)
        d_distance[:, : tgt_len - 1] = 0
        d_distance[:, tgt_len - 1 : -1].view(len(key), tgt_len, keys - 1).copy_(d_scores[:, :, :-1])
        d_distance[:, -1] = d_scores[:, -1, -1]
        d_distance = d_distance.view(heads, -1, keys)  # [H, B T, K]
        d_qu = torch.bmm(d_scores, key).view(heads, -1, width)
        d_qv = torch.bmm(d_distance, position)
        d_query = torch.empty(batch, tgt_len, heads, width, dtype=grad.dtype, device=grad.device)
        torch.add(d_qu, d_qv, out=(added := torch.empty_like(d_qu)))
        torch.mul(added.view(heads, batch, tgt_len, width), ctx.scale, out=d_query.permute(2, 0, 1, 3))
        d_key_value = torch.empty(batch, keys, 2, heads, width, dtype=grad.dtype, device=grad.device)
        by_head = d_key_value.permute(2, 3, 0, 1, 4)
        by_head[0] = torch.bmm(d_scores.transpose(1, 2), qu).view(heads, batch, keys, width)
        by_head[1] = torch.bmm(dropped.transpose(1, 2), grad).view(heads, batch, keys, width)
        d_position = torch.bmm(d_distance.transpose(1, 2), qv).transpose(0, 1)
        d_u, d_v = (part.sum(dim=1, dtype=exact(part.dtype)) * ctx.scale for part in (d_qu, d_qv))
        return d_query, d_key_value, d_position, d_u, d_v, None, None


class LinearCrossEntropy(torch.autograd.Function):
    """-log softmax(hidden weightᵀ + bias)[target] of each row, keeping one matrix of [N, V] for the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        """[N] in nats and float32, given hidden [N, E], weight [V, E], bias [V] and targets [N]."""
        dtype = product_dtype(hidden)
        # The bias is the weight of a hidden value that is always 1: one product, where adding it would be a second pass.
        hidden = torch.cat([hidden, hidden.new_ones(len(hidden), 1)], dim=1).to(dtype)
        weight_and_bias = torch.cat([weight, bias[:, None]], dim=1).to(dtype)
        log_probs = (hidden @ weight_and_bias.t()).log_softmax(dim=-1, dtype=torch.float32)
        rows = torch.arange(len(targets), device=targets.device)
        nll = -log_probs[rows, targets]
        if any(ctx.needs_input_grad):
            d_logits = log_probs.exp_()  # of nll with regard to the logits: probabilities, less 1 at the target
            d_logits[rows, targets] -= 1
            ctx.save_for_backward(hidden, weight_and_bias, d_logits.to(dtype))
            ctx.dtypes = weight.dtype, bias.dtype
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scales the narrow side of each product by `grad` [N], not the wide one."""
        hidden, weight_and_bias, d_logits = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        column = grad.to(hidden.dtype)[:, None]
        d_hidden = (d_logits @ weight_and_bias[:, :-1]) * column
        d_both = (hidden * column).t() @ d_logits  # [E + 1, V]
        return d_hidden, d_both[:-1].t().to(weight_dtype), d_both[-1].to(bias_dtype), None


class Dropout(torch.autograd.Function):
    """Dropout whose mask takes 16 random bits for an element: on CPU, torch draws a double for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        """`x` with elements zeroed with probability `p` and the others divided by 1 - p; any shape."""
        ctx.kept, ctx.scale = keep_mask(x, p), 1 / (1 - p)
        return torch.addcmul(x.new_zeros(()), x, ctx.kept, value=ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The same mask."""
        return torch.addcmul(grad.new_zeros(()), grad, ctx.kept, value=ctx.scale), None


def keep_mask(like: Tensor, p: float) -> Tensor:
    """Ones with probability 1 - p (rounded to 2^-16), else zeros; shape, type and device of `like`."""
    if like.device.type != "cpu":
        return torch.empty_like(like).bernoulli_(1 - p)
    words = torch.empty(-(-like.numel() * BITS // 64), dtype=torch.int64).random_(-(2**63), None)
    draws = words.view(torch.int16)[: like.numel()].view(like.shape)
    return (draws >= round(p * 2**BITS) - 2 ** (BITS - 1)).to(like.dtype)


def exact(dtype: torch.dtype) -> torch.dtype:
    """The type for sums: float32, or float64 for what is in float64."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(x: Tensor) -> torch.dtype:
    """The type that matrix products of `x` are computed in: that of autocast where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
