"""A network as a function of a segment and the memory, in operations that torch.export and ONNX support.

Memory has a fixed length here; in each row its last `lengths` positions are filled, and the others are masked. So the
first segments of a text give the same results as in `TransformerXL`, whose memory starts empty.
Shapes: B batch, T segment, M memory, K = M + T keys, H heads, E head width, D model width, V vocabulary.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parnas.architecture import Architecture, drop_identity
from parnas.errors import ParnasError
from parnas.model.attention import SelfAttention, encode_distances
from parnas.model.blocks import Block, Context
from parnas.model.heads import Embedding
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL

Step: TypeAlias = Callable[[Tensor, Any], tuple[Tensor, Any]]
"""Function from ids [B, T] and a state to log-probabilities [B, T, V] and the next state."""


class SegmentState(NamedTuple):
    """The memory that is passed from segment to segment, and the number of its filled positions in each row."""

    lengths: Tensor  # [B] int64: filled positions of memory, 0 … M
    memory: tuple[Tensor, ...]  # keys and values of each self-attention layer [B, M, 2·H·E], the newest last


class SegmentNetwork(nn.Module):
    """A network with the memory as arguments, for export.

    Call it as `network(tokens, lengths, memory)` with ids [B, T] and the fields of a `SegmentState`; it returns
    log-probabilities [B, T, V] and the next lengths and memory.
    """

    def __init__(self, network: TransformerXL, architecture: Architecture) -> None:
        """Wrap a discrete network; raise `ParnasError` if a layer other than self-attention uses memory."""
        super().__init__()
        if network.pointer is not None:
            raise ParnasError("A network with a pointer can only be exported as weights; use --to safetensors.")
        self.network, self.architecture = _compose_embedding(network, architecture), architecture
        self.mem_len = network.config.mem_len
        for name, block in zip(drop_identity(architecture), network.blocks, strict=True):
            plain = type(block) is SelfAttention and block.window is None
            if cast(Block, block).uses_memory and not plain:
                raise ParnasError(
                    f"Layer {name} has another kind of memory than self-attention (s), so only weights can be "
                    "exported; use --to safetensors."
                )

    def widths(self) -> list[int]:
        """Return the width 2·G·E of the keys and values of each self-attention layer; empty if `mem_len` is 0."""
        widths = [block.key_value.out_features for block in self.network.blocks if isinstance(block, SelfAttention)]
        return widths if self.mem_len else []

    def empty(self, rows: int) -> SegmentState:
        """Return the state before the first segment for a batch of `rows` rows: zeros, with no position filled."""
        memory = tuple(torch.zeros(rows, self.mem_len, width) for width in self.widths())
        return SegmentState(torch.zeros(rows, dtype=torch.int64), memory)

    def forward(
        self, tokens: Tensor, lengths: Tensor, memory: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
        """Return log-probabilities [B, T, V], next lengths and next memory for a segment of token ids [B, T]."""
        network, tgt_len = self.network, tokens.shape[1]
        reach = network.config.reach
        x = _embed(network.embedding, tokens)
        encoded = encode_distances(self.mem_len + tgt_len, x.shape[-1], x.device, 0.0, reach.clamp_len)  # [K, D]
        context = Context(encoded, network.u, network.v, reach)
        masked = self._mask(tgt_len, lengths)
        memories, next_memory = iter(memory), []
        for block in network.blocks:
            if isinstance(block, SelfAttention):
                x, keys_values = _attend(block, x, next(memories) if self.mem_len else None, context, masked)
                next_memory.append(keys_values[:, tgt_len:])
            else:
                x = block(x, None, context).hidden
        hidden = x if network.final_norm is None else network.final_norm(x)
        log_probs = network.head.log_probs(hidden.flatten(0, 1)).unflatten(0, tokens.shape)
        return log_probs, (lengths + tgt_len).clamp(max=self.mem_len), tuple(next_memory) if self.mem_len else ()

    def _mask(self, tgt_len: int, lengths: Tensor) -> Tensor:
        """Return a mask [B, 1, T, K] that is true for keys to which a query must not attend.

        These are keys after the query, unfilled memory and, with `same_length`, keys `mem_len` or more positions back.
        """
        keys = torch.arange(-self.mem_len, tgt_len, device=lengths.device)  # relative to the segment's first token
        distances = torch.arange(tgt_len, device=lengths.device)[:, None] - keys  # [T, K]
        masked = distances < 0
        if self.network.config.same_length:
            masked = masked | (distances >= self.mem_len)
        return masked | (keys < -lengths[:, None, None, None])


def _compose_embedding(network: TransformerXL, architecture: Architecture) -> TransformerXL:
    """Return an equal network whose tokens have no subword features: its embedding has the sums of all vectors."""
    if network.embedding.shared is None:
        return network
    config = network.config.model_copy(update={"subword_features": 0})
    with torch.random.fork_rng(devices=[]):  # the initial weights are not used and must cost no random number
        composed = TransformerXL.build(config, architecture, network.vocab_size).train(network.training)
    with torch.no_grad():
        table = network.embedding.compose()
    weights = network.state_dict() | {"embedding.tables.0": table, "head.tables.0": table}
    composed.load_state_dict({name: weights[name] for name in composed.state_dict()})
    return composed


def _embed(embedding: Embedding, tokens: Tensor) -> Tensor:
    """Embed ids [B, T] to [B, T, D]; each cluster embeds all ids, because traced shapes must not depend on ids."""
    if not embedding.projections:
        return cast(Tensor, embedding(tokens))
    x = torch.zeros(())
    clusters = zip(pairwise(embedding.bounds), embedding.tables, embedding.projections, strict=True)
    for (start, stop), table, projection in clusters:
        vectors = F.linear(F.embedding((tokens - start).clamp(0, stop - start - 1), table), projection)
        x = torch.where((tokens >= start)[..., None], vectors, x)
    return x * math.sqrt(embedding.d_model)


def _attend(
    layer: SelfAttention, x: Tensor, memory: Tensor | None, context: Context, masked: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the output of self-attention for x [B, T, D], and the keys and values [B, K, 2·G·E].

    This is the formula of Dai et al. 2019, section 3.3, without the views and in-place operations of
    `parnas.model.fused`. `masked` [B, 1, T, K] is true for keys to which a query must not attend.
    """
    segment = layer.normed(x)
    new = layer.key_value(segment)
    keys_values = new if memory is None else torch.cat([memory, new], dim=1)
    u, v = cast(tuple[Tensor, Tensor], (context.u, context.v) if layer.u is None else (layer.u, layer.v))
    heads = layer.n_heads, layer.head_width
    query = layer.query(segment).unflatten(-1, heads).transpose(1, 2)  # [B, H, T, E]
    by_head = layer.keys_by_head(keys_values).permute(2, 0, 3, 1, 4)
    key, value = by_head[0], by_head[1]  # [B, H, K, E] each
    position = layer.position(context.distances).unflatten(-1, heads).permute(1, 2, 0)  # [H, E, K]
    content = (query + u[:, None]) @ key.transpose(-1, -2)  # [B, H, T, K]
    scores = (content + _shift((query + v[:, None]) @ position)) / math.sqrt(layer.head_width)
    weights = scores.masked_fill(masked, -math.inf).softmax(dim=-1)
    change = layer.output((weights @ value).transpose(1, 2).flatten(2))
    return layer.joined(x, change), keys_values


