"""Trainings of the compared networks: intervals, answers, and going on after an interruption."""

import csv
import json
import math
import random
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from command_helpers import files_of, run_command
from conftest import small_config
from PIL import Image
from scipy.stats import ttest_1samp

from parnas.architecture import Architecture
from parnas.cli import main
from parnas.errors import ParnasError
from parnas.files import write_text
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.baselines import Baseline, Baselines, find_baselines
from parnas.nas.contest import Contest, Standing, compare_standings, hold_contest
from parnas.nas.intervals import paired_difference, spread
from parnas.nas.search import search
from parnas.run import Run
from parnas.training.checkpoint import list_checkpoints
from parnas.training.reporter import Silent
from parnas.training.trainer import Trainer

# Intervals and answers.


def test_paired_differences_are_those_of_a_t_test() -> None:
    draw = random.Random(0)
    for pairs in (2, 3, 5, 10):
        ours = {seed: draw.uniform(50, 70) for seed in range(pairs)}
        theirs = {seed: draw.uniform(50, 70) for seed in range(-1, pairs)}  # one seed more
        found = paired_difference(ours, theirs)
        sample = [100 * ours[seed] / theirs[seed] - 100 for seed in range(pairs)]
        interval = ttest_1samp(sample, 0).confidence_interval(0.95)
        assert found.mean == pytest.approx(sum(sample) / pairs)
        assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
        assert found.pairs == pairs


def test_a_difference_of_three_pairs_by_hand() -> None:
    """Differences of -1, -2 and -3 %: mean -2, standard deviation 1, t = 4.303."""
    found = paired_difference({1: 99.0, 2: 98.0, 3: 97.0}, dict.fromkeys((1, 2, 3), 100.0))
    assert found.mean == pytest.approx(-2)
    assert found.high == pytest.approx(-2 + 4.3027 / math.sqrt(3), abs=1e-4)


@pytest.mark.parametrize(
    ("ours", "verdict"),
    [
        ({1: 90.0, 2: 90.1}, "better"),
        ({1: 110.0, 2: 110.1}, "worse"),
        ({1: 90.0, 2: 99.0}, "no difference that the seeds can tell"),
        ({1: 90.0}, "one seed, so no interval"),
        ({1: 90.0, 2: math.inf}, "not every perplexity is finite, so no difference can be told"),
        ({1: math.inf}, "not every perplexity is finite, so no difference can be told"),
    ],
)
def test_verdicts(ours: Mapping[int, float], verdict: str) -> None:
    assert paired_difference(ours, {1: 100.0, 2: 100.0}).verdict == verdict


def test_an_infinite_perplexity_of_the_other_is_no_win_by_a_hundred_per_cent() -> None:
    assert math.isnan(paired_difference({1: 50.0, 2: 50.0}, {1: 60.0, 2: math.inf}).mean)


def test_spread_is_that_of_a_sample() -> None:
    assert spread([1.0, 2.0, 3.0]) == pytest.approx(1)
    assert spread([1.0]) is None
    assert spread([1.0, math.inf]) is None


def standing(name: str, *ppl: float) -> Standing:
    return Standing(name, "sf", 0.5, dict(enumerate(ppl)), name.startswith("random"))


def test_answers_to_every_guess_and_to_chance() -> None:
    named = [standing("derived", 58, 62), standing("interleaved", 61, 63), standing("sandwich-4-1", 50, 51)]
    chance = [standing(f"random-{number}", ppl) for number, ppl in enumerate([59.0, 64.0, 66.0], 1)]
    answers = compare_standings([*named, *chance])
    assert [each.against for each in answers] == ["interleaved", "sandwich-4-1", "random"]
    assert answers[0].difference == paired_difference({0: 58, 1: 62}, {0: 61, 1: 63})
    assert answers[2].difference.mean == pytest.approx(100 * (60 / 64 - 1))
    told = answers[2].text.partition("random networks of its cost: -6.25 % perplexity; ")[2]
    assert told == "better than 2 of 3 in the mean of its 2 seeds, than 3 by the seed that they have"
    assert [each.against for each in compare_standings(named)] == ["interleaved", "sandwich-4-1"]


