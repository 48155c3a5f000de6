"""The tables of the report, the analyses, and the configuration and environment of its runs."""

import base64
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from parnas.config.loader import dump_config
from parnas.figures.report.data import (
    ComparisonData,
    NetworkRow,
    ReportData,
    RunData,
    read_table,
    run_row,
    validated_architecture,
)
from parnas.figures.report.result import PERPLEXITIES
from parnas.figures.report.secrets import HIDDEN, hide, is_secret
from parnas.figures.style import PNG_DPI, drawable


class TableColumn(NamedTuple):
    """A column of figures: key, heading, format, divisor, and whether paper is too narrow for it."""

    key: str
    title: str
    form: str
    divisor: float = 1
    minor: bool = False


_COLUMNS = (
    TableColumn("ppl", "ppl per token", ",.2f"),
    TableColumn("word_ppl", "ppl per word", ",.2f"),
    TableColumn("bits_per_byte", "bits per byte", ".4f"),
    TableColumn("latency_ms", "ms per segment", ",.2f"),
    TableColumn("latency_p95_ms", "ms, 95 %", ",.2f", minor=True),
    TableColumn("multiply_adds_per_token", "MACs per token", ",.0f"),
    TableColumn("parameters", "parameters", ",.0f"),
    TableColumn("without_embeddings", "without embeddings", ",.0f", minor=True),
    TableColumn("tgt_len", "segment", ",.0f", minor=True),
    TableColumn("mem_len", "memory", ",.0f", minor=True),
    TableColumn("cmem_len", "compressed memory", ",.0f", minor=True),
    TableColumn("steps", "steps", ",.0f"),
    TableColumn("epochs", "epochs", ",.2f", minor=True),
    TableColumn("train_seconds", "minutes of training", ",.1f", 60),
    TableColumn("train_tokens_per_s", "tokens/s in training", ",.0f", minor=True),
)
_COMPARED = ("ppl", "word_ppl", "bits_per_byte", "latency_ms")  # columns whose least value is marked
DIVISORS = {"ppl": "tokens", "word_ppl": "words", "bits_per_byte": "bytes"}
LENGTHS = ("tgt_len", "mem_len", "cmem_len")  # in a note where all networks have the same
_PROTOCOL_KEYS = {*DIVISORS, *DIVISORS.values(), *LENGTHS, "parameters", "steps"}
PROTOCOLS = {"cache": "a continuous cache", "dynamic + cache": "dynamic evaluation with a continuous cache"}
SPLITS = {"valid": "validation", "train": "training"}
_TITLES = {
    "attention": "Age of the positions that each block attends to",
    "frequency": "Perplexity per word, by its occurrences in the training text",
    "memory": "Perplexity per token, by the length of memory",
}
_PICTURE_BYTES = 2_000_000  # of all pictures, before they are embedded
PNG = b"\x89PNG\r\n\x1a\n"


class TableCell(NamedTuple):
    """A figure as text and as a number to sort by, which is `None` where the figure is missing."""

    text: str
    value: float | None
    best: bool = False


class NetworkTable(NamedTuple):
    """A table of networks and the notes below it."""

    caption: str
    columns: list[TableColumn]
    rows: list[tuple[NetworkRow, list[TableCell]]]
    notes: list[str]


class Picture(NamedTuple):
    """A PNG for the page, and its width there in CSS pixels; without data where there was no room."""

    name: str
    data: str
    width: int


