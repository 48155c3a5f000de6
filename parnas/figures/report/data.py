"""The data of a report: run folders, comparisons, and costs and perplexities of studies, read and checked."""

import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from parnas.architecture import Architecture, drop_identity
from parnas.config.loader import Config
from parnas.config.yaml_file import read_text
from parnas.errors import ParnasError
from parnas.figures.pareto import FRONT_PERPLEXITY, ParetoPoint, front_points
from parnas.figures.probe import read_probe
from parnas.figures.style import drawable
from parnas.runs.files import is_outside, read_json, read_json_object, refuse_outside_link
from parnas.runs.pi_history import PiHistory
from parnas.runs.records import (
    ComparisonRow,
    DerivationRecord,
    Environment,
    MetricsRecord,
    ProbeRecord,
    RunSummary,
    parse_rows,
)
from parnas.runs.run import (
    ARCH_FILE,
    BASELINES,
    BLACKBOX_FRONT,
    COMPARISON,
    DERIVED_FRONT,
    ENVIRONMENT,
    METRICS,
    PI,
    PLAIN,
    PROBE,
    STREAMS,
    Run,
    describe_weights,
    name_runs,
)

__all__ = ["analysis_files", "finite_values"]

_ANALYSES = ("attention", "frequency", "memory")
_MAX_TABLE_BYTES = 4 << 20
_HINT = "give run folders, or a folder that evaluate --out, baselines, blackbox or probe wrote"


@dataclass(frozen=True)
class RunData:
    """The run folder of one run, read completely."""

    run: Run
    name: str  # unique on the page
    kind: str
    config: Config
    environment: Environment
    metrics: list[MetricsRecord]  # empty before the first line
    summary: RunSummary | None  # `None` for a run that has not ended
    derivation: DerivationRecord | None = None  # of a search that was derived
    history: PiHistory | None = None  # of a search that logged pi

    @property
    def validations(self) -> list[MetricsRecord]:
        """The lines of `metrics.jsonl` that hold a validation."""
        return [line for line in self.metrics if line.split == "valid"]

    @cached_property
    def architecture(self) -> Architecture | None:
        """The trained architecture; for a search the derived one or, before derive, that of the last logged pi."""
        if self.kind != "search":
            return Architecture.parse(self.config.model.arch) if self.config.model.arch else None
        if self.derivation:
            return Architecture.parse(self.derivation.arch)
        return Architecture(self.history.derived[-1]) if self.history else None

    @cached_property
    def _streams(self) -> Mapping[str, Any]:
        path = self.run.folder / STREAMS
        return read_json_object(path) if path.is_file() else {}

    @property
    def text(self) -> str:
        """Key of the text that a run reads: runs with equal keys were trained on the same text."""
        return str(self._streams.get("fingerprint") or self.config.data.corpus)

    @property
    def tokens(self) -> str:
        """Key of the text and its tokens: perplexities per token are comparable between runs with equal keys."""
        counts = self._streams.get("splits")  # another version of a tokenizer's library may make other tokens
        return f"{self.text} {self.config.data.tokenizer.model_dump_json()} {counts}"


@dataclass(frozen=True)
class NetworkRow:
    """A row of a table: one network under one evaluation protocol."""

    name: str
    network: str  # `discrete`, `SuperNet` or `derived, in SuperNet`, as in `ComparisonRow`
    arch: str
    figures: Mapping[str, float]  # finite values by the keys of `ComparisonRow`
    run: RunData | None  # `None` if the folder of the run is not known
    evaluation: str = PLAIN
    settings: str = ""  # of the evaluation protocol
    weights: str = ""  # as in `ComparisonRow`; empty if not known


@dataclass(frozen=True)
class ComparisonData:
    """The files that `evaluate` wrote into a folder."""

    folder: Path
    rows: tuple[NetworkRow, ...]  # of the plain evaluation
    others: tuple[NetworkRow, ...]  # of other protocols, whose perplexities are not comparable with `rows`
    split: str | None  # evaluated split of the text; `None` if not recorded
    missing: tuple[str, ...]  # run folders that the comparison names but that do not exist
    conditions: Mapping[str, Any] | None  # options that were given to `parnas evaluate`

    @property
    def runs(self) -> list[RunData]:
        """The runs of `rows`, except rows whose run folder is not known."""
        return [row.run for row in self.rows if row.run]

    @cached_property
    def analyses(self) -> dict[str, pd.DataFrame]:
        """The tables of analyses by name, except those of an earlier comparison, whose runs are not all in `rows`."""
        names = {row.name for row in self.rows}
        paths = {name: self.folder / f"{name}.csv" for name in _ANALYSES}
        tables = {name: _read_table(path) for name, path in paths.items() if path.is_file()}
        return {name: table for name, table in tables.items() if set(table.get("run", [None])) <= names}


