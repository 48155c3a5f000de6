"""Input embeddings and (adaptive) softmax, which may share their weights.

A full softmax over V words costs D · V multiply-adds per token, most of them for words that hardly ever occur. The
adaptive softmax (Grave et al. 2017, arXiv 1609.04309) sorts ids by frequency and cuts them into clusters at `cutoffs`:
a head of n_0 frequent ids and tails of rarer ones. The head is a softmax over its ids *and one cluster logit per tail*;
a tail is a softmax over its own ids, computed only for the tokens whose target is in it:

    p(id) = p_head(id)                           for an id of the head
    p(id) = p_head(tail) · p_tail(id | tail)     for an id of a tail

Tails may be narrower than the model (`proj_factor`). With `div_val` the embeddings have the same clusters and widths
(adaptive inputs: Baevski & Auli 2019, arXiv 1809.10853), so that `tie_weights` can share the tables.

Shapes: N tokens, D model width, V vocabulary; e is the width of a cluster and n the number of its ids.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parnas.config.schema import SUBWORD_KINDS, ModelConfig
from parnas.errors import ParnasError
from parnas.model import fused
from parnas.model.transfer import to_device

__all__ = ["Embedding", "cluster_bounds"]

_ROW_STEP = 64


def cluster_bounds(config: ModelConfig, vocab_size: int) -> list[int]:
    """Return the bounds of the clusters, [0, cutoffs…, V]: a cluster has the ids from one bound to before the next.

    Raises:
        ParnasError: the last cutoff is not below the vocabulary size V.
    """
    assert not isinstance(config.cutoffs, str), "resolve_cutoffs comes before the model"
    if config.cutoffs and config.cutoffs[-1] >= vocab_size:
        raise ParnasError(
            f"model.cutoffs end at {config.cutoffs[-1]}, but the vocabulary has {vocab_size} symbols; "
            f"give cutoffs below {vocab_size}, or cutoffs: auto."
        )
    return [0, *config.cutoffs, vocab_size]


class Embedding(nn.Module):
    """Token embeddings scaled by √D: one table, or with `div_val` > 1 one per cluster, narrower for rarer tokens.

    With `subword_features`, a token's vector is that in the table plus those of its features (see `set_features`).
    """

    features: Tensor  # [V, J], tokens [V · J] and starts [R] of `fused.add_features`
    feature_tokens: Tensor
    feature_starts: Tensor

    def __init__(self, config: ModelConfig, vocab_size: int) -> None:
        super().__init__()
        self.d_model = config.d_model
        self.bounds = cluster_bounds(config, vocab_size) if config.div_val > 1 else [0, vocab_size]
        widths = config.embedding_dims() if config.div_val > 1 else [config.d_model]
        sizes = [stop - start for start, stop in pairwise(self.bounds)]
        self.tables = _matrices(list(zip(sizes, widths, strict=True)))
        self.projections = _matrices([(config.d_model, width) for width in widths] if config.div_val > 1 else [])
        self.shared: nn.Parameter | None = None
        if config.subword_features:
            self.shared = nn.Parameter(torch.empty(config.subword_features, config.d_model))
            # Until `set_features`, each token has the first feature of each kind.
            kinds = torch.arange(SUBWORD_KINDS, dtype=torch.int32)
            starts = torch.arange(config.subword_features, dtype=torch.int32).clamp(max=SUBWORD_KINDS) * vocab_size
            self.register_buffer("features", kinds.repeat(vocab_size, 1))
            self.register_buffer("feature_tokens", torch.arange(vocab_size, dtype=torch.int32).repeat(SUBWORD_KINDS))
            self.register_buffer("feature_starts", starts)
        self._composed: tuple[object, Tensor] | None = None

    def set_features(self, features: Tensor) -> None:
        """Set the numbers of the features of each token, int32 [V, J]; see `parnas.data.subwords`."""
        assert self.shared is not None
        counts = torch.bincount(features.flatten(), minlength=len(self.shared))
        self.features.copy_(features)
        self.feature_tokens.copy_(features.flatten().argsort(stable=True) // features.shape[1])
        self.feature_starts.copy_(counts.cumsum(0) - counts)

    def compose(self) -> Tensor:
        """Return the vectors of all tokens, [V, D]; with features in the dtype of matrix products."""
        own: Tensor = self.tables[0]
        if self.shared is None:
            return own
        parts = own, self.shared, self.features, self.feature_tokens, self.feature_starts
        if self.training or torch.is_grad_enabled() or own.is_inference() or fused.is_traced():
            return fused.add_features(*parts)
        # In evaluation the weights rarely change: compose them again only if they do. Optimizers may change weights
        # without a new version, so `train` clears the cache.
        state = [fused.product_dtype(own), *((tensor.data_ptr(), tensor._version) for tensor in parts)]
        if self._composed is None or self._composed[0] != state:
            self._composed = state, fused.add_features(*parts)
        return self._composed[1]

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, and clear the cache of `compose`."""
        self._composed = None
        return super().train(mode)

    def forward(self, tokens: Tensor) -> Tensor:
        """Embed ids [B, T] as vectors [B, T, D]."""
        if not self.projections:
            # Times √D, since tied tables start with small weights (std 0.02), as the softmax needs them.
            own: Tensor = F.embedding(tokens, self.tables[0])
            if self.shared is not None:
                features = self.features[tokens.flatten()]  # [N, J]
                own = own + F.embedding_bag(features, self.shared, mode="sum").view_as(own)
            return own * math.sqrt(self.d_model)
        # Look up the ids of each cluster in its own table, project them from e to D, and write them to their rows.
        flat = tokens.reshape(-1)  # [N]
        vectors = self.tables[0].new_zeros(len(flat), self.d_model)
        for (start, stop), table, projection in zip(pairwise(self.bounds), self.tables, self.projections, strict=True):
            rows = ((flat >= start) & (flat < stop)).nonzero().squeeze(-1)
            projected = F.linear(F.embedding(flat[rows] - start, table), projection)
            vectors = vectors.index_copy(0, rows, projected.to(vectors.dtype))
        scaled: Tensor = vectors.view(*tokens.shape, self.d_model) * math.sqrt(self.d_model)
        return scaled

    def multiply_adds(self, shares: Sequence[float]) -> float:
        """Return the expected multiply-adds of projecting a token's embedding to the model's width.

        `shares` gives the fraction of tokens in each tail cluster; see `SoftmaxHead.cluster_shares`.
        """
        if not self.projections:
            return 0.0
        clusters = zip([1 - sum(shares), *shares], self.projections, strict=True)
        return math.fsum(share * projection.numel() for share, projection in clusters)


