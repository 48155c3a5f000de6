"""Gated short convolution: a token mixer that sees a few positions and costs less than a feed-forward layer.

LFM2 (arXiv 2511.23404, section 2.2) builds networks of such layers with few attention layers between them. With the
projections [b, c, v] = x W_in of the input x,

    y = (c ⊙ conv(b ⊙ v)) W_out,        conv(u)_t = sum over j < width of  kernel_j ⊙ u_{t - width + 1 + j}.

The convolution is causal and depthwise: each feature has a kernel of its own, of `width` numbers.

Shapes: B batch, T segment, D model width, W kernel width.
"""

import torch
from torch import Tensor, nn

from parnas.config.schema import ModelConfig, Reach
from parnas.model.attention import in_product_dtype
from parnas.model.blocks import Block, BlockOutput, Context, ResidualLayer
from parnas.model.memory import BlockMemory, KeyLengths


class GatedConvolution(ResidualLayer):
    """Gated depthwise convolution over the last `width` positions (LFM2, arXiv 2511.23404, section 2.2).

    Its memory are the gated values b ⊙ v at the last `width` - 1 positions, [B, W - 1, D], whatever `mem_len` is. Zeros
    fill the positions before the text.
    """

    uses_memory = True

    def __init__(self, config: ModelConfig, width: int = 4) -> None:
        super().__init__(config)
        self.width = width
        self.inner = nn.Linear(config.d_model, 3 * config.d_model, bias=False)
        # The newest position last. Its initial values are as small as those of matrices, so that the layer changes its
        # input little at first: with 1 / √width the perplexity of kfkfkskfkfk after 1,000 steps was 3.5 % higher.
        self.kernel = nn.Parameter(torch.empty(width, config.d_model))
        self.outer = nn.Linear(config.d_model, config.d_model, bias=False)

    def forward(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:  # noqa: ARG002
        """Mix each position of the segment `x` [B, T, D] with the W - 1 positions before it."""
        # 1. Gate the values before the convolution, and continue the values of the previous segment.
        b, c, v = self.inner(in_product_dtype(self.normed(x))).chunk(3, dim=-1)
        gated = self._continue(memory, b * v)  # [B, W - 1 + T, D]
        # 2. Convolve. A sum of W shifted products is faster on a CPU than conv1d with as many groups as features.
        kernel, length = self.kernel.to(gated.dtype), x.shape[1]
        mixed = gated[:, :length] * kernel[0]
        for shift in range(1, self.width):
            mixed.addcmul_(gated[:, shift : shift + length], kernel[shift])
        # 3. Gate the result, project it and add it to the input.
        return BlockOutput(self.joined(x, self.outer(c * mixed)), self._newest(gated))

    def share_weights(self, larger: Block) -> None:
        """Use the matrices of a layer with a longer kernel; the kernels are separate."""
        if isinstance(larger, GatedConvolution):
            self.layer_norm, self.inner, self.outer = larger.layer_norm, larger.inner, larger.outer

    def skip(self, x: Tensor, memory: BlockMemory, context: Context) -> BlockMemory:  # noqa: ARG002
        """Return the memory that `forward` would return, computed from the last W - 1 positions alone."""
        if self.width == 1:
            return None
        with torch.no_grad():
            newest = in_product_dtype(self.normed(x[:, 1 - self.width :]))
            b, _, v = self.inner(newest).chunk(3, dim=-1)
            return self._newest(self._continue(memory, b * v))

    def key_lengths(self, memory: BlockMemory) -> KeyLengths:  # noqa: ARG002
        """Return zero: no position is attended to."""
        return KeyLengths()

    def memory_tokens(self, reach: Reach) -> int:  # noqa: ARG002
        """Return W - 1."""
        return self.width - 1

    def look_back(self, tokens: int, reach: Reach, tgt_len: int) -> int:  # noqa: ARG002
        """Return W - 1 more than `tokens`, since each position reads the W - 1 positions before it."""
        return tokens + self.width - 1

    def multiply_adds(self, tgt_len: int, reach: Reach) -> float:  # noqa: ARG002
        """Return the multiply-adds of the two matrices per token."""
        return 4.0 * self.outer.in_features * self.outer.out_features

    def _continue(self, memory: BlockMemory, gated: Tensor) -> Tensor:
        """Return `gated` [B, T, D] after the gated values of the last W - 1 positions before it."""
        if memory is None:
            memory = gated.new_zeros(gated.shape[0], self.width - 1, gated.shape[2])
        return torch.cat([memory.to(gated.dtype), gated], dim=1)

    def _newest(self, gated: Tensor) -> BlockMemory:
        return gated[:, 1 - self.width :].detach().clone() if self.width > 1 else None