def _shift(by_distance: Tensor) -> Tensor:
    """Reorder scores from columns for distances K - 1 … 0 to columns for keys, both [B, H, T, K].

    The score of the query at t for key k is in column T - 1 - t + k (Dai et al. 2019, appendix B). Keys after the query
    get arbitrary values, which the caller masks.
    """
    tgt_len, keys = by_distance.shape[2:]
    positions = torch.arange(keys, device=by_distance.device)
    columns = (tgt_len - 1 - torch.arange(tgt_len, device=by_distance.device))[:, None] + positions
    return by_distance.gather(3, columns.clamp(max=keys - 1).expand_as(by_distance))


@torch.no_grad()
def largest_difference(network: TransformerXL, step: Step, start: Callable[[int], Any], tgt_len: int) -> float:
    """Return the largest absolute difference, in nats, between log-probabilities of a network and of its export.

    Network and export read the same random tokens with memory, first with batch size 1, then with 2: at most 8 segments
    of different lengths of up to 64 tokens. `step` runs the export; `start` takes the batch size and returns the state
    of `step` before the first segment. If a log-probability is not finite, the result is infinity.
    """
    whole = min(tgt_len, 64)
    lengths = [whole, 1, whole // 2 + 1, *[whole] * math.ceil(network.config.mem_len / whole)][:8]
    generator = torch.Generator().manual_seed(0)
    differences = []
    for rows in (1, 2):
        memory: Memory | None = None
        state = start(rows)
        for length in lengths:
            tokens = torch.randint(network.vocab_size, (rows, length), generator=generator)
            output = network(tokens, memory, inference=True)
            memory = output.memory
            log_probs, state = step(tokens, state)
            differences.append((log_probs - network.log_probs(output)).abs().max())
    return torch.stack(differences).nan_to_num(nan=math.inf, posinf=math.inf).max().item()
