"""A study without training: perplexities that are a function of the architecture."""

import os
import time
from pathlib import Path

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.nas.cost import count_costs
from parnas.studies import optuna_study
from parnas.studies.blackbox import BlackboxTask, blackbox, open_study
from parnas.training.progress import Silent

STORAGES = ["sqlite:///{}/study.db", "journal:{}/study.log"]


class FakePerplexity:
    """A stand-in for training that computes a perplexity from the architecture, and records each call."""

    def __init__(self, log: Path | None = None, seconds: float = 0.0) -> None:
        self.asked: list[str] = []
        self.log, self.seconds = log, seconds

    def __call__(self, number: int, architecture: Architecture) -> float:
        self.asked.append(str(architecture.canonical()))
        self.write("begun", number, architecture)
        time.sleep(self.seconds)
        self.write("ended", number, architecture)
        return 100.0 - sum((3 if letter == "s" else 2) / n for n, letter in enumerate(architecture.canonical(), 1))

    def write(self, event: str, number: int, architecture: Architecture) -> None:
        if self.log is not None:
            with self.log.open("a") as file:
                file.write(f"{event} {number} {architecture.canonical()} {os.getpid()}\n")


class BreakingPerplexity(FakePerplexity):
    """A stand-in for training that raises an error in some trials, or for some networks."""

    def __init__(self, error: BaseException | type[BaseException], at: set[int | str]) -> None:
        super().__init__()
        self.error, self.at = error, at

    def __call__(self, number: int, architecture: Architecture) -> float:
        value = super().__call__(number, architecture)
        if number in self.at or self.asked[-1] in self.at:
            raise self.error
        return value


def make_task(perplexity: FakePerplexity, blocks: int = 3, seed: int = 1, **fingerprint: object) -> BlackboxTask:
    config = Config().replace(search__blocks=blocks, runtime__seed=seed)
    costs = count_costs(config, "macs")
    return BlackboxTask(config.search.block_spaces, costs, perplexity, "counted", fingerprint, config, 10)


def run_study(url: str, trials: int, sampler: str = "tpe", seed: int = 1, blocks: int = 3):
    """Return the study at a URL after some trials of one worker, and what was evaluated for it."""
    perplexity = FakePerplexity()
    task = make_task(perplexity, blocks, seed)
    study = open_study(url, "test", sampler, task)
    blackbox(study, task, trials, Silent())
    return study, perplexity


class Printing(Silent):
    """Prints notes."""

    def note(self, text: str) -> None:
        print(text, flush=True)


def work(url: str, log: Path, trials: int, seconds: float) -> None:
    """Be a worker of the study `test` of 4 blocks, with frequent heartbeats."""
    optuna_study.HEARTBEAT_SECONDS, optuna_study.GRACE_SECONDS = 1, 2
    task = make_task(FakePerplexity(log, seconds), 4)
    blackbox(open_study(url, "test", "tpe", task, Printing()), task, trials, Printing())
