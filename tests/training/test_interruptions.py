"""Signals that ask for an end, and how to go on after them."""

import signal
import threading
from pathlib import Path

import pytest
from conftest import small_config
from helpers.command_helpers import run_command
from helpers.training_helpers import assert_same_weights

from parnas.config.loader import Config, dump_config
from parnas.runs.run import Run
from parnas.training.checkpoints import list_checkpoints
from parnas.training.distributed import LostProcess
from parnas.training.interruptions import Stopped, StopSignals
from parnas.training.progress import PlainReporter, Silent
from parnas.training.retrain import RetrainTask, retrain
from parnas.training.trainer import StepResult


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A retraining that nothing interrupts."""
    return retrain(small_config(corpus, model__arch="sf"), tmp_path_factory.mktemp("whole") / "run", Silent())


def call_command(config: Config, folder: Path) -> int:
    """Return the exit code of `parnas retrain`."""
    path = folder.with_suffix(".yaml")
    path.write_text(dump_config(config))
    return run_command("retrain", path, "--run", folder)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_step_saves_and_prints_how_to_resume(
    number: signal.Signals,
    corpus: Path,
    tmp_path: Path,
    whole: Run,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    handler = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(PlainReporter, "advance", lambda _, step: step == 7 and signal.raise_signal(number))
        assert call_command(whole.config(), folder) == 128 + number
    assert f"stopped by {number.name} after step 7, which is saved; to resume: parnas retrain" in capfd.readouterr().err
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == ["step-00000007"]
    assert signal.getsignal(number) == handler
    assert_same_weights(whole, retrain(whole.config(), folder, Silent()))


def test_a_second_interrupt_leaves_at_once(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """It ends the step that the first interrupt waits for."""
    original, ended = RetrainTask.train_step, list[int]()

    def interrupt_twice(task: RetrainTask, step: int) -> StepResult:
        if step == 5:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        ended.append(step)
        return original(task, step)

    monkeypatch.setattr(RetrainTask, "train_step", interrupt_twice)
    assert call_command(small_config(corpus, model__arch="sf"), tmp_path / "run") == 130
    errors = capfd.readouterr().err
    assert "finishing this step" in errors
    assert "interrupted; to resume: parnas retrain" in errors
    assert ended == [0, 1, 2, 3, 4]


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
