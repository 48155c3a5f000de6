"""The layers that a block can be, by letter."""

import re
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from parnas.architecture import ATTENTION, COMPRESSIVE, FEED_FORWARD, IDENTITY, LETTERS, LayerName, Letter
from parnas.config.schema import ModelConfig, Reach
from parnas.errors import ParnasError
from parnas.model.attention import SelfAttention
from parnas.model.blocks import Block, BlockOutput, Context, ResidualLayer
from parnas.model.compressive import CompressiveAttention
from parnas.model.memory import BlockMemory

__all__ = [
    "Block",
    "BlockOutput",
    "CompressiveAttention",
    "Context",
    "FeedForward",
    "Identity",
    "ResidualLayer",
    "SelfAttention",
    "make_layer",
    "register_layer",
]


class FeedForward(ResidualLayer):
    """Position-wise feed-forward layer with a ReLU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.inner = nn.Linear(config.d_model, config.d_inner)
        self.outer = nn.Linear(config.d_inner, config.d_model)

    def transform(self, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:  # noqa: ARG002
        """Transform [B, T, D] to [B, T, D], each position separately."""
        result: Tensor = self.outer(self.dropout(F.relu(self.inner(x))))
        return result

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """Return the multiply-adds of the two matrices."""
        return 2.0 * self.inner.in_features * self.inner.out_features


class Identity(Block):
    """The input itself: no norm, no residual, no parameters."""

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:  # noqa: ARG002
        """Return `x`."""
        return BlockOutput(x)

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """Identity costs nothing."""
        return 0.0


def resize_heads(config: ModelConfig, heads: int | None = None, d_head: int | None = None) -> ModelConfig:
    """Return the configuration with `heads` heads of width `d_head`; with another shape the layer has its own u and v.

    Fewer heads of the model's head width are the attention candidates of PLANER (arXiv 2208.14580).
    """
    shape = heads or config.n_heads, d_head or config.head_width
    shared = config.share_biases and shape == (config.n_heads, config.head_width)
    return config.model_copy(update={"n_heads": shape[0], "d_head": shape[1], "share_biases": shared})


def _make_attention(config: ModelConfig, **options: int) -> SelfAttention:
    """Return self-attention; options as for `resize_heads`."""
    return SelfAttention(resize_heads(config, **options))


def make_compressive(config: ModelConfig, **options: int) -> CompressiveAttention:
    """Return attention over compressive memory; options as for `resize_heads`."""
    return CompressiveAttention(resize_heads(config, **options))


def _make_feed_forward(config: ModelConfig, d_inner: int | None = None) -> FeedForward:
    """Return a feed-forward layer of inner width `d_inner`."""
    return FeedForward(config.model_copy(update={"d_inner": d_inner or config.d_inner}))


MAKERS: dict[str, Callable[..., Block]] = {
    ATTENTION: _make_attention,
    COMPRESSIVE: make_compressive,
    FEED_FORWARD: _make_feed_forward,
    IDENTITY: lambda config: Identity(),  # noqa: ARG005
}


def make_layer(name: str, config: ModelConfig) -> Block:
    """Return the layer of a name such as `s` or `s:heads=2`.

    Raises:
        ParnasError: the letter or an option is unknown, or a registered function does not return a `Block`.
    """
    letter, options = LayerName.parse(name)
    block = MAKERS[letter](config, **dict(options))
    if not isinstance(block, Block):
        raise ParnasError(f"What is registered for {letter!r} makes a {type(block).__name__}; it must make a Block.")
    block.config = config
    return block


def register_layer(letter: str, make: Callable[..., Block], description: str, options: Sequence[str] = ()) -> None:
    """Register a layer of your own under a letter; see docs/layers.md.

    Args:
        letter: one lower-case letter that is not taken.
        make: called as `make(config, **options)`; returns the layer, a `Block`.
        description: the layer's name in tables and messages.
        options: names that may follow the letter, such as `heads` in `s:heads=2`.

    Raises:
        ParnasError: the letter or the name of an option is not valid.
    """
    if not re.fullmatch("[a-z]", letter):
        raise ParnasError(f"{letter!r} cannot stand for a layer; give one lower-case letter from a to z.")
    if letter in LETTERS:
        taken = f"{letter!r} is taken by {LETTERS[letter].description}"
        raise ParnasError(f"{taken}; give a letter besides {', '.join(LETTERS)}.")
    if wrong := [option for option in options if not re.fullmatch("[a-z][a-z0-9_]*", option)]:
        raise ParnasError(f"{wrong[0]!r} cannot name an option; give lower-case letters, digits and underscores.")
    LETTERS[letter] = Letter(description, tuple(options))
    MAKERS[letter] = make
