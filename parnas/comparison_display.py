"""What `evaluate` and `adapt` show on the terminal."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from parnas.run import PLAIN

if TYPE_CHECKING:
    import pandas as pd

    from parnas.evaluation.adapt import Adaptation
    from parnas.evaluation.comparison import Comparison

QUALITY = {
    "network": ("network", "{}"),
    "arch": ("string", "{}"),
    "evaluation": ("evaluation", "{}"),
    "bits_per_byte": ("bits/byte", "{:.4f}"),
    "ppl": ("ppl/token", "{:.2f}"),
    "word_ppl": ("ppl/word", "{:.2f}"),
    "parameters": ("parameters", "{:,.0f}"),
}
COST = {
    "without_embeddings": ("w/o embed.", "{:,.0f}"),
    "multiply_adds_per_token": ("MACs/tok", "{:,.0f}"),
    "latency_ms": ("ms/seg.", "{:.2f}"),
    "latency_p95_ms": ("p95", "{:.2f}"),
    "train_tokens_per_s": ("train tok/s", "{:,.0f}"),
    "train_seconds": ("train s", "{:,.0f}"),
    "tgt_len": ("tgt", "{:.0f}"),
    "mem_len": ("mem", "{:.0f}"),
    "cmem_len": ("cmem", "{:.0f}"),
}


def show_comparison(comparison: "Comparison") -> None:
    """The comparison as two tables that fit a terminal, what the runs reach and what they cost, and its notes."""
    console, table = Console(), comparison.table
    plain = table[table["evaluation"] == PLAIN]
    quality = {key: column for key, column in QUALITY.items() if key != "evaluation" or len(plain) < len(table)}
    console.print(comparison_table(table, quality))
    console.print(comparison_table(plain, COST))  # of which other ways have none
    first = table.iloc[0]
    divisors = ", ".join(f"{first[key]:,.0f} {key}" for key in ("tokens", "words", "bytes") if key in first)
    settings = [
        f"{row['run']}, {row['evaluation']}: {row['settings']}" for _, row in table.iterrows() if "settings" in row
    ]
    told = [text for text in settings if not text.endswith(": ")]
    for note in [f"divided by {divisors}", *comparison.notes, *told]:
        console.print(f"* {note}", highlight=False, markup=False)


def show_adaptation(adaptation: "Adaptation") -> None:
    """What was chosen for each way beside the plain evaluation, and the notes."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("evaluation", "ppl/token", "tried", "settings"):
        table.add_column(title, justify="right" if title in ("ppl/token", "tried") else "left", overflow="fold")
    for trial in (adaptation.plain, *adaptation.chosen.values()):
        tried = sum(each.way.name == trial.way.name for each in adaptation.trials)
        table.add_row(trial.way.name, f"{trial.total.perplexity:.2f}", str(tried or ""), trial.way.settings)
    console = Console()
    console.print(table)
    told = f"on the first {adaptation.measured['tokens']:,} tokens of the validation split"
    for note in (told, *adaptation.notes):
        console.print(f"* {note}", highlight=False, markup=False)


def comparison_table(frame: "pd.DataFrame", columns: Mapping[str, tuple[str, str]]) -> Table:
    """The given columns (title and format by name) of the frame, one row per run; a dash where there is no figure."""
    import pandas as pd

    shown = {key: column for key, column in columns.items() if key in frame}
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for title, form in shown.values():
        table.add_column(title, justify="left" if form == "{}" else "right", overflow="fold")
    for _, row in frame.iterrows():
        cells = ("–" if pd.isna(row[key]) else form.format(row[key]) for key, (_, form) in shown.items())
        table.add_row(escape(str(row["run"])), *cells)
    return table
