"""Runs of the soak test: commands in separate processes, and the comparison of what they leave with a whole run."""

import multiprocessing
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from parnas.cli.main import main
from parnas.config.loader import Config, dump_config
from parnas.runs.run import METRICS, PI, SPEED_KEYS, Run
from parnas.training.checkpoints import list_checkpoints

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 300
WORDS = ("the old lobster", "a small boat", "Ada", "the engine", "finds", "carries", "forgets", "a long memory", ".")


@dataclass(frozen=True)
class Phase:
    """A training that is disturbed, and the same training undisturbed."""

    command: str  # search or retrain
    config: Path
    whole: Path  # the finished run folder to compare with


class Ended(NamedTuple):
    """Exit code and error messages of a process that has ended."""

    code: int
    errors: str

    @property
    def told(self) -> bool:
        """Whether it printed no traceback."""
        return "Traceback" not in self.errors


@dataclass
class Difference:
    """Counts of what differs between two runs; all zero if the resumed run equals the uninterrupted one."""

    weights: int = 0  # tensors that are not equal bit for bit
    lost_lines: int = 0  # of metrics and pi
    more_lines: int = 0
    other_lines: int = 0

    def __bool__(self) -> bool:
        return bool(self.weights or self.lost_lines or self.more_lines or self.other_lines)


@dataclass
class Row:
    """Results of all tries of one kind of fault."""

    fault: str
    what: str  # the run is expected to do
    tries: int = 0
    bit_identical: int = 0  # tries after which the finished run equals the uninterrupted one
    lost_lines: int = 0
    told: int = 0  # tries that ended with the expected message and without a traceback
    detail: dict[str, int] = field(default_factory=dict)

    def count(self, difference: Difference, told: bool = True) -> None:
        """Add the result of one try."""
        self.tries += 1
        self.bit_identical += not difference
        self.lost_lines += difference.lost_lines
        self.told += told


def write_corpus(folder: Path) -> None:
    """Write sentences of a small vocabulary in three splits."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for split, lines in (("train", 1500), ("valid", 60), ("test", 60)):
        text = "".join(" ".join(draw.choices(WORDS, k=8)) + "\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")


def make_config(corpus: Path, steps: int, save_every: int) -> Config:
    """Return a small configuration for both phases, with dropout, so that random numbers matter."""
    settings: dict[str, Any] = {
        **{"data__corpus": str(corpus), "data__tokenizer__kind": "word", "data__batch_size": 4, "data__tgt_len": 8},
        **{"model__d_model": 16, "model__n_heads": 2, "model__d_inner": 32, "model__mem_len": 8, "model__arch": "sfsf"},
        **{"model__dropout": 0.1, "search__blocks": 4, "search__steps": steps, "search__alpha_start_step": steps // 10},
        **{"search__cost__metric": "macs", "train__steps": steps, "train__log_every": 5, "train__eval_every": 50},
        **{"train__save_every": save_every, "runtime__device": "cpu", "runtime__threads": 1},
    }
    return Config().replace(**settings)


def prepare(folder: Path, config: Config) -> list[Phase]:
    """Train both phases undisturbed."""
    path = folder / "config.yaml"
    path.write_text(dump_config(config))
    phases = [Phase(command, path, folder / f"whole-{command}") for command in ("search", "retrain")]
    for phase in phases:
        ended = finish(start(phase, phase.whole))
        assert ended.code == 0, ended.errors
    return phases


def start(phase: Phase, folder: Path, before: Callable[[], object] | None = None) -> "Command":
    """Start the command of a phase, which is the same whether the run is new or resumed.

    `before` is called in the new process before the command, to limit or to disturb it.
    """
    return Command([phase.command, str(phase.config), "--run", str(folder)], before)


class Command:
    """A command of parnas in a process forked from one that has imported all libraries, which saves seconds each."""

    def __init__(self, arguments: list[str], before: Callable[[], object] | None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(
            [
                "parnas.cli.main",
                "parnas.nas.search",
                "parnas.training.retrain",
                "torch.utils.tensorboard",
                "parnas.figures.draw",
            ]
        )
        descriptor, name = tempfile.mkstemp(suffix=".err")
        os.close(descriptor)
        self.errors = Path(name)
        self.process: BaseProcess = context.Process(target=run_command, args=(arguments, self.errors, before))
        self.process.start()

    def send(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        if self.running():
            assert self.process.pid is not None
            os.kill(self.process.pid, number)

    def running(self) -> bool:
        """Return whether the process has not ended."""
        return self.process.is_alive()


def run_command(arguments: list[str], errors: Path, before: Callable[[], object] | None) -> None:
    """Run a command in this process, with its output thrown away and its error messages written to a file."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    os.dup2(os.open(errors, os.O_WRONLY), 2)
    sys.argv = ["parnas", *arguments]
    if before is not None:
        before()
    main(arguments)


