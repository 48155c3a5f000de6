"""Networks of less and less attention, and the one that short trainings choose among them."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import small_config
from helpers.training_helpers import Notes
from typer.testing import CliRunner

import parnas
from parnas.architecture import Architecture
from parnas.cli.main import app
from parnas.cli.tables import show_finalists
from parnas.config.loader import Config, dump_config
from parnas.errors import ParnasError
from parnas.nas.derive import Constraints, derive
from parnas.runs.files import read_json
from parnas.runs.run import Run
from parnas.studies import finalists
from parnas.studies.finalists import Finalist, fewer_attention_variants, shorten, train_finalists

REACHED = {"sss": math.inf, "ssf": math.inf, "sfs": 7.0, "sff": 5.0, "fff": 6.0}


def as_derived(arch: str, constraints: Constraints = Constraints(cost_target=0.7)) -> Any:  # noqa: B008
    return SimpleNamespace(architecture=Architecture.parse(arch), constraints=constraints, costs=None)


def with_space(*space: str) -> Any:
    config = small_config(Path("corpus"), search__space=space)
    return SimpleNamespace(config=lambda: config)


@pytest.mark.parametrize(
    ("space", "strings", "limits"),
    [
        ("sfi", ["ssss", "sfsi", "ffis", "ffff"], [{"s": 3}, {"s": 1}, {"s": 0}]),
        ("fi", ["ffff"], []),
        ("scf", ["scss", "csff", "cfff", "ffff"], [{"s": 2, "c": 1}, {"s": 0, "c": 1}, {"s": 0, "c": 0}]),
        (["s:heads=2", "f"], ["s:heads=2 f", "ff"], [{"s": 0}]),
    ],
)
def test_each_variant_has_less_attention_than_the_one_before(
    space: Sequence[str], strings: list[str], limits: list[dict[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Constraints] = []

    def derive_within(run: Run, constraints: Constraints, reporter: object = None) -> Any:
        if reporter is None:
            assert constraints.rerank_top_k == 0, "whether there is one is asked without reading text"
            return as_derived("f")
        asked.append(constraints)
        return as_derived(strings[len(asked)], constraints)

    monkeypatch.setattr(finalists, "derive", derive_within)
    derivations = list(fewer_attention_variants(with_space(*space), as_derived(strings[0]), Notes()))
    assert [str(each.architecture) for each in derivations] == strings
    assert asked == [Constraints(cost_target=0.7, limits=most) for most in limits]


def test_variants_keep_the_least_attention_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(Path("corpus"), search__space=("s", "c", "f"), search__least_attention=1)
    derived = iter(["scff", "sfff"])
    monkeypatch.setattr(
        finalists, "derive", lambda run, limits, reporter=None: as_derived(next(derived) if reporter else "f", limits)
    )
    variants = fewer_attention_variants(SimpleNamespace(config=lambda: config), as_derived("sscf"), Notes())  # type: ignore[arg-type]
    assert [str(each.architecture) for each in variants] == ["sscf", "scff", "sfff"]


@pytest.mark.parametrize("fails_with_text", [False, True])
def test_a_note_if_no_network_has_less_attention_and_other_errors_are_raised(
    fails_with_text: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def derive_within(run: Run, constraints: Constraints, reporter: object = None) -> Any:
        if (reporter is not None) == fails_with_text:
            raise ParnasError("it cannot be")
        return as_derived("f")

    monkeypatch.setattr(finalists, "derive", derive_within)
    notes = Notes()
    proposed = fewer_attention_variants(with_space("s", "f", "i"), as_derived("sf"), notes)
    if fails_with_text:
        with pytest.raises(ParnasError, match="it cannot be"):
            list(proposed)
    else:
        assert len(list(proposed)) == 1
        (note,) = notes.notes
        assert note.endswith(": it cannot be")


@pytest.mark.parametrize(
    ("steps", "warmup", "expected"), [(16000, 500, (2000, 500)), (100, 50, (13, 3)), (1, 0, (1, 0))]
)
def test_the_recipe_is_shortened_to_an_eighth(corpus: Path, steps: int, warmup: int, expected: tuple[int, int]) -> None:
    short = shorten(small_config(corpus, train__steps=steps, train__warmup_steps=warmup)).train
    assert (short.steps, short.warmup_steps) == expected


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, int]]:
    """String, folder and steps of each training; REACHED has the perplexities."""
    done: list[tuple[str, str, int]] = []

    def train(phase: object, config: Config, folder: Path, reporter: object) -> str:
        done.append((str(config.model.arch), folder.name, config.train.steps))
        return str(config.model.arch)

    monkeypatch.setattr(finalists, "train_once", train)
    monkeypatch.setattr(finalists, "reached_perplexity", lambda training, reporter: REACHED[training()])
    return done


@pytest.fixture
def proposed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The strings that a search proposes, filled in by a test."""
    strings: list[str] = []
    monkeypatch.setattr(finalists, "fewer_attention_variants", lambda *_: (as_derived(arch) for arch in strings))
    return strings


