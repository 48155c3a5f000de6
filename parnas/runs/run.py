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
    InheritedWeights,
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
    "BASELINES",
    "BLACKBOX_FRONT",
    "COMPARISON",
    "COSTS",
    "DERIVED_FRONT",
    "ENVIRONMENT",
    "FROM_SCRATCH",
    "METRICS",
    "OTHER_PHASE_SETTINGS",
    "PI",
    "PLAIN",
    "PROBE",
    "RERANK",
    "STREAMS",
    "SUMMARY",
    "TUNED_EVAL",
    "TUNING",
    "Run",
    "describe_machine",
    "describe_weights",
    "name_runs",
    "package_version",
]

_AnyRecord = TypeVar("_AnyRecord", bound=Record)
OTHER_PHASE_SETTINGS: dict[str, tuple[str, ...]] = {
    "retrain": ("search",),
    "search": (
        *("train.lr", "train.steps", "train.warmup_steps", "train.average", "train.inherit"),
        *("model.arch", "search.share"),
    ),
}
"""Settings and sections of the configuration that each kind of run does not use."""
METRICS, PI, STREAMS, ENVIRONMENT, LOCK = "metrics.jsonl", "pi.jsonl", "streams.json", "environment.json", ".lock"
SUMMARY, ARCH_FILE, TUNED_EVAL, COSTS = "summary.json", "arch.yaml", "tuned_eval.json", "costs.json"
COMPARISON, BASELINES, BLACKBOX_FRONT = "comparison.json", "baselines.json", "pareto.csv"
"""Names of the results of `parnas evaluate`, `parnas baselines` and `parnas blackbox`."""
INHERITED = "inherited.json"
"""Name of the file that says from which run the first weights of a retraining are."""
SUPERNET, RERANK = "supernet", "rerank.json"
"""Names of what a search writes when it freezes alpha: the shared weights, and the losses of re-ranked networks."""
DERIVED_FRONT = Path("front") / "front.json"
"""What `parnas derive --front` writes to the folder of a search, beside a folder with `arch.yaml` for each target."""
SPEED_KEYS = ("tokens_per_s", "step_ms")
"""Keys of `metrics.jsonl` that depend on the machine's speed; all others are equal if a training is repeated."""
PROBE = "probe.json"
"""Name of the result of `parnas probe`."""
TUNING = "tuning.json"
"""Name of the result of a tuning study. The folder of a study is not a run folder and has no summary.json."""
FROM_SCRATCH = "from scratch"
"""How a network was trained that began with random weights; see `describe_weights`."""
PLAIN = "plain"
"""Name of the plain evaluation protocol: the text is read once, in segments, with the trained weights."""
RUN_LOG = "run.log"
_FIRST_FILES = {"config.yaml", COSTS, RUN_LOG, "tokenizer", "tensorboard", "checkpoints"}
_FIRST_FILES |= {ENVIRONMENT, STREAMS, METRICS, PI, SUPERNET, RERANK, INHERITED}
"""Files and folders that a run may contain before its first checkpoint."""


def describe_weights(kind: str, config: Config) -> str:
    """Return how a run of a kind was trained: `from scratch` or from `inherited` weights, `distilled` with teachers."""
    inherits = config.search.parent if kind == "search" else config.train.inherit
    distilled = kind == "retrain" and bool(config.train.teachers)
    return (FROM_SCRATCH if inherits is None else "inherited") + ", distilled" * distilled


