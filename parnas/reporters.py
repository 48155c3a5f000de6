"""Who watches a command: a live display on a terminal, plain lines elsewhere, and TensorBoard beside either."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from parnas.architecture import Architecture
from parnas.figures.colours import candidate_colours
from parnas.tensorboard import TensorBoard
from parnas.training.reporter import Loop, Reporter, Silent, describe_metrics

BAR = 24  # characters of a block's bar of pi


def make_reporter(quiet: bool = False, verbose: bool = False) -> Reporter:
    """A live display on a terminal, plain lines elsewhere; and TensorBoard's files in the folder of each training.

    quiet: warnings alone. verbose: a plain line for every line of `metrics.jsonl`, on a terminal too.
    """
    return Several(make_shown(quiet, every=verbose, live=not verbose), TensorBoard())


def make_shown(quiet: bool, every: bool, live: bool = True) -> Reporter:
    """What `make_reporter` gives, without TensorBoard; `live` where there is a terminal, else `every` line or some."""
    console = Console(stderr=True)
    if quiet:
        return Warnings()
    return LiveReporter(console) if console.is_terminal and live else PlainReporter(every)


class Several:
    """Tells each of several reporters."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    def start(self, loop: Loop) -> None:
        for reporter in self.reporters:
            reporter.start(loop)

    def advance(self, step: int) -> None:
        for reporter in self.reporters:
            reporter.advance(step)

    def metrics(self, record: Mapping[str, Any]) -> None:
        for reporter in self.reporters:
            reporter.metrics(record)

    def pi(self, space: Sequence[str], record: Mapping[str, Any]) -> None:
        for reporter in self.reporters:
            reporter.pi(space, record)

    def note(self, text: str) -> None:
        for reporter in self.reporters:
            reporter.note(text)

    def stop(self) -> None:
        for reporter in self.reporters:
            reporter.stop()


class Warnings(Silent):
    """Shows warnings, and nothing else."""

    def note(self, text: str) -> None:
        if text.startswith("warning: "):
            sys.stderr.write(f"{text}\n")


class PlainReporter:
    """One line per validation, note and tenth of a loop; or with `every`, per line of the metrics."""

    def __init__(self, every: bool = False) -> None:
        self.title, self.steps, self.latest, self.every = "", 0, "", every  # latest: what was logged and not yet shown

    def start(self, loop: Loop) -> None:
        self.title, self.steps, self.latest = loop.title, loop.steps, ""
        self.note(f"{loop.title}: {loop.unit} {loop.first_step} to {loop.steps}")

    def advance(self, step: int) -> None:
        if not self.every and step % max(1, self.steps // 10) == 0 and self.latest:
            self.note(self.latest)
            self.latest = ""

    def metrics(self, record: Mapping[str, Any]) -> None:
        line = f"{self.title} {record['step']}/{self.steps}: {describe_metrics(record)}"
        if record["split"] == "train" and not self.every:
            self.latest = line
        else:
            self.note(line)

    def pi(self, space: Sequence[str], record: Mapping[str, Any]) -> None:
        likeliest = Architecture([space[max(range(len(row)), key=row.__getitem__)] for row in record["pi"]])
        if self.every:
            self.note(f"{self.title} {record['step']}/{self.steps}: pi argmax {likeliest}")
        else:
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

    def start(self, loop: Loop) -> None:
        self.latest, self.bars = {}, []
        for task in self.progress.task_ids:
            self.progress.remove_task(task)
        shown = loop.title if loop.unit == "steps" else f"{loop.title}, {loop.unit}"
        self.task = self.progress.add_task(shown, total=loop.steps, completed=loop.first_step)
        self.live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4)
        self.live.start()

    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    def metrics(self, record: Mapping[str, Any]) -> None:
        # A new dictionary, since the thread that redraws may be reading the old one.
        self.latest = {**self.latest, record["split"]: describe_metrics(record)}

    def pi(self, space: Sequence[str], record: Mapping[str, Any]) -> None:
        self.bars = [pi_bar(number, space, row) for number, row in enumerate(record["pi"], 1)]

    def note(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    def stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def render(self) -> RenderableType:
        """The whole display."""
        lines = [Text(text) for text in self.latest.values()]
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
