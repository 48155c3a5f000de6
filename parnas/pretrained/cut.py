"""Cut layers: the most important heads and inner features of a trained layer.

The importance of an input channel j of a linear map is the score of Wanda (Sun et al. 2023, arXiv 2306.11695, section
3), summed over the outputs,

    score_j = rms(x_j) · ‖W_j‖,

with the root mean square of the channel over a text and the norm of its column of weights: about how much the output
changes without the channel. Here the map is the last one of a layer, so that a channel is an inner feature, or a part
of a head; the importance of a head is the root of the sum of squares over its channels.

Shapes: D model width, H heads, G heads of keys and values, E head width, I inner features.
"""

from typing import cast

import torch
from torch import Tensor, nn

from parnas.model.attention import SelfAttention
from parnas.model.layers import Block, FeedForward, GatedFeedForward, ResidualLayer


def output_map(layer: Block) -> nn.Linear | None:
    """Return the last linear map of a layer that can be cut; `None` for a layer of another kind."""
    found = {SelfAttention: "output", FeedForward: "outer", GatedFeedForward: "outer"}.get(type(layer))
    return None if found is None else getattr(layer, found)


class Importance:
    """Measures the importance of the inputs of a linear map in all its calls until `close`.

    Args:
        linear: an `nn.Linear`, or a `Conv1D` of `transformers`, whose weights are transposed.
    """

    def __init__(self, linear: nn.Module) -> None:
        weight = cast(Tensor, linear.weight).detach().float()
        self._norms = (weight if isinstance(linear, nn.Linear) else weight.t()).norm(dim=0)  # [inputs]
        self._squares, self._count = torch.zeros_like(self._norms, dtype=torch.float64), 0
        self._hook = linear.register_forward_pre_hook(self._add)

    def _add(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        flat = arguments[0].detach().flatten(0, -2).float()
        self._squares += flat.square().sum(dim=0)
        self._count += len(flat)

    def scores(self) -> Tensor:
        """Return the importance of each input, [inputs] in float32."""
        rms = (self._squares / max(1, self._count)).sqrt().float()
        return cast(Tensor, rms * self._norms)

    def close(self) -> None:
        """Stop measuring."""
        self._hook.remove()


def copy_cut(layer: Block, cut: Block, importance: Tensor | None, u: Tensor | None, v: Tensor | None) -> bool:
    """Copy the most important part of a trained layer into a smaller one of the same kind.

    Args:
        layer: the trained layer.
        cut: the layer to fill; it may also be as large, such as attention with a window.
        importance: of the inputs of `output_map(layer)`, [inputs]; `None` if it was not measured.
        u: the content bias of the trained layer, [H, E].
        v: the distance bias, [H, E].

    Returns:
        Whether the layers are of the same kind and `cut` is no larger; otherwise nothing is copied.
    """
    if type(layer) is not type(cut) or not isinstance(layer, ResidualLayer) or not isinstance(cut, ResidualLayer):
        return False
    if shapes_of(layer) == shapes_of(cut):
        cut.load_state_dict(layer.state_dict())
        return True
    with torch.no_grad():
        if type(layer) is SelfAttention and type(cut) is SelfAttention:
            fewer = cut.n_heads < layer.n_heads and importance is not None
            if layer.head_width != cut.head_width or not (fewer or cut.n_heads == layer.n_heads):
                return False
            _copy_attention(layer, cut, importance, u, v)
        elif isinstance(layer, FeedForward | GatedFeedForward) and isinstance(cut, FeedForward | GatedFeedForward):
            if cut.outer.in_features > layer.outer.in_features or importance is None:
                return False
            _copy_feed_forward(layer, cut, importance)
        else:
            return False
        cut.layer_norm.load_state_dict(layer.layer_norm.state_dict())
    return True


def shapes_of(layer: Block) -> dict[str, torch.Size]:
    """Return the shape of each weight of a layer, by name."""
    return {name: weight.shape for name, weight in layer.state_dict().items()}


def _copy_attention(
    layer: SelfAttention, cut: SelfAttention, importance: Tensor | None, u: Tensor | None, v: Tensor | None
) -> None:
    """Copy the most important heads; heads of keys and values that several kept ones use are averaged."""
    width, heads = layer.head_width, torch.arange(layer.n_heads)
    if cut.n_heads < layer.n_heads:
        assert importance is not None
        by_head = importance.view(layer.n_heads, width).norm(dim=1)
        heads = by_head.topk(cut.n_heads).indices.sort().values
    channels = channels_of(heads, width)
    cut.query.weight.copy_(layer.query.weight[channels])
    cut.position.weight.copy_(layer.position.weight[channels])
    cut.output.weight.copy_(layer.output.weight[:, channels])
    # Keys and values of each kept head, [2, heads, E, D]; then the mean of the heads of each group of the cut layer
    # (grouped-query attention, Ainslie et al. 2023, arXiv 2305.13245, section 2.1).
    keys = layer.key_value.weight.view(2, layer.kv_heads, width, -1)[:, heads * layer.kv_heads // layer.n_heads]
    grouped = keys.view(2, cut.kv_heads, cut.n_heads // cut.kv_heads, width, keys.shape[-1]).mean(dim=2)
    cut.key_value.weight.copy_(grouped.flatten(0, 2))
    for own, whole in ((cut.u, layer.u if u is None else u), (cut.v, layer.v if v is None else v)):
        if own is not None and whole is not None:
            own.copy_(whole[heads])


def _copy_feed_forward(
    layer: FeedForward | GatedFeedForward, cut: FeedForward | GatedFeedForward, importance: Tensor
) -> None:
    """Copy the most important inner features, and in a gated layer their gates."""
    kept = importance.topk(cut.outer.in_features).indices.sort().values
    rows = torch.cat([kept, kept + layer.outer.in_features]) if isinstance(layer, GatedFeedForward) else kept
    for own, whole, chosen in ((cut.inner, layer.inner, rows), (cut.outer, layer.outer, None)):
        weight = whole.weight[:, kept] if chosen is None else whole.weight[chosen]
        own.weight.copy_(weight)
        if own.bias is not None and whole.bias is not None:
            own.bias.copy_(whole.bias if chosen is None else whole.bias[chosen])


def channels_of(heads: Tensor, width: int) -> Tensor:
    """Return the channels of heads, or of groups of channels, of a width, in their order."""
    return (heads[:, None] * width + torch.arange(width, device=heads.device)).flatten()