@dataclass(frozen=True)
class CostFront:
    """Costs and perplexities of the networks of a baseline comparison, a black-box search or a front of a search."""

    title: str
    cost: str  # axis label
    points: tuple[ParetoPoint, ...]
    diverged: tuple[str, ...] = ()  # names of networks without a finite cost or perplexity
    answers: tuple[str, ...] = ()  # sentences on whether the derived network is better than its baselines
    perplexity: str = "validation perplexity per token"  # axis label


@dataclass(frozen=True)
class ProbeData:
    """A probe of a trained model."""

    name: str  # of the model
    folder: Path
    record: ProbeRecord


@dataclass(frozen=True)
class ReportData:
    """All that a report shows."""

    runs: tuple[RunData, ...]
    comparisons: tuple[ComparisonData, ...]
    fronts: tuple[CostFront, ...]
    probes: tuple[ProbeData, ...] = ()

    @property
    def searches(self) -> list[RunData]:
        """The searches among the runs."""
        return [run for run in self.runs if run.kind == "search"]


def read_report_data(paths: Sequence[Path]) -> ReportData:
    """Read run folders, and folders of comparisons and studies, for a report.

    The folder of a comparison also adds the runs that the comparison names, and the searches in subfolders, where
    `parnas demo` writes them. Raises `ParnasError` for a folder that holds nothing to report or a broken file.
    """
    if not paths:
        raise ParnasError(f"There is nothing to report; {_HINT}.")
    runs: dict[str, Run] = {}  # by real path, so that each is shown once
    tables: dict[Path, list[ComparisonRow]] = {}
    fronts: list[Path] = []
    probes: dict[str, ProbeData] = {}  # by real path
    for path in paths:
        names = _contents(path)
        _refuse_links(path)
        added = [Run(path)] if ENVIRONMENT in names else []
        if COMPARISON in names:
            tables[path] = _read_rows(path / COMPARISON)
            added += [*_searches_in(path), *_runs_of(path, tables[path]).values()]
        for run in added:
            runs.setdefault(os.path.realpath(run.folder), run)
        fronts += [path / name for name in (BASELINES, BLACKBOX_FRONT) if name in names]
        if PROBE in names:
            probes.setdefault(os.path.realpath(path), _read_probe(path))
    fronts += [run.folder / "baselines" / BASELINES for run in runs.values()]
    fronts += [run.folder / DERIVED_FRONT for run in runs.values()]
    named = zip(runs.items(), name_runs(list(runs.values())), strict=True)
    read = {key: _read_run(run, name) for (key, run), name in named}
    return ReportData(
        tuple(read.values()),
        tuple(_comparison(path, rows, read) for path, rows in tables.items()),
        tuple(_read_front(path) for path in dict.fromkeys(fronts) if path.is_file()),
        tuple(probes.values()),
    )


def run_row(run: RunData) -> NetworkRow:
    """Return a table row with the values of a run's last validation, for a run that is in no comparison."""
    summary, search = run.summary, run.kind == "search"
    values: dict[str, Any] = {}
    if search:
        values = _argmax_validation(run)
    elif summary:
        values = summary.valid.to_dict() | {"parameters": summary.parameters}
        values["without_embeddings"] = summary.parameters_without_embeddings
    elif run.validations:
        values = run.validations[-1].to_dict()
    if summary:
        values |= {"steps": summary.steps, "train_seconds": summary.seconds}
        if source := summary.inherited:
            values |= {"inherited_steps": source.steps, "total_seconds": summary.seconds + source.seconds}
    network = "derived, in SuperNet" if search else "discrete"
    arch, weights = str(run.architecture or ""), describe_weights(run.kind, run.config)
    return NetworkRow(run.name, network, arch, finite_values(values), run, weights=weights)


