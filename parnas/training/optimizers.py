"""Optimizers of the weights, and their clipped steps."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn


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


def update_clipped(optimizer: torch.optim.AdamW, parameters: Sequence[nn.Parameter], clip: float) -> Tensor:
    """A step by the gradients of `parameters`, scaled to a norm of at most `clip`; the norm before."""
    norm = gradient_norm(parameters)
    step_clipped(optimizer, norm, clip)
    return norm.detach()


def step_clipped(optimizer: torch.optim.AdamW, norm: Tensor, clip: float, guarded: bool = False) -> None:
    """A step of an optimizer made by `make_adamw`, with gradients of that norm scaled to at most `clip`.

    Parameters without gradient stay as they are; `guarded`, so do all where the norm is not finite. All gradients are
    gone afterwards.
    """
    # The fused optimizer divides by this as it reads the gradients: scaling them before would be one more pass.
    optimizer.grad_scale = (norm / clip).clamp(min=1)  # type: ignore[attr-defined]
    if guarded:
        optimizer.found_inf = (~norm.isfinite()).to(norm.dtype)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
