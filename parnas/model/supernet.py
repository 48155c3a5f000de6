"""The SuperNet: a Transformer-XL whose blocks are weighted sums of candidate layers (arXiv 2009.04534).

Block b contains one layer of each candidate kind and computes

    y = sum over candidates c of  gate[b, c] · layer_c(x),      gates from pi[b] = softmax(alpha[b]).

All networks of the search space share the weights of these layers: a discrete network computes the same as the SuperNet
with one-hot gates, and `extract` returns a copy of it. Other modules sample the gates (`estimators.py`) and train alpha
(`parnas/nas/search.py`); the SuperNet itself samples nothing.

Shapes: B batch, T segment, D model width, N blocks, C candidates, counted over all blocks.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias, cast

import torch
from torch import Tensor, nn

from parnas.architecture import Architecture, LayerName
from parnas.config.schema import ModelConfig, Reach, SearchConfig, Space, spread_space, unite
from parnas.errors import ParnasError
from parnas.model.blocks import Block, BlockOutput, Context, add_up
from parnas.model.gates import ABSENT, PathGate, SinglePathFunction
from parnas.model.layers import Identity, make_layer
from parnas.model.memory import BlockMemory, KeyLengths, collect_memories, longest
from parnas.model.transformer_xl import TransformerXL

__all__ = ["StochasticBlock", "SuperNet"]

Sharing: TypeAlias = Literal["none", "windows", "slices"]
"""Candidates of a block that share weights: none, attention layers that differ in their window only, or all of one
letter, the smaller ones using slices of the largest one's (weight entanglement, arXiv 2107.00651)."""


