"""Gradient estimators of the search: how a step samples gates, and which gradient alpha receives.

The problem: the loss of a network is not differentiable in the *choice* of its layers. A SuperNet block therefore
computes sum_c gate[c] · layer_c(x), the gates are sampled from a distribution with logits alpha, and alpha is trained
by some estimate of d E[loss] / d alpha. The estimators differ in which candidates have to run for it, that is in cost
and memory, and in bias and variance.

Notation: N blocks, C candidates, alpha [N, C] logits, pi = softmax(alpha), g standard Gumbel noise, tau temperature.
argmax(alpha + g) is a sample from pi (the Gumbel-max trick); softmax((alpha + g) / tau) is its differentiable
relaxation (Jang et al. 2017, arXiv 1611.01144), which tends to one-hot as tau goes to 0. All estimators but `uniform`
sample this relaxation, below called the soft weights, and pass gradients to alpha through it:

soft              The gates are the soft weights. Every candidate runs; the gradient is exact for the relaxed network,
                  which is a mixture and not the network that is derived.
straight_through  Forward: one-hot at the largest weight. Backward: the gradient of the soft weights. Every candidate
                  runs: the gradient of a gate needs its candidate's output.
gdas              As straight_through, but only the sampled candidate runs (Dong & Yang 2019, arXiv 1910.04465). The
                  others are treated as identity, so the gradient is biased: alpha learns nothing about them.
single_path       As gdas, and in one random block per step a second candidate, the probe, runs forward only. The
                  gradients of the gates whose candidates did not run are estimated from the probes of this and earlier
                  steps. The estimate has the same expectation as the gradient of straight_through; running means serve
                  as control variates to reduce its variance.
uniform           Uniform path sampling (SPOS, Guo et al. 2020, arXiv 1904.00420). The weights train on paths sampled
                  uniformly, so every layer gets the same share of training whatever alpha is; identity, which has
                  nothing to train and occurs in many architectures of one network, is sampled half as often. The paths
                  of a step, two by default, differ as much as possible, and each is for a part of the batch. Alpha
                  trains on a held-out split: pairs of paths sampled by pi are evaluated without gradient, a linear
                  model (one number per block and candidate) is fitted to the differences of their losses, and alpha
                  descends the model's expected loss under pi. At the end alpha is frozen and the weights are fine-tuned
                  on the selected path: tau is then the probability that a block runs a layer sampled by pi instead.

The network itself is never random: it uses the gates that it is given, or pi where it is given none.

Random numbers are drawn on the CPU, whatever the device of alpha: a seed gives the same noise on every device, and
`uniform` samples paths without waiting for a GPU.
"""

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from parnas.architecture import IDENTITY
from parnas.config.schema import Space, spread_space, unite
from parnas.model.gates import ABSENT, Gates, PathGate
from parnas.model.transfer import to_device

__all__ = [
    "ESTIMATORS",
    "IDENTITY_WEIGHT",
    "Estimator",
    "arch_batch_size",
    "drop_candidates",
]

_PAIRS_PER_COEFFICIENT = 10  # memory of the linear fit: fewer pairs are noisy, older ones are of other weights
IDENTITY_WEIGHT = 0.5  # of identity in uniform sampling: with 1, deep networks are so rare that they rank too low
RIDGE = 1.0  # regularisation of the linear fit, in pairs of paths
MEAN_RIDGE = 3.0  # the same for the means over blocks, if `search.block_ridge` is set
_HIGHEST_PRICE, _BISECTIONS = 1e6, 40  # of a path's cost; at this price, practically only the cheapest layers are left
_MEAN_RATE = 0.1  # update rate of the running means; with 6 blocks a candidate is probed about every twelfth step


