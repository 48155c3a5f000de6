"""What a report is made of: run folders, comparisons and what stands beside them, read and checked."""

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parnas.architecture import Architecture, drop_identity
from parnas.config import Config
from parnas.errors import ParnasError
from parnas.figures.history import PiHistory
from parnas.figures.report_fronts import BASELINES, FRONT, Front, number, read_front, read_table
from parnas.files import leads_out, read_json, read_json_object, refuse_foreign_link
from parnas.run import ENVIRONMENT, METRICS, PI, PLAIN, STREAMS, Run, name_runs

COMPARISON = "comparison.json"
ANALYSES = ("attention", "frequency", "memory")
CURE = "give run folders, or a folder that evaluate --out, baselines or blackbox wrote"

Records = list[dict[str, Any]]


@dataclass(frozen=True)
class Member:
    """A run: what it was asked, what it logged and, where it has ended, what it reached."""

    run: Run
    name: str
    kind: str  # search or retrain
    config: Config
    environment: Mapping[str, Any]
    metrics: Records
    summary: Mapping[str, Any]  # empty of a run that has not ended
    architecture: Architecture | None  # derived or trained; none of a search before derive
    derivation: Mapping[str, Any] = field(default_factory=dict)  # arch.yaml
    history: PiHistory | None = None  # of a search that logged some pi

    @property
    def text(self) -> str:
        """Equal for runs on the same text."""
        return str(self._streams().get("fingerprint") or self.config.data.corpus)

    @property
    def tokens(self) -> str:
        """Equal for runs whose perplexities per token compare."""
        counts = self._streams().get("splits")  # which the version of a tokenizer's library may change
        return f"{self.text} {self.config.data.tokenizer.model_dump_json()} {counts}"

    def _streams(self) -> Mapping[str, Any]:
        path = self.run.folder / STREAMS
        return read_json_object(path) if path.is_file() else {}


@dataclass(frozen=True)
class Row:
    """A network of a table, with its finite figures by key."""

    name: str
    network: str  # as evaluate calls it: discrete, SuperNet or the derived one in it
    arch: str
    figures: Mapping[str, float]
    member: Member | None = None
    evaluation: str = PLAIN  # the way of scoring; figures of different ways do not compare
    settings: str = ""  # of the way


@dataclass(frozen=True)
class Comparison:
    """What `evaluate` wrote into a folder."""

    folder: Path
    rows: tuple[Row, ...]  # of the plain evaluation
    split: str | None  # not in files of older versions
    missing: tuple[str, ...]  # run folders that it names and that are not here
    conditions: Mapping[str, Any] | None  # what evaluate was asked for; none in files of older versions
    others: tuple[Row, ...] = ()  # of other ways of evaluation


@dataclass(frozen=True)
class Material:
    """All that a report shows."""

    members: tuple[Member, ...]
    comparisons: tuple[Comparison, ...]
    fronts: tuple[Front, ...]

    @property
    def searches(self) -> list[Member]:
        """The searches among the runs."""
        return [member for member in self.members if member.kind == "search"]


def gather(paths: Sequence[Path]) -> Material:
    """Read the folders; raises `ParnasError` for those that hold nothing to report, or something broken.

    A comparison brings the runs that it names, and the searches that lie in its folder, as the demo leaves them.
    """
    if not paths:
        raise ParnasError(f"There is nothing to report; {CURE}.")
    runs: dict[str, Run] = {}
    tables: list[tuple[Path, Records, dict[str, Run]]] = []
    fronts: list[Path] = []
    for path in paths:
        if not path.is_dir():
            raise ParnasError(f"There is no run folder {path}; {CURE}.")
        found = [name for name in (COMPARISON, BASELINES, FRONT) if (path / name).is_file()]
        if (path / ENVIRONMENT).is_file():
            _add(runs, Run(path))
        elif not found and (path / "config.yaml").is_file():
            raise ParnasError(
                f"{path} has no {ENVIRONMENT}, so it is no run; search or retrain writes it. Else {CURE}."
            )
        elif not found:
            raise ParnasError(f"{path} holds neither a run nor a comparison; {CURE}.")
        _refuse_links(path)
        if COMPARISON in found:
            rows = _read_rows(path / COMPARISON)
            theirs = _runs_of(path, rows)
            tables.append((path, rows, theirs))
            for run in (*_searches_in(path), *theirs.values()):
                _add(runs, run)
        fronts += [path / name for name in found if name != COMPARISON]
    fronts += [run.folder / "baselines" / BASELINES for run in runs.values()]
    fronts = [path for path in dict.fromkeys(fronts) if path.is_file()]
    named = zip(runs, runs.values(), name_runs(list(runs.values())), strict=True)
    members = {key: read_member(run, name) for key, run, name in named}
    comparisons = tuple(_comparison(path, rows, theirs, members) for path, rows, theirs in tables)
    return Material(tuple(members.values()), comparisons, tuple(map(read_front, fronts)))


