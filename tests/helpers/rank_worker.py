"""Processes of a data-parallel training, started as torchrun does but from a process that has torch imported."""

import atexit
import json
import os
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from conftest import free_port
from helpers.processes import CONTEXT

from parnas.config.loader import load_config
from parnas.model.gates import Gates
from parnas.nas.architecture_optimizer import ArchitectureOptimizer
from parnas.nas.search import SearchTask
from parnas.pretrained.local_distillation import LocalDistillation, run_search
from parnas.training.distributed import _leave, join_processes
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

PHASES = {"search": run_search, "retrain": retrain}


def start_ranks(count: int, folder: Path, function: Callable[..., None], *arguments: object) -> list[BaseProcess]:
    """Start processes that call a function; rank N writes its standard error to `folder/N.err`."""
    folder.mkdir(parents=True, exist_ok=True)
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
    processes: list[BaseProcess] = []
    for rank in range(count):
        environment = {name: str(value) for name, value in {**address, "RANK": rank, "LOCAL_RANK": rank}.items()}
        process = CONTEXT.Process(
            target=run_rank, args=(environment, folder / f"{rank}.err", function, arguments), daemon=True
        )
        process.start()
        processes.append(process)
    return processes


def run_rank(environment: dict[str, str], errors: Path, function: Callable[..., None], arguments: tuple[Any]) -> None:
    """Call the function in this process, and the exit handlers after it, which multiprocessing leaves out."""
    os.environ.update(environment, OMP_NUM_THREADS="1")
    with errors.open("w") as file:
        os.dup2(file.fileno(), 2)
    try:
        function(*arguments)
    finally:
        atexit._run_exitfuncs()


def wait_for_ranks(processes: list[BaseProcess], folder: Path) -> tuple[list[int | None], list[str]]:
    """Return the exit codes and standard errors of all processes."""
    for process in processes:
        process.join(timeout=120)
    return [process.exitcode for process in processes], [
        (folder / f"{rank}.err").read_text() for rank in range(len(processes))
    ]


def run_ranks(count: int, folder: Path, function: Callable[..., None], *arguments: object) -> None:
    """Call a function in `count` processes, and expect success."""
    codes, errors = wait_for_ranks(start_ranks(count, folder, function, *arguments), folder)
    assert codes == [0] * count, "\n".join(errors)


# Functions for the processes.


def train(jobs: list[tuple[str, Path, Path]]) -> None:
    """Train jobs of phase, configuration and run folder; write what alpha saw to `recorded-RANK.json` in the folder."""
    lines: list[Any] = []
    record(lines)
    for phase, config, folder in jobs:
        lines.clear()
        run = PHASES[phase](load_config(str(config)), folder, Silent())
        assert run.summary().kind == phase  # there for every process, not for the first alone
        (run.folder / f"recorded-{os.environ['RANK']}.json").write_text(json.dumps(lines))


def record(lines: list[Any]) -> None:
    """Let each search note its gates and the gradients with which alpha takes its steps.

    A search in a trained network notes the sum of each tensor after each step.
    """
    sample, update, end_step = SearchTask.gates, ArchitectureOptimizer.update, LocalDistillation.end_step

    def recorded_gates(self: SearchTask, step: int) -> list[Gates]:
        samples = sample(self, step)
        for gates in samples:
            weights = gates if isinstance(gates, torch.Tensor) else torch.stack([gate.weights for gate in gates])
            lines.append(["gates", step, weights.tolist()])
        return samples

    def recorded_update(self: ArchitectureOptimizer, step: int) -> None:
        lines.append(["gradient", step, [alpha.grad.tolist() for alpha in self.supernet.alphas()]])
        update(self, step)

    def recorded_end(self: LocalDistillation, step: int) -> None:
        end_step(self, step)
        lines.append(["weights", step, [float(each.double().sum()) for each in self.supernet.state_dict().values()]])

    LocalDistillation.end_step = recorded_end  # type: ignore[method-assign]
    SearchTask.gates, ArchitectureOptimizer.update = recorded_gates, recorded_update  # type: ignore[method-assign]


def call_command(arguments: list[str]) -> None:
    """Call the command line."""
    from parnas.cli.main import main

    main(arguments)


def count_threads(folder: Path) -> None:
    """Write the number of gloo's threads before and after this process leaves the others."""

    def threads() -> int:
        return [path.read_text() for path in Path("/proc/self/task").glob("*/comm")].count("pt_gloo_runloop\n")

    processes = join_processes(cuda=False)
    network = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 2))
    network(torch.ones(1, 2)).sum().backward()
    assert processes.max(3) == 3
    before = threads()
    _leave()
    (folder / f"{processes.rank}.json").write_text(json.dumps([before, threads()]))
