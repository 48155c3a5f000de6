"""The figures that show a collapse."""

import math

import pytest
import torch

from parnas.architecture import Architecture
from parnas.nas.diagnostics import COLLAPSED, Monitor, describe_collapse, entropies


def test_entropy_equals_its_definition_and_has_a_finite_gradient_at_zero() -> None:
    alpha = torch.tensor([[0.3, -1.0, 2.0], [0.0, 0.0, -torch.inf]], requires_grad=True)
    pi = alpha.softmax(dim=-1)
    expected = [-sum(p * math.log(p) for p in row if p > 0) for row in pi.tolist()]
    assert entropies(pi).tolist() == pytest.approx(expected)
    entropies(pi).sum().backward()
    assert alpha.grad is not None
    assert bool(alpha.grad.isfinite().all())


def test_monitor_counts_changes_of_the_network() -> None:
    monitor = Monitor(["s", "f", "i"])
    pi = torch.tensor([[0.2, 0.3, 0.5], [0.1, 0.8, 0.1]])
    seen = [monitor.observe(pi, Architecture.parse(string)) for string in ("if", "fi", "ff", "if")]
    assert [each["argmax_changes"] for each in seen] == [0, 0, 1, 2], "if and fi are one network"
    assert seen[-1]["argmax"] == "if"
    assert seen[-1]["identity_share"] == pytest.approx(0.3)
    assert seen[-1]["entropy"] == pytest.approx(float(entropies(pi).mean()))
    assert Monitor(["s", "f"]).observe(pi[:, :2], Architecture("ff"))["identity_share"] == 0


def test_collapse_is_said_from_its_bound_on() -> None:
    assert describe_collapse(COLLAPSED - 0.01, "gdas") is None
    assert "75%" in str(describe_collapse(0.75, "gdas"))
    assert "estimator uniform" in str(describe_collapse(0.75, "gdas"))
    assert "estimator uniform" not in str(describe_collapse(0.75, "uniform")), "which is in use already"