def read_member(run: Run, name: str) -> Member:
    """Read a run that the page calls `name`; one that has just begun may lack what it has not yet written."""
    kind, config = run.kind(), run.config()
    metrics = run.records(METRICS) if (run.folder / METRICS).is_file() else []
    summary = run.summary() if run.finished() else {}
    if kind != "search":
        arch = Architecture.parse(config.model.arch) if config.model.arch else None
        return Member(run, name, kind, config, run.environment(), metrics, summary, arch)
    derivation = run.arch_file() if (run.folder / "arch.yaml").is_file() else {}
    arch = Architecture.parse(derivation["arch"]) if derivation else None
    logged = (run.folder / PI).is_file() and bool(run.records(PI))
    history = PiHistory.from_run(run) if logged else None
    return Member(run, name, kind, config, run.environment(), metrics, summary, arch, derivation, history)


def summary_row(member: Member) -> Row:
    """What a run says of itself: its last validation, since nothing else was measured."""
    summary, arch = member.summary, _network_of(member)
    if member.kind == "search":
        counts = {key: value for key, value in _renamed(summary).items() if key in ("steps", "train_seconds")}
        figures = _figures({**_argmax_validation(member, arch), **counts})  # its other counts are of the SuperNet
        return Row(member.name, "derived, in SuperNet", str(arch or ""), figures, member)
    valid = summary.get("valid")
    figures = _figures({**(valid if isinstance(valid, Mapping) else _last_validation(member)), **_renamed(summary)})
    return Row(member.name, "discrete", str(arch or ""), figures, member)


def ended_elsewhere(search: Member) -> str | None:
    """The string that a search ended with, where it is not the network that was derived, so its figures are another's.

    Also none where the search has not ended.
    """
    ended = search.summary.get("arch")
    return ended if isinstance(ended, str) and not same_network(read(ended), _network_of(search) or ()) else None


def read(arch: str) -> Architecture | None:
    """An architecture, or none where its letters are not known here."""
    try:
        return Architecture.parse(arch)
    except ParnasError:
        return None


def same_network(one: Iterable[str] | None, other: Iterable[str]) -> bool:
    """Whether they are one network; identity does nothing."""
    return one is not None and drop_identity(one) == drop_identity(other)


def analyses_of(comparison: Comparison) -> list[str]:
    """The analyses that lie beside a comparison and are of its runs; an earlier one may have left others."""
    names = {row.name for row in comparison.rows}
    there = [name for name in ANALYSES if (comparison.folder / f"{name}.csv").is_file()]
    return [
        name for name in there if {row.get("run") for row in read_table(comparison.folder / f"{name}.csv")} <= names
    ]


def analysis_files(folder: Path) -> list[Path]:
    """Tables and pictures of analyses beside a comparison."""
    endings = (".csv", ".png", "-*.png")
    return list(itertools.chain(*(folder.glob(f"{name}{ending}") for name in ANALYSES for ending in endings)))


def _add(runs: dict[str, Run], run: Run) -> None:
    """Keep a run under its real place, so that none is shown twice."""
    runs.setdefault(os.path.realpath(run.folder), run)


