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
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from conftest import small_config
from helpers.rank_worker import call_command, count_threads, run_ranks, start_ranks, train, wait_for_ranks
from helpers.training_helpers import final_weights

from parnas.config.loader import Config, dump_config
from parnas.errors import ParnasError
from parnas.runs.run import METRICS, Run
from parnas.training.checkpoints import list_checkpoints, load_state
from parnas.training.device import seed_process
from parnas.training.distributed import DistributedContext, own_store
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

ROOT = Path(__file__).resolve().parents[2]
STEPS, KILLED_AFTER = 12, 8
ESTIMATORS = {
    "soft": {},
    "straight_through": {"search__alpha_split": 0.2, "search__alpha_every": 2},
    "gdas": {"search__gate_samples": 4, "train__accumulate": 2},
    "single_path": {"search__candidate_dropout": 0.2},
    # Alpha starts later here: at first all paths have the same loss but for rounding. The paths of two processes may
    # differ in whether they have a layer with compressed memory.
    "uniform": {
        **{"search__alpha_every": 1, "search__uniform_fraction": 0.8, "search__alpha_start_step": 5},
        **{"search__space": ("s", "c", "f", "i"), "model__memory__cmem_len": 4, "model__memory__ratio": 2},
    },
}
NETWORKS = {
    "plain": {"model__arch": "sfs"},
    "clusters": {"model__arch": "sf", "model__cutoffs": (5, 12), "model__norm": "pre"},
    "compressive": {"model__arch": "cfc", "model__memory__cmem_len": 4, "model__memory__ratio": 2},
    "accumulated": {"model__arch": "sfs", "train__accumulate": 2},
    "checkpointed": {"model__arch": "sfs", "runtime__checkpoint_activations": True},
    "muon": {"model__arch": "sfs", "train__optimizer": "muon"},
    "mixers": {"model__arch": "k g r s:window=5"},
}
INHERITED = "inherited"  # from the weights of the search `uniform`
DISTILLED = "local_distillation"  # a search in a trained network
HEALED = "healed"  # from the weights of that search, with the trained network as its teacher
PARENT_SPACE = (("s", "s:heads=1", "k", "i"), ("f", "f:d_inner=16", "i"), ("s", "k", "r", "i"))
WITH_DROPOUT = {"model__arch": "sf", "model__dropout": 0.2}  # each process has masks of its own


def make_config(corpus: Path, **changes: object) -> Config:
    schedule = {"search__steps": STEPS, "train__steps": STEPS, "search__alpha_start_step": 2, "train__log_every": 1}
    return small_config(corpus, **{"data__batch_size": 16, "model__dropout": 0.0, **schedule, **changes})


def write_job(phase: str, config: Config, folder: Path) -> tuple[str, Path, Path]:
    path = folder.with_suffix(".yaml")
    path.write_text(dump_config(config))
    return phase, path, folder


