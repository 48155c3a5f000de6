"""Summary of a network as a table: its parts, their shapes, parameters and multiply-adds."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple, cast

from tabulate import tabulate
from torch import nn

from parnas.config.schema import Reach
from parnas.model.blocks import Block
from parnas.model.supernet import StochasticBlock
from parnas.model.transformer_xl import TransformerXL


class _PartSize(NamedTuple):
    """A row of the table: a candidate of a block, or a part outside the blocks."""

    block: str  # number of the block; empty for its further candidates and outside the blocks
    layer: str
    shapes: str  # of the parameters with two axes or more
    parameters: int
    multiply_adds: float  # per token


def summarise(model: TransformerXL, names: Sequence[str], tgt_len: int, reach: Reach, counts: Sequence[int]) -> str:
    """Return a table, as text, of the parts of a network with shapes, parameters and multiply-adds.

    Multiply-adds are those of matrix products per token, for one row with full memory, as in `parnas evaluate`. Weights
    that two parts share are counted in the first of them.

    Args:
        model: the network.
        names: the layer of each block of a discrete network; not used for a SuperNet.
        tgt_len: tokens per segment.
        reach: the memory lengths of the blocks.
        counts: frequencies of the tokens in the training text, [V].
    """
    parts = list(parts_of(model, names, tgt_len, reach, counts))
    total = _PartSize(
        "total", "", "", sum(part.parameters for part in parts), sum(part.multiply_adds for part in parts)
    )
    rows = [
        (part.block, part.layer, part.shapes, f"{part.parameters:,}", f"{part.multiply_adds:,.0f}")
        for part in [*parts, total]
    ]
    headers = ("block", "layer", "shapes", "parameters", "multiply-adds per token")
    table: str = tabulate(rows, headers, disable_numparse=True, colalign=("right", "left", "left", "right", "right"))
    return table


def parts_of(
    model: TransformerXL, names: Sequence[str], tgt_len: int, reach: Reach, counts: Sequence[int]
) -> Iterator[_PartSize]:
    """Yield the rows of the table of `summarise`, in the order of computation; arguments as there."""
    seen: set[int] = set()

    def size(parameters: Iterable[nn.Parameter]) -> int:
        new = {id(parameter): parameter.numel() for parameter in parameters if id(parameter) not in seen}
        seen.update(new)
        return sum(new.values())

    shares = model.head.cluster_shares(counts)
    embedding = model.embedding
    yield _PartSize(
        "", "embedding", _shapes_of(embedding), size(embedding.parameters()), embedding.multiply_adds(shares)
    )
    if model.u is not None and model.v is not None:
        shape = "×".join(map(str, model.u.shape))
        yield _PartSize("", "biases u, v of all attention", f"u {shape}, v {shape}", size([model.u, model.v]), 0)
    for number, block in enumerate(model.blocks, 1):
        layers = block.candidates.items() if isinstance(block, StochasticBlock) else [(names[number - 1], block)]
        for position, (name, layer) in enumerate(layers):
            cost = cast(Block, layer).multiply_adds(tgt_len, reach)
            yield _PartSize("" if position else str(number), name, _shapes_of(layer), size(layer.parameters()), cost)
        if isinstance(block, StochasticBlock):
            yield _PartSize("", "alpha", "", size(block.parameters()), 0)
    if model.final_norm is not None:
        yield _PartSize("", "final norm", "", size(model.final_norm.parameters()), 0)
    yield _PartSize(
        "", "softmax", _shapes_of(model.head), size(model.head.parameters()), model.head.multiply_adds(shares)
    )


def _shapes_of(module: nn.Module) -> str:
    """Return name and shape of each parameter with two or more axes, as text such as `query 128×128, …`."""
    return ", ".join(
        f"{name.removesuffix('.weight')} {'×'.join(map(str, parameter.shape))}"
        for name, parameter in module.named_parameters()
        if parameter.dim() > 1
    )
