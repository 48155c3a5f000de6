"""What is asked of `parnas tune`, and what it writes and shows."""

import csv
import json
import re
from pathlib import Path

import optuna
import pytest
from conftest import small_config
from helpers.command_helpers import refusal, result_of, run_command
from helpers.page_helpers import ROOT, blocks
from helpers.tuning_helpers import FakeTraining, fake_training
from optuna.samplers import RandomSampler
from PIL import Image

from parnas.config.loader import Config, dump_config, load_config
from parnas.errors import ParnasError
from parnas.figures.tuning import draw_history, draw_importance, draw_tuning
from parnas.runs.records import Kind
from parnas.runs.run import TUNING, Run
from parnas.studies.tuning_space import (
    NumberRange,
    ValueList,
    default_space,
    describe_space,
    dump_space,
    read_file,
    read_space,
)

__all__ = ["fake_training"]


@pytest.fixture
def small(corpus: Path, tmp_path: Path) -> Path:
    path = tmp_path / "small.yaml"
    path.write_text(dump_config(small_config(corpus)), encoding="utf-8")
    return path


# What is to be tuned.


def test_forms_of_ranges_and_choices() -> None:
    wanted = {
        "train.lr": "log:1e-4..1e-2",
        "model.dropout": "0..0.5",
        "model.mem_len": "0..64",
        "model.d_inner": "log:16..256",
        "model.norm": "pre,post",
        "model.tie_weights": "true,false",
        "model.clamp_len": "null,8",
        "model.arch": ["sfs", "(sf)*2"],
        "train.clip": "0.5 .. 2",
    }
    space = read_space(wanted, Config(), "retrain")
    assert space["train.lr"] == NumberRange(1e-4, 1e-2, log=True)
    assert space["model.dropout"] == NumberRange(0.0, 0.5)
    assert space["model.mem_len"] == NumberRange(0, 64, whole=True)
    assert space["model.d_inner"] == NumberRange(16, 256, log=True, whole=True)
    assert space["train.clip"] == NumberRange(0.5, 2.0)
    assert space["model.tie_weights"] == ValueList((True, False))
    assert space["model.clamp_len"] == ValueList((None, 8))
    assert space["model.arch"] == ValueList(("sfs", "sfsf")), "as the configuration has it"


def test_a_space_is_written_as_it_is_read(tmp_path: Path) -> None:
    for phase in ("retrain", "search"):
        space = read_space({**default_space(Config(), phase), "model.cutoffs": "[],[2,5]"}, Config(), phase)
        (tmp_path / "space.yaml").write_text(dump_space(space))
        assert read_space(read_file(tmp_path / "space.yaml"), Config(), phase) == space
        assert json.dumps(describe_space(space))
    (tmp_path / "space.yaml").write_text("train: {lr: log:1e-4..1e-2}\nmodel.norm: [pre, post]\n")
    assert set(read_file(tmp_path / "space.yaml")) == {"train.lr", "model.norm"}


def test_the_file_that_the_page_shows_is_read(tmp_path: Path) -> None:
    (shown,) = [block.text for block in blocks(ROOT / "docs" / "tuning.md") if block.kind == "yaml"]
    (tmp_path / "space.yaml").write_text(shown)
    space = read_space(read_file(tmp_path / "space.yaml"), Config(), "retrain")
    assert space["model.arch"] == ValueList(("sfsfff", "sfsfsf"))


@pytest.mark.parametrize("estimator", ["uniform", "soft"])
def test_all_that_the_usual_spaces_hold_is_allowed(estimator: str) -> None:
    config, study = Config().replace(search__estimator=estimator), optuna.create_study(sampler=RandomSampler(1))
    for phase in ("retrain", "search"):
        space = read_space(default_space(config, phase), config, phase)
        for _ in range(20):
            trial = study.ask()
            config.replace(**{key.replace(".", "__"): each.draw(trial, key) for key, each in space.items()})
    assert ("search.cost.weight" in space) == (estimator == "soft")


