"""The faults of the soak test. Each function disturbs trainings in its own way and returns the results."""

import contextlib
import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from soak_runs import (
    Difference,
    Ended,
    Phase,
    Row,
    finish,
    kill_after_progress,
    newest,
    resume,
    start,
    trained_on,
    wait_until,
    writing,
)

from parnas.runs.run import Run


def kills(phases: list[Phase], folder: Path, tries: int, seed: int = 1) -> list[Row]:
    """Send SIGKILL at random moments of starting, training and saving, until the runs are finished."""
    draw, rows = random.Random(seed), []
    for phase in phases:
        row = Row(f"SIGKILL of a {phase.command}", "resumes from the newest intact checkpoint")
        row.detail = {"while saving": 0, "while starting": 0, "runs": 0}
        done = 0
        while done < tries:
            run = folder / f"killed-{phase.command}-{row.detail['runs']}"
            left = tries - done
            for _ in range(left):
                when, saved = kill_somewhere(phase, run, draw)
                if Run(run).finished():
                    break
                done += 1
                row.detail["while saving"] += saved
                row.detail["while starting"] += when == "starting"
            difference, ended = resume(phase, run)
            row.detail["runs"] += 1
            row.count(difference, ended.told)
        row.tries, runs = done, row.detail["runs"]
        row.told, row.bit_identical = (done if each == runs else 0 for each in (row.told, row.bit_identical))
        rows.append(row)
    return rows


def kill_somewhere(phase: Phase, run: Path, draw: random.Random) -> tuple[str, bool]:
    """Start or resume a run and kill it at a random moment.

    Returns the kind of moment, and whether a checkpoint was half written then.
    """
    before = newest(run)
    command = start(phase, run)
    when = draw.choices(["starting", "training", "saving"], [2, 5, 5])[0]
    if when == "starting":
        time.sleep(draw.uniform(0, 0.5))
    else:
        wait_until(trained_on(run, before), command)
        time.sleep(draw.uniform(0, 0.3))
        if when == "saving":
            wait_until(lambda: writing(run), command, pause=0.0002)
    command.send(signal.SIGKILL)
    finish(command)
    return when, writing(run)


def signals(phases: list[Phase], folder: Path, tries: int) -> list[Row]:
    """Send the signals of Ctrl-C and of clusters: the step is completed, all is saved, a message says how to resume."""
    rows = []
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        row = Row(signal.Signals(number).name, "completes the step, saves, and names the command that resumes")
        for phase in phases:
            for attempt in range(tries):
                run = folder / f"signalled-{number}-{phase.command}-{attempt}"
                ended = kill_after_progress(phase, run, number)
                told = ended.told and ended.code == 128 + number and "to resume: parnas" in ended.errors
                row.count(resume(phase, run)[0], told)
        rows.append(row)
    return rows


def damaged_files(phases: list[Phase], folder: Path, tries: int, seed: int = 2) -> list[Row]:
    """Damage the newest checkpoint (a file cut off, one bit flipped): the one before is used, with a warning."""
    draw, rows = random.Random(seed), []
    for name, damage in (("a file cut off", cut_off), ("a bit turned", turn_bit)):
        row = Row(name, "skips the checkpoint with a warning and uses the previous one")
        for attempt in range(tries):
            phase, run = phases[attempt % len(phases)], folder / f"{name}-{attempt}".replace(" ", "-")
            kill_twice(phase, run)
            checkpoint = newest(run)
            assert checkpoint is not None
            damage(checkpoint / draw.choice(["model.safetensors", "state.pt", "manifest.json"]), draw)
            difference, ended = resume(phase, run)
            row.count(difference, ended.told and "is damaged; the checkpoint before it is used" in ended.errors)
        rows.append(row)
    row = Row("half a line of metrics", "removes it, and writes each line once")
    for attempt in range(tries):
        phase, run = phases[attempt % len(phases)], folder / f"torn-{attempt}"
        kill_after_progress(phase, run)
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"step": 99999, "split": "tr')
        row.count(*with_message(resume(phase, run)))
    return [*rows, row]


def kill_twice(phase: Phase, run: Path) -> None:
    """Kill a run twice after a checkpoint; start over as often as it finishes before."""
    while True:
        kill_after_progress(phase, run)
        kill_after_progress(phase, run)
        if not Run(run).finished():
            return
        shutil.rmtree(run)


def cut_off(path: Path, draw: random.Random) -> None:
    """Shorten a file to a random length."""
    os.truncate(path, draw.randrange(path.stat().st_size))


def turn_bit(path: Path, draw: random.Random) -> None:
    """Flip one bit of a file, of a manifest one within a hash."""
    content = bytearray(path.read_bytes())
    start_at = content.index(b"sha256") + 20 if path.suffix == ".json" else 0
    end = start_at + 60 if path.suffix == ".json" else len(content)
    content[draw.randrange(start_at, end)] ^= 1 << draw.randrange(7)
    path.write_bytes(content)