class SoftmaxHead(nn.Module):
    """Full or adaptive softmax; the full softmax is an adaptive softmax with a single cluster."""

    label_smoothing = 0.0
    """Share of the target probability that training spreads evenly over the classes of each softmax.

    The softmax of the head smooths all targets, the softmax of a tail the targets in this tail. Smoothing changes the
    gradient of `nll`, not the value."""

    def __init__(self, config: ModelConfig, vocab_size: int, embedding: Embedding) -> None:
        super().__init__()
        self.d_model, self.bounds = config.d_model, cluster_bounds(config, vocab_size)
        sizes = [stop - start for start, stop in pairwise(self.bounds)]
        widths = config.softmax_dims()
        tied = config.tie_weights
        self.tables = embedding.tables if tied else _matrices(list(zip(sizes, widths, strict=True)))
        self._compose = embedding.compose if embedding.shared is not None else None
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(size)) for size in sizes)
        # The cluster logits: the head has one more class for each tail.
        self.cluster_weight = nn.Parameter(torch.empty(len(sizes) - 1, widths[0]))
        self.cluster_bias = nn.Parameter(torch.zeros(len(sizes) - 1))
        # Projections [D, e] lead from the model's width to a cluster's. As in the original code of Transformer-XL, with
        # `div_val` the head has one too although its width is D, and this is the one projection that is not tied.
        projected = [cluster for cluster, width in enumerate(widths) if config.div_val > 1 or width != config.d_model]
        self.projections = nn.ParameterDict(
            {
                str(cluster): embedding.projections[cluster]
                if tied and cluster > 0
                else nn.Parameter(torch.empty(config.d_model, widths[cluster]))
                for cluster in projected
            }
        )

    def nll(
        self,
        hidden: Tensor,
        targets: Tensor,
        soft: Callable[[int, Tensor | None], fused.SoftTargets] | None = None,
    ) -> Tensor:
        """Return the negative log-likelihood in nats of each target, [N] in float32.

        Args:
            hidden: hidden states [N, D].
            targets: ids [N]. They may be on the CPU when `hidden` is on a GPU. This is faster: how many rows belong to
                each tail is then known without waiting for the GPU.
            soft: returns the soft targets of the softmax of a cluster for some rows, `None` for all rows; they change
                the gradient, see `fused.linear_cross_entropy`.
        """
        device, smoothing = hidden.device, self.label_smoothing if self.training else 0.0
        tables = self._tables()
        (_, _, head_targets), *tails = self.by_cluster(targets)
        # 1. The head, for all rows: -log p(id), or for a rare id -log p(tail).
        projected, head = self._project(hidden, 0), self._head_matrix(tables[0])
        taught = None if soft is None else soft(0, None)
        nll: Tensor = fused.linear_cross_entropy(projected, *head, to_device(head_targets, device), smoothing, taught)
        # 2. Each tail, for its own rows only: -log p(id) = -log p(tail) - log p(id | tail). Rows are padded to few
        #    different numbers (see `_round_up_rows`), and the losses of the padding left out.
        for cluster, rows, targets_within in tails:
            assert rows is not None
            padded = to_device(_round_up_rows(rows), device)
            within = fused.linear_cross_entropy(
                self._project(hidden[padded], cluster),
                tables[cluster],
                self.biases[cluster],
                to_device(_round_up_rows(targets_within), device),
                smoothing,
                None if soft is None else soft(cluster, padded),
            )
            nll = nll.index_add(0, padded[: len(rows)], within[: len(rows)])
        return nll

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Return the log-probabilities of all V ids, [N, V] in float32, given hidden states [N, D]."""
        tables = self._tables()
        # Head: [N, n_0 + tails]. The last columns, log p(tail), are added to log p(id | tail) of every id in the tail.
        head = F.linear(self._project(hidden, 0), *self._head_matrix(tables[0])).float().log_softmax(dim=-1)
        first, tails = self.bounds[1], range(1, len(self.bounds) - 1)
        parts = [head[:, :first]]
        for cluster in tails:
            logits = F.linear(self._project(hidden, cluster), tables[cluster], self.biases[cluster])
            within = logits.float().log_softmax(dim=-1)
            parts.append(within + head[:, first + cluster - 1, None])
        return torch.cat(parts, dim=-1)

    def cluster_logits(self, hidden: Tensor, cluster: int, biased: bool = True) -> Tensor:
        """Return the logits of a cluster's softmax, [..., ids], given hidden states [..., D].

        The head, cluster 0, also has a logit for each tail, after those of its ids. Without the bias, this is the
        change of the logits for a change of the hidden states.
        """
        table = self._tables()[cluster]
        weight, bias = self._head_matrix(table) if cluster == 0 else (table, self.biases[cluster])
        return F.linear(self._project(hidden, cluster), weight, bias if biased else None)

    def by_cluster(self, targets: Tensor) -> list[tuple[int, Tensor | None, Tensor]]:
        """Return for each cluster the rows that need its softmax, and the number of each row's target in it.

        All rows need the head, cluster 0, for which the rows are `None`; a rare target has the number of its tail's
        logit there. A tail is needed by the rows whose target it has.

        Args:
            targets: ids [N].
        """
        first, head_targets, tails = self.bounds[1], targets, list[tuple[int, Tensor | None, Tensor]]()
        for cluster, (start, stop) in enumerate(pairwise(self.bounds[1:]), 1):
            inside = (targets >= start) & (targets < stop)
            head_targets = torch.where(inside, first + cluster - 1, head_targets)
            rows = inside.nonzero().squeeze(-1)
            tails.append((cluster, rows, targets[rows] - start))
        return [(0, None, head_targets), *tails]

    def multiply_adds(self, shares: Sequence[float]) -> float:
        """Return the expected multiply-adds per scored token, given the fraction of tokens in each tail cluster."""
        cost = 0.0
        for cluster, share in enumerate([1.0, *shares]):
            logits = self.bounds[cluster + 1] - self.bounds[cluster]
            d_model, width = (
                self.projections[str(cluster)].shape if str(cluster) in self.projections else (0, self.d_model)
            )
            cost += share * width * (d_model + logits + (len(shares) if cluster == 0 else 0))
        return cost

    def cluster_shares(self, counts: Sequence[int]) -> list[float]:
        """Return the fraction of tokens in each tail cluster, given the number of occurrences of each id, [V]."""
        return [sum(counts[start:stop]) / sum(counts) for start, stop in pairwise(self.bounds[1:])]

    def _head_matrix(self, table: Tensor) -> tuple[Tensor, Tensor]:
        """Return weights [n_0 + tails, e] and biases [n_0 + tails] of the head's softmax.

        The first rows are those of its n_0 ids, with weights `table`; then comes one row for each tail cluster.
        """
        if not len(self.cluster_bias):
            return table, self.biases[0]
        return torch.cat([table, self.cluster_weight]), torch.cat([self.biases[0], self.cluster_bias])

    def _project(self, hidden: Tensor, cluster: int) -> Tensor:
        """Project hidden states [N, D] to the width of a cluster, [N, e]; unchanged if it has no projection."""
        if str(cluster) not in self.projections:
            return hidden
        projection: Tensor = self.projections[str(cluster)]
        return hidden @ projection

    def _tables(self) -> Sequence[Tensor]:
        """Return the weights [n, e] of each cluster: its own table, or its rows of the one table for all clusters."""
        if len(self.tables) > 1:
            return list(self.tables)
        table: Tensor = self.tables[0] if self._compose is None else self._compose()
        # A split, not slices: autograd concatenates the gradients of a split once, but pads the gradient of each slice
        # with zeros to the full [V, D] and adds them up.
        pieces: tuple[Tensor, ...] = table.split([stop - start for start, stop in pairwise(self.bounds)])
        return pieces


def _round_up_rows(rows: Tensor) -> Tensor:
    """Pad `rows` [N] with zeros to a length that is a multiple of `_ROW_STEP`.

    The number of rows in a tail cluster differs from batch to batch, and oneDNN compiles a bf16 kernel for each new
    shape, which takes longer than the product itself. With padding there are so few shapes that oneDNN caches them all.
    """
    return F.pad(rows, (0, -len(rows) % _ROW_STEP))


def _matrices(shapes: Sequence[tuple[int, int]]) -> nn.ParameterList:
    """Return a list of uninitialised parameters with the given shapes."""
    return nn.ParameterList(nn.Parameter(torch.empty(shape)) for shape in shapes)