class StochasticBlock(Block):
    """A block with one layer per candidate and logits alpha [C]; its output is the gated sum of the layers' outputs.

    Blocks may differ in their candidates. `names` are the candidates of this block, `space` are those of any block.
    Alpha and gates have an entry for each name in `space`, so that alpha and gates of all blocks stack to [N, C].
    `sharing` says which candidates have the same weights; see `Sharing`.
    """

    def __init__(
        self, config: ModelConfig, space: Sequence[str], names: Sequence[str], sharing: Sharing = "windows"
    ) -> None:
        super().__init__()
        self.space = tuple(space)
        layers = {name: make_layer(name, config) for name in names}
        if sharing != "none":
            _share_weights(layers, sharing)
        self.candidates = nn.ModuleDict(layers)
        self.alpha = nn.Parameter(torch.zeros(len(space)))  # zero: at first all candidates are equally probable
        self.register_buffer("absent", torch.tensor([name not in layers for name in space]), persistent=False)
        self.uses_memory = any(layer.uses_memory for layer in layers.values())
        self.shares_biases = any(layer.shares_biases for layer in layers.values())

    def logits(self) -> Tensor:
        """Return alpha [C], with the logit `ABSENT` for candidates that this block does not have."""
        return self.alpha.masked_fill(cast(Tensor, self.absent), ABSENT)

    def pi(self) -> Tensor:
        """Return the candidates' probabilities [C]: the softmax of the logits, without noise."""
        return self.logits().softmax(dim=-1)

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:
        """Return the multiply-adds per token of all candidates together, as if all of them run."""
        return sum(layer.multiply_adds(tgt_len, reach) for layer in self._layers())

    def memory_tokens(self, reach: Reach) -> int:
        """Return the number of tokens that full memory covers, the largest of all candidates."""
        return max(layer.memory_tokens(reach) for layer in self._layers())

    def look_back(self, tokens: int, reach: Reach, tgt_len: int) -> int:
        """Return how far before a segment, in tokens, inputs matter: the most of all candidates."""
        return max(layer.look_back(tokens, reach, tgt_len) for layer in self._layers())

    def key_lengths(self, memory: BlockMemory) -> KeyLengths:
        """Return the largest plain and the largest compressed memory length of all candidates."""
        return longest(layer.key_lengths(own) for layer, own in self._candidate_memories(memory))

    def prepare(self, memory: BlockMemory, reach: Reach) -> BlockMemory:
        """Return a tuple with the prepared memory of each candidate; see `Block.prepare`."""
        return collect_memories(layer.prepare(own, reach) for layer, own in self._candidate_memories(memory))

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:
        """Return a tuple with the memory of each candidate after a segment for which none of them runs."""
        return collect_memories(layer.skip(x, own, context) for layer, own in self._candidate_memories(memory))

    def forward(
        self, x: Tensor, memory: BlockMemory, context: Context, gate: Tensor | PathGate | None = None
    ) -> BlockOutput:
        """Return the sum of all candidates weighted by `gate`, or the output of one candidate for a `PathGate`.

        Args:
            x: input [B, T, D].
            memory: a tuple with the memory of each candidate. The returned tuple includes candidates that did not run.
            context: see `Context`.
            gate: weights [C], by default pi; or a `PathGate`, for which only the chosen candidate and the probe run.
        """
        if isinstance(gate, PathGate):
            return self._run_path(x, memory, context, gate)
        gate = self.pi() if gate is None else gate
        # All candidates run. Those outside `names` have no gate here: their pi is exactly zero.
        outputs = [layer(x, own, context) for layer, own in self._candidate_memories(memory)]
        mixed: Tensor | None = None
        for name, output in zip(self.candidates, outputs, strict=True):  # y = sum of gate[c] · layer_c(x), [B, T, D]
            weighed = output.hidden * gate[self.space.index(name)]
            mixed = weighed if mixed is None else mixed + weighed
        assert mixed is not None
        new_memory = collect_memories(output.memory for output in outputs)
        return BlockOutput(mixed, new_memory, add_up(output.loss for output in outputs))

    def _run_path(self, x: Tensor, memory: BlockMemory, context: Context, gate: PathGate) -> BlockOutput:
        """Run only the chosen candidate, so that the block costs the time and memory of a block of a discrete network.

        While alpha is trained, run the probe of `gate` too, and connect the output to the gates for their gradient.
        """
        candidates = dict(zip(self.candidates, self._candidate_memories(memory), strict=True))

        def run(index: int) -> BlockOutput:
            layer, own = candidates[self.space[index]]
            output: BlockOutput = layer(x, own, context)
            return output

        # 1. Run the chosen candidate. The others update their memory: one of them may be chosen for the next segment.
        output = run(gate.chosen)
        chosen = self.space[gate.chosen]
        new_memory = collect_memories(
            output.memory if name == chosen else layer.skip(x, own, context)
            for name, (layer, own) in candidates.items()
        )
        if not gate.weights.requires_grad:
            return BlockOutput(output.hidden, new_memory, output.loss)
        # 2. For the gradient of alpha, run a probed candidate too. Its output never enters the network's, so it needs
        #    no graph; x is detached for the same reason: it serves as the output of identity.
        probe = None
        if gate.probed is not None:
            with torch.no_grad():
                probe = run(gate.probed).hidden
        # 3. Return the chosen output, connected to the gates in the backward pass.
        indices = gate.chosen, gate.probed
        path: Tensor = SinglePathFunction.apply(output.hidden, x.detach(), probe, gate.weights, indices)  # type: ignore[no-untyped-call]
        return BlockOutput(path, new_memory, output.loss)

    def _candidate_memories(self, memory: BlockMemory) -> list[tuple[Block, BlockMemory]]:
        """Return each candidate with its own memory from `memory`; `None` at the start of a text."""
        layers = self._layers()
        return list(zip(layers, memory or (None,) * len(layers), strict=True))

    def _layers(self) -> list[Block]:
        return cast(list[Block], list(self.candidates.values()))


