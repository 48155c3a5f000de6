"""Fused operations with hand-written gradients, where autograd would copy and zero-fill more than it computes.

`benchmarks/plain.py` holds their plain twins: the tests compare the two, the benchmarks measure the gain.
Shapes: B batch, T segment, K = M + T keys, H heads, E head width, N rows, V symbols.
"""

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import _get_current_dispatch_mode

_BITS = 16  # random bits for each element of a dropout mask

Make = TypeVar("Make", bound=Callable[..., Tensor])


def made_once(make: Make) -> Make:
    """Cache the tensors that a function makes of its arguments; they must not be changed in place.

    Nothing is cached while a compiler or a dispatch mode runs, whose tensors may be of another kind.
    """
    cached = lru_cache(maxsize=32)(make)

    @wraps(make)
    def get(*arguments: Any) -> Tensor:
        watched = torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None
        return make(*arguments) if watched else cached(*arguments)

    return cast(Make, get)


class Attended(NamedTuple):
    """The result of attention."""

    seen: Tensor  # [B, T, H, E], before the output projection
    weights: Tensor  # [H, B, T, K], before dropout, without gradient


class Far(NamedTuple):
    """Keys before the others whose distances fall in steps larger than 1, such as those of compressed memory."""

    position: Tensor  # [L, H, E] of distances falling by 1; the query at t reads every step-th from L - T + t
    keys: int  # C of them
    step: int


def relative_attention(
    query: Tensor,
    key_value: Tensor,
    position: Tensor,
    u: Tensor,
    v: Tensor,
    dropout: float,
    far: Far | None = None,
    hidden: Tensor | None = None,
) -> Attended:
    """Return relative multi-head attention over memory and segment; see `RelativeAttention`.

    Args:
        query: [B, T, H, E].
        key_value: keys and values [B, K, 2, H, E].
        position: projected sinusoids of the distances K - 1 … 0, [K, H, E].
        u: content bias [H, E].
        v: position bias [H, E].
        dropout: probability of dropping an attention weight.
        far: describes the first C keys; `position` then covers the others only.
        hidden: mask [T, K], true where a query must not see a key, besides the keys after it.
    """
    parts = (None, 0, 1) if far is None else far
    result = RelativeAttention.apply(query, key_value, position, u, v, dropout, *parts, hidden)  # type: ignore[no-untyped-call]
    return Attended(*result)


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float = 0.0
) -> Tensor:
    """Return -log softmax(hidden weightᵀ + bias)[target] of each row in nats, [N] in float32.

    The gradient is that of (1 - smoothing) times this plus smoothing times the mean of -log softmax over all V (Szegedy
    et al. 2016, section 7). See `LinearCrossEntropy`.

    Args:
        hidden: [N, E].
        weight: [V, E].
        bias: [V].
        targets: [N].
        smoothing: share of the label smoothing.
    """
    if not torch.is_grad_enabled():  # which `forward` below cannot see
        hidden, weight, bias = hidden.detach(), weight.detach(), bias.detach()
    nll: Tensor = LinearCrossEntropy.apply(hidden, weight, bias, targets, smoothing)  # type: ignore[no-untyped-call]
    return nll


def dropout(x: Tensor, p: float) -> Tensor:
    """Return `x`, of any shape, with elements zeroed with probability `p` and the others divided by 1 - p."""
    dropped: Tensor = DropoutFunction.apply(x, p)  # type: ignore[no-untyped-call]
    return dropped


