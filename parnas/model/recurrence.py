"""Gated recurrence: a token mixer whose state has the same size however long the text is.

The layer is linear attention with a forgetting gate, computed in chunks (Yang et al. 2024, arXiv 2312.06635), with one
gate per head and token as in Mamba-2 (Dao & Gu 2024, arXiv 2405.21060). Query q, key k, value v, of width E, and gate
0 < a < 1 of each head are computed from the input. The state S [E, E] and the output are

    S_t = a_t S_{t-1} + k_t v_tᵀ,        o_t = S_tᵀ q_t.

Computed token by token this is slow. Within a chunk of C tokens that begins with the state S, with the products
A_t = a_1 … a_t of the gates of the chunk,

    o_t = A_t Sᵀ q_t  +  sum over s <= t of  (A_t / A_s) (q_t · k_s) v_s,
    S'  = A_C S       +  sum over s of  (A_C / A_s) k_s v_sᵀ,

so that a chunk takes a few matrix products and only the states are passed on from chunk to chunk, one after the other.
All quotients are at most 1: they are computed as exponentials of differences of log A.

Shapes: B batch, T segment, D model width, H heads, E = D / H, C tokens of a chunk, n chunks.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parnas.config.schema import ModelConfig, Reach
from parnas.errors import ParnasError
from parnas.model import fused
from parnas.model.attention import in_product_dtype
from parnas.model.blocks import BlockOutput, Context, ResidualLayer
from parnas.model.memory import BlockMemory, KeyLengths

CHUNK = 64  # tokens; the work within chunks grows with it, the number of sequential steps falls
WHOLE_TEXT = 10**9  # tokens: the state depends on everything before


class GatedRecurrence(ResidualLayer):
    """Linear attention with a forgetting gate per head and an output gate (arXiv 2312.06635).

    Its memory is the state of each head, [B, H, E, E] in float32, which carries no gradient to earlier segments.
    """

    uses_memory = True

    def __init__(self, config: ModelConfig, heads: int = 4) -> None:
        super().__init__(config)
        if config.d_model % heads:
            raise ParnasError(f"r:heads={heads} does not divide model.d_model {config.d_model}; give a divisor.")
        self.heads = heads
        self.inner = nn.Linear(config.d_model, 4 * config.d_model, bias=False)  # query, key, value, output gate
        self.forget = nn.Linear(config.d_model, heads)
        self.norm = nn.LayerNorm(config.d_model // heads)
        self.outer = nn.Linear(config.d_model, config.d_model, bias=False)

    def initialise(self) -> None:
        """Let the heads forget at different rates at first: after about 10 to 1,000 tokens."""
        with torch.no_grad():
            # A gate of sigmoid(b) keeps half of the state for about exp(b) ln 2 tokens.
            self.forget.bias.copy_(torch.linspace(math.log(10), math.log(1000), self.heads))

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:  # noqa: ARG002
        """Mix the segment `x` [B, T, D] with the state of everything before it."""
        segment = in_product_dtype(self.normed(x))
        query, key, value, gate = self.inner(segment).chunk(4, dim=-1)
        mixed, state = self._scan(query, key, value, self.forget(segment), memory)
        mixed = self.norm(mixed.to(fused.sum_dtype(mixed.dtype)))
        gated = mixed.flatten(2).to(segment.dtype) * F.silu(gate)
        return BlockOutput(self.joined(x, self.outer(gated)), state)

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:  # noqa: ARG002
        """Return the memory that `forward` would return, without outputs."""
        with torch.no_grad():
            segment = in_product_dtype(self.normed(x))
            key, value = F.linear(segment, self.inner.weight[x.shape[2] : 3 * x.shape[2]]).chunk(2, dim=-1)
            keys, values, log_gates = self._chunked(key, value, self.forget(segment))
            return self._states(keys, values, log_gates, memory)[-1]

    def key_lengths(self, memory: BlockMemory) -> KeyLengths:  # noqa: ARG002
        """Return zero: no position is attended to."""
        return KeyLengths()

    def memory_tokens(self, reach: Reach) -> int:  # noqa: ARG002
        """Return 1: the state is full after one token."""
        return 1

    def look_back(self, reach: Reach, tgt_len: int) -> int:  # noqa: ARG002
        """Return a number above the length of any text: the output depends on all tokens before."""
        return WHOLE_TEXT

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """Return multiply-adds per token: five matrices and the gates, and four products per head with chunks of C."""
        width, chunk = self.outer.in_features, min(CHUNK, tgt_len)
        padded = math.ceil(tgt_len / chunk) * chunk / tgt_len
        within = 2 * width * chunk  # queries times keys, and their weights times values
        states = 2 * width * (width // self.heads)  # keys times values, and queries times states
        return width * (5 * width + self.heads) + padded * (within + states)

    def _scan(
        self, query: Tensor, key: Tensor, value: Tensor, logits: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return the outputs o [B, T, H, E] and the last state [B, H, E, E].

        Query, key and value are [B, T, D], `logits` [B, T, H] belong to the gates; `state` `None` is zero.
        """
        length = query.shape[1]
        keys, values, logs = self._chunked(key, value, logits)
        queries = self._chunks(query) * (query.shape[2] // self.heads) ** -0.5
        # 1. Within the chunks: (A_t / A_s) (q_t · k_s) for s <= t, else 0.
        chunk = logs.shape[-1]
        after = torch.ones(chunk, chunk, dtype=torch.bool, device=logs.device).triu(1)
        quotients = (logs[..., :, None] - logs[..., None, :]).masked_fill(after, -math.inf).exp()
        outputs = ((queries @ keys.mT) * quotients.to(queries.dtype)) @ values
        # 2. Add what the chunks before contribute: A_t Sᵀ q_t.
        before = self._states(keys[:, :, :-1], values[:, :, :-1], logs[:, :, :-1], state)
        outputs = outputs + (queries * logs.exp()[..., None].to(queries.dtype)) @ torch.stack(before, 2).to(query.dtype)
        # 3. The last state is the memory for the next segment and needs no gradient.
        with torch.no_grad():
            last = self._states(keys[:, :, -1:], values[:, :, -1:], logs[:, :, -1:], before[-1])[-1]
        # [B, H, n, C, E] to [B, T, H, E], without the tokens that fill up the last chunk
        return outputs.flatten(2, 3).transpose(1, 2)[:, :length], last

    def _states(self, keys: Tensor, values: Tensor, logs: Tensor, state: Tensor | None) -> list[Tensor]:
        """Return the n + 1 states before each of n >= 0 chunks and after the last, [B, H, E, E] each."""
        rows, heads, chunks, _, size = keys.shape
        states = [logs.new_zeros(rows, heads, size, size) if state is None else state]
        if chunks:
            # Each chunk adds sum over s of (A_C / A_s) k_s v_sᵀ, all at once. What remains is one step per chunk.
            quotients = (logs[..., -1:] - logs).exp()[..., None].to(keys.dtype)
            added = ((keys * quotients).mT @ values).to(logs.dtype)  # [B, H, n, E, E]
            kept = logs[..., -1].exp()[..., None, None]  # A_C, [B, H, n, 1, 1]
            for chunk in range(chunks):
                states.append(states[-1] * kept[:, :, chunk] + added[:, :, chunk])
        return states

    def _chunked(self, key: Tensor, value: Tensor, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return keys and values by chunks, [B, H, n, C, E], and the logarithms of A_1 … A_C of each, [B, H, n, C]."""
        # Padding after the sigmoid: an added token has gate 1 and key 0, so that it changes no state.
        log_gates = -F.softplus(-logits.to(fused.sum_dtype(logits.dtype)))  # log sigmoid
        logs = self._chunks(log_gates).squeeze(-1)
        return self._chunks(key), self._chunks(value), logs.cumsum(dim=-1)

    def _chunks(self, x: Tensor) -> Tensor:
        """Split [B, T, H·E] by heads and chunks, [B, H, n, C, E]; zeros fill up the last chunk."""
        chunk = min(CHUNK, x.shape[1])
        x = F.pad(x, (0, 0, 0, -x.shape[1] % chunk))
        by_chunk: Tensor = x.unflatten(1, (-1, chunk)).unflatten(3, (self.heads, -1))  # [B, n, C, H, E]
        return by_chunk.permute(0, 3, 1, 2, 4)