def validated_architecture(search: RunData) -> str | None:
    """Return the architecture that a search validated at its end; `None` before, or if derive chose the same one."""
    if search.summary is None:
        return None
    final = search.summary.arch
    return None if same_network(parse_architecture(final), search.architecture or ()) else final


def parse_architecture(arch: str) -> Architecture | None:
    """Parse an architecture; return `None` if it cannot be parsed, for example for a layer that is not registered."""
    try:
        return Architecture.parse(arch)
    except ParnasError:
        return None


def same_network(first: Iterable[str] | None, second: Iterable[str]) -> bool:
    """Check whether two architectures are equal when identity layers, which do nothing, are left out."""
    return first is not None and drop_identity(first) == drop_identity(second)


def analysis_files(folder: Path) -> list[Path]:
    """Return the paths of the tables and figures that `evaluate --analyse` wrote into the folder of a comparison."""
    if not (folder / COMPARISON).is_file():
        return []
    paths = [folder / f"{name}{ending}" for name in _ANALYSES for ending in (".csv", ".png")]
    return [*(path for path in paths if path.exists()), *sorted(folder.glob("attention-*.png"))]


def _read_table(path: Path) -> pd.DataFrame:
    """Read a CSV file with every cell as text; raises `ParnasError` if the file is not a table."""
    try:
        content = io.StringIO(read_text(path, _MAX_TABLE_BYTES))
        return pd.read_csv(content, dtype=str, index_col=False, keep_default_na=False).fillna("")
    except ValueError as error:
        raise ParnasError(f"{path} is not a CSV table ({error}); run the command that wrote it again.") from error


def finite_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the items of a mapping whose values are finite numbers that an axis can show."""
    return {key: value for key, each in values.items() if (value := drawable(each)) is not None}


def _contents(path: Path) -> set[str]:
    """Return the names of the files in a folder that a report can show; raises `ParnasError` if there are none."""
    if not path.is_dir():
        raise ParnasError(f"There is no run folder {path}; {_HINT}.")
    files = (ENVIRONMENT, COMPARISON, BASELINES, BLACKBOX_FRONT, PROBE)
    names = {name for name in files if (path / name).is_file()}
    if not names and (path / "config.yaml").is_file():
        raise ParnasError(
            f"{path} has a config.yaml but no {ENVIRONMENT}: no training was started there. Start one, or {_HINT}."
        )
    if not names:
        raise ParnasError(f"{path} holds neither a run nor a comparison nor a probe; {_HINT}.")
    return names


def _refuse_links(folder: Path) -> None:
    """Raise `ParnasError` if a file of a comparison or study is a link that leads out of `folder`, or no regular file.

    `Run` checks the files of runs.
    """
    for path in (*(folder / name for name in (COMPARISON, BASELINES, BLACKBOX_FRONT, PROBE)), *analysis_files(folder)):
        refuse_outside_link(path, folder)
        if path.exists() and not path.is_file():  # reading a pipe would never end
            raise ParnasError(f"{path} is a folder or a device, but a file is expected; remove it.")


def _read_run(run: Run, name: str) -> RunData:
    """Read the files of a run; files that the run has not written yet may be missing."""
    metrics = run.metrics() if (run.folder / METRICS).is_file() else []
    summary = run.summary() if run.finished() else None
    data = RunData(run, name, run.kind(), run.config(), run.environment(), metrics, summary)
    if data.kind != "search":
        return data
    derivation = run.derivation() if (run.folder / ARCH_FILE).is_file() else None
    history = PiHistory.from_run(run) if (run.folder / PI).is_file() and run.pi_records() else None
    return replace(data, derivation=derivation, history=history)


def _read_probe(folder: Path) -> ProbeData:
    record = read_probe(folder / PROBE)
    model = Path(record.conditions.model).name if record.conditions else ""
    return ProbeData(model or folder.resolve().name, folder, record)


def _read_rows(path: Path) -> list[ComparisonRow]:
    rows = parse_rows(read_json(path), str(path))
    if not any(row.evaluation == PLAIN for row in rows):
        raise ParnasError(f"{path} has no row of the plain evaluation protocol; run parnas evaluate again.")
    return rows


def _runs_of(folder: Path, rows: Sequence[ComparisonRow]) -> dict[str, Run]:
    """Return the runs of a comparison that still exist, by their paths relative to the comparison's folder."""
    here = Path(os.path.realpath(folder))
    places = {row.folder: Path(os.path.normpath(here / row.folder)) for row in rows if row.folder}
    return {name: Run(place) for name, place in places.items() if (place / ENVIRONMENT).is_file()}


