"""A study without training: perplexities that follow from the string."""

import os
import time
from pathlib import Path

from parnas.architecture import Architecture
from parnas.config import Config
from parnas.nas.blackbox import blackbox, open_study
from parnas.nas.cost import count_costs
from parnas.nas.trials import Task
from parnas.training.reporter import Silent

STORAGES = ["sqlite:///{}/study.db", "journal:{}/study.log"]


class Counting:
    """A stand-in for training: a perplexity that follows from the string, every call written down."""

    def __init__(self, log: Path | None = None, seconds: float = 0.0) -> None:
        self.asked: list[str] = []
        self.log, self.seconds = log, seconds

    def __call__(self, number: int, architecture: Architecture) -> float:
        self.asked.append(str(architecture.canonical()))
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{architecture.canonical()} {number} {os.getpid()}\n")
        time.sleep(self.seconds)
        return 100.0 - sum((3 if letter == "s" else 2) / n for n, letter in enumerate(architecture.canonical(), 1))


def make_task(perplexity: Counting, blocks: int = 3, seed: int = 1, **terms: object) -> Task:
    config = Config().replace(search__blocks=blocks, runtime__seed=seed)
    return Task(config.search.block_spaces, count_costs(config, "macs"), perplexity, "counted", terms, config, 10)


def run_study(url: str, trials: int, sampler: str = "tpe", seed: int = 1, blocks: int = 3):
    """The study by that URL after so many trials of one worker, and what was evaluated for it."""
    asked = Counting()
    task = make_task(asked, blocks, seed)
    study = open_study(url, "test", sampler, task)
    blackbox(study, task, trials, Silent())
    return study, asked
