"""AdamW and Muon with clipped steps, the learning-rate schedule, and the average of weights."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn

from parnas.config.schema import TrainConfig

__all__ = ["Schedule", "check_shapes", "gradient_norm", "suits_muon"]

_MOMENTUM = 0.95  # of Muon, in Nesterov's form
_ITERATIONS = 5  # of Newton-Schulz
_COEFFICIENTS = 3.4445, -4.7750, 2.0315
_UPDATE_RMS = 0.2  # root mean square of Muon's updates, about that of AdamW's


class Muon(torch.optim.Optimizer):
    """Optimizer that orthogonalises momentum: all singular values of an update are near 1 (Jordan et al. 2024, "Muon").

    Updates are scaled to the root mean square of AdamW's, so that both share learning rate and weight decay (Liu et al.
    2025, arXiv 2502.16982, equation 4). Matrices [rows, columns] only; a matrix without gradient does not change.

    torch.optim.Muon makes the same update matrix by matrix; this class batches equal shapes, computes in the precision
    of the training and can skip a step on the device (`benchmarks/muon.py` compares the two).

    Two attributes work as in torch's fused AdamW: gradients are divided by `grad_scale`, a scalar, and a step with
    `found_inf` 1 leaves the weights unchanged while the momentum decays.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def __init__(
        self, matrices: Iterable[nn.Parameter], lr: float, weight_decay: float, dtype: torch.dtype = torch.float32
    ) -> None:
        """Make the optimizer; its matrix products are computed in `dtype`, for which bf16 is precise enough."""
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})
        self.dtype = dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # noqa: ARG002
        """Update all matrices; matrices of the same shape are orthogonalised in one batch."""
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
    """Return `matrices` [N, rows, columns] with all singular values replaced by values of about 0.7 to 1.2.

    Newton-Schulz iterations of Jordan et al. 2024.
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
    """Return whether Muon can train a parameter: only matrices of layers, no embedding, softmax, bias, u, v or norm."""
    return name.startswith("blocks.") and weight.dim() == 2 and name.rpartition(".")[2] not in ("u", "v")


def make_adamw(parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """Return an AdamW optimizer without weight decay on norms and biases (among them u and v of relative attention)."""
    decayed = {name for name, p in parameters.items() if p.dim() > 1 and name.rpartition(".")[2] not in ("u", "v")}
    groups = [
        {"params": [p for name, p in parameters.items() if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)


def gradient_norm(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Return the L2 norm, a scalar, of the gradients of all `parameters` taken as one vector."""
    return nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])


def update_clipped(optimizer: torch.optim.Optimizer, parameters: Sequence[nn.Parameter], clip: float) -> Tensor:
    """Clip the gradients of `parameters` to a norm of `clip`, update them, and return the norm before clipping."""
    norm = gradient_norm(parameters)
    step_clipped(optimizer, norm, clip)
    return norm.detach()


