"""Operations with gradients written by hand, where autograd would copy and zero-fill more than it computes.

Their plain twins are in `benchmarks/plain.py`; the tests compare the two, the benchmarks say what they gain.
Shapes: B batch, T segment, K = M + T keys, H heads, E width of a head, N rows, V symbols.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

CACHED_SCORES = 1 << 19  # attention scores that a core's cache holds with what is made of them
BITS = 16  # random bits for each element of a dropout mask


class RelativeAttention(torch.autograd.Function):
    """softmax(((q + u) kᵀ + shift((q + v) rᵀ)) / √E + bias) values, for all heads (Dai et al. 2019, §3.3).

    The relative shift is a view: in the flat [T·K] scores by distance, column k of row t lies at t (K - 1) + k + T - 1,
    so that all but the last key of all rows are one contiguous piece, and of the last key only the last row is seen.
    Heads come before rows, so that (q + v) rᵀ is one product for the whole batch; on CPU a few heads at a time, so
    that their scores stay in the cache from one operation to the next.
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
        by_head = query.permute(2, 0, 1, 3)
        qu, qv = ((by_head + b.to(dtype)[:, None, None]).mul_(scale).contiguous() for b in (u, v))  # [H, B, T, E]
        key, value = key_value.permute(2, 3, 0, 1, 4).contiguous()  # [H, B, K, E] each
        position = position.transpose(0, 1).contiguous()  # [H, K, E]
        bias = bias.to(dtype)
        weights = query.new_empty(heads, batch, tgt_len, keys)
        kept = keep_mask(weights, dropout) if dropout else None
        seen = torch.empty_like(qu)
        for part in split_heads(weights):
            by_distance = torch.bmm(qv[part].flatten(1, 2), position[part].mT).view(-1, tgt_len * keys)  # [h B, T K]
            scores = torch.baddbmm(bias, qu[part].flatten(0, 1), key[part].flatten(0, 1).mT)  # [h B, T, K]
            scores[:, :, :-1] += by_distance[:, tgt_len - 1 : -1].view(len(scores), tgt_len, keys - 1)
            scores[:, -1, -1] += by_distance[:, -1]
            weights[part] = torch._softmax(scores, -1, False).view_as(weights[part])
            dropped = drop(weights, kept, dropout, part)
            seen[part] = torch.bmm(dropped, value[part].flatten(0, 1)).view_as(seen[part])
        ctx.save_for_backward(qu, qv, key, value, position, weights, kept)
        ctx.dropout, ctx.scale = dropout, scale
        return seen.permute(1, 2, 0, 3)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Gradients of all but the bias and the dropout."""
        qu, qv, key, value, position, weights, kept = ctx.saved_tensors
        heads, batch, tgt_len, keys = weights.shape
        width = qu.shape[-1]
        grad = grad.permute(2, 0, 1, 3).contiguous()  # [H, B, T, E]
        d_query = grad.new_empty(batch, tgt_len, heads, width)
        d_key_value = grad.new_empty(batch, keys, 2, heads, width)
        d_key, d_value = d_key_value.permute(2, 3, 0, 1, 4)  # [H, B, K, E] each
        d_position = torch.empty_like(position)
        d_u, d_v = (torch.empty(heads, width, dtype=exact(grad.dtype), device=grad.device) for _ in range(2))
        for part in split_heads(weights):
            d_seen = grad[part].flatten(0, 1)
            d_weights = torch.bmm(d_seen, value[part].flatten(0, 1).mT)
            dropped = drop(weights, kept, ctx.dropout, part)
            d_value[part] = torch.bmm(dropped.mT, d_seen).view_as(d_value[part])
            if kept is not None:
                d_weights = d_weights * kept[part].flatten(0, 1) / (1 - ctx.dropout)
            d_scores = torch._softmax_backward_data(d_weights, weights[part].flatten(0, 1), -1, grad.dtype)
            d_distance = torch.empty_like(d_scores).view(-1, tgt_len * keys)
            d_distance[:, : tgt_len - 1] = 0
            d_distance[:, tgt_len - 1 : -1].view(len(d_scores), tgt_len, keys - 1).copy_(d_scores[:, :, :-1])
            d_distance[:, -1] = d_scores[:, -1, -1]
            d_distance = d_distance.view(-1, batch * tgt_len, keys)  # [h, B T, K]
            d_qu = torch.bmm(d_scores, key[part].flatten(0, 1)).view_as(qu[part]).mul_(ctx.scale)
            d_qv = torch.bmm(d_distance, position[part]).view_as(d_qu).mul_(ctx.scale)
            d_query[:, :, part] = (d_qu + d_qv).permute(1, 2, 0, 3)
            d_key[part] = torch.bmm(d_scores.mT, qu[part].flatten(0, 1)).view_as(d_key[part])
            d_position[part] = torch.bmm(d_distance.mT, qv[part].flatten(1, 2))
            d_u[part], d_v[part] = (of.flatten(1, 2).sum(dim=1, dtype=d_u.dtype) for of in (d_qu, d_qv))
        return d_query, d_key_value, d_position.transpose(0, 1), d_u, d_v, None, None


def split_heads(weights: Tensor) -> Iterator[slice]:
    """Ranges of heads of `weights` [H, B, T, K] whose scores fit into the cache; on GPU all at once."""
    heads = len(weights)
    step = heads if weights.device.type != "cpu" else max(1, CACHED_SCORES * heads // weights.numel())
    return (slice(start, min(start + step, heads)) for start in range(0, heads, step))


def drop(weights: Tensor, kept: Tensor | None, p: float, part: slice) -> Tensor:
    """Attention weights of some heads after dropout, [h B, T, K]."""
    chosen = weights[part].flatten(0, 1)
    return chosen if kept is None else chosen * kept[part].flatten(0, 1) / (1 - p)


class LinearCrossEntropy(torch.autograd.Function):
    """-log softmax(hidden weightᵀ + bias)[target] of each row, keeping one matrix of [N, V] for the gradient."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        """[N] in nats and float32, given hidden [N, E], weight [V, E], bias [V] and targets [N]."""
        dtype = product_dtype(hidden)
        hidden, weight_cast = hidden.to(dtype), weight.to(dtype)
        log_probs = torch.addmm(bias.to(dtype), hidden, weight_cast.t()).log_softmax(dim=-1, dtype=torch.float32)
        rows = torch.arange(len(targets), device=targets.device)
        nll = -log_probs[rows, targets]
        if any(ctx.needs_input_grad):
            d_logits = log_probs.exp_()  # of nll with regard to the logits: probabilities, less 1 at the target
            d_logits[rows, targets] -= 1
            ctx.save_for_backward(hidden, weight_cast, d_logits.to(dtype))
            ctx.dtypes = weight.dtype, bias.dtype
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Scales the narrow side of each product by `grad` [N], not the wide one."""
        hidden, weight, d_logits = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        column = grad.to(hidden.dtype)[:, None]
        d_hidden = (d_logits @ weight) * column
        # The bias is the weight of a hidden value that is always 1.
        d_both = d_logits.t() @ torch.cat([hidden * column, column], dim=1)  # [V, E + 1]
        return d_hidden, d_both[:, :-1].to(weight_dtype), d_both[:, -1].to(bias_dtype), None


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
