"""The tables of the report, the analyses, and the configuration and environment of its runs."""

import base64
import shlex
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import pandas as pd

from parnas.config.loader import dump_config
from parnas.figures.report.data import (
    ComparisonData,
    NetworkRow,
    ReportData,
    RunData,
    analysis_files,
    run_row,
    validated_architecture,
)
from parnas.figures.report.result import PERPLEXITIES
from parnas.figures.report.secrets import HIDDEN, hide, is_secret
from parnas.figures.style import drawable


class TableColumn(NamedTuple):
    """A column of numbers in a table of networks.

    Attributes:
        key: Key of the value in `NetworkRow.figures`.
        title: Heading.
        form: Format of the value.
        divisor: Number by which the value is divided, such as 60 to show seconds as minutes.
        minor: Whether the page leaves the column out when it is printed, as paper is too narrow for all columns.
    """

    key: str
    title: str
    form: str
    divisor: float = 1
    minor: bool = False


_COLUMNS = (
    TableColumn("ppl", "ppl per token", "{:,.2f}"),
    TableColumn("word_ppl", "ppl per word", "{:,.2f}"),
    TableColumn("bits_per_byte", "bits per byte", "{:.4f}"),
    TableColumn("latency_ms", "ms per segment", "{:,.2f}"),
    TableColumn("latency_p95_ms", "ms, 95 %", "{:,.2f}", minor=True),
    TableColumn("multiply_adds_per_token", "MACs per token", "{:,.0f}"),
    TableColumn("parameters", "parameters", "{:,.0f}"),
    TableColumn("without_embeddings", "without embeddings", "{:,.0f}", minor=True),
    TableColumn("tgt_len", "segment", "{:,.0f}", minor=True),
    TableColumn("mem_len", "memory", "{:,.0f}", minor=True),
    TableColumn("cmem_len", "compressed memory", "{:,.0f}", minor=True),
    TableColumn("pointer_len", "pointer", "{:,.0f}", minor=True),
    TableColumn("steps", "steps", "{:,.0f}"),
    TableColumn("epochs", "epochs", "{:,.2f}", minor=True),
    TableColumn("train_seconds", "minutes of training", "{:,.1f}", 60),
    TableColumn("inherited_steps", "inherited steps", "{:,.0f}"),
    TableColumn("total_seconds", "minutes in all", "{:,.1f}", 60),
    TableColumn("train_tokens_per_s", "tokens/s in training", "{:,.0f}", minor=True),
)
_HEADS = ("run", "network", "architecture", "weights")
_COMPARED = ("ppl", "word_ppl", "bits_per_byte", "latency_ms")  # columns whose least value is marked
_DIVISORS = {"ppl": "tokens", "word_ppl": "words", "bits_per_byte": "bytes"}
# Shown in a note instead of columns if all networks have the same.
_LENGTHS = ("tgt_len", "mem_len", "cmem_len", "pointer_len")
_PROTOCOL_KEYS = {*_DIVISORS, *_DIVISORS.values(), *_LENGTHS, "parameters", "steps"}
_PROTOCOLS = {"cache": "a continuous cache", "dynamic + cache": "dynamic evaluation and a continuous cache"}
_SPLITS = {"valid": "validation", "train": "training"}
_TITLES = {
    "attention": "Age of the positions that each block attends to",
    "frequency": "Perplexity per word, by its occurrences in the training text",
    "memory": "Perplexity per token, by the length of memory",
}
_PICTURE_BYTES = 2_000_000  # of all pictures, before they are embedded
_PNG = b"\x89PNG\r\n\x1a\n"


class NetworkTable(NamedTuple):
    """A table of networks and the notes below it."""

    caption: str
    heads: tuple[str, ...]  # headings of the columns with texts: `_HEADS`, or some of them
    columns: list[TableColumn]
    rows: Sequence[NetworkRow]
    least: dict[str, float]  # lowest value by column, only for columns whose values are comparable
    notes: list[str]


