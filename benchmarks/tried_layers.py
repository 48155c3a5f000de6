"""Changes of the network that benchmarks/variants.py tries and that are no option of parnas, as contexts.

Inside the context `retrain` builds and trains the changed network. A context lasts for one training, which must not be
resumed in the middle: what a network remembers besides its memory is lost between two processes.

Shapes: B batch, T segment, K keys, H heads, E head width, D model width, V vocabulary.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, cast
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parnas.config.schema import ModelConfig
from parnas.model import fused
from parnas.model.attention import SelfAttention
from parnas.model.blocks import BlockOutput, Context
from parnas.model.heads import Embedding
from parnas.model.layers import FeedForward
from parnas.model.memory import BlockMemory
from parnas.model.transformer_xl import ModelOutput, TransformerXL
from parnas.training import weight_optimizer
from parnas.training.optimizers import Muon, orthogonalise

CAP = 15.0  # of logits
BUCKETS, BUCKET_WIDTH = 10_240, 128  # of hashed bigrams
NORMUON_DECAY = 0.95  # of the mean squares of an update's rows
MIXED = 0.5  # share of the first attention layer's values


@contextmanager
def squared_relu() -> Iterator[None]:
    """Feed-forward layers with relu(x)² (So et al. 2021, Primer, arXiv 2109.08668)."""

    def transform(self: FeedForward, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:  # noqa: ARG001
        result: Tensor = self.outer(self.dropout(F.relu(self.inner(x)).square()))
        return result

    with patch.object(FeedForward, "transform", transform):
        yield


@contextmanager
def qk_norm() -> Iterator[None]:
    """Divide queries and keys of each head by their root mean square (Henry et al. 2020, arXiv 2010.04245)."""
    attend = fused.relative_attention

    def attend_normed(query: Tensor, key_value: Tensor, *arguments: Any) -> fused.Attended:
        keys, values = key_value.unbind(2)
        width = (query.shape[-1],)
        return attend(F.rms_norm(query, width), torch.stack([F.rms_norm(keys, width), values], dim=2), *arguments)

    with patch.object(fused, "relative_attention", attend_normed):
        yield


@contextmanager
def zero_output() -> Iterator[None]:
    """Output projections of all layers begin with zero (muP, Yang et al. 2022, arXiv 2203.03466)."""
    initialise = TransformerXL._initialise

    def initialise_outputs(self: TransformerXL) -> None:
        initialise(self)
        for name, parameter in self.named_parameters():
            if name.endswith((".outer.weight", ".output.weight")):
                nn.init.zeros_(parameter)

    with patch.object(TransformerXL, "_initialise", initialise_outputs):
        yield


@contextmanager
def each_forward(before: Callable[[TransformerXL], None]) -> Iterator[None]:
    """Call `before` with the network whenever a segment begins."""
    forward = TransformerXL.forward

    def run(self: TransformerXL, *arguments: Any, **options: Any) -> ModelOutput:
        before(self)
        return forward(self, *arguments, **options)

    with patch.object(TransformerXL, "forward", run):
        yield


@contextmanager
def value_residual() -> Iterator[None]:
    """Attention mixes its values with those of the first attention layer (Zhou et al. 2024, arXiv 2410.17897).

    The form with equal shares, "Identity-ResFormer".
    """
    attend = SelfAttention.attend
    first: list[Tensor] = []

    def attend_mixed(self: SelfAttention, query: Tensor, keys: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        key, value = keys.chunk(2, dim=-1)
        if first:
            keys = torch.cat([key, torch.lerp(value, first[0], MIXED)], dim=-1)
        else:
            first.append(value)
        return attend(self, query, keys, *arguments)

    with each_forward(lambda _: first.clear()), patch.object(SelfAttention, "attend", attend_mixed):
        yield


@contextmanager
def gated_heads() -> Iterator[None]:
    """Each head's output times the sigmoid of a linear map of the layer's input (Qiu et al. 2025, arXiv 2505.06708)."""
    create, forward, attend = SelfAttention.__init__, SelfAttention.forward, fused.relative_attention
    gates: list[Tensor] = []

    def create_gated(self: SelfAttention, config: ModelConfig, window: int | None = None) -> None:
        create(self, config, window)
        self.gate = nn.Linear(config.d_model, self.n_heads, bias=False)

    def forward_gated(self: SelfAttention, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:
        gates[:] = [self.gate(self.normed(x)).sigmoid()]  # [B, T, H]
        return forward(self, x, memory, context)

    def attend_gated(*arguments: Any) -> fused.Attended:
        values, weights = attend(*arguments)
        return fused.Attended(values * gates[0][..., None].to(values.dtype), weights)

    with (
        patch.object(SelfAttention, "__init__", create_gated),
        patch.object(SelfAttention, "forward", forward_gated),
        patch.object(fused, "relative_attention", attend_gated),
    ):
        yield


def capped_cross_entropy(
    hidden: Tensor, weight: Tensor, bias: Tensor, targets: Tensor, smoothing: float = 0.0, soft: None = None
) -> Tensor:
    """In place of `fused.linear_cross_entropy`: logits z become c · tanh(z / c) (Gemma 2, 2024, arXiv 2408.00118)."""
    assert soft is None, "without teachers"
    dtype = fused.product_dtype(hidden)
    logits = F.linear(hidden.to(dtype), weight.to(dtype), bias.to(dtype)).float()
    return F.cross_entropy(CAP * torch.tanh(logits / CAP), targets, reduction="none", label_smoothing=smoothing)


@contextmanager
def half_skips() -> Iterator[None]:
    """Add outputs of the first half's blocks to inputs of the second half's, the last to the first.

    As in U-Net (Ronneberger et al. 2015, arXiv 1505.04597), with a trained factor for each feature that begins with 0.
    """
    initialise = TransformerXL._initialise
    outputs: dict[int, Tensor] = {}

    def connect(network: TransformerXL) -> None:
        count = len(network.blocks)
        network.skip_bias = nn.Parameter(torch.zeros(count // 2, network.config.d_model))
        for number, block in enumerate(network.blocks):
            partner = count - 1 - number
            if number < partner:
                block.register_forward_hook(lambda _, __, output, number=number: outputs.update({number: output[0]}))
            elif number > partner:

                def add(_: nn.Module, inputs: tuple[Any, ...], partner: int = partner) -> tuple[Any, ...]:
                    return (inputs[0] + network.skip_bias[partner] * outputs[partner], *inputs[1:])

                block.register_forward_pre_hook(add)

    def initialise_connected(self: TransformerXL) -> None:
        connect(self)
        initialise(self)
        nn.init.zeros_(self.skip_bias)

    with patch.object(TransformerXL, "_initialise", initialise_connected):
        yield


@contextmanager
def smear() -> Iterator[None]:
    """Add a gated share of the previous token's embedding to each embedding, but at the beginning of a segment.

    "Smear" of the nanoGPT speedruns (Jordan et al. 2024). The gates are near 0 at first.
    """
    create, embed = Embedding.__init__, Embedding.forward

    def create_smeared(self: Embedding, config: ModelConfig, vocab_size: int) -> None:
        create(self, config, vocab_size)
        self.smear = nn.Linear(config.d_model, 1)

    def embed_smeared(self: Embedding, tokens: Tensor) -> Tensor:
        vectors = embed(self, tokens)
        share = self.smear(vectors[:, 1:]).tanh()
        return torch.cat([vectors[:, :1], vectors[:, 1:] + share * vectors[:, :-1]], dim=1)

    with patch.object(Embedding, "__init__", create_smeared), patch.object(Embedding, "forward", embed_smeared):
        yield


@contextmanager
def bigrams() -> Iterator[None]:
    """Add a learned vector for the hash of two neighbouring tokens to each embedding, but at the first of a segment.

    Hashed n-gram embeddings: Svenstrup et al. 2017, arXiv 1709.03933. They begin with 0.
    """
    create, embed = Embedding.__init__, Embedding.forward
    initialise = TransformerXL._initialise

    def create_hashed(self: Embedding, config: ModelConfig, vocab_size: int) -> None:
        create(self, config, vocab_size)
        self.bigrams = nn.Embedding(BUCKETS, BUCKET_WIDTH)
        self.bigram_projection = nn.Linear(BUCKET_WIDTH, config.d_model, bias=False)

    def embed_hashed(self: Embedding, tokens: Tensor) -> Tensor:
        vectors = embed(self, tokens)
        bucket = (tokens[:, 1:] * 36_313 ^ tokens[:, :-1] * 27_191) % BUCKETS
        return torch.cat(
            [vectors[:, :1], vectors[:, 1:] + self.bigram_projection(self.bigrams(bucket) * math.sqrt(self.d_model))],
            dim=1,
        )

    def initialise_hashed(self: TransformerXL) -> None:
        initialise(self)
        nn.init.zeros_(cast(Any, self.embedding).bigrams.weight)

    with (
        patch.object(Embedding, "__init__", create_hashed),
        patch.object(Embedding, "forward", embed_hashed),
        patch.object(TransformerXL, "_initialise", initialise_hashed),
    ):
        yield


class NorMuon(Muon):
    """Muon whose updates are divided by a running root mean square of each row (Li et al. 2025, arXiv 2510.05491)."""

    def _update(self, matrices: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        seconds = []

        def orthogonalise_evenly(updates: Tensor) -> Tensor:
            updates = orthogonalise(updates).float()
            for matrix, squares in zip(matrices, updates.square().mean(dim=2, keepdim=True), strict=True):
                state = self.state[matrix]
                second = state.setdefault("rows", torch.zeros_like(squares))
                seconds.append(second.lerp_(squares, 1 - NORMUON_DECAY))
            even = updates / (torch.stack(seconds).sqrt() + 1e-8)
            # as large as Muon's update, whose root mean square is 1 / √(its longer side)
            size = math.sqrt(max(updates.shape[1:])) * even.square().mean(dim=(1, 2), keepdim=True).sqrt()
            return even / size

        with patch("parnas.training.optimizers.orthogonalise", orthogonalise_evenly):
            super()._update(matrices, lr, weight_decay)


CHANGED_NETWORKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "bigrams": bigrams,
    "gated_heads": gated_heads,
    "half_skips": half_skips,
    "logit_cap": lambda: patch.object(fused, "linear_cross_entropy", capped_cross_entropy),
    "normuon": lambda: patch.object(weight_optimizer, "Muon", NorMuon),
    "qk_norm": qk_norm,
    "smear": smear,
    "squared_relu": squared_relu,
    "value_residual": value_residual,
    "zero_output": zero_output,
}
"""By the name that the plans of benchmarks/variants.py give."""
