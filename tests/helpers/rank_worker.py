"""One of the processes of a data-parallel training: trains what a file lists and records what alpha saw.

Started with the environment that torchrun sets: python rank_worker.py JOBS.json. Each job is [phase, configuration,
folder].
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

from parnas.config.loader import load_config
from parnas.model.estimators import Gates
from parnas.nas.architecture_optimizer import ArchitectureOptimizer
from parnas.nas.search import SearchTask, search
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

PHASES = {"search": search, "retrain": retrain}


def record(lines: list[Any]) -> None:
    """Let each search note its gates and the gradients with which alpha takes its steps."""
    sample, update = SearchTask.gates, ArchitectureOptimizer.update

    def recorded_gates(self: SearchTask, step: int) -> Gates:
        gates = sample(self, step)
        weights = gates if isinstance(gates, torch.Tensor) else torch.stack([gate.weights for gate in gates])
        lines.append(["gates", step, weights.tolist()])
        return gates

    def recorded_update(self: ArchitectureOptimizer, step: int) -> None:
        lines.append(["gradient", step, [alpha.grad.tolist() for alpha in self.supernet.alphas()]])
        update(self, step)

    SearchTask.gates, ArchitectureOptimizer.update = recorded_gates, recorded_update  # type: ignore[method-assign]


def main(jobs: Path) -> None:
    lines: list[Any] = []
    record(lines)
    for phase, config, folder in json.loads(jobs.read_text()):
        lines.clear()
        run = PHASES[phase](load_config(config), Path(folder), Silent())
        assert run.summary().kind == phase  # there for every process, not for the first alone
        (run.folder / f"recorded-{os.environ['RANK']}.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