class _Analysis(NamedTuple):
    """Table and pictures of an analysis that `evaluate --analyse` wrote."""

    title: str
    table: pd.DataFrame
    pictures: dict[str, str]  # PNG in base64 by file name, empty if too large or no PNG


def network_tables(data: ReportData) -> list[NetworkTable]:
    """Return a table per comparison and evaluation protocol, and a table of the runs that are in no comparison."""
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
            "Latency: time for one segment at batch size 1 with full memory, median and 95th percentile; the networks "
            "are measured in turns."
        )
    if len({run.tokens for run in comparison.runs}) > 1:
        notes.append("The runs have different tokenizers, so perplexities per token are not comparable and left out.")
    notes += [f"The run folder {place} is not there any more." for place in comparison.missing]
    return _table(f"Networks compared by evaluate{_split(comparison)}", comparison.rows, notes)


def _protocol_table(comparison: ComparisonData, protocol: str) -> NetworkTable:
    """Return the table of an evaluation protocol other than plain; its values are not comparable with other tables."""
    rows = [row for row in comparison.others if row.evaluation == protocol]
    figures = [{key: row.figures[key] for key in row.figures.keys() & _PROTOCOL_KEYS} for row in rows]
    notes = ["Figures of this evaluation protocol are comparable within this table, but not with other tables."]
    if settings := "; ".join(f"{row.name}: {row.settings}" for row in rows if row.settings):
        notes.append(f"Settings: {settings}.")
    caption = f"The same networks with {_PROTOCOLS.get(protocol, f'{protocol} evaluation')}{_split(comparison)}"
    return _table(caption, [replace(row, figures=each) for row, each in zip(rows, figures, strict=True)], notes)


def _run_table(runs: Sequence[RunData], caption: str) -> NetworkTable:
    folders = " ".join(shlex.quote(str(run.run.folder)) for run in runs)
    notes = [f"Latency and multiply-adds were not measured; this measures them: parnas evaluate {folders}."]
    if len({run.text for run in runs}) > 1:
        notes.append("The runs have different texts: their figures are not comparable.")
    elif len({run.tokens for run in runs}) > 1:
        notes.append("The runs have different tokenizers: perplexities per token are not comparable.")
    notes += [
        f"{run.name} ended with {validated} and validated that network; its derived network has no figures here."
        for run in runs
        if run.kind == "search" and (validated := validated_architecture(run))
    ]
    if unfinished := ", ".join(run.name for run in runs if run.summary is None):
        notes.append(f"Not ended yet: {unfinished}.")
    return _table(caption, [run_row(run) for run in runs], notes)


def _split(comparison: ComparisonData) -> str:
    return f" on the {_SPLITS.get(comparison.split, comparison.split)} split" if comparison.split else ""


def _table(caption: str, rows: Sequence[NetworkRow], notes: Sequence[str]) -> NetworkTable:
    """Return a table of columns with a value in some row; a note replaces `_LENGTHS` and weights that are all equal."""
    present = [column for column in _COLUMNS if any(column.key in row.figures for row in rows)]
    equal = [c for c in present if c.key in _LENGTHS and len({row.figures.get(c.key) for row in rows}) == 1]
    columns = [column for column in present if column not in equal]
    comparable = len({row.run.tokens for row in rows if row.run}) <= 1
    least = {
        column.key: min(row.figures[column.key] for row in rows if column.key in row.figures)
        for column in columns
        if column.key in _COMPARED and len(rows) > 1 and (comparable or column.key == "latency_ms")
    }
    lengths = ", ".join(f"{c.title} {value:,.0f}" for c in equal if (value := rows[0].figures[c.key]))
    more = [f"All are evaluated with: {lengths} (tokens)."] if lengths else []
    trained = {row.weights for row in rows}
    if len(trained) == 1 and rows[0].weights:
        more.append(f"Weights of all networks: {rows[0].weights}.")
    heads = _HEADS if len(trained) > 1 else _HEADS[:3]
    return NetworkTable(caption, heads, columns, rows, least, [*_divisors(rows), *notes, *more])


