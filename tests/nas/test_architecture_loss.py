"""What shapes alpha besides the loss: the entropy of pi, and candidates that a step leaves out."""

from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.model_helpers import make_supernet

from parnas.nas.architecture_optimizer import ArchitectureOptimizer


def make_arch_optimizer(corpus: Path, **changes: object) -> ArchitectureOptimizer:
    """Return an optimizer without costs that trains alpha in steps 6 to 105."""
    schedule = {"search__steps": 106, "search__alpha_start_step": 6, "search__uniform_fraction": 1.0}
    return ArchitectureOptimizer(make_supernet(), small_config(corpus, **schedule, **changes).search, 0, None)


def test_weight_of_the_entropy_goes_on_a_line_while_alpha_learns(corpus: Path) -> None:
    optimizer = make_arch_optimizer(corpus, search__entropy_start=0.1, search__entropy_end=0.3)
    weights = [optimizer.entropy_weight(step) for step in (0, 6, 31, 56, 106)]
    assert weights == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.3])


def test_alphas_objective_rewards_the_entropy_of_each_block(corpus: Path) -> None:
    """The gradient is added to the loss's, and against that of the definition."""
    optimizer = make_arch_optimizer(corpus, search__entropy_start=0.0, search__entropy_end=0.4)
    alphas = optimizer.supernet.alphas()
    objective = sum(0.2 * (row.softmax(dim=-1) * row.log_softmax(dim=-1)).sum() for row in alphas)
    assert isinstance(objective, torch.Tensor)
    expected = torch.autograd.grad(objective, alphas)
    for row in alphas:
        row.grad = torch.ones_like(row)
    optimizer.add_regularisation(56)
    for row, gradient in zip(alphas, expected, strict=True):
        torch.testing.assert_close(row.grad, 1 + gradient)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_steps_leave_out_candidates_as_often_as_asked(corpus: Path, p: float) -> None:
    changes = {"search__estimator": "soft", "search__candidate_dropout": p, "search__tau_end": 1.0}
    optimizer = make_arch_optimizer(corpus, **changes)
    absent = [(optimizer.sample_gates(6, 1, differentiable=False)[0] == 0).float() for _ in range(200)]  # type: ignore[union-attr]
    # Where all three would go, none goes.
    assert float(torch.stack(absent).mean()) == pytest.approx(p - p**3, abs=0.04 * (p > 0))
