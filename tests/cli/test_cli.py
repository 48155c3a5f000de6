"""The commands as a user runs them: output, error messages and exit codes."""

import errno
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import make_text, small_config
from helpers.command_helpers import refusal, run_command
from safetensors.torch import load_file

from parnas.cli.common import split_configuration
from parnas.config.loader import dump_config
from parnas.errors import ParnasError
from parnas.runs.resolve import remove_if_empty
from parnas.runs.run import Run
from parnas.training.checkpoints import list_checkpoints

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def config_file(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("config") / "small.yaml"
    path.write_text(dump_config(small_config(corpus)))
    return path


def test_a_file_whose_path_has_an_equals_sign_is_a_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lr=0.1").mkdir()
    Path("lr=0.1/best.yaml").touch()
    assert split_configuration(["lr=0.1/best.yaml", "train.lr=0.2"]) == ("lr=0.1/best.yaml", ["train.lr=0.2"])


def test_search_derive_retrain_evaluate_and_plot(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searched, derived, plain = tmp_path / "search", tmp_path / "derived", tmp_path / "interleaved"
    assert run_command("search", config_file, "--run", searched) == 0
    assert run_command("derive", searched) == 0
    arch = Run(searched).derivation().arch
    assert f"architecture: {arch}" in capsys.readouterr().out
    assert run_command("retrain", config_file, "--arch", searched / "arch.yaml", "--run", derived) == 0
    assert Run(derived).config().model.arch == arch
    assert run_command("retrain", config_file, "--arch", "interleaved-3", "--run", plain) == 0
    assert Run(plain).summary().arch == "sfs"
    out = tmp_path / "comparison"
    assert run_command("evaluate", searched, derived, plain, "--out", out, "--split", "test") == 0
    rows = json.loads((out / "comparison.json").read_text())
    assert [row["run"] for row in rows] == ["search", "derived", "interleaved"]
    assert (out / "curves.png").stat().st_size > 1000
    for name in ("pi.gif", "pi-first.png", "pi-middle.png", "pi-last.png", "pi-lines.png", "network.png", "curves.png"):
        assert (searched / "figures" / name).stat().st_size > 1000
    shutil.rmtree(searched / "figures")
    assert run_command("plot", searched) == 0
    assert (searched / "figures" / "pi.gif").is_file()
    assert (searched / "figures" / "network.png").is_file()


@pytest.mark.parametrize("script", ["search", "derive", "retrain", "evaluate"])
def test_scripts_run_the_commands_of_the_same_name(script: str) -> None:
    answer = subprocess.run(
        [sys.executable, ROOT / f"{script}.py", "--help"], capture_output=True, text=True, check=True, timeout=60
    )
    assert f"parnas {script}" in answer.stdout


def test_help_needs_no_torch() -> None:
    code = "import sys, parnas.cli.main; sys.exit('torch' in sys.modules or 'matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_search_killed_and_resumed_by_the_command(config_file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    arguments = [config_file, "search.steps=200", "train.save_every=20", "train.eval_every=200", "--run", folder]
    process = subprocess.Popen(
        [sys.executable, ROOT / "search.py", *map(str, arguments)], stderr=subprocess.PIPE, stdout=subprocess.PIPE
    )
    while not list_checkpoints(folder / "checkpoints") and process.poll() is None:
        time.sleep(0.02)
    process.kill()
    process.communicate()
    assert run_command("search", *arguments, "--resume") == 0
    steps = [line.step for line in Run(folder).metrics() if line.split == "train"]
    assert steps == list(range(4, 201, 4))


def test_resume_takes_the_configuration_of_the_run(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("retrain", config_file, "--arch", "sf", "--run", tmp_path / "run") == 0
    (tmp_path / "run" / "summary.json").unlink()
    assert run_command("retrain", "--resume", "--run", tmp_path / "run") == 0
    assert Run(tmp_path / "run").finished()
    assert "is finished" in refusal(capsys, "retrain", "--resume", "--run", tmp_path / "run")
    assert "resume (--resume) needs run (--run FOLDER)" in refusal(capsys, "retrain", config_file, "--resume")


@pytest.mark.parametrize("command", ["search", "retrain", "stability", "profile"])
def test_a_failed_start_leaves_no_folder_that_it_made(
    command: str, config_file: Path, elsewhere: None, capsys: pytest.CaptureFixture[str]
) -> None:
    arch = ["--arch", "sf"] if command == "retrain" else []
    wrong = (command, config_file, "data.corpus=nowhere.txt", *arch)
    assert "nowhere.txt" in refusal(capsys, *wrong)
    assert list(Path("runs").iterdir()) == []
    Path("own").mkdir()
    refusal(capsys, *wrong, "--out" if command == "profile" else "--run", "own")
    assert Path("own").is_dir()  # which the user made


@pytest.mark.parametrize(("written", "stays"), [(".lock", False), ("search/.lock", False), ("config.yaml", True)])
def test_a_failed_command_keeps_the_files_it_wrote(written: str, stays: bool, tmp_path: Path) -> None:
    (tmp_path / "run" / "search").mkdir(parents=True)
    (tmp_path / "run" / written).touch()
    with pytest.raises(ParnasError), remove_if_empty(tmp_path / "run"):
        raise ParnasError("stop")
    assert (tmp_path / "run").is_dir() == stays


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["search", "nowhere.yaml"], "There is no configuration nowhere.yaml"),
        (["search", "CONFIG", "model.d_modle=3"], "model.d_modle is no known key; did you mean model.d_model?"),
        (["search", "CONFIG", "model.d_model=many"], "model.d_model is 'many'; it should be a valid integer"),
        (["search", "CONFIG", "model.n_heads=5"], "model.n_heads is 5, which does not divide d_model 16"),
        (["search", "CONFIG", "model.cutoffs=[5000]"], "model.cutoffs end at 5000, but the vocabulary has"),
        (["search", "CONFIG", "data.batch_size=5000"], "lower data.batch_size or data.tgt_len"),
        (["search", "CONFIG", "runtime.device=cuda:99"], "not on this machine"),
        (["search", "CONFIG", "runtime.device=abacus"], "give auto, cpu, cuda"),
        (["search", "CONFIG", "OTHER.yaml"], "Give one configuration, not 2"),
        (["retrain", "CONFIG"], "No architecture was given"),
        (["retrain", "CONFIG", "--arch", "sxf"], "Cannot read the architecture|Unknown layer letter"),
        (["retrain", "CONFIG", "--arch", "(sf"], "leaves 1 bracket"),
        (["retrain", "CONFIG", "--arch", "sf" * 150 + "q"], "This is at character 301 of the architecture"),
        (["retrain", "CONFIG", "--arch", "q" * 300 + ".yaml"], "There is no file qqq"),
        (["retrain", "CONFIG", "--arch", "iii"], "no layer besides identity"),
        (["retrain", "CONFIG", "--arch", "missing.yaml"], "There is no file missing.yaml"),
        (["derive", "RETRAIN"], "has no pi.jsonl"),
        (["derive", "nowhere"], "There is no run folder nowhere"),
        (["evaluate", "nowhere"], "There is no run folder nowhere"),
        (["evaluate", "RETRAIN", "--split", "exam"], "give train, valid or test"),
        (["search", "CONFIG", "--run", "taken"], "File exists"),
        (["evaluate", "RETRAIN", "--out", "taken"], "File exists"),
        (["plot", "nowhere"], "There is no run folder nowhere"),
        (["profile", "CONFIG", "--tgt-len", "0"], "data.tgt_len is 0"),
        (["profile", "CONFIG", "--rounds", "1", "--out", "taken"], "File exists|Not a directory"),
        (["cutoffs", "RETRAIN", "--d-model", "64"], "leave them out"),
        (["cutoffs", "nowhere"], "There is no run folder or file nowhere"),
        (["data", "nowhere"], "nowhere"),
    ],
)
def test_user_errors_print_one_message_and_exit_with_2(
    arguments: list[str],
    message: str,
    config_file: Path,
    retrain_run: Run,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("taken").write_text("a file")
    paths = {"CONFIG": str(config_file), "RETRAIN": str(retrain_run.folder)}
    error = refusal(capsys, *(paths.get(argument, argument) for argument in arguments))
    assert any(part in error for part in message.split("|")), error


def test_a_run_folder_in_use_is_not_overwritten(
    config_file: Path, search_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (search_run.folder / "metrics.jsonl").read_text()
    assert "is finished" in refusal(capsys, "search", config_file, "--run", search_run.folder)
    assert (search_run.folder / "metrics.jsonl").read_text() == before


def test_resuming_without_an_intact_checkpoint_is_refused(
    config_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    assert run_command("retrain", config_file, "--arch", "sf", "--run", folder) == 0
    (folder / "summary.json").unlink()
    for checkpoint in list_checkpoints(folder / "checkpoints"):
        (checkpoint / "state.pt").write_bytes(b"broken")
    assert "intact" in refusal(capsys, "retrain", "--resume", "--run", folder)
    assert "no intact checkpoint" in refusal(capsys, "evaluate", folder)


@pytest.mark.parametrize("missing", ["config.yaml", "streams.json", "tokenizer", "checkpoints", "environment.json"])
def test_a_missing_file_of_a_run_is_named(
    missing: str, retrain_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(retrain_run.folder, tmp_path / "run")
    path = tmp_path / "run" / missing
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert missing.split(".", maxsplit=1)[0].rstrip("s") in refusal(capsys, "evaluate", tmp_path / "run")


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_disk_errors_come_with_advice(
    number: int, config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number), str(tmp_path))

    monkeypatch.setattr("parnas.runs.run.write_text", refuse)
    error = refusal(capsys, "retrain", config_file, "--arch", "sf", "--run", tmp_path / "run")
    assert os.strerror(number) in error
    assert "--run" in error


def test_a_run_resumes_after_the_disk_was_full(config_file: Path, tmp_path: Path) -> None:
    """Limit files to 12 kB: small files are written, the checkpoint is not. Without the limit, the run resumes."""
    folder, limit = tmp_path / "run", 12_000
    command = [sys.executable, str(ROOT / "retrain.py"), str(config_file), "--arch", "sf", "--run", str(folder)]
    answer = subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert answer.returncode == 2, answer.stderr
    assert "Traceback" not in answer.stderr
    assert "checkpoint could not be written" in answer.stderr or "File too large" in answer.stderr
    assert list((folder / "checkpoints").iterdir()) == []
    assert run_command("retrain", config_file, "--arch", "sf", "--run", folder, "--resume") == 0
    whole = tmp_path / "whole"
    assert run_command("retrain", config_file, "--arch", "sf", "--run", whole) == 0
    weights = [load_file(list_checkpoints(run / "checkpoints")[-1] / "model.safetensors") for run in (folder, whole)]
    assert all((weights[0][name] == weights[1][name]).all() for name in weights[0])


def test_cutoffs_of_a_run_and_of_a_file(retrain_run: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "counts.txt").write_text("".join(f"word{n} {1000 // n}\n" for n in range(1, 200)))
    assert run_command("cutoffs", tmp_path / "counts.txt", "--clusters", 4) == 0
    balanced = capsys.readouterr().out
    assert balanced.startswith("model.cutoffs: [")
    assert run_command("cutoffs", tmp_path / "counts.txt", "--clusters", 4, "--min-macs") == 0
    assert capsys.readouterr().out not in {"", balanced}
    assert run_command("cutoffs", retrain_run.folder) == 0
    assert "of the full softmax" in capsys.readouterr().out
    (tmp_path / "counts.txt").write_text("one\ntwo\n")
    assert "must end in a whole number" in refusal(capsys, "cutoffs", tmp_path / "counts.txt")


def test_data_prints_the_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "novel.txt").write_text(make_text(400, 5))
    assert (
        run_command("data", tmp_path / "novel.txt", "data.tokenizer.kind=byte", "data.tokenizer.vocab_size=null") == 0
    )
    out = capsys.readouterr().out
    assert "train" in out
    assert "the tokenizer loses nothing" in out


def test_profile_writes_its_table_for_the_shapes_of_the_flags(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from parnas.nas.latency_table import read_profile

    monkeypatch.chdir(tmp_path)
    flags = ["--batch-size", 2, "--tgt-len", 5, "--mem-len", 0, "--rounds", 2, "--check", 3]
    assert run_command("profile", config_file, "data.tgt_len=6", "model.d_inner=24", *flags) == 0
    out = capsys.readouterr().out
    assert f"written: {Path('runs/profile-small/profile.json')}" in out
    profile = read_profile(tmp_path / "runs/profile-small/profile.json")
    assert [profile.shapes[key] for key in ("batch_size", "tgt_len", "mem_len", "d_inner")] == [2, 5, 0, 24]
    assert profile.rounds == 2
    assert profile.check is not None
    assert all(network.arch in out for network in profile.check.networks)
    assert run_command("profile", config_file, "--rounds", 1, "--check", 0, "--out", "there") == 0
    assert read_profile(Path("there")).check is None
    assert read_profile(Path("there")).shapes["tgt_len"] == 8


def test_an_interrupt_exits_with_130(
    config_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("parnas.training.trainer.Trainer.train_step", interrupt)
    assert run_command("retrain", config_file, "--arch", "sf", "--run", tmp_path / "run") == 130
    assert "--resume" in capsys.readouterr().err
    monkeypatch.setattr("parnas.nas.derive.derive", interrupt)
    assert run_command("derive", tmp_path / "run") == 130
    assert capsys.readouterr().err == "interrupted\n", "there is nothing to resume"


def test_a_frame_of_no_time_is_refused(retrain_run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("plot", retrain_run.folder, "--frame-ms", "0") == 2
    assert "frame" in capsys.readouterr().err
