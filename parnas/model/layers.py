"""Layers by letter: the layers feed-forward and identity, `make_layer`, and the registration of your own layers."""

import re
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from parnas.architecture import (
    ATTENTION,
    COMPRESSIVE,
    CONVOLUTION,
    FEED_FORWARD,
    GATED_FEED_FORWARD,
    IDENTITY,
    LETTERS,
    RECURRENCE,
    LayerName,
    Letter,
)
from parnas.config.schema import ModelConfig, Reach
from parnas.errors import ParnasError
from parnas.model.attention import SelfAttention
from parnas.model.blocks import Block, BlockOutput, Context, ResidualLayer
from parnas.model.compressive import CompressiveAttention
from parnas.model.convolution import GatedConvolution
from parnas.model.memory import BlockMemory
from parnas.model.recurrence import GatedRecurrence
from parnas.model.slices import SlicedLinear

__all__ = [
    "MAKERS",
    "Block",
    "BlockOutput",
    "CompressiveAttention",
    "Context",
    "FeedForward",
    "GatedFeedForward",
    "Identity",
    "ResidualLayer",
    "SelfAttention",
    "make_layer",
    "register_layer",
    "resize_heads",
]


class FeedForward(ResidualLayer):
    """Position-wise feed-forward layer: two linear maps with a ReLU between them."""

    position_wise = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.inner: nn.Linear | SlicedLinear = nn.Linear(config.d_model, config.d_inner)
        self.outer: nn.Linear | SlicedLinear = nn.Linear(config.d_inner, config.d_model)

    def transform(self, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:  # noqa: ARG002
        """Return the change [B, T, D] for `x` [B, T, D], computed for each position separately."""
        result: Tensor = self.outer(self.dropout(F.relu(self.inner(x))))
        return result

    def share_weights(self, larger: Block) -> None:
        """Use the first inner features of a wider layer."""
        if isinstance(larger, FeedForward):
            self.layer_norm, width = larger.layer_norm, [(0, self.inner.out_features)]
            self.inner, self.outer = SlicedLinear(larger.inner, width), SlicedLinear(larger.outer, None, width)

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """Return the multiply-adds per token of the two linear maps."""
        return 2.0 * self.inner.in_features * self.inner.out_features


class GatedFeedForward(ResidualLayer):
    """SwiGLU (Shazeer 2020, arXiv 2002.05202): (silu(x G) ⊙ x V) O.

    The inner width is by default two thirds of `d_inner`, rounded to a multiple of 8, so that the three matrices have
    as many weights as the two of `FeedForward`.
    """

    position_wise = True

    def __init__(self, config: ModelConfig, d_inner: int | None = None) -> None:
        super().__init__(config)
        width = d_inner or max(1, round(config.d_inner / 12)) * 8
        self.inner: nn.Linear | SlicedLinear = nn.Linear(config.d_model, 2 * width)  # G and V in one matrix
        self.outer: nn.Linear | SlicedLinear = nn.Linear(width, config.d_model)

    def transform(self, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:  # noqa: ARG002
        """Return the change [B, T, D] for `x` [B, T, D], computed for each position separately."""
        gate, value = self.inner(x).chunk(2, dim=-1)
        result: Tensor = self.outer(self.dropout(F.silu(gate) * value))
        return result

    def share_weights(self, larger: Block) -> None:
        """Use the first inner features of a wider layer, each with its gate."""
        if isinstance(larger, GatedFeedForward):
            width, whole = self.outer.in_features, larger.outer.in_features
            self.layer_norm = larger.layer_norm
            self.inner = SlicedLinear(larger.inner, [(0, width), (whole, whole + width)])
            self.outer = SlicedLinear(larger.outer, None, [(0, width)])

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """Return the multiply-adds of the three matrices per token."""
        return 3.0 * self.outer.in_features * self.outer.out_features


class Identity(Block):
    """A layer that returns its input unchanged; it has no LayerNorm, residual connection or parameters."""

    position_wise = True

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:  # noqa: ARG002
        """Return `x` itself and an empty memory."""
        return BlockOutput(x)

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """Return 0: identity computes nothing."""
        return 0.0


def resize_heads(config: ModelConfig, heads: int | None = None, d_head: int | None = None) -> ModelConfig:
    """Return `config` with `heads` attention heads of width `d_head`; an argument `None` keeps the model's value.

    Layers with fewer heads of the same width are the attention candidates of PLANER (arXiv 2208.14580). A layer whose
    number or width of heads differs from the model's cannot share the model's biases u and v [H, E]: the returned
    configuration then has `share_biases` off, and the layer gets biases of its own.
    """
    shape = heads or config.n_heads, d_head or config.head_width
    shared = config.share_biases and shape == (config.n_heads, config.head_width)
    return config.model_copy(update={"n_heads": shape[0], "d_head": shape[1], "share_biases": shared})


MAKERS: dict[str, Callable[..., Block]] = {
    ATTENTION: lambda config, heads=None, d_head=None, **options: SelfAttention(
        resize_heads(config, heads, d_head), **options
    ),
    COMPRESSIVE: lambda config, **options: CompressiveAttention(resize_heads(config, **options)),
    CONVOLUTION: GatedConvolution,
    RECURRENCE: GatedRecurrence,
    FEED_FORWARD: lambda config, **options: FeedForward(config.model_copy(update=options)),
    GATED_FEED_FORWARD: GatedFeedForward,
    IDENTITY: lambda config: Identity(),  # noqa: ARG005
}
"""For each letter the function that builds the layer from the model's configuration and the options in its name."""


def make_layer(name: str, config: ModelConfig) -> Block:
    """Create the layer with a name such as `s` or `s:heads=2`.

    Raises:
        ParnasError: the letter or an option is unknown, or a registered function does not return a `Block`.
    """
    letter, options = LayerName.parse(name)
    block = MAKERS[letter](config, **dict(options))
    if not isinstance(block, Block):
        raise ParnasError(
            f"The function registered for {letter!r} returns a {type(block).__name__}; it must return a Block."
        )
    block.config = config
    return block


def register_layer(letter: str, make: Callable[..., Block], description: str, options: Sequence[str] = ()) -> None:
    """Register a layer of your own under a letter (docs/layers.md).

    Args:
        letter: a lower-case letter that no other layer has.
        make: called as `make(config, **options)`; returns the layer, a `Block`.
        description: the layer's name in tables and messages.
        options: names of the options that may follow the letter, such as `heads` in `s:heads=2`.

    Raises:
        ParnasError: the letter is not valid or is taken, or the name of an option is not valid.
    """
    if not re.fullmatch("[a-z]", letter):
        raise ParnasError(f"{letter!r} cannot be the letter of a layer; give one lower-case letter from a to z.")
    if letter in LETTERS:
        raise ParnasError(
            f"{letter!r} is taken by {LETTERS[letter].description}; give a letter other than {', '.join(LETTERS)}."
        )
    if wrong := [option for option in options if not re.fullmatch("[a-z][a-z0-9_]*", option)]:
        raise ParnasError(
            f"{wrong[0]!r} cannot name an option; use lower-case letters, digits and underscores, a letter first."
        )
    LETTERS[letter] = Letter(description, tuple(options))
    MAKERS[letter] = make
