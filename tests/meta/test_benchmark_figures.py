"""The figures that the benchmarks of the search make of scores, trainings and timings."""

import itertools
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import comparison
import ground_truth
import numpy as np
import pytest
import search_quality
from conftest import small_config
from search_quality import NO_TARGET, Job, Search, Truth, agreement, derived_table, describe_score

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.config.schema import Reach, Shape
from parnas.data.streams import prepare
from parnas.nas.cost import make_costs
from parnas.runs.files import read_json, write_json
from parnas.runs.run import Run
from parnas.training.device import choose_device
from parnas.training.loaded_run import load
from parnas.training.perplexity import TotalLoss, measure_loss
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

COSTS = make_costs("macs", {"s": 2.0, "f": 1.0, "i": 0.0}, 2)
TRUTH = Truth({"ss": [1.0, 1.0], "sf": [2.0, 2.0], "s": [3.0, 3.0], "ff": [4.0, 4.0]}, COSTS)

# Agreement with the table of networks.


@pytest.mark.parametrize(
    ("scores", "tau", "rho"),
    [((9.0, 8.0, 3.0, 1.0), 1, 1), ((-4.0, -3.0, -2.0, -1.0), -1, -1), ((9.0, 3.0, 8.0, 7.0), 1 / 3, 0.4)],
)
def test_scores_agree_where_more_of_them_is_less_loss(scores: tuple[float, ...], tau: float, rho: float) -> None:
    score = dict(zip(TRUTH.losses, scores, strict=True))
    assert agreement(TRUTH, score, list(TRUTH.losses)) == pytest.approx((tau, rho))


def test_figures_of_several_searches_are_medians() -> None:
    right, wrong = ({network: sign * TRUTH.mean(network) for network in TRUTH.losses} for sign in (-1, 1))
    between = {"ss": 4.0, "sf": 1.0, "s": 3.0, "ff": 3.0}
    for score, expected in ((right, 1), (wrong, -1)):
        assert list(describe_score(TRUTH, [score]).values()) == pytest.approx([expected] * 6)
    figures = describe_score(TRUTH, [right, wrong, between])
    assert figures == pytest.approx(describe_score(TRUTH, [between]))
    assert figures["tau, with attention"] == pytest.approx(1 / 3)


def test_derived_networks_of_several_searches_are_told_by_their_medians() -> None:
    found = [Search("soft", NO_TARGET, seed, 9, arch, arch, 1.0) for seed, arch in enumerate(("ff", "ss", "sf"))]
    row = derived_table(TRUTH, found)[0]
    assert row["behind the best"] == "100.00 %"
    assert row["at least as good as"] == "75 % of 4"
    assert row["share of latency"] == 1


