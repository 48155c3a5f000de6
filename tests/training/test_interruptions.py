"""Signals that ask for an end, and how to go on after them."""

import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from conftest import small_config
from helpers.training_helpers import assert_same_weights

from parnas.config.loader import Config, dump_config
from parnas.runs.run import METRICS, Run
from parnas.training.checkpoints import list_checkpoints
from parnas.training.distributed import LostProcess
from parnas.training.interruptions import Stopped, StopSignals
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

ROOT = Path(__file__).resolve().parents[2]


def start(config: Config, folder: Path, tmp_path: Path) -> subprocess.Popen[str]:
    """The command in a process of its own, once it has trained some steps."""
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, str(ROOT / "retrain.py"), str(path), "--run", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(folder / METRICS, process)
    return process


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if (path.is_file() and path.stat().st_size) or process.poll() is not None:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} does not come")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(
    number: signal.Signals, corpus: Path, tmp_path: Path
) -> None:
    config = small_config(corpus, model__arch="sf", train__steps=1200, train__save_every=5000, train__eval_every=1200)
    folder = tmp_path / "run"
    process = start(config, folder, tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    told = re.search(rf"stopped by {number.name} after step (\d+), which is saved; to resume: parnas retrain", errors)
    assert told, errors
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == [f"step-{int(told[1]):08d}"]
    again = retrain(config, folder, Silent())
    assert_same_weights(retrain(config, tmp_path / "whole", Silent()), again)


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(corpus: Path, tmp_path: Path) -> None:
    """In the middle of a step that the first one waits for; what was saved before is whole."""
    changes = {"data__batch_size": 16, "data__tgt_len": 256, "model__d_model": 128, "model__d_inner": 4096}
    config = small_config(corpus, model__arch="(sf)*6", train__steps=10**6, train__log_every=1, **changes)
    process = start(config.replace(train__save_every=1), tmp_path / "run", tmp_path)
    try:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "finishing this step" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted; to resume: parnas retrain" in errors


@pytest.mark.parametrize(("error", "ignored"), [(LostProcess("lost"), True), (ValueError("other"), False)])
def test_torchruns_sigterm_cannot_silence_the_word_of_a_lost_process(error: Exception, ignored: bool) -> None:
    """It reaches the processes that are left while they end, and one that it kills says nothing of the cause."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(type(error)), StopSignals():
            raise error
        assert signal.getsignal(signal.SIGTERM) is (signal.SIG_IGN if ignored else before)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_signals_are_as_before_after_a_training(corpus: Path, tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    class Signalled(Silent):
        def advance(self, step: int) -> None:
            if step == 7:
                signal.raise_signal(signal.SIGTERM)

    config = small_config(corpus, model__arch="sf")
    with pytest.raises(Stopped, match="after step 7"):
        retrain(config, tmp_path / "run", Signalled())
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert_same_weights(retrain(config, tmp_path / "whole", Silent()), retrain(config, tmp_path / "run", Silent()))


def test_a_training_in_a_thread_handles_no_signals(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", train__steps=4)
    thread = threading.Thread(target=retrain, args=(config, tmp_path / "run", Silent()))
    thread.start()
    thread.join()
    assert Run(tmp_path / "run").finished()


def test_an_interrupted_demo_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from parnas.cli.main import main

    def stop(*_: object) -> None:
        raise Stopped(signal.SIGTERM, 7)

    monkeypatch.setattr("parnas.studies.pipeline.run_pipeline", stop)
    with pytest.raises(SystemExit) as leaving:
        main(["demo", "--run", str(tmp_path / "a demo")])
    assert leaving.value.code == 128 + signal.SIGTERM
    assert f"to resume: parnas demo --run '{tmp_path / 'a demo'}'" in capsys.readouterr().err


def test_before_a_run_is_begun_the_same_command_is_what_goes_on(tmp_path: Path, retrain_run: Run) -> None:
    from parnas.cli.common import training_resume_hint

    hint = training_resume_hint("search", tmp_path / "run")
    assert hint == f"run the same command again, with --run {tmp_path / 'run'}"
    hint = training_resume_hint("retrain", retrain_run.folder)
    assert hint == f"parnas retrain --run {retrain_run.folder} --resume"
