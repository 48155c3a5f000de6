"""Progress of a training: the reporter protocol, the terminal displays and TensorBoard."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from rich.columns import Columns
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text
from typing_extensions import override

from parnas.architecture import Architecture
from parnas.figures.colours import candidate_colours
from parnas.runs.records import MetricsRecord, PiRecord

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

__all__ = [
    "CombinedReporter",
    "Loop",
    "Reporter",
    "Silent",
    "TensorBoard",
    "describe_metrics",
    "make_display",
    "make_reporter",
    "pi_bar",
]


class Loop(NamedTuple):
    """A loop whose progress is reported: its title, range of steps, and the unit that the steps count."""

    title: str
    first_step: int  # number of steps done before; 0 unless the loop is resumed
    steps: int  # total number of steps, including those done before
    unit: str = "steps"  # plural, such as "segments"
    folder: Path | None = None  # the run folder; None unless the loop is a training


class Reporter:
    """Interface that receives the progress of a command; the methods of this base class do nothing."""

    def start(self, loop: Loop) -> None:
        """Start to report a loop."""

    def advance(self, step: int) -> None:
        """Report that `step` steps are done; metrics of these steps were reported before."""

    def metrics(self, record: MetricsRecord) -> None:
        """Report a line of `metrics.jsonl`."""

    def pi(self, space: Sequence[str], record: PiRecord) -> None:
        """Report a line of `pi.jsonl`; the columns of its `pi` [blocks, candidates] are the candidates in `space`."""

    def note(self, text: str) -> None:
        """Report a line of text."""

    def stop(self) -> None:
        """End the report of a loop, whether or not the loop succeeded."""


class Silent(Reporter):
    """Reports nothing."""


_METRIC_FORMATS = {
    "local_loss": "loss of the layers {:.3f}",
    "argmax_ppl": "argmax ppl {:.2f}",
    "gap": "mixture behind argmax by {:.3f}",
    "bits_per_byte": "bits/byte {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "lr": "lr {:.1e}",
    "tau": "tau {:.3f}",
    "expected_cost": "cost {:.2f}",
    "entropy": "entropy {:.2f}",
    "identity_share": "identity {:.0%}",
    "argmax_changes": "argmax changed {} times",
}
"""Format of each metric that a line may show besides loss and perplexity; local distillation has neither."""


def describe_metrics(record: MetricsRecord) -> str:
    """Return the metrics of a record, a line of `metrics.jsonl`, as text for a terminal or a log."""
    values = ((template, getattr(record, key)) for key, template in _METRIC_FORMATS.items())
    known = [template.format(value) for template, value in values if value is not None]
    loss = [] if record.local_loss is not None else [f"loss {record.loss:.3f}  ppl {record.ppl:.2f}"]
    return f"{record.split:<5} " + "  ".join([*loss, *known])


_BAR_WIDTH = 24  # characters of a block's bar of pi


def make_reporter(quiet: bool = False, verbose: bool = False) -> Reporter:
    """Return a live display on a terminal and plain lines elsewhere, plus TensorBoard files in each run folder.

    Args:
        quiet: report warnings only.
        verbose: print every line of `metrics.jsonl` as a plain line, instead of the live display on a terminal.
    """
    return CombinedReporter(make_display(quiet, every=verbose, live=not verbose), TensorBoard())


def make_display(quiet: bool, every: bool, live: bool = True) -> Reporter:
    """Return a reporter for the terminal: a live display, or plain lines if stderr is no terminal or `live` is false.

    Args:
        quiet: print warnings only.
        every: print all training metrics as plain lines, instead of ten lines per loop.
        live: allow the live display.
    """
    console = Console(stderr=True)
    if quiet:
        return _WarningReporter()
    return LiveReporter(console) if console.is_terminal and live else PlainReporter(every)


class CombinedReporter(Reporter):
    """Passes every report on to several reporters."""

    def __init__(self, *reporters: Reporter) -> None:
        self.reporters = reporters

    @override
    def start(self, loop: Loop) -> None:
        for reporter in self.reporters:
            reporter.start(loop)

    @override
    def advance(self, step: int) -> None:
        for reporter in self.reporters:
            reporter.advance(step)

    @override
    def metrics(self, record: MetricsRecord) -> None:
        for reporter in self.reporters:
            reporter.metrics(record)

    @override
    def pi(self, space: Sequence[str], record: PiRecord) -> None:
        for reporter in self.reporters:
            reporter.pi(space, record)

    @override
    def note(self, text: str) -> None:
        for reporter in self.reporters:
            reporter.note(text)

    @override
    def stop(self) -> None:
        for reporter in self.reporters:
            reporter.stop()


class _WarningReporter(Reporter):
    """Prints only the notes that begin with "warning: "."""

    @override
    def note(self, text: str) -> None:
        if text.startswith("warning: "):
            sys.stderr.write(f"{text}\n")


class PlainReporter(Reporter):
    """Prints plain lines: each note, each validation, and the newest training metrics ten times per loop.

    With `every`, it prints all training metrics instead of ten.
    """

    def __init__(self, every: bool = False) -> None:
        self.title, self.steps, self.every = "", 0, every
        self.latest = ""  # metrics that were received but not printed yet

    @override
    def start(self, loop: Loop) -> None:
        self.title, self.steps, self.latest = loop.title, loop.steps, ""
        self.note(f"{loop.title}: {loop.unit} {loop.first_step} to {loop.steps}")

    @override
    def advance(self, step: int) -> None:
        if not self.every and step % max(1, self.steps // 10) == 0 and self.latest:
            self.note(self.latest)
            self.latest = ""

    @override
    def metrics(self, record: MetricsRecord) -> None:
        line = f"{self.title} {record.step}/{self.steps}: {describe_metrics(record)}"
        if record.split == "train" and not self.every:
            self.latest = line
        else:
            self.note(line)

    @override
    def pi(self, space: Sequence[str], record: PiRecord) -> None:
        argmax = Architecture([space[int(np.argmax(row))] for row in record.pi])
        if self.every:
            self.note(f"{self.title} {record.step}/{self.steps}: pi argmax {argmax}")
        else:
            self.latest += f"  pi argmax {argmax}"

    @override
    def note(self, text: str) -> None:
        sys.stderr.write(f"{text}\n")
        sys.stderr.flush()


class LiveReporter(Reporter):
    """Redraws a live display in the terminal: progress, the latest metrics, and a coloured bar of pi for each block."""

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

    @override
    def start(self, loop: Loop) -> None:
        self.latest, self.bars = {}, []
        for task in self.progress.task_ids:  # of an earlier loop
            self.progress.remove_task(task)
        title = loop.title if loop.unit == "steps" else f"{loop.title}, {loop.unit}"
        self.task = self.progress.add_task(title, total=loop.steps, completed=loop.first_step)
        self.live = Live(get_renderable=self.render, console=self.console, refresh_per_second=4)
        self.live.start()

    @override
    def advance(self, step: int) -> None:
        self.progress.update(self.task, completed=step)

    @override
    def metrics(self, record: MetricsRecord) -> None:
        # A new dictionary, since the thread that redraws may be reading the old one.
        self.latest = {**self.latest, record.split: describe_metrics(record)}

    @override
    def pi(self, space: Sequence[str], record: PiRecord) -> None:
        self.bars = [pi_bar(number, space, row) for number, row in enumerate(record.pi, 1)]

    @override
    def note(self, text: str) -> None:
        self.console.print(text, style="dim", highlight=False, markup=False, soft_wrap=True)

    @override
    def stop(self) -> None:
        if self.live is not None:
            self.live.stop()
            self.live = None

    def render(self) -> RenderableType:
        """Return the present content of the live display."""
        lines = [Text(text) for text in self.latest.values()]
        blocks: list[RenderableType] = [Columns(self.bars, padding=(0, 3))] if self.bars else []
        return Group(self.progress, *lines, *blocks)


def pi_bar(number: int, space: Sequence[str], pi: Sequence[float]) -> Text:
    """Return a line of text on block `number`: a stacked bar of its `pi`, and its most probable candidate.

    `pi` holds the probability of each candidate in `space`.
    """
    text = Text(f"{number:>3} ")
    edges = [round(_BAR_WIDTH * sum(pi[: index + 1])) for index in range(len(pi))]
    colours = list(candidate_colours(space).values())
    for colour, start, stop in zip(colours, [0, *edges], edges, strict=False):
        text.append("█" * (stop - start), style=colour)
    best = int(np.argmax(pi))
    text.append(f" {space[best]} {pi[best]:.2f}", style=colours[best])
    return text


_MAX_PICTURES = 50  # heatmaps of pi that TensorBoard receives in a run, about


class TensorBoard(Reporter):
    """Writes metrics and pi to the folder `tensorboard` of each run; does nothing if TensorBoard cannot be imported."""

    def __init__(self) -> None:
        self.writer: SummaryWriter | None = None
        self.next_picture, self.steps = 0, 0

    @override
    def start(self, loop: Loop) -> None:
        """Open the TensorBoard files of a run; for a resumed run, delete entries of the steps that it repeats."""
        if loop.folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # missing or broken, which must not end a training
            return
        self.steps, self.next_picture = loop.steps, loop.first_step
        after = loop.first_step + 1 if loop.first_step else None
        self.writer = SummaryWriter(str(loop.folder / "tensorboard"), purge_step=after)

    @override
    def metrics(self, record: MetricsRecord) -> None:
        """Write every number of a line of metrics under the tag `SPLIT/NAME`."""
        if self.writer is None:
            return
        for name, value in record.to_dict().items():
            if isinstance(value, (int, float)) and name != "step":
                self.writer.add_scalar(f"{record.split}/{name}", value, record.step)

    @override
    def pi(self, space: Sequence[str], record: PiRecord) -> None:
        """Write each probability under the tag `pi/block-NN/LAYER`, and at intervals a heatmap of all probabilities."""
        if self.writer is None:
            return
        step, pi = record.step, record.pi
        for number, row in enumerate(pi, 1):
            for name, value in zip(space, row, strict=True):
                self.writer.add_scalar(f"pi/block-{number:02d}/{name.replace(':', '_')}", value, step)
        if step >= self.next_picture:
            from parnas.figures.heatmap import Heatmap
            from parnas.runs.pi_history import PiHistory

            picture = Heatmap(PiHistory.from_records([record], space)).picture(0)
            self.writer.add_image("pi", np.asarray(picture), step, dataformats="HWC")
            self.next_picture = step + self.steps // _MAX_PICTURES

    @override
    def stop(self) -> None:
        """Close the TensorBoard files of the run."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
