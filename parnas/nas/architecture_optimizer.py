"""The optimizer of the architecture: alpha, the temperature tau and the noise of the gates, with their schedules.

With pi = softmax(alpha) for alpha [N, C] (N blocks, C candidates), it minimises over alpha

    loss  +  cost_weight · max(0, expected cost / target - 1)²  -  entropy_weight · entropy(pi).

The gradient of the loss is estimated by the estimator; the gradients of the other two terms are exact.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parnas.config.schema import SearchConfig
from parnas.model.estimators import ESTIMATORS, Estimator, drop_candidates
from parnas.model.gates import Gates
from parnas.model.supernet import SuperNet
from parnas.nas.cost import penalty
from parnas.nas.diagnostics import entropies
from parnas.training.optimizers import check_shapes, gradient_norm


class ArchitectureOptimizer:
    """Sample gates, and train alpha (and tau, if learnable) by Adam.

    Args:
        supernet: the network that holds alpha.
        search: the settings, section `search` of the configuration.
        seed: seed of the noise from which gates are sampled.
        relative_costs: costs of the candidates as shares of the reference's cost, [C]; `None` for a search
            without a cost target.

    Steps count from 0. Alpha is trained from step `search.alpha_start_step` until before step `search.alpha_end_step`.
    """

    def __init__(self, supernet: SuperNet, search: SearchConfig, seed: int, relative_costs: Tensor | None) -> None:
        self.supernet, self.search, self.relative_costs = supernet, search, relative_costs
        self.estimator: Estimator = ESTIMATORS[search.estimator](search.blocks, search.space)
        if search.paths_within_target and relative_costs is not None and search.cost.target is not None:
            self.estimator.limit_cost(relative_costs, search.cost.target)
        if search.block_ridge is not None:
            self.estimator.share_between_blocks(search.block_ridge)
        # A generator of its own: dropout and data order do not change with the estimator.
        self.noise = torch.Generator().manual_seed(seed)
        learnable = search.tau_schedule == "learnable"
        self.log_tau = nn.Parameter(torch.tensor(math.log(search.tau_start), device=supernet.alpha().device), learnable)
        self.parameters = [*supernet.alphas(), *([self.log_tau] if learnable else [])]
        self.adam = torch.optim.Adam(self.parameters, lr=search.alpha_lr, fused=True)
        # On held-out text the architecture trains every `alpha_every` steps, on the weights' text every step.
        self.every = search.alpha_every if search.alpha_share else 1

    # Schedules.

    def trains_at(self, step: int) -> bool:
        """Return whether alpha is trained in this step."""
        since_start = step - self.search.alpha_start_step
        return since_start >= 0 and since_start % self.every == 0 and step < self.search.alpha_end_step

    def updates_before(self, step: int) -> int:
        """Return the number of architecture steps before `step`, which must be an architecture step itself."""
        return (step - self.search.alpha_start_step) // self.every

    def tau(self, step: int) -> Tensor | float:
        """Return the temperature tau of a step: by the schedule, or the parameter exp(log_tau) if tau is learnable."""
        search = self.search
        if self.log_tau.requires_grad:  # tau = exp(log_tau) stays positive whatever the optimizer does
            return self.log_tau.exp()
        return temperature(search.tau_schedule, step, search.steps, search.tau_start, search.tau_end)

    def progress(self, step: int) -> float:
        """Return the fraction of alpha's training done before `step`: 0 at its first step, 1 after its last."""
        first, end = self.search.alpha_start_step, self.search.alpha_end_step
        return min(1.0, max(0.0, (step - first) / (end - first)))

    def cost_weight(self, step: int) -> float:
        """Return the weight of the cost penalty, which rises linearly from 0 until `progress` is `search.cost.ramp`."""
        ramp = self.search.cost.ramp
        return self.search.cost_weight * (min(1.0, self.progress(step) / ramp) if ramp else 1.0)

    def entropy_weight(self, step: int) -> float:
        """Return the weight of the entropy of pi, which changes linearly from `entropy_start` to `entropy_end`."""
        start, end = self.search.entropy_start, self.search.entropy_end
        return start + (end - start) * self.progress(step)

    # The architecture step.

    def sample_gates(self, step: int, count: int, differentiable: bool) -> list[Gates]:
        """Sample gates at the temperature of a step, at most `count` times, each sample for a part of the batch.

        If `differentiable`, gradients flow from the gates to alpha.
        """
        with torch.set_grad_enabled(differentiable):
            alpha = self.supernet.alpha()
            # Candidate dropout: a leading candidate is left out now and then, so that the others are trained too.
            if self.search.candidate_dropout:
                alpha = drop_candidates(alpha, self.search.candidate_dropout, self.noise)
            return self.estimator.sample_several(count, alpha, self.tau(step), self.noise)

    def backward(self, step: int, loss_of_gates: Callable[[Gates], Tensor]) -> None:
        """Set the gradients of alpha and, if it is learnable, tau from one held-out batch.

        `loss_of_gates` returns the loss on this batch for the given gates; see `Estimator.arch_loss`.
        """
        # Without dropout where the estimator compares paths: its noise would drown their difference.
        self.supernet.train(not self.estimator.arch_step_in_eval_mode)
        loss = self.estimator.arch_loss(self.supernet.alpha(), self.tau(step), loss_of_gates, self.noise)
        self.supernet.train()
        # Not loss.backward(), which would also put gradients of the held-out text into the shared weights.
        gradients = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        for parameter, gradient in zip(self.parameters, gradients, strict=True):
            parameter.grad = gradient

    def add_regularisation(self, step: int) -> None:
        """Add the gradients of the cost penalty and of the entropy term to the gradient of alpha."""
        search, pi = self.search, self.supernet.alpha().softmax(dim=-1)
        objective = pi.new_zeros(())  # exact expectations over pi: no sampling, no estimator
        if self.relative_costs is not None and search.cost.target is not None and search.cost_weight:
            objective = objective + self.cost_weight(step) * penalty(pi, self.relative_costs, search.cost.target)
        # A positive weight rewards entropy: it keeps candidates in play early on. A negative one forces decisions.
        if search.entropy_start or search.entropy_end:
            objective = objective - self.entropy_weight(step) * entropies(pi).sum()
        if objective.requires_grad:
            objective.backward()

    def gradient_norm(self) -> Tensor:
        """Return the norm of the gradients of alpha and tau, a scalar on the device."""
        return gradient_norm(self.parameters)

    def update(self, step: int) -> None:
        """Update alpha and, if learnable, tau, with a learning rate that decays linearly to zero.

        Gradients that are not finite count as 0.
        """
        for parameter in self.parameters:
            if parameter.grad is not None:
                parameter.grad.nan_to_num_(0.0, 0.0, 0.0)
        # The steps of Adam do not shrink with the gradient; a decaying rate lets pi settle.
        for group in self.adam.param_groups:
            group["lr"] = self.search.alpha_lr * (1 - self.progress(step))
        self.adam.step()
        # Clamp tau here and not in tau(): the gradient of a clamp is zero outside the bounds, so tau would get stuck.
        self.log_tau.data.clamp_(math.log(self.search.tau_end), math.log(self.search.tau_start))

    def zero_grad(self) -> None:
        """Clear the gradients of alpha and tau."""
        self.adam.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint: all but alpha, which is stored with the weights."""
        return {
            "adam": self.adam.state_dict(),
            "log_tau": self.log_tau.detach(),
            "noise": self.noise.get_state(),
            "estimator": self.estimator.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; raise `ValueError` if the tensors in `state` do not fit this SuperNet."""
        self.adam.load_state_dict(state["adam"])
        check_shapes(self.adam)
        self.log_tau.data.copy_(state["log_tau"])
        self.noise.set_state(state["noise"])
        self.estimator.load_state_dict(state["estimator"], self.log_tau.device)


def temperature(schedule: str, step: int, steps: int, start: float, end: float) -> float:
    """Return tau at `step` (0 ≤ step < steps): `start` at the first step, `end` at the last.

    `schedule` is exponential, linear or cosine; if `steps` is 1, tau is `end`.
    """
    if step >= steps - 1:
        return end
    progress = step / (steps - 1)
    if schedule == "exponential":
        return start * math.exp(progress * math.log(end / start))
    if schedule == "cosine":
        progress = (1 - math.cos(math.pi * progress)) / 2
    return start + (end - start) * progress