def _divisors(rows: Sequence[NetworkRow]) -> list[str]:
    """Return a note on the counts of tokens, words and bytes that normalise the perplexities; empty if not known."""
    parts = []
    for key, divisor in _DIVISORS.items():
        counts = sorted({row.figures[divisor] for row in rows if key in row.figures and divisor in row.figures})
        if counts:
            listed = " or ".join(f"{count:,.0f}" for count in counts[:3])
            parts.append(f"{listed} {divisor}{' (line ends included)' * (divisor == 'words')} for {PERPLEXITIES[key]}")
    return [f"The loss of the whole text is divided by {', '.join(parts)}."] if parts else []


# Analyses


def read_analyses(comparisons: Sequence[ComparisonData]) -> list[_Analysis]:
    """Read the analyses in the folders of comparisons, with pictures of up to `_PICTURE_BYTES` in total."""
    room = _PICTURE_BYTES
    analyses = []
    for comparison in comparisons:
        for name, table in comparison.analyses.items():
            pictures = {}
            files = [path for path in analysis_files(comparison.folder) if path.suffix == ".png"]
            for path in (each for each in files if each.stem.partition("-")[0] == name):
                content = path.read_bytes() if path.stat().st_size <= room else b""
                pictures[path.name] = base64.b64encode(content).decode() if content.startswith(_PNG) else ""
                room -= len(content)
            shown = _attention_shares(table) if name == "attention" else table.map(_short)
            analyses.append(_Analysis(_TITLES[name], shown, pictures))
    return analyses


def _attention_shares(table: pd.DataFrame) -> pd.DataFrame:
    """Return each block's attention to the segment, to memory and to compressed memory, as shares in per cent."""
    block = ["run", "block", "layer"]
    table = table.reindex(columns=[*block, "part", "weight"], fill_value="")
    table["weight"] = pd.to_numeric(table["weight"], errors="coerce").fillna(0)
    shares = table.pivot_table("weight", block, "part", "sum", fill_value=0, sort=False)
    return shares.map("{:.1%}".format).reset_index()


def _short(text: str) -> str:
    """Return the text of a number rounded to four significant digits; return integers and other texts unchanged."""
    try:
        value = drawable(float(text))
    except ValueError:
        return text
    return text if value is None or text.isdigit() else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


def choice_table(run: RunData) -> pd.DataFrame | None:
    """Return a table of the chosen layer and pi of each block; `None` if `arch.yaml` does not hold them."""
    if run.derivation is None or run.history is None or not run.derivation.blocks:
        return None
    rows = []
    for number, block in enumerate(run.derivation.blocks, 1):
        pi = {f"pi of {name}": _format(block.pi.get(name)) for name in run.history.space}
        measures = {"entropy": _format(block.entropy), "margin": _format(block.margin, "{:+.3f}")}
        rows.append({"block": number, "layer": block.layer, **pi, **measures})
    return pd.DataFrame(rows)


def _format(value: float | None, form: str = "{:.3f}") -> str:
    return "–" if drawable(value) is None else form.format(value)


# Configuration and environment


def describe_environment(run: RunData) -> dict[str, str]:
    """Return the machine and the software versions of a run as texts by name, with `***` for secrets."""
    flat = pd.json_normalize(run.environment.to_dict(), sep=" ").iloc[0].drop("command_line", errors="ignore").dropna()
    return {
        name.replace("_", " "): HIDDEN if is_secret(name) else hide(str(value))
        for name, value in zip(map(str, flat.index), flat, strict=True)
    }


def config_text(run: RunData) -> str:
    """Return the resolved configuration of a run as YAML, with `***` for secrets."""
    return hide(dump_config(run.config))