def test_a_network_is_scored_by_its_likeliest_string(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For `s` alone that is `isi`, neither the first nor the last of its three."""
    pi = [dict(zip("sfi", row, strict=True)) for row in ((0.2, 0.3, 0.5), (0.5, 0.3, 0.2), (0.3, 0.3, 0.4))]
    chances = {string: math.prod(map(dict.__getitem__, pi, string)) for string in itertools.product("sfi", repeat=3)}
    read: list[str] = []

    def measure(*_: object) -> Callable[[Architecture], TotalLoss]:
        def loss_of(architecture: Architecture) -> TotalLoss:
            read.append(str(architecture))
            return TotalLoss(float(len(read)), 1)

        return loss_of

    monkeypatch.setattr(search_quality, "read_pi", lambda *_: (24, pi))
    monkeypatch.setattr(search_quality, "shared_weight_losses", measure)
    job = Job("soft", NO_TARGET, 1, (NO_TARGET,))
    _, scores = search_quality.run_search(small_config(corpus), ground_truth.networks(3, "sfi"), job)
    best: dict[str, str] = {}
    for string in sorted(chances, key=chances.__getitem__):
        best["".join(string).replace("i", "") or "i"] = "".join(string)
    assert {score.network: read[round(-score.inherited) - 1] for score in scores} == best
    assert best["s"] == "isi"
    assert len(scores) == len(best)
    for score in scores:
        assert score.pi == pytest.approx(math.log(chances[tuple(best[score.network])]))


# Trainings.


def test_a_row_of_the_table_is_the_training_of_its_seed(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus)
    row = ground_truth.train(config, ("sf", 2))
    run = retrain(config.replace(model__arch="sf", runtime__seed=2), tmp_path / "run", Silent())
    assert row == ("sf", 2, 24, run.summary().valid.ppl)


def test_the_comparison_reads_the_test_split(retrain_run: Run, corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "retrain", lambda *_: retrain_run)
    job = comparison.Job("derived", "sfs", 1, 24)
    row = comparison.train(small_config(corpus), job)
    found, streams = load(retrain_run.folder), prepare(retrain_run.config().data)
    device, text, summary = choose_device(found.config.runtime), streams.tokens("test"), retrain_run.summary()
    shape = Shape(1, 8, Reach(8))
    expected = measure_loss(found.model, text, streams.tokenizer.eos_id, device, shape).perplexity
    assert row.test_ppl == pytest.approx(expected, rel=1e-5)
    assert row[:5] == (*job, summary.valid.ppl)
    assert row.test_ppl != pytest.approx(row.valid_ppl, rel=1e-3)
    assert row.seconds == summary.seconds


# Time.


@pytest.fixture
def study(corpus: Path, tmp_path: Path) -> comparison.Study:
    """With `sff` derived, and no random networks."""
    found = comparison.Study(small_config(corpus), (1, 2), 0, tmp_path)
    write_json(found.search, {"derivation": {"arch": "sff"}, "longer_steps": 99})
    return found


def test_the_stack_takes_what_a_network_takes_more_than_one_without_blocks(
    study: comparison.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the median of rounds, in which the machine is busy in different ways."""
    empty, block = np.array([10.0, 30.0, 80.0]), np.array([10.0, 1.0, 2.0])

    def measure(calls: Mapping[Sequence[str], object], *_: object) -> dict[Sequence[str], np.ndarray]:
        return {layers: empty + len(layers) * block for layers in calls}

    monkeypatch.setattr(comparison, "time_in_turns", measure)
    comparison.run_latency(study, 3)
    found = read_json(study.latency)["of"]
    assert set(found) == {"sff", "sfs", "sf"}
    for arch, times in found.items():
        assert times == {"whole_ms": {2: 32, 3: 40}[len(arch)], "stack_ms": 2 * len(arch)}


def test_the_longer_training_has_the_time_of_search_and_training(
    study: comparison.Study, search_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(Path(shutil.copytree(search_run.folder, tmp_path / "run")))
    write_json(run.folder / "summary.json", {**run.summary().to_dict(), "seconds": 40.0})
    paces: list[str] = []

    def time_step(config: Config, arch: str) -> float:
        paces.append(arch)
        return {"interleaved-3": 2.0}.get(arch, 0.5)

    monkeypatch.setattr(comparison, "search", lambda *_: run)
    monkeypatch.setattr(comparison, "time_step", time_step)
    comparison.run_search(study)
    found = read_json(study.search)
    assert found["longer_steps"] == (40 + 24 * 0.5) / 2
    assert paces == [found["derivation"]["arch"], "interleaved-3"]
    steps = {job.name: job.steps for job in comparison.wanted(study)}
    assert steps.pop(comparison.LONGER) == 26
    assert set(steps.values()) == {24}


def test_the_pace_is_that_of_the_last_line_of_a_training(retrain_run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "retrain", lambda *_: retrain_run)
    lines = [line for line in retrain_run.metrics() if line.split == "train"]
    step = comparison.time_step(retrain_run.config(), "sfs")
    assert step == pytest.approx(4 * 8 / lines[-1].tokens_per_s)
