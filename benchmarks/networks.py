"""The three networks that are compared, in the same shapes and behind the same two calls.

* `parnas`: TransformerXL, through its public door.
* `transformers`: TransfoXLLMHeadModel 4.35.2, the same network with the same weights. Its own loss shifts the labels
  and drops a position, so its body and its adaptive softmax are called one after the other.
* `x-transformers`: `Decoder` in a `TransformerWrapper` with its own XL memory: another network of the same sizes. Its
  attention sees as many keys, but takes positions from a T5 bias per bucket of distances rather than from projected
  sinusoids; norms come first and the activation is GELU. It has no adaptive softmax, so it gets the one of parnas, tied
  to its embedding.

Shapes: B batch, T segment, M memory, K = M + T keys, D model width, I = heads x width of a head.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from reference import copy_weights, make_transfo_xl
from torch import Tensor, nn
from torch.nn import functional as F

from parnas.architecture import Architecture
from parnas.config.schema import ModelConfig
from parnas.errors import ParnasError
from parnas.model.heads import Embedding, SoftmaxHead
from parnas.model.transformer_xl import INITIAL_STD, TransformerXL


@dataclass(frozen=True)
class Size:
    """The shapes of a comparison: `layers` pairs of attention and feed-forward."""

    name: str
    model: ModelConfig
    layers: int
    vocab_size: int
    batch_size: int
    tgt_len: int

    @property
    def tokens(self) -> int:
        """Tokens read, and targets scored, in a step."""
        return self.batch_size * self.tgt_len

    def describe(self) -> dict[str, Any]:
        """Return the shapes, for a result."""
        names = ("d_model", "n_heads", "d_head", "d_inner", "mem_len", "cutoffs", "tie_weights", "div_val", "dropout")
        own = {"arch": f"(sf)*{self.layers}", "vocab_size": self.vocab_size, "batch_size": self.batch_size}
        return {**own, "tgt_len": self.tgt_len, **{name: getattr(self.model, name) for name in names}}

    def block_multiply_adds(self, projects_positions: bool = True) -> float:
        """Multiply-adds per token of all blocks' matrix products in the forward pass, with full memory.

        Keys and values of memory are computed again for every segment; the projection of the distances is shared by
        the rows of the batch. `projects_positions` false leaves out that projection and the scores by distance.
        """
        d_model, inner = self.model.d_model, self.model.n_heads * self.model.head_width
        keys = self.tgt_len + self.model.mem_len
        query_and_output = 2 * d_model * inner
        key_and_value = 2 * d_model * inner * keys / self.tgt_len
        scores_and_mix = 2 * keys * inner
        by_distance = d_model * inner * keys / self.tokens + keys * inner if projects_positions else 0
        feed_forward = 2 * d_model * self.model.d_inner
        return self.layers * (query_and_output + key_and_value + scores_and_mix + by_distance + feed_forward)

    def head_multiply_adds(self, shares: Sequence[float]) -> float:
        """Multiply-adds per token of the adaptive softmax, where the tails have these shares of the targets."""
        first, *tails = (stop - start for start, stop in pairwise([0, *self._cutoffs(), self.vocab_size]))
        logits = first + len(tails) + sum(share * size for share, size in zip(shares, tails, strict=True))
        return self.model.d_model * logits

    def cluster_shares(self, targets: Tensor) -> list[float]:
        """Share of each tail cluster in these targets."""
        tails = pairwise([*self._cutoffs(), self.vocab_size])
        return [((targets >= start) & (targets < stop)).double().mean().item() for start, stop in tails]

    def _cutoffs(self) -> tuple[int, ...]:
        assert not isinstance(self.model.cutoffs, str)
        return self.model.cutoffs


class Network(nn.Module):
    """A network of a library: `nll` scores a segment, `transform` runs its blocks alone."""

    projects_positions = True

    def nll(self, tokens: Tensor, targets: Tensor, memory: Any) -> tuple[Tensor, Any]:
        """Negative log-likelihood in nats of each of the B·T targets, in any order, and the next memory."""
        raise NotImplementedError

    def transform(self, x: Tensor, memory: Any) -> Tensor:
        """Hidden states [B, T, D] through all blocks."""
        raise NotImplementedError


class Parnas(Network):
    """parnas itself."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.network = TransformerXL.build(size.model, Architecture.parse(f"(sf)*{size.layers}"), size.vocab_size)

    def nll(self, tokens: Tensor, targets: Tensor, memory: Any) -> tuple[Tensor, Any]:
        return self.network.nll(tokens, targets, memory)

    def transform(self, x: Tensor, memory: Any) -> Tensor:
        embedding = self.network.embedding
        self.network.embedding = Passed(x)
        try:
            return self.network(x.new_zeros(x.shape[:2], dtype=torch.long), memory).hidden
        finally:
            self.network.embedding = embedding


