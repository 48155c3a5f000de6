"""The command line: the application and the main steps. Heavy modules are imported only when a command needs them."""

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Argument, Option

from parnas.cli.common import (
    Output,
    draw,
    exit_on_error,
    interruptible,
    is_main_process,
    refuse_torchrun,
    resolve_arguments,
    show_pipeline,
    split_runs,
    study_resume_hint,
    training_resume_hint,
)
from parnas.cli.options import MAIN_STEPS, Arch, Best, Resume, RunFolder, Settings, register
from parnas.cli.studies import studies
from parnas.cli.tools import tools
from parnas.errors import ParnasError
from parnas.runs.files import write_text
from parnas.runs.resolve import make_run_folder, remove_if_empty
from parnas.runs.run import ARCH_FILE, Run, package_version

if TYPE_CHECKING:
    from parnas.nas.derive import Constraints

__all__ = ["main"]

app = typer.Typer(
    name="parnas",
    help="Find where a language model needs attention, and where a cheaper layer does as well.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
_command = register(app, MAIN_STEPS)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line on `arguments`, by default those of the process; exit with code 2 after an error."""
    with exit_on_error():
        app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="parnas")


def _show_version(requested: bool) -> None:
    """Print the version and exit."""
    if requested:
        typer.echo(f"parnas {package_version('parnas')}")
        raise typer.Exit


@app.callback()
def before_any_command(
    version: Annotated[  # noqa: ARG001
        bool, Option("--version", callback=_show_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Register the user's own layers, listed in PARNAS_LAYERS, before any configuration is checked."""
    if listed := os.environ.get("PARNAS_LAYERS"):
        from parnas.model.custom_layers import import_own_layers

        import_own_layers(listed)


@_command
def search(
    output: Output,
    settings: Settings = None,
    one_run: Annotated[
        bool,
        Option(
            "--one-run",
            help="Search for the share search.share of train.steps, as the first part of a one-run training; "
            "retrain --from RUN --one-run continues with its weights. pipeline --one-run does both.",
        ),
    ] = False,
    parent: Annotated[
        Path | None,
        Option(
            "--from",
            metavar="RUN",
            help="Folder of a finished retraining: search for cheaper layers of its network, by local distillation. "
            "The other settings are its own.",
        ),
    ] = None,
    run: RunFolder = None,
    resume: Resume = False,
) -> None:
    """Train a SuperNet and learn pi, the probability of each layer in each block."""
    if one_run and parent is not None:
        raise ParnasError("--one-run and --from exclude each other; give one of them.")
    from parnas.nas.one_run import split_training
    from parnas.pretrained.local_distillation import run_search
    from parnas.pretrained.settings import search_settings

    base = None if parent is None else search_settings(Run(parent))
    config, folder = resolve_arguments(settings, run, resume, "search", base=base)
    with remove_if_empty(None if run else folder), interruptible(lambda: training_resume_hint("search", folder)):
        if one_run:
            config, _ = split_training(config, folder)
        finished = run_search(config, folder, output.reporter(), resume)
    place = shlex.quote(str(folder))
    _show_training(
        finished, output, f"parnas retrain --from {place} --one-run" if one_run else f"parnas derive {place}"
    )


def _show_training(run: Run, output: Output, hint: str) -> None:
    """Draw the pictures of a finished training, and print its summary and the next command."""
    if not is_main_process():
        return
    summary, pictures = run.summary(), draw([run])
    perplexity = (
        f"validation perplexity {summary.valid.ppl:.2f} per token, {summary.valid.bits_per_byte:.3f} bits per byte"
    )
    result = summary.arch if summary.kind == "search" else f"{summary.arch}, {perplexity}"
    output.show(print, f"{summary.kind} finished: {result}")
    output.end({"run": str(run.folder), **summary.to_dict()}, pictures, hint)


@_command
def derive(
    output: Output,
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a search.")],
    cost_target: Annotated[
        float | None,
        Option(
            help="Largest cost, as a share of the interleaved network's cost, or of the parent's after search --from; "
            "default: as in the search."
        ),
    ] = None,
    metric: Annotated[
        str | None, Option(help="Cost: latency, macs, parameters or cache; default: as in the search.")
    ] = None,
    within: Annotated[
        str | None,
        Option(
            metavar="METRIC=SHARE,…",
            help="Several cost targets at once, such as latency=0.5,parameters=0.8,cache=0.25, in place of "
            "--cost-target and --metric.",
        ),
    ] = None,
    front: Annotated[
        str | None,
        Option(
            metavar="N|SHARE,…",
            help="Instead of one network, the best within each of N cost targets up to 1, or within each of the given "
            "targets; written to front/.",
        ),
    ] = None,
    limits: Annotated[
        list[str] | None,
        Option("--max", metavar="LAYER=COUNT", help="Largest number of blocks with a layer, such as s=4."),
    ] = None,
    top_k: Annotated[
        int | None, Option(min=1, help="Number of networks to list; default: as many as are re-ranked, at least one.")
    ] = None,
    rerank_top_k: Annotated[
        int | None,
        Option(
            min=0,
            help="Number N: an evolutionary search starts from the N most probable networks, and the N best that it "
            "finds are compared by held-out loss with the shared weights; 0: select by pi alone; default: as in the "
            "search.",
        ),
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for arch.yaml, or for front/; default: RUN.")] = None,
) -> None:
    """Select the best architecture of a search within the cost target, and write arch.yaml."""
    from parnas.cli.tables import show_derivation
    from parnas.figures.diagram import draw_network
    from parnas.nas.derive import derive, read_constraints, read_limits, read_within, write_derivation

    searched = Run(run)
    targets = None if within is None else read_within(within)
    if front is not None and targets:
        raise ParnasError("--front and --within exclude each other; give one of them.")
    constraints = read_constraints(cost_target, metric, read_limits(limits or []), top_k, rerank_top_k, targets)
    if front is not None:
        _derive_front(output, searched, front, constraints, out or run)
        return
    derivation = derive(searched, constraints, output.reporter())
    path = (out or run) / ARCH_FILE
    write_derivation(derivation, searched, path)
    output.show(show_derivation, derivation)
    record = derivation.to_record(searched)
    picture = draw_network(record, path.parent)
    retrain = f"parnas retrain CONFIG --arch {shlex.quote(str(path))}"
    if searched.config().search.parent is not None and out is None:  # heal it
        retrain = f"parnas retrain --from {shlex.quote(str(run))}"
    output.end(record.to_dict(), [path, picture], retrain)


def _derive_front(output: Output, run: Run, targets: str, constraints: "Constraints", out: Path) -> None:
    """Derive a network within each of `targets`, print and draw them, and write them to the folder `out`/front."""
    from parnas.cli.tables import show_derived_front
    from parnas.figures.pareto import FRONT_PERPLEXITY, draw_pareto, front_points
    from parnas.nas.front import derive_front, read_targets

    front = derive_front(run, read_targets(targets), constraints, output.reporter())
    written = front.write(run, out)
    output.show(show_derived_front, front)
    if points := front_points(front.to_rows()):
        cost_label = f"cost of the blocks, {front.reference} = 1"
        written.append(draw_pareto(points, written[0].with_suffix(".png"), cost_label, FRONT_PERPLEXITY))
    output.end({"front": front.to_rows()}, written, f"parnas retrain --from {shlex.quote(str(run.folder))} --arch ARCH")


@_command
def retrain(
    output: Output,
    settings: Settings = None,
    arch: Arch = None,
    inherit: Annotated[
        Path | None,
        Option(
            "--from",
            metavar="RUN",
            help="Folder of a search, or of a retraining, whose weights the training starts from; its configuration "
            "and its architecture are the default.",
        ),
    ] = None,
    one_run: Annotated[
        bool,
        Option("--one-run", help="With --from: train the second part of a one-run training; see search --one-run."),
    ] = False,
    teachers: Annotated[
        list[Path] | None,
        Option(
            "--teacher",
            metavar="RUN",
            help="Folder of a finished run whose predictions the network also learns (train.distill); may be repeated.",
        ),
    ] = None,
    run: RunFolder = None,
    resume: Resume = False,
) -> None:
    """Train a discrete architecture, from scratch or from the weights of a search."""
    if one_run and inherit is None:
        raise ParnasError("--one-run continues a search; give its folder by --from, or leave out --one-run to resume.")
    from parnas.nas.one_run import second_part
    from parnas.pretrained.settings import heal_settings_or_none
    from parnas.training.retrain import retrain

    base = None if inherit is None else heal_settings_or_none(Run(inherit))
    if teachers:
        settings = [*(settings or []), f"train.teachers={[str(each) for each in teachers]}"]
    config, folder = resolve_arguments(settings, run, resume, "retrain", arch, inherit, base)
    with remove_if_empty(None if run else folder), interruptible(lambda: training_resume_hint("retrain", folder)):
        # With --resume alone, the configuration is that of the run, which is the second part already.
        if one_run and inherit is not None and not (resume and settings is None):
            config = second_part(config, inherit)
        finished = retrain(config, folder, output.reporter(), resume)
    _show_training(finished, output, f"parnas evaluate {shlex.quote(str(folder))} OTHER_RUN")


@_command
def evaluate(
    output: Output,
    arguments: Annotated[
        list[str],
        Argument(
            metavar="RUN... [KEY=VALUE ...]",
            help="Run folders, and overrides of settings of evaluation, or of runtime.device, precision or threads.",
        ),
    ],
    split: Annotated[str | None, Option(help="train, valid or test; default: as configured.")] = None,
    mem_len: Annotated[int | None, Option(min=0, help="Positions of memory; default: as trained.")] = None,
    tgt_len: Annotated[int | None, Option(min=1, help="Tokens of a segment; default: as trained.")] = None,
    cmem_len: Annotated[int | None, Option(min=0, help="Positions of compressed memory; default: as trained.")] = None,
    clamp_len: Annotated[
        int | None,
        Option(min=1, help="Larger distances between positions are treated as this one; default: as trained."),
    ] = None,
    same_length: Annotated[
        bool | None,
        Option("--same-length/--any-length", help="Whether every query attends equally far back; default: as trained."),
    ] = None,
    pointer_len: Annotated[
        int | None, Option(min=1, help="Positions from which a pointer may copy; default: as trained.")
    ] = None,
    best: Best = False,
    tuned: Annotated[
        bool, Option("--tuned", help="Also evaluate by the protocols and settings that parnas tune-eval chose.")
    ] = False,
    analyses: Annotated[
        str | None,
        Option("--analyse", metavar="LIST", help="Further tables and pictures: any of attention,frequency,memory."),
    ] = None,
    out: Annotated[
        Path | None, Option(help="Folder for the results, which are replaced; default: runs/comparison.")
    ] = None,
) -> None:
    """Compare perplexities and costs of runs in one table."""
    from parnas.cli.tables import show_analysis, show_comparison
    from parnas.evaluation.analyses import analyse, read_names
    from parnas.evaluation.comparison import compare, to_rows
    from parnas.evaluation.loading import EvalOptions
    from parnas.figures.analyses import DRAW
    from parnas.figures.curves import draw_learning_curves
    from parnas.figures.draw import draw_report
    from parnas.figures.report.data import analysis_files

    runs, changes = split_runs(arguments)
    lengths = mem_len, cmem_len, clamp_len, same_length, pointer_len
    options = EvalOptions(split, tgt_len, *lengths, best, changes, tuned)
    folder, reporter = out or Path("runs") / "comparison", output.reporter()
    names = [] if analyses is None else read_names(analyses)
    comparison = compare(runs, options, reporter)
    for path in analysis_files(folder):  # left by an earlier comparison in this folder
        path.unlink()
    written = comparison.write(folder)
    written.append(draw_learning_curves([Run(run) for run in runs], folder / "curves.png"))
    output.show(show_comparison, comparison)
    result = comparison.to_dict()
    for analysis in analyse(runs, options, names, reporter) if names else ():
        output.show(show_analysis, analysis)
        written.append(folder / f"{analysis.name}.csv")
        write_text(written[-1], analysis.table.to_csv(index=False))
        written += DRAW[analysis.name](analysis.table, folder)
        result[analysis.name] = {"rows": to_rows(analysis.table), "notes": list(analysis.notes)}
    output.end(result, [*written, *draw_report([folder, *runs], folder, reporter.note)])


@_command
def pipeline(
    output: Output,
    settings: Settings = None,
    run: Annotated[
        Path | None,
        Option(
            help="Folder for all runs, or to resume; default: runs/pipeline-CONFIG, with a number if that is taken.",
        ),
    ] = None,
    baselines: Annotated[
        str,
        Option(
            metavar="LIST",
            help="Networks to train for comparison: equal-cost (interleaved, with the cost of the derived network), "
            "alternating (convolution and attention take turns, with that cost; only if k is a candidate), "
            "interleaved, all-f, presets of docs/layers.md such as lfm2-12, or your own layers such as kkskk.",
        ),
    ] = "equal-cost,alternating",
    one_run: Annotated[
        bool,
        Option(
            "--one-run",
            help="Make the search a part of the training: search in the share search.share of train.steps, then train "
            "the derived network on, from its weights in the SuperNet. Not with --front or --finalists.",
        ),
    ] = False,
    front: Annotated[
        str | None,
        Option(
            metavar="N|SHARE,…",
            help="Train a network within each of several cost targets (given as for derive --front): the one within "
            "the highest as with --one-run; each cheaper network is made by removing layers from the one before, and "
            "trained for a quarter of train.steps. Not with --one-run or --finalists.",
        ),
    ] = None,
    finalists: Annotated[
        int,
        Option(
            min=1,
            metavar="N",
            help="Train up to N networks with fewer and fewer attention layers for an eighth of the steps, and keep "
            "the best. Not with --one-run or --front.",
        ),
    ] = 1,
    tune_eval: Annotated[
        bool, Option("--tune-eval", help="Also evaluate with dynamic evaluation and a cache, tuned by tune-eval.")
    ] = False,
    test: Annotated[
        bool,
        Option("--test", help="At the end, also evaluate on the test split, into FOLDER/test."),
    ] = False,
) -> None:
    """Search, derive, retrain the derived network and baselines, and compare them, with one command."""
    refuse_torchrun("pipeline")
    from parnas.nas.front import read_targets
    from parnas.studies.baselines import read_baselines
    from parnas.studies.pipeline import run_pipeline

    names, targets = read_baselines(baselines), () if front is None else read_targets(front)
    config, folder = resolve_arguments(settings, run, False, "pipeline")
    with remove_if_empty(None if run else folder), interruptible(lambda: study_resume_hint(folder)):
        result = run_pipeline(
            config,
            names,
            folder,
            output.reporter(),
            one_run=one_run,
            front=targets,
            finalists=finalists,
            tune_eval=tune_eval,
            test=test,
        )
    show_pipeline(result, output, f"open {shlex.quote(str(folder / 'report.html'))} in a browser")


@_command
def demo(
    output: Output,
    run: Annotated[
        Path | None, Option(help="Folder for all runs, or to resume; default: runs/demo, or the next free number.")
    ] = None,
) -> None:
    """Run all main steps on a small text, in minutes."""
    refuse_torchrun("demo")
    from parnas.config.loader import PRESETS, load_config
    from parnas.studies.baselines import INTERLEAVED
    from parnas.studies.pipeline import run_pipeline

    folder = run or make_run_folder("demo")
    again = f"parnas demo --run {shlex.quote(str(folder))}"
    config = load_config(PRESETS / "demo.yaml")
    baselines = [INTERLEAVED, f"alternating-{config.search.blocks}"]  # the usual network, and a hand-designed hybrid
    with remove_if_empty(None if run else folder), interruptible(lambda: again):
        result = run_pipeline(config, baselines, folder, output.reporter())
    hint = "parnas --help"
    if sys.prefix != sys.base_prefix:  # in a virtual environment, which `make demo` does not activate
        hint = f"source {shlex.quote(str(Path(sys.prefix) / 'bin' / 'activate'))} && {hint}"
    show_pipeline(result, output, hint)


app.add_typer(studies)
app.add_typer(tools)
