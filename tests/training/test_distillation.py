"""Distillation: the divergence from teachers against formulas, and trainings with teachers."""

import math
from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.model_helpers import make_network, near, random_ids
from helpers.training_helpers import assert_resumes, final_weights

from parnas.config.schema import DistillConfig
from parnas.errors import ParnasError
from parnas.model.transformer_xl import ModelOutput
from parnas.runs.run import Run
from parnas.training.distillation import Teachers
from parnas.training.progress import Silent
from parnas.training.retrain import retrain


def softmax(logits, temperature):
    """Return the probabilities of a row of logits as a list."""
    exponentials = [math.exp(logit / temperature) for logit in logits.tolist()]
    return [each / sum(exponentials) for each in exponentials]


@pytest.mark.parametrize("cutoffs", [(), (5,), (5, 9)])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("count", [1, 2])
def test_soft_targets_are_the_mean_of_the_teachers_in_each_cluster(cutoffs, temperature, count):
    ids = random_ids(2, 6)
    networks = [make_network("fs", seed=seed, cutoffs=cutoffs, d_model=12) for seed in range(count)]
    soft, memories = Teachers(networks, DistillConfig(temperature=temperature)).predict(ids, [None] * count)
    assert len(memories) == count
    states = [network(ids).hidden.flatten(0, 1) for network in networks]
    for cluster in range(len(cutoffs) + 1):
        for rows in (None, torch.tensor([7, 0, 3])):
            found = soft(cluster, rows)
            assert (found.weight, found.temperature) == (0.75, temperature)
            for place, row in enumerate(range(12) if rows is None else rows.tolist()):
                each = [
                    softmax(network.head.cluster_logits(hidden[row : row + 1], cluster)[0].detach(), temperature)
                    for network, hidden in zip(networks, states, strict=True)
                ]
                expected = [sum(values) / count for values in zip(*each, strict=True)]
                assert found.probabilities[place].tolist() == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("cutoffs", [(), (5, 9)])
def test_the_gradient_is_that_of_the_loss_and_of_the_divergence_in_each_cluster(cutoffs):
    own, ids = make_network("sf", seed=9, cutoffs=cutoffs), random_ids(2, 7)
    inputs, targets = ids[:, :-1], ids[:, 1:]
    teacher, settings = make_network("fs", seed=1, cutoffs=cutoffs), DistillConfig(weight=0.3, temperature=2.0)
    soft, _ = Teachers([teacher], settings).predict(inputs, [None])
    hidden = own(inputs).hidden.detach().requires_grad_()
    output = ModelOutput(hidden, (), None)
    loss = own.score(output, targets, soft)
    near(loss.detach(), own.score(output, targets).detach())
    (found,) = torch.autograd.grad(loss.sum(), hidden)
    rows, theirs = hidden.flatten(0, 1), teacher(inputs).hidden.detach().flatten(0, 1)
    divergence = 0.0
    for row, target in enumerate(targets.flatten().tolist()):
        bounds = own.head.bounds
        for cluster in [0, *(c for c in range(1, len(bounds) - 1) if bounds[c] <= target < bounds[c + 1])]:
            log_q = (own.head.cluster_logits(rows[row : row + 1], cluster)[0] / 2.0).log_softmax(dim=-1)
            log_p = (teacher.head.cluster_logits(theirs[row : row + 1], cluster)[0] / 2.0).log_softmax(dim=-1).detach()
            divergence = divergence + (log_p.exp() * (log_p - log_q)).sum()
    whole = 0.7 * own.score(output, targets).sum() + 0.3 * 2.0**2 * divergence
    near(found, torch.autograd.grad(whole, hidden)[0], 1e-5)


@pytest.fixture(scope="module")
def teacher(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    config = small_config(corpus, model__arch="sf", train__steps=40)
    return retrain(config, tmp_path_factory.mktemp("teacher") / "run", Silent())


def train(corpus: Path, folder: Path, **changes: object) -> Run:
    return retrain(small_config(corpus, model__arch="ff", **changes), folder, Silent())


def test_without_weight_a_teacher_changes_nothing(corpus: Path, tmp_path: Path, teacher: Run) -> None:
    teachers = {"train__teachers": (str(teacher.folder),), "train__distill__weight": 0.0}
    one, other = train(corpus, tmp_path / "one"), train(corpus, tmp_path / "other", **teachers)
    for name, weight in final_weights(one).items():
        near(final_weights(other)[name], weight, 1e-6)


def test_a_network_learns_what_its_teacher_predicts(corpus: Path, tmp_path: Path, teacher: Run) -> None:
    alone = train(corpus, tmp_path / "alone")
    taught = train(corpus, tmp_path / "taught", train__teachers=(str(teacher.folder),), train__distill__weight=1.0)
    still = train(corpus, tmp_path / "still", train__lr=1e-30)
    gains = [still.summary().valid.loss - run.summary().valid.loss for run in (alone, taught)]
    assert gains[1] > 0.5 * gains[0] > 0, "without targets it learns much of what it learns from them"


def test_a_training_with_a_teacher_resumes_exactly(corpus: Path, tmp_path: Path, teacher: Run) -> None:
    config = small_config(corpus, model__arch="ff", train__teachers=(str(teacher.folder), str(teacher.folder)))
    assert_resumes(retrain, config, tmp_path, killed_after=13)


def test_micro_batches_have_the_same_gradients(corpus: Path, tmp_path: Path, teacher: Run) -> None:
    changes = {"train__teachers": (str(teacher.folder),), "model__dropout": 0.0, "train__steps": 3}
    whole = train(corpus, tmp_path / "whole", **changes)
    parts = train(corpus, tmp_path / "parts", **changes, train__accumulate=2)
    for name, weight in final_weights(whole).items():
        near(final_weights(parts)[name], weight, 1e-4)


def test_a_teacher_must_fit(corpus: Path, tmp_path: Path, teacher: Run) -> None:
    folder = (str(teacher.folder),)
    with pytest.raises(ParnasError, match="cutoffs"):
        train(corpus, tmp_path / "cutoffs", train__teachers=folder, model__cutoffs=(3,))
    with pytest.raises(ParnasError, match="text or the tokenizer"):
        train(corpus, tmp_path / "text", train__teachers=folder, data__tokenizer__kind="byte")
    with pytest.raises(ParnasError, match=r"no summary\.json|not finished|nothing"):
        train(corpus, tmp_path / "missing", train__teachers=(str(tmp_path / "nothing"),))