class Passed(nn.Module):
    """In place of an embedding: gives the same hidden states whatever the ids are."""

    def __init__(self, x: Tensor) -> None:
        super().__init__()
        self.x = x

    def forward(self, tokens: Tensor) -> Tensor:  # noqa: ARG002
        return self.x


class Transformers(Network):
    """The TransfoXLLMHeadModel of `transformers`."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.network = make_transfo_xl(size.model, size.layers, size.vocab_size)

    def nll(self, tokens: Tensor, targets: Tensor, memory: Any) -> tuple[Tensor, Any]:
        body = self.network.transformer(tokens, mems=self._mems(tokens, memory))
        # Its loss leaves out the last hidden state and the first label: give it one more of each.
        hidden = F.pad(body.last_hidden_state.flatten(0, 1), (0, 0, 0, 1))
        return self.network.crit(hidden, F.pad(targets.flatten(), (1, 0))), body.mems

    def transform(self, x: Tensor, memory: Any) -> Tensor:
        return self.network.transformer(inputs_embeds=x, mems=memory).last_hidden_state

    def _mems(self, tokens: Tensor, memory: Any) -> Any:
        """Return an empty memory for `None`, which the library would fill with zeros and attend to."""
        width, layers = self.network.config.d_model, self.network.config.n_layer
        return memory or [torch.zeros(0, len(tokens), width, device=tokens.device) for _ in range(layers)]


class XTransformers(Network):
    """x-transformers' decoder with the adaptive softmax of parnas."""

    projects_positions = False

    def __init__(self, size: Size) -> None:
        super().__init__()
        try:
            from x_transformers import Decoder, TransformerWrapper
        except ImportError as error:
            raise ParnasError(f"pip install -e '.[bench]' brings x-transformers ({error}).") from error
        model = size.model
        decoder = Decoder(
            dim=model.d_model,
            depth=size.layers,
            heads=model.n_heads,
            attn_dim_head=model.head_width,
            ff_mult=model.d_inner / model.d_model,
            rel_pos_bias=True,
        )
        self.network = TransformerWrapper(
            num_tokens=size.vocab_size,
            max_seq_len=size.tgt_len,
            max_mem_len=model.mem_len,
            attn_layers=decoder,
            use_abs_pos_emb=False,
            return_only_embed=True,
        )
        embedding = Embedding(model, size.vocab_size)
        embedding.tables[0] = self.network.token_emb.emb.weight
        self.head = SoftmaxHead(model, size.vocab_size, embedding)

    def nll(self, tokens: Tensor, targets: Tensor, memory: Any) -> tuple[Tensor, Any]:
        hidden, mems = self.network(tokens, mems=memory, return_mems=True)
        return self.head.nll(hidden.flatten(0, 1), targets.flatten()), mems

    def transform(self, x: Tensor, memory: Any) -> Tensor:
        return self.network.attn_layers(x, mems=memory)


NETWORKS: dict[str, Callable[[Size], Network]] = {
    "parnas": Parnas,
    "transformers": Transformers,
    "x-transformers": XTransformers,
}


def make_networks(size: Size, seed: int = 1) -> dict[str, Network]:
    """All networks of that size, in training mode; parnas has the weights of transformers."""
    torch.manual_seed(seed)
    networks = {name: make(size).train() for name, make in NETWORKS.items()}
    for network in networks.values():
        for parameter in network.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=INITIAL_STD)  # so that no library's own choice makes the loss explode
    copy_weights(networks["parnas"].network, networks["transformers"].network)
    return networks
