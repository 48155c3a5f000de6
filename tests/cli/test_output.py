"""How much commands say, and in which form."""

import json
from pathlib import Path

import pytest
import typer
from conftest import small_config
from helpers.command_helpers import refusal, result_of, run_command

from parnas.cli.common import Output
from parnas.cli.main import app
from parnas.config.loader import dump_config
from parnas.runs.run import Run, package_version

COMMANDS = typer.main.get_command(app).commands  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_can_be_quiet_verbose_and_write_json(name: str) -> None:
    options = {option for parameter in COMMANDS[name].params for option in parameter.opts}
    assert {"--quiet", "-q", "--verbose", "-v", "--json"} <= options
    assert not any(parameter.name == "output" for parameter in COMMANDS[name].params)


def test_both_phases_give_their_summary_as_json(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "small.yaml"
    path.write_text(dump_config(small_config(corpus)), encoding="utf-8")
    found = result_of(capsys, "search", path, "--run", tmp_path / "search")
    assert found["run"] == str(tmp_path / "search")
    assert found["arch"] == Run(tmp_path / "search").summary().arch
    assert found["valid"]["ppl"] > 1
    assert any(path.endswith("pi.gif") for path in found["written"])
    found = result_of(capsys, "retrain", path, "--arch", "sf", "--run", tmp_path / "retrain", "train.steps=4")
    assert (found["arch"], found["steps"], found["kind"]) == ("sf", 4, "retrain")


def test_other_commands_give_what_they_found_as_json(
    searched: Run, trained: Run, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    derived = result_of(capsys, "derive", searched.folder)
    assert derived["arch"] == searched.derivation().arch
    assert derived["written"] == [str(searched.folder / name) for name in ("arch.yaml", "figures/network.png")]
    out = tmp_path / "comparison"
    compared = result_of(capsys, "evaluate", searched.folder, trained.folder, "--analyse", "frequency", "--out", out)
    assert [row["run"] for row in compared["rows"]] == ["searched", "trained"]
    assert compared["frequency"]["rows"]
    assert result_of(capsys, "plot", trained.folder)["written"] == [str(trained.folder / "figures" / "curves.png")]
    assert result_of(capsys, "cutoffs", trained.folder)["cutoffs"]
    assert result_of(capsys, "data", corpus, "data.tokenizer.kind=word")["splits"]["train"]["lines"] == 1200
    assert result_of(capsys, "baselines", searched.folder, "--random", "2", "--list")["networks"]
    small = ["data.tokenizer={kind: word}", "model.cutoffs=[]", "model.proj_factor=null", "search.blocks=2"]
    planned = result_of(capsys, "plan", f"data.corpus={corpus}", *small, "--gpus", "2", "--arch", "sf")
    assert planned["machine"]["gpus"] == 2


def test_quiet_shows_the_result_alone_and_nobody_writes_progress_to_standard_output(
    searched: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    run_command("derive", searched.folder)
    usual = capsys.readouterr().out
    run_command("derive", searched.folder, "--quiet")
    quiet = capsys.readouterr()
    assert usual.startswith(quiet.out)
    assert [line.partition(":")[0] for line in usual[len(quiet.out) :].splitlines()] == ["written", "written", "next"]
    assert "Traceback" not in quiet.err


def test_verbose_shows_where_a_mistake_came_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("derive", tmp_path / "none", "--verbose") == 2
    error = capsys.readouterr().err
    assert error.startswith("Traceback")
    assert error.splitlines()[-1].startswith("error: There is no run folder")
    assert run_command("derive", tmp_path, "-q", "-v") == 2
    assert "exclude each other" in capsys.readouterr().err.splitlines()[-1]


def test_verbose_shows_where_the_system_refused(
    retrain_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    assert run_command("evaluate", retrain_run.folder, "--out", tmp_path / "file" / "folder", "--verbose") == 2
    assert "Traceback" in capsys.readouterr().err


def test_a_mistake_writes_no_result(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    refusal(capsys, "derive", tmp_path / "none", "--json")
    assert not capsys.readouterr().out


def test_numbers_that_are_not_finite_are_null(capsys: pytest.CaptureFixture[str]) -> None:
    Output(as_json=True).end({"ppl": float("inf")}, [Path("a")])
    assert json.loads(capsys.readouterr().out) == {"ppl": None, "written": ["a"]}


def test_the_version_is_that_of_the_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("--version") == 0
    assert capsys.readouterr().out == f"parnas {package_version('parnas')}\n"
