"""The SuperNet: a Transformer-XL whose every block is a weighted sum of candidate layers (PAR, §3)."""

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from parnas.architecture import Architecture
from parnas.config import ModelConfig
from parnas.errors import ParnasError
from parnas.model.estimators import PathGate, SinglePath
from parnas.model.layers import Block, Context, Identity, make_layer
from parnas.model.transformer_xl import TransformerXL


class StochasticBlock(Block):
    """One layer per candidate and their logits alpha; the output is the sum of the candidates' outputs by gate."""

    def __init__(self, config: ModelConfig, space: Sequence[str]) -> None:
        super().__init__()
        layers = {letter: make_layer(letter, config) for letter in space}
        self.candidates = nn.ModuleDict(layers)
        self.alpha = nn.Parameter(torch.zeros(len(space)))
        self.uses_memory = any(layer.uses_memory for layer in layers.values())

    def pi(self) -> Tensor:
        """Probabilities of the candidates [candidates]: softmax(alpha), free of noise."""
        return self.alpha.softmax(dim=-1)

    def project(self, x: Tensor) -> Tensor:
        """Those of the candidate that uses memory."""
        layers = (cast(Block, layer) for layer in self.candidates.values())
        return next(layer for layer in layers if layer.uses_memory).project(x)

    def multiply_adds(self, tgt_len: int, mem_len: int) -> float:
        """All candidates together: a mixture runs each of them."""
        return sum(cast(Block, layer).multiply_adds(tgt_len, mem_len) for layer in self.candidates.values())

    def forward(
        self, x: Tensor, memory: Tensor | None, context: Context, gate: Tensor | PathGate | None = None
    ) -> Tensor:
        """[B, T, D] to [B, T, D]; `gate` [candidates] defaults to pi, a `PathGate` runs its candidate alone."""
        if isinstance(gate, PathGate):
            return self._run_path(x, memory, context, gate)
        gate = self.pi() if gate is None else gate
        outputs: list[Tensor] = [layer(x, memory, context) for layer in self.candidates.values()]
        mixed = outputs[0] * gate[0]
        for weight, output in zip(gate[1:], outputs[1:], strict=True):
            mixed = mixed + output * weight
        return mixed

    def _run_path(self, x: Tensor, memory: Tensor | None, context: Context, gate: PathGate) -> Tensor:
        layers = list(self.candidates.values())
        output: Tensor = layers[gate.chosen](x, memory, context)
        if not gate.weights.requires_grad:
            return output
        probe = None
        if gate.probed is not None:
            with torch.no_grad():
                probe = layers[gate.probed](x, memory, context)
        indices = gate.chosen, gate.probed
        path: Tensor = SinglePath.apply(output, x.detach(), probe, gate.weights, indices)  # type: ignore[no-untyped-call]
        return path


class SuperNet(TransformerXL):
    """A TransformerXL of stochastic blocks; without gates its blocks weigh their candidates by pi."""

    def __init__(self, config: ModelConfig, space: Sequence[str], blocks: int, vocab_size: int) -> None:
        super().__init__(config, [StochasticBlock(config, space) for _ in range(blocks)], vocab_size)
        self.space = tuple(space)

    def alphas(self) -> list[nn.Parameter]:
        """The logits of each block, [candidates] each: what the search trains besides weights."""
        return [block.alpha for block in self._stochastic()]

    def weights(self) -> dict[str, nn.Parameter]:
        """All parameters but alpha, by name."""
        alphas = {id(alpha) for alpha in self.alphas()}
        return {name: parameter for name, parameter in self.named_parameters() if id(parameter) not in alphas}

    def alpha(self) -> Tensor:
        """All logits, [blocks, candidates], differentiable."""
        return torch.stack(list(self.alphas()))

    def pi(self) -> Tensor:
        """All probabilities, [blocks, candidates], without gradient."""
        return self.alpha().detach().softmax(dim=-1)

    def architecture(self) -> Architecture:
        """The likeliest candidate of each block; the first in the space where two are equal."""
        return Architecture("".join(self.space[index] for index in self.pi().argmax(dim=-1).tolist()))

    def extract(self, architecture: Architecture) -> TransformerXL:
        """The plain network of an architecture, with a copy of the weights that the SuperNet has for it.

        Raises `ParnasError` where the depth or a letter is not the SuperNet's.
        """
        if len(architecture) != len(self.blocks) or not set(architecture) <= set(self.space):
            raise ParnasError(
                f"{architecture} is not in this SuperNet of {len(self.blocks)} blocks over {', '.join(self.space)}."
            )
        with torch.random.fork_rng(devices=[]):  # its initial weights are not used and must cost no random number
            network = TransformerXL.build(self.config, architecture, self.vocab_size)
        chosen = [block.candidates[letter] for block, letter in zip(self._stochastic(), architecture, strict=True)]
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
