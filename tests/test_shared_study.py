"""Workers of one study that die, join, are suspended, or lose the server, in processes of their own."""

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import optuna
import pytest
from blackbox_helpers import Counting, make_task
from optuna.trial import TrialState
from postgresql_server import Server, find_binaries

import parnas.nas.storage as storage_module
import parnas.nas.workers as module
from parnas.architecture import Architecture
from parnas.config import Config
from parnas.errors import ParnasError
from parnas.nas.blackbox import blackbox, findings, open_study
from parnas.nas.cost import count_costs
from parnas.nas.workers import finished
from parnas.training.reporter import Silent

WORKER = """
import os, sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
import parnas.nas.workers as module
from blackbox_helpers import Counting, make_task
from parnas.nas.blackbox import blackbox, open_study
from parnas.training.reporter import Silent

url, log, trials, seconds = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
module.POLL_SECONDS, module.BEAT_SECONDS, module.STALE_SECONDS = 0.05, 0.2, 4.0

class Told(Counting):
    def __call__(self, number, architecture):
        self.tell("begun", number, architecture)
        value = super().__call__(number, architecture)
        self.tell("ended", number, architecture)
        return value

    def tell(self, what, number, architecture):
        with log.open("a") as file:
            file.write(f"{{what}} {{number}} {{architecture.canonical()}} {{os.getpid()}}\\n")

class Printing(Silent):
    def note(self, text):
        print(text, flush=True)

task = make_task(Told(seconds=seconds), 4)
blackbox(open_study(url, "test", "tpe", task), task, trials, Printing())
"""


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    pytest.importorskip("psycopg", reason="PostgreSQL's driver is not installed: pip install 'psycopg[binary]'")
    server = Server(find_binaries())
    yield server
    server.remove()


@pytest.fixture(params=["sqlite", "journal", "postgresql"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty storage."""
    if request.param != "postgresql":
        return {"sqlite": f"sqlite:///{tmp_path}/study.db", "journal": f"journal:{tmp_path}/study.log"}[request.param]
    return new_database(request.getfixturevalue("server"), tmp_path)


def new_database(server: Server, tmp_path: Path) -> str:
    name = f"study_{abs(hash(tmp_path))}"
    server.execute(f"CREATE DATABASE {name}")
    return server.address(name)


def start_worker(url: str, log: Path, trials: int, seconds: float) -> subprocess.Popen[str]:
    script = WORKER.format(tests=str(Path(__file__).parent))
    command = [sys.executable, "-c", script, url, str(log), str(trials), str(seconds)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def end_of(worker: subprocess.Popen[str]) -> str:
    """What a worker printed; it must end well."""
    output, errors = worker.communicate(timeout=150)
    assert worker.returncode == 0, errors
    assert "Traceback" not in errors
    return output


def read_log(log: Path) -> list[tuple[str, int, str, int]]:
    lines = log.read_text().splitlines() if log.exists() else []
    return [(what, int(number), network, int(pid)) for what, number, network, pid in map(str.split, lines)]


def wait_until(seen, seconds: float = 60.0) -> None:
    until = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < until
        time.sleep(0.02)


def open_test_study(url: str) -> optuna.Study:
    return open_study(url, "test", "tpe", make_task(Counting(), 4))


def check_study(study: optuna.Study, trials: int) -> None:
    """All trials are finished, none too many, each network has one value, and each value is what it must be."""
    states = Counter(trial.state for trial in study.get_trials())
    assert states[TrialState.COMPLETE] + states[TrialState.PRUNED] == trials
    assert set(states) <= {TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAIL}
    networks = [finding.network for finding in findings(study)]
    assert len(set(networks)) == len(networks)
    costs = count_costs(Config().replace(search__blocks=4), "macs")
    for trial in study.get_trials(states=(TrialState.COMPLETE,)):
        string = "".join(trial.params.values())
        assert trial.values == [Counting()(0, Architecture(string)), costs.cost(string)]


@pytest.mark.slow
def test_a_worker_is_killed_and_another_joins(url: str, tmp_path: Path) -> None:
    """Of three workers one dies in the middle of a trial: another takes up its network, and no trial is lost."""
    log = tmp_path / "log"
    victim = start_worker(url, log, 14, 600.0)
    wait_until(lambda: read_log(log))
    (_, number, network, pid) = read_log(log)[0]
    assert pid == victim.pid
    workers = [start_worker(url, log, 14, 0.2) for _ in range(2)]
    wait_until(lambda: len(read_log(log)) > 3)
    victim.kill()
    victim.communicate()
    workers.append(start_worker(url, log, 14, 0.2))
    for worker in workers:
        end_of(worker)

    study = open_test_study(url)
    check_study(study, 14)
    assert study.get_trials()[number].state == TrialState.FAIL
    (found,) = [finding for finding in findings(study) if finding.network == network]
    assert found.trial != number  # one that proposed it again, or that drew it too and waited for the dead
    ended = [network for what, _, network, _ in read_log(log) if what == "ended"]
    begun = [network for what, _, network, _ in read_log(log) if what == "begun"]
    assert sorted(ended) == sorted(finding.network for finding in findings(study))
    assert Counter(begun) - Counter(ended) == Counter([network])


@pytest.mark.slow
def test_a_suspended_worker_makes_no_second_value(url: str, tmp_path: Path) -> None:
    """It is given up, another evaluates its network, and then it goes on: what it found is not written down."""
    log = tmp_path / "log"
    suspended = start_worker(url, log, 3, 1.0)
    wait_until(lambda: read_log(log))
    os.kill(suspended.pid, signal.SIGSTOP)
    number, network = read_log(log)[0][1:3]
    try:
        end_of(start_worker(url, log, 3, 0.1))
    finally:
        os.kill(suspended.pid, signal.SIGCONT)
    assert f"trial {number} had been given up" in end_of(suspended)
    study = open_test_study(url)
    check_study(study, 3)
    assert [trial.user_attrs["network"] for trial in finished(study)].count(network) >= 1
    assert [what for what, _, named, _ in read_log(log) if named == network].count("ended") == 2


@pytest.mark.slow
def test_a_study_outlives_a_restart_of_its_server(server: Server, tmp_path: Path) -> None:
    url, log = new_database(server, tmp_path), tmp_path / "log"
    workers = [start_worker(url, log, 16, 0.3) for _ in range(2)]
    wait_until(lambda: len(read_log(log)) > 4)
    server.stop()
    time.sleep(2.0)
    server.start()
    told = [end_of(worker) for worker in workers]
    assert all("the storage does not answer" in each for each in told)
    check_study(open_test_study(url), 16)


@pytest.mark.slow
def test_a_server_that_stays_away_ends_a_worker_with_a_message(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The study goes on when it is back."""
    monkeypatch.setattr(storage_module, "AWAY_SECONDS", 2.0)
    monkeypatch.setattr(module, "STALE_SECONDS", 2.0)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.05)

    class Stopping(Counting):
        def __call__(self, number: int, architecture: Architecture) -> float:
            if len(self.asked) == 2:
                server.stop()
            return super().__call__(number, architecture)

    url, task = new_database(server, tmp_path), make_task(Stopping(), 4)
    study = open_study(url, "test", "tpe", task)
    try:
        with pytest.raises(ParnasError, match="has not answered for"):
            blackbox(study, task, 6, Silent())
        with pytest.raises(ParnasError, match="cannot be opened"):
            open_test_study(url)
    finally:
        server.start()
    task = make_task(Counting(), 4)
    study = open_test_study(url)
    blackbox(study, task, 6, Silent())
    check_study(study, 6)
