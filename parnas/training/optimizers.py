"""The optimizers AdamW and Muon with gradient clipping, the average of weights, and the learning-rate schedule."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from parnas.config.schema import TrainConfig

__all__ = ["Schedule", "check_shapes", "clone_weights", "copy_weights", "gradient_norm"]

_VECTORS = ("u", "v", "kernel")  # two-dimensional parameters that are no matrices: a vector per head or position
_MOMENTUM = 0.95  # of Muon, in Nesterov's form
_ITERATIONS = 5  # of Newton-Schulz
_COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x³ and x⁵ in a Newton-Schulz iteration (Jordan et al. 2024)
_UPDATE_RMS = 0.2  # root mean square of Muon's updates, about that of AdamW's


class Muon(torch.optim.Optimizer):
    """Optimizer that orthogonalises momentum: all singular values of an update are near 1 (Jordan et al. 2024, "Muon").

    Updates are scaled to the root mean square of AdamW's updates, so that Muon and AdamW share learning rate and weight
    decay (Liu et al. 2025, arXiv 2502.16982, equation 4). All parameters are matrices [rows, columns]. A matrix without
    gradient does not change.

    torch.optim.Muon makes the same update matrix by matrix; this class batches matrices of equal shape, computes in the
    precision of the training and can skip a step on the device (`benchmarks/muon.py` compares the two classes).

    Two attributes work as in torch's fused AdamW: gradients are divided by the scalar `grad_scale`; if the scalar
    `found_inf` is 1, a step leaves the weights unchanged and only decays the momentum.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype = torch.float32
    ) -> None:
        """Make the optimizer; `dtype` is that of the matrix products, for which bf16 is precise enough."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all matrices that have a gradient; updates of the same shape are orthogonalised in one batch."""
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[nn.Parameter]] = {}
            for matrix in group["params"]:
                if matrix.grad is not None:
                    by_shape.setdefault(matrix.shape, []).append(matrix)
            for matrices in by_shape.values():
                self._update(matrices, group["lr"], group["weight_decay"])

    def _update(self, matrices: Sequence[nn.Parameter], lr: float, weight_decay: float) -> None:
        gradients = torch.stack([matrix.grad for matrix in matrices if matrix.grad is not None])
        if self.grad_scale is not None:
            gradients /= self.grad_scale
        if self.found_inf is not None:
            gradients = gradients.where(self.found_inf == 0, 0.0)
        # 1. momentum, then Nesterov's interpolation between momentum and gradient
        momenta = [self._momentum(matrix) for matrix in matrices]
        torch._foreach_lerp_(momenta, list(gradients), 1 - _MOMENTUM)
        updates = gradients.lerp_(torch.stack(momenta), _MOMENTUM).to(self.dtype)
        # 2. orthogonalise, and scale to the size of AdamW's updates
        updates = orthogonalise(updates)
        rate = lr if self.found_inf is None else lr * (1 - self.found_inf)
        scaled = updates.to(momenta[0].dtype) * (rate * _UPDATE_RMS * max(updates.shape[1:]) ** 0.5)
        # 3. decoupled weight decay, then the step
        weights: list[Tensor] = list(matrices)
        torch._foreach_mul_(weights, 1 - rate * weight_decay)
        torch._foreach_sub_(weights, list(scaled))

    def _momentum(self, matrix: nn.Parameter) -> Tensor:
        state = self.state[matrix]
        if not state:
            state["momentum"] = torch.zeros_like(matrix)
        momentum: Tensor = state["momentum"]
        return momentum


