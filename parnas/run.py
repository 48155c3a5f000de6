"""The run folder: all that a command read, did and made. Commands meet only here."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, get_args

from filelock import FileLock, Timeout

from parnas.architecture import Architecture
from parnas.config import Config, check_config, dump_config
from parnas.errors import ParnasError
from parnas.files import (
    flush_to_disk,
    from_json,
    read_json_object,
    read_text,
    refuse_foreign_links,
    to_json,
    write_json,
    write_text,
)
from parnas.yaml_text import MAX_BYTES, read_yaml

Kind = Literal["search", "retrain"]

OF_THE_OTHER_PHASE: dict[str, tuple[str, ...]] = {
    "retrain": ("search",),
    "search": ("train.lr", "train.steps", "train.warmup_steps", "train.average", "model.arch"),
}
"""Settings, or sections of them, that a kind of run does not read."""
METRICS, PI, STREAMS, ENVIRONMENT, LOCK = "metrics.jsonl", "pi.jsonl", "streams.json", "environment.json", ".lock"
EVEN, SECOND_LOOK = "even", "second_look.json"
"""What a search leaves when alpha comes to rest: its weights of then, and the losses of the most probable networks."""
SPEEDS = ("tokens_per_s", "step_ms")
"""What a line of metrics says of the machine: all else is the same whenever a training is repeated."""
ADAPTED = "adapted.json"
TUNING = "tuning.json"
"""What a study of settings came to; it is no run, so it has no summary.json."""
PLAIN = "plain"
"""The name of the evaluation that reads a text once, in segments, with the trained weights alone."""
FIRST_FILES = {ENVIRONMENT, "config.yaml", "tokenizer", STREAMS, METRICS, PI}
FIRST_FILES |= {"costs.json", "run.log", "tensorboard", "checkpoints", EVEN, SECOND_LOOK}
"""What a run may hold before its first checkpoint; STREAMS comes after those before it, and with it a run is begun."""


class Run:
    """A run folder. Opening one costs nothing; what is missing raises a `ParnasError` when it is asked for."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def create(self, kind: Kind, config: Config, environment: Mapping[str, Any]) -> None:
        """Write `environment.json` and `config.yaml`; a folder that holds other files is refused.

        What a run without a checkpoint has left is no loss, since it would begin anew in any case.
        """
        self.refuse_used()
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (STREAMS, METRICS, PI, "costs.json", SECOND_LOOK):  # the first one first: now no run is begun here
            (self.folder / name).unlink(missing_ok=True)
        for folder in (self.folder / "tensorboard", self.even):
            shutil.rmtree(folder, ignore_errors=True)
        write_json(self.folder / ENVIRONMENT, {"kind": kind, **describe_machine(), **environment})
        write_text(self.folder / "config.yaml", dump_config(config))

    def begun(self) -> bool:
        """Whether a training was begun here, and not stopped before it had written what it begins with."""
        return (self.folder / STREAMS).is_file()

    def refuse_used(self) -> None:
        """Raise where a new run would mix with what is in the folder, other than one cut short before a checkpoint."""
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        names = {name for name in names if name != LOCK and not (name.startswith(".") and ".tmp" in name)}
        kept = any((self.checkpoints).glob("step-*"))
        if names and (kept or ENVIRONMENT not in names or not names <= FIRST_FILES):
            raise ParnasError(
                f"{self.folder} already holds files that are no unfinished run; choose another folder (--run)."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes from training into the folder; a process that dies lets go of it.

        Raises `ParnasError` where another one is at it, or links lead out of the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        refuse_foreign_links(self.folder)
        lock = FileLock(self.folder / LOCK)
        try:
            lock.acquire(blocking=False)
        except Timeout as error:
            raise ParnasError(
                f"Another process is training into {self.folder}; wait for it, or choose another folder (--run)."
            ) from error
        try:
            yield
        finally:
            lock.release()

    @property
    def name(self) -> str:
        """The folder's own name."""
        return self.folder.resolve().name

    @property
    def figures(self) -> Path:
        """Folder of the pictures."""
        return self.folder / "figures"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.folder / "checkpoints"

    @property
    def even(self) -> Path:
        """Folder of the one checkpoint from when alpha came to rest, before the weights settled on one network."""
        return self.folder / EVEN

    @property
    def tokenizer(self) -> Path:
        """Folder of the tokenizer, so that the model can be used without the corpus."""
        return self.folder / "tokenizer"

    def _existing(self, name: str, maker: str) -> Path:
        path = self.folder / name
        if not self.folder.is_dir():
            raise ParnasError(f"There is no run folder {self.folder}.")
        if not path.is_file():
            raise ParnasError(f"{self.folder} has no {name}; {maker} writes it.")
        refuse_foreign_links(self.folder)  # here, since no command does without reading one of these files first
        return path

    def config(self) -> Config:
        """The resolved configuration of the run."""
        path = self._existing("config.yaml", "search or retrain")
        tree = read_yaml(read_text(path, MAX_BYTES), str(path))
        if not isinstance(tree, dict):
            raise ParnasError(f"{path} holds no configuration.")
        return check_config(tree, str(path))

    def environment(self) -> dict[str, Any]:
        """Kind of run, versions, device, precision and command line."""
        return read_json_object(self._existing(ENVIRONMENT, "search or retrain"))

    def kind(self) -> str:
        """Which command made the run: `search` or `retrain`."""
        kind = self.environment().get("kind")
        if kind not in get_args(Kind):
            raise ParnasError(f"{self.folder}/environment.json does not say whether this is a search; restore it.")
        return str(kind)

    def arch_file(self) -> dict[str, Any]:
        """The content of `arch.yaml`."""
        path = self._existing("arch.yaml", f"derive.py {self.folder}")
        return read_arch_file(path)

    def architecture(self, by_pi: bool = False) -> Architecture | None:
        """The network that the run stands for, wherever one is asked of it; none where it does not tell yet.

        Of a retraining it is what is trained. Of a search it is what its `arch.yaml` says, and where there is none, or
        with `by_pi`, what pi spoke for last. Raises `ParnasError` for a network that is none of the SuperNet's.
        """
        config, path = self.config(), self.folder / "arch.yaml"
        if self.kind() == "retrain":
            return None if config.model.arch is None else Architecture.parse(config.model.arch)
        if path.is_file() and not by_pi:
            found = str(self.arch_file()["arch"])
            cure = f"mend or remove it, or write it by: parnas derive {self.folder}"
        else:
            told = [record["arch"] for record in self.records(PI) if "arch" in record]
            if not told:
                return None
            path, found, cure = self.folder / PI, told[-1], "restore it"
        architecture = Architecture.parse(found)
        refuse_other_blocks(architecture, config.search.block_spaces, str(path), cure)
        return architecture

    def summary(self) -> dict[str, Any]:
        """The final figures; only a finished run has them."""
        return read_json_object(self._existing("summary.json", "a run that ends"))

    def adapted(self) -> dict[str, Any]:
        """What `parnas adapt` chose for the run."""
        return read_json_object(self._existing(ADAPTED, f"parnas adapt {self.folder}"))

    def finished(self) -> bool:
        """Whether the run came to its end."""
        return (self.folder / "summary.json").is_file()

    def append(self, name: str, record: Mapping[str, Any]) -> None:
        """Add one line to a JSONL file, in one write."""
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(to_json(record) + "\n")

    def write_log(self, text: str) -> None:
        """Add a line with the time of day to `run.log`, for people."""
        with (self.folder / "run.log").open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")

    def records(self, name: str) -> list[dict[str, Any]]:
        """All lines of a JSONL file; a torn last line is left out."""
        path = self._existing(name, "search" if name == PI else "search or retrain")
        records = []
        # By bytes: a line may be torn within a character, and characters within a string may count as line ends.
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                record = from_json(line.decode("utf-8"))
            except ValueError as error:
                if number == len(lines):
                    break
                raise ParnasError(f"{path} is broken at line {number}; remove that line.") from error
            if not isinstance(record, dict) or type(step := record.get("step")) is not int or not 0 <= step < 2**63:
                raise ParnasError(f"{path} holds no JSON object with a step at line {number}; remove that line.")
            records.append(record)
        return records

    def flush(self) -> None:
        """Make the lines of metrics and pi durable."""
        for name in (METRICS, PI):
            if (self.folder / name).is_file():
                flush_to_disk(self.folder / name)
        flush_to_disk(self.folder)

    def cut_after(self, step: int) -> None:
        """Drop what was recorded after `step`, so that a resumed run writes each line once."""
        for name in (METRICS, PI):
            path = self.folder / name
            if path.is_file():
                kept = [record for record in self.records(name) if record["step"] <= step]
                write_text(path, "".join(to_json(record) + "\n" for record in kept))


def refuse_other_blocks(architecture: Architecture, spaces: Sequence[Sequence[str]], path: str, cure: str) -> None:
    """Raise where an architecture is not made of the candidates of each block, as a file of a search must say it."""
    blocks = len(spaces)
    if len(architecture) != blocks:
        raise ParnasError(
            f"{path} says {architecture!s:.80}, of {len(architecture)} block(s), but the SuperNet has {blocks}, each "
            f"of which needs its layer, identity (i) included; {cure}."
        )
    for number, (layer, space) in enumerate(zip(architecture, spaces, strict=True), 1):
        if layer not in space:
            raise ParnasError(
                f"{path} says {architecture!s:.80}, but block {number} of the SuperNet has {', '.join(space)}, not "
                f"{layer}; {cure}."
            )


def read_arch_file(path: Path) -> dict[str, Any]:
    """Read an `arch.yaml`; it must at least name its `arch`, one that can be read."""
    content = read_yaml(read_text(path, MAX_BYTES), str(path))
    if not isinstance(content, dict) or not isinstance(content.get("arch"), str):
        raise ParnasError(f"{path} has no line 'arch: STRING'; give a file that derive.py wrote.")
    try:
        Architecture.parse(content["arch"])
    except ParnasError as error:
        raise ParnasError(f"{path}: {error}") from error
    return content


def name_runs(runs: Sequence[Run]) -> list[str]:
    """The names of the runs, or their whole paths where two share a name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def describe_machine() -> dict[str, Any]:
    """What a figure depends on besides the configuration: versions, processor, commit and command line."""
    names = ("parnas", "torch", "numpy", "sentencepiece")
    return {
        "command_line": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": {name: package_version(name) for name in names},
        "git_commit": _git_commit(),
    }


def package_version(name: str) -> str | None:
    """The installed version of a package; none for one that is not there."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _git_commit() -> str | None:
    """The commit of the source that runs; none for an installed package."""
    source = Path(__file__).resolve().parent
    try:
        answer = subprocess.run(
            ["git", "-C", str(source), "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() or None
