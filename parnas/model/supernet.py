"""The SuperNet: a Transformer-XL whose every block is a weighted sum of candidate layers (PAR, §3)."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.model.blocks import Block, BlockOutput, Context, add_up
from parnas.model.estimators import ABSENT, PathGate, SinglePath
from parnas.model.layers import Identity, make_layer
from parnas.model.memory import BlockMemory, KeyLengths, gather, longest
from parnas.model.transformer_xl import TransformerXL
from parnas.sections import ModelConfig, Reach
from parnas.space import Space, spread_space, unite


class StochasticBlock(Block):
    """One layer per candidate and their logits alpha; the output is the sum of the candidates' outputs by gate.

    alpha and gates are those of all candidates of the SuperNet, `space`; the block's own are `names`.
    """

    def __init__(self, config: ModelConfig, space: Sequence[str], names: Sequence[str]) -> None:
        super().__init__()
        self.space = tuple(space)
        layers = {name: make_layer(name, config) for name in names}
        self.candidates = nn.ModuleDict(layers)
        self.alpha = nn.Parameter(torch.zeros(len(space)))
        self.register_buffer("absent", torch.tensor([name not in layers for name in space]), persistent=False)
        self.uses_memory = any(layer.uses_memory for layer in layers.values())
        self.shares_biases = any(layer.shares_biases for layer in layers.values())

    def logits(self) -> Tensor:
        """alpha [candidates], and `ABSENT` for what the block does not have."""
        return self.alpha.masked_fill(cast(Tensor, self.absent), ABSENT)

    def pi(self) -> Tensor:
        """Probabilities of the candidates [candidates]: the softmax of their logits, free of noise."""
        return self.logits().softmax(dim=-1)

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:
        """All candidates together: a mixture runs each of them."""
        return sum(layer.multiply_adds(tgt_len, reach) for _, layer in self._layers())

    def memory_tokens(self, reach: Reach) -> int:
        """Those of the candidate that remembers most."""
        return max(layer.memory_tokens(reach) for _, layer in self._layers())

    def look_back(self, reach: Reach, tgt_len: int) -> int:
        """As far as any candidate."""
        return max(layer.look_back(reach, tgt_len) for _, layer in self._layers())

    def key_lengths(self, memory: BlockMemory) -> KeyLengths:
        """The most that any candidate sees."""
        return longest(layer.key_lengths(kept) for layer, kept in self._remembered(memory))

    def prepare(self, memory: BlockMemory, reach: Reach) -> BlockMemory:
        """That of each candidate."""
        return gather(layer.prepare(kept, reach) for layer, kept in self._remembered(memory))

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:
        """That of each candidate."""
        return gather(layer.skip(x, kept, context) for layer, kept in self._remembered(memory))

    def forward(
        self, x: Tensor, memory: BlockMemory, context: Context, gate: Tensor | PathGate | None = None
    ) -> BlockOutput:
        """As `Block.forward`; `gate` [candidates] defaults to pi, a `PathGate` runs its candidate alone.

        All candidates remember: memory is a tuple with that of each.
        """
        if isinstance(gate, PathGate):
            return self._run_path(x, memory, context, gate)
        gate = self.pi() if gate is None else gate
        outputs = [layer(x, kept, context) for layer, kept in self._remembered(memory)]
        mixed: Tensor | None = None
        for name, output in zip(self.candidates, outputs, strict=True):
            weighed = output.hidden * gate[self.space.index(name)]
            mixed = weighed if mixed is None else mixed + weighed
        assert mixed is not None
        remembered = gather(output.memory for output in outputs)
        return BlockOutput(mixed, remembered, add_up(output.loss for output in outputs))

    def _run_path(self, x: Tensor, memory: BlockMemory, context: Context, gate: PathGate) -> BlockOutput:
        own = dict(zip(self.candidates, self._remembered(memory), strict=True))

        def run(index: int) -> BlockOutput:
            layer, kept = own[self.space[index]]
            output: BlockOutput = layer(x, kept, context)
            return output

        output = run(gate.chosen)
        chosen = self.space[gate.chosen]
        remembered = gather(
            output.memory if name == chosen else layer.skip(x, kept, context) for name, (layer, kept) in own.items()
        )
        if not gate.weights.requires_grad:
            return BlockOutput(output.hidden, remembered, output.loss)
        probe = None
        if gate.probed is not None:
            with torch.no_grad():
                probe = run(gate.probed).hidden
        indices = gate.chosen, gate.probed
        path: Tensor = SinglePath.apply(output.hidden, x.detach(), probe, gate.weights, indices)  # type: ignore[no-untyped-call]
        return BlockOutput(path, remembered, output.loss)

    def _remembered(self, memory: BlockMemory) -> list[tuple[Block, BlockMemory]]:
        """Each candidate and its memory."""
        layers = [layer for _, layer in self._layers()]
        return list(zip(layers, memory or (None,) * len(layers), strict=True))

    def _layers(self) -> list[tuple[str, Block]]:
        return cast(list[tuple[str, Block]], list(self.candidates.items()))


class SuperNet(TransformerXL):
    """A TransformerXL of stochastic blocks; without gates its blocks weigh their candidates by pi.

    `space` is what the configuration gives: one list of layer names for all blocks, or a list for each.
    """

    def __init__(self, config: ModelConfig, space: Space, blocks: int, vocab_size: int) -> None:
        spaces = spread_space(space, blocks)
        union = unite(spaces)
        super().__init__(config, [StochasticBlock(config, union, names) for names in spaces], vocab_size)
        self.space = union  # of all blocks: the candidates in alpha, pi and gates

    def alphas(self) -> list[nn.Parameter]:
        """The logits of each block, [candidates] each: what the search trains besides weights."""
        return [block.alpha for block in self._stochastic()]

    def weights(self) -> dict[str, nn.Parameter]:
        """All parameters but alpha, by name."""
        alphas = {id(alpha) for alpha in self.alphas()}
        return {name: parameter for name, parameter in self.named_parameters() if id(parameter) not in alphas}

    def alpha(self) -> Tensor:
        """All logits, [blocks, candidates], differentiable; `ABSENT` where a block lacks a candidate."""
        return torch.stack([block.logits() for block in self._stochastic()])

    def pi(self) -> Tensor:
        """All probabilities, [blocks, candidates], without gradient."""
        return self.alpha().detach().softmax(dim=-1)

    def architecture(self) -> Architecture:
        """The likeliest candidate of each block; the first in the space where two are equal."""
        return Architecture([self.space[index] for index in self.pi().argmax(dim=-1).tolist()])

    def extract(self, architecture: Architecture) -> TransformerXL:
        """The plain network of an architecture, with a copy of the weights that the SuperNet has for it.

        Raises `ParnasError` where the depth is not the SuperNet's, or a block has no such layer.
        """
        if len(architecture) != len(self.blocks) or not set(architecture) <= set(self.space):
            raise ParnasError(
                f"{architecture} is not in this SuperNet of {len(self.blocks)} blocks over {', '.join(self.space)}."
            )
        for number, (block, name) in enumerate(zip(self._stochastic(), architecture, strict=True), 1):
            if name not in block.candidates:
                raise ParnasError(
                    f"{architecture} is not in this SuperNet: block {number} has {', '.join(block.candidates)}, "
                    f"not {name}."
                )
        with torch.random.fork_rng(devices=[]):  # its initial weights are not used and must cost no random number
            network = TransformerXL.build(self.config, architecture, self.vocab_size)
        chosen = [block.candidates[name] for block, name in zip(self._stochastic(), architecture, strict=True)]
        layers = [layer for layer in chosen if not isinstance(layer, Identity)]
        for target, source in zip(network.blocks, layers, strict=True):
            target.load_state_dict(source.state_dict())
        for name in ("embedding", "head", "final_norm", "u", "v"):
            source, target = getattr(self, name), getattr(network, name)
            if isinstance(target, nn.Module):
                target.load_state_dict(source.state_dict())
            elif target is not None:
                target.data.copy_(source)
        return network.to(self.alpha().device).train(self.training)

    def _stochastic(self) -> list[StochasticBlock]:
        return cast(list[StochasticBlock], list(self.blocks))
