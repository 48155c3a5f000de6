"""Transformer-XL: one language model for plain and for stochastic blocks (Dai et al. 2019, arXiv 1901.02860)."""

import math
from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parnas.architecture import IDENTITY, Architecture
from parnas.errors import ParnasError
from parnas.model.attention import encode_distances, relative_biases
from parnas.model.blocks import Block, BlockOutput, Context, Dropout, add_up
from parnas.model.compressive import Compression
from parnas.model.estimators import Gates
from parnas.model.heads import Embedding, SoftmaxHead
from parnas.model.layers import make_layer
from parnas.model.memory import BlockMemory, Memory, longest
from parnas.sections import ModelConfig, Reach

INITIAL_STD = 0.02  # of all matrices, as in the original


class Output(NamedTuple):
    """Result of a forward pass."""

    hidden: Tensor  # [B, T, D]
    memory: Memory
    loss: Tensor | None  # auxiliary, a scalar: trains the compression of memory and nothing else
    weights: tuple[Tensor | None, ...] = ()  # of attention in each block, [H, B, T, K], where they were asked for


class TransformerXL(nn.Module):
    """Embedding, blocks and softmax. Memory goes into `forward` and comes out of it; the module keeps none.

    Where `forward` is given gates, each block is called with its own behind the usual arguments.
    """

    checkpoint_activations = False
    """Whether training computes the inner values of blocks a second time for the backward pass, instead of keeping."""

    def __init__(self, config: ModelConfig, blocks: Sequence[Block], vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.embedding = Embedding(config, vocab_size)
        self.blocks = nn.ModuleList(blocks)
        self.head = SoftmaxHead(config, vocab_size, self.embedding)
        self.dropout = Dropout(config.dropout)
        self.final_norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else None
        self.u: nn.Parameter | None = None
        self.v: nn.Parameter | None = None
        if any(block.shares_biases for block in blocks):
            self.u, self.v = relative_biases(config)
        self._initialise()

    @classmethod
    def build(cls, config: ModelConfig, architecture: Architecture, vocab_size: int) -> "TransformerXL":
        """The discrete network of an architecture; identity blocks leave nothing behind."""
        blocks = [make_layer(name, config) for name in architecture if name != IDENTITY]
        return TransformerXL(config, blocks, vocab_size)

    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        gates: Gates | None = None,
        reach: Reach | None = None,
        inference: bool = False,
        with_weights: bool = False,
    ) -> Output:
        """Hidden states [B, T, D] of ids [B, T], and the memory for the segment after this one.

        `memory` none is an empty one. `gates` weigh the candidates of stochastic blocks. `reach` (default: the
        configured one) is how far attention looks back. With `inference`, memory is taken and given as keys and values:
        the same result, without computing them anew for each segment, but weights get no gradient by way of memory.
        """
        reach = reach or self.config.reach
        memory = memory or (None,) * len(self.blocks)
        x = self.dropout(self.embedding(tokens))  # [B, T, D]
        blocks = cast(list[Block], list(self.blocks))
        memory = tuple(block.prepare(kept, reach) for block, kept in zip(blocks, memory, strict=True))
        context = self._context(x, memory, reach)._replace(inference=inference)
        kept: list[BlockMemory] = []
        losses: list[Tensor | None] = []
        weights: list[Tensor | None] = []
        twice = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for index, block in enumerate(blocks):
            given = (x, memory[index], context) if gates is None else (x, memory[index], context, gates[index])
            output: BlockOutput = checkpoint(block, *given, use_reentrant=False) if twice else block(*given)
            x = output.hidden
            kept.append(output.memory)
            losses.append(output.loss)
            if with_weights:  # else those of a block are freed before the next one runs
                weights.append(output.weights)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return Output(self.dropout(x), tuple(kept), add_up(losses), tuple(weights))

    def score(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Negative log-likelihood in nats of each target [B, T] by hidden states [B, T, D]."""
        nll: Tensor = self.head.nll(hidden.flatten(0, 1), targets.reshape(-1)).view_as(targets)
        return nll

    def log_probs(self, hidden: Tensor) -> Tensor:
        """Natural logarithms of the probabilities of the next token [B, T, V], by hidden states [B, T, D]."""
        log_probs: Tensor = self.head.log_probs(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return log_probs

    def nll(
        self,
        tokens: Tensor,
        targets: Tensor,
        memory: Memory | None = None,
        gates: Gates | None = None,
        reach: Reach | None = None,
        inference: bool = False,
    ) -> tuple[Tensor, Memory]:
        """Negative log-likelihood in nats of each target [B, T], and the next memory; the rest as `forward`."""
        output = self(tokens, memory, gates, reach, inference)
        return self.score(output.hidden, targets), output.memory

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        length: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Continue `prompt` [B, T] by `length` sampled ids: [B, T + length].

        `temperature` 0 takes the likeliest id. `top_k` samples among the k likeliest only. Reads each token once,
        in segments of one after the prompt, with the memory that training used. Raises `ParnasError` for an empty
        prompt, a negative temperature or a top_k below 1.
        """
        if prompt.shape[1] == 0 or temperature < 0 or (top_k is not None and top_k < 1):
            raise ParnasError(
                "generate needs a prompt of a token or more, a temperature of 0 or more and a top_k of 1 or more."
            )
        was_training = self.training
        self.eval()
        tokens, memory, ids = prompt, None, [prompt]
        for _ in range(length):
            output = self(tokens, memory, inference=True)
            memory = output.memory
            log_probs = self.head.log_probs(output.hidden[:, -1])
            if top_k is not None and top_k < self.vocab_size:
                least = log_probs.topk(top_k).values[:, -1:]
                log_probs = log_probs.masked_fill(log_probs < least, -torch.inf)
            if temperature == 0:
                tokens = log_probs.argmax(-1, keepdim=True)
            else:
                tokens = torch.multinomial((log_probs / temperature).softmax(-1), 1, generator=generator)
            ids.append(tokens)
        self.train(was_training)
        return torch.cat(ids, dim=1)

    def compression_names(self) -> set[str]:
        """Names of the parameters that compress memory."""
        return {
            f"{place}.{name}"
            for place, module in self.named_modules()
            if isinstance(module, Compression)
            for name, _ in module.named_parameters()
        }

    def burn_in(self, tgt_len: int, reach: Reach) -> int:
        """Segments after which nothing that is computed depends on what was in memory before them."""
        return sum(math.ceil(cast(Block, block).look_back(reach, tgt_len) / tgt_len) for block in self.blocks)

    def compresses(self) -> bool:
        """Whether any block has compressed memory."""
        return any(isinstance(module, Compression) for module in self.modules())

    def alignment(self) -> int:
        """Tokens by whose multiples a text may be cut without changing which of them are compressed together."""
        return self.config.memory.ratio if self.compresses() else 1

    def multiply_adds(self, tgt_len: int, reach: Reach, counts: Sequence[int]) -> float:
        """Multiply-adds of the matrix products to score one token, with full memory and a batch of one row.

        `counts` [V] are the training frequencies, which say how often a tail of the adaptive softmax is needed.
        """
        blocks = sum(cast(Block, block).multiply_adds(tgt_len, reach) for block in self.blocks)
        shares = self.head.cluster_shares(counts)
        return blocks + self.embedding.multiply_adds(shares) + self.head.multiply_adds(shares)

    def embedding_parameters(self) -> int:
        """Number of weights in the embedding and the softmax, shared ones counted once."""
        unique = {id(p): p.numel() for part in (self.embedding, self.head) for p in part.parameters()}
        return sum(unique.values())

    def _context(self, x: Tensor, memory: Memory, reach: Reach) -> Context:
        """Encodes the distances that the longest memory needs; shorter ones are the last of them."""
        blocks = cast(list[Block], list(self.blocks))
        most = longest(block.key_lengths(kept) for block, kept in zip(blocks, memory, strict=True))
        tgt_len, settings = x.shape[1], self.config.memory

        def encode(count: int, least: float = 0.0) -> Tensor:
            encoded = encode_distances(count, self.config.d_model, x.device, least, reach.clamp_len)
            return cast(Tensor, self.dropout(encoded))

        if settings.distance == "slots" or not most.compressed:
            return Context(encode(tgt_len + sum(most)), self.u, self.v, reach)
        far = encode(settings.ratio * (most.compressed - 1) + tgt_len, most.plain + (settings.ratio + 1) / 2)
        return Context(encode(tgt_len + most.plain), self.u, self.v, reach, far=far)

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            own = name.rpartition(".")[2]
            if parameter.dim() > 1 and own not in ("u", "v"):
                nn.init.normal_(parameter, std=INITIAL_STD)
            elif own == "bias":  # all else begins at zero already, or at one, as the weights of norms
                nn.init.zeros_(parameter)
        for module in self.modules():
            if isinstance(module, Compression):
                module.initialise()
