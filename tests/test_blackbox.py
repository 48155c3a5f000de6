"""The black-box search: equal networks, what counts as a trial, and what comes out."""

import random
from collections import Counter
from pathlib import Path

import optuna
import pytest
from blackbox_helpers import STORAGES, Counting, make_task, run_study
from optuna.trial import TrialState

from parnas.architecture import Architecture
from parnas.config import Config
from parnas.errors import ParnasError
from parnas.nas.blackbox import findings, open_study
from parnas.nas.cost import count_costs
from parnas.nas.storage import open_storage
from parnas.nas.trials import (
    Finding,
    best_within,
    pareto_front,
)
from parnas.nas.workers import finished, refuse_other_terms

pytestmark = pytest.mark.usefixtures("impatient")


def strings(study: optuna.Study) -> list[str]:
    return ["".join(trial.params.values()) for trial in study.get_trials()]


@pytest.mark.parametrize("url", STORAGES)
@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_each_network_is_evaluated_once(url: str, sampler: str, tmp_path: Path) -> None:
    """15 different networks in 27 strings of 3 blocks: equal ones must come up, and identity alone may."""
    study, asked = run_study(url.format(tmp_path), 18, sampler)
    assert len(finished(study)) == len(study.get_trials()) == 18
    assert max(Counter(asked.asked).values()) == 1
    named = [string.replace("i", "") for string in strings(study)]
    assert len(set(named)) < len(named)
    assert set(asked.asked) == set(named) - {""}
    expected = Counting()
    costs = count_costs(Config().replace(search__blocks=3), "macs")
    for trial, string in zip(study.get_trials(), strings(study), strict=True):
        if string == "iii":
            assert trial.state == TrialState.PRUNED
        else:
            assert trial.values == [expected(0, Architecture(string)), costs.cost(string)]
    assert [finding.network for finding in findings(study)] == asked.asked


def test_identity_alone_is_passed_over(tmp_path: Path) -> None:
    study, asked = run_study(f"journal:{tmp_path}/s.log", 12, blocks=1)
    states = Counter(trial.state for trial in study.get_trials())
    assert states[TrialState.PRUNED] >= 1
    assert states[TrialState.PRUNED] + states[TrialState.COMPLETE] == 12
    assert sorted(set(asked.asked)) == sorted(asked.asked)
    assert all(finding.network for finding in findings(study))


@pytest.mark.parametrize("sampler", ["tpe", "nsga2"])
def test_one_worker_is_deterministic_even_where_it_was_interrupted(sampler: str, tmp_path: Path) -> None:
    whole, _ = run_study(f"journal:{tmp_path}/a.log", 16, sampler)
    run_study(f"journal:{tmp_path}/b.log", 5, sampler)
    run_study(f"journal:{tmp_path}/b.log", 12, sampler)
    parts, _ = run_study(f"journal:{tmp_path}/b.log", 16, sampler)
    assert strings(parts) == strings(whole)
    other, _ = run_study(f"journal:{tmp_path}/c.log", 16, sampler, seed=2)
    assert strings(other) != strings(whole)
    assert all(len(set(strings(study))) > 5 for study in (whole, other))


def test_a_complete_study_is_not_extended(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    run_study(url, 9)
    for trials in (9, 4):
        study, asked = run_study(url, trials)
        assert len(study.get_trials()) == 9
        assert asked.asked == []


# What comes out.


def test_the_front_is_that_of_comparing_all_with_all() -> None:
    draw = random.Random(0)
    for _ in range(100):
        found = [
            Finding(f"n{n}", float(draw.randint(1, 6)), float(draw.randint(1, 6)), n, "trained")
            for n in range(draw.randint(0, 15))
        ]

        def beats(one: Finding, other: Finding) -> bool:
            no_worse = one.valid_ppl <= other.valid_ppl and one.cost <= other.cost
            return no_worse and (one.valid_ppl < other.valid_ppl or one.cost < other.cost)

        expected = {each for each in found if not any(beats(other, each) for other in found)}
        front = pareto_front(found)
        assert set(front) == expected
        assert len(front) == len(expected)
        assert [each.cost for each in front] == sorted(each.cost for each in front)


def test_the_best_within_a_bound() -> None:
    found = [Finding("s", 9.0, 5.0, 0, "x"), Finding("f", 7.0, 6.0, 1, "x"), Finding("sf", 5.0, 11.0, 2, "x")]
    assert [best_within(found, bound) for bound in (None, 11, 10.9, 5, 4)] == [
        found[2],
        found[2],
        found[1],
        found[0],
        None,
    ]
    assert best_within([Finding("ff", 5.0, 12.0, 3, "x"), found[2]], None) == found[2]


# The terms.


def test_a_study_keeps_its_terms(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/s.db"
    task = make_task(Counting(), widths=(1, 2), lr=0.1)
    open_study(url, "test", "tpe", task)
    open_study(url, "test", "nsga2", task)
    with pytest.raises(ParnasError, match=r"lr: 0\.1 before, 0\.2 now"):
        open_study(url, "test", "tpe", make_task(Counting(), widths=(1, 2), lr=0.2))
    with pytest.raises(ParnasError, match="steps: None before, 5 now"):
        refuse_other_terms({}, {"steps": 5}, "test", "cure")
    with pytest.raises(ParnasError, match=r"give all workers one search\.cost\.table"):
        refuse_other_terms(
            {"metric": "latency", "costs": {"s": 1.0}}, {"metric": "latency", "costs": {"s": 1.1}}, "test", "cure"
        )
    foreign = optuna.create_study(storage=open_storage(url), study_name="foreign")
    with pytest.raises(ParnasError, match="not begun by parnas"):
        open_study(url, "foreign", "tpe", task)
    assert "terms" not in foreign.user_attrs
