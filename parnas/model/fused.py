"""Relative attention, linear layer + cross-entropy, and dropout as single operations with hand-written gradients.

Written as a series of torch operations, each would spend more memory traffic on copies and zero-filled gradients than
on its computation. `benchmarks/plain.py` has these textbook forms; the tests check values and gradients against them,
the benchmarks measure the gain.

Shapes: B batch, T segment, M memory, K = M + T keys, H heads, E head width; C far keys at L distances (compressed
memory); N rows, V symbols.
"""

import math
from collections.abc import Callable
from functools import lru_cache, wraps
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

__all__ = ["SoftTargets"]

_BITS = 16  # random bits for each element of a dropout mask

_Make = TypeVar("_Make", bound=Callable[..., Tensor])


def cache_tensors(make: _Make) -> _Make:
    """Decorate a function that creates a tensor: cache its results by arguments. Do not change results in place."""
    cached = lru_cache(maxsize=32)(make)

    @wraps(make)
    def get(*arguments: Any) -> Tensor:
        return make(*arguments) if is_traced() else cached(*arguments)

    return cast(_Make, get)


def is_traced() -> bool:
    """Return whether a compiler or a dispatch mode (FLOP counter, fake tensors) is active.

    They make tensors of their own, which must not be cached.
    """
    return torch.compiler.is_compiling() or _get_current_dispatch_mode() is not None


class Attended(NamedTuple):
    """The result of `relative_attention`."""

    values: Tensor  # [B, T, H, E] sums of values weighted by attention, before the output projection
    weights: Tensor  # [H, B, T, K] of attention, before dropout, without gradient


class Far(NamedTuple):
    """The far keys: the first C keys, those of compressed memory, each `step` tokens from the next."""

    position: Tensor  # [L, H, E] projected sinusoids of L distances, each smaller by 1 than the one before
    keys: int  # C
    step: int  # number of tokens from one far key to the next


def relative_attention(
    query: Tensor,
    key_value: Tensor,
    position: Tensor,
    u: Tensor,
    v: Tensor,
    dropout: float,
    far: Far | None = None,
    masked: Tensor | None = None,
) -> Attended:
    """Compute relative multi-head attention over memory and segment (Dai et al. 2019, section 3.3).

    Args:
        query: [B, T, H, E].
        key_value: keys and values [B, K, 2, H, E]; the dimension B may be several, [B1, B2, K, 2, H, E], which need not
            be contiguous.
        position: projected sinusoids of the distances P - 1 … 0, [P, H, E], P <= K; keys that are P or more positions
            before a query are masked.
        u: content bias [H, E].
        v: position bias [H, E].
        dropout: probability of dropping an attention weight.
        far: the C far keys of compressed memory, if any; `position` [K - C, H, E] is then for the remaining keys.
        masked: mask [T, K], true where a query must not see a key; keys after the query are always masked.
    """
    fields = (None, 0, 1) if far is None else far
    result = _RelativeAttention.apply(query, key_value, position, u, v, dropout, *fields, masked)  # type: ignore[no-untyped-call]
    return Attended(*result)


class SoftTargets(NamedTuple):
    """What teachers predict, as further targets of a softmax (distillation, Hinton et al. 2015, arXiv 1503.02531)."""

    probabilities: Tensor  # [N, V] of the teachers at the temperature, without gradient
    weight: float  # w, of these targets; that of the true ones is 1 - w
    temperature: float  # T