def finish(command: Command) -> Ended:
    """Wait for the end of a command; return its exit code, that of `subprocess` for a signal, and its messages."""
    command.process.join(PATIENCE_SECONDS)
    code = command.process.exitcode
    assert code is not None, "the command does not end"
    errors = command.errors.read_text(encoding="utf-8")
    command.errors.unlink()
    return Ended(code, errors)


def wait_until(holds: Callable[[], bool], command: Command, pause: float = 0.002) -> bool:
    """Wait until a condition holds or the command has ended; return whether it holds."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while command.running() and time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(pause)
    return holds()


def newest(folder: Path) -> Path | None:
    """Return the newest checkpoint, complete or not."""
    return max(list_checkpoints(folder / "checkpoints"), default=None)


def trained_on(folder: Path, before: Path | None) -> Callable[[], bool]:
    """Return a test whether there is a newer checkpoint than `before`."""
    return lambda: newest(folder) != before


def writing(folder: Path) -> bool:
    """Return whether a checkpoint is half written."""
    return any((folder / "checkpoints").glob(".step-*.tmp"))


def kill_after_progress(phase: Phase, folder: Path, number: int = signal.SIGKILL) -> Ended:
    """Start or resume a run, and send a signal soon after its next checkpoint."""
    before = newest(folder)
    command = start(phase, folder)
    wait_until(trained_on(folder, before), command)
    command.send(number)
    return finish(command)


def resume(phase: Phase, folder: Path) -> tuple[Difference, Ended]:
    """Resume a run until it is finished; return its difference from the undisturbed run, and how it ended."""
    ended = finish(start(phase, folder)) if not Run(folder).finished() else Ended(0, "")
    return compare(phase.whole, folder), ended


def compare(whole: Path, other: Path) -> Difference:
    """Return the difference of two finished runs in weights, metrics and pi, without speeds and times."""
    if not Run(other).finished():
        return Difference(weights=len(weights_of(whole)))
    ours, theirs = weights_of(other), weights_of(whole)
    same = {name for name in theirs if name in ours and torch.equal(ours[name], theirs[name])}
    difference = Difference(weights=len(ours.keys() | theirs.keys()) - len(same))
    assert not writing(other), "a half written checkpoint was left behind"
    for name in (METRICS, PI):
        if not (whole / name).is_file():
            continue
        found, expected = lines_of(other, name), lines_of(whole, name)
        difference.lost_lines += len(expected.keys() - found.keys())
        difference.more_lines += len(Run(other).raw_lines(name)) - len(expected.keys() & found.keys())
        difference.other_lines += sum(found[key] != expected[key] for key in expected.keys() & found.keys())
    return difference


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """Return the final weights of a run."""
    return load_file(list_checkpoints(folder / "checkpoints")[-1] / "model.safetensors")


def lines_of(folder: Path, name: str) -> dict[tuple[int, object], dict[str, Any]]:
    """Return the lines of a file by step and split, without speeds."""
    return {
        (record["step"], record.get("split")): {key: value for key, value in record.items() if key not in SPEED_KEYS}
        for record in Run(folder).raw_lines(name)
    }