def step_clipped(optimizer: torch.optim.Optimizer, norm: Tensor, clip: float, skip_non_finite: bool = False) -> None:
    """Scale the gradients to a norm of at most `clip`, update the parameters, and clear the gradients.

    Args:
        optimizer: an AdamW of `make_adamw`, or a `Muon`.
        norm: the norm of the gradients before clipping, a scalar.
        clip: the largest norm after clipping. The size of Muon's updates does not depend on the norm; there, clipping
            limits how much a single large gradient changes the momentum.
        skip_non_finite: leave the parameters unchanged if the norm is not finite; the device decides, so that the CPU
            does not wait for it.
    """
    # The fused AdamW divides by grad_scale as it reads the gradients; scaling them here would be one more pass.
    optimizer.grad_scale = (norm / clip).clamp(min=1)  # type: ignore[attr-defined]
    if skip_non_finite:
        optimizer.found_inf = (~norm.isfinite()).to(norm.dtype)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def check_shapes(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` where a restored state has another shape than its parameter, which torch does not check."""
    for parameter, state in optimizer.state.items():
        for name in ("momentum",) if isinstance(optimizer, Muon) else ("exp_avg", "exp_avg_sq", "step"):
            if state[name].shape != (() if name == "step" else parameter.shape):
                raise ValueError(f"the optimizer's {name} has another shape than its parameter")


class WeightAverage:
    """Running mean of the weights over all steps from step `first` on: stochastic weight averaging.

    Izmailov et al. 2018, arXiv 1803.05407, section 3; here the weights after every step enter the mean. Training
    continues from the weights, not from their mean; inside `in_place` the network holds the mean.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], first: int) -> None:
        self.parameters, self.first = list(parameters), first
        self.mean: list[Tensor] = []
        self.count = 0  # steps in the mean

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Add the present weights to the mean unless `step`, counted from 1, is before `first`."""
        if step < self.first:
            return
        self.count += 1
        if self.count == 1:
            self.mean = clone_weights(self.parameters)
        else:
            torch._foreach_lerp_(self.mean, list(self.parameters), 1 / self.count)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Replace the network's weights by their mean inside the context; no effect while there is none."""
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
        """Return first step and number of steps of the mean, and copies of the weights from which training continues.

        The mean itself is not in this state: a checkpoint stores it as the weights of the network.
        """
        return {
            "first": self.first,
            "count": self.count,
            "weights": clone_weights(self.parameters) if self.count else [],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state; the network must hold the weights of its checkpoint, which are the mean if there is one.

        After `train.steps` was raised, `first` is later than when the state was saved. If `first` lies after all steps
        of the saved mean, that mean is dropped; otherwise averaging continues with it.

        Raises:
            ValueError: the number of steps or the shapes of the weights are not valid.
        """
        first, count, weights = state["first"], state["count"], state["weights"]
        if type(count) is not int or count < 0:
            raise ValueError(f"its number of averaged steps is {count!r:.40}")
        if not count:
            return
        if [weight.shape for weight in weights] != [parameter.shape for parameter in self.parameters]:
            raise ValueError("the weights stored with its average have other shapes than the network's")
        if self.first < first + count:
            self.first, self.mean, self.count = first, clone_weights(self.parameters), count
        copy_weights(weights, self.parameters)


def clone_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """Return detached copies of weights."""
    return [weight.detach().clone() for weight in weights]


@torch.no_grad()
def copy_weights(values: Sequence[Tensor], parameters: Sequence[nn.Parameter]) -> None:
    """Copy each of `values` into the parameter at the same position."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


# Schedules.


class Schedule(NamedTuple):
    """The learning-rate schedule of a training phase; see `learning_rate`."""

    steps: int
    lr: float  # the peak
    warmup_steps: int
    averaged: int = 0  # number of last steps whose weights are averaged

    @classmethod
    def of(cls, train: TrainConfig) -> Self:
        """Return the schedule of a retraining with the settings `train`."""
        averaged = max(1, round(train.average * train.steps)) if train.average else 0
        return cls(train.steps, train.lr, train.warmup_steps, averaged)

    def fit_warmup(self, note: Callable[[str], None]) -> "Schedule":
        """Return this schedule; if its warm-up is not shorter than the training, shorten it to a tenth of the steps.

        `note` is called with a line of text if the warm-up is shortened.
        """
        if self.warmup_steps < self.steps:
            return self
        warmup_steps = self.steps // 10
        note(f"the warm-up of {self.warmup_steps} steps is shortened to {warmup_steps} of {self.steps}")
        return self._replace(warmup_steps=warmup_steps)


def learning_rate(step: int, schedule: Schedule) -> float:
    """Return the learning rate at `step` (0 ≤ step < steps): linear warm-up, then linear decay to zero.

    In short runs linear decay ends at a lower loss than a half cosine (Bergsma et al. 2025, arXiv 2502.15938). Where
    weights are averaged, the rate stays at its peak after the warm-up: averaging replaces the decay.
    """
    steps, peak, warmup_steps, averaged = schedule
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    return peak if averaged else peak * (steps - step) / (steps - warmup_steps)
