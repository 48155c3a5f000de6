"""How a search step weighs the candidates of every block, and what alpha learns from it.

The network itself is never random: it uses the gates that it is given, or pi where it is given none. All estimators
but the last draw from softmax((alpha + g) / tau) with Gumbel noise g, and pass gradients on to alpha through it:

soft              the gates are these weights: each candidate runs, the gradient is that of the relaxed objective.
straight_through  one-hot at the largest weight, with the soft weights' gradient (Jang et al. 2017): each candidate
                  runs.
gdas              as straight_through, but only the chosen candidate runs (Dong & Yang 2019). A candidate that did not
                  run counts as one that changes nothing, so that the gradient is biased: alpha learns nothing of what
                  it did not choose.
single_path       as gdas, and in one block, drawn anew at each step, one more candidate runs forward to be probed.
                  What the others would have contributed is estimated from the probes, without bias with regard to
                  straight_through, and with a running mean as control variate against the variance.
uniform           the weights are trained on paths drawn evenly, so that all layers get the same share of the training
                  whatever alpha is (Guo et al. 2020, arXiv 1904.00420); identity, which has nothing to train and of
                  which many strings of one network are made, comes half as often. Alpha learns from text of its own:
                  losses of paths drawn by pi, forward only, are fitted by a sum of one number per block and candidate,
                  and alpha descends what the fit expects under pi. In the end alpha rests, and the weights settle on
                  the network that is to be derived: tau is the share of blocks that still draw by pi.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from parnas.architecture import IDENTITY
from parnas.space import Space, spread_space, unite

ABSENT = -1e20
"""Logit of a candidate that a block does not have: so low that its probability is exactly zero at every temperature,
and finite, since an infinite one would turn gradients of the temperature, and 0 · log 0 of an entropy, into NaN."""
PAIRS = 10  # that the fit remembers for each number it finds: fewer are noise, and of more the weights have changed
IDENTITY_WEIGHT = 0.5  # in the even draw: with 1, deep networks come so seldom that they rank too low
RIDGE = 1.0  # of the fit, in pairs of paths
# Of the running means of probes; a candidate is probed about every twelfth step of a search in 6 blocks.
MEAN_RATE = 0.1


class PathGate(NamedTuple):
    """The gates of one block where a single candidate runs."""

    weights: Tensor  # [candidates] one-hot, with a gradient where alpha is trained
    chosen: int  # index of the candidate that runs
    probed: int | None = None  # index of one that runs forward too, for alpha alone


Gates = Tensor | Sequence[PathGate]
"""For each block the weights of its candidates, [blocks, candidates], or a single path."""


def gumbel_softmax(alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Tensor:
    """softmax((alpha + g) / tau) with Gumbel noise g: [blocks, candidates] (Jang et al. 2017, equation 2)."""
    # -log E is Gumbel-distributed where E is exponential.
    noise = -torch.empty_like(alpha).exponential_(generator=generator).log()
    return ((alpha + noise) / tau).softmax(dim=-1)


def make_path(weights: Tensor, probe: "Probe | None" = None) -> list[PathGate]:
    """The gates of a path, given one-hot weights [blocks, candidates]."""
    probed = {} if probe is None else {probe.block: probe.candidate}
    rows = zip(weights.unbind(), weights.detach().argmax(dim=-1).tolist(), strict=True)
    return [PathGate(row, index, probed.get(block)) for block, (row, index) in enumerate(rows)]


class LooseGates:
    """Gates cut off from alpha, so that any number of backward passes may end at them; then alpha learns from all.

    gates: what goes into the network. leaf: their weights [blocks, candidates], where gradients gather.
    """

    def __init__(self, drawn: Gates) -> None:
        self.drawn = drawn if isinstance(drawn, Tensor) else torch.stack([gate.weights for gate in drawn])
        self.leaf = self.drawn.detach().requires_grad_(self.drawn.requires_grad)
        self.gates: Gates = self.leaf
        if not isinstance(drawn, Tensor):
            rows = zip(drawn, self.leaf.unbind(), strict=True)
            self.gates = [gate._replace(weights=row) for gate, row in rows]

    def pass_on(self, settle: Callable[[list[Tensor]], None] = lambda _: None) -> None:
        """Give the gathered gradient to alpha, once `settle` has made it, in place, what it is to be."""
        if self.leaf.grad is not None:
            settle([self.leaf.grad])
            self.drawn.backward(self.leaf.grad)


def harden(gates: Tensor) -> Tensor:
    """One-hot gates at the likeliest candidates, with the gradient of the soft ones (straight-through)."""
    one_hot = F.one_hot(gates.argmax(dim=-1), gates.shape[-1]).to(gates.dtype)
    return one_hot + (gates - gates.detach())


def drop_candidates(alpha: Tensor, p: float, generator: torch.Generator | None = None) -> Tensor:
    """alpha [blocks, candidates] with each candidate ruled out with probability p; never all that a block has."""
    kept = torch.rand(alpha.shape, generator=generator, device=alpha.device) >= p
    absent = alpha <= ABSENT
    kept |= (~kept | absent).all(dim=-1, keepdim=True)
    return alpha.masked_fill(~kept, ABSENT)


class Estimator:
    """How a step weighs the candidates, and what alpha learns; this one is `soft`."""

    one_hot = False
    """Whether the gates of each step choose one candidate per block, so that the SuperNet stands for one network."""
    lesson_part = 1
    """A lesson on text of alpha's own reads one in so many rows of a batch."""
    forward_only = False
    """Whether such a lesson is read forward only, and then as in evaluation: without dropout, which differs between
    candidates and between the readings of a pair, more than networks do."""

    settled: Tensor | None = None
    """One-hot [blocks, candidates] of the network that the weights are to settle on, once alpha rests."""

    def __init__(self, blocks: int, space: Space) -> None:
        self.block_spaces = spread_space(space, blocks)
        self.space = unite(self.block_spaces)

    def draw(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """Gates of one step, given alpha [blocks, candidates]; with a gradient to alpha where that has one."""
        return gumbel_softmax(alpha, tau, generator)

    def lesson(
        self,
        alpha: Tensor,
        tau: Tensor | float,
        loss_of: Callable[[Gates], Tensor],
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """A scalar whose gradient is what alpha learns from one batch of its own text.

        `loss_of` gives the batch's mean loss under gates, as often as it is asked.
        """
        return loss_of(self.draw(alpha, tau, generator))

    def state(self) -> dict[str, Tensor]:
        """What a resumed search needs."""
        return {}

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Take up the state of a checkpoint."""


class StraightThrough(Estimator):
    """See the top of this file."""

    one_hot = True

    def draw(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """One-hot gates [blocks, candidates]; all candidates run."""
        return harden(gumbel_softmax(alpha, tau, generator))


class Gdas(Estimator):
    """See the top of this file."""

    one_hot = True

    def draw(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """A path."""
        return make_path(harden(gumbel_softmax(alpha, tau, generator)))


class ProbedPath(Estimator):
    """`single_path` at the top of this file. `means` [blocks, candidates], of the probes, is all its state."""

    one_hot = True

    def __init__(self, blocks: int, space: Space) -> None:
        super().__init__(blocks, space)
        self.means = torch.zeros(blocks, len(self.space))

    def draw(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """A path; nothing is probed where alpha needs no gradient."""
        hard = harden(gumbel_softmax(alpha, tau, generator))
        chosen: list[int] = hard.detach().argmax(dim=-1).tolist()
        probe = None
        if hard.requires_grad:
            probe = self._draw_probe(chosen, generator)
            hard.register_hook(lambda grad: self._complete(grad, chosen, probe))
        return make_path(hard, probe)

    def state(self) -> dict[str, Tensor]:
        """The running means."""
        return {"means": self.means}

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Take up the running means."""
        self.means = state["means"].to(device)

    def unknown(self, block: int, chosen: int) -> list[int]:
        """Candidates of a block whose contribution is not known where one was chosen; that of identity always is."""
        known = (self.space[chosen], IDENTITY)
        return [self.space.index(name) for name in self.block_spaces[block] if name not in known]

    def _draw_probe(self, chosen: list[int], generator: torch.Generator | None) -> "Probe | None":
        open_blocks = [
            (block, unknown) for block, index in enumerate(chosen) if (unknown := self.unknown(block, index))
        ]
        if not open_blocks:
            return None
        device = None if generator is None else generator.device
        first, second = torch.rand(2, generator=generator, device=device).tolist()
        block, unknown = open_blocks[int(first * len(open_blocks))]
        return Probe(block, unknown[int(second * len(unknown))], 1 / (len(open_blocks) * len(unknown)))

    def _complete(self, observed: Tensor, chosen: list[int], probe: "Probe | None") -> Tensor:
        """Gradient of all gates from that of the candidates that ran: [blocks, candidates].

        With mean m and probability q of being probed, m + (observed - m) / q where a candidate was probed and m where
        it was not has the expectation of the observation, whatever m is.
        """
        self.means = self.means.to(observed)
        completed = observed.clone()
        for block, index in enumerate(chosen):
            unknown = self.unknown(block, index)
            completed[block, unknown] = self.means[block, unknown]
        if probe is not None:
            place = probe.block, probe.candidate
            surprise = observed[place] - self.means[place]
            completed[place] += surprise / probe.probability
            # What is not finite ends in the gradient, where a step is skipped for it, and not in what later steps read.
            self.means[place] += MEAN_RATE * surprise.nan_to_num(0.0, 0.0, 0.0)
        return completed


class Probe(NamedTuple):
    """A candidate that runs forward only, and the probability with which it was drawn."""

    block: int
    candidate: int
    probability: float


class SinglePath(torch.autograd.Function):
    """The output of the chosen candidate, and the gradient of the gates of those that ran.

    The gradient of a gate is <d loss / d output, its candidate's output>. Here all are given relative to the block's
    input, which is what identity puts out: a constant for all candidates, which the softmax does not see.
    """

    @staticmethod
    def forward(
        ctx: Any,
        output: Tensor,
        x: Tensor,
        probe: Tensor | None,
        weights: Tensor,
        indices: tuple[int, int | None],
    ) -> Tensor:
        """`output`; all [B, T, D] but `weights` [candidates]; `indices` of the chosen and the probed candidate."""
        ctx.save_for_backward(output, x, probe)
        ctx.candidates, ctx.indices = len(weights), indices
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Of output and weights."""
        output, x, probe = ctx.saved_tensors
        chosen, probed = ctx.indices
        flat = grad.flatten()
        of_identity = flat @ x.flatten()
        weights = grad.new_zeros(ctx.candidates)
        weights[chosen] = flat @ output.flatten() - of_identity
        if probed is not None:
            weights[probed] = flat @ probe.flatten() - of_identity
        return grad, None, None, weights, None


class UniformPath(Estimator):
    """`uniform` at the top of this file. Its state is the fit: `gram` and `moment` of the normal equations."""

    one_hot = True
    lesson_part = 4  # pairs of paths teach more than longer texts
    forward_only = True

    def __init__(self, blocks: int, space: Space) -> None:
        super().__init__(blocks, space)
        size = blocks * len(self.space)
        weights = [
            [(IDENTITY_WEIGHT if name == IDENTITY else 1.0) if name in names else 0.0 for name in self.space]
            for names in self.block_spaces
        ]
        self.even = torch.tensor(weights).log()
        self.gram, self.moment = torch.zeros(size, size), torch.zeros(size)
        self.forgetting = 1 - 1 / (PAIRS * max(1, sum(len(names) - 1 for names in self.block_spaces)))

    def draw(self, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None) -> Gates:
        """A path without a gradient: each layer of a block as likely as the others.

        Once there is a network to settle on, each block takes its layer, or with probability tau draws by pi.
        """
        if self.settled is None:
            return make_path(harden(gumbel_softmax(self.even.to(alpha), 1.0, generator)))
        drawn = harden(gumbel_softmax(alpha.detach(), 1.0, generator))
        by_pi = torch.rand(len(alpha), 1, generator=generator, device=alpha.device) < tau
        return make_path(torch.where(by_pi, drawn, self.settled.to(drawn)))

    def lesson(
        self,
        alpha: Tensor,
        tau: Tensor | float,  # noqa: ARG002
        loss_of: Callable[[Gates], Tensor],
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """The loss expected under pi by the fit, after two more paths, drawn by pi and read on the same text."""
        with torch.no_grad():
            one, other = (make_path(harden(gumbel_softmax(alpha, 1.0, generator))) for _ in range(2))
            difference = loss_of(one) - loss_of(other)
            self.observe(torch.stack([a.weights - b.weights for a, b in zip(one, other, strict=True)]), difference)
        # What is not finite ends in the gradient, where a step is skipped for it, and not in the fit.
        return (alpha.softmax(dim=-1) * (self.contributions() + 0 * difference)).sum()

    def observe(self, paths: Tensor, losses: Tensor) -> None:
        """Take in that paths which differ by `paths` [blocks, candidates] differ by `losses`, if that is finite."""
        self.gram, self.moment = self.gram.to(paths), self.moment.to(paths)
        x = torch.where(losses.isfinite(), paths.flatten(), 0.0)
        self.gram.mul_(self.forgetting).addr_(x, x)
        self.moment.mul_(self.forgetting).add_(x * losses.nan_to_num(0.0, 0.0, 0.0))

    def contributions(self) -> Tensor:
        """What each candidate adds to the loss by the fit, in nats per token: [blocks, candidates], zero on average."""
        ridge = RIDGE * torch.eye(len(self.moment), device=self.moment.device)
        solution: Tensor = torch.linalg.solve(self.gram + ridge, self.moment)
        return solution.view(len(self.block_spaces), -1)

    def state(self) -> dict[str, Tensor]:
        """The fit."""
        return {"gram": self.gram, "moment": self.moment}

    def restore(self, state: Mapping[str, Tensor], device: torch.device) -> None:
        """Take up the fit."""
        self.gram, self.moment = state["gram"].to(device), state["moment"].to(device)


ESTIMATORS: dict[str, type[Estimator]] = {
    "soft": Estimator,
    "straight_through": StraightThrough,
    "gdas": Gdas,
    "single_path": ProbedPath,
    "uniform": UniformPath,
}


def lesson_rows(estimator: str, rows: int) -> int:
    """Rows of a batch of the text that alpha has for itself, where the weights' has so many."""
    return max(1, rows // ESTIMATORS[estimator].lesson_part)
