"""Fixtures of many tests: a small corpus, a separate cache, and small finished runs."""

import os
import random
import shutil
import signal
import socket
import sqlite3
from functools import partial
from pathlib import Path

import pytest

# One thread per process, also in those that tests start: the networks are tiny, and threads of two test workers on few
# cores wait for each other. Torch reads it once, when it is imported.
os.environ["OMP_NUM_THREADS"] = "1"

from hypothesis import HealthCheck, settings
from sqlalchemy import Engine, event

from parnas.config.loader import Config
from parnas.runs.run import Run

# Examples take longer on a busy machine; CI draws the same ones each time, so that it fails for changes alone.
settings.register_profile(
    "patient",
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    derandomize=os.environ.get("CI") == "true",
)
settings.load_profile("patient")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print how many cases each fuzz test ran, from the property `cases`; print nothing if none ran."""
    reports = [report for group in terminalreporter.stats.values() for report in group]
    found = [
        (report.nodeid, int(count))
        for report in reports
        if getattr(report, "when", "") == "teardown"  # the last of a test, which has all of its properties
        for name, count in report.user_properties
        if name == "cases"
    ]
    if found:
        terminalreporter.section(f"fuzzing: {sum(count for _, count in found):,} cases")
        for test, count in sorted(found):
            terminalreporter.write_line(f"{count:>8,}  {test}")


SUBJECTS = ["the old lobster", "a small boat", "Ada", "the engine", "every network", "no reader"]
VERBS = ["finds", "carries", "forgets", "compares", "mends", "follows"]
OBJECTS = ["the harbour", "a long memory", "two layers", "the first segment", "its own weights", "nothing at all"]


def make_text(sentences: int, seed: int) -> str:
    """Return sentences of a small grammar, which a small network learns within a few dozen steps."""
    draw = random.Random(seed)
    lines = [f" {draw.choice(SUBJECTS)} {draw.choice(VERBS)} {draw.choice(OBJECTS)} . " for _ in range(sentences)]
    return "\n".join(lines) + "\n"


# Ignored in a shell's background, and so by the commands that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    patch = pytest.MonkeyPatch()
    patch.setenv("PARNAS_CACHE", str(tmp_path_factory.mktemp("cache")))


@pytest.fixture(scope="session", autouse=True)
def _few_rounds() -> None:
    """Let comparisons measure latencies by 5 calls instead of 100."""
    from parnas.training.latency import measure_latencies

    pytest.MonkeyPatch().setattr("parnas.evaluation.comparison.measure_latencies", partial(measure_latencies, rounds=5))


@pytest.fixture(scope="session", autouse=True)
def _no_waiting_for_the_disk() -> None:
    """Return from fsync and from SQLite's commits before data is on the disk, since no test cuts the power."""
    pytest.MonkeyPatch().setattr(os, "fsync", lambda descriptor: None)

    def set_pragma(connection: object, _: object) -> None:
        if isinstance(connection, sqlite3.Connection):
            connection.execute("PRAGMA synchronous=OFF")
            connection.execute("PRAGMA journal_mode=MEMORY")

    event.listen(Engine, "connect", set_pragma)


def make_corpus(folder: Path) -> Path:
    """Write train.txt, valid.txt and test.txt into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for seed, (split, sentences) in enumerate([("train", 1200), ("valid", 150), ("test", 150)]):
        (folder / f"{split}.txt").write_text(make_text(sentences, seed), encoding="utf-8")
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with train.txt, valid.txt and test.txt."""
    return make_corpus(tmp_path_factory.mktemp("corpus"))


needs_compiler = pytest.mark.skipif(
    shutil.which(os.environ.get("CXX", "g++")) is None,
    reason="torch.compile wants a C++ compiler: g++, or what CXX names",
)


def free_port() -> int:
    """Return a port that no process listens on."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def small_config(corpus: Path, **changes: object) -> Config:
    """Return a configuration that trains within seconds, in float32 on the CPU; changes are `section__key=value`."""
    settings = {
        "data__corpus": str(corpus),
        "data__tokenizer__kind": "word",
        "data__batch_size": 4,
        "data__tgt_len": 8,
        "model__d_model": 16,
        "model__n_heads": 2,
        "model__d_inner": 32,
        "model__mem_len": 8,
        "search__blocks": 3,
        "search__steps": 24,
        "search__alpha_start_step": 6,
        "search__warmup_steps": 4,
        "search__cost__target": None,
        "search__cost__metric": "macs",
        "search__evolution_steps": 4,
        "train__steps": 24,
        "train__warmup_steps": 4,
        "train__log_every": 4,
        "train__eval_every": 12,
        "train__save_every": 8,
        "runtime__device": "cpu",
        "runtime__threads": 1,
        "runtime__precision": "fp32",
    }
    return Config().replace(**{**settings, **changes})


@pytest.fixture(scope="session")
def search_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished small search."""
    from parnas.nas.search import search
    from parnas.training.progress import Silent

    return search(small_config(corpus), tmp_path_factory.mktemp("runs") / "search", Silent())


@pytest.fixture(scope="session")
def retrain_run(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished small retraining of `sfs`."""
    from parnas.training.progress import Silent
    from parnas.training.retrain import retrain

    return retrain(small_config(corpus, model__arch="sfs"), tmp_path_factory.mktemp("runs") / "retrain", Silent())


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let commands write their default output into a folder of the test."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")


@pytest.fixture
def searched(search_run: Run, tmp_path: Path) -> Run:
    """A copy of the finished search, which the test may change."""
    shutil.copytree(search_run.folder, tmp_path / "searched")
    return Run(tmp_path / "searched")


@pytest.fixture
def trained(retrain_run: Run, tmp_path: Path) -> Run:
    """A copy of the finished retraining, which the test may change."""
    shutil.copytree(retrain_run.folder, tmp_path / "trained")
    return Run(tmp_path / "trained")