class Run:
    """A run folder. The constructor reads nothing; reading a missing file raises `ParnasError`."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.figures = self.folder / "figures"
        self.checkpoints = self.folder / "checkpoints"
        self.supernet = self.folder / SUPERNET
        self.tokenizer = self.folder / "tokenizer"  # copied, so that the network can be used without the corpus

    def create(self, kind: Kind, config: Config, environment: Mapping[str, Any]) -> None:
        """Write `environment.json` and `config.yaml`; remove an earlier run that has no checkpoint to resume from.

        Raises:
            ParnasError: The folder holds other files, or a run with a checkpoint.
        """
        self.refuse_used()
        self.folder.mkdir(parents=True, exist_ok=True)
        # STREAMS first: without it, the run no longer counts as started.
        for name in (STREAMS, METRICS, PI, COSTS, RERANK, INHERITED):
            (self.folder / name).unlink(missing_ok=True)
        for folder in (self.folder / "tensorboard", self.supernet):
            shutil.rmtree(folder, ignore_errors=True)
        record = Environment(kind=kind, **describe_machine(), **environment)
        write_json(self.folder / ENVIRONMENT, record.to_dict())
        write_text(self.folder / "config.yaml", dump_config(config))

    def set_threads(self, threads: int) -> None:
        """Write the number of CPU threads with which the run is resumed to `environment.json`."""
        record = self.environment().model_copy(update={"threads": threads})
        write_json(self.folder / ENVIRONMENT, record.to_dict())

    def discard_unstarted(self) -> None:
        """Remove what was written before a training began; do nothing if it began, which `run.log` shows."""
        if (self.folder / RUN_LOG).exists() or any(self.checkpoints.glob("step-*")):
            return
        for name in (STREAMS, *_FIRST_FILES):  # without STREAMS, the run no longer counts as started
            path = self.folder / name
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def started(self) -> bool:
        """Return whether the training has begun: `streams.json` exists, the last file of the preparation."""
        return (self.folder / STREAMS).is_file()

    def refuse_used(self) -> None:
        """Raise `ParnasError` unless the folder is empty or holds a run that stopped before its first checkpoint."""
        names = {path.name for path in self.folder.iterdir()} if self.folder.is_dir() else set()
        names = {name for name in names if name != LOCK and not (name.startswith(".") and ".tmp" in name)}
        has_checkpoint = any(self.checkpoints.glob("step-*"))
        if names and (has_checkpoint or ENVIRONMENT not in names or not names <= _FIRST_FILES):
            raise ParnasError(
                f"{self.folder} already has files, of a run with a checkpoint or of no run at all; "
                "choose another folder (--run)."
            )

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder against training by other processes until the context or the process ends.

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
        """Name of the run folder, without its path."""
        return self.folder.resolve().name

    def _existing(self, name: str, maker: str = "search or retrain") -> Path:
        """Return the path of a file in the run folder; if missing, raise `ParnasError` that names `maker`."""
        path = self.folder / name
        if not self.folder.is_dir():
            raise ParnasError(f"There is no run folder {self.folder}; give the folder of a search or retraining.")
        if not path.is_file():
            raise ParnasError(f"{self.folder} has no {name}; {maker} writes it.")
        refuse_outside_links(self.folder)  # every command reads one of these files first
        return path

    def _read(
        self, name: str, record: type[_AnyRecord], maker: str = "search or retrain", hint: str = "restore it"
    ) -> _AnyRecord:
        """Return the record in a JSON file; the error of a missing file names `maker`, of a broken file `hint`."""
        path = self._existing(name, maker)
        return record.parse(read_json(path), str(path), hint)

    def config(self) -> Config:
        """Return the complete configuration of the run, from `config.yaml`."""
        path = self._existing("config.yaml")
        tree = read_yaml(read_text(path, MAX_BYTES), str(path))
        if not isinstance(tree, dict):
            raise ParnasError(f"{path} holds no sections of a configuration, such as 'model:'; restore it.")
        config, words = check_config(tree, str(path)), self.tokenizer / "tokenizer.json"
        if config.data.tokenizer.vocabulary is None or not words.is_file():
            return config
        # The word list that the training read may have been moved or changed, so commands read the run's own copy.
        return config.replace(data__tokenizer__vocabulary=str(words.resolve()))

    def environment(self) -> Environment:
        """Return the content of `environment.json`: kind of run, versions, device, precision and command line."""
        return self._read(ENVIRONMENT, Environment)

    def kind(self) -> Kind:
        """Return the kind of the run: `search` or `retrain`."""
        return self.environment().kind

    def derivation(self) -> DerivationRecord:
        """Return the content of `arch.yaml`."""
        return read_derivation(self._existing(ARCH_FILE, f"parnas derive {self.folder}"))

    def architecture(self, by_pi: bool = False) -> Architecture | None:
        """Return the architecture of the run; `None` if a search has not logged one yet.

        For a retraining this is `model.arch`. For a search it is the architecture in `arch.yaml` or, without that file
        or with `by_pi`, the architecture in the last line of `pi.jsonl`.

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
        """Return the content of `summary.json`; raise `ParnasError` if the run has not finished."""
        return self._read(SUMMARY, RunSummary, "a finished run")

    def write_summary(self, summary: RunSummary) -> None:
        """Write `summary.json`, which marks the run as finished."""
        write_json(self.folder / SUMMARY, summary.to_dict())

    def inherited(self) -> InheritedWeights | None:
        """Return from which run the first weights are; `None` for a training from scratch."""
        return self._read(INHERITED, InheritedWeights) if (self.folder / INHERITED).is_file() else None

    def write_inherited(self, record: InheritedWeights) -> None:
        """Write `inherited.json`."""
        write_json(self.folder / INHERITED, record.to_dict())

    def reranked(self) -> RerankRecord | None:
        """Return the losses of the re-ranked architectures; `None` if there is no `rerank.json`."""
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
        """Append a record as one line to a JSONL file of the run, in a single write."""
        content = record.to_dict() if isinstance(record, Record) else record
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(to_json(content) + "\n")

    def write_log(self, text: str) -> None:
        """Append a line with date, time and text to `run.log`."""
        with (self.folder / RUN_LOG).open("a", encoding="utf-8") as file:
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
        """Return the lines of a JSONL file as dictionaries; an incomplete last line is left out."""
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
                raise ParnasError(f"{path} is not valid JSON at line {number}; remove that line.") from error
            if not isinstance(record, dict) or type(step := record.get("step")) is not int or not 0 <= step < 2**63:
                raise ParnasError(f"{path} holds no JSON object with a step at line {number}; remove that line.")
            records.append(record)
        return records

    def flush(self) -> None:
        """Flush `metrics.jsonl` and `pi.jsonl` to disk."""
        for name in (METRICS, PI):
            if (self.folder / name).is_file():
                flush_to_disk(self.folder / name)
        flush_to_disk(self.folder)

    def truncate_after(self, step: int) -> None:
        """Remove lines of metrics and pi after `step`, since a run that resumes at `step` writes them again."""
        for name in (METRICS, PI):
            path = self.folder / name
            if path.is_file():
                earlier = [to_json(line) + "\n" for line in self.raw_lines(name) if line["step"] <= step]
                write_text(path, "".join(earlier))


