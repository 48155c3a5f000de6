"""Gated recurrence: a token mixer whose state has the same size however long the text is.

The layer is a gated recurrent unit whose gate and candidate depend on the input, but not on the previous state: minGRU
(Feng et al. 2024, arXiv 2410.01201, section 3.1), with an output gate as in HGRN (Qin et al. 2023, arXiv 2311.04823).
Each feature has a state of its own. With the projections [z, c, o] = x W_in + b of the input x,

    h_t = a_t h_{t-1} + (1 - a_t) c_t,      a_t = 1 - sigmoid(z_t),       y_t = (h_t ⊙ silu(o_t)) W_out.

Token by token this takes T steps, one after the other. But it is linear in h: the state after some tokens is a product
of gates times the state before them, plus a sum that does not depend on that state. So the segment is cut into n chunks
of C tokens. First all chunks are computed at once as if their states began with zero, in C steps; then the state is
passed on from chunk to chunk, in n steps. On CUDA, the kernel of flash-linear-attention (arXiv 2312.06635) runs instead
where it is installed (the extra `cuda`): it runs token by token for each feature, without storing anything in between.

Shapes: B batch, T segment, D model width, C tokens of a chunk, n chunks.
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parnas.config.schema import ModelConfig, Reach
from parnas.model import fused
from parnas.model.attention import in_product_dtype
from parnas.model.blocks import BlockOutput, Context, ResidualLayer
from parnas.model.memory import BlockMemory, KeyLengths

__all__ = ["WHOLE_TEXT"]

CHUNK = 16  # tokens: about as many steps within chunks as between them, at usual segment lengths
WHOLE_TEXT = 10**9  # tokens: the state depends on everything before


class GatedRecurrence(ResidualLayer):
    """Gated recurrence of each feature (minGRU, arXiv 2410.01201) with an output gate.

    Its memory is the state [B, D] in float32, which carries no gradient to earlier segments.
    """

    uses_memory = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.inner = nn.Linear(config.d_model, 3 * config.d_model)  # gate, candidate, output gate
        self.outer = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:  # noqa: ARG002
        """Mix the segment `x` [B, T, D] with the state of everything before it."""
        logits, candidates, outputs = self.inner(in_product_dtype(self.normed(x))).chunk(3, dim=-1)
        states = scan(logits, candidates, memory)  # [B, T, D]
        gated = states.to(outputs.dtype) * F.silu(outputs)
        return BlockOutput(self.joined(x, self.outer(gated)), states[:, -1].detach().clone())

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:  # noqa: ARG002
        """Return the memory that `forward` would return, without outputs."""
        width = 2 * x.shape[2]
        with torch.no_grad():
            segment = in_product_dtype(self.normed(x))
            logits, candidates = F.linear(segment, self.inner.weight[:width], self.inner.bias[:width]).chunk(2, dim=-1)
            return scan(logits, candidates, memory)[:, -1].clone()

    def key_lengths(self, memory: BlockMemory) -> KeyLengths:  # noqa: ARG002
        """Return zero: no position is attended to."""
        return KeyLengths()

    def memory_tokens(self, reach: Reach) -> int:  # noqa: ARG002
        """Return 1: the state is full after one token."""
        return 1

    def look_back(self, tokens: int, reach: Reach, tgt_len: int) -> int:  # noqa: ARG002
        """Return a number of tokens above the length of any text: the output depends on all tokens before."""
        return WHOLE_TEXT

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """Return the multiply-adds of the two matrices per token; the scan has no matrix product."""
        return 4.0 * self.outer.in_features * self.outer.out_features


def scan(logits: Tensor, candidates: Tensor, state: Tensor | None) -> Tensor:
    """Return the states h_1 … h_T, [B, T, D] in float32 or float64, given z and c, [B, T, D].

    `state` [B, D] is the state before; `None` is a state of zeros.
    """
    dtype = fused.sum_dtype(logits.dtype)
    logits, candidates = logits.to(dtype), candidates.to(dtype)
    update = logits.sigmoid()
    kernel = find_kernel() if logits.is_cuda and dtype == torch.float32 else None
    if kernel is None:
        return scan_chunks(1 - update, update * candidates, state)
    return scan_by_kernel(kernel, logits, update * candidates, state)


def scan_chunks(gates: Tensor, inputs: Tensor, state: Tensor | None) -> Tensor:
    """Return the states h_1 … h_T, [B, T, D], given a and (1 - a) c, [B, T, D], and the state before, [B, D]."""
    rows, length, width = gates.shape
    chunk = min(CHUNK, length)
    if padding := -length % chunk:  # added tokens come last and are cut off again
        gates, inputs = (F.pad(each, (0, 0, 0, padding)) for each in (gates, inputs))
    a, u = (each.view(rows, -1, chunk, width).unbind(2) for each in (gates, inputs))  # C of [B, n, D]
    # 1. All chunks at once, one token after the other: the states from a zero state, and the products of gates.
    local, products = [u[0]], [a[0]]
    for token in range(1, chunk):
        local.append(a[token] * local[-1] + u[token])
        products.append(a[token] * products[-1])
    # 2. One chunk after the other: the states before the chunks.
    state = torch.zeros_like(inputs[:, 0]) if state is None else state
    before = []
    for kept, added in zip(products[-1].unbind(1), local[-1].unbind(1), strict=True):
        before.append(state)
        state = kept * state + added
    # 3. Both together: h_t = (a_1 … a_t) · state before the chunk + state from zero.
    states = torch.stack(products, dim=2) * torch.stack(before, dim=1)[:, :, None] + torch.stack(local, dim=2)
    return states.flatten(1, 2)[:, :length]


def scan_by_kernel(
    kernel: Callable[..., tuple[Tensor, Tensor]], logits: Tensor, inputs: Tensor, state: Tensor | None
) -> Tensor:
    """Return the states as `scan_chunks` does, given z and (1 - a) c [B, T, D]; `kernel` is that of `find_kernel`."""
    log_gates = F.logsigmoid(-logits)  # log a, finite where a itself would be rounded to zero
    return kernel(inputs.contiguous(), log_gates.contiguous(), initial_state=state)[0]


@cache
def find_kernel() -> Callable[..., tuple[Tensor, Tensor]] | None:
    """Return the CUDA kernel of flash-linear-attention for h_t = exp(g_t) h_{t-1} + x_t; `None` if not installed."""
    try:
        from fla.ops.hgrn import fused_recurrent_hgrn
    except ImportError:
        return None
    kernel: Callable[..., tuple[Tensor, Tensor]] = fused_recurrent_hgrn
    return kernel
