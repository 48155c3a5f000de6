"""The run folder: the configuration, logs and results of a training. Commands communicate only through it."""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, TypeVar

from filelock import FileLock, Timeout

from parnas.architecture import Architecture
from parnas.config.loader import Config, check_config, dump_config
from parnas.config.yaml_file import MAX_BYTES, read_text, read_yaml
from parnas.errors import ParnasError
from parnas.runs.files import (
    flush_to_disk,
    from_json,
    read_json,
    refuse_outside_links,
    to_json,
    write_json,
    write_text,
)
from parnas.runs.records import (
    DerivationRecord,
    Environment,
    Kind,
    MetricsRecord,
    PiRecord,
    Record,
    RerankRecord,
    RunSummary,
    TunedEvalRecord,
)

__all__ = [
    "ARCH_FILE",
    "ENVIRONMENT",
    "METRICS",
    "OTHER_PHASE_SETTINGS",
    "PI",
    "PLAIN",
    "STREAMS",
    "TUNED_EVAL",
    "TUNING",
    "Run",
    "describe_machine",
    "name_runs",
    "package_version",
]

_AnyRecord = TypeVar("_AnyRecord", bound=Record)
OTHER_PHASE_SETTINGS: dict[str, tuple[str, ...]] = {
    "retrain": ("search",),
    "search": ("train.lr", "train.steps", "train.warmup_steps", "train.average", "model.arch"),
}
"""Settings and sections that a kind of run does not read."""
METRICS, PI, STREAMS, ENVIRONMENT, LOCK = "metrics.jsonl", "pi.jsonl", "streams.json", "environment.json", ".lock"
SUMMARY, ARCH_FILE, TUNED_EVAL = "summary.json", "arch.yaml", "tuned_eval.json"
SUPERNET, RERANK = "supernet", "rerank.json"
"""Written by a search when it freezes alpha: the shared weights, and the held-out losses of the top candidates."""
SPEED_KEYS = ("tokens_per_s", "step_ms")
"""Values of metrics that depend on the machine; all others are equal when a training is repeated."""
TUNING = "tuning.json"
"""Result of a tuning study, whose folder is no run and has no summary.json."""
PLAIN = "plain"
"""Name of the plain evaluation protocol: the text is read once, in segments, with the trained weights."""
_FIRST_FILES = {"config.yaml", "costs.json", "run.log", "tokenizer", "tensorboard", "checkpoints"}
_FIRST_FILES |= {ENVIRONMENT, STREAMS, METRICS, PI, SUPERNET, RERANK}
"""Files that a run may hold before its first checkpoint."""


