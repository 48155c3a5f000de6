"""Trainings of the compared networks: intervals, verdicts, and resuming after an interruption."""

import csv
import json
import math
import random
import shutil
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import small_config
from helpers.command_helpers import files_of, run_command
from PIL import Image
from scipy.stats import ttest_1samp

from parnas.architecture import Architecture
from parnas.cli.main import main
from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.search import search
from parnas.runs.files import write_text
from parnas.runs.run import Run
from parnas.studies.baseline_comparison import (
    BaselineComparison,
    NetworkResult,
    compare_baselines,
    compare_networks,
    paired_difference,
)
from parnas.studies.baselines import Baseline, Baselines, find_baselines
from parnas.training.checkpoints import list_checkpoints
from parnas.training.progress import Silent
from parnas.training.trainer import Trainer

# Intervals and answers.


def test_paired_differences_are_those_of_a_t_test() -> None:
    draw = random.Random(0)
    for pairs in (2, 3, 5, 10):
        ours = {seed: draw.uniform(50, 70) for seed in range(pairs)}
        theirs = {seed: draw.uniform(50, 70) for seed in range(-1, pairs)}  # one seed more
        difference = paired_difference(ours, theirs)
        sample = [100 * ours[seed] / theirs[seed] - 100 for seed in range(pairs)]
        test = ttest_1samp(sample, 0)
        interval = test.confidence_interval(0.95)
        assert difference.mean == pytest.approx(sum(sample) / pairs)
        assert (difference.low, difference.high) == pytest.approx((interval.low, interval.high))
        assert difference.p == pytest.approx(test.pvalue)
        assert difference.pairs == pairs


@pytest.mark.parametrize(("ours", "p"), [(100.0, 1.0), (99.0, 0.0)])
def test_equal_differences_have_a_p_value(ours: float, p: float) -> None:
    assert paired_difference({1: ours, 2: ours}, {1: 100.0, 2: 100.0}).p == p


def test_a_difference_of_three_pairs() -> None:
    """Differences of -1, -2 and -3 %: mean -2, standard deviation 1, t = 4.303."""
    difference = paired_difference({1: 99.0, 2: 98.0, 3: 97.0}, dict.fromkeys((1, 2, 3), 100.0))
    assert difference.mean == pytest.approx(-2)
    assert difference.high == pytest.approx(-2 + 4.3027 / math.sqrt(3), abs=1e-4)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ({1: 90.0, 2: 90.1}, "better"),
        ({1: 110.0, 2: 110.1}, "worse"),
        ({1: 90.0, 2: 99.0}, "no significant difference"),
        ({1: 90.0}, "one seed, so no interval"),
        ({1: 90.0, 2: math.inf}, "no difference, since a perplexity is not finite"),
        ({1: math.inf}, "no difference, since a perplexity is not finite"),
    ],
)
def test_a_difference_is_better_worse_or_not_significant(ours: Mapping[int, float], verdict: str) -> None:
    assert paired_difference(ours, {1: 100.0, 2: 100.0}).verdict == verdict


def test_an_infinite_perplexity_gives_no_difference() -> None:
    assert math.isnan(paired_difference({1: 50.0, 2: 50.0}, {1: 60.0, 2: math.inf}).mean)


def result(name: str, *ppl: float) -> NetworkResult:
    return NetworkResult(name, "sf", 0.5, dict(enumerate(ppl)), name.startswith("random"))


def test_the_deviation_is_that_of_a_sample() -> None:
    assert result("derived", 1, 2, 3).sd == pytest.approx(1)
    assert result("derived", 1).sd is None
    assert result("derived", 1, math.inf).sd is None


def test_verdicts_on_every_baseline_and_on_random_networks() -> None:
    named = [result("derived", 58, 62), result("interleaved", 61, 63), result("sandwich-4-1", 50, 51)]
    chance = [result(f"random-{number}", ppl) for number, ppl in enumerate([59.0, 64.0, 66.0], 1)]
    answers = compare_networks([*named, *chance])
    assert [each.against for each in answers] == ["interleaved", "sandwich-4-1", "random"]
    assert answers[0].difference == paired_difference({0: 58, 1: 62}, {0: 61, 1: 63})
    assert answers[2].difference.mean == pytest.approx(100 * (60 / 64 - 1))
    rest = answers[2].text.partition("random networks of its cost: -6.25 % perplexity; ")[2]
    assert rest.startswith("better than 2 of 3 ")
    assert "than 3 by the seed" in rest
    assert [each.against for each in compare_networks(named)] == ["interleaved", "sandwich-4-1"]