def overlapping_blocks(x: Tensor, size: int) -> Tensor:
    """Return each block of `size` positions with the one after it, [B, n, 2 · size, C], as a view of `x`.

    `x` is [B, (n + 1) · size, C].

    The gradient is that of `unfold`, without its slow sum over positions.
    """
    blocks: Tensor = _OverlappingBlocks.apply(x, size)  # type: ignore[no-untyped-call]
    return blocks


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    smoothing: float = 0.0,
    soft: SoftTargets | None = None,
) -> Tensor:
    """Return -log softmax(hidden weightᵀ + bias)[target] of each row in nats, [N] in float32.

    With label smoothing s the gradient is that of (1 - s) · (-log p[target]) + s · mean over V of -log p (Szegedy et
    al. 2016, section 7), while the value stays -log p[target], so that training and evaluation losses are comparable.
    With soft targets the gradient is (1 - w) times this one, plus that of w · T² · KL(teachers ‖ p) with both at the
    temperature T; the value stays the same, too.

    Args:
        hidden: [N, E].
        weight: [V, E].
        bias: [V].
        targets: [N].
        smoothing: s, the part of the target probability that label smoothing spreads evenly over all V symbols.
        soft: the predictions of teachers.
    """
    # Inside an autograd function the grad mode is always off, so `forward` looks at `needs_input_grad` instead, which
    # knows nothing of `no_grad`: detached inputs tell it that no gradient will be asked for.
    if not torch.is_grad_enabled():
        hidden, weight, bias = hidden.detach(), weight.detach(), bias.detach()
    nll: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, weight, bias, targets, smoothing, *(soft or (None, 0.0, 1.0))
    )
    return nll