class RelativeAttention(torch.autograd.Function):
    """softmax(((q + u) kᵀ + shift((q + v) rᵀ)) / √E), masked, times the values, for all heads (Dai et al. 2019, §3.3).

    (q + v) rᵀ gives scores by distance; the relative shift turns them into scores by key. The shift is a view: in the
    flat [T·K] scores by distance, column k of row t lies at t (K - 1) + k + T - 1. For keys after the query that place
    belongs to the next row, among columns that no query reads; setting these to -inf therefore masks all scores but
    those of the last column. Heads come before rows of the batch, so that (q + v) rᵀ is one product for the whole
    batch.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key_value: Tensor,
        position: Tensor,
        u: Tensor,
        v: Tensor,
        dropout: float,
        far: Tensor | None,
        far_keys: int,
        step: int,
        hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Compute attention; arguments as for `relative_attention`."""
        batch, tgt_len, heads, width = query.shape
        keys, near_keys, scale = key_value.shape[1], len(position), 1 / math.sqrt(width)
        # 1. q + u and q + v, scaled.
        by_head = (query * scale).permute(2, 0, 1, 3)  # [H, B, T, E]
        qu, qv = query.new_empty(2, heads, batch, tgt_len, width)
        for target, bias in ((qu, u), (qv, v)):
            torch.add(by_head, (bias * scale).to(query.dtype)[:, None, None], out=target)
        key, value = key_value.permute(2, 3, 0, 1, 4).reshape(2, -1, keys, width)  # [H B, K, E] each
        # 2. Position scores by distance; columns that no query reads become -inf.
        position = position.transpose(0, 1).contiguous()  # [H, K - C, E]
        by_distance = torch.bmm(qv.flatten(1, 2), position.mT).view(-1, tgt_len, near_keys)  # [H B, T, K - C]
        unread = unread_distances(tgt_len, query.device)
        by_distance[:, :, : tgt_len - 1].masked_fill_(unread, -math.inf)
        # 3. Content scores plus shifted position scores.
        if far is None:
            scores = torch.baddbmm(_shift_view(by_distance, keys), qu.flatten(0, 1), key.mT)
        else:
            far = far.transpose(0, 1).contiguous()  # [H, L, E]
            by_far = torch.bmm(qv.flatten(1, 2), far.mT).view(-1, tgt_len, far.shape[1])
            scores = torch.bmm(qu.flatten(0, 1), key.mT)
            scores[:, :, :far_keys] += _shift_view(by_far, far_keys, step)
            scores[:, :, far_keys:] += _shift_view(by_distance, near_keys)
        # 4. Mask, softmax, dropout, weighted sum of the values.
        scores[:, :-1, -1] = -math.inf
        if hidden is not None:
            scores.masked_fill_(hidden, -math.inf)
        weights = torch._softmax(scores, -1, False)
        mask = keep_mask(weights, dropout) if dropout else None
        seen = torch.bmm(drop(weights, mask, dropout), value)
        given = weights.view(heads, batch, tgt_len, keys)
        ctx.mark_non_differentiable(given)
        ctx.save_for_backward(qu, qv, key, value, position, far, weights, mask)
        ctx.dropout, ctx.scale, ctx.far_keys, ctx.step = dropout, scale, far_keys, step
        return seen.view(heads, batch, tgt_len, width).permute(1, 2, 0, 3), given

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of all tensors but the mask."""
        qu, qv, key, value, position, far, weights, mask = ctx.saved_tensors
        heads, batch, tgt_len, width = qu.shape
        keys = key.shape[1]
        grad = grad.permute(2, 0, 1, 3).reshape(-1, tgt_len, width)  # [H B, T, E]
        d_weights = drop(torch.bmm(grad, value.mT), mask, ctx.dropout)
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, grad.dtype)
        d_near = d_scores[:, :, ctx.far_keys :]
        d_distance = torch.empty(d_near.shape, dtype=d_near.dtype, device=d_near.device)
        d_distance[:, :, : tgt_len - 1] = 0
        _shift_view(d_distance, d_near.shape[-1])[:, :, :-1] = d_near[:, :, :-1]
        d_distance[:, -1, -1] = d_near[:, -1, -1]
        d_distance = d_distance.view(heads, -1, d_near.shape[-1])  # [H, B T, K - C]
        d_qu = torch.bmm(d_scores, key).view_as(qu)
        d_qv = torch.bmm(d_distance, position).view_as(qv)
        d_far = None
        if far is not None:
            d_by_far = d_scores.new_zeros(len(d_scores), tgt_len, far.shape[1])
            _shift_view(d_by_far, ctx.far_keys, ctx.step).copy_(d_scores[:, :, : ctx.far_keys])
            d_by_far = d_by_far.view(heads, -1, far.shape[1])  # [H, B T, L]
            d_qv += torch.bmm(d_by_far, far).view_as(qv)
            d_far = torch.bmm(d_by_far.mT, qv.flatten(1, 2)).transpose(0, 1)
        d_query = grad.new_empty(batch, tgt_len, heads, width)
        torch.add(d_qu, d_qv, out=d_query.permute(2, 0, 1, 3))
        d_key_value = grad.new_empty(batch, keys, 2, heads, width)
        d_key, d_value = d_key_value.permute(2, 3, 0, 1, 4)  # [H, B, K, E] each
        d_key.copy_(torch.bmm(d_scores.mT, qu.flatten(0, 1)).view_as(d_key))
        d_value.copy_(torch.bmm(drop(weights, mask, ctx.dropout).mT, grad).view_as(d_value))
        d_position = torch.bmm(d_distance.mT, qv.flatten(1, 2)).transpose(0, 1)
        d_u, d_v = (grads.flatten(1, 2).sum(dim=1, dtype=exact(grads.dtype)) * ctx.scale for grads in (d_qu, d_qv))
        return d_query.mul_(ctx.scale), d_key_value, d_position, d_u, d_v, None, d_far, None, None, None


def _shift_view(by_distance: Tensor, keys: int, step: int = 1) -> Tensor:
    """Return scores by key as a view of contiguous scores by distance: the relative shift.

    Entry [n, t, k] of the view [N, T, keys] is entry [n, t, T - 1 - t + k · step] of `by_distance` [N, T, L], whose
    distances fall by 1 per column. Entries of keys after the query are meaningless: see `RelativeAttention`.
    """
    count, tgt_len, distances = by_distance.shape
    return by_distance.as_strided(
        (count, tgt_len, keys),
        (tgt_len * distances, distances - 1, step),
        by_distance.storage_offset() + tgt_len - 1,
    )


@made_once
def unread_distances(tgt_len: int, device: torch.device) -> Tensor:
    """Return a [T, T - 1] mask of the first columns of scores by distance, true where no query reads them."""
    return torch.ones(tgt_len, tgt_len - 1, dtype=torch.bool, device=device).triu().flip(1)


def drop(weights: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Return the weights after dropout, or unchanged where `mask` is `None`."""
    return weights if mask is None else weights * mask / (1 - p)