class Run:
    """A run folder. The constructor reads nothing; reading a missing file raises `ParnasError`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.figures = self.folder / "figures"
        self.checkpoints = self.folder / "checkpoints"
        self.supernet = self.folder / SUPERNET
        self.tokenizer = self.folder / "tokenizer"  # copied, so that the network can be used without the corpus

    def create(self, kind: Kind, config: Config, environment: Mapping[str, Any]) -> None:
        """Write `environment.json` and `config.yaml`; raise `ParnasError` if the folder holds other files.

        Files of an earlier run without a checkpoint are removed, since that run cannot be resumed.
        """
        self.refuse_used()
        self.folder.mkdir(parents=True, exist_ok=True)
        for name in (STREAMS, METRICS, PI, "costs.json", RERANK):  # STREAMS first: the run no longer counts as started
            (self.folder / name).unlink(missing_ok=True)
        for folder in (self.folder / "tensorboard", self.supernet):
            shutil.rmtree(folder, ignore_errors=True)
        record = Environment(kind=kind, **describe_machine(), **environment)
        write_json(self.folder / ENVIRONMENT, record.to_dict())
        write_text(self.folder / "config.yaml", dump_config(config))

    def started(self) -> bool:
        """Return whether a training has written its first files, of which `streams.json` is the last."""
        return (self.folder / STREAMS).is_file()

    def refuse_used(self) -> None:
        """Raise `ParnasError` if the folder holds anything but a run that was stopped before its first checkpoint."""
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        names = {name for name in names if name != LOCK and not (name.startswith(".") and ".tmp" in name)}
        has_checkpoint = any(self.checkpoints.glob("step-*"))
        if names and (has_checkpoint or ENVIRONMENT not in names or not names <= _FIRST_FILES):
            raise ParnasError(
                f"{self.folder} already holds files that are no unfinished run; choose another folder (--run)."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against training by other processes; the lock ends with the process.

        Raises:
            ParnasError: Another process holds the lock, or links lead out of the folder.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        refuse_outside_links(self.folder)
        try:
            lock = FileLock(self.folder / LOCK).acquire(blocking=False)
        except Timeout as error:
            raise ParnasError(
                f"Another process is training into {self.folder}; wait for it, or choose another folder (--run)."
            ) from error
        with lock:
            yield

    @property
    def name(self) -> str:
        """Name of the folder."""
        return self.folder.resolve().name

    def _existing(self, name: str, maker: str = "search or retrain") -> Path:
        """Return the path of a file; raise `ParnasError` with the command that writes it, if it is missing."""
        path = self.folder / name
        if not self.folder.is_dir():
            raise ParnasError(f"There is no run folder {self.folder}.")
        if not path.is_file():
            raise ParnasError(f"{self.folder} has no {name}; {maker} writes it.")
        refuse_outside_links(self.folder)  # every command reads one of these files first
        return path

    def _read(
        self, name: str, record: type[_AnyRecord], maker: str = "search or retrain", hint: str = "restore it"
    ) -> _AnyRecord:
        """Return the record of a JSON file; see `_existing` for `maker` and `Record.parse` for `hint`."""
        path = self._existing(name, maker)
        return record.parse(read_json(path), str(path), hint)

    def config(self) -> Config:
        """Return the resolved configuration."""
        path = self._existing("config.yaml")
        tree = read_yaml(read_text(path, MAX_BYTES), str(path))
        if not isinstance(tree, dict):
            raise ParnasError(f"{path} holds no configuration.")
        return check_config(tree, str(path))

    def environment(self) -> Environment:
        """Return the kind of run, versions, device, precision and command line."""
        return self._read(ENVIRONMENT, Environment)

    def kind(self) -> Kind:
        """Return the command that made the run: `search` or `retrain`."""
        return self.environment().kind

    def derivation(self) -> DerivationRecord:
        """Return the content of `arch.yaml`."""
        return read_derivation(self._existing(ARCH_FILE, f"parnas derive {self.folder}"))

    def architecture(self, by_pi: bool = False) -> Architecture | None:
        """Return the architecture of the run; `None` if there is none yet.

        For a retraining this is `model.arch`. For a search it is the architecture in `arch.yaml` or, without that file
        or with `by_pi`, in the last line of `pi.jsonl`.

        Raises:
            ParnasError: The architecture is not in the search space.
        """
        config, path = self.config(), self.folder / ARCH_FILE
        if self.kind() == "retrain":
            return None if config.model.arch is None else Architecture.parse(config.model.arch)
        if path.is_file() and not by_pi:
            arch, hint = self.derivation().arch, f"correct or remove it, or run: parnas derive {self.folder}"
        else:
            logged = [record.arch for record in self.pi_records() if record.arch is not None]
            if not logged:
                return None
            path, arch, hint = self.folder / PI, logged[-1], "restore it"
        architecture = Architecture.parse(arch)
        _refuse_other_blocks(architecture, config.search.block_spaces, str(path), hint)
        return architecture

    def summary(self) -> RunSummary:
        """Return the final metrics; raise `ParnasError` before the run has finished."""
        return self._read(SUMMARY, RunSummary, "a run that ends")

    def write_summary(self, summary: RunSummary) -> None:
        """Write `summary.json`, which marks the run as finished."""
        write_json(self.folder / SUMMARY, summary.to_dict())

    def reranked(self) -> RerankRecord | None:
        """Return the losses of the re-ranked architectures; `None` if a search has not frozen alpha yet."""
        hint = "restore it, or delete it to re-rank again"
        return self._read(RERANK, RerankRecord, hint=hint) if (self.folder / RERANK).is_file() else None

    def write_rerank(self, record: RerankRecord) -> None:
        """Write `rerank.json`."""
        write_json(self.folder / RERANK, record.to_dict())

    def tuned_eval(self) -> TunedEvalRecord:
        """Return the settings that `parnas tune-eval` chose for the run."""
        return self._read(TUNED_EVAL, TunedEvalRecord, f"parnas tune-eval {self.folder}", "run parnas tune-eval again")

    def write_tuned_eval(self, record: TunedEvalRecord) -> Path:
        """Write `tuned_eval.json` and return its path."""
        write_json(self.folder / TUNED_EVAL, record.to_dict())
        return self.folder / TUNED_EVAL

    def finished(self) -> bool:
        """Return whether the training has finished."""
        return (self.folder / SUMMARY).is_file()

    def append(self, name: str, record: Record | Mapping[str, Any]) -> None:
        """Append one line to a JSONL file, in one write."""
        content = record.to_dict() if isinstance(record, Record) else record
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(to_json(content) + "\n")

    def write_log(self, text: str) -> None:
        """Append text with the time of day to `run.log`."""
        with (self.folder / "run.log").open("a", encoding="utf-8") as file:
            file.write(f"{datetime.now():%Y-%m-%d %H:%M:%S} {text}\n")

    def metrics(self) -> list[MetricsRecord]:
        """Return the lines of `metrics.jsonl`; raise `ParnasError` with the number of the first malformed line."""
        return self._parsed_lines(METRICS, MetricsRecord)

    def pi_records(self) -> list[PiRecord]:
        """Return the lines of `pi.jsonl`; raise `ParnasError` with the number of the first malformed line."""
        return self._parsed_lines(PI, PiRecord)

    def _parsed_lines(self, name: str, record: type[_AnyRecord]) -> list[_AnyRecord]:
        path, lines = self.folder / name, self.raw_lines(name)
        return [record.parse(line, f"{path}, line {n},", "remove that line") for n, line in enumerate(lines, 1)]

    def raw_lines(self, name: str) -> list[dict[str, Any]]:
        """Return the lines of a JSONL file as plain values, without an incomplete last line."""
        path = self._existing(name, "search" if name == PI else "search or retrain")
        records = []
        # Split bytes: a line may end within a character, and str.splitlines also splits at characters inside strings.
        lines = path.read_bytes().removesuffix(b"\n").split(b"\n")
        for number, line in enumerate(lines, 1):
            try:
                record = from_json(line)
            except ValueError as error:
                if number == len(lines):
                    break
                raise ParnasError(f"{path} is broken at line {number}; remove that line.") from error
            if not isinstance(record, dict) or type(step := record.get("step")) is not int or not 0 <= step < 2**63:
                raise ParnasError(f"{path} holds no JSON object with a step at line {number}; remove that line.")
            records.append(record)
        return records

    def flush(self) -> None:
        """Flush the lines of metrics and pi to disk."""
        for name in (METRICS, PI):
            if (self.folder / name).is_file():
                flush_to_disk(self.folder / name)
        flush_to_disk(self.folder)

    def truncate_after(self, step: int) -> None:
        """Remove the lines after `step`, so that a resumed run writes each line once."""
        for name in (METRICS, PI):
            path = self.folder / name
            if path.is_file():
                earlier = [to_json(line) + "\n" for line in self.raw_lines(name) if line["step"] <= step]
                write_text(path, "".join(earlier))


def _refuse_other_blocks(architecture: Architecture, spaces: Sequence[Sequence[str]], path: str, hint: str) -> None:
    """Raise `ParnasError` if a layer of the architecture in a file is not among the candidates of its block."""
    blocks = len(spaces)
    if len(architecture) != blocks:
        raise ParnasError(
            f"{path} says {architecture!s:.80}, of {len(architecture)} block(s), but the SuperNet has {blocks}, each "
            f"of which needs its layer, identity (i) included; {hint}."
        )
    for number, (layer, space) in enumerate(zip(architecture, spaces, strict=True), 1):
        if layer not in space:
            raise ParnasError(
                f"{path} says {architecture!s:.80}, but block {number} of the SuperNet has {', '.join(space)}, not "
                f"{layer}; {hint}."
            )


def read_derivation(path: Path) -> DerivationRecord:
    """Return the content of an `arch.yaml`; raise `ParnasError` if its `arch` cannot be parsed."""
    content = read_yaml(read_text(path, MAX_BYTES), str(path))
    if not isinstance(content, dict) or not isinstance(content.get("arch"), str):
        raise ParnasError(f"{path} has no line 'arch: STRING'; give a file that parnas derive wrote.")
    try:
        Architecture.parse(content["arch"])
    except ParnasError as error:
        raise ParnasError(f"{path}: {error}") from error
    return DerivationRecord.parse(content, str(path))


def name_runs(runs: Sequence[Run]) -> list[str]:
    """Return the names of the runs, or their paths if two have the same name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def describe_machine() -> dict[str, Any]:
    """Return versions, platform, cores, commit and command line, for `environment.json`."""
    packages = ("parnas", "torch", "numpy", "sentencepiece")
    return {
        "command_line": sys.argv,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "versions": {name: package_version(name) for name in packages},
        "git_commit": _git_commit(),
    }


def package_version(name: str) -> str | None:
    """Return the installed version of a package; `None` if it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache  # the running source does not change, and studies describe the machine in every run
def _git_commit() -> str | None:
    """Return the commit of the running source; `None` for an installed package."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