class ShownAnalysis(NamedTuple):
    """Table and pictures of an analysis that `evaluate --analyse` wrote."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    pictures: list[Picture]


def network_tables(data: ReportData) -> list[NetworkTable]:
    """Return a table for each comparison and evaluation protocol, and one of the runs in no comparison."""
    tables = []
    for comparison in data.comparisons:
        protocols = dict.fromkeys(row.evaluation for row in comparison.others)
        tables += [_plain_table(comparison), *(_protocol_table(comparison, name) for name in protocols)]
    compared = {run.name for comparison in data.comparisons for run in comparison.runs}
    if others := [run for run in data.runs if run.name not in compared]:
        tables.append(_run_table(others, "Runs outside the comparison" if tables else "Last validation of each run"))
    return tables


def _plain_table(comparison: ComparisonData) -> NetworkTable:
    notes = []
    if any("latency_ms" in row.figures for row in comparison.rows):
        notes.append(
            "Latency is of one segment of one row with full memory, networks taking turns: median and 95 % bound."
        )
    if not any("ppl" in row.figures for row in comparison.rows):
        notes.append("The runs have different tokenizers, so perplexities per token are not comparable and left out.")
    notes += [f"The run folder {place} is not there any more." for place in comparison.missing]
    return _table(f"Networks compared by evaluate{_split(comparison)}", comparison.rows, notes)


def _protocol_table(comparison: ComparisonData, protocol: str) -> NetworkTable:
    """Return a table of another evaluation protocol, whose perplexities are not comparable with the main table's."""
    rows = [row for row in comparison.others if row.evaluation == protocol]
    figures = [{key: row.figures[key] for key in row.figures.keys() & _PROTOCOL_KEYS} for row in rows]
    notes = ["Another evaluation protocol: its figures are comparable within this table only."]
    if settings := "; ".join(f"{row.name}: {row.settings}" for row in rows if row.settings):
        notes.append(f"Settings: {settings}.")
    caption = f"The same by {PROTOCOLS.get(protocol, f'{protocol} evaluation')}{_split(comparison)}"
    return _table(caption, [replace(row, figures=each) for row, each in zip(rows, figures, strict=True)], notes)


def _run_table(runs: Sequence[RunData], caption: str) -> NetworkTable:
    folders = " ".join(shlex.quote(str(run.run.folder)) for run in runs)
    notes = [f"Latency and multiply-adds were not measured; this measures them: parnas evaluate {folders}."]
    if len({run.text for run in runs}) > 1:
        notes.append("The runs have different texts: nothing compares between them.")
    elif len({run.tokens for run in runs}) > 1:
        notes.append("The runs have different tokenizers: perplexities per token are not comparable.")
    notes += [
        f"{run.name} ended with {validated} and validated that network: the derived one has no figures here."
        for run in runs
        if run.kind == "search" and (validated := validated_architecture(run))
    ]
    if unfinished := ", ".join(run.name for run in runs if run.summary is None):
        notes.append(f"Not ended yet: {unfinished}.")
    return _table(caption, [run_row(run) for run in runs], notes)


def _split(comparison: ComparisonData) -> str:
    return f" on the {SPLITS.get(comparison.split, comparison.split)} split" if comparison.split else ""


def _table(caption: str, rows: Sequence[NetworkRow], notes: Sequence[str]) -> NetworkTable:
    """Return a table of the columns that any row has, with the lowest value marked where values are comparable."""
    present = [column for column in _COLUMNS if any(column.key in row.figures for row in rows)]
    equal = [c for c in present if c.key in LENGTHS and len({row.figures.get(c.key) for row in rows}) == 1]
    columns = [column for column in present if column not in equal]
    comparable = len({row.run.tokens for row in rows if row.run}) <= 1
    least = {
        key: min(row.figures[key] for row in rows if key in row.figures)
        for key in (column.key for column in columns)
        if key in _COMPARED and len(rows) > 1 and (comparable or key == "latency_ms")
    }
    cells = [[_cell(row.figures.get(column.key), column, least.get(column.key)) for column in columns] for row in rows]
    lengths = [f"{column.title} {value:,.0f}" for column in equal if (value := rows[0].figures[column.key])]
    more = [f"All are evaluated with: {', '.join(lengths)} (tokens)."] if lengths else []
    return NetworkTable(caption, columns, list(zip(rows, cells, strict=True)), [*_divisors(rows), *notes, *more])


def _cell(value: float | None, column: TableColumn, least: float | None) -> TableCell:
    return (
        TableCell("–", None)
        if value is None
        else TableCell(f"{value / column.divisor:{column.form}}", value, value == least)
    )


