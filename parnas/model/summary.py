"""Summary of a network as a table: its parts, their shapes, parameters and multiply-adds."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

from tabulate import tabulate
from torch import nn

from parnas.config.schema import Reach
from parnas.model.blocks import Block
from parnas.model.supernet import StochasticBlock
from parnas.model.transformer_xl import TransformerXL

__all__ = ["summarise"]


class _PartSize(NamedTuple):
    """A row of the table: a candidate of a block, or a part outside the blocks."""

    block: str  # number of the block; empty for its further candidates and outside the blocks
    layer: str
    shapes: str  # of the parameters with two axes or more, such as `query 128×128, …`
    parameters: int
    multiply_adds: float  # per token


def summarise(model: TransformerXL, names: Sequence[str], tgt_len: int, reach: Reach, counts: Sequence[int]) -> str:
    """Return a table, as text, of the parts of a network with shapes, parameters and multiply-adds.

    Multiply-adds are those of matrix products per token, at batch size 1 with full memory, as in `parnas evaluate`.
    Weights that several parts share are listed in the first of these parts.

    Args:
        model: the network.
        names: the layer of each block of a discrete network; not used for a SuperNet.
        tgt_len: tokens per segment.
        reach: the memory lengths of the blocks.
        counts: frequencies of the tokens in the training text, [V].
    """
    parts = list(parts_of(model, names, tgt_len, reach, counts))
    parameters, multiply_adds = (sum(column) for column in zip(*(part[3:] for part in parts), strict=True))
    rows = [
        (*part[:3], f"{part[3]:,}", f"{part[4]:,.0f}")
        for part in [*parts, ("total", "", "", parameters, multiply_adds)]
    ]
    headers = ("block", "layer", "shapes", "parameters", "multiply-adds per token")
    table: str = tabulate(rows, headers, disable_numparse=True, colalign=("right", "left", "left", "right", "right"))
    return table


def parts_of(
    model: TransformerXL, names: Sequence[str], tgt_len: int, reach: Reach, counts: Sequence[int]
) -> Iterator[_PartSize]:
    """Yield the rows of the table of `summarise`, which has the same arguments, in the order of computation."""
    seen: set[int] = set()

    def part(layer: str, module: nn.Module, multiply_adds: float = 0.0, block: str = "") -> _PartSize:
        # Only parameters that no earlier part has: of a SuperNet's block, after its candidates, alpha is left.
        new = {name: parameter for name, parameter in module.named_parameters() if id(parameter) not in seen}
        seen.update(map(id, new.values()))
        shapes = ", ".join(
            f"{name.removesuffix('.weight')} {'×'.join(map(str, parameter.shape))}"
            for name, parameter in new.items()
            if parameter.dim() > 1
        )
        return _PartSize(block, layer, shapes, sum(parameter.numel() for parameter in new.values()), multiply_adds)

    shares = model.head.cluster_shares(counts)
    yield part("embedding", model.embedding, model.embedding.multiply_adds(shares))
    if model.u is not None and model.v is not None:
        yield part("biases u, v of all attention", nn.ParameterDict({"u": model.u, "v": model.v}))
    for number, block in enumerate(model.blocks, 1):
        layers = block.candidates.items() if isinstance(block, StochasticBlock) else [(names[number - 1], block)]
        for position, (name, layer) in enumerate(layers):
            cost = cast(Block, layer).multiply_adds(tgt_len, reach)
            yield part(name, layer, cost, "" if position else str(number))
        if isinstance(block, StochasticBlock):
            yield part("alpha", block)
    if model.final_norm is not None:
        yield part("final norm", model.final_norm)
    if model.pointer is not None:
        yield part("pointer", model.pointer, model.pointer.multiply_adds(tgt_len, reach))
    yield part("softmax", model.head, model.head.multiply_adds(shares))
