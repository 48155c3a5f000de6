"""Several processes that train together: N of them with B / N rows each do what one does with B rows."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import free_port, small_config
from helpers.training_helpers import Stop, StopAfter, assert_same_weights, final_weights

from parnas.config.loader import Config, dump_config
from parnas.errors import ParnasError
from parnas.runs.run import METRICS, Run
from parnas.training.checkpoints import list_checkpoints, load_state
from parnas.training.device import seed_process
from parnas.training.distributed import DistributedContext, own_store
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

ROOT = Path(__file__).resolve().parents[2]
WORKER = Path(__file__).resolve().parents[1] / "helpers" / "rank_worker.py"
COUNTS = (2, 4)
ESTIMATORS = {
    "soft": {},
    "straight_through": {"search__alpha_split": 0.2, "search__alpha_every": 2},
    "gdas": {},
    "single_path": {"search__candidate_dropout": 0.2},
    "uniform": {"search__alpha_every": 1, "search__uniform_fraction": 0.8},
}
NETWORKS = {
    "plain": {"model__arch": "sfs"},
    "clusters": {"model__arch": "sf", "model__cutoffs": (5, 12), "model__norm": "pre"},
    "compressive": {"model__arch": "cfc", "model__memory__cmem_len": 4, "model__memory__ratio": 2},
    "accumulated": {"model__arch": "sfs", "train__accumulate": 2},
    "checkpointed": {"model__arch": "sfs", "runtime__checkpoint_activations": True},
    "muon": {"model__arch": "sfs", "train__optimizer": "muon"},
}


def make_config(corpus: Path, **changes: object) -> Config:
    schedule = {"search__steps": 20, "train__steps": 20, "search__alpha_start_step": 2, "train__log_every": 1}
    return small_config(corpus, data__batch_size=16, model__dropout=0.0, **{**schedule, **changes})


def start_ranks(count: int, command: list[str]) -> list[subprocess.CompletedProcess[str]]:
    """What `count` processes of Python came to, started as torchrun does."""
    port, processes = free_port(), []
    for rank in range(count):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        environment = {**os.environ, **{name: str(value) for name, value in names.items()}}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        processes.append(subprocess.Popen([sys.executable, *command], env=environment, **pipes))
    told = [process.communicate(timeout=300) for process in processes]
    return [
        subprocess.CompletedProcess(command, process.returncode, *texts)
        for process, texts in zip(processes, told, strict=True)
    ]


def run_ranks(count: int, jobs: list[tuple[str, Config, Path]], folder: Path) -> None:
    """Train the jobs, one after another, in `count` processes."""
    listed = []
    for phase, config, run in jobs:
        run.with_suffix(".yaml").write_text(dump_config(config))
        listed.append((phase, str(run.with_suffix(".yaml")), str(run)))
    path = folder / f"jobs-{count}.json"
    path.write_text(json.dumps(listed))
    ended = start_ranks(count, [str(WORKER), str(path)])
    assert all(each.returncode == 0 for each in ended), "\n".join(each.stderr for each in ended)


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of processes, a folder with a run for each estimator and network."""
    folders = {}
    for count in (1, *COUNTS):
        folders[count] = tmp_path_factory.mktemp(f"ranks-{count}")
        jobs = [
            ("search", make_config(corpus, search__estimator=name, **changes), folders[count] / name)
            for name, changes in ESTIMATORS.items()
        ]
        jobs += [
            ("retrain", make_config(corpus, **changes), folders[count] / name) for name, changes in NETWORKS.items()
        ]
        run_ranks(count, jobs, folders[count])
    return folders


def losses(run: Run) -> list[tuple[int, str, float]]:
    """Losses, and those of compression, which come as of another split."""
    lines = run.metrics()
    compression = [
        (line.step, "compression", line.compression_loss) for line in lines if line.compression_loss is not None
    ]
    return [(line.step, line.split, line.loss) for line in lines] + compression


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ESTIMATORS, *NETWORKS])
@pytest.mark.parametrize("count", COUNTS)
def test_several_processes_train_as_one(name: str, count: int, trained: dict[int, Path]) -> None:
    alone, together = Run(trained[1] / name), Run(trained[count] / name)
    for one, other in zip(losses(alone), losses(together), strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], rel=2e-4, abs=1e-8)
    expected, found = final_weights(alone), final_weights(together)
    assert expected.keys() == found.keys()
    for key, weight in expected.items():
        torch.testing.assert_close(found[key], weight, rtol=1e-2, atol=2e-4)
    assert alone.summary().valid.tokens == together.summary().valid.tokens