def test_mistakes_are_told_all_at_once(small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Before anything is trained or written; unknown keys with the nearest known one."""
    wanted = {
        "train.lrr": "0..1",
        "model.dropout": "0..1.5",
        "model.norm": "pre,past",
        "train.clip": "3..1",
        "train.weight_decay": "log:0..1",
        "search.lr": "0..1",
        "data.tokenizer.kind": "word,byte",
        "runtime.seed": "1,2",
        "model.d_inner": "32",
        "train.accumulate": "log:few..many",
    }
    options = [part for key, values in wanted.items() for part in ("--set", f"{key}={values}")]
    error = refusal(capsys, "tune", small, "--arch", "sf", "--run", tmp_path / "s", *options)
    for told in (
        "10 error(s)",
        "train.lrr is no known key; did you mean train.lr?",
        "model.dropout is 1.5; it should be less than 1",
        "model.norm is 'past'; it should be 'post' or 'pre'",
        "train.clip is '3..1'; the first number must be less",
        "train.weight_decay is 'log:0..1'; a logarithmic range needs numbers above 0",
        "search.lr has no effect on retrain",
        "data.tokenizer.kind changes the tokens",
        "runtime.seed does not change the trained weights",
        "model.d_inner has one value",
        "train.accumulate is 'log:few..many'; give log:LOW..HIGH",
    ):
        assert told in error
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("key", "phase"),
    [
        *(("search.cost.target", "search"), ("search.cost.spend", "search")),
        *(("search.steps", "search"), ("train.steps", "retrain")),
    ],
)
def test_what_the_largest_would_win_cannot_be_tuned(key: str, phase: Kind) -> None:
    with pytest.raises(ParnasError, match=re.escape(key)):
        read_space({key: "0.3..0.9"}, Config(), phase)


def test_values_that_go_together_with_others_alone_are_allowed() -> None:
    config = Config().replace(model__d_model=128, model__n_heads=4)
    space = {"model.d_model": "96,128", "model.n_heads": "4,12"}
    assert read_space(space, config, "retrain")
    with pytest.raises(ParnasError, match="n_heads is 7"):
        read_space({**space, "model.n_heads": "4,7"}, config, "retrain")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sf", "--set", "train.lr"], "give KEY=LOW..HIGH"),
        (["--arch", "sf", "--phase", "derive"], "give retrain or search"),
        (["--arch", "sf", "--phase", "search"], "phase (--phase) is search"),
        (["--arch", "sf", "--storage", "sqlite:///s.db"], "go together"),
        (["--arch", "sf", "--space", "none.yaml"], "There is no file none.yaml"),
        ([], "No architecture was given"),
    ],
)
def test_mistakes_of_the_command_leave_nothing(
    arguments: list[str], message: str, small: Path, elsewhere: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refusal(capsys, "tune", small, *arguments)
    assert list(Path("runs").glob("*")) == []


# What is written.


def test_the_command_writes_and_shows_what_it_found(
    small: Path, elsewhere: None, fake_training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_training.too_fast = 0.05
    setting = ("--set", "train.lr=log:1e-4..1e-1", "--set", "model.dropout=0..0.5")
    result = result_of(capsys, "tune", small, "--arch", "sfs", "--trials", "22", "--run", "runs/t", *setting)
    folder = Path("runs/t")
    assert result == {**json.loads((folder / TUNING).read_text()), "written": result["written"]}
    assert not Run(folder).finished(), "a study is no run"
    rows = list(csv.DictReader((folder / "trials.csv").open()))
    assert [int(row["trial"]) for row in rows] == list(range(22))
    assert sum(result["counts"].values()) == 22
    assert result["importance"].keys() == {"train.lr", "model.dropout"}
    best = load_config(folder / "best.yaml")
    assert best.train.lr == result["best"]["settings"]["train.lr"]
    assert best.model.arch == "sfs"
    for name in ("history", "importance"):
        assert Image.open(folder / "figures" / f"{name}.png").width > 600
    assert run_command("tune", "--run", "runs/t", "--trials", "22") == 0  # by the folder's own files
    told = capsys.readouterr().out
    assert f"best: trial {result['best']['number']}, validation loss {result['best']['loss']:.4f}" in told
    assert told.endswith("next: parnas retrain runs/t/best.yaml\n")
    assert len(fake_training.asked) == 22


def test_where_nothing_came_to_its_end_the_command_says_so(
    small: Path, elsewhere: None, fake_training: FakeTraining, capsys: pytest.CaptureFixture[str]
) -> None:
    fake_training.too_fast = 0.0
    assert "No trial finished" in refusal(capsys, "tune", small, "--arch", "sf", "--trials", "2", "--run", "t")
    assert not Path("t/best.yaml").exists()
    assert Path("t/figures/history.png").is_file()


def test_the_command_trains_by_files_of_its_own(small: Path, elsewhere: None) -> None:
    """Without a stand-in: a space in a file, with an option besides, and a storage that is named."""
    Path("space.yaml").write_text("train.lr: log:1e-3..1e-2\n")
    shared = ("--storage", "sqlite:///s.db", "--study", "my study")
    fixed = ("--trials", "2", "--space", "space.yaml", "--set", "model.arch=s,f", "-q")
    assert run_command("tune", small, "train.steps=4", *fixed, *shared) == 0
    folder = Path("runs/tune-my-study")
    assert {Run(place).summary().arch for place in folder.glob("trial-*")} <= {"s", "f"}
    assert run_command("retrain", folder / "best.yaml", "--run", "again", "-q") == 0


# Pictures.


def row(number: int, state: str, loss: float | None) -> dict[str, object]:
    return {"number": number, "state": state, "loss": loss}


@pytest.mark.parametrize(
    "rows",
    [
        [row(0, "diverged", None)],
        [row(0, "complete", 4.0)],
        [row(0, "complete", 4.0), row(1, "complete", 900.0), row(2, "pruned", 5.0), row(3, "skipped", None)],
    ],
)
def test_histories_of_all_kinds_are_drawn(rows: list[dict[str, object]], tmp_path: Path) -> None:
    picture = Image.open(draw_history(rows, None, tmp_path / "history.png")).convert("L")
    assert len(picture.getcolors()) > 20


def test_few_trials_get_a_picture_that_says_so(tmp_path: Path) -> None:
    few = Image.open(draw_importance(None, (25, 4), tmp_path / "few.png"))
    many = Image.open(draw_importance({"train.lr": 0.7, "$x$": 0.3}, (30, 30), tmp_path / "many.png"))
    assert few.width == many.width
    draw_importance({"train.lr": 0.0}, (30, 30), tmp_path / "none.png")


def test_another_summary_is_refused(tmp_path: Path) -> None:
    (tmp_path / TUNING).write_text('{"arch": "sfs"}')
    with pytest.raises(ParnasError, match=TUNING):
        draw_tuning(tmp_path)