def gumbel_softmax(alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Tensor:
    """Return softmax((alpha + g) / tau) with Gumbel noise g, [N, C] (Jang et al. 2017, equation 2)."""
    # Gumbel noise: -log E with E from Exponential(1).
    noise = -torch.empty(alpha.shape, dtype=alpha.dtype).exponential_(generator=generator).log()
    return ((alpha + noise.to(alpha.device)) / tau).softmax(dim=-1)


def harden(gates: Tensor) -> Tensor:
    """Return one-hot gates, 1 where `gates` [N, C] is largest in its row, that pass gradients to `gates` unchanged."""
    one_hot = F.one_hot(gates.argmax(dim=-1), gates.shape[-1]).to(gates.dtype)
    # The parenthesis is exactly zero in the forward pass, and has the gradient of `gates` in the backward pass.
    return one_hot + (gates - gates.detach())


def _sample_one_hot(alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Tensor:
    """Return one-hot gates [N, C] sampled from pi, with the gradient of the Gumbel-softmax at temperature `tau`."""
    # The sample itself is from pi at every temperature: tau scales all logits, and so only sharpens the gradient.
    return harden(gumbel_softmax(alpha, tau, generator))


def sample_spread(probabilities: Tensor, count: int, generator: torch.Generator | None = None) -> Tensor:
    """Return `count` samples of an index for each row of `probabilities` [N, C], as [count, N], in random order.

    Systematic sampling: each sample has the distribution of the row, and in `count` samples an index of probability p
    occurs `count` · p times, rounded up or down at random.
    """
    rows = len(probabilities)
    # 1. Points at equal distances in [0, 1), with a random offset in each row.
    points = torch.rand(rows, 1, generator=generator) + torch.arange(count)
    # 2. In random order, independently in each row.
    order = torch.rand(rows, count, generator=generator).argsort(dim=-1)
    points = points.gather(1, order) / count
    # 3. The index in whose interval of the cumulative distribution a point lies. Rounding can leave a point beyond the
    #    last interval, or within an empty one at the end: these points belong to the last index that can occur.
    cumulative = probabilities.cumsum(dim=-1)
    index = torch.searchsorted(cumulative, points, right=True)
    last = probabilities.shape[-1] - 1 - (probabilities.flip(-1) > 0).int().argmax(dim=-1, keepdim=True)
    return torch.minimum(index, last).T


def make_path(weights: Tensor, probe: "Probe | None" = None, device: torch.device | None = None) -> list[PathGate]:
    """Return the gate of each block for the path of one-hot `weights` [N, C]; the probe's block runs the probe too.

    The gates are on `device`, by default that of the weights.
    """
    probed = {} if probe is None else {probe.block: probe.candidate}
    on_device = to_device(weights, weights.device if device is None else device)
    rows = zip(on_device.unbind(), weights.detach().argmax(dim=-1).tolist(), strict=True)
    return [PathGate(row, index, probed.get(block)) for block, (row, index) in enumerate(rows)]


def drop_candidates(alpha: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """Return alpha [N, C] with each logit set to `ABSENT`, which removes the candidate, with probability p.

    A block that would lose all its candidates keeps all of them.
    """
    keep = (torch.rand(alpha.shape, generator=generator) >= p).to(alpha.device)
    # Where every candidate is dropped or absent, keep all.
    keep |= (~keep | (alpha <= ABSENT)).all(dim=-1, keepdim=True)
    return alpha.masked_fill(~keep, ABSENT)


class Estimator:
    """Base class of the estimators: samples gates, and computes the loss whose gradient trains alpha."""

    one_hot = False
    """Whether the gates of each step choose one candidate per block."""
    arch_batch_divisor = 1
    """An architecture step on held-out text reads `batch_size // arch_batch_divisor` rows."""
    arch_step_in_eval_mode = False
    """Whether architecture steps on held-out text run without dropout."""

    def __init__(self, blocks: int, space: Space) -> None:
        self.block_spaces = spread_space(space, blocks)
        self.space = unite(self.block_spaces)

    def sample_gates(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """Sample gates from alpha [N, C]; differentiable if `alpha` requires a gradient."""
        raise NotImplementedError

    def sample_several(
        self, count: int, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None
    ) -> list[Gates]:
        """Sample gates at most `count` times for one step; each sample is for an equal part of the batch."""
        return [self.sample_gates(alpha, tau, generator) for _ in range(count)]

    def arch_loss(
        self,
        alpha: Tensor,
        tau: Tensor | float,
        loss_of_gates: Callable[[Gates], Tensor],
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Return a scalar whose gradient with respect to `alpha` estimates that of the loss on one held-out batch.

        `loss_of_gates` runs the network with the given gates on that batch, once for each call. For gates without
        gradient it returns the mean loss in nats per token; for gates with gradient it returns a scalar that has the
        gradient of the mean loss, but not its value.
        """
        return loss_of_gates(self.sample_gates(alpha, tau, generator))

    def limit_cost(self, relative_costs: Tensor, target: float) -> None:
        """Sample costly candidates less often; only `UniformPath`, whose sampling does not depend on alpha, can."""
        raise NotImplementedError

    def share_between_blocks(self, block_ridge: float) -> None:
        """Shrink estimates of blocks towards their mean; only `UniformPath`, which fits a model of losses, can."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Tensor]:
        """Return the state to store in a checkpoint; an estimator without state returns an empty dict."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the state that `state_dict` stored, on `device`."""

    def select(self, path: Tensor) -> None:
        """Receive the selected path, one-hot [N, C], when alpha is frozen; by default ignore it and sample by pi."""


class _Soft(Estimator):
    """`soft`: the gates are a Gumbel-softmax sample, and every candidate runs."""

    def sample_gates(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """Sample the gates softmax((alpha + g) / tau), [N, C], with Gumbel noise g."""
        return gumbel_softmax(alpha, tau, generator)


class _StraightThrough(Estimator):
    """`straight_through`: one-hot gates with the gradient of the Gumbel-softmax; every candidate runs."""

    one_hot = True

    def sample_gates(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """Sample one-hot gates [N, C], which pass the gradient of the Gumbel-softmax to alpha."""
        # A tensor, not a path: every candidate runs, since the gradient of its gate needs its output.
        return _sample_one_hot(alpha, tau, generator)


class _Gdas(Estimator):
    """`gdas`: one-hot gates with the gradient of the Gumbel-softmax; only the chosen candidate of each block runs."""

    one_hot = True

    def sample_gates(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """Sample a path: the gate of each block runs one candidate."""
        # The blocks run only the chosen candidates; `SinglePathFunction` leaves the other gates' gradients at zero.
        return make_path(_sample_one_hot(alpha, tau, generator))


class ProbedSinglePath(Estimator):
    """`single_path`: one candidate per block runs, and in one block a second one, the probe.

    The gradient of gate c is <d loss / d output, output_c - x>, where candidate c maps the block's input x to output_c.
    It is known for the chosen candidate, which ran, and 0 for identity, whose output is x. The state is `means` [N, C]:
    for each gate the running mean of the gradients observed when its candidate was the probe.
    """

    one_hot = True

    def __init__(self, blocks: int, space: Space) -> None:
        super().__init__(blocks, space)
        self.means = torch.zeros(blocks, len(self.space))

    def sample_gates(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """Sample a path and, if `alpha` requires a gradient, the probe: a second candidate to run in one block."""
        hard = _sample_one_hot(alpha, tau, generator)
        chosen: list[int] = hard.detach().argmax(dim=-1).tolist()
        probe = None
        if hard.requires_grad:
            probe = self._sample_probe(chosen, generator)
            # Once the backward pass reaches the gates, replace their gradient on its way to alpha.
            hard.register_hook(lambda grad: self._complete(grad, chosen, probe))
        return make_path(hard, probe)

    def state_dict(self) -> dict[str, Tensor]:
        """Return the running means of the gates' gradients."""
        return {"means": self.means}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the running means of the gates' gradients, on `device`."""
        self.means = state["means"].to(device)

    def unobserved(self, block: int, chosen: int) -> list[int]:
        """Return the indices of a block's candidates with unknown gradients: all but identity and the `chosen` one."""
        observed = (self.space[chosen], IDENTITY)
        return [self.space.index(name) for name in self.block_spaces[block] if name not in observed]

    def _sample_probe(self, chosen: list[int], generator: torch.Generator | None) -> "Probe | None":
        """Draw the probe: uniformly a block with unobserved candidates, then uniformly one of these candidates.

        `chosen` is the index of the candidate that runs in each block. Return `None` if no block has an unobserved
        candidate.
        """
        open_blocks = [
            (block, unobserved) for block, index in enumerate(chosen) if (unobserved := self.unobserved(block, index))
        ]
        if not open_blocks:
            return None
        # Two uniform numbers from the search's own generator, in one draw: the probe costs the same random numbers
        # whatever the candidates are.
        first, second = torch.rand(2, generator=generator).tolist()
        block, unobserved = open_blocks[int(first * len(open_blocks))]
        return Probe(block, unobserved[int(second * len(unobserved))], 1 / (len(open_blocks) * len(unobserved)))

    def _complete(self, observed: Tensor, chosen: list[int], probe: "Probe | None") -> Tensor:
        """Return the gradient of all gates, [N, C], where `observed` has zeros for candidates that did not run.

        Let m be the running mean of a gate, o its gradient, and q the probability that its candidate is the probe. The
        probe gets m + (o - m) / q, the other candidates that did not run get m. The expectation is
        q (m + (o - m) / q) + (1 - q) m = o, whatever m is; the closer m is to o, the smaller is the variance.
        """
        self.means = self.means.to(observed)
        completed = observed.clone()
        # 1. Control variate: the running mean replaces the gradient of every candidate that is not observed.
        for block, index in enumerate(chosen):
            unobserved = self.unobserved(block, index)
            completed[block, unobserved] = self.means[block, unobserved]
        # 2. Correct the probed candidate with its importance weight 1 / q, and update its mean.
        if probe is not None:
            place = probe.block, probe.candidate
            error = observed[place] - self.means[place]
            completed[place] += error / probe.probability
            # A value that is not finite shows in the gradient, where the step is skipped; it must not enter the means.
            self.means[place] += _MEAN_RATE * error.nan_to_num(0.0, 0.0, 0.0)
        return completed


class Probe(NamedTuple):
    """A second candidate of one block, which runs without a backward pass, and the probability of drawing it."""

    block: int  # index of the block
    candidate: int  # index of the candidate
    probability: float


class UniformPath(Estimator):
    """`uniform`: the weights train on uniformly sampled paths, alpha on held-out text.

    The linear model: a path z, one-hot rows flattened to [N·C], has the loss <w, z> + a term that depends on the text
    alone. Two paths on the same text give x = z1 - z2 and y = loss1 - loss2, without this term. From many such pairs,
    ridge regression finds w [N·C] by the normal equations (sum x xᵀ + ridge · I) w = sum x y. The state is the two
    sums: `gram` [N·C, N·C] and `moment` [N·C]. With each new pair they are multiplied by `forgetting` < 1, since old
    losses were measured with old shared weights.

    In a short search the pairs are too few for N·C numbers, but enough for the C means over blocks. With `block_ridge`,
    w[b, c] = mean[c] + deviation[b, c], where the deviations have this larger ridge: a hierarchical prior.
    """

    one_hot = True
    arch_batch_divisor = 4  # at equal cost, more pairs of paths are worth more than more text for each
    arch_step_in_eval_mode = True  # the noise of dropout is larger than the difference between two paths

    def __init__(self, blocks: int, space: Space) -> None:
        super().__init__(blocks, space)
        size = blocks * len(self.space)
        weights = [
            [(IDENTITY_WEIGHT if name == IDENTITY else 1.0) if name in names else 0.0 for name in self.space]
            for names in self.block_spaces
        ]
        self.probabilities = F.normalize(torch.tensor(weights), p=1)  # [N, C]; 0 where a block lacks a candidate
        self.gram, self.moment = torch.zeros(size, size), torch.zeros(size)
        self.ridge = RIDGE * torch.eye(size)  # [N·C, N·C], inverse prior covariance of w in units of a pair's noise
        self.selected: Tensor | None = None  # one-hot [N, C]: the path to fine-tune, once alpha is frozen
        # The weights of a block's one-hot rows sum to 1, so each block has one coefficient less than candidates.
        coefficients = max(1, sum(len(names) - 1 for names in self.block_spaces))
        self.forgetting = 1 - 1 / (_PAIRS_PER_COEFFICIENT * coefficients)

    def limit_cost(self, relative_costs: Tensor, target: float) -> None:
        """Sample costly candidates less often, so that paths cost at most `target` on average.

        Among all distributions with this mean cost, the new one is closest to uniform sampling in KL divergence:
        p[c] ∝ u[c] · exp(-price · cost[c]) for the uniform probabilities u and the lowest price that suffices.

        Args:
            relative_costs: cost of each candidate, as a share of the reference's cost, [C].
            target: largest mean cost of a path, as such a share.
        """
        uniform, costs = self.probabilities.double(), relative_costs.to(self.probabilities.device).double()

        def tilt(price: float) -> Tensor:
            # Relative to each block's cheapest candidate, so that no row underflows to zero.
            least = costs.masked_fill(uniform == 0, math.inf).min(dim=-1, keepdim=True).values
            return F.normalize(uniform * torch.exp(-price * (costs - least).clamp(min=0)), p=1)

        def suffices(price: float) -> bool:
            return bool((tilt(price) * costs).sum() <= target)

        if suffices(0.0):
            return
        low, high = 0.0, 1.0
        while not suffices(high) and high < _HIGHEST_PRICE:
            low, high = high, 2 * high
        for _ in range(_BISECTIONS):
            middle = (low + high) / 2
            low, high = (low, middle) if suffices(middle) else (middle, high)
        self.probabilities = tilt(high).to(self.probabilities)

    def share_between_blocks(self, block_ridge: float) -> None:
        """Estimate the mean of a candidate's contributions over all blocks, and shrink each block's towards it.

        Args:
            block_ridge: regularisation of the deviations from the mean, in pairs of paths.
        """
        blocks, candidates = len(self.block_spaces), len(self.space)
        # Prior covariance of w[b, c] and w[b', c]: 1 / MEAN_RIDGE, since both have the mean of c, and 1 / block_ridge
        # if b = b'. Different candidates are independent.
        of_blocks = torch.ones(blocks, blocks) / MEAN_RIDGE + torch.eye(blocks) / block_ridge
        self.ridge = torch.linalg.inv(torch.kron(of_blocks, torch.eye(candidates)))

    def sample_gates(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """Sample a path without gradient: see `sample_several`."""
        (path,) = self.sample_several(1, alpha, tau, generator)
        return path

    def sample_several(
        self, count: int, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None
    ) -> list[Gates]:
        """Sample `count` uniform paths that differ as much as possible; once `selected` is set, sample one path.

        With paths that differ, a step trains more of the candidates, and its gradient favours no composition of layers
        (strict fairness of FairNAS, Chu et al. 2019, arXiv 1907.01845, which has one path for each candidate). The one
        path is the selected one with random changes: with probability `tau` a block runs a layer sampled by pi instead.
        """
        if self.selected is None:
            chosen = sample_spread(self.probabilities, count, generator)  # alpha plays no part
            paths = F.one_hot(chosen, len(self.space)).to(alpha.dtype)
            return [make_path(path, device=alpha.device) for path in paths]
        selected, by_pi = self.selected.to("cpu", alpha.dtype), _sample_one_hot(alpha.detach(), 1.0, generator)
        explores = torch.rand(len(alpha), 1, generator=generator) < tau
        path = torch.where(explores, by_pi.cpu(), selected) if explores.any() else selected
        return [make_path(path, device=alpha.device)]

    def arch_loss(
        self,
        alpha: Tensor,
        tau: Tensor | float,  # noqa: ARG002
        loss_of_gates: Callable[[Gates], Tensor],
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Fit the linear model to a new pair of paths; return the model's expected loss under pi, up to a constant."""
        with torch.no_grad():
            # 1. Evaluate two paths sampled by pi on one text: how hard the text is cancels in the difference, whose
            #    noise is far below that of either loss.
            one, other = (make_path(_sample_one_hot(alpha, 1.0, generator)) for _ in range(2))
            difference = loss_of_gates(one) - loss_of_gates(other)
            # 2. Update the linear model of losses.
            self.observe(torch.stack([a.weights - b.weights for a, b in zip(one, other, strict=True)]), difference)
        # 3. Expected loss under pi: sum of pi · w, in which only pi has a gradient. A difference that is not finite is
        #    kept out of the fit, and makes this loss NaN, so that the step is skipped.
        return (alpha.softmax(dim=-1) * (self.contributions() + 0 * difference)).sum()

    def observe(self, paths: Tensor, losses: Tensor) -> None:
        """Add a pair of paths, evaluated on the same text, to the linear fit.

        Args:
            paths: difference of the two one-hot paths, [N, C].
            losses: difference of the two paths' losses in nats per token, a scalar.
        """
        self.gram, self.moment = self.gram.to(paths), self.moment.to(paths)
        x = torch.where(losses.isfinite(), paths.flatten(), 0.0)  # [N·C] of -1, 0, 1; all zero adds nothing
        # gram <- forgetting · gram + x xᵀ, moment <- forgetting · moment + x y: recursive least squares.
        self.gram.mul_(self.forgetting).addr_(x, x)
        self.moment.mul_(self.forgetting).add_(x * losses.nan_to_num(0.0, 0.0, 0.0))

    def contributions(self) -> Tensor:
        """Return w [N, C], the fitted contribution of each candidate to the loss in nats per token; rows sum to 0."""
        # Differences of paths say nothing about a constant per block, so `gram` is singular; the ridge makes the
        # solution unique (the one with zero row sums) and shrinks candidates that few pairs have compared.
        solution: Tensor = torch.linalg.solve(self.gram + self.ridge.to(self.moment), self.moment)
        return solution.view(len(self.block_spaces), -1)

    def select(self, path: Tensor) -> None:
        """Sample this path, one-hot [N, C], from now on, with random changes (see `sample_several`)."""
        self.selected = path

    def state_dict(self) -> dict[str, Tensor]:
        """Return the two sums of the linear fit, `gram` and `moment`."""
        return {"gram": self.gram, "moment": self.moment}

    def load_state_dict(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Restore the two sums of the linear fit on `device`."""
        self.gram, self.moment = state["gram"].to(device), state["moment"].to(device)


ESTIMATORS: dict[str, type[Estimator]] = {
    "soft": _Soft,
    "straight_through": _StraightThrough,
    "gdas": _Gdas,
    "single_path": ProbedSinglePath,
    "uniform": UniformPath,
}


def arch_batch_size(estimator: str, rows: int) -> int:
    """Return the batch size of architecture steps on held-out text, given `rows`, the batch size of weight steps."""
    return max(1, rows // ESTIMATORS[estimator].arch_batch_divisor)
