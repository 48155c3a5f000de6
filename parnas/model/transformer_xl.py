"""Transformer-XL: one language model for discrete and for stochastic blocks (Dai et al. 2019, arXiv 1901.02860).

Shapes: B batch, T segment, D model width, V vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from parnas.architecture import IDENTITY, Architecture
from parnas.config.schema import ModelConfig, Reach
from parnas.errors import ParnasError
from parnas.model.attention import encode_distances, relative_biases
from parnas.model.blocks import Block, BlockOutput, Context, Dropout, add_up
from parnas.model.compressive import Compression
from parnas.model.fused import SoftTargets
from parnas.model.gates import Gates
from parnas.model.heads import Embedding, SoftmaxHead
from parnas.model.layers import make_layer
from parnas.model.memory import BlockMemory, Memory, longest
from parnas.model.pointer import Pointer, PointerScores, mix_log_probs, mix_nll
from parnas.model.transfer import to_device

__all__ = ["TransformerXL"]

INITIAL_STD = 0.02  # of matrices outside blocks and of kernels, as in the original


class ModelOutput(NamedTuple):
    """The result of `TransformerXL.forward` for one segment."""

    hidden: Tensor  # [B, T, D]
    memory: Memory  # for the next segment
    loss: Tensor | None  # auxiliary, a scalar: trains the compression of memory only
    weights: tuple[Tensor | None, ...] = ()  # of attention in each block, [H, B, T, K], if asked for
    pointer_scores: PointerScores | None = None  # scores of the pointer, if there is one

    def last(self, count: int) -> "ModelOutput":
        """Return the output for the last `count` tokens of the segment, without attention weights."""
        scores = self.pointer_scores and self.pointer_scores.last(count)
        return self._replace(hidden=self.hidden[:, -count:], weights=(), pointer_scores=scores)


class TransformerXL(nn.Module):
    """A language model of embedding, blocks and softmax; memory is an argument and a result of `forward`.

    If `forward` gets gates, it passes each block its gate as a fourth argument, as stochastic blocks expect.
    """

    checkpoint_activations = False
    """Whether training recomputes the activations of blocks in the backward pass instead of storing them."""

    def __init__(self, config: ModelConfig, blocks: Sequence[Block], vocab_size: int) -> None:
        super().__init__()
        self.config, self.vocab_size = config, vocab_size
        self.embedding = Embedding(config, vocab_size)
        self.blocks = nn.ModuleList(blocks)
        self.head = SoftmaxHead(config, vocab_size, self.embedding)
        self.dropout = Dropout(config.dropout)
        self.final_norm = nn.LayerNorm(config.d_model) if config.norm == "pre" else None
        self.pointer = Pointer(config) if config.pointer_len else None
        self.u: nn.Parameter | None = None
        self.v: nn.Parameter | None = None
        if any(block.shares_biases for block in blocks):
            self.u, self.v = relative_biases(config)
        self._initialise()

    @classmethod
    def build(cls, config: ModelConfig, architecture: Architecture, vocab_size: int) -> "TransformerXL":
        """Create the discrete network of an architecture, without its identity blocks."""
        blocks = [make_layer(name, config) for name in architecture if name != IDENTITY]
        return TransformerXL(config, blocks, vocab_size)

    def extract(self, architecture: Architecture) -> "TransformerXL":
        """Return the network of some of the blocks, with a copy of their weights.

        Args:
            architecture: the layer of each block of this network, or identity for a block to leave out.

        Raises:
            ParnasError: the architecture has more or fewer blocks than this network.
        """
        self.check_depth(architecture)
        blocks = cast(list[Block], list(self.blocks))
        return self.copy_layers(
            architecture, [block for block, name in zip(blocks, architecture, strict=True) if name != IDENTITY]
        )

    def check_depth(self, architecture: Architecture) -> None:
        """Raise `ParnasError` if an architecture has more or fewer blocks than this network."""
        if len(architecture) != len(self.blocks):
            name = type(self).__name__
            raise ParnasError(
                f"{architecture} has {len(architecture)} blocks, but this {name} has {len(self.blocks)}; "
                f"give an architecture of {len(self.blocks)} blocks."
            )

    def copy_layers(self, architecture: Architecture, layers: Sequence[Block]) -> "TransformerXL":
        """Return the discrete network of an architecture with copies of the weights of `layers` and of all other parts.

        `layers` are those of the architecture without identity.
        """
        with torch.random.fork_rng(devices=[]):  # its initial weights are not used and must cost no random number
            network = TransformerXL.build(self.config, architecture, self.vocab_size)
        # The parts outside the blocks have the same names in both networks. Blocks are renumbered, since the discrete
        # network has none for identity: blocks.4.candidates.s.query.weight becomes, say, blocks.3.query.weight.
        weights = {name: tensor for name, tensor in self.state_dict().items() if not name.startswith("blocks.")}
        for number, layer in enumerate(layers):
            weights |= {f"blocks.{number}.{name}": tensor for name, tensor in layer.state_dict().items()}
        # Shared attention biases u and v are left out where the architecture has no attention layer.
        network.load_state_dict({name: weights[name] for name in network.state_dict()})
        return network.to(next(self.parameters()).device).train(self.training)

    def forward(
        self,
        tokens: Tensor,
        memory: Memory | None = None,
        gates: Gates | None = None,
        reach: Reach | None = None,
        inference: bool = False,
        with_weights: bool = False,
    ) -> ModelOutput:
        """Return the hidden states [B, T, D] of a segment of ids [B, T], and the memory for the next segment.

        Args:
            tokens: ids [B, T].
            memory: the memory returned for the previous segment; `None` is an empty memory.
            gates: weights of the candidates of stochastic blocks; see `parnas.model.gates.Gates`.
            reach: how far attention looks back; `None` takes the values of the configuration.
            inference: keep keys and values in memory instead of inputs of blocks, so that they are not computed again
                for each segment. The result is the same, but weights get no gradient from memory positions.
            with_weights: return the attention weights of each block too.
        """
        # 1. Embed the segment.
        reach = reach or self.config.reach
        memory = memory or (None,) * self.memory_parts
        x = self.embed(tokens)  # [B, T, D]
        # 2. Encode all distances once, for the longest memory; every attention layer projects them by its own matrix.
        blocks = cast(list[Block], list(self.blocks))
        of_pointer = memory[len(blocks) :]
        memory = tuple(block.prepare(own, reach) for block, own in zip(blocks, memory[: len(blocks)], strict=True))
        context = self.context(x, memory, reach, blocks)._replace(inference=inference)
        # 3. Run the blocks, each with its own memory and gate, and collect the memories for the next segment.
        new_memory: list[BlockMemory] = []
        losses: list[Tensor | None] = []
        weights: list[Tensor | None] = []
        recompute = self.checkpoint_activations and self.training and torch.is_grad_enabled()
        for index, block in enumerate(blocks):
            arguments = (x, memory[index], context) if gates is None else (x, memory[index], context, gates[index])
            output: BlockOutput = checkpoint(block, *arguments, use_reentrant=False) if recompute else block(*arguments)
            x = output.hidden
            new_memory.append(output.memory)
            losses.append(output.loss)
            if with_weights:
                weights.append(output.weights)
            del output  # else its attention weights would be in memory while the next block runs
        # 4. Compare the hidden states with earlier ones, if there is a pointer.
        hidden, scores = self.finish(x), None
        if self.pointer is not None:
            scores, own_memory = self.pointer(hidden, tokens, of_pointer[0], reach)
            new_memory.append(own_memory)
        return ModelOutput(hidden, tuple(new_memory), add_up(losses), tuple(weights), scores)

    @property
    def memory_parts(self) -> int:
        """Number of elements of memory: one for each block, and one for the pointer."""
        return len(self.blocks) + (self.pointer is not None)

    def embed(self, tokens: Tensor) -> Tensor:
        """Return the input of the first block, [B, T, D], for a segment of ids [B, T]."""
        return cast(Tensor, self.dropout(self.embedding(tokens)))

    def finish(self, x: Tensor) -> Tensor:
        """Return the hidden states for the softmax, [B, T, D], given the output of the last block."""
        return cast(Tensor, self.dropout(x if self.final_norm is None else self.final_norm(x)))

    def freeze_embedding(self) -> None:
        """Exclude embedding and softmax from training."""
        self.embedding.requires_grad_(False)
        self.head.requires_grad_(False)

    def score(
        self,
        output: ModelOutput,
        targets: Tensor,
        soft: Callable[[int, Tensor | None], SoftTargets] | None = None,
    ) -> Tensor:
        """Return the negative log-likelihood in nats of each target [B, T], given the output of `forward`.

        `soft` returns soft targets, see `SoftmaxHead.nll`.
        """
        nll: Tensor = self.head.nll(output.hidden.flatten(0, 1), targets.reshape(-1), soft).view_as(targets)
        if output.pointer_scores is None:
            return nll
        return mix_nll(nll, to_device(targets, nll.device), output.pointer_scores)  # targets may be on the CPU

    def log_probs(self, output: ModelOutput) -> Tensor:
        """Return the log-probabilities of all ids as the next token, [B, T, V], given the output of `forward`."""
        hidden = output.hidden
        log_probs: Tensor = self.head.log_probs(hidden.flatten(0, 1)).unflatten(0, hidden.shape[:2])
        return log_probs if output.pointer_scores is None else mix_log_probs(log_probs, output.pointer_scores)

    def nll(
        self,
        tokens: Tensor,
        targets: Tensor,
        memory: Memory | None = None,
        gates: Gates | None = None,
        reach: Reach | None = None,
        inference: bool = False,
    ) -> tuple[Tensor, Memory]:
        """Return the negative log-likelihood in nats of each target, [B, T], and the memory for the next segment.

        `targets` [B, T] are the ids that follow `tokens` [B, T]; for the other arguments see `forward`.
        """
        output = self(tokens, memory, gates, reach, inference)
        return self.score(output, targets), output.memory

    @torch.no_grad()
    def generate(
        self,
        prompt: Tensor,
        length: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return `prompt` [B, T] continued by `length` sampled ids, [B, T + length].

        After the prompt, each sampled id is a segment of its own; the memory length is that of the configuration.

        Args:
            prompt: ids [B, T].
            length: number of ids to sample.
            temperature: divides the log-probabilities before sampling; 0 takes the most probable id.
            top_k: sample among the k most probable ids only.
            generator: source of random numbers.

        Raises:
            ParnasError: the prompt is empty, the temperature negative or `top_k` below 1.
        """
        if prompt.shape[1] == 0 or temperature < 0 or (top_k is not None and top_k < 1):
            raise ParnasError(
                f"generate got a prompt of {prompt.shape[1]} tokens, temperature {temperature} and top_k {top_k}; give "
                "a prompt of at least 1 token, a temperature of 0 or more and a top_k of 1 or more."
            )
        was_training = self.training
        self.eval()
        tokens, memory, ids = prompt, None, [prompt]
        for _ in range(length):
            output = self(tokens, memory, inference=True)
            memory = output.memory
            log_probs = self.log_probs(output.last(1))[:, -1]
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
        """Return the names of the parameters that compress memory: those of compressors and decoders."""
        return {
            f"{place}.{name}"
            for place, module in self.named_modules()
            if isinstance(module, Compression)
            for name, _ in module.named_parameters()
        }

    def burn_in(self, tgt_len: int, reach: Reach) -> int:
        """Return the number of segments after which the output no longer depends on the text before them.

        The segments have `tgt_len` tokens each.
        """
        tokens = 0 if self.pointer is None else reach.pointer_len
        for block in reversed(self.blocks):
            tokens = cast(Block, block).look_back(tokens, reach, tgt_len)
        return math.ceil(tokens / tgt_len)

    def memory_segments(self, tgt_len: int, reach: Reach) -> int:
        """Return the number of segments of `tgt_len` tokens that fill the memory of all blocks."""
        tokens = self.memory_tokens(reach)
        # A group of positions that is not complete waits to be compressed.
        return math.ceil(tokens / tgt_len) + self.compresses()

    def memory_tokens(self, reach: Reach) -> int:
        """Return the number of positions in the longest memory of a block or of the pointer."""
        tokens = [cast(Block, block).memory_tokens(reach) for block in self.blocks]
        return max([*tokens, 0 if self.pointer is None else reach.pointer_len])

    def compresses(self) -> bool:
        """Return whether any block has compressive memory."""
        return any(isinstance(module, Compression) for module in self.modules())

    def alignment(self) -> int:
        """Return the number of tokens at whose multiples a text may be cut without changing how memory is compressed.

        This is the compression ratio, the number of positions that are compressed into one; without compression 1.
        """
        return self.config.memory.ratio if self.compresses() else 1

    def multiply_adds(self, tgt_len: int, reach: Reach, counts: Sequence[int]) -> float:
        """Return the multiply-adds of the matrix products to score one token, at batch size 1 with full memory.

        `counts` [V] are the frequencies of the ids in the training text: they determine how often each tail of the
        adaptive softmax is computed.
        """
        blocks = sum(cast(Block, block).multiply_adds(tgt_len, reach) for block in self.blocks)
        shares = self.head.cluster_shares(counts)
        pointer = 0.0 if self.pointer is None else self.pointer.multiply_adds(tgt_len, reach)
        return blocks + self.embedding.multiply_adds(shares) + self.head.multiply_adds(shares) + pointer

    def embedding_parameters(self) -> int:
        """Return the number of parameters of embedding and softmax; parameters shared by the two count once."""
        unique = {id(p): p.numel() for part in (self.embedding, self.head) for p in part.parameters()}
        return sum(unique.values())

    def context(self, x: Tensor, memory: Memory, reach: Reach, blocks: Sequence[Block]) -> Context:
        """Return the context of a segment `x`, with the distances encoded for the longest memory of any of `blocks`.

        Blocks with shorter memory use the last rows of `distances`.
        """
        most = longest(block.key_lengths(own) for block, own in zip(blocks, memory, strict=True))
        tgt_len, settings = x.shape[1], self.config.memory

        def encode(count: int, least: float = 0.0) -> Tensor:
            encoded = encode_distances(count, self.config.d_model, x.device, least, reach.clamp_len)
            return cast(Tensor, self.dropout(encoded))

        if settings.distance == "slots" or not most.compressed:
            return Context(encode(tgt_len + sum(most)), self.u, self.v, reach)
        # The newest compressed position is made of `ratio` tokens, which are plain + 1 … plain + ratio before the first
        # query: plain + (ratio + 1) / 2 on average. The others follow at steps of `ratio`; later queries add up to T-1.
        far = encode(settings.ratio * (most.compressed - 1) + tgt_len, most.plain + (settings.ratio + 1) / 2)
        return Context(encode(tgt_len + most.plain), self.u, self.v, reach, far=far)

    def _initialise(self) -> None:
        """Set the initial weights: normal, with `init_std` in linear maps of blocks, 0.02 elsewhere; biases zero."""
        linear = {id(module.weight) for module in self.blocks.modules() if isinstance(module, nn.Linear)}
        for name, parameter in self.named_parameters():
            own = name.rpartition(".")[2]
            if id(parameter) in linear:
                nn.init.normal_(parameter, std=self.config.init_std or parameter.shape[1] ** -0.5)
            elif parameter.dim() > 1 and own not in ("u", "v") and name != "embedding.shared":
                nn.init.normal_(parameter, std=INITIAL_STD)
            elif own == "bias" or name == "embedding.shared":
                nn.init.zeros_(parameter)
            # The other vectors have their values: u, v and alpha are zero, weights of norms one.
        for module in self.modules():
            if isinstance(module, Compression | Pointer):
                module.initialise()