@pytest.mark.slow
@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("count", COUNTS)
def test_all_processes_draw_the_same_and_alpha_learns_from_all_rows(
    name: str, count: int, trained: dict[int, Path]
) -> None:
    alone = json.loads((trained[1] / name / "recorded-0.json").read_text())
    assert {kind for kind, _, _ in alone} == {"gates", "gradient"}
    for rank in range(count):
        recorded = json.loads((trained[count] / name / f"recorded-{rank}.json").read_text())
        assert len(recorded) == len(alone)
        for (kind, step, expected), (other_kind, other_step, found) in zip(alone, recorded, strict=True):
            assert (kind, step) == (other_kind, other_step)
            scale = np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=1e-2, atol=2e-3 * scale)
    for one, other in zip(*(Run(trained[n] / name).pi_records() for n in (1, count)), strict=True):
        np.testing.assert_allclose(one.pi, other.pi, atol=2e-4)


@pytest.mark.slow
def test_what_no_process_sampled_keeps_no_gradient(trained: dict[int, Path], corpus: Path) -> None:
    """Without weight decay of what had no gradient, a candidate that never ran has its initial weights."""
    states = {count: load_state(list_checkpoints(trained[count] / "gdas" / "checkpoints")[-1]) for count in (1, 2)}
    steps = {
        count: {
            index: int(entry["step"])
            for index, entry in state["task"]["weight_optimizer"]["optimizer"]["state"].items()
        }
        for count, state in states.items()
    }
    assert steps[1] == steps[2]
    assert len(set(steps[1].values())) > 1, "every candidate ran in every step"


@pytest.mark.slow
def test_the_first_process_alone_writes(trained: dict[int, Path]) -> None:
    one, four = (sorted(path.name for path in (trained[n] / "plain").iterdir()) for n in (1, 4))
    assert [name for name in four if not name.startswith("recorded")] == [
        name for name in one if not name.startswith("recorded")
    ]
    steps = [line.step for line in Run(trained[4] / "plain").metrics() if line.split == "train"]
    assert steps == list(range(1, 21))


def first_steps(folder: Path) -> list[dict[str, object]]:
    return [line for line in Run(folder).metrics() if line.step <= 8]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 2)])
def test_a_run_goes_on_with_another_number_of_processes(
    before: int, after: int, corpus: Path, tmp_path: Path, trained: dict[int, Path]
) -> None:
    """What `before` processes have trained for 8 steps and were stopped, `after` finish as one would have."""
    searched = make_config(corpus, search__estimator="uniform", **ESTIMATORS["uniform"])
    retrained = make_config(corpus, **NETWORKS["compressive"])
    jobs = {
        "uniform": ("search", searched, tmp_path / "uniform"),
        "compressive": ("retrain", retrained, tmp_path / "compressive"),
    }
    run_ranks(before, list(jobs.values()), tmp_path)
    for _, _, folder in jobs.values():  # as if it had been killed soon after its eighth step
        (folder / "summary.json").unlink()
        for path in list_checkpoints(folder / "checkpoints"):
            if path.name > "step-00000008":
                shutil.rmtree(path)
    before_it = {name: first_steps(folder) for name, (_, _, folder) in jobs.items()}
    run_ranks(after, list(jobs.values()), tmp_path)
    for name, (_, _, folder) in jobs.items():
        expected, found = final_weights(Run(trained[1] / name)), final_weights(Run(folder))
        for key, weight in expected.items():
            torch.testing.assert_close(found[key], weight, rtol=1e-2, atol=2e-4)
        assert len(losses(Run(folder))) == len(losses(Run(trained[1] / name)))
        assert first_steps(folder) == before_it[name], "with the speeds of then: it went on, and did not begin anew"
    drawn = json.loads((tmp_path / "uniform" / "recorded-0.json").read_text())
    assert min(step for _, step, _ in drawn) == 8


LEAVING = """
from pathlib import Path
import torch
from torch.nn.parallel import DistributedDataParallel
from parnas.training.distributed import _leave, join_processes

def threads():
    return [path.read_text() for path in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop\\n")

ranks = join_processes(cuda=False)
network = DistributedDataParallel(torch.nn.Linear(2, 2))
network(torch.ones(1, 2)).sum().backward()
assert ranks.max(3) == 3
before = threads()
_leave()
print(before, threads())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_threads_that_processes_spoke_by_last_end_when_they_leave() -> None:
    """Else one that still holds a tensor aborts the process, at times, when the interpreter ends."""
    told = start_ranks(2, ["-c", LEAVING])
    assert all(ended.returncode == 0 for ended in told), told
    for ended in told:
        before, after = map(int, ended.stdout.split())
        assert before > 0
        assert after == before // 2, "those of DistributedDataParallel, which torch keeps"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start_torchrun(config: Config, folder: Path, *options: str) -> subprocess.Popen[str]:
    path = folder.with_suffix(".yaml")
    path.write_text(dump_config(config))
    # Without the dashes torchrun takes --run for an abbreviation of an option of its own.
    command = [*TORCHRUN, *options, "--", str(ROOT / "retrain.py"), str(path), "--run", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_until(holds: Callable[[], object], process: subprocess.Popen[str]) -> None:
    for _ in range(2400):
        if holds() or process.poll() is not None:
            return
        time.sleep(0.05)
    raise AssertionError("it does not come to hold")


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Of torchrun's children, those that train."""
    found = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            if (
                f"PPid:\t{process.pid}\n" in status.read_text()
                and b"retrain.py" in (status.parent / "cmdline").read_bytes()
            ):
                found.append(int(status.parent.name))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="the processes are found by /proc")
