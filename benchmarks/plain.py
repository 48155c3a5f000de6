"""The textbook forms of what `parnas.model.fused` computes: the baseline of the benchmarks, the twin in the tests."""

import math
from contextlib import AbstractContextManager
from unittest.mock import patch

from torch import Tensor
from torch.nn import functional as F

from parnas.model import fused


class RelativeAttention:
    """Attention by autograd: content and position terms, relative shift by padding, mask, softmax."""

    @staticmethod
    def apply(
        query: Tensor, key_value: Tensor, position: Tensor, u: Tensor, v: Tensor, bias: Tensor, dropout: float
    ) -> Tensor:
        """As `fused.RelativeAttention`."""
        key, value = key_value.permute(2, 0, 3, 1, 4)  # [B, H, K, E] each
        query = query.transpose(1, 2)
        content = (query + u[:, None]) @ key.transpose(-1, -2)  # [B, H, T, K]
        by_distance = (query + v[:, None]) @ position.permute(1, 2, 0)
        scores = (content + relative_shift(by_distance)) / math.sqrt(query.shape[-1])
        weights = F.dropout(scores.masked_fill(bias.isinf(), -math.inf).softmax(dim=-1), dropout)
        return (weights.to(value.dtype) @ value).transpose(1, 2)


class LinearCrossEntropy:
    """Logits, then their cross-entropy."""

    @staticmethod
    def apply(hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor) -> Tensor:
        """As `fused.LinearCrossEntropy`."""
        return F.cross_entropy(F.linear(hidden, weight, bias).float(), targets, reduction="none")


class Dropout:
    """torch's."""

    @staticmethod
    def apply(x: Tensor, p: float) -> Tensor:
        """As `fused.Dropout`."""
        return F.dropout(x, p)


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
    return patch.multiple(
        fused, RelativeAttention=RelativeAttention, LinearCrossEntropy=LinearCrossEntropy, Dropout=Dropout
    )
