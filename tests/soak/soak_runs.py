"""Runs of the soak test: commands in processes of their own, and whether what they leave is what it should be."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

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
    """How a process ended."""

    code: int
    errors: str

    @property
    def told(self) -> bool:
        """Whether it ended by a message, not by a traceback."""
        return "Traceback" not in self.errors


@dataclass
class Difference:
    """What two runs differ in; nothing, where one was gone on with as it should be."""

    weights: int = 0  # tensors that are not equal bit for bit
    lost_lines: int = 0  # of metrics and pi
    more_lines: int = 0
    other_lines: int = 0

    def __bool__(self) -> bool:
        return bool(self.weights or self.lost_lines or self.more_lines or self.other_lines)


@dataclass
class Row:
    """What came of a kind of fault."""

    fault: str
    what: str  # happens
    tries: int = 0
    bit_identical: int = 0  # tries after which the run came to the same end
    lost_lines: int = 0
    told: int = 0  # tries in which nothing but a message was seen
    detail: dict[str, int] = field(default_factory=dict)

    def count(self, difference: Difference, told: bool = True) -> None:
        """Take in a try."""
        self.tries += 1
        self.bit_identical += not difference
        self.lost_lines += difference.lost_lines
        self.told += told


def write_corpus(folder: Path) -> None:
    """Sentences of a small vocabulary in three splits."""
    folder.mkdir(parents=True)
    draw = random.Random(0)
    for split, lines in (("train", 1500), ("valid", 60), ("test", 60)):
        text = "".join(" ".join(draw.choices(WORDS, k=8)) + "\n" for _ in range(lines))
        (folder / f"{split}.txt").write_text(text, encoding="utf-8")


def make_config(corpus: Path, steps: int, save_every: int) -> Config:
    """Both phases small, with dropout, so that random numbers count."""
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


def start(
    phase: Phase, folder: Path, environment: Mapping[str, str] | None = None, **given: Any
) -> subprocess.Popen[str]:
    """The command in a process of its own: the same one, whether the run is new or to be gone on with."""
    command = [sys.executable, str(ROOT / f"{phase.command}.py"), str(phase.config), "--run", str(folder)]
    return subprocess.Popen(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        **given,
    )


def finish(process: subprocess.Popen[str]) -> Ended:
    """Wait for a process."""
    _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    return Ended(process.returncode, errors)


def wait_until(holds: Callable[[], bool], process: subprocess.Popen[str], pause: float = 0.002) -> bool:
    """Wait while the process goes on; whether it came to hold."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if holds():
            return True
        time.sleep(pause)
    return holds()


def newest(folder: Path) -> Path | None:
    """The newest checkpoint, whole or not."""
    return max(list_checkpoints(folder / "checkpoints"), default=None)


def trained_on(folder: Path, before: Path | None) -> Callable[[], bool]:
    """Whether a checkpoint came after `before`."""
    return lambda: newest(folder) != before


def writing(folder: Path) -> bool:
    """Whether a checkpoint is half written."""
    return any((folder / "checkpoints").glob(".step-*.tmp"))


def kill_after_progress(phase: Phase, folder: Path, number: int = signal.SIGKILL) -> Ended:
    """Start or go on, and send a signal soon after the next checkpoint."""
    before = newest(folder)
    process = start(phase, folder)
    wait_until(trained_on(folder, before), process)
    process.send_signal(number)
    return finish(process)


def go_on(phase: Phase, folder: Path) -> tuple[Difference, Ended]:
    """Let a run come to its end; how it differs from the undisturbed one."""
    ended = finish(start(phase, folder)) if not Run(folder).finished() else Ended(0, "")
    return compare(phase.whole, folder), ended


def compare(whole: Path, other: Path) -> Difference:
    """How a finished run differs from another in weights, metrics and pi; speeds and times do not count."""
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
    """The final weights of a run."""
    return load_file(list_checkpoints(folder / "checkpoints")[-1] / "model.safetensors")


def lines_of(folder: Path, name: str) -> dict[tuple[int, object], dict[str, Any]]:
    """Lines by step and split, without speeds."""
    return {
        (record["step"], record.get("split")): {key: value for key, value in record.items() if key not in SPEED_KEYS}
        for record in Run(folder).raw_lines(name)
    }