def test_a_process_that_dies_ends_the_job_and_torchrun_brings_it_back(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, model__arch="sf", train__steps=400, train__save_every=20, train__eval_every=400)
    config = config.replace(train__log_every=20)
    whole = retrain(config, tmp_path / "whole", Silent())
    folder = tmp_path / "run"
    process = start_torchrun(config, folder)
    wait_until(lambda: list_checkpoints(folder / "checkpoints"), process)
    os.kill(workers_of(process)[1], signal.SIGKILL)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    assert "Another process of this job was lost" in errors, errors
    assert "The last intact checkpoint is " in errors
    assert "GLHF" not in errors, "torch's own message is shown"
    kept = list_checkpoints(folder / "checkpoints")
    assert kept
    process = start_torchrun(config, folder, "--max-restarts", "3")  # as the message above advises
    wait_until(lambda: list_checkpoints(folder / "checkpoints")[-1] != kept[-1], process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    for one, other in zip(losses(whole), losses(Run(folder)), strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("one_alone", [False, True])
def test_a_signal_stops_all_processes_after_the_same_step(one_alone: bool, corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, model__arch="sf", train__steps=10**5, train__save_every=10**5, train__eval_every=10**5)
    folder = tmp_path / "run"
    process = start_torchrun(config.replace(train__log_every=10), folder)
    wait_until((folder / METRICS).exists, process)
    if one_alone:
        os.kill(workers_of(process)[1], signal.SIGTERM)
    else:
        process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=120)
    assert process.returncode != 0
    told = re.findall(r"stopped by SIGTERM after step (\d+), which is saved", errors)
    assert len(told) == 2, errors
    assert len(set(told)) == 1
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == [f"step-{int(told[0]):08d}"]


@pytest.mark.slow
def test_what_the_first_process_refuses_ends_all_with_a_message_each(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, model__arch="sf", train__steps=4)
    folder = tmp_path / "run"
    retrain(config, folder, Silent())
    _, errors = start_torchrun(config, folder).communicate(timeout=120)
    assert "is finished and stays" in errors
    assert "[process 1] error: The main process failed; see its message." in errors
    assert "gloo" not in errors, errors


def test_each_process_has_dropout_of_its_own() -> None:
    drawn = []
    for rank in range(4):
        seed_process(7, rank)
        drawn.append(torch.rand(3).tolist())
    torch.manual_seed(7)
    assert drawn[0] == torch.rand(3).tolist()
    assert len({tuple(numbers) for numbers in drawn}) == 4


@pytest.mark.parametrize("late", range(3))
def test_a_restart_reads_no_address_of_an_earlier_start(late: int) -> None:
    store = dist.HashStore()

    def meet(rank: int, start: int) -> list[bytes]:
        time.sleep(0.1 * (rank == late))
        own = own_store(store, rank, 3)
        own.set(f"address/{rank}", f"{start}:{rank}")
        return [own.get(f"address/{other}") for other in range(3)]

    with ThreadPoolExecutor(3) as threads:
        for start in range(3):
            for found in threads.map(meet, range(3), [start] * 3):
                assert found == [f"{start}:{other}".encode() for other in range(3)]


def test_rows_are_shared_out_evenly_or_not_at_all() -> None:
    shares = [DistributedContext(rank, 4).local_slice(12) for rank in range(4)]
    assert [list(range(12))[share] for share in shares] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    with pytest.raises(ParnasError, match=r"data\.batch_size gives 6 rows, which 4 processes cannot share"):
        DistributedContext(0, 4).local_slice(6)


def test_torchrun_needs_a_run_folder(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from parnas.cli.main import main

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for command, message in (
        (["search"], "torchrun needs run (--run FOLDER)"),
        (["stability"], "torchrun is for search and retrain"),
        (["baselines", str(tmp_path)], "torchrun is for search and retrain"),
        (["pipeline", "--run", str(tmp_path)], "torchrun is for search and retrain"),
        (["demo", "--run", str(tmp_path)], "torchrun is for search and retrain"),
        (["tune-eval", str(tmp_path)], "torchrun is for search and retrain"),
    ):
        with pytest.raises(SystemExit):
            main(command)
        assert f"[process 1] error: {message}" in capsys.readouterr().err


def test_a_run_of_one_process_that_was_stopped_can_be_resumed_alone(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, model__arch="sf")
    whole = retrain(config, tmp_path / "whole", Silent())
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(9))
    assert_same_weights(whole, retrain(config, tmp_path / "run", Silent()))


def adam_state(state: dict) -> dict:
    """Return the state of AdamW in a checkpoint."""
    return state["task"]["weight_optimizer"]["optimizer"]["state"]