def _read_rows(path: Path) -> Records:
    rows: Any = read_json(path)
    fine = isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows)
    if not fine or not all(isinstance(row.get(key), str) for row in rows for key in ("run", "arch")):
        raise ParnasError(f"{path} is no comparison; give evaluate again.")
    texts = ("folder", "split", "network", "evaluation", "settings")
    if not all(isinstance(row.get(key, ""), str) for row in rows for key in texts):
        raise ParnasError(f"{path} names a folder, split or evaluation that is no text; give evaluate again.")
    if not any(row.get("evaluation", PLAIN) == PLAIN for row in rows):
        raise ParnasError(f"{path} has no row of the plain evaluation; give evaluate again.")
    return list(rows)


def _runs_of(folder: Path, rows: Records) -> dict[str, Run]:
    """The runs of a comparison that are here, by their names in it."""
    here = Path(os.path.realpath(folder))  # which is where the paths lead from
    places = {row["run"]: Path(os.path.normpath(here / row["folder"])) for row in rows if row.get("folder")}
    return {name: Run(place) for name, place in places.items() if (place / ENVIRONMENT).is_file()}


def _searches_in(folder: Path) -> list[Run]:
    found = [path.parent for path in sorted(folder.glob(f"*/{ENVIRONMENT}")) if not leads_out(path.parent, folder)]
    runs = [Run(place) for place in found if (place / "config.yaml").is_file()]
    return [run for run in runs if run.kind() == "search"]


def _refuse_links(folder: Path) -> None:
    """Look at what is read of a folder that may be anything else too, such as a project's; runs look at themselves."""
    tables = [folder / name for name in (COMPARISON, BASELINES, FRONT)]
    for path in (*tables, *analysis_files(folder)):
        refuse_foreign_link(path, folder)
        if path.exists() and not path.is_file():
            raise ParnasError(f"{path} is no file; remove it.")  # a pipe may never end


def _comparison(path: Path, rows: Records, runs: Mapping[str, Run], members: Mapping[str, Member]) -> Comparison:
    named = {member.name: member for member in members.values()}

    def of(row: Mapping[str, Any]) -> Member | None:
        if "folder" not in row:  # files of older versions name the runs alone
            return named.get(row["run"])
        run = runs.get(row["run"])
        return None if run is None else members[os.path.realpath(run.folder)]

    read_rows = [
        Row(
            row["run"],
            row.get("network", ""),
            row["arch"],
            _figures(row),
            of(row),
            row.get("evaluation", PLAIN),
            row.get("settings", ""),
        )
        for row in rows
    ]
    return Comparison(
        path,
        tuple(row for row in read_rows if row.evaluation == PLAIN),
        rows[0].get("split"),
        tuple(dict.fromkeys(row["folder"] for row in rows if row.get("folder") and row["run"] not in runs)),
        conditions if isinstance(conditions := rows[0].get("conditions"), Mapping) else None,
        tuple(row for row in read_rows if row.evaluation != PLAIN),
    )


def _figures(values: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, each in values.items() if (value := number(each)) is not None}


def _renamed(summary: Mapping[str, Any]) -> dict[str, Any]:
    """The figures of a summary under the names that a comparison has for them."""
    names = {"steps": "steps", "seconds": "train_seconds", "parameters": "parameters"}
    names["parameters_without_embeddings"] = "without_embeddings"
    return {new: summary.get(old) for old, new in names.items()}


def _last_validation(member: Member) -> dict[str, Any]:
    return next((line for line in reversed(member.metrics) if line.get("split") == "valid"), {})


def _network_of(member: Member) -> Architecture | None:
    """What was trained or derived, or what derive would take by the last pi."""
    return member.architecture or (Architecture(member.history.derived[-1]) if member.history else None)


def _argmax_validation(search: Member, arch: Architecture | None) -> Mapping[str, Any]:
    """What a network has reached in the last validation of a search, if it was this one that was validated."""
    if arch is None:
        return {}
    if search.summary:
        reached, ended = (search.summary.get(key) for key in ("argmax", "arch"))
        alike = isinstance(ended, str) and same_network(read(ended), arch)
        return reached if alike and isinstance(reached, Mapping) else {}
    line, history = _last_validation(search), search.history
    strings = {} if history is None else dict(zip(history.steps.tolist(), history.derived, strict=True))
    alike = same_network(strings.get(line.get("step")), arch)
    return {"ppl": line.get("argmax_ppl")} if alike else {}