class LinearCrossEntropy(torch.autograd.Function):
    """Linear layer and cross-entropy that keep a single [N, V] matrix for the gradient, in the type of matrix products.

    Smoothing enters the gradient only: the value needs no sum over V, and compares with that of an evaluation.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float) -> Tensor:
        """Compute the losses; arguments as for `linear_cross_entropy`."""
        dtype = product_dtype(hidden)
        hidden, weight_cast = hidden.to(dtype), weight.to(dtype)
        log_probs = torch.addmm(bias.to(dtype), hidden, weight_cast.t()).log_softmax(dim=-1, dtype=torch.float32)
        rows = torch.arange(len(targets), device=targets.device)
        nll = -log_probs[rows, targets]
        if any(ctx.needs_input_grad):
            d_logits = log_probs.exp_()  # gradient of the logits: predicted minus target probabilities
            d_logits[rows, targets] -= 1 - smoothing
            if smoothing:
                d_logits -= smoothing / len(bias)
            ctx.save_for_backward(hidden, weight_cast, d_logits.to(dtype))
            ctx.dtypes = weight.dtype, bias.dtype
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients; `grad` [N] scales the narrow side of each product."""
        hidden, weight, d_logits = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        column = grad.to(hidden.dtype)[:, None]
        d_hidden = (d_logits @ weight) * column
        # The bias is the weight of a hidden value that is always 1.
        d_both = d_logits.t() @ torch.cat([hidden * column, column], dim=1)  # [V, E + 1]
        return d_hidden, d_both[:, :-1].to(weight_dtype), d_both[:, -1].to(bias_dtype), None, None


class DropoutFunction(torch.autograd.Function):
    """Dropout whose mask takes 16 random bits per element; on a CPU torch draws a double for each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        """Apply dropout; see `dropout`."""
        mask, ctx.scale = keep_mask(x, p), 1 / (1 - p)
        ctx.save_for_backward(mask)  # as an attribute it would outlive the backward pass
        return torch.addcmul(x.new_zeros(()), x, mask, value=ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient through the same mask."""
        (mask,) = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), grad, mask, value=ctx.scale), None


def keep_mask(like: Tensor, p: float) -> Tensor:
    """Return ones with probability 1 - p (rounded to 2^-16), else zeros, with shape, type and device of `like`."""
    if like.device.type != "cpu":
        return torch.empty_like(like).bernoulli_(1 - p)
    words = torch.empty(-(-like.numel() * _BITS // 64), dtype=torch.int64).random_(-(2**63), None)
    draws = words.view(torch.int16)[: like.numel()].view(like.shape)
    # In place, since ones and zeros of type bool would take longer to convert than to draw.
    return draws.ge_(round(p * 2**_BITS) - 2 ** (_BITS - 1)).to(like.dtype)


def exact(dtype: torch.dtype) -> torch.dtype:
    """Return the type for sums: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the type of the matrix products of `x`: that of autocast where it is on."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