def _searches_in(folder: Path) -> list[Run]:
    inside = [path.parent for path in sorted(folder.glob(f"*/{ENVIRONMENT}")) if not is_outside(path.parent, folder)]
    return [run for path in inside if (path / "config.yaml").is_file() if (run := Run(path)).kind() == "search"]


def _comparison(path: Path, rows: Sequence[ComparisonRow], read: Mapping[str, RunData]) -> ComparisonData:
    runs = {name: read[os.path.realpath(run.folder)] for name, run in _runs_of(path, rows).items()}
    shown = [
        NetworkRow(
            row.run, row.network, row.arch, finite_values(row.to_dict()), run, row.evaluation, row.settings, weights
        )
        for row in rows
        for run in [runs.get(row.folder or "")]
        for weights in [row.weights or (describe_weights(run.kind, run.config) if run else "")]
    ]
    return ComparisonData(
        path,
        tuple(row for row in shown if row.evaluation == PLAIN),
        tuple(row for row in shown if row.evaluation != PLAIN),
        rows[0].split,
        tuple(dict.fromkeys(row.folder for row in rows if row.folder and row.folder not in runs)),
        rows[0].conditions,
    )


def _argmax_validation(search: RunData) -> dict[str, Any]:
    """Return the last validation of a search's derived network with the shared weights; empty if there is none."""
    architecture = search.architecture or ()
    if search.summary:
        validated = validated_architecture(search) is None
        return search.summary.argmax.to_dict() if validated and search.summary.argmax else {}
    if not search.validations or search.history is None:
        return {}
    last = search.validations[-1]
    derived = dict(zip(search.history.steps.tolist(), search.history.derived, strict=True))
    return {"ppl": last.argmax_ppl} if same_network(derived.get(last.step), architecture) else {}


def _read_front(path: Path) -> CostFront:
    """Read costs and perplexities of one of these files; raises `ParnasError` for other content."""
    command, read = {
        BASELINES: ("baselines", _read_baselines),
        BLACKBOX_FRONT: ("blackbox", _read_blackbox),
        DERIVED_FRONT.name: ("derive --front", _read_derived_front),
    }[path.name]
    try:
        return read(path)
    except (KeyError, TypeError, ValueError) as error:
        raise ParnasError(f"{path} was not written by parnas {command}; run parnas {command} again.") from error


def _read_baselines(path: Path) -> CostFront:
    content = read_json_object(path)
    points, diverged = [], []
    for each in content["networks"]:
        name, share, mean = str(each["name"]), drawable(each["cost_share"]), drawable(each["valid_ppl_mean"])
        if share is None or mean is None:
            diverged.append(name)
        else:
            points.append(ParetoPoint(name, share, mean, drawable(each["valid_ppl_sd"]), each["random"] is True))
    answers = tuple(str(each["text"]) for each in content["answers"])
    cost = f"{content['metric']} of the blocks, interleaved = 1"
    return CostFront("The derived network and its baselines", cost, tuple(points), tuple(diverged), answers)


def _read_derived_front(path: Path) -> CostFront:
    content = read_json_object(path)
    points = front_points(content["networks"])
    if any(drawable(value) is None for point in points for value in (point.cost, point.ppl)):
        raise ValueError("a cost or loss is not finite")
    cost = f"predicted {content['metric']} of the blocks, {content.get('reference', 'interleaved')} = 1"
    answers = () if points else ("Its networks were not re-ranked, so their losses were not measured.",)
    return CostFront("Front of the search", cost, tuple(points), answers=answers, perplexity=FRONT_PERPLEXITY)


def _read_blackbox(path: Path) -> CostFront:
    table = _read_table(path)
    rows = zip(table["network"], table["cost"].astype(float), table["valid_ppl"].astype(float), strict=True)
    points = tuple(ParetoPoint(name, cost, ppl) for name, cost, ppl in rows)
    if any(drawable(value) is None for point in points for value in (point.cost, point.ppl)):
        raise ValueError("a cost or perplexity is not finite")
    return CostFront("Front of the black-box search", "cost of the blocks, in the unit of its study", points)