def test_the_least_perplexity_wins_and_a_divergence_comes_last(
    trained: list[tuple[str, str, int]], proposed: list[str], search_run: Run, tmp_path: Path
) -> None:
    proposed += ["sss", "sfs", "sff", "fff"]
    config = search_run.config().replace(train__steps=80)
    finalists_by_ppl = train_finalists(search_run, as_derived("sss"), 3, config, tmp_path, Notes())
    assert trained == [("sss", "1", 10), ("sfs", "2", 10), ("sff", "3", 10)]
    assert [str(each.derivation.architecture) for each in finalists_by_ppl] == ["sff", "sfs", "sss"]
    rows = read_json(tmp_path / "finalists.json")
    assert [(row["arch"], row["ppl"], row["steps"]) for row in rows] == [
        ("sff", 5.0, 10),
        ("sfs", 7.0, 10),
        ("sss", None, 10),
    ]


def test_all_finalists_diverge(
    trained: list[tuple[str, str, int]], proposed: list[str], search_run: Run, tmp_path: Path
) -> None:
    proposed += ["sss", "ssf"]
    with pytest.raises(ParnasError, match=r"train\.lr"):
        train_finalists(search_run, as_derived("sss"), 2, search_run.config(), tmp_path, Notes())
    assert len(trained) == 2


def test_a_single_finalist_is_not_trained(
    trained: list[tuple[str, str, int]], proposed: list[str], search_run: Run, tmp_path: Path
) -> None:
    proposed.append("fff")
    notes = Notes()
    assert train_finalists(search_run, as_derived("fff"), 3, search_run.config(), tmp_path, notes) == []
    (note,) = notes.notes
    assert "1 finalist(s)" in note
    assert "3" in note
    assert not trained


def test_a_diverged_finalist_is_named_so_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    show_finalists([Finalist(as_derived("sf"), ppl, 10) for ppl in (5.25, math.inf)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[1:]] == [["1", "sf", "5.25"], ["2", "sf", "diverged"]]


@pytest.mark.slow
def test_a_pipeline_trains_the_best_finalist_and_is_resumed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = small_config(corpus, search__space=("s", "i"), search__steps=12, train__steps=8)
    Path("small.yaml").write_text(dump_config(config))
    command = ["pipeline", "small.yaml", "--run", "all", "--baselines", "", "--finalists"]
    first = CliRunner().invoke(app, [*command, "2"])
    assert first.exit_code == 0, first.output
    rows = read_json(Path("all/finalists/finalists.json"))
    assert [row["ppl"] for row in rows] == sorted(Run(f"all/finalists/{n}").summary().valid.ppl for n in (1, 2))
    derivation = Run("all/search").derivation()
    assert list(derivation.finalists) == [row["arch"] for row in rows]
    assert Run("all/derived").config().model.arch == derivation.arch == rows[0]["arch"]
    assert all(row["arch"] in first.output for row in rows)
    second = CliRunner().invoke(app, [*command, "2"])
    assert second.exit_code == 0, second.output
    assert second.output.count("is finished and kept") == 4
    other = derive(Run("all/search"), Constraints(limits=rows[1]["max"]))
    monkeypatch.setattr("parnas.studies.pipeline.derive", lambda run: other)
    with pytest.raises(ParnasError, match=f"{derivation.arch}.*{other.architecture}"):
        parnas.pipeline(config, run="all", baselines=[])
    assert Run("all/search").derivation() == derivation, "nothing was overwritten"
    with pytest.raises(ParnasError, match="--finalists"):
        parnas.pipeline(config, finalists=0, run="none")
