"""Studies of settings without training: losses that are a function of the settings."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import optuna
import pytest
from conftest import small_config
from helpers.training_helpers import Notes

import parnas.studies.tuning as module
from parnas.config.loader import Config, dump_config
from parnas.errors import Diverged
from parnas.runs.records import Kind, MetricsRecord, RunSummary, SplitLoss
from parnas.runs.run import METRICS, Run
from parnas.studies import optuna_study
from parnas.studies.tuning import TuneOptions, TuningResult, tune
from parnas.studies.tuning_space import read_space
from parnas.training.progress import Loop, Reporter

SPACE = {"train.lr": "log:1e-4..1e-1", "model.dropout": "0..0.5", "model.norm": "pre,post"}


class FakeTraining:
    """A stand-in for retraining with three validations, whose loss is a function of the settings; it records each call.

    It diverges from `too_fast` on. `before` is called with the number of the call and the step, before each validation.
    """

    def __init__(self, log: Path | None = None, too_fast: float = 1.0, seconds: float = 0.0) -> None:
        self.asked: list[tuple[Path, Config]] = []
        self.log, self.too_fast, self.seconds = log, too_fast, seconds
        self.before: Callable[[int, int], None] = lambda number, step: None

    def __call__(self, config: Config, folder: Path, reporter: Reporter, resume: bool = False) -> Run:
        number = len(self.asked)
        self.asked.append((folder, config))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.yaml").write_text(dump_config(config))
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{folder.name} {os.getpid()}\n")
        run, steps = Run(folder), config.train.steps
        done = max((record.step for record in run.metrics()), default=0) if (folder / METRICS).exists() else 0
        reporter.start(Loop("retrain", done, steps, folder=folder))
        for step in (steps // 3, 2 * steps // 3, steps):
            if step <= done:
                continue
            self.before(number, step)
            time.sleep(self.seconds)
            if config.train.lr > self.too_fast:
                raise Diverged("The loss is not finite at step 3.")
            loss = loss_of(config) + 1 - step / steps
            record = MetricsRecord(step=step, split="valid", loss=loss, ppl=1.0)
            run.append(METRICS, record)
            (run.checkpoints / f"step-{step:08}").mkdir(parents=True)
            reporter.metrics(record)
        valid = SplitLoss(loss=loss_of(config))
        run.write_summary(RunSummary(kind="retrain", arch="", steps=steps, seconds=1.0, parameters=1, valid=valid))
        reporter.stop()
        return run


def loss_of(config: Config) -> float:
    """Return the last validation loss; its minimum is at a learning rate of 0.003 without dropout."""
    return 4 + abs(config.train.lr / 0.003 - 1) + config.model.dropout


def keep_studies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep studies of any name in memory, except in databases of servers: much faster than in files."""
    storages, open_storage = dict[str, optuna.storages.InMemoryStorage](), optuna_study.open_storage

    def open_in_memory(url: str, note: object = None) -> optuna.storages.BaseStorage:
        if ":" in url and not url.startswith("sqlite:///"):
            return open_storage(url)
        return storages.setdefault(url, optuna.storages.InMemoryStorage())

    monkeypatch.setattr(optuna_study, "open_storage", open_in_memory)


@pytest.fixture
def studies_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Studies that stay in memory."""
    keep_studies_in_memory(monkeypatch)


@pytest.fixture
def fake_training(monkeypatch: pytest.MonkeyPatch) -> FakeTraining:
    """Trials that are not trained, of studies in memory."""
    keep_studies_in_memory(monkeypatch)
    training = FakeTraining()
    monkeypatch.setitem(module.TRAIN, "retrain", training)
    return training


def run_study(
    corpus: Path,
    folder: Path,
    trials: int,
    space: dict[str, object] | None = None,
    reporter: Reporter | None = None,
    phase: Kind = "retrain",
    prune: bool = True,
    storage: str | None = None,
    **changes: object,
) -> TuningResult:
    """The study in a folder after so many trials."""
    config = small_config(corpus, model__arch="sfs", **changes)
    options = TuneOptions(
        phase, read_space(space or SPACE, config, phase), trials, storage, "test" if storage else None, prune
    )
    return tune(config, options, folder, reporter or Notes())


def work(url: str, corpus: Path, folder: Path, log: Path) -> None:
    """Be a worker of a study of 6 trials."""
    module.TRAIN["retrain"] = FakeTraining(log, seconds=0.1)  # type: ignore[index]
    result = run_study(corpus, folder, 6, storage=url)
    assert len(result.trials) in (6, 7)
