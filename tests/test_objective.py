"""What shapes alpha besides the loss: the entropy of pi, and candidates that a step leaves out."""

from pathlib import Path

import pytest
import torch
from conftest import small_config
from model_helpers import make_supernet

from parnas.model.estimators import Gates
from parnas.nas.search import SearchTrainer, search
from parnas.training.reporter import Silent


def trainer_of(corpus: Path, **changes: object) -> SearchTrainer:
    """With what the objective needs: settings, a SuperNet and no costs; alpha learns in steps 6 to 105."""
    trainer = SearchTrainer.__new__(SearchTrainer)
    schedule = {"search__steps": 106, "search__alpha_start_step": 6, "search__fair_share": 1.0}
    trainer.search = small_config(corpus, **schedule, **changes).search
    trainer.supernet, trainer.relative_costs = make_supernet(), None
    return trainer


def test_weight_of_the_entropy_goes_on_a_line_while_alpha_learns(corpus: Path) -> None:
    trainer = trainer_of(corpus, search__entropy_start=0.1, search__entropy_end=0.3)
    weights = []
    for trainer.step in (0, 6, 31, 56, 106):
        weights.append(trainer.entropy_weight())
    assert weights == pytest.approx([0.1, 0.1, 0.15, 0.2, 0.3])


def test_alphas_objective_rewards_the_entropy_of_each_block(corpus: Path) -> None:
    """The gradient is added to the loss's, and against that of the definition."""
    trainer = trainer_of(corpus, search__entropy_start=0.0, search__entropy_end=0.4)
    trainer.step = 56
    alphas = trainer.supernet.alphas()
    objective = sum(0.2 * (row.softmax(dim=-1) * row.log_softmax(dim=-1)).sum() for row in alphas)
    assert isinstance(objective, torch.Tensor)
    expected = torch.autograd.grad(objective, alphas)
    for row in alphas:
        row.grad = torch.ones_like(row)
    trainer._regularise()
    for row, gradient in zip(alphas, expected, strict=True):
        torch.testing.assert_close(row.grad, 1 + gradient)


@pytest.mark.parametrize("p", [0.0, 0.5])
def test_steps_leave_out_candidates_as_often_as_asked(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, p: float
) -> None:
    drawn: list[torch.Tensor] = []
    original = SearchTrainer.gates

    def spy(self: SearchTrainer) -> Gates:
        gates = original(self)
        assert isinstance(gates, torch.Tensor)
        drawn.append((gates.detach() == 0).float())
        return gates

    monkeypatch.setattr(SearchTrainer, "gates", spy)
    config = small_config(corpus, search__estimator="soft", search__candidate_dropout=p, search__tau_end=1.0)
    search(config, tmp_path / "run", Silent())
    # Where all three would go, none goes.
    assert float(torch.stack(drawn).mean()) == pytest.approx(p - p**3, abs=0.12 * (p > 0))
