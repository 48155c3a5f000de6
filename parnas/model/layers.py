"""The candidate layers, each with its residual connection and LayerNorm.

Shapes: B batch, T segment, M memory, K = M + T keys, H heads, E width of a head, D model width.
"""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parnas.architecture import ATTENTION, FEED_FORWARD, IDENTITY, LETTERS, LayerName, Letter
from parnas.errors import ParnasError
from parnas.model import fused
from parnas.sections import ModelConfig


class Context(NamedTuple):
    """What the attention layers of one forward pass have in common."""

    distances: Tensor  # [K, D] sinusoids of the distances K-1 … 0, after dropout
    u: Tensor | None  # [H, E] content bias of all layers that share one; none where each has its own
    v: Tensor | None  # [H, E] position bias
    projected: bool = False  # whether blocks are given keys and values of memory and segment in place of memory


@fused.made_once
def encode_distances(count: int, width: int, device: torch.device) -> Tensor:
    """Sinusoids of the distances `count - 1` … 0, [count, width]: sines first, then cosines (Dai et al. 2019, §3.3).

    Made once for each shape, and so not to be changed in place.
    """
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, device=device) / width)
    angles = torch.outer(torch.arange(count - 1, -1, -1, device=device), frequencies)
    return torch.cat([angles.sin(), angles.cos()], dim=-1)[:, :width]


class Dropout(nn.Module):
    """Dropout of probability `p` while training; see `fused.dropout`."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Any shape."""
        return fused.dropout(x, self.p) if self.training and self.p else x


class Block(nn.Module):
    """One position of the stack, called as `block(x, memory, context)`."""

    uses_memory = False
    shares_biases = False  # whether it needs the u and v of the context
    projected_width = 0  # 2·H·E, of what `project` gives

    def project(self, x: Tensor) -> Tensor:
        """Keys and values [B, T, 2·H·E] of what the block is given, for blocks that use memory."""
        raise NotImplementedError

    def multiply_adds(self, tgt_len: int, mem_len: int) -> float:
        """Multiply-adds of the matrix products per token, reading segments of one row with full memory.

        Keys and values of memory are not computed anew: it is what inference costs.
        """
        raise NotImplementedError


class ResidualLayer(Block):
    """A transformation with dropout, residual and LayerNorm, after it (post) or before it (pre)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.layer_norm = nn.LayerNorm(config.d_model)
        self.dropout = Dropout(config.dropout)
        self.pre_norm = config.norm == "pre"

    def forward(self, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:
        """[B, T, D] to [B, T, D]; `memory` [B, M, D] is what this block was given before, none at the start.

        Where the context says `projected`, it is all keys and values [B, K, 2·H·E] instead.
        """
        if self.pre_norm:
            if memory is not None and not context.projected:
                memory = self.layer_norm(memory)
            result: Tensor = x + self.dropout(self.transform(self.layer_norm(x), memory, context))
        else:
            result = self.layer_norm(x + self.dropout(self.transform(x, memory, context)))
        return result

    def transform(self, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:
        """The layer proper, [B, T, D] to [B, T, D]."""
        raise NotImplementedError


class SelfAttention(ResidualLayer):
    """Relative multi-head attention over memory and segment (Dai et al. 2019, §3.3)."""

    uses_memory = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.n_heads, self.head_width = config.n_heads, config.head_width
        inner = self.n_heads * self.head_width
        self.query = nn.Linear(config.d_model, inner, bias=False)
        self.key_value = nn.Linear(config.d_model, 2 * inner, bias=False)
        self.position = nn.Linear(config.d_model, inner, bias=False)
        self.output = nn.Linear(inner, config.d_model, bias=False)
        self.attention_dropout = config.attention_dropout
        self.u: nn.Parameter | None = None
        self.v: nn.Parameter | None = None
        self.shares_biases, self.projected_width = config.share_biases, 2 * inner
        if not config.share_biases:
            self.u, self.v = relative_biases(config)

    def transform(self, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:
        """Attend from the segment to memory and segment; [B, T, D] to [B, T, D]."""
        x = x.to(fused.product_dtype(x))
        if context.projected:
            assert memory is not None
            key_value = memory
        else:
            key_value = self.key_value(x if memory is None else torch.cat([memory.to(x.dtype), x], dim=1))
        u, v = (context.u, context.v) if self.u is None else (self.u, self.v)
        assert u is not None
        assert v is not None
        seen = fused.relative_attention(
            self.query(x).unflatten(-1, (self.n_heads, -1)),  # [B, T, H, E]
            key_value.unflatten(-1, (2, self.n_heads, -1)),  # [B, K, 2, H, E]
            self.position(context.distances.to(x.dtype)).unflatten(-1, (self.n_heads, -1)),  # [K, H, E]
            u,
            v,
            self.attention_dropout if self.training else 0.0,
        )
        result: Tensor = self.output(seen.flatten(2))
        return result

    def project(self, x: Tensor) -> Tensor:
        """Keys and values [B, T, 2·H·E] of the block's input."""
        projected: Tensor = self.key_value(self.layer_norm(x) if self.pre_norm else x)
        return projected

    def multiply_adds(self, tgt_len: int, mem_len: int) -> float:
        """Distances are projected anew for each segment; masked scores are computed too."""
        d_model, inner, keys = self.query.in_features, self.query.out_features, tgt_len + mem_len
        return 4 * d_model * inner + d_model * inner * keys / tgt_len + 3 * keys * inner


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

    def multiply_adds(self, tgt_len: int, mem_len: int) -> float:  # noqa: ARG002
        """The two matrices."""
        return 2.0 * self.inner.in_features * self.inner.out_features


class Identity(Block):
    """x itself: no norm, no residual, no parameters."""

    def forward(self, x: Tensor, memory: Tensor | None, context: Context) -> Tensor:  # noqa: ARG002
        """Return `x`."""
        return x

    def multiply_adds(self, tgt_len: int, mem_len: int) -> float:  # noqa: ARG002
        """None."""
        return 0.0


def make_attention(config: ModelConfig, heads: int | None = None, d_head: int | None = None) -> SelfAttention:
    """Self-attention with so many heads of that width; where that is not the model's shape, with its own u and v.

    Heads of the model's width, but fewer of them, are the attention candidates of PLANER (arXiv 2208.14580).
    """
    shape = heads or config.n_heads, d_head or config.head_width
    shared = config.share_biases and shape == (config.n_heads, config.head_width)
    return SelfAttention(
        config.model_copy(update={"n_heads": shape[0], "d_head": shape[1], "share_biases": shared}),
    )


def make_feed_forward(config: ModelConfig, d_inner: int | None = None) -> FeedForward:
    """A feed-forward layer of that inner width."""
    return FeedForward(config.model_copy(update={"d_inner": d_inner or config.d_inner}))


MAKERS: dict[str, Callable[..., Block]] = {
    ATTENTION: make_attention,
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


def relative_biases(config: ModelConfig) -> tuple[nn.Parameter, nn.Parameter]:
    """The biases u (content) and v (position), each [H, E], in place of the query's own position."""
    shape = config.n_heads, config.head_width
    return nn.Parameter(torch.zeros(shape)), nn.Parameter(torch.zeros(shape))
