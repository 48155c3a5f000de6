"""A network as one function of a segment and its memory, in operations that torch.export and ONNX know.

Memory has its full length from the start, and `lengths` say how much of it is filled: what is not is never attended to,
so that the first segments are read as the network reads them, whose memory starts empty.
Shapes: B batch, T segment, M memory, K = M + T keys, H heads, E width of a head, D model width, V vocabulary.
"""

import math
from itertools import pairwise
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parnas.architecture import Architecture, drop_identity
from parnas.errors import ParnasError
from parnas.model.attention import SelfAttention, encode_distances
from parnas.model.blocks import Block, Context
from parnas.model.heads import Embedding
from parnas.model.transformer_xl import TransformerXL


class State(NamedTuple):
    """What goes from segment to segment, for each row by itself."""

    lengths: Tensor  # [B] int64: filled positions of memory, 0 … M
    memory: tuple[Tensor, ...]  # of each self-attention layer keys and values, [B, M, 2·H·E], the newest last


class SegmentNetwork(nn.Module):
    """Called as `network(tokens, lengths, memory)`: log-probabilities [B, T, V], and the next lengths and memory."""

    def __init__(self, network: TransformerXL, architecture: Architecture) -> None:
        """Raises `ParnasError` for layers whose memory is of another kind than that of self-attention."""
        super().__init__()
        self.network = network
        self.mem_len = network.config.mem_len
        blocks = cast(list[Block], list(network.blocks))
        for name, block in zip(drop_identity(architecture), blocks, strict=True):
            if block.uses_memory and type(block) is not SelfAttention:
                raise ParnasError(
                    f"Layer {name} keeps a memory of its own, which can be exported as weights alone: --to safetensors."
                )

    def widths(self) -> list[int]:
        """Of the keys and values of each self-attention layer, 2·H·E; none where there is no memory."""
        found = [block.key_value.out_features for block in self.network.blocks if isinstance(block, SelfAttention)]
        return found if self.mem_len else []

    def empty(self, rows: int) -> State:
        """What the first segment is given."""
        memory = tuple(torch.zeros(rows, self.mem_len, width) for width in self.widths())
        return State(torch.zeros(rows, dtype=torch.int64), memory)

    def forward(
        self, tokens: Tensor, lengths: Tensor, memory: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Read the ids [B, T] of a segment."""
        reach, tgt_len = self.network.config.reach, tokens.shape[1]
        x = embed(self.network.embedding, tokens)
        encoded = encode_distances(self.mem_len + tgt_len, x.shape[-1], x.device, 0.0, reach.clamp_len)  # [K, D]
        context = Context(encoded, self.network.u, self.network.v, reach)
        hidden = self._hidden(tgt_len, lengths)
        given, kept = iter(memory), []
        for block in self.network.blocks:
            if isinstance(block, SelfAttention):
                x, keys = attend(block, x, next(given) if self.mem_len else None, context, hidden)
                kept.append(keys[:, tgt_len:])
            else:
                x = block(x, None, context).hidden
        if self.network.final_norm is not None:
            x = self.network.final_norm(x)
        return (
            self.network.log_probs(x),
            (lengths + tgt_len).clamp(max=self.mem_len),
            tuple(kept) if self.mem_len else (),
        )

    def _hidden(self, tgt_len: int, lengths: Tensor) -> Tensor:
        """[B, 1, T, K], true where a query must not see a key: later ones, memory not filled, and beyond the window."""
        keys = torch.arange(-self.mem_len, tgt_len, device=lengths.device)  # counted from the segment's beginning
        distances = torch.arange(tgt_len, device=lengths.device)[:, None] - keys  # [T, K]
        hidden = distances < 0
        if self.network.config.same_length:
            hidden = hidden | (distances >= self.mem_len)
        return hidden | (keys < -lengths[:, None, None, None])


def embed(embedding: Embedding, tokens: Tensor) -> Tensor:
    """As the embedding does, but for clusters, of which each looks up every token: shapes must not depend on ids."""
    if not embedding.projections:
        return cast(Tensor, embedding(tokens))
    whole: Tensor | None = None
    for (start, stop), table, projection in zip(
        pairwise(embedding.bounds), embedding.tables, embedding.projections, strict=True
    ):
        vectors = F.linear(F.embedding((tokens - start).clamp(0, stop - start - 1), table), projection)
        whole = vectors if whole is None else torch.where((tokens >= start)[..., None], vectors, whole)
    assert whole is not None
    return whole * math.sqrt(embedding.d_model)


def attend(
    layer: SelfAttention, x: Tensor, memory: Tensor | None, context: Context, hidden: Tensor
) -> tuple[Tensor, Tensor]:
    """What self-attention makes of x [B, T, D], and the keys and values [B, K, 2·H·E]; `hidden` [B, 1, T, K].

    The formula of Dai et al. 2019, §3.3, without the views and operations in place of `parnas.model.fused`.
    """
    segment = layer.normed(x)
    new = layer.key_value(segment)
    keys_values = new if memory is None else torch.cat([memory, new], dim=1)
    u, v = (context.u, context.v) if layer.u is None else (layer.u, layer.v)
    assert u is not None
    assert v is not None
    heads = layer.n_heads, layer.head_width
    query = layer.query(segment).unflatten(-1, heads).transpose(1, 2)  # [B, H, T, E]
    by_head = keys_values.unflatten(-1, (2, *heads)).permute(2, 0, 3, 1, 4)
    key, value = by_head[0], by_head[1]  # [B, H, K, E] each
    position = layer.position(context.distances).unflatten(-1, heads).permute(1, 2, 0)  # [H, E, K]
    content = (query + u[:, None]) @ key.transpose(-1, -2)  # [B, H, T, K]
    scores = (content + shift((query + v[:, None]) @ position)) / math.sqrt(layer.head_width)
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    change = layer.output((weights @ value).transpose(1, 2).flatten(2))
    return layer.joined(x, change), keys_values


def shift(by_distance: Tensor) -> Tensor:
    """Scores by distance, K - 1 … 0, to scores by key [B, H, T, K]; those of later keys mean nothing.

    The query at t reads the key at k from column T - 1 - t + k.
    """
    tgt_len, keys = by_distance.shape[2:]
    places = torch.arange(keys, device=by_distance.device)
    columns = (tgt_len - 1 - torch.arange(tgt_len, device=by_distance.device))[:, None] + places
    return by_distance.gather(3, columns.clamp(max=keys - 1).expand_as(by_distance))