def _refuse_other_blocks(architecture: Architecture, spaces: Sequence[Sequence[str]], path: str, hint: str) -> None:
    """Raise `ParnasError` unless the architecture in the file `path` has one candidate of each block."""
    blocks = len(spaces)
    if len(architecture) != blocks:
        raise ParnasError(
            f"{path} says {architecture!s:.80}, of {len(architecture)} block(s), but the SuperNet has {blocks} "
            f"blocks; each needs a layer, which may be identity (i); {hint}."
        )
    for number, (layer, space) in enumerate(zip(architecture, spaces, strict=True), 1):
        if layer not in space:
            raise ParnasError(
                f"{path} says {architecture!s:.80}, but block {number} of the SuperNet has {', '.join(space)}, not "
                f"{layer}; {hint}."
            )


def read_derivation(path: Path) -> DerivationRecord:
    """Return the content of an `arch.yaml`; raise `ParnasError` if the file is not valid."""
    content = read_yaml(read_text(path, MAX_BYTES), str(path))
    if not isinstance(content, dict) or not isinstance(content.get("arch"), str):
        raise ParnasError(f"{path} has no line 'arch: STRING'; give a file that parnas derive wrote.")
    try:
        Architecture.parse(content["arch"])
    except ParnasError as error:
        raise ParnasError(f"{path}: {error}") from error
    return DerivationRecord.parse(content, str(path))


def name_runs(runs: Sequence[Run]) -> list[str]:
    """Return the names of the run folders, or the paths of all if two have the same name."""
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
    """Return the git commit of the running source; `None` if it is not in a repository."""
    command = ["git", "-C", str(Path(__file__).resolve().parent), "rev-parse", "HEAD"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() or None
