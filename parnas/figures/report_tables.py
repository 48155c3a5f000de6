"""The tables of the report page, and what its runs were."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from parnas.config import dump_config
from parnas.figures.report_answer import PERPLEXITIES
from parnas.figures.report_fronts import read_table
from parnas.figures.report_runs import Comparison, Material, Member, Row, ended_elsewhere, summary_row
from parnas.figures.report_secrets import HIDDEN, hide, is_secret

MOST_TOLD = 10  # rows of an analysis that a picture's text tells


class Column(NamedTuple):
    """A column of figures: its key, its heading, its format and what it is divided by to be shown."""

    key: str
    title: str
    form: str
    per: float = 1
    minor: bool = False  # not printed, where paper is too narrow


COLUMNS = (
    Column("ppl", "ppl per token", ",.2f"),
    Column("word_ppl", "ppl per word", ",.2f"),
    Column("bits_per_byte", "bits per byte", ".4f"),
    Column("latency_ms", "ms per segment", ",.2f"),
    Column("latency_p95_ms", "ms, 95 %", ",.2f", minor=True),
    Column("multiply_adds_per_token", "MACs per token", ",.0f"),
    Column("parameters", "parameters", ",.0f"),
    Column("without_embeddings", "without embeddings", ",.0f", minor=True),
    Column("tgt_len", "segment", ",.0f", minor=True),
    Column("mem_len", "memory", ",.0f", minor=True),
    Column("cmem_len", "compressed memory", ",.0f", minor=True),
    Column("steps", "steps", ",.0f"),
    Column("epochs", "epochs", ",.2f", minor=True),
    Column("train_seconds", "minutes of training", ",.1f", 60),
    Column("train_tokens_per_s", "tokens/s in training", ",.0f", minor=True),
)
BEST = {"ppl", "word_ppl", "bits_per_byte", "latency_ms"}  # columns whose least is marked


WAYS = {"cache": "a continuous cache", "dynamic + cache": "dynamic evaluation with a continuous cache"}
LENGTHS = ("tgt_len", "mem_len", "cmem_len")  # told once where all networks have the same


class Cell(NamedTuple):
    """A figure as it is shown and as it is sorted; no text where it is missing."""

    text: str
    value: float | None
    best: bool = False


class Table(NamedTuple):
    """A table of networks."""

    caption: str
    columns: list[Column]
    rows: list[tuple[Row, list[Cell]]]
    notes: list[str]


def tables_of(material: Material) -> list[Table]:
    """One for each comparison, and one of the runs that stand in none."""
    tables = [table for comparison in material.comparisons for table in _ways(comparison)]
    compared = {id(row.member) for comparison in material.comparisons for row in comparison.rows}
    if others := [member for member in material.members if id(member) not in compared]:
        tables.append(_alone(others, bool(tables)))
    return tables


def _ways(comparison: Comparison) -> list[Table]:
    """The plain evaluation and each other way by itself, since their figures do not compare."""
    ways = dict.fromkeys(row.evaluation for row in comparison.others)
    return [_compared(comparison), *(_other_way(comparison, way) for way in ways)]


def _other_way(comparison: Comparison, way: str) -> Table:
    rows = [row for row in comparison.others if row.evaluation == way]
    told = "; ".join(f"{row.name}: {row.settings}" for row in rows if row.settings)
    notes = ["Read otherwise than above: the figures compare within this table alone, and divide by the same."]
    shown = {*PERPLEXITIES, "tokens", "words", "bytes", "parameters", "steps", *LENGTHS}
    figures = [replace(row, figures={key: row.figures[key] for key in row.figures.keys() & shown}) for row in rows]
    settings = [f"Settings: {told}."] if told else []
    return _table(f"The same by {WAYS.get(way, f'{way} evaluation')}{_on(comparison)}", figures, notes + settings)


def _on(comparison: Comparison) -> str:
    splits = {"valid": "validation", "train": "training"}
    return f" on the {splits.get(comparison.split, comparison.split)} split" if comparison.split else ""


def _compared(comparison: Comparison) -> Table:
    notes = [_divisors(comparison.rows)]
    figures = [row.figures for row in comparison.rows]
    if any("latency_ms" in each for each in figures):
        notes.append(
            "Latency is of one segment of one row with full memory, networks taking turns: median and 95 % bound."
        )
    if not any("ppl" in each for each in figures):
        notes.append("The runs have different tokenizers, so perplexities per token do not compare and are left out.")
    notes += [f"The run folder {place} is not here any more." for place in comparison.missing]
    return _table(f"Networks compared by evaluate{_on(comparison)}", comparison.rows, notes)


def _alone(members: Sequence[Member], besides: bool) -> Table:
    rows = [summary_row(member) for member in members]
    title = "Runs outside the comparison" if besides else "What each run reached in its own last validation"
    folders = " ".join(shlex.quote(str(member.run.folder)) for member in members)
    notes = [
        _divisors(rows),
        f"Latency and multiply-adds were not measured; this measures them: parnas evaluate {folders}.",
    ]
    if len({member.text for member in members}) > 1:
        notes.append("The runs have different texts: nothing compares between them.")
    elif len({member.tokens for member in members}) > 1:
        notes.append("The runs have different tokenizers: perplexities per token do not compare between them.")
    notes += [
        f"{member.name} ended with {ended}, and validated that network: the one derived from it has no figures here."
        for member in members
        if member.kind == "search" and (ended := ended_elsewhere(member))
    ]
    if unfinished := [member.name for member in members if not member.summary]:
        notes.append(f"Not ended yet: {', '.join(unfinished)}.")
    return _table(title, rows, notes)


def _table(caption: str, rows: Sequence[Row], notes: Sequence[str]) -> Table:
    columns = [column for column in COLUMNS if any(column.key in row.figures for row in rows)]
    same = [
        column for column in columns if column.key in LENGTHS and len({r.figures.get(column.key) for r in rows}) == 1
    ]
    columns = [column for column in columns if column not in same]
    told = [f"{column.title} {value:,.0f}" for column in same if (value := rows[0].figures[column.key])]
    if told:
        notes = [*notes, f"All are read with: {', '.join(told)} (tokens)."]
    comparable = len({row.member.tokens for row in rows if row.member}) <= 1
    least = {
        column.key: min(row.figures[column.key] for row in rows if column.key in row.figures)
        for column in columns
        if column.key in BEST and len(rows) > 1 and (comparable or column.key == "latency_ms")
    }
    cells = [[_cell(row.figures.get(column.key), column, least.get(column.key)) for column in columns] for row in rows]
    return Table(caption, columns, list(zip(rows, cells, strict=True)), [note for note in notes if note])


def _cell(value: float | None, column: Column, least: float | None) -> Cell:
    return Cell("–", None) if value is None else Cell(f"{value / column.per:{column.form}}", value, value == least)


def _divisors(rows: Sequence[Row]) -> str:
    """What the perplexities divide by."""
    known = {"ppl": "tokens", "word_ppl": "words", "bits_per_byte": "bytes"}
    told = []
    for key, divisor in known.items():
        counts = sorted({row.figures[divisor] for row in rows if key in row.figures and divisor in row.figures})
        if counts:
            listed = " or ".join(f"{count:,.0f}" for count in counts[:3])
            told.append(f"{PERPLEXITIES[key]} by {listed} {divisor}" + " (line ends included)" * (divisor == "words"))
    return f"What figures divide by: {', '.join(told)}." if told else ""


# Analyses


def analysis_table(path: Path, name: str) -> tuple[list[str], list[list[str]]]:
    """Headings and rows of an analysis that `evaluate --analyse` wrote; attention by part, not by age."""
    rows = read_table(path)
    if name == "attention":
        rows = _shares(rows)
    heads = list(rows[0]) if rows else []
    return heads, [[_short(row.get(head, "")) for head in heads] for row in rows]


def tell_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """The first rows in words."""
    told = [
        ", ".join(f"{head} {cell}" for head, cell in zip(heads, row, strict=True) if cell) for row in rows[:MOST_TOLD]
    ]
    return "; ".join(told) + ("; and so on." if len(rows) > MOST_TOLD else ".")


def _shares(rows: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    """Of each block, how much of its attention goes to each part."""
    sums: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        block = sums.setdefault((row.get("run", ""), row.get("block", ""), row.get("layer", "")), {})
        part = row.get("part", "")
        block[part] = block.get(part, 0.0) + (_float(row.get("weight", "")) or 0.0)
    parts = list(dict.fromkeys(part for block in sums.values() for part in block))
    return [
        {"run": run, "block": block, "layer": layer, **{part: f"{of.get(part, 0.0):.1%}" for part in parts}}
        for (run, block, layer), of in sums.items()
    ]


def _float(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _short(text: str) -> str:
    """Figures with four digits, other text as it is."""
    value = _float(text)
    return text if value is None or text.isdigit() else f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"


# What a run was


def describe_run(member: Member) -> dict[str, str]:
    """What is known of the machine and the program."""
    flat: dict[str, str] = {}
    for key, value in member.environment.items():
        inner = value.items() if isinstance(value, Mapping) else [("", value)]
        for name, each in inner:
            if key != "command_line" and each is not None:
                label = f"{key} {name}".strip().replace("_", " ")
                flat[label] = HIDDEN if is_secret(str(name)) or is_secret(key) else hide(str(each))
    return flat


def config_text(member: Member) -> str:
    """The resolved configuration, as `--run` would write it."""
    return hide(dump_config(member.config))