def test_infinite_perplexities_are_shown_and_stored_as_what_they_are(tmp_path: Path, capsys) -> None:
    from parnas.display import show_contest

    standings = (standing("derived", 60, 61), standing("interleaved", 62, math.inf), standing("random-1", math.inf))
    contest = Contest(standings, (), "macs")
    contest.write(tmp_path)
    rows = {row["name"]: row for row in csv.DictReader((tmp_path / "baselines.csv").open())}
    assert (rows["interleaved"]["valid_ppl_mean"], rows["interleaved"]["valid_ppl_sd"]) == ("inf", "")
    content = json.loads((tmp_path / "baselines.json").read_text())
    assert content["networks"][1]["valid_ppl"] == {"0": 62, "1": None}
    assert content["answers"][0]["percent"] == {"mean": None, "low": None, "high": None, "pairs": 2}
    show_contest(contest)
    out = capsys.readouterr().out
    assert "inf" in out
    assert "nan" not in out
    assert "no difference can be told" in out
    assert "random networks of its cost: better than 1 of 1 in the mean of its 2 seeds" in out


# A whole contest.


@pytest.fixture(scope="module")
def searched(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A search of four blocks, whose arch.yaml says `sfif`."""
    config = small_config(corpus, search__blocks=4, train__steps=12, train__save_every=4, runtime__seed=5)
    run = search(config, tmp_path_factory.mktemp("baselines") / "search", Silent())
    write_text(run.folder / "arch.yaml", "arch: sfif\n")
    return run


@pytest.fixture(scope="module")
def held(searched: Run) -> Path:
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
    found = find_baselines(searched, 3, 5, Silent())
    assert [[each.name, str(each.architecture), f"{each.share:.3f}"] for each in found.networks] == rows[1:8]


def test_every_network_is_trained_from_each_seed_and_random_ones_from_the_first(held: Path, searched: Run) -> None:
    trained = {path.name: Run(path) for path in held.iterdir() if (path / "summary.json").is_file()}
    wanted = {f"{name}-seed-{seed}" for name in NAMED for seed in (5, 6)} | {"random-1-seed-5", "random-2-seed-5"}
    assert set(trained) == wanted
    found = {each.name: str(each.architecture) for each in find_baselines(searched, 2, 5, Silent()).networks}
    for folder, run in trained.items():
        name, _, seed = folder.rpartition("-seed-")
        config = run.config()
        assert run.kind() == "retrain"
        assert (config.model.arch, config.runtime.seed) == (found[name], int(seed))
        assert config.replace(model__arch=None, runtime__seed=5) == searched.config()


def test_files_and_picture_agree_with_the_trainings(held: Path) -> None:
    content = json.loads((held / "baselines.json").read_text())
    assert content["metric"] == "macs"
    assert [each["name"] for each in content["networks"]] == [*NAMED, "random-1", "random-2"]
    rows = {row["name"]: row for row in csv.DictReader((held / "baselines.csv").open())}
    for each in content["networks"]:
        assert list(each["valid_ppl"]) == (["5"] if each["random"] else ["5", "6"])
        reached = list(each["valid_ppl"].values())
        for seed, ppl in each["valid_ppl"].items():
            assert ppl == Run(held / f"{each['name']}-seed-{seed}").summary()["valid"]["ppl"]
        row = rows[each["name"]]
        assert float(row["valid_ppl_mean"]) == pytest.approx(sum(reached) / len(reached))
        assert row["valid_ppl_sd"] == ("" if each["random"] else str(spread(reached)))
        assert (row["arch"], int(row["n"])) == (each["arch"], len(reached))
    derived, interleaved = (each["valid_ppl"] for each in content["networks"][:2])
    assert content["answers"][0]["percent"] == pytest.approx(paired_difference(derived, interleaved)._asdict())
    with Image.open(held / "figures" / "pareto.png") as picture:
        picture.verify()


def test_a_second_call_trains_nothing_and_finds_the_same(
    held: Path, searched: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    shutil.copytree(held, tmp_path / "run")
    before = files_of(tmp_path / "run")
    kept = {path: values for path, values in before.items() if "-seed-" in path}
    monkeypatch.setattr(Trainer, "train_step", None)
    assert run_command("baselines", searched.folder, "--random", 2, "--seeds", 2, "--run", tmp_path / "run") == 0
    after = files_of(tmp_path / "run")
    assert after.keys() == before.keys()
    assert kept == {path: values for path, values in after.items() if "-seed-" in path}
    for name in ("baselines.json", "baselines.csv"):
        assert (tmp_path / "run" / name).read_text() == (held / name).read_text()
    out = capsys.readouterr().out
    for answer in json.loads((held / "baselines.json").read_text())["answers"]:
        assert answer["text"] in out
    assert run_command("baselines", searched.folder, "--random", 1, "--seeds", 1, "--run", tmp_path / "run") == 0
    assert "one seed, so no interval" in capsys.readouterr().out


def test_an_interrupted_contest_goes_on(
    held: Path, searched: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    """It stops in the third training, between two checkpoints, and ends as without interruption."""
    folder, steps = tmp_path / "run", []
    shutil.copytree(held, folder)
    for name in ("interleaved-seed-6", "random-2-seed-5"):
        shutil.rmtree(folder / name)
    original = Trainer.train_step

    def step_or_stop(self: Trainer) -> None:
        steps.append(self.step)
        if len(steps) == 12 + 7:
            raise KeyboardInterrupt
        original(self)

    monkeypatch.setattr(Trainer, "train_step", step_or_stop)
    command = ("baselines", searched.folder, "--random", 2, "--seeds", 2, "--run", folder)
    with pytest.raises(SystemExit) as leaving:
        main([str(argument) for argument in command])
    assert leaving.value.code == 130
    assert "the same command again" in capsys.readouterr().err
    begun = folder / "interleaved-seed-6"  # the second: all are trained from the first seed before
    assert [path.name for path in list_checkpoints(begun / "checkpoints")] == ["step-00000004"]
    steps[:] = [0] * 100
    assert run_command(*command) == 0
    assert steps[100:] == list(range(4, 12))
    assert (folder / "baselines.json").read_text() == (held / "baselines.json").read_text()


def test_other_settings_other_networks_and_other_folders_are_refused(held: Path, searched: Run, tmp_path: Path) -> None:
    found, config = find_baselines(searched, 0, 5, Silent()), searched.config()
    with pytest.raises(ParnasError, match=r"train\.lr: .* before, 0\.0001 now"):
        hold_contest(found, config.replace(train__lr=1e-4), held, [5], Silent())
    shutil.copytree(held, tmp_path / "run")
    derived = Baseline("derived", Architecture.parse("ff"), 0.5)
    with pytest.raises(
        ParnasError, match=r"derived-seed-5 was begun with another(.|\n)*model\.arch: sff before, ff now"
    ):
        hold_contest(Baselines((derived, *found.networks[1:]), (), "macs"), config, tmp_path / "run", [5], Silent())
    write_text(tmp_path / "mine" / "notes.txt", "mine")
    with pytest.raises(ParnasError, match="already holds files"):
        hold_contest(found, config, tmp_path / "mine", [5], Silent())
    assert (tmp_path / "mine" / "notes.txt").read_text() == "mine"


def test_names_of_one_network_share_its_training(held: Path, searched: Run, tmp_path: Path) -> None:
    shutil.copytree(held, tmp_path / "run")
    network = Architecture.parse("sff")
    twice = Baselines((Baseline("derived", network, 0.7), Baseline("interleaved", network, 0.7)), ("a note",), "macs")
    before = files_of(tmp_path / "run")
    contest = hold_contest(twice, searched.config(), tmp_path / "run", [5, 6], Silent())
    assert files_of(tmp_path / "run") == before
    assert contest.standings[0].ppl == contest.standings[1].ppl
    assert contest.notes == ("a note", "interleaved is the same network as derived")
    assert contest.answers()[0].difference.mean == 0


def test_a_network_that_diverges_counts_as_infinite_and_the_rest_goes_on(
    held: Path, searched: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(held, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "random-1-seed-5")
    original = TransformerXL.score

    def poisoned(self: TransformerXL, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        nll = original(self, hidden, targets)
        return nll * torch.nan if self.training else nll

    monkeypatch.setattr(TransformerXL, "score", poisoned)
    assert run_command("baselines", searched.folder, "--random", 2, "--seeds", 2, "--run", tmp_path / "run") == 0
    content = json.loads((tmp_path / "run" / "baselines.json").read_text())
    assert "random-1 from seed 5 diverged, and counts as infinite" in content["notes"]
    assert content["networks"][4]["valid_ppl"] == {"5": None}
    assert content["networks"][:4] == json.loads((held / "baselines.json").read_text())["networks"][:4]
    assert content["answers"][-1]["percent"]["mean"] is None
    monkeypatch.setattr(TransformerXL, "score", original)
    assert run_command("baselines", searched.folder, "--random", 2, "--seeds", 2, "--run", tmp_path / "run") == 0
    assert (tmp_path / "run" / "baselines.json").read_text() == (held / "baselines.json").read_text()
