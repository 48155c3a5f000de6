"""Transformer-XL: one language model for plain and for stochastic blocks (Dai et al. 2019, arXiv 1901.02860)."""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from parnas.architecture import IDENTITY, Architecture
from parnas.errors import ParnasError
from parnas.model.estimators import Gates
from parnas.model.heads import Embedding, SoftmaxHead
from parnas.model.layers import Block, Context, Dropout, encode_distances, make_layer, relative_biases
from parnas.sections import ModelConfig

INITIAL_STD = 0.02  # of all matrices, as in the original

Memory = tuple[Tensor | None, ...]
"""For each block what it was given for the last positions, [B, M, D], or in inference its keys and values of them,
[B, M, 2·H·E]; none where the block needs no memory."""


class Output(NamedTuple):
    """Result of a forward pass."""

    hidden: Tensor  # [B, T, D]
    memory: Memory


class TransformerXL(nn.Module):
    """Embedding, blocks and softmax. Memory goes into `forward` and comes out of it; the module keeps none.

    Where `forward` is given gates, each block is called with its own behind the usual arguments.
    """

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
        mem_len: int | None = None,
        inference: bool = False,
    ) -> Output:
        """Hidden states [B, T, D] of ids [B, T], and the memory for the segment after this one.

        `memory` none is an empty one. `gates` weigh the candidates of stochastic blocks.
        `mem_len` (default: the configured one) is how many positions the returned memory keeps. With `inference`,
        memory is taken and given as keys and values: the same result, without computing them anew for each segment,
        but weights get no gradient by way of memory.
        """
        mem_len = self.config.mem_len if mem_len is None else mem_len
        memory = memory or (None,) * len(self.blocks)
        x = self.dropout(self.embedding(tokens))  # [B, T, D]
        context = self._context(x, memory)._replace(projected=inference)
        kept: list[Tensor | None] = []
        for index, block in enumerate(self.blocks):
            given, new = memory[index], x
            if inference and block.uses_memory:
                new = cast(Block, block).project(x)
                given = new if given is None else torch.cat([given, new], dim=1)
            kept.append(remember(memory[index], new, mem_len) if block.uses_memory else None)
            gate = () if gates is None else (gates[index],)
            x = block(x, given, context, *gate)
        if self.final_norm is not None:
            x = self.final_norm(x)
        return Output(self.dropout(x), tuple(kept))

    def nll(
        self,
        tokens: Tensor,
        targets: Tensor,
        memory: Memory | None = None,
        gates: Gates | None = None,
        mem_len: int | None = None,
        inference: bool = False,
    ) -> tuple[Tensor, Memory]:
        """Negative log-likelihood in nats of each target [B, T], and the next memory; the rest as `forward`."""
        hidden, kept = self(tokens, memory, gates, mem_len, inference)
        return self.head.nll(hidden.flatten(0, 1), targets.reshape(-1)).view_as(targets), kept

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
            hidden, memory = self(tokens, memory, inference=True)
            log_probs = self.head.log_probs(hidden[:, -1])
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

    def attention_blocks(self) -> int:
        """Number of blocks that use memory: how many times mem_len the context can reach back."""
        return sum(cast(Block, block).uses_memory for block in self.blocks)

    def multiply_adds(self, tgt_len: int, mem_len: int, counts: Sequence[int]) -> float:
        """Multiply-adds of the matrix products to score one token, with full memory and a batch of one row.

        `counts` [V] are the training frequencies, which say how often a tail of the adaptive softmax is needed.
        """
        blocks = sum(cast(Block, block).multiply_adds(tgt_len, mem_len) for block in self.blocks)
        shares = self.head.cluster_shares(counts)
        return blocks + self.embedding.multiply_adds(shares) + self.head.multiply_adds(shares)

    def embedding_parameters(self) -> int:
        """Number of weights in the embedding and the softmax, shared ones counted once."""
        unique = {id(p): p.numel() for part in (self.embedding, self.head) for p in part.parameters()}
        return sum(unique.values())

    def _context(self, x: Tensor, memory: Memory) -> Context:
        key_len = x.shape[1] + max([0, *(kept.shape[1] for kept in memory if kept is not None)])
        distances = encode_distances(key_len, self.config.d_model, x.device)
        return Context(self.dropout(distances), self.u, self.v)

    def _initialise(self) -> None:
        for name, parameter in self.named_parameters():
            own = name.rpartition(".")[2]
            if parameter.dim() > 1 and own not in ("u", "v"):
                nn.init.normal_(parameter, std=INITIAL_STD)
            elif own == "bias":  # all else begins at zero already, or at one, as the weights of norms
                nn.init.zeros_(parameter)


def remember(memory: Tensor | None, x: Tensor, mem_len: int) -> Tensor | None:
    """The last `mem_len` positions of memory and segment, [B, M, D], without gradient; none for no positions."""
    if mem_len == 0:
        return None
    x = x.detach()
    if memory is not None and x.shape[1] < mem_len:
        x = torch.cat([memory, x], dim=1)
    return x[:, -mem_len:]
