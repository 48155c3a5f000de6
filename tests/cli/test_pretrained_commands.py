"""Commands that start from a trained network: probe, search --from, retrain --from and --teacher, compress."""

import json
import shutil
from pathlib import Path

import pytest
from conftest import small_config
from helpers.command_helpers import refusal

from parnas.cli.main import main
from parnas.figures import pareto
from parnas.figures.report.page import write_report
from parnas.pretrained.settings import search_settings
from parnas.runs.files import read_json
from parnas.runs.run import Run
from parnas.training.progress import Silent
from parnas.training.retrain import retrain


def call(*arguments: object) -> int:
    with pytest.raises(SystemExit) as leaving:
        main([*map(str, arguments)])
    return int(leaving.value.code or 0)


SHORT = ("search.steps=8", "search.evolution_steps=2", "search.rerank_top_k=2")


@pytest.fixture(scope="module")
def searched(retrain_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("searched") / "run"
    assert call("search", "--from", retrain_run.folder, "--run", folder, "-q", *SHORT) == 0
    return Run(folder)


def test_probe_prints_the_answer_and_writes_numbers_and_pictures(
    retrain_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (
        "probe",
        retrain_run.folder,
        "--tokens",
        200,
        "--pairs",
        1,
        "--out",
        tmp_path / "out",
        "runtime.threads=1",
    )
    assert call(*common) == 0
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "out" / "probe.json").read_text())
    assert content["answer"] in " ".join(printed.split())
    names = {"probe.json", "probe.png", "attention.png", "report.html"}
    assert {path.name for path in (tmp_path / "out").iterdir()} == names
    assert content["answer"] in (tmp_path / "out" / "report.html").read_text()
    assert "report.html in a browser" in " ".join(printed.split())
    assert call(*common, "--json") == 0
    assert json.loads(capsys.readouterr().out)["layers"] == ["s", "f", "s"]


