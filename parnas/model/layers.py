"""The layers that a block may be, by the letters that stand for them."""

import re
from collections.abc import Callable, Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from parnas.architecture import ATTENTION, COMPRESSIVE, FEED_FORWARD, IDENTITY, LETTERS, LayerName, Letter
from parnas.errors import ParnasError
from parnas.model.attention import SelfAttention
from parnas.model.blocks import Block, BlockOutput, Context, ResidualLayer
from parnas.model.compressive import CompressiveAttention
from parnas.model.memory import BlockMemory
from parnas.sections import ModelConfig, Reach

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
        """[B, T, D] to [B, T, D], each position by itself."""
        result: Tensor = self.outer(self.dropout(F.relu(self.inner(x))))
        return result

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """The two matrices."""
        return 2.0 * self.inner.in_features * self.inner.out_features


class Identity(Block):
    """x itself: no norm, no residual, no parameters."""

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:  # noqa: ARG002
        """Return `x`."""
        return BlockOutput(x)

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """None."""
        return 0.0


def resize_heads(config: ModelConfig, heads: int | None = None, d_head: int | None = None) -> ModelConfig:
    """A configuration with so many heads of that width; where that is not the model's shape, with u and v of a layer.

    Heads of the model's width, but fewer of them, are the attention candidates of PLANER (arXiv 2208.14580).
    """
    shape = heads or config.n_heads, d_head or config.head_width
    shared = config.share_biases and shape == (config.n_heads, config.head_width)
    return config.model_copy(update={"n_heads": shape[0], "d_head": shape[1], "share_biases": shared})


def make_attention(config: ModelConfig, **options: int) -> SelfAttention:
    """Self-attention with heads as `resize_heads` gives them."""
    return SelfAttention(resize_heads(config, **options))


def make_compressive(config: ModelConfig, **options: int) -> CompressiveAttention:
    """Attention over compressive memory, with heads as `resize_heads` gives them."""
    return CompressiveAttention(resize_heads(config, **options))


def make_feed_forward(config: ModelConfig, d_inner: int | None = None) -> FeedForward:
    """A feed-forward layer of that inner width."""
    return FeedForward(config.model_copy(update={"d_inner": d_inner or config.d_inner}))


MAKERS: dict[str, Callable[..., Block]] = {
    ATTENTION: make_attention,
    COMPRESSIVE: make_compressive,
    FEED_FORWARD: make_feed_forward,
    IDENTITY: lambda config: Identity(),  # noqa: ARG005
}


def make_layer(name: str, config: ModelConfig) -> Block:
    """The layer that a name in an architecture stands for, such as `s` or `s:heads=2`.

    Raises `ParnasError` for an unknown letter or option, and where what a registered letter makes is no `Block`.
    """
    letter, options = LayerName.parse(name)
    block = MAKERS[letter](config, **dict(options))
    if not isinstance(block, Block):
        raise ParnasError(f"What is registered for {letter!r} makes a {type(block).__name__}; it must make a Block.")
    return block


def register_layer(letter: str, make: Callable[..., Block], description: str, options: Sequence[str] = ()) -> None:
    """Add a letter of your own: `make(config, **options)` builds its layer, a `Block`; see docs/layers.md.

    `options` are the names that may follow the letter, as `heads` in `s:heads=2`; `make` is given those that do.
    Raises `ParnasError` for a letter that is taken or not a lower-case one, and for options that cannot be written.
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
