"""Parents: trained language models as stacks of layers, each of which can be replaced by a cheaper one.

A layer is a function from the hidden states of a whole text, [R, L, D], to others, whatever happens inside: a
Transformer-XL layer reads the rows in segments and keeps its memory, one of `transformers` reads them at once. So the
inputs of all layers can be stored once, and a replaced layer needs only the layers after it (`probe.py`).

Shapes: R rows of text, L tokens of a row, D model width, V vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import ExitStack, closing
from typing import cast

import torch
from torch import Tensor

from parnas.architecture import ATTENTION, FEED_FORWARD, GATED_FEED_FORWARD, IDENTITY, LETTERS, Architecture, LayerName
from parnas.config.schema import ModelConfig
from parnas.model.blocks import Block
from parnas.model.layers import Identity, make_layer
from parnas.model.supernet import StochasticBlock, SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.pretrained.cut import Importance, copy_cut, output_map

CUTS = (2, 4)  # by which heads and inner features are divided
_LEAST_WIDTH = 8  # inner features


class Parent(ABC):
    """A trained language model whose layers can be replaced."""

    layers: tuple[str, ...]
    """The name of each layer."""
    alternatives: tuple[tuple[str, ...], ...]
    """For each layer, the names of what can replace it, identity among them."""

    @abstractmethod
    def embed(self, ids: Tensor) -> Tensor:
        """Return the input of the first layer, [R, L, D], for ids [R, L]."""

    @abstractmethod
    def run(self, number: int, x: Tensor, name: str | None = None) -> Tensor:
        """Return the output of a layer, counted from 0, for its input `x`, both [R, L, D].

        `name` is the layer that replaces it; `None` is the layer itself.
        """

    @abstractmethod
    def finish(self, x: Tensor) -> Tensor:
        """Return the hidden states for the softmax, given the output of the last layer, both [R, L, D]."""

    @abstractmethod
    def logits(self, hidden: Tensor, cluster: int) -> Tensor:
        """Return the logits of a softmax of the model, [N, ids], for hidden states [N, D].

        `cluster` is its number in `by_cluster`.
        """

    @abstractmethod
    def logit_changes(self, change: Tensor, cluster: int) -> Tensor:
        """Return the change of these logits, [..., ids], for a change of the hidden states, [..., D]."""

    @abstractmethod
    def by_cluster(self, targets: Tensor) -> list[tuple[int, Tensor | None, Tensor]]:
        """Return for each softmax of the model the rows that need it, and the number of each row's target in it.

        A full softmax is one, 0, which all rows need (`None`). An adaptive softmax has one for each cluster; see
        `parnas.model.heads.SoftmaxHead.by_cluster`.

        Args:
            targets: the ids that follow, [N].
        """

    def hidden(self, x: Tensor, names: Sequence[str | None] | None = None) -> Tensor:
        """Return the hidden states for the softmax for the input `x` of the first layer, both [R, L, D].

        `names` replace the layers, as in `run`; by default all layers stay.
        """
        for number, name in enumerate(names or (None,) * len(self.layers)):
            x = self.run(number, x, name)
        return self.finish(x)

    @abstractmethod
    def measure_importance(self, ids: Tensor) -> None:
        """Make the replacements that are cut layers, by the importance of heads and features for a text [R, L]."""


def cheaper_layers(name: str, model: ModelConfig, tgt_len: int) -> tuple[str, ...]:
    """Return the names of cheaper layers that begin with weights of a trained layer, identity last.

    These are attention with a half and a quarter of the heads, or within a quarter of the positions that it sees, and
    feed-forward layers with a half and a quarter of the inner features.
    """
    letter, options = LayerName.parse(name)
    given, cheaper = dict(options), list[dict[str, int]]()
    if letter == ATTENTION:
        heads = given.get("heads", model.n_heads)
        cheaper += [given | {"heads": heads // cut} for cut in CUTS if heads % cut == 0 and "kv_heads" not in given]
        window = (tgt_len + model.mem_len) // 4
        if 0 < window < given.get("window", window + 1):
            cheaper.append(given | {"window": window})
    elif letter in (FEED_FORWARD, GATED_FEED_FORWARD):
        with torch.device("meta"):
            width = cast(torch.nn.Linear, output_map(make_layer(name, model))).in_features
        cheaper += [given | {"d_inner": width // cut} for cut in CUTS if width // cut >= _LEAST_WIDTH]
    known = LETTERS[letter].options
    named = (LayerName(letter, tuple((key, each[key]) for key in known if key in each)) for each in cheaper)
    return (*map(str, named), IDENTITY)


class ParnasParent(Parent):
    """The discrete network of a parnas run.

    Args:
        network: the network, on its device; it is set to evaluation mode.
        layers: the name of each of its layers.
        tgt_len: tokens of a segment.
        alternatives: for each layer the names of what can replace it; by default `cheaper_layers`.
    """

    def __init__(
        self,
        network: TransformerXL,
        layers: Sequence[str],
        tgt_len: int,
        alternatives: Sequence[Sequence[str]] | None = None,
    ) -> None:
        assert network.pointer is None, "see refuse_pointer"
        self.network, self.layers, self.tgt_len = network.eval(), tuple(layers), tgt_len
        names = alternatives or [cheaper_layers(name, network.config, tgt_len) for name in layers]
        self.alternatives = tuple(map(tuple, names))
        self.replacements: list[dict[str, Block]] = [{IDENTITY: Identity()} for _ in layers]

    @classmethod
    def from_supernet(cls, supernet: SuperNet, layers: Sequence[str], tgt_len: int) -> "ParnasParent":
        """Return the network of `layers`, one for each block, with the other candidates as replacements."""
        blocks = [cast(StochasticBlock, block) for block in supernet.blocks]
        names = [[name for name in block.candidates if name != own] for block, own in zip(blocks, layers, strict=True)]
        network = supernet.extract(Architecture(layers))
        network.u, network.v = supernet.u, supernet.v  # which the candidates may need, if not the parent's layers
        parent = cls(network, layers, tgt_len, names)
        parent.replacements = [{key: cast(Block, each) for key, each in block.candidates.items()} for block in blocks]
        return parent

    def embed(self, ids: Tensor) -> Tensor:
        """See `Parent.embed`."""
        return self.network.embed(ids)

    def run(self, number: int, x: Tensor, name: str | None = None) -> Tensor:
        """See `Parent.run`; the rows are read in segments with memory, from an empty one."""
        if name == IDENTITY:  # it needs no segments
            return x
        layer = cast(Block, self.network.blocks[number]) if name is None else self.replacements[number][name]
        reach, memory, outputs = self.network.config.reach, None, []
        for segment in x.split(self.tgt_len, dim=1):
            memory = layer.prepare(memory, reach)
            context = self.network.context(segment, (memory,), reach, [layer])._replace(inference=True)
            output = layer(segment, memory, context)
            memory = output.memory
            outputs.append(output.hidden)
        return torch.cat(outputs, dim=1)

    def finish(self, x: Tensor) -> Tensor:
        """See `Parent.finish`."""
        return self.network.finish(x)

    def logits(self, hidden: Tensor, cluster: int) -> Tensor:
        """See `Parent.logits`."""
        return self.network.head.cluster_logits(hidden, cluster)

    def logit_changes(self, change: Tensor, cluster: int) -> Tensor:
        """See `Parent.logit_changes`."""
        return self.network.head.cluster_logits(change, cluster, biased=False)

    def by_cluster(self, targets: Tensor) -> list[tuple[int, Tensor | None, Tensor]]:
        """See `Parent.by_cluster`."""
        return self.network.head.by_cluster(targets)

    def measure_importance(self, ids: Tensor) -> None:
        """See `Parent.measure_importance`; replacements that exist stay."""
        missing = [
            [name for name in names if name not in made]
            for names, made in zip(self.alternatives, self.replacements, strict=True)
        ]
        if not any(missing):
            return
        importance, network = self.importance(ids), self.network
        for number, (block, names, own) in enumerate(zip(network.blocks, missing, importance, strict=True)):
            for name in names:
                with torch.random.fork_rng(devices=[]):
                    layer = make_layer(name, network.config).to(ids.device).eval()
                if copy_cut(cast(Block, block), layer, own, network.u, network.v):
                    self.replacements[number][name] = layer

    def importance(self, ids: Tensor) -> list[Tensor | None]:
        """Return the importance of the inputs of each layer's last map, [inputs], for a text [R, L].

        It is `None` for layers that cannot be cut.
        """
        maps = [output_map(cast(Block, block)) for block in self.network.blocks]
        with ExitStack() as stack:
            found = [None if each is None else stack.enter_context(closing(Importance(each))) for each in maps]
            self.hidden(self.embed(ids))
        return [None if each is None else each.scores() for each in found]
