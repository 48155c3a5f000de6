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
from parnas.runs.run import Run
from parnas.training.distillation import Teachers
from parnas.training.progress import Silent
from parnas.training.retrain import retrain


def divergence(networks, own, ids, temperature):
    """Return the divergence of a network from teachers."""
    teachers = Teachers(networks, DistillConfig(temperature=temperature))
    hidden = own(ids[:, :-1]).hidden.flatten(0, 1)
    theirs, _ = teachers.predict(ids[:, :-1], [None] * len(networks))
    return teachers.divergence(own.head, hidden, [each.flatten(0, 1) for each in theirs], ids[:, 1:].reshape(-1))


def softmax(logits, temperature):
    exponentials = [math.exp(logit / temperature) for logit in logits.tolist()]
    return [each / sum(exponentials) for each in exponentials]


@pytest.mark.parametrize("cutoffs", [(), (5,), (5, 9)])
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("count", [1, 2])
def test_the_divergence_equals_loops_over_tokens_and_clusters(cutoffs, temperature, count):
    own, ids = make_network("sf", seed=9, cutoffs=cutoffs), random_ids(2, 6)
    networks = [make_network("fs", seed=seed, cutoffs=cutoffs, d_model=12) for seed in range(count)]
    hidden = own(ids[:, :-1]).hidden.flatten(0, 1)
    theirs = [each(ids[:, :-1]).hidden.flatten(0, 1) for each in networks]
    total, bounds = 0.0, own.head.bounds
    for row, target in enumerate(ids[:, 1:].flatten().tolist()):
        clusters = [0, *(c for c in range(1, len(bounds) - 1) if bounds[c] <= target < bounds[c + 1])]
        for cluster in clusters:
            q = softmax(own.head.cluster_logits(hidden[row : row + 1], cluster)[0], temperature)
            each = [
                softmax(network.head.cluster_logits(states[row : row + 1], cluster)[0], temperature)
                for network, states in zip(networks, theirs, strict=True)
            ]
            p = [sum(values) / count for values in zip(*each, strict=True)]
            total += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    expected = temperature**2 * total / ids[:, 1:].numel()
    assert float(divergence(networks, own, ids, temperature)) == pytest.approx(expected, rel=1e-4)


def test_a_full_softmax_has_the_divergence_of_the_whole_distribution():
    own, teacher, ids = make_network("sf", seed=1), make_network("sf", seed=2), random_ids(2, 6)
    log_probs = [each.log_probs(each(ids[:, :-1]).hidden).flatten(0, 1) for each in (own, teacher)]
    expected = torch.nn.functional.kl_div(*log_probs, reduction="batchmean", log_target=True)
    near(divergence([teacher], own, ids, 1.0), expected)


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