@pytest.fixture(scope="module")
def trained(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of processes, a folder with a run for each estimator and network."""
    folders = {count: tmp_path_factory.mktemp(f"ranks-{count}") for count in (1, 2)}
    for count, folder in folders.items():
        jobs = [
            write_job("search", make_config(corpus, search__estimator=name, **changes), folder / name)
            for name, changes in ESTIMATORS.items()
        ]
        jobs += [
            write_job("retrain", make_config(corpus, **changes), folder / name) for name, changes in NETWORKS.items()
        ]
        inheriting = make_config(corpus, model__arch="sfi", train__inherit=str(folder / "uniform"))
        jobs.append(write_job("retrain", inheriting, folder / INHERITED))
        jobs.append(write_job("retrain", make_config(corpus, **WITH_DROPOUT), folder / "dropout"))
        run_ranks(count, folder / "errors", train, jobs)
    return folders


def losses(run: Run) -> list[tuple[int, str, float]]:
    """Losses; those of compression and of local distillation come as of other splits."""
    found = []
    for line in run.metrics():
        values = {line.split: line.loss, "compression": line.compression_loss, "local": line.local_loss}
        if line.local_loss is not None:  # in place of a loss of the language model
            del values[line.split]
        found += [(line.step, name, loss) for name, loss in values.items() if loss is not None]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ESTIMATORS, *NETWORKS, INHERITED])
def test_several_processes_train_as_one(name: str, trained: dict[int, Path]) -> None:
    assert_equal_trainings(Run(trained[1] / name), Run(trained[2] / name))


def assert_equal_trainings(alone: Run, together: Run) -> None:
    """Compare losses and weights of two trainings, within rounding."""
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
def test_all_processes_draw_the_same_and_alpha_learns_from_all_rows(name: str, trained: dict[int, Path]) -> None:
    alone = json.loads((trained[1] / name / "recorded-0.json").read_text())
    assert {kind for kind, _, _ in alone} == {"gates", "gradient"}
    for rank in range(2):
        recorded = json.loads((trained[2] / name / f"recorded-{rank}.json").read_text())
        assert len(recorded) == len(alone)
        for (kind, step, expected), (other_kind, other_step, found) in zip(alone, recorded, strict=True):
            assert (kind, step) == (other_kind, other_step)
            scale = np.abs(expected).max()
            np.testing.assert_allclose(found, expected, rtol=1e-2, atol=2e-3 * scale)
    for one, other in zip(*(Run(trained[n] / name).pi_records() for n in (1, 2)), strict=True):
        np.testing.assert_allclose(one.pi, other.pi, atol=2e-4)


@pytest.fixture(scope="module")
def distilled(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """By number of processes, a folder with a search in the same trained network, and a healing."""
    place = tmp_path_factory.mktemp("distilled")
    parent = str(retrain(make_config(corpus, model__arch="sfs"), place / "parent", Silent()).folder)
    for count in (1, 2):
        folder = place / str(count)
        folder.mkdir()
        searching = make_config(corpus, search__parent=parent, search__space=PARENT_SPACE)
        healing = {"train__inherit": str(folder / DISTILLED), "train__teachers": (parent,)}
        jobs = [
            write_job("search", searching, folder / DISTILLED),
            write_job("retrain", make_config(corpus, model__arch="s:heads=1 f k", **healing), folder / HEALED),
        ]
        run_ranks(count, folder / "errors", train, jobs)
    return {count: place / str(count) for count in (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("name", [DISTILLED, HEALED])
def test_several_processes_distil_as_one(name: str, distilled: dict[int, Path]) -> None:
    assert_equal_trainings(*(Run(distilled[count] / name) for count in (1, 2)))


@pytest.mark.slow
def test_processes_of_a_local_distillation_hold_equal_weights(distilled: dict[int, Path]) -> None:
    folder = distilled[2] / DISTILLED
    first, second = (json.loads((folder / f"recorded-{rank}.json").read_text()) for rank in range(2))
    assert [step for _, step, _ in first] == list(range(1, STEPS + 1))
    assert first == second
    one, other = (Run(distilled[count] / DISTILLED) for count in (1, 2))
    assert one.summary().arch == other.summary().arch
    np.testing.assert_allclose(one.pi_records()[-1].pi, other.pi_records()[-1].pi, atol=2e-3)


@pytest.mark.slow
def test_what_no_process_sampled_keeps_no_gradient(trained: dict[int, Path], corpus: Path) -> None:
    """A candidate that did not run in a step is not updated: its optimizer counts fewer steps."""
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
    alone, together = ({path.name for path in (trained[n] / "plain").iterdir()} for n in (1, 2))
    assert together - alone == {"recorded-1.json"}
    assert alone <= together
    steps = [line.step for line in Run(trained[2] / "plain").metrics() if line.split == "train"]
    assert steps == list(range(1, STEPS + 1))


def first_steps(folder: Path) -> list[dict[str, object]]:
    return [line for line in Run(folder).metrics() if line.step <= KILLED_AFTER]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(1, 4), (2, 1), (2, 2)])
def test_a_run_resumes_with_another_number_of_processes(
    before: int, after: int, corpus: Path, tmp_path: Path, trained: dict[int, Path]
) -> None:
    """A run of `before` processes that was killed, and that `after` finish, ends as one process would have ended it.

    With dropout it ends as the same processes would have ended it, to the last bit.
    """
    jobs = {
        "uniform": ("search", make_config(corpus, search__estimator="uniform", **ESTIMATORS["uniform"])),
        "compressive": ("retrain", make_config(corpus, **NETWORKS["compressive"])),
    }
    if before == after:
        jobs["dropout"] = ("retrain", make_config(corpus, **WITH_DROPOUT))
    for name in jobs:
        shutil.copytree(trained[before] / name, tmp_path / name)
        (tmp_path / name / "summary.json").unlink()
        for path in list_checkpoints(tmp_path / name / "checkpoints"):
            if path.name > f"step-{KILLED_AFTER:08d}":
                shutil.rmtree(path)
    earlier = {name: first_steps(tmp_path / name) for name in jobs}
    listed = [write_job(phase, config, tmp_path / name) for name, (phase, config) in jobs.items()]
    run_ranks(after, tmp_path / "errors", train, listed)
    for name in jobs:
        exact = name == "dropout"
        whole, resumed = Run(trained[before if exact else 1] / name), Run(tmp_path / name)
        weights = final_weights(resumed)
        for key, weight in final_weights(whole).items():
            torch.testing.assert_close(weights[key], weight, rtol=0 if exact else 1e-2, atol=0 if exact else 2e-4)
        assert len(losses(resumed)) == len(losses(whole))
        assert first_steps(resumed.folder) == earlier[name], "the speeds are those before the kill: it was resumed"
    gates_and_gradients = json.loads((tmp_path / "uniform" / "recorded-0.json").read_text())
    assert min(step for _, step, _ in gates_and_gradients) == KILLED_AFTER


@pytest.mark.skipif(sys.platform != "linux", reason="names of threads are read from /proc")
def test_gloo_threads_of_the_last_messages_end_when_a_process_leaves(tmp_path: Path) -> None:
    """A thread that still holds a tensor can abort the process when the interpreter ends."""
    run_ranks(2, tmp_path, count_threads, tmp_path)
    for rank in range(2):
        before, after = json.loads((tmp_path / f"{rank}.json").read_text())
        assert before > 0
        assert after == before // 2, "those of DistributedDataParallel, which torch keeps"


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def start_torchrun(config: Config, folder: Path, *options: str) -> subprocess.Popen[str]:
    path = folder.with_suffix(".yaml")
    path.write_text(dump_config(config))
    # Without the dashes torchrun takes --run for an abbreviation of an option of its own.
    command = [*TORCHRUN, *options, "--", str(ROOT / "retrain.py"), str(path), "--run", str(folder)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_until(holds: Callable[[], object], process: subprocess.Popen[str] | None = None) -> None:
    for _ in range(6000):
        if holds():
            return
        assert process is None or process.poll() is None, process.communicate()
        time.sleep(0.02)
    raise AssertionError("the condition did not become true")


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
def test_torchrun_restarts_a_job_whose_process_died(corpus: Path, tmp_path: Path) -> None:
    config = make_config(corpus, model__arch="sf", train__steps=300, train__save_every=10, train__eval_every=300)
    config = config.replace(train__log_every=20)
    whole = retrain(config, tmp_path / "whole", Silent())
    folder = tmp_path / "run"
    process = start_torchrun(config, folder, "--max-restarts", "3")
    wait_until(lambda: list_checkpoints(folder / "checkpoints"), process)
    os.kill(workers_of(process)[0], signal.SIGKILL)
    _, errors = process.communicate(timeout=180)
    assert process.returncode == 0, errors
    assert "Another process of this job was lost" in errors, errors
    assert "The last intact checkpoint is " in errors
    assert "GLHF" not in errors, "torch's own message is shown"
    for one, other in zip(losses(whole), losses(Run(folder)), strict=True):
        assert one[:2] == other[:2]
        assert one[2] == pytest.approx(other[2], rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("signalled", [(1,), (0, 1)])
def test_a_signal_stops_all_processes_after_the_same_step(
    signalled: tuple[int, ...], corpus: Path, tmp_path: Path
) -> None:
    config = make_config(corpus, model__arch="sf", train__steps=10**5, train__save_every=10**5, train__eval_every=10**5)
    _, path, folder = write_job("retrain", config.replace(train__log_every=10), tmp_path / "run")
    processes = start_ranks(2, tmp_path / "errors", call_command, ["retrain", str(path), "--run", str(folder)])
    wait_until((folder / METRICS).exists)
    for rank in signalled:
        os.kill(processes[rank].pid or 0, signal.SIGTERM)
    codes, errors = wait_for_ranks(processes, tmp_path / "errors")
    assert codes == [128 + signal.SIGTERM] * 2, errors
    steps = Counter(re.findall(r"stopped by SIGTERM after step (\d+), which is saved", "".join(errors)))
    ((step, count),) = steps.items()
    assert count == 2
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == [f"step-{int(step):08d}"]


@pytest.mark.slow
def test_an_error_of_the_main_process_ends_all_with_a_message_each(
    corpus: Path, tmp_path: Path, trained: dict[int, Path]
) -> None:
    arguments = ["retrain", str(trained[1] / "plain.yaml"), "--run", str(trained[1] / "plain")]
    codes, errors = wait_for_ranks(start_ranks(2, tmp_path, call_command, arguments), tmp_path)
    assert codes == [2, 2]
    assert "is finished; choose another folder" in errors[0]
    assert "[process 1] error: Another process failed," in errors[1]
    assert "gloo" not in "".join(errors)


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
    with pytest.raises(ParnasError, match=r"data\.batch_size.* 6 .* 4 "):
        DistributedContext(0, 4).local_slice(6)


def test_torchrun_needs_a_run_folder(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from parnas.cli.main import main

    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    for command, message in (
        (["search"], "A training with torchrun needs run (--run FOLDER)"),
        (["stability"], "torchrun is for search and retrain"),
        (["baselines", str(tmp_path)], "torchrun is for search and retrain"),
        (["pipeline", "--run", str(tmp_path)], "torchrun is for search and retrain"),
        (["demo", "--run", str(tmp_path)], "torchrun is for search and retrain"),
        (["tune-eval", str(tmp_path)], "torchrun is for search and retrain"),
    ):
        with pytest.raises(SystemExit):
            main(command)
        assert f"[process 1] error: {message}" in capsys.readouterr().err
