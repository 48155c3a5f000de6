"""Commands that show what runs have made, while they go on or afterwards, and take it elsewhere."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from parnas.cli_options import FrameTime, Out, Runs, Width, with_output
from parnas.commands import draw, interruptible
from parnas.output import Output
from parnas.run import Run

on_runs = typer.Typer()


@on_runs.command()
@with_output
def watch(
    output: Output,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a search or retraining, which may go on.")],
    once: Annotated[bool, typer.Option("--once", help="Show how far it is, and leave; --json does so too.")] = False,
) -> None:
    """Watch a run that goes on elsewhere. Ends with the run, or by Ctrl-C, which leaves the run alone."""
    from parnas.display import show_state
    from parnas.reporters import make_shown
    from parnas.watch import read_state
    from parnas.watch import watch as look_on

    state = read_state(Run(run))
    if not (once or output.as_json or state.finished):
        with interruptible(lambda: f"parnas watch {shlex.quote(str(run))}"):
            state = look_on(Run(run), make_shown(output.quiet, every=True, live=not output.verbose))
    output.show(show_state, str(run), state)
    output.end(state.to_dict())


@on_runs.command()
@with_output
def plot(output: Output, runs: Runs, frame_ms: FrameTime = None, width: Width = None) -> None:
    """Redraw every picture of runs."""
    output.end({"runs": [str(run) for run in runs]}, draw([Run(run) for run in runs], frame_ms, width))


@on_runs.command()
@with_output
def report(
    output: Output,
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", help="Run folders, or folders that evaluate, baselines or blackbox wrote."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", help="Folder for report.html; default: the only one given, else runs/report."),
    ] = None,
) -> None:
    """Write one page that shows what runs found. Any browser opens it, without network."""
    from parnas.figures.report import write_report

    output.end({"runs": [str(run) for run in runs]}, [write_report(runs, out)])


@on_runs.command()
@with_output
def export(
    output: Output,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A retraining, or a search, for its derived network.")],
    target: Annotated[str, typer.Option("--to", help="safetensors, x-transformers, pt2 or onnx.")],
    best: Annotated[
        bool, typer.Option("--best", help="Take the weights of the least validation loss, not the last ones.")
    ] = False,
    out: Out = None,
) -> None:
    """Write a network in a form that others read. It is checked against the network; default: into RUN/exports."""
    from parnas.export import export_run

    written = export_run(run, target, out, best)
    output.show(print, written.describe())
    output.end(written.to_dict(), [written.folder / name for name in written.files])
