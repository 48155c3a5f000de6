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

from parnas.config import load_config
from parnas.model.estimators import Gates
from parnas.nas.search import SearchTrainer, search
from parnas.training.reporter import Silent
from parnas.training.retrain import retrain

PHASES = {"search": search, "retrain": retrain}


def record(lines: list[Any]) -> None:
    """Let each search note its gates and the gradients with which alpha takes its steps."""
    draw, begin = SearchTrainer.gates, SearchTrainer.__init__

    def gates(self: SearchTrainer) -> Gates:
        drawn = draw(self)
        weights = drawn if isinstance(drawn, torch.Tensor) else torch.stack([gate.weights for gate in drawn])
        lines.append(["gates", self.step, weights.tolist()])
        return drawn

    def __init__(self: SearchTrainer, *given: Any, **named: Any) -> None:
        begin(self, *given, **named)
        alphas = self.supernet.alphas()

        def note(*_: object) -> None:
            lines.append(["gradient", self.step, [alpha.grad.tolist() for alpha in alphas]])

        self.alpha_optimizer.register_step_pre_hook(note)

    SearchTrainer.gates, SearchTrainer.__init__ = gates, __init__  # type: ignore[method-assign]


def main(jobs: Path) -> None:
    lines: list[Any] = []
    record(lines)
    for phase, config, folder in json.loads(jobs.read_text()):
        lines.clear()
        run = PHASES[phase](load_config(config), Path(folder), Silent())
        assert run.summary()["kind"] == phase  # there for every process, not for the first alone
        (run.folder / f"recorded-{os.environ['RANK']}.json").write_text(json.dumps(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
