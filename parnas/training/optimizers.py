"""Optimizers of the weights, and their clipped steps."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

MOMENTUM = 0.95  # of Muon, with Nesterov's look ahead
ITERATIONS = 5  # of Newton and Schulz
COEFFICIENTS = 3.4445, -4.7750, 2.0315
RMS = 0.2  # of an update by Muon, as AdamW's are


class Muon(torch.optim.Optimizer):
    """Momentum whose update is the nearest matrix with singular values near 1 (Jordan et al. 2024, "Muon").

    Scaled to the root mean square of AdamW's updates, so that both take the same learning rate and weight decay (Liu
    et al. 2025, arXiv 2502.16982, equation 4). Matrices [rows, columns] alone; those without gradient stay as they are.
    Gradients are divided by `grad_scale`, a scalar; `found_inf`, another, lets a step pass where it is 1: the weights
    stay, and the momentum only fades.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype = torch.float32
    ) -> None:
        """`dtype`: of its matrix products; bf16 is exact enough where the processor computes in it."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all matrices, those of one shape together."""
        for group in self.param_groups:
            shapes: dict[torch.Size, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    shapes.setdefault(matrix.shape, []).append(matrix)
            for matrices in shapes.values():
                self._update(matrices, group["lr"], group["weight_decay"])

    def _update(self, matrices: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
        if self.grad_scale is not None:
            gradients /= self.grad_scale
        if self.found_inf is not None:
            gradients = gradients.where(self.found_inf == 0, 0.0)
        buffers = [self._buffer(matrix) for matrix in matrices]
        torch._foreach_lerp_(buffers, list(gradients), 1 - MOMENTUM)
        updates = orthogonalise(gradients.lerp_(torch.stack(buffers), MOMENTUM).to(self.dtype))
        rate = lr if self.found_inf is None else lr * (1 - self.found_inf)
        scaled = updates.to(buffers[0].dtype) * (rate * RMS * max(updates.shape[1:]) ** 0.5)
        weights: list[Tensor] = list(matrices)
        torch._foreach_mul_(weights, 1 - rate * weight_decay)
        torch._foreach_sub_(weights, list(scaled))

    def _buffer(self, matrix: nn.Parameter) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        buffer: Tensor = state["momentum"]
        return buffer


def orthogonalise(matrices: Tensor) -> Tensor:
    """[N, rows, columns] to matrices of the same singular vectors, with singular values of about 0.7 to 1.2.

    The Newton-Schulz iterations of Jordan et al. 2024.
    """
    a, b, c = COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(ITERATIONS):
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def suits_muon(name: str, weight: nn.Parameter) -> bool:
    """Whether a parameter is a matrix of a layer, which Muon is for: no embedding, softmax, bias, u, v or norm."""
    return name.startswith("blocks.") and weight.dim() == 2 and name.rpartition(".")[2] not in ("u", "v")


def make_adamw(parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW whose weight decay spares biases, the relative ones u and v too, and norms."""
    decayed = {name for name, p in parameters.items() if p.dim() > 1 and name.rpartition(".")[2] not in ("u", "v")}
    groups = [
        {"params": [p for name, p in parameters.items() if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Norm of all gradients together, a scalar; of those that there are."""
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def update_clipped(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], clip: float) -> Tensor:
    """A step by the gradients of `parameters`, scaled to a norm of at most `clip`; the norm before."""
    norm = gradient_norm(parameters)
    step_clipped(optimizer, norm, clip)
    return norm.detach()


def step_clipped(optimizer: torch.optim.Optimizer, norm: Tensor, clip: float, guarded: bool = False) -> None:
    """A step of AdamW or Muon made here, with gradients of that norm scaled to at most `clip`.

    Parameters without gradient stay as they are; `guarded`, so do all where the norm is not finite. All gradients are
    gone afterwards. Muon's steps have one size whatever the gradients': clipping bounds what one of them has of the
    momentum.
    """
    # The fused AdamW divides by this as it reads the gradients: scaling them before would be one more pass.
    optimizer.grad_scale = (norm / clip).clamp(min=1)  # type: ignore[attr-defined]
    if guarded:
        optimizer.found_inf = (~norm.isfinite()).to(norm.dtype)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def refuse_misshapen(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` where an optimizer's state has not the shape of what it is about, which no kernel checks."""
    for parameter, state in optimizer.state.items():
        for name in ("momentum",) if isinstance(optimizer, Muon) else ("exp_avg", "exp_avg_sq", "step"):
            if state[name].shape != (() if name == "step" else parameter.shape):
                raise ValueError(f"the optimizer's {name} has not the shape of its parameter")