def test_infinite_perplexities_are_shown_and_stored_as_what_they_are(tmp_path: Path, capsys) -> None:
    from parnas.cli.tables import show_baseline_results

    networks = (result("derived", 60, 61), result("interleaved", 62, math.inf), result("random-1", math.inf))
    comparison = BaselineComparison(networks, (), "macs")
    comparison.write(tmp_path)
    rows = {row["name"]: row for row in csv.DictReader((tmp_path / "baselines.csv").open())}
    assert (rows["interleaved"]["valid_ppl_mean"], rows["interleaved"]["valid_ppl_sd"]) == ("inf", "")
    content = json.loads((tmp_path / "baselines.json").read_text())
    assert content["networks"][1]["valid_ppl"] == {"0": 62, "1": None}
    assert content["answers"][0]["percent"] == {"mean": None, "low": None, "high": None, "p": None, "pairs": 2}
    show_baseline_results(comparison)
    out = capsys.readouterr().out
    assert "inf" in out
    assert "nan" not in out
    assert "a perplexity is not finite" in out
    assert "random networks of its cost: better than 1 of 1 by its mean over 2 seeds" in out


# A whole comparison.


@pytest.fixture(scope="module")
def searched(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A search of four blocks, whose arch.yaml holds `sfif`."""
    config = small_config(corpus, search__blocks=4, train__steps=12, train__save_every=4, runtime__seed=5)
    run = search(config, tmp_path_factory.mktemp("baselines") / "search", Silent())
    write_text(run.folder / "arch.yaml", "arch: sfif\n")
    return run


@pytest.fixture(scope="module")
def compared(searched: Run) -> Path:
    """The folder of two seeds and two random networks, from the command line."""
    assert run_command("baselines", searched.folder, "--random", 2, "--seeds", 2) == 0
    return searched.folder / "baselines"


NAMED = ("derived", "interleaved", "sandwich-4-1", "shallower")


def test_list_shows_strings_and_costs_and_trains_nothing(
    searched: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(Trainer, "train_step", None)
    shutil.copytree(searched.folder, tmp_path / "run", ignore=shutil.ignore_patterns("baselines"))
    before = files_of(tmp_path / "run")
    assert run_command("baselines", tmp_path / "run", "--random", 3, "--list") == 0
    assert files_of(tmp_path / "run") == before
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    baselines = find_baselines(searched, 3, 5, Silent())
    assert [[each.name, str(each.architecture), f"{each.share:.3f}"] for each in baselines.networks] == rows[1:8]


def test_every_network_is_trained_from_each_seed_and_random_ones_from_the_first(compared: Path, searched: Run) -> None:
    trained = {path.name: Run(path) for path in compared.iterdir() if (path / "summary.json").is_file()}
    wanted = {f"{name}-seed-{seed}" for name in NAMED for seed in (5, 6)} | {"random-1-seed-5", "random-2-seed-5"}
    assert set(trained) == wanted
    archs = {each.name: str(each.architecture) for each in find_baselines(searched, 2, 5, Silent()).networks}
    for folder, run in trained.items():
        name, _, seed = folder.rpartition("-seed-")
        config = run.config()
        assert run.kind() == "retrain"
        assert (config.model.arch, config.runtime.seed) == (archs[name], int(seed))
        assert config.replace(model__arch=None, runtime__seed=5) == searched.config()


def test_files_and_picture_agree_with_the_trainings(compared: Path) -> None:
    content = json.loads((compared / "baselines.json").read_text())
    assert content["metric"] == "macs"
    assert [each["name"] for each in content["networks"]] == [*NAMED, "random-1", "random-2"]
    rows = {row["name"]: row for row in csv.DictReader((compared / "baselines.csv").open())}
    for each in content["networks"]:
        assert list(each["valid_ppl"]) == (["5"] if each["random"] else ["5", "6"])
        reached = list(each["valid_ppl"].values())
        for seed, ppl in each["valid_ppl"].items():
            assert ppl == Run(compared / f"{each['name']}-seed-{seed}").summary().valid.ppl
        row = rows[each["name"]]
        assert float(row["valid_ppl_mean"]) == pytest.approx(sum(reached) / len(reached))
        assert row["valid_ppl_sd"] == ("" if each["random"] else str(statistics.stdev(reached)))
        assert (row["arch"], int(row["n"])) == (each["arch"], len(reached))
    derived, interleaved = (each["valid_ppl"] for each in content["networks"][:2])
    assert content["answers"][0]["percent"] == pytest.approx(paired_difference(derived, interleaved)._asdict())
    with Image.open(compared / "figures" / "pareto.png") as picture:
        picture.verify()


def test_a_second_call_trains_nothing_and_writes_the_same(
    compared: Path, searched: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    shutil.copytree(compared, tmp_path / "run")
    before = files_of(tmp_path / "run")
    trained_before = {path: values for path, values in before.items() if "-seed-" in path}
    monkeypatch.setattr(Trainer, "train_step", None)
    assert run_command("baselines", searched.folder, "--random", 2, "--seeds", 2, "--run", tmp_path / "run") == 0
    after = files_of(tmp_path / "run")
    assert after.keys() == before.keys()
    assert trained_before == {path: values for path, values in after.items() if "-seed-" in path}
    for name in ("baselines.json", "baselines.csv"):
        assert (tmp_path / "run" / name).read_text() == (compared / name).read_text()
    out = capsys.readouterr().out
    for answer in json.loads((compared / "baselines.json").read_text())["answers"]:
        assert answer["text"] in out
    assert run_command("baselines", searched.folder, "--random", 1, "--seeds", 1, "--run", tmp_path / "run") == 0
    assert "one seed, so no interval" in capsys.readouterr().out


def test_results_are_printed_where_no_perplexity_is_finite(
    compared: Path, searched: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr("parnas.studies.baseline_comparison.reached_perplexity", lambda *_: math.inf)
    shutil.copytree(compared, tmp_path / "run")
    command = ("baselines", searched.folder, "--random", 2, "--seeds", 2, "--run", tmp_path / "run", "--json")
    assert run_command(*command) == 2
    assert {each["name"] for each in json.loads(capsys.readouterr().out)["networks"]} >= set(NAMED)


def test_an_interrupted_comparison_is_resumed(
    compared: Path, searched: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """It stops in the third training, between two checkpoints, and ends as without interruption."""
    folder, steps = tmp_path / "run", []
    shutil.copytree(compared, folder)
    for name in ("interleaved-seed-6", "random-2-seed-5"):
        shutil.rmtree(folder / name)
    original = Trainer.train_step

    def step_or_stop(self: Trainer, *arguments: object) -> object:
        steps.append(self.step)
        if len(steps) == 12 + 7:
            raise KeyboardInterrupt
        return original(self, *arguments)

    monkeypatch.setattr(Trainer, "train_step", step_or_stop)
    command = ("baselines", searched.folder, "--random", 2, "--seeds", 2, "--run", folder)
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in command])
    assert leaving.value.code == 130
    assert "the same command again" in capsys.readouterr().err
    interrupted = folder / "interleaved-seed-6"  # the second: all are trained from the first seed before
    assert [path.name for path in list_checkpoints(interrupted / "checkpoints")] == ["step-00000004"]
    steps[:] = [0] * 100
    assert run_command(*command) == 0
    assert steps[100:] == list(range(4, 12))
    assert (folder / "baselines.json").read_text() == (compared / "baselines.json").read_text()


def test_other_settings_other_networks_and_other_folders_are_refused(
    compared: Path, searched: Run, tmp_path: Path
) -> None:
    baselines, config = find_baselines(searched, 0, 5, Silent()), searched.config()
    with pytest.raises(ParnasError, match=r"train\.lr: .* before, 0\.0001 now"):
        compare_baselines(baselines, config.replace(train__lr=1e-4), compared, [5], Silent())
    shutil.copytree(compared, tmp_path / "run")
    derived = Baseline("derived", Architecture.parse("ff"), 0.5)
    with pytest.raises(ParnasError, match=r"derived-seed-5(.|\n)*model\.arch: sff before, ff now"):
        compare_baselines(
            Baselines((derived, *baselines.networks[1:]), (), "macs"), config, tmp_path / "run", [5], Silent()
        )
    write_text(tmp_path / "mine" / "notes.txt", "mine")
    with pytest.raises(ParnasError, match="mine"):
        compare_baselines(baselines, config, tmp_path / "mine", [5], Silent())
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_names_of_one_network_share_its_training(compared: Path, searched: Run, tmp_path: Path) -> None:
    shutil.copytree(compared, tmp_path / "run")
    network = Architecture.parse("sff")
    twice = Baselines((Baseline("derived", network, 0.7), Baseline("interleaved", network, 0.7)), ("a note",), "macs")
    before = files_of(tmp_path / "run")
    comparison = compare_baselines(twice, searched.config(), tmp_path / "run", [5, 6], Silent())
    assert files_of(tmp_path / "run") == before
    assert comparison.networks[0].ppl == comparison.networks[1].ppl
    assert comparison.notes == ("a note", "interleaved is the same network as derived")
    assert comparison.verdicts()[0].difference.mean == 0


def test_a_network_that_diverges_counts_as_infinite(
    compared: Path, searched: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(compared, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "random-1-seed-5")
    original = TransformerXL.score

    def poisoned(self: TransformerXL, *arguments: Any) -> torch.Tensor:
        nll = original(self, *arguments)
        return nll * torch.nan if self.training else nll

    monkeypatch.setattr(TransformerXL, "score", poisoned)
    assert run_command("baselines", searched.folder, "--random", 2, "--seeds", 2, "--run", tmp_path / "run") == 0
    content = json.loads((tmp_path / "run" / "baselines.json").read_text())
    assert any("random-1 from seed 5 diverged" in note for note in content["notes"])
    assert content["networks"][4]["valid_ppl"] == {"5": None}
    assert content["networks"][:4] == json.loads((compared / "baselines.json").read_text())["networks"][:4]
    assert content["answers"][-1]["percent"]["mean"] is None
    monkeypatch.setattr(TransformerXL, "score", original)
    assert run_command("baselines", searched.folder, "--random", 2, "--seeds", 2, "--run", tmp_path / "run") == 0
    assert (tmp_path / "run" / "baselines.json").read_text() == (compared / "baselines.json").read_text()