def _share_weights(layers: Mapping[str, Block], sharing: Sharing) -> None:
    """Let candidates of one letter share weights, so that a path trains the others' candidates too; see `Sharing`."""
    groups: dict[LayerName, list[Block]] = {}
    for name, layer in layers.items():
        letter, options = LayerName.parse(name)
        kept = () if sharing == "slices" else tuple(option for option in options if option[0] != "window")
        groups.setdefault(LayerName(letter, kept), []).append(layer)
    for group in groups.values():
        largest = max(group, key=lambda layer: sum(parameter.numel() for parameter in layer.parameters()))
        for layer in group:
            if layer is not largest:
                layer.share_weights(largest)


class SuperNet(TransformerXL):
    """A `TransformerXL` of stochastic blocks; called without gates, its blocks weight their candidates by pi.

    The argument `space` is `search.space`: one list of layer names for all blocks, or a list for each block. The
    attribute `space` is the union of the lists: the order of the candidates in alpha, pi and gates.
    """

    def __init__(
        self, config: ModelConfig, space: Space, blocks: int, vocab_size: int, sharing: Sharing = "windows"
    ) -> None:
        spaces = spread_space(space, blocks)
        union = unite(spaces)
        super().__init__(config, [StochasticBlock(config, union, names, sharing) for names in spaces], vocab_size)
        self.space = union  # of all blocks: the candidates in alpha, pi and gates

    @classmethod
    def from_config(cls, model: ModelConfig, search: SearchConfig, vocab_size: int) -> "SuperNet":
        """Create the SuperNet of a search from the sections `model` and `search` of its configuration.

        In a trained network no candidates share weights: the parent's are frozen, and each other one is trained.
        """
        sharing: Sharing = "none" if search.parent is not None else "slices" if search.share_slices else "windows"
        return cls(model, search.space, search.blocks, vocab_size, sharing)

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile each candidate with `torch.compile`: compiled as one, a SuperNet would be compiled for each path."""
        for layer in (layer for block in self._stochastic() for layer in block.candidates.values()):
            layer.compile(*args, **kwargs)

    def alphas(self) -> list[nn.Parameter]:
        """Return alpha as one parameter [C] for each block: the architecture parameters."""
        return [block.alpha for block in self._stochastic()]

    def weights(self) -> dict[str, nn.Parameter]:
        """Return all parameters but alpha, by name."""
        # Weights and alpha have different optimizers and different text, so they are kept apart.
        alphas = {id(alpha) for alpha in self.alphas()}
        return {name: parameter for name, parameter in self.named_parameters() if id(parameter) not in alphas}

    def alpha(self) -> Tensor:
        """Return the logits of all blocks, [N, C], differentiable; `ABSENT` where a block lacks a candidate."""
        return torch.stack([block.logits() for block in self._stochastic()])

    def pi(self) -> Tensor:
        """Return the probabilities of the candidates in all blocks, [N, C], without gradient."""
        return self.alpha().detach().softmax(dim=-1)

    def argmax_architecture(self) -> Architecture:
        """Return the most probable candidate of each block; of equally probable candidates the first in `space`."""
        return Architecture([self.space[index] for index in self.pi().argmax(dim=-1).tolist()])

    def extract(self, architecture: Architecture) -> TransformerXL:
        """Return the discrete network of an architecture with a copy of the SuperNet's weights.

        Raises:
            ParnasError: the architecture has more or fewer blocks than the SuperNet, or a layer that its block lacks.
        """
        self.check_depth(architecture)
        blocks = self._stochastic()
        for number, (block, name) in enumerate(zip(blocks, architecture, strict=True), 1):
            if name not in block.candidates:
                raise ParnasError(
                    f"{architecture} is not in this SuperNet: block {number} has no candidate {name}; give one of its "
                    f"candidates {', '.join(block.candidates)}."
                )
        layers = [block.candidates[name] for block, name in zip(blocks, architecture, strict=True)]
        return self.copy_layers(architecture, [cast(Block, each) for each in layers if not isinstance(each, Identity)])

    def _stochastic(self) -> list[StochasticBlock]:
        return cast(list[StochasticBlock], list(self.blocks))