def full_disk(phases: list[Phase], folder: Path, tries: int) -> list[Row]:
    """Leave no space for a checkpoint: the training ends with a message, and resumes when there is space."""
    row = Row("disk full (RLIMIT_FSIZE)", "exits with a message; resumes when there is space")
    for attempt in range(tries):
        phase, run = phases[attempt % len(phases)], folder / f"full-{attempt}"
        kill_after_progress(phase, run)
        limit = 5_000 + 3_000 * attempt
        ended = finish(start(phase, run, partial(limit_files, limit)))
        row.count(resume(phase, run)[0], ended.told and ended.code == 2)
    rows = [row]
    with small_disk(folder / "disk", "size=700k") as disk:
        if disk is not None:
            row = Row("disk full (a file system of 700 kB)", "exits with a message; resumes when there is space")
            for attempt in range(tries):
                phase, run = phases[attempt % len(phases)], disk / f"run-{attempt}"
                ended = finish(start(phase, run))
                moved = folder / f"moved-{attempt}"
                shutil.copytree(run, moved)
                shutil.rmtree(run)
                row.count(resume(phase, moved)[0], ended.told and ended.code == 2)
            rows.append(row)
    return rows


def limit_files(size: int) -> None:
    """Limit the size of files that this process writes, in bytes; beyond it, writing raises OSError."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))


@contextlib.contextmanager
def small_disk(place: Path, options: str) -> Iterator[Path | None]:
    """Mount a file system in memory; yield `None` if this user may not mount."""
    place.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(place)], check=False).returncode == 0
    try:
        yield place if mounted else None
    finally:
        if mounted:
            subprocess.run(["umount", str(place)], check=False)


def read_only(phases: list[Phase], folder: Path, tries: int) -> list[Row]:
    """Make the file system of a run read-only: the command is refused, and the run is unchanged."""
    with small_disk(folder / "read-only", "size=20m") as disk:
        if disk is None:
            return []
        row = Row("a read-only file system", "refuses with a message; works in another folder")
        for attempt in range(tries):
            phase, run = phases[attempt % len(phases)], disk / f"run-{attempt}"
            kill_after_progress(phase, run)
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            ended = finish(start(phase, run))
            subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
            row.count(resume(phase, run)[0], ended.told and ended.code == 2)
        return [row]


def two_at_once(phases: list[Phase], folder: Path, tries: int) -> list[Row]:
    """Start a second process on the folder of a training: it is refused, and the first is not disturbed."""
    row = Row("two runs on one folder", "refuses the second; the first continues")
    for attempt in range(tries):
        phase, run = phases[attempt % len(phases)], folder / f"twice-{attempt}"
        first = start(phase, run)
        wait_until((run / "metrics.jsonl").is_file, first)
        first.send(signal.SIGSTOP)  # so that it has not ended by then
        second = finish(start(phase, run))
        first.send(signal.SIGCONT)
        ended = finish(first)
        refused = second.told and second.code == 2 and "Another process is training into" in second.errors
        row.count(resume(phase, run)[0], refused and ended.code == 0)
    return [row]


def jumping_clock(phases: list[Phase], folder: Path, tries: int) -> list[Row]:
    """Resume a killed run with a clock that jumps by up to a day at each reading."""
    row = Row("a clock that jumps by up to a day", "continues unaffected")
    for attempt in range(tries):
        phase, run = phases[attempt % len(phases)], folder / f"clock-{attempt}"
        kill_after_progress(phase, run)
        ended = finish(start(phase, run, let_clock_jump))
        row.count(*with_message((resume(phase, run)[0], ended)))
    return [row]


def let_clock_jump() -> None:
    """Let each reading of the clock of this process be off by up to a day."""
    read_seconds, read_ns, draw = time.time, time.time_ns, random.Random(5)
    time.time = lambda: read_seconds() + draw.uniform(-86400, 86400)
    time.time_ns = lambda: read_ns() + draw.randrange(-86400 * 10**9, 86400 * 10**9)


def other_corpus(phases: list[Phase], folder: Path, tries: int) -> list[Row]:
    """Remove or change the corpus: resuming is refused until it is restored."""
    corpus, rows = Path(Run(phases[0].whole).config().data.corpus), []
    for name, disturb in (("a missing corpus", hide), ("a changed corpus", change)):
        row = Row(name, "refuses with a message; resumes when it is restored")
        for attempt in range(tries):
            phase, run = phases[attempt % len(phases)], folder / f"{name}-{attempt}".replace(" ", "-")
            kill_after_progress(phase, run)
            restore = disturb(corpus / "train.txt")
            ended = finish(start(phase, run))
            restore()
            row.count(resume(phase, run)[0], ended.told and ended.code == 2)
        rows.append(row)
    return rows


def hide(path: Path) -> Callable[[], object]:
    """Move a file away; return a function that moves it back."""
    away = path.rename(path.with_suffix(".away"))
    return lambda: away.rename(path)


def change(path: Path) -> Callable[[], object]:
    """Add a line to a file; return a function that restores the file."""
    content = path.read_bytes()
    path.write_bytes(content + b"one more line .\n")
    return lambda: path.write_bytes(content)


def with_message(resumed: tuple[Difference, Ended]) -> tuple[Difference, bool]:
    """Return the difference, and whether the process succeeded without a traceback."""
    difference, ended = resumed
    return difference, ended.told and ended.code == 0


FAULTS = (signals, damaged_files, full_disk, read_only, two_at_once, jumping_clock, other_corpus)