def test_probe_reads_a_text_file(retrain_run: Run, corpus: Path, tmp_path: Path) -> None:
    text = corpus / "test.txt"
    assert call("probe", retrain_run.folder, "--text", text, "--tokens", 200, "--out", tmp_path / "out", "-q") == 0
    (tmp_path / "short.txt").write_text("a b")
    assert call("probe", retrain_run.folder, "--text", tmp_path / "short.txt", "--out", tmp_path / "out", "-q") == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no corpus"),
        ("", "name of the text (--text) is empty"),
        (b"", "has 0 tokens"),
        (b"a b", "of more than 64"),
        (b"\xff\xfe\x00" * 99, "cannot be read as text in UTF-8"),
    ],
)
def test_a_text_that_cannot_be_read_is_one_message_and_writes_nothing(
    retrain_run: Run, tmp_path: Path, text: bytes | str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "text.txt"
    if isinstance(text, bytes):
        path.write_bytes(text)
    given = text if isinstance(text, str) else path
    assert message in refusal(capsys, "probe", retrain_run.folder, "--text", given, "--out", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("setting", "message"),
    [("model.d_model=8", "section runtime only, not model.d_model"), ("demo", "no configuration")],
)
def test_probe_takes_settings_of_the_runtime_only(
    retrain_run: Run, setting: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("probe", retrain_run.folder, setting) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("place", ["nothing", "empty"])
def test_probe_of_a_folder_without_a_model_is_one_message(
    tmp_path: Path, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    assert call("probe", tmp_path / place) == 2
    assert "neither a parnas run nor the folder of a language model" in capsys.readouterr().err
    assert not list((tmp_path / "empty").iterdir())


def test_a_search_from_a_run_has_its_settings_and_a_space_around_its_layers(retrain_run: Run, searched: Run) -> None:
    own, config = retrain_run.config(), searched.config()
    assert (config.data, config.train) == (own.data, own.train)
    assert config.model == own.model.model_copy(update={"arch": None})
    assert config.search.parent == str(retrain_run.folder.resolve())
    search = search_settings(retrain_run).search
    assert (search.rerank_count, search.evolution_count, search.rerank_token_count) == (6, 3, 8192)
    assert config.search.block_spaces == (
        ("s", "s:heads=1", "s:window=4", "k", "r", "i"),
        ("f", "f:d_inner=16", "f:d_inner=8", "i"),
        ("s", "s:heads=1", "s:window=4", "k", "r", "i"),
    )


def test_derive_lists_the_most_probable_of_many_layers_and_names_the_healing(
    searched: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = shutil.copytree(searched.folder, tmp_path / "search")
    assert call("derive", folder, "--rerank-top-k", "0") == 0
    output = "".join(capsys.readouterr())
    assert "highest pi" in output
    assert "pi(s)" not in output
    assert f"parnas retrain --from {folder}" in output.replace("\n", " ")


def test_a_retraining_from_this_search_heals_with_the_parent_as_teacher(
    retrain_run: Run, searched: Run, tmp_path: Path
) -> None:
    assert call("retrain", "--from", searched.folder, "--run", tmp_path / "child", "-q") == 0
    config = Run(tmp_path / "child").config()
    assert config.train.teachers == (str(retrain_run.folder.resolve()),)
    assert config.train.inherit == str(searched.folder.resolve())
    assert config.train.steps < retrain_run.config().train.steps
    assert config.model.arch == searched.summary().arch


def test_a_front_is_relative_to_the_parent(searched: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = list[str]()
    draw = pareto.draw_pareto
    monkeypatch.setattr(pareto, "draw_pareto", lambda *given: labels.append(given[2]) or draw(*given))
    run = shutil.copytree(searched.folder, tmp_path / "run")
    assert call("derive", run, "--front", "0.7,1", "-q") == 0
    assert labels == ["cost of the blocks, parent = 1"]
    assert read_json(run / "front" / "front.json")["reference"] == "parent"
    assert "of the blocks, parent = 1" in write_report([run], tmp_path / "page").read_text(encoding="utf-8")


def test_teachers_are_options_of_retrain(retrain_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = retrain_run.folder / "config.yaml"
    monkeypatch.chdir(retrain_run.folder.parent)
    teachers = ("--teacher", retrain_run.folder, "--teacher", retrain_run.folder.name)
    assert call("retrain", settings, "--arch", "ff", *teachers, "--run", tmp_path / "run", "-q") == 0
    teacher = str(retrain_run.folder.resolve())
    assert Run(tmp_path / "run").config().train.teachers == (teacher, teacher), "from any working directory"


def test_compress_does_all_and_resumes(retrain_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ("compress", retrain_run.folder, "--within", "macs=0.8", "--run", tmp_path / "all", "-q", *SHORT)
    assert call(*command) == 0
    printed = capsys.readouterr().out
    for name in ("child", "scratch", "shallower"):
        assert name in printed
        assert Run(tmp_path / "all" / name).finished()
    assert (tmp_path / "all" / "report.html").is_file()
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "all").glob("*/summary.json")}
    assert call(*command) == 0
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_finished_compression_evaluates_no_network_again(
    retrain_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("compress", retrain_run.folder, "--within", "macs=0.8", "--run", tmp_path / "all", "-q", *SHORT)
    assert call(*command, "--no-baselines") == 0

    def never(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr("parnas.nas.derive.rank", never)
    assert call(*command, "--no-baselines") == 0


def test_overrides_reach_the_trainings_from_scratch(retrain_run: Run, tmp_path: Path) -> None:
    changes = ("data.batch_size=3", "train.steps=5")
    command = ("compress", retrain_run.folder, "--within", "macs=0.8", "--run", tmp_path / "all", "-q", *SHORT)
    assert call(*command, *changes) == 0
    for name in ("child", "scratch", "shallower"):
        assert Run(tmp_path / "all" / name).config().data.batch_size == 3
    assert Run(tmp_path / "all" / "scratch").summary().steps == 5
    again = ("compress", tmp_path / "all" / "child", "--within", "macs=0.9", "--run", tmp_path / "again", "-q", *SHORT)
    assert call(*again) == 0
    child = Run(tmp_path / "all" / "child").summary()
    assert child.inherited is not None
    assert Run(tmp_path / "again" / "scratch").summary().steps == child.steps + child.inherited.steps


@pytest.mark.usefixtures("elsewhere")
def test_what_does_not_fit_the_parent_or_the_teacher_leaves_no_run_behind(
    retrain_run: Run, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = small_config(corpus, model__arch="sf", train__steps=2)
    teachers = {
        "bytes": other.replace(data__tokenizer__kind="byte"),
        "clusters": other.replace(model__cutoffs=(5, 12)),
    }
    for name, config in teachers.items():
        retrain(config, tmp_path / name, Silent())
    shutil.copytree(retrain_run.folder, tmp_path / "unfinished")
    (tmp_path / "unfinished" / "summary.json").unlink()
    own, settings = retrain_run.folder, retrain_run.folder / "config.yaml"
    for message, *arguments in (
        ("not a finished retraining", "search", "--from", tmp_path / "unfinished"),
        ("text or the tokenizer", "search", "--from", own, "data.tokenizer.kind=byte"),
        ("section model differs", "search", "--from", own, "model.d_inner=48"),
        ("No network costs at most", "search", "--from", own, "search.cost.target=0.0001"),
        ("text or the tokenizer", "retrain", "--from", own, "data.tokenizer.kind=byte"),
        ("text or the tokenizer", "retrain", settings, "--teacher", tmp_path / "bytes"),
        ("cutoffs", "retrain", settings, "--teacher", tmp_path / "clusters"),
        ("not a finished", "compress", tmp_path / "unfinished", "--within", "macs=0.8"),
        ("text or the tokenizer", "compress", own, "--within", "macs=0.8", "data.tokenizer.kind=byte"),
        ("No network costs at most", "compress", own, "--within", "macs=0.0001"),
        ("network itself is within", "compress", own, "--within", "macs=1,parameters=1.5"),
        ("give a finite number above 0", "compress", own, "--within", "macs=-1"),
        ("give a finite number above 0", "compress", own, "--within", "macs=inf"),
        ("is not a folder", "probe", own, "--out", settings),
        ("give a metric and a share", "compress", own, "--within", "macs"),
        ("give a metric and a share", "compress", own, "--within", ""),
    ):
        assert message in refusal(capsys, *arguments), arguments
        assert not [path for path in Path("runs").rglob("*") if path.is_file()], arguments


def test_mistakes_are_one_message(
    retrain_run: Run, search_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for message, *arguments in (
        ("not a finished retraining", "search", "--from", search_run.folder),
        ("exclude each other", "search", "--from", retrain_run.folder, "--one-run"),
        ("not a finished retraining", "compress", search_run.folder, "--within", "macs=0.5"),
        ("is 'size'", "compress", retrain_run.folder, "--within", "size=0.5"),
        ("No network", "compress", retrain_run.folder, "--within", "macs=0.0001", *SHORT),
        ("search.parent is set", "pipeline", retrain_run.folder / "config.yaml", f"search.parent={retrain_run.folder}",
         "model.arch=null"),
    ):  # fmt: skip
        assert call(*arguments, "--run", tmp_path / "run", "-q") == 2
        assert message in capsys.readouterr().err
