"""The command line: arguments in, run folders and tables out. Work is imported only when a command needs it."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from parnas.cli_comparisons import comparisons
from parnas.cli_options import Out, Resume, RunFolder, Settings, with_output
from parnas.cli_runs import on_runs
from parnas.cli_tools import tools
from parnas.commands import (
    draw,
    evaluate_runs,
    interruptible,
    leads,
    refuse_several,
    settle,
    show_pipeline,
    split_settings,
    way_on,
)
from parnas.exits import told_in_one_message
from parnas.inputs import fresh_folder, not_left_empty
from parnas.output import Output
from parnas.run import Run, package_version

app = typer.Typer(
    name="parnas",
    help="Find where a language model needs attention, and where a cheaper layer does as well.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; see `exits.py` for how it ends."""
    with told_in_one_message():
        app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="parnas")


def show_version(asked: bool) -> None:
    """Print the version and leave."""
    if asked:
        typer.echo(f"parnas {package_version('parnas')}")
        raise typer.Exit


@app.callback()
def before_any_command(
    version: Annotated[  # noqa: ARG001
        bool, typer.Option("--version", callback=show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Register the user's own layers before any configuration is checked."""
    if listed := os.environ.get("PARNAS_LAYERS"):
        from parnas.model.own_layers import import_own_layers

        import_own_layers(listed)


@app.command()
@with_output
def search(output: Output, settings: Settings = None, run: RunFolder = None, resume: Resume = False) -> None:
    """Train a SuperNet and record pi."""
    config, folder = settle(settings, run, resume, "search")
    from parnas.nas.search import search as train

    reporter = output.reporter()
    with not_left_empty(None if run else folder), interruptible(lambda: way_on("search", folder)):
        finished = train(config, folder, reporter, resume)
    if not leads():
        return
    summary, drawn = finished.summary(), draw([finished])
    output.show(print, f"search finished: {summary['arch']}")
    output.end({"run": str(folder), **summary}, drawn, f"parnas derive {shlex.quote(str(folder))}")


@app.command()
@with_output
def derive(
    output: Output,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a search.")],
    within: Annotated[
        float | None,
        typer.Option("--within", help="Largest cost, as a share of the interleaved network's; default: the search's."),
    ] = None,
    metric: Annotated[
        str | None, typer.Option("--metric", help="latency, macs or parameters; default: the search's.")
    ] = None,
    most: Annotated[
        list[str] | None, typer.Option("--max", metavar="LAYER=COUNT", help="Most blocks with a layer, such as s=4.")
    ] = None,
    top_k: Annotated[
        int | None,
        typer.Option("--top-k", min=1, help="How many networks to rank; default: those of a second look, or one."),
    ] = None,
    rescore: Annotated[
        int | None,
        typer.Option(
            "--rescore",
            min=0,
            help="So many of the most probable get a second look, by loss with the SuperNet's weights; 0: none; "
            "default: as many as in the search.",
        ),
    ] = None,
    out: Out = None,
) -> None:
    """Choose the architecture that pi speaks for. It goes into arch.yaml, within the target of cost."""
    from parnas.display import show_derivation
    from parnas.nas.derive import derive as choose
    from parnas.nas.derive import read_demands, write_derivation

    of = Run(run)
    derivation = choose(of, read_demands(within, metric, most or [], top_k, rescore), output.reporter())
    path = (out or run) / "arch.yaml"
    write_derivation(derivation, of, path)
    output.show(show_derivation, derivation)
    output.end(derivation.to_dict(of), [path], f"parnas retrain CONFIG --arch {shlex.quote(str(path))}")


@app.command()
@with_output
def retrain(
    output: Output,
    settings: Settings = None,
    arch: Annotated[
        str | None,
        typer.Option(
            "--arch",
            help="A string such as (sf)*8 or 's:heads=2 f', an arch.yaml, or interleaved-N, sandwich-N-K, all-f-N, "
            "random-N-SEED.",
        ),
    ] = None,
    run: RunFolder = None,
    resume: Resume = False,
) -> None:
    """Train a discrete architecture from scratch."""
    config, folder = settle(settings, run, resume, "retrain", arch)
    from parnas.training.retrain import retrain as train

    reporter = output.reporter()
    with not_left_empty(None if run else folder), interruptible(lambda: way_on("retrain", folder)):
        finished = train(config, folder, reporter, resume)
    if not leads():
        return
    summary, drawn = finished.summary(), draw([finished])
    valid = summary["valid"]
    output.show(
        print,
        f"retrain finished: {summary['arch']}, validation perplexity {valid['ppl']:.2f} per token, "
        f"{valid['bits_per_byte']:.3f} bits per byte",
    )
    output.end({"run": str(folder), **summary}, drawn, f"parnas evaluate {shlex.quote(str(folder))} OTHER_RUN")


@app.command()
@with_output
def evaluate(
    output: Output,
    given: Annotated[
        list[str],
        typer.Argument(metavar="RUN... [evaluation.KEY=VALUE ...]", help="Run folders, and changes of their settings."),
    ],
    split: Annotated[str | None, typer.Option("--split", help="train, valid or test; default: as configured.")] = None,
    mem_len: Annotated[
        int | None, typer.Option("--mem-len", min=0, help="Positions of memory; default: as trained.")
    ] = None,
    tgt_len: Annotated[
        int | None, typer.Option("--tgt-len", min=1, help="Tokens of a segment; default: as trained.")
    ] = None,
    cmem_len: Annotated[
        int | None, typer.Option("--cmem-len", min=0, help="Positions of compressed memory; default: as trained.")
    ] = None,
    clamp_len: Annotated[
        int | None, typer.Option("--clamp-len", min=1, help="Larger distances count as this; default: as trained.")
    ] = None,
    same_length: Annotated[
        bool | None,
        typer.Option("--same-length/--any-length", help="Every query sees equally far back; default: as trained."),
    ] = None,
    best: Annotated[
        bool, typer.Option("--best", help="Take the weights of the least validation loss, not the last ones.")
    ] = False,
    adapted: Annotated[
        bool, typer.Option("--adapted", help="Also in the ways, and with the settings, that parnas adapt chose.")
    ] = False,
    analyses: Annotated[
        str | None,
        typer.Option("--analyse", metavar="LIST", help="Some of attention,frequency,memory: tables and pictures."),
    ] = None,
    out: Out = None,
) -> None:
    """Compare perplexities and costs of runs. Further tables say what they attend to, with --analyse."""
    from parnas.evaluation.entries import Conditions

    runs, changes = split_settings(given)
    conditions = Conditions(split, tgt_len, mem_len, cmem_len, clamp_len, same_length, best, changes, adapted)
    folder = out or Path("runs") / "comparison"
    evaluate_runs(runs, conditions, analyses, folder, output)


@app.command()
@with_output
def demo(
    output: Output,
    run: Annotated[
        Path | None,
        typer.Option(
            "--run", help="Folder for the runs, or to go on with; default: runs/demo, or the first free number behind."
        ),
    ] = None,
) -> None:
    """Do all of it on an embedded corpus, in minutes. Searches, derives, retrains and compares."""
    refuse_several("demo")
    from parnas.demo import run_demo

    folder = run or fresh_folder("demo")
    again = f"parnas demo --run {shlex.quote(str(folder))}"
    with not_left_empty(None if run else folder), interruptible(lambda: again):
        run_demo(folder, output)


@app.command()
@with_output
def pipeline(
    output: Output,
    settings: Settings = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Folder for the runs, or to go on with; default: runs/pipeline-CONFIG."),
    ] = None,
    baselines: Annotated[
        str,
        typer.Option(
            "--baselines",
            metavar="LIST",
            help="Networks trained beside: equal-cost (interleaved, of the derived one's cost), interleaved, all-f.",
        ),
    ] = "equal-cost",
    finalists: Annotated[
        int,
        typer.Option(
            "--finalists",
            min=1,
            metavar="N",
            help="Train up to N networks of less and less attention for an eighth of the steps and take the best.",
        ),
    ] = 1,
    adapt: Annotated[
        bool, typer.Option("--adapt", help="Evaluate dynamically and with a cache besides, as parnas adapt chooses.")
    ] = False,
    test: Annotated[
        bool, typer.Option("--test", help="Read the test split at the end, once, into FOLDER/test.")
    ] = False,
) -> None:
    """Do all of it under one configuration. Searches, derives, retrains beside baselines and compares."""
    refuse_several("pipeline")
    from parnas.pipelines import read_baselines, run_pipeline

    names = read_baselines(baselines)
    config, folder = settle(settings, run, False, "pipeline")
    again = shlex.join(["parnas", "pipeline", *(settings or []), "--baselines", baselines, "--run", str(folder)])
    again += (
        (f" --finalists {finalists}" if finalists > 1 else "")
        + (" --adapt" if adapt else "")
        + (" --test" if test else "")
    )
    with not_left_empty(None if run else folder), interruptible(lambda: again):
        found = run_pipeline(config, names, folder, output.reporter(), finalists=finalists, adapt=adapt, test=test)
    show_pipeline(found, output, f"open {shlex.quote(str(folder / 'report.html'))}")


app.add_typer(on_runs)
app.add_typer(tools)
app.add_typer(comparisons)
