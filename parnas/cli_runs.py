"""Commands that show what runs have made, while they go on or afterwards, and take it elsewhere."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from parnas.cli_options import FrameTime, Out, Runs, Width, with_output
from parnas.commands import draw, interruptible, refuse_several, split_settings
from parnas.errors import ParnasError
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
def adapt(
    output: Output,
    given: Annotated[
        list[str],
        typer.Argument(metavar="RUN [evaluation.KEY=VALUE ...]", help="A run folder, and changes of its settings."),
    ],
    lr: Annotated[str | None, typer.Option("--lr", metavar="LIST", help="Learning rates, commas between.")] = None,
    decay: Annotated[str | None, typer.Option("--decay", metavar="LIST", help="Decays to the trained weights.")] = None,
    theta: Annotated[str | None, typer.Option("--theta", metavar="LIST", help="Sharpnesses of the cache.")] = None,
    weight: Annotated[str | None, typer.Option("--weight", metavar="LIST", help="Shares of the cache.")] = None,
    ways: Annotated[str, typer.Option("--ways", metavar="LIST", help="dynamic, cache, or both.")] = "dynamic,cache",
    tokens: Annotated[
        int, typer.Option("--tokens", min=0, help="So many of the validation split, from its beginning; 0: all.")
    ] = 30_000,
    best: Annotated[
        bool, typer.Option("--best", help="Take the weights of the least validation loss, not the last ones.")
    ] = False,
) -> None:
    """Choose how a run adapts to the text it reads. For evaluate --adapted, on the validation split alone."""
    refuse_several("adapt")
    from parnas.comparison_display import show_adaptation
    from parnas.evaluation.adapt import adapt as choose
    from parnas.evaluation.adapt import read_grid
    from parnas.evaluation.entries import LENGTHS, Conditions
    from parnas.files import to_json

    runs, changes = split_settings(given)
    if len(runs) != 1:
        raise ParnasError(f"One run is adapted at a time, not {len(runs)}; name one.")
    run = runs[0]
    lists = {"lr": lr, "decay": decay, "theta": theta, "weight": weight, "ways": ways}
    grid = read_grid({key: text for key, text in lists.items() if text is not None}, tokens)
    conditions = Conditions(best=best, changes=changes)
    adaptation = choose(Run(run), grid, conditions, output.reporter())
    written = adaptation.write()
    output.show(show_adaptation, adaptation)
    lengths = [f"{key}={to_json(value)}" for key, value in conditions.changes.items() if key in LENGTHS]
    hint = shlex.join(["parnas", "evaluate", str(run), *["--best"] * best, "--split", "test", "--adapted", *lengths])
    output.end(adaptation.to_dict(), [written], hint)


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
