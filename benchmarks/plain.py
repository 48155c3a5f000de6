"""The textbook forms of what `parnas.model.fused` computes: the baseline of the benchmarks, the twin in the tests."""

import math
from contextlib import AbstractContextManager
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from parnas.model import fused


def relative_attention(
    query: Tensor,
    key_value: Tensor,
    position: Tensor,
    u: Tensor,
    v: Tensor,
    dropout: float,
    far: fused.Far | None = None,
    masked: Tensor | None = None,
) -> fused.Attended:
    """As `fused.relative_attention`: content and position terms, relative shift by padding, mask, softmax."""
    key, value = key_value.permute(2, 0, 3, 1, 4)  # [B, H, K, E] each
    query = query.transpose(1, 2)
    content = (query + u[:, None]) @ key.transpose(-1, -2)  # [B, H, T, K]
    shifted = relative_shift((query + v[:, None]) @ position.permute(1, 2, 0))
    tgt_len = query.shape[2]
    if far is not None:
        by_far = (query + v[:, None]) @ far.position.permute(1, 2, 0)  # [B, H, T, L]
        # The query at t reads a distance higher by t, which is t columns to the left.
        columns = far.step * torch.arange(far.keys) + tgt_len - 1 - torch.arange(tgt_len)[:, None]  # [T, C]
        shifted = torch.cat([by_far.gather(3, columns.to(by_far.device).expand(*by_far.shape[:2], -1, -1)), shifted], 3)
    scores = (content + shifted) / math.sqrt(query.shape[-1])
    keys = scores.shape[-1]
    later = torch.ones(tgt_len, keys, dtype=torch.bool, device=scores.device).triu(keys - tgt_len + 1)
    unseen = later if masked is None else later | masked
    weights = scores.masked_fill(unseen, -math.inf).softmax(dim=-1)
    seen = F.dropout(weights, dropout).to(value.dtype) @ value
    return fused.Attended(seen.transpose(1, 2), weights.detach().transpose(0, 1))


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
    smoothing: float = 0.0,
    soft: fused.SoftTargets | None = None,
) -> Tensor:
    """As `fused.linear_cross_entropy`: logits, then their cross-entropy."""
    logits = F.linear(hidden, weight, bias).float()
    nll = F.cross_entropy(logits, targets, reduction="none")
    trained = F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing) if smoothing else nll
    if soft is not None:
        log_probs = (logits / soft.temperature).log_softmax(dim=-1)
        divergence = F.kl_div(log_probs, soft.probabilities, reduction="none").sum(dim=-1)
        trained = (1 - soft.weight) * trained + soft.weight * soft.temperature**2 * divergence
    return trained + (nll - trained).detach()


def add_features(own: Tensor, shared: Tensor, features: Tensor, *_: Tensor) -> Tensor:
    """As `fused.add_features`: the vectors of all features of all tokens, then their sums."""
    dtype = fused.product_dtype(own)
    return own.to(dtype) + shared.to(dtype)[features.long()].sum(dim=1)


def mix_copying(nll: Tensor, sentinel: Tensor, scores: Tensor, copies: Tensor) -> Tensor:
    """As `fused.mix_copying`: the logarithms of all weights, and of the sums of those for the target."""
    log_a = torch.cat([scores, sentinel[..., None]], dim=-1).log_softmax(dim=-1)
    copied = log_a[..., :-1].masked_fill(~copies, -torch.inf).logsumexp(dim=-1)
    return -torch.logaddexp(log_a[..., -1] - nll, copied)


def relative_shift(scores: Tensor) -> Tensor:
    """Turn scores by distance into scores by key: column k of row t moves to distance t + M - k.

    [..., T, K] in, [..., T, K] out; entries of later positions are meaningless and must be masked
    (Dai et al. 2019, appendix B).
    """
    rows, keys = scores.shape[-2:]
    padded = F.pad(scores, (1, 0)).view(*scores.shape[:-2], keys + 1, rows)
    return padded[..., 1:, :].view_as(scores)


def plain_operations() -> AbstractContextManager[object]:
    """Within it, networks compute in the textbook forms."""
    forms = relative_attention, linear_cross_entropy, add_features, mix_copying
    return patch.multiple(fused, dropout=F.dropout, **{form.__name__: form for form in forms})