def _divisors(rows: Sequence[NetworkRow]) -> list[str]:
    """Return a sentence on the counts that the perplexities divide by."""
    parts = []
    for key, divisor in DIVISORS.items():
        counts = sorted({row.figures[divisor] for row in rows if key in row.figures and divisor in row.figures})
        if counts:
            listed = " or ".join(f"{count:,.0f}" for count in counts[:3])
            parts.append(f"{PERPLEXITIES[key]} by {listed} {divisor}" + " (line ends included)" * (divisor == "words"))
    return [f"Divisors: {', '.join(parts)}."] if parts else []


# Analyses


def shown_analyses(comparisons: Sequence[ComparisonData]) -> list[ShownAnalysis]:
    """Read the analyses in the folders of the comparisons; their pictures share `_PICTURE_BYTES`."""
    room = _PICTURE_BYTES
    shown = []
    for comparison in comparisons:
        for name in comparison.analyses:
            table = read_table(comparison.folder / f"{name}.csv")
            table = _attention_shares(table) if name == "attention" and table else table
            heads = list(table[0]) if table else []
            rows = [[_short(row.get(head, "")) for head in heads] for row in table]
            pictures = []
            for path in sorted([*comparison.folder.glob(f"{name}.png"), *comparison.folder.glob(f"{name}-*.png")]):
                pictures.append(_picture(path, room))
                room -= len(pictures[-1].data)
            shown.append(ShownAnalysis(_TITLES[name], heads, rows, pictures))
    return shown


def _picture(path: Path, room: int) -> Picture:
    """Read a PNG; without data where it is too large or no PNG."""
    content = path.read_bytes() if path.stat().st_size <= room else b""
    if not content.startswith(PNG) or len(content) < 24:
        return Picture(path.name, "", 0)
    width = int.from_bytes(content[16:20], "big") * 96 // PNG_DPI
    return Picture(path.name, base64.b64encode(content).decode(), width)


def _attention_shares(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Sum the attention of each block over the ages, for each part of what it attends to."""
    block = ["run", "block", "layer"]
    table = pd.DataFrame(rows, columns=[*block, "part", "weight"]).fillna("")
    table["weight"] = pd.to_numeric(table["weight"], errors="coerce").fillna(0)
    shares = table.pivot_table("weight", block, "part", "sum", fill_value=0, sort=False)
    records = shares.map("{:.1%}".format).reset_index().to_dict("records")
    return [{str(key): str(value) for key, value in record.items()} for record in records]


def _short(text: str) -> str:
    """Shorten figures to four digits."""
    try:
        value = drawable(float(text))
    except ValueError:
        return text
    return text if value is None or text.isdigit() else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def choice_table(run: RunData) -> tuple[list[str], list[list[str]]] | None:
    """Return headings and rows of the choice for each block, `None` where `arch.yaml` does not hold it."""
    if run.derivation is None or run.history is None or not run.derivation.blocks:
        return None
    space = run.history.space
    rows = []
    for number, block in enumerate(run.derivation.blocks, 1):
        pi = [_format(block.pi.get(name)) for name in space]
        rows.append([str(number), block.layer, *pi, _format(block.entropy), _format(block.margin, "+.3f")])
    return ["block", "layer", *(f"pi of {name}" for name in space), "entropy", "lead"], rows


def _format(value: float | None, form: str = ".3f") -> str:
    number = drawable(value)
    return "–" if number is None else f"{number:{form}}"


# Configuration and environment


def describe_environment(run: RunData) -> dict[str, str]:
    """Return the machine and the versions of a run, without secrets."""
    flat: dict[str, str] = {}
    for key, value in run.environment.to_dict().items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, each in inner:
            if key != "command_line" and each is not None:
                label = f"{key} {name}".strip().replace("_", " ")
                flat[label] = HIDDEN if is_secret(str(name)) or is_secret(key) else hide(str(each))
    return flat


def config_text(run: RunData) -> str:
    """Return the resolved configuration as YAML, without secrets."""
    return hide(dump_config(run.config))
