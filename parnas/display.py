"""What commands show on the terminal: live where it is one, plain lines where it is not."""

import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from parnas.architecture import Architecture, describe_layer
from parnas.figures.colours import candidate_colours
from parnas.training.reporter import Reporter, describe_metrics

if TYPE_CHECKING:
    import pandas as pd

    from parnas.data.streams import StreamHeader
    from parnas.evaluation.comparison import Comparison
    from parnas.nas.derive import Derivation

BAR = 24  # characters of a block's bar of pi


def make_reporter() -> Reporter:
    """A live display on a terminal, plain lines elsewhere."""
    console = Console(stderr=True)
    return LiveReporter(console) if console.is_terminal else PlainReporter()


class PlainReporter:
    """One line per validation, note and tenth of a loop."""

    def __init__(self) -> None:
        self.title, self.steps, self.latest = "", 0, ""

    def start(self, title: str, first_step: int, steps: int) -> None:
        self.title, self.steps = title, steps
        self.note(f"{title}: steps {first_step} to {steps}")

    def advance(self, step: int) -> None:
        if step % max(1, self.steps // 10) == 0 and self.latest:
            self.note(f"{self.title} {step}/{self.steps}: {self.latest}")

    def metrics(self, record: Mapping[str, Any]) -> None:
        if record["split"] == "train":
            self.latest = describe_metrics(record)
        else:
            self.note(f"{self.title} {record['step']}/{self.steps}: {describe_metrics(record)}")

    def pi(self, space: Sequence[str], pi: Sequence[Sequence[float]]) -> None:
        likeliest = Architecture([space[max(range(len(row)), key=row.__getitem__)] for row in pi])
        self.latest += f"  pi argmax {likeliest}"

    def note(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()

    def stop(self) -> None: ...


class LiveReporter:
    """Progress, the latest metrics and pi of every block as coloured bars, redrawn in place."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=console,
        )
        self.live: Live | None = None
        self.latest: dict[str, str] = {}
        self.bars: list[Text] = []

    def start(self, title: str, first_step: int, steps: int) -> None:
        self.latest, self.bars = {}, []
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
        self.task = self.progress.add_task(title, total=steps, completed=first_step)
        self.live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4)
        self.live.start()

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def metrics(self, record: Mapping[str, Any]) -> None:
        # A new dictionary, since the thread that redraws may be reading the old one.
        self.latest = {**self.latest, record["split"]: describe_metrics(record)}

    def pi(self, space: Sequence[str], pi: Sequence[Sequence[float]]) -> None:
        self.bars = [pi_bar(number, space, row) for number, row in enumerate(pi, 1)]

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def render(self) -> RenderableType:
        """The whole display."""
        lines = [Text(text, no_wrap=True, overflow="ellipsis") for text in self.latest.values()]
        blocks: list[RenderableType] = [Columns(self.bars, padding=(0, 3))] if self.bars else []
        return Group(self.progress, *lines, *blocks)


def pi_bar(number: int, space: Sequence[str], pi: Sequence[float]) -> Text:
    """Block number, a stacked bar of its probabilities, and the likeliest candidate with its own."""
    text = Text(f"{number:>3} ")
    edges = [round(BAR * sum(pi[: index + 1])) for index in range(len(pi))]
    colours = list(candidate_colours(space).values())
    for colour, start, stop in zip(colours, [0, *edges], edges, strict=False):
        text.append("█" * (stop - start), style=colour)
    best = max(range(len(pi)), key=pi.__getitem__)
    text.append(f" {space[best]} {pi[best]:.2f}", style=colours[best])
    return text


def show_derivation(derivation: "Derivation") -> None:
    """The string, the counts, and pi, entropy and margin of each block."""
    console = Console()
    space = list(derivation.blocks[0].pi)
    table = Table(box=None, header_style="bold")
    for title in ["block", "layer", *(f"pi({name})" for name in space), "entropy", "margin"]:
        table.add_column(title, justify="left" if title == "layer" else "right")
    for number, block in enumerate(derivation.blocks, 1):
        values = [*block.pi.values(), block.entropy, block.margin]
        table.add_row(str(number), describe_layer(block.layer), *(f"{value:.3f}" for value in values))
    console.print(table)
    for warning in derivation.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    counts = ", ".join(f"{count} {describe_layer(name)}" for name, count in derivation.architecture.counts().items())
    print(f"architecture: {derivation.architecture}\n{counts}; {derivation.parameters:,} parameters")


QUALITY = {
    "network": ("network", "{}"),
    "arch": ("string", "{}"),
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
}


def show_comparison(comparison: "Comparison") -> None:
    """The comparison as two tables that fit a terminal, what the runs reach and what they cost, and its notes."""
    console = Console()
    for columns in (QUALITY, COST):
        console.print(comparison_table(comparison.table, columns))
    first = comparison.table.iloc[0]
    divisors = ", ".join(f"{first[key]:,.0f} {key}" for key in ("tokens", "words", "bytes") if key in first)
    for note in [f"divided by {divisors}", *comparison.notes]:
        console.print(f"* {note}", highlight=False)


def comparison_table(frame: "pd.DataFrame", columns: Mapping[str, tuple[str, str]]) -> Table:
    """The given columns (title and format by name) of the frame, one row per run."""
    shown = {key: column for key, column in columns.items() if key in frame}
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for title, form in shown.values():
        table.add_column(title, justify="left" if form == "{}" else "right", overflow="fold")
    for _, row in frame.iterrows():
        table.add_row(str(row["run"]), *(form.format(row[key]) for key, (_, form) in shown.items()))
    return table


def show_counts(header: "StreamHeader") -> None:
    """The counts of a corpus after encoding."""
    table = Table(box=None, header_style="bold")
    for title in ("split", "tokens", "words", "line ends", "lines", "bytes", "unknown"):
        table.add_column(title, justify="left" if title == "split" else "right")
    for split, counts in header.splits.items():
        values = (counts.tokens, counts.words, counts.line_ends, counts.lines, counts.bytes, counts.unknown)
        table.add_row(split, *(f"{value:,}" for value in values))
    Console().print(table)
    lost = ", ".join({"case": "upper and lower case", "unknown": "unknown words"}[kind] for kind in header.loses)
    print(f"vocabulary {header.vocab_size:,}; the tokenizer loses {lost or 'nothing'}")