def add_features(own: Tensor, shared: Tensor, features: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
    """Return the vector of each token, its own plus those of its features, [V, D] in the dtype of matrix products.

    Args:
        own: vectors of tokens [V, D].
        shared: vectors of features [R, D].
        features: features of each token, [V, J].
        tokens: the tokens of each feature, feature by feature, [V · J].
        starts: where the tokens of each feature start in `tokens`, [R].
    """
    summed: Tensor = _AddFeatures.apply(own, shared, features, tokens, starts)  # type: ignore[no-untyped-call]
    return summed


def mix_copying(nll: Tensor, sentinel: Tensor, scores: Tensor, copies: Tensor) -> Tensor:
    """Return the negative log-likelihood in nats of targets that are copied or drawn from a softmax, [B, T] in float32.

    The probability of a target is a(g) exp(-nll) + the sum of a(k) over the K positions that are copies of it, where a
    is the softmax over the sentinel g and all positions.

    Args:
        nll: negative log-likelihood of each target by the softmax, [B, T].
        sentinel: score of the softmax, [B, T].
        scores: scores of the positions, [B, T, K].
        copies: whether a position is a copy of the target, bool [B, T, K].
    """
    if not torch.is_grad_enabled():  # see `linear_cross_entropy`
        nll, sentinel, scores = nll.detach(), sentinel.detach(), scores.detach()
    mixed: Tensor = _MixCopying.apply(nll, sentinel, scores, copies)  # type: ignore[no-untyped-call]
    return mixed


def dropout(x: Tensor, p: float) -> Tensor:
    """Zero each element of `x` (any shape) with probability `p`, and divide the others by 1 - p."""
    dropped: Tensor = _Dropout.apply(x, p)  # type: ignore[no-untyped-call]
    return dropped


class _RelativeAttention(torch.autograd.Function):
    """softmax(((q + u) kᵀ + shift((q + v) rᵀ)) / √E), masked, times the values, for all heads (Dai et al. 2019, §3.3).

    The relative shift. (q + v) rᵀ has one column per *distance*, K - 1 … 0; softmax needs one column per *key*. The
    query in row t of T follows M memory positions, so it is at position M + t, its distance to key k is M + t - k, and
    the score of this distance is in column T - 1 - t + k. So each row has to be shifted left by one less than the row
    above. For T = 3, M = 1, with a … d the scores of distances 3 … 0:

        by distance      by key (x: after the query, to be masked)
        a b c d          c d x x
        a b c d          b c d x
        a b c d          a b c d

    In flat memory, column k of row t lies at t·K + (T - 1 - t + k) = t (K - 1) + k + T - 1: a view with row stride
    K - 1, no copy. Where k is after the query, this place is in the next row, among the first columns, which the query
    of that row does not use. So setting the unused columns to -inf before the shift applies the causal mask, to T²
    entries per head instead of T·K. Only the last key needs a separate mask: its place is used by the next row.
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
        masked: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Return values and weights as in `Attended`; arguments as for `relative_attention`.

        `far`, `far_keys` and `step` are the fields `position`, `keys` and `step` of a `Far`.
        """
        batch, tgt_len, heads, width = query.shape
        keys, distances, scale = key_value.shape[-4], len(position), 1 / math.sqrt(width)
        near_keys = keys - far_keys  # K - C
        # 1. (q + u) / √E and (q + v) / √E: scaling the queries is cheaper than scaling the [T, K] scores. Heads come
        #    before rows of the batch, so that (q + v) rᵀ is one product per head for the whole batch.
        by_head = (query * scale).permute(2, 0, 1, 3)  # [H, B, T, E]
        qu, qv = query.new_empty(2, heads, batch, tgt_len, width)
        for target, bias in ((qu, u), (qv, v)):
            torch.add(by_head, (bias * scale).to(query.dtype)[:, None, None], out=target)
        key, value = key_value.movedim((-3, -2), (0, 1)).reshape(2, -1, keys, width)  # [H·B, K, E] each
        # 2. Position scores by distance; columns that no query reads become -inf, the causal mask after the shift.
        position = position.transpose(0, 1).contiguous()  # [H, P, E]
        by_distance = torch.bmm(qv.flatten(1, 2), position.mT).view(-1, tgt_len, distances)  # [H·B, T, P]
        if beyond := near_keys - distances:  # [H·B, T, K - C]: larger distances than those of `position` are masked
            by_distance = torch.nn.functional.pad(by_distance, (beyond, 0), value=-math.inf)
        if beyond < tgt_len - 1:
            by_distance[:, :, : tgt_len - 1].masked_fill_(_unread_columns(tgt_len, query.device), -math.inf)
        # 3. Content scores plus shifted position scores, [H·B, T, K]; baddbmm adds them inside the matrix product.
        if far is None:
            scores = torch.baddbmm(_shift_view(by_distance, keys), qu.flatten(0, 1), key.mT)
        else:  # compressed keys read every `step`-th of their own distances
            far = far.transpose(0, 1).contiguous()  # [H, L, E]
            by_far = torch.bmm(qv.flatten(1, 2), far.mT).view(-1, tgt_len, far.shape[1])  # [H·B, T, L]
            scores = torch.bmm(qu.flatten(0, 1), key.mT)
            scores[:, :, :far_keys] += _shift_view(by_far, far_keys, step)
            scores[:, :, far_keys:] += _shift_view(by_distance, near_keys)
        # 4. Mask the rest: the last key, which only the last query may see, and what the caller excludes.
        scores[:, :-1, -1] = -math.inf
        if masked is not None:
            scores.masked_fill_(masked, -math.inf)
        # 5. Softmax, dropout, weighted sum of the values. For the backward pass only weights and dropout mask are
        #    stored of all [T, K] matrices: the softmax's gradient needs its result, not the scores.
        weights = torch._softmax(scores, -1, False)
        mask = keep_mask(weights, dropout) if dropout else None
        values = torch.bmm(_apply_mask(weights, mask, dropout), value)  # [H·B, T, E]
        weights_by_head = weights.view(heads, batch, tgt_len, keys)
        ctx.mark_non_differentiable(weights_by_head)
        ctx.save_for_backward(qu, qv, key, value, position, far, weights, mask)
        ctx.dropout, ctx.scale, ctx.far_keys, ctx.step = dropout, scale, far_keys, step
        ctx.key_value_shape = key_value.shape
        return values.view(heads, batch, tgt_len, width).permute(1, 2, 0, 3), weights_by_head

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of each argument of `forward` (`d_x` is that of `x`); `None` for those that need none."""
        qu, qv, key, value, position, far, weights, mask = ctx.saved_tensors
        heads, batch, tgt_len, width = qu.shape
        keys = key.shape[1]
        # 5. Weighted sum, dropout, softmax. Masked entries have weight 0 and hence gradient 0: no mask is needed.
        grad = grad.permute(2, 0, 1, 3).reshape(-1, tgt_len, width)  # [H·B, T, E]
        d_weights = _apply_mask(torch.bmm(grad, value.mT), mask, ctx.dropout)
        d_scores = torch._softmax_backward_data(d_weights, weights, -1, grad.dtype)  # [H·B, T, K]
        # 3. Undo the shift: write the gradient of the scores to the flat places that they were read from. Without their
        #    last column, these are the places from T - 1 to T·K - 2, each once. The T - 1 places before are read by no
        #    query: zero. The one after is the last query's last key.
        d_near = d_scores[:, :, ctx.far_keys :]
        flat = d_near.new_empty(len(d_near), d_near[0].numel())
        flat[:, : tgt_len - 1] = 0
        flat[:, tgt_len - 1 : -1].view(d_near[:, :, :-1].shape).copy_(d_near[:, :, :-1])
        flat[:, -1] = d_near[:, -1, -1]
        # [H, B·T, P], without the masked distances
        d_distance = flat.view(d_near.shape)[:, :, -position.shape[1] :].reshape(heads, -1, position.shape[1])
        d_qu = torch.bmm(d_scores, key).view_as(qu)
        d_qv = torch.bmm(d_distance, position).view_as(qv)
        d_far = None
        if far is not None:
            d_by_far = d_scores.new_zeros(len(d_scores), tgt_len, far.shape[1])
            _shift_view(d_by_far, ctx.far_keys, ctx.step).copy_(d_scores[:, :, : ctx.far_keys])
            d_by_far = d_by_far.view(heads, -1, far.shape[1])  # [H, B·T, L]
            d_qv += torch.bmm(d_by_far, far).view_as(qv)
            d_far = torch.bmm(d_by_far.mT, qv.flatten(1, 2)).transpose(0, 1)
        # 1. and 2. Biases, queries, keys, values and distances. Results are written straight into the callers' layouts.
        # Sums over all B·T rows lose digits in bf16, so they are taken in float32.
        d_u, d_v = (grads.flatten(1, 2).sum(dim=1, dtype=sum_dtype(grads.dtype)) * ctx.scale for grads in (d_qu, d_qv))
        d_query = grad.new_empty(batch, tgt_len, heads, width)
        d_query.permute(2, 0, 1, 3).copy_(d_qu.add_(d_qv))
        d_key_value = grad.new_empty(batch, keys, 2, heads, width)
        d_key, d_value = d_key_value.permute(2, 3, 0, 1, 4)  # [H, B, K, E] each
        d_key.copy_(torch.bmm(d_scores.mT, qu.flatten(0, 1)).view_as(d_key))
        d_value.copy_(torch.bmm(_apply_mask(weights, mask, ctx.dropout).mT, grad).view_as(d_value))
        d_position = torch.bmm(d_distance.mT, qv.flatten(1, 2)).transpose(0, 1)
        d_key_value = d_key_value.view(ctx.key_value_shape)
        return d_query.mul_(ctx.scale), d_key_value, d_position, d_u, d_v, None, d_far, None, None, None


def _shift_view(by_distance: Tensor, keys: int, step: int = 1) -> Tensor:
    """Return scores by key as a view of contiguous scores by distance (the relative shift).

    Entry [n, t, k] of the view [N, T, keys] is entry [n, t, T - 1 - t + k · step] of `by_distance` [N, T, L], whose
    distances fall by 1 per column; keys are `step` tokens apart. Entries of keys after the query are meaningless: see
    `_RelativeAttention`.
    """
    _, tgt_len, distances = by_distance.shape
    from_first = by_distance.flatten(1)[:, tgt_len - 1 :]
    # One column less per row: each row starts one to the left.
    rows = from_first.unfold(1, (keys - 1) * step + 1, max(1, distances - 1))
    return rows[:, :tgt_len, ::step]


@cache_tensors
def _unread_columns(tgt_len: int, device: torch.device) -> Tensor:
    """Return a mask [T, T - 1] of the first T - 1 distances, true where the query of the row does not use them."""
    # Row t reads from column T - 1 - t on: all of its first T - 1 columns are unread in row 0, none in row T - 1.
    return torch.ones(tgt_len, tgt_len - 1, dtype=torch.bool, device=device).triu().flip(1)


def _apply_mask(weights: Tensor, mask: Tensor | None, p: float) -> Tensor:
    """Zero the weights where `mask` is 0 and divide the others by 1 - p; without a mask, return `weights` unchanged."""
    return weights if mask is None else weights * mask / (1 - p)


class _OverlappingBlocks(torch.autograd.Function):
    """Blocks of positions that overlap by half; see `overlapping_blocks`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, size: int) -> Tensor:
        """Return a view of `x`."""
        ctx.size = size
        return x.unfold(1, 2 * size, size).movedim(-1, 2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        """Add the gradients of the two blocks that hold a position: its own, and the one before it."""
        first, second = grad.split(ctx.size, dim=2)  # [B, n, N, C] each
        d_x = grad.new_empty(grad.shape[0], grad.shape[1] + 1, *first.shape[2:])
        d_x[:, :-1], d_x[:, -1] = first, second[:, -1]
        d_x[:, 1:-1] += second[:, :-1]
        return d_x.flatten(1, 2), None


class _LinearCrossEntropy(torch.autograd.Function):
    """Linear layer and cross-entropy that store one [N, V] matrix for the backward pass instead of several.

    Autograd would store logits and log-probabilities, and allocate a gradient for each in the backward pass. But the
    gradient of the logits can be computed together with the loss. It is p - ((1 - s) y + s / V), with the softmax p,
    the one-hot target y and label smoothing s; it alone is stored, in the dtype of matrix products. Soft targets q with
    weight w at temperature T make it (1 - w) times that, plus w · T · (p at T - q).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor,
        targets: Tensor,
        smoothing: float,
        probabilities: Tensor | None,
        share: float,
        temperature: float,
    ) -> Tensor:
        """Return the loss of each row, [N]; arguments as for `linear_cross_entropy`, with those of `SoftTargets`."""
        dtype = product_dtype(hidden)
        hidden, weight_cast = hidden.to(dtype), weight.to(dtype)
        logits = torch.addmm(bias.to(dtype), hidden, weight_cast.t())
        log_probs = logits.log_softmax(dim=-1, dtype=torch.float32)
        rows = torch.arange(len(targets), device=targets.device)
        nll = -log_probs[rows, targets]
        if any(ctx.needs_input_grad):
            d_logits = log_probs.exp_()  # in place: the log-probabilities turn into p, then into p - target
            true = 1.0 if probabilities is None else 1 - share  # weight of the true targets
            if probabilities is not None and temperature != 1:  # at 1, both softmaxes are the same
                at_temperature = (logits.float() / temperature).softmax(dim=-1)
                d_logits.mul_(true).add_(at_temperature, alpha=share * temperature)
            d_logits[rows, targets] -= true * (1 - smoothing)
            if smoothing:
                d_logits -= true * smoothing / len(bias)
            if probabilities is not None:
                d_logits.sub_(probabilities, alpha=share * temperature)
            ctx.save_for_backward(hidden, weight_cast, d_logits.to(dtype))
            ctx.dtypes = weight.dtype, bias.dtype
        return nll

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `hidden`, `weight` and `bias`, given `grad` [N], the gradient of each row's loss."""
        hidden, weight, d_logits = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        # Multiply the rows' gradients into the narrow [N, E] side of each product rather than into [N, V].
        column = grad.to(hidden.dtype)[:, None]
        d_hidden = (d_logits @ weight) * column
        if not any(ctx.needs_input_grad[1:]):  # frozen
            return d_hidden, *[None] * 7
        # One product for weight and bias: the bias is the weight of a hidden value that is always 1.
        d_both = d_logits.t() @ torch.cat([hidden * column, column], dim=1)  # [V, E + 1]
        return d_hidden, d_both[:, :-1].to(weight_dtype), d_both[:, -1].to(bias_dtype), *[None] * 5


class _MixCopying(torch.autograd.Function):
    """Mixture of a softmax and of copies that stores one [B, T, K] matrix for the backward pass.

    With the probability P of the target and m(k) = 1 for its copies, else 0, the gradient of -log P is
    a(k) - a(k) m(k) / P for the score of a position, a(g) - a(g) exp(-nll) / P for the sentinel, and a(g) exp(-nll) / P
    for nll.
    """

    @staticmethod
    def forward(ctx: Any, nll: Tensor, sentinel: Tensor, scores: Tensor, copies: Tensor) -> Tensor:
        """Return the mixture; see `mix_copying`."""
        dtype = sum_dtype(scores.dtype)
        largest = torch.maximum(scores.amax(dim=-1), sentinel)
        a = torch.sub(scores, largest[..., None]).to(dtype).exp_()
        a_sentinel = (sentinel - largest).to(dtype).exp_()
        total = a.sum(dim=-1) + a_sentinel
        a.div_(total[..., None])
        a_sentinel.div_(total)
        copied = a * copies
        # The probabilities may be too small for float32, so they are added by their logarithms.
        log_copied, log_drawn = copied.sum(dim=-1).log(), (sentinel - largest) - total.log() - nll
        log_probability = torch.logaddexp(log_copied, log_drawn)
        if any(ctx.needs_input_grad):
            drawn = (log_drawn - log_probability).exp()  # the part of the probability that is not copied
            # The exponential overflows only if the copies have no probability either.
            copied.mul_((-log_probability).exp().nan_to_num(posinf=0.0)[..., None])
            a.sub_(copied)
            ctx.save_for_backward(drawn, a_sentinel - drawn, a.to(product_dtype(scores)))
            ctx.dtypes = nll.dtype, sentinel.dtype, scores.dtype
        return -log_probability

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of `nll`, `sentinel` and `scores`, given `grad` [B, T]."""
        parts = ctx.saved_tensors
        grads = grad, grad, grad[..., None]
        return *((part * g).to(dtype) for part, g, dtype in zip(parts, grads, ctx.dtypes, strict=True)), None


class _AddFeatures(torch.autograd.Function):
    """Sum of a token's vectors whose gradient is a sum in the same form: over the tokens of each feature.

    Autograd would add the gradient of each token to those of its features one by one.
    """

    @staticmethod
    def forward(ctx: Any, own: Tensor, shared: Tensor, features: Tensor, tokens: Tensor, starts: Tensor) -> Tensor:
        """Return the vector of each token; see `add_features`."""
        dtype = product_dtype(own)
        ctx.save_for_backward(tokens, starts)
        ctx.dtypes = own.dtype, shared.dtype
        return F.embedding_bag(features, shared.to(dtype), mode="sum").add_(own)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of own and shared vectors, given `grad` [V, D]."""
        tokens, starts = ctx.saved_tensors
        of_own, of_shared = ctx.dtypes
        by_feature = F.embedding_bag(tokens, grad, starts, mode="sum").to(of_shared)
        return grad.to(of_own), by_feature, None, None, None


class _Dropout(torch.autograd.Function):
    """Dropout with a mask made from 16 random bits per element on a CPU, where torch would draw 64."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float) -> Tensor:
        """Return `x` with dropout; see `dropout`."""
        mask, ctx.scale = keep_mask(x, p), 1 / (1 - p)
        ctx.save_for_backward(mask)  # as an attribute it would outlive the backward pass
        return torch.addcmul(x.new_zeros(()), x, mask, value=ctx.scale)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient of `x`: `grad` with the mask and scale of `forward`."""
        (mask,) = ctx.saved_tensors
        return torch.addcmul(grad.new_zeros(()), grad, mask, value=ctx.scale), None


def keep_mask(like: Tensor, p: float) -> Tensor:
    """Return a random mask like `like` in shape, dtype and device: 0 with probability `p`, else 1.

    On a CPU, `p` is rounded to a multiple of 2^-16.
    """
    if like.device.type != "cpu" or torch.compiler.is_compiling():  # a compiler cannot trace `random_`
        return torch.empty_like(like).bernoulli_(1 - p)
    # Draw 64-bit words, read each as four signed 16-bit numbers, and compare these with the p-quantile.
    words = torch.empty(-(-like.numel() * _BITS // 64), dtype=torch.int64).random_(-(2**63), None)
    draws = words.view(torch.int16)[: like.numel()].view(like.shape)
    # In place: converting a mask of dtype bool would take longer than drawing it.
    return draws.ge_(round(p * 2**_BITS) - 2 ** (_BITS - 1)).to(like.dtype)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to sum many elements of `dtype`: float64 for float64, else float32."""
    return torch.promote_types(dtype, torch.float32)


def product_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype of matrix products of `x`: the dtype of autocast if that is enabled, else the dtype of `x`."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