def orthogonalise(matrices: Tensor) -> Tensor:
    """Return `matrices` [N, rows, columns] with all singular values moved close to 1, between about 0.7 and 1.2.

    This takes five Newton-Schulz iterations (Jordan et al. 2024).
    """
    a, b, c = _COEFFICIENTS
    tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.mT if tall else matrices
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_ITERATIONS):
        square = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(square, square, square, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def suits_muon(name: str, weight: nn.Parameter) -> bool:
    """Return whether the parameter `name` is a matrix of a layer, which Muon can train.

    AdamW trains embedding, softmax, pointer, biases, norms, and lists of vectors (`_VECTORS`).
    """
    return name.startswith("blocks.") and weight.dim() == 2 and name.rpartition(".")[2] not in _VECTORS


def make_adamw(parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Return an AdamW optimizer without weight decay on norms, biases and lists of vectors (`_VECTORS`)."""
    decayed = {name for name, p in parameters.items() if p.dim() > 1 and name.rpartition(".")[2] not in _VECTORS}
    groups = [
        {"params": [p for name, p in parameters.items() if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the L2 norm, a scalar, of the gradients of all `parameters` taken as one vector."""
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def step_clipped(optimizer: torch.optim.Optimizer, norm: Tensor, clip: float, skip_non_finite: bool = False) -> None:
    """Scale the gradients to a norm of at most `clip`, update the parameters, and clear the gradients.

    Args:
        optimizer: the result of `make_adamw`, or a `Muon`.
        norm: the norm of the gradients before clipping, a scalar.
        clip: the largest norm after clipping. The size of Muon's updates does not depend on the norm; with Muon,
            clipping limits how much a single large gradient changes the momentum.
        skip_non_finite: leave the parameters unchanged if the norm is not finite. The GPU tests the norm, so that the
            CPU does not wait for the GPU.
    """
    # The fused AdamW divides by grad_scale as it reads the gradients; scaling them here would be one more pass.
    optimizer.grad_scale = (norm / clip).clamp(min=1)  # type: ignore[attr-defined]
    if skip_non_finite:
        optimizer.found_inf = (~norm.isfinite()).to(norm.dtype)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def check_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` if a tensor of the optimizer's restored state has another shape than its parameter.

    torch does not check this.
    """
    for parameter, state in optimizer.state.items():
        for name in ("momentum",) if isinstance(optimizer, Muon) else ("exp_avg", "exp_avg_sq", "step"):
            if state[name].shape != (() if name == "step" else parameter.shape):
                raise ValueError(f"the optimizer's stored {name} has another shape than the parameter it belongs to")


class WeightAverage:
    """Running mean of the weights over all steps from step `first` on: stochastic weight averaging (SWA).

    Izmailov et al. 2018, arXiv 1803.05407, section 3; here the weights after every step enter the mean. Training
    continues from the last weights, not from the mean. Inside the context `in_place` the network holds the mean.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], first: int) -> None:
        self.parameters, self.first = list(parameters), first
        self.mean: list[Tensor] = []
        self.count = 0  # steps in the mean

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Add the present weights to the mean; before step `first` do nothing. Steps are counted from 1."""
        if step < self.first:
            return
        self.count += 1
        if self.count == 1:
            self.mean = clone_weights(self.parameters)
        else:
            torch._foreach_lerp_(self.mean, list(self.parameters), 1 / self.count)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the network's weights by their mean inside the context; no effect before step `first`."""
        if not self.count:
            yield
            return
        weights = clone_weights(self.parameters)
        copy_weights(self.mean, self.parameters)
        try:
            yield
        finally:
            copy_weights(weights, self.parameters)

    def state_dict(self) -> dict[str, Any]:
        """Return the first step and the number of steps in the mean, and copies of the network's present weights.

        A resumed training continues from these weights. The mean is not returned: checkpoints store it as the network's
        weights. Before step `first`, there are no copies.
        """
        return {
            "first": self.first,
            "count": self.count,
            "weights": clone_weights(self.parameters) if self.count else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned, and copy its weights into the network.

        Before the call, the network must hold the weights of the checkpoint, which are the mean if one was stored.
        If `train.steps` was raised, averaging starts at a later step than before; the stored mean is dropped if all its
        steps are earlier than this start.

        Raises:
            ValueError: the stored number of averaged steps or the shapes of the stored weights are not valid.
        """
        first, count, weights = state["first"], state["count"], state["weights"]
        if type(count) is not int or count < 0:
            raise ValueError(f"the stored number of averaged steps is {count!r:.40}; expected an integer from 0")
        if not count:
            return
        if [weight.shape for weight in weights] != [parameter.shape for parameter in self.parameters]:
            raise ValueError("the stored weights of the last step have other shapes than the network's")
        if self.first < first + count:
            self.first, self.mean, self.count = first, clone_weights(self.parameters), count
        copy_weights(weights, self.parameters)


def clone_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return copies of `weights` that are not part of the autograd graph."""
    return [weight.detach().clone() for weight in weights]


@torch.no_grad()
def copy_weights(values: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Copy each of `values` into the parameter at the same position in `parameters`."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


# Schedules.


class Schedule(NamedTuple):
    """The learning-rate schedule of a training phase; see `learning_rate`."""

    steps: int  # of the phase, warm-up included
    lr: float  # the peak, after the warm-up
    warmup_steps: int
    averaged: int = 0  # number of last steps whose weights are averaged
    decays: bool = True  # whether the rate falls after the warm-up

    @classmethod
    def of(cls, train: TrainConfig) -> Self:
        """Return the schedule of a retraining with the settings `train`."""
        averaged = max(1, round(train.average * train.steps)) if train.average else 0
        return cls(train.steps, train.lr, train.warmup_steps, averaged, decays=not averaged)

    def fit_warmup(self, note: Callable[[str], None]) -> "Schedule":
        """Return the schedule with a warm-up that is shorter than the training.

        Usually this is the schedule itself. A warm-up that is as long as the training or longer is shortened to a tenth
        of the steps, and `note` is called with a line of text.
        """
        if self.warmup_steps < self.steps:
            return self
        warmup_steps = self.steps // 10
        note(f"the warm-up of {self.warmup_steps} steps is shortened to {warmup_steps}; the training has {self.steps}")
        return self._replace(warmup_steps=warmup_steps)


def learning_rate(step: int, schedule: Schedule) -> float:
    """Return the learning rate at `step` (0 ≤ step < steps): linear warm-up, then linear decay to zero if it decays.

    In short runs linear decay ends at a lower loss than a half cosine (Bergsma et al. 2025, arXiv 2502.15938). If the
    weights of the last steps are averaged, the rate stays at its peak after the warm-up: averaging replaces the decay.
    """
    steps, peak, warmup_steps, _, decays = schedule
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak * (steps - step) / (steps - warmup_steps) if decays else peak
