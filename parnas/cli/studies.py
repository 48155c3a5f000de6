"""Commands of studies, which train or evaluate many times: seeds, baselines, black-box search and tuning."""

import shlex
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from parnas.cli.common import (
    Output,
    interruptible,
    refuse_torchrun,
    resolve_arguments,
    split_configuration,
    split_runs,
    study_resume_hint,
)
from parnas.cli.options import STUDIES, Arch, Best, RunFolder, Settings, register
from parnas.errors import ParnasError
from parnas.runs.resolve import remove_if_empty, resolve_config_and_study, study_folder
from parnas.runs.run import ARCH_FILE, BLACKBOX_FRONT, Run

studies = Typer()
_command = register(studies, STUDIES)


@_command
def compress(
    output: Output,
    parent: Annotated[Path, Argument(metavar="RUN", help="Folder of a finished retraining.")],
    within: Annotated[
        str,
        Option(
            metavar="METRIC=SHARE,…",
            help="Cost targets as shares of the run's cost, such as latency=0.6 or latency=0.6,cache=0.5.",
        ),
    ],
    settings: Annotated[
        list[str] | None, Argument(metavar="[SECTION.KEY=VALUE ...]", help="Overrides of the run's settings.")
    ] = None,
    baselines: Annotated[
        bool,
        Option("--baselines/--no-baselines", help="Also train the same network, and a shallower one, from scratch."),
    ] = True,
    run: Annotated[Path | None, Option(help="Folder for all runs, or to resume; default: runs/compress-RUN.")] = None,
) -> None:
    """Make a trained network faster: search for cheaper layers, derive a network within a cost target, and heal it."""
    refuse_torchrun("compress")
    from parnas.cli.tables import show_comparison, show_derivation
    from parnas.nas.derive import read_within
    from parnas.pretrained.settings import search_settings
    from parnas.studies.compress import compress

    folder = run or Path("runs") / f"compress-{parent.resolve().name}"
    config, _ = resolve_arguments(settings, folder, False, "compress", base=search_settings(Run(parent)))
    with remove_if_empty(None if run else folder), interruptible(lambda: study_resume_hint(folder)):
        result = compress(config, read_within(within), folder, output.reporter(), baselines=baselines)
    output.show(show_derivation, result.derivation)
    output.show(show_comparison, result.comparison)
    output.show(print, result.answer)
    hint = f"open {shlex.quote(str(folder / 'report.html'))} in a browser"
    output.end(result.to_dict(), list(result.written), hint)


@_command
def stability(
    output: Output,
    settings: Settings = None,
    seeds: Annotated[int, Option(min=2, help="Number of searches, from runtime.seed upwards.")] = 5,
    run: RunFolder = None,
) -> None:
    """Search with several seeds and compare the architectures.

    The same command with --run resumes the study.
    """
    refuse_torchrun("stability")
    resume = run is not None and (run / "config.yaml").is_file()
    config, folder = resolve_arguments(settings, run, resume, "stability")
    from parnas.cli.tables import show_stability
    from parnas.figures.heatmap import draw_votes
    from parnas.studies.stability import stability

    with remove_if_empty(None if run else folder), interruptible(lambda: study_resume_hint(folder)):
        result = stability(config, folder, seeds, output.reporter())
    written = [*result.write(folder), draw_votes(folder)]
    output.show(show_stability, result)
    output.end(result.to_dict(), written)


@_command
def baselines(
    output: Output,
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a finished search.")],
    random: Annotated[int, Option(min=0, help="Number of random networks with the cost of the derived one.")] = 8,
    seeds: Annotated[int, Option(min=1, help="Trainings of each network; random networks are trained once.")] = 3,
    seed: Annotated[
        int | None, Option(min=0, help="First seed, also of the random networks; default: as in the search.")
    ] = None,
    folder: Annotated[Path | None, Option("--run", help="Folder for the trainings; default: RUN/baselines.")] = None,
    only_list: Annotated[bool, Option("--list", help="Print architectures and costs; train nothing.")] = False,
) -> None:
    """Train the derived, hand-designed and random networks, and compare perplexities with confidence intervals.

    The same command resumes the study.
    """
    from parnas.cli.tables import show_baseline_results, show_baselines
    from parnas.figures.pareto import ParetoPoint, draw_pareto
    from parnas.studies.baseline_comparison import compare_baselines
    from parnas.studies.baselines import find_baselines

    refuse_torchrun("baselines")
    config, folder, reporter = Run(run).config(), folder or run / "baselines", output.reporter()
    first = config.runtime.seed if seed is None else seed
    networks = find_baselines(Run(run), random, first, reporter)
    if only_list:
        output.show(show_baselines, networks)
        output.end(networks.to_dict())
        return
    with interruptible(study_resume_hint):
        comparison = compare_baselines(networks, config, folder, range(first, first + seeds), reporter)
    written = comparison.write(folder)
    output.show(show_baseline_results, comparison)
    # The picture fails if no perplexity is finite; the results are printed all the same.
    markers = [ParetoPoint(each.name, each.share, each.mean, each.sd, each.random) for each in comparison.networks]
    try:
        written.append(draw_pareto(markers, folder / "figures" / "pareto.png"))
    finally:
        output.end(comparison.to_dict(), written)


@_command
def blackbox(
    output: Output,
    trials: Annotated[int, Option(min=1, help="Number of finished trials, of all workers together.")],
    storage: Annotated[
        str, Option(metavar="URL", help="Shared storage: sqlite:///FILE, journal:FILE or postgresql://….")
    ],
    study: Annotated[str, Option(metavar="NAME", help="Name of the study in the storage.")],
    settings: Settings = None,
    train_steps: Annotated[
        int | None, Option(min=1, help="Train each network from scratch for this many steps.")
    ] = None,
    supernet: Annotated[
        Path | None, Option(metavar="RUN", help="Instead of training, evaluate with the shared weights of this search.")
    ] = None,
    sampler: Annotated[str, Option(help="tpe or nsga2.")] = "tpe",
    cost_target: Annotated[
        float | None,
        Option(
            min=0,
            help="Largest cost of the selected network, as a share of the interleaved network's; default: no target.",
        ),
    ] = None,
    run: Annotated[Path | None, Option(help="Folder for the results; default: runs/blackbox-STUDY.")] = None,
    keep: Annotated[bool, Option("--keep", help="Keep each training, as trial-NUMBER in --run.")] = False,
) -> None:
    """Search architectures with Optuna, as a baseline for the search that learns pi.

    The same command resumes the study; on another machine it adds a worker.
    """
    refuse_torchrun("blackbox")
    if sampler not in ("tpe", "nsga2"):
        raise ParnasError(f"--sampler is {sampler!r}; give tpe or nsga2.")
    if (train_steps is None) == (supernet is None):
        raise ParnasError(
            "Give either --train-steps STEPS, to train each network, or --supernet RUN, for a search's shared weights."
        )
    if supernet is not None and split_configuration(settings)[0] is None:
        Run(supernet).config()
        settings = [str(supernet / "config.yaml"), *(settings or [])]
    config, folder = resolve_arguments(settings, run or study_folder("blackbox", study), False, "blackbox")
    from parnas.cli.tables import show_front
    from parnas.studies import blackbox as search_studies

    reporter = output.reporter()
    if supernet is not None:
        task = search_studies.inheriting_task(config, supernet, reporter)
    else:
        task = search_studies.training_task(config, train_steps or 0, folder if keep else None, reporter)
    with interruptible(study_resume_hint):
        shared = search_studies.open_study(storage, study, "nsga2" if sampler == "nsga2" else "tpe", task, reporter)
        search_studies.blackbox(shared, task, trials, reporter)
    networks = search_studies.evaluated_networks(shared, task.source)
    front, best = search_studies.write_results(networks, task, study, cost_target, folder)
    output.show(show_front, front, task.costs.reference)
    written, arch_file = [folder / BLACKBOX_FRONT], folder / ARCH_FILE
    result = {"study": study, "front": [each._asdict() for each in front], "arch": best and best.network}
    if best is None:
        output.end(result, written)
        raise ParnasError("No evaluated network meets the cost target; raise --cost-target or --trials.")
    output.end(result, [*written, arch_file], f"parnas retrain CONFIG --arch {shlex.quote(str(arch_file))}")


@_command
def tune(
    output: Output,
    settings: Settings = None,
    phase: Annotated[str, Option(help="Training whose settings are tuned: retrain or search.")] = "retrain",
    arch: Arch = None,
    ranges: Annotated[
        list[str] | None,
        Option(
            "--set",
            metavar="KEY=VALUES",
            help="Setting to tune: KEY=LOW..HIGH, KEY=log:LOW..HIGH or KEY=VALUE,VALUE; may be repeated.",
        ),
    ] = None,
    space: Annotated[Path | None, Option(metavar="FILE", help="YAML file with KEY: VALUES; --set adds to it.")] = None,
    trials: Annotated[int, Option(min=1, help="Number of finished trials, of all workers together.")] = 30,
    prune: Annotated[
        bool,
        Option("--prune/--no-prune", help="Whether to end a trial early if its loss exceeds the other trials' median."),
    ] = True,
    storage: Annotated[
        str | None,
        Option(metavar="URL", help="Shared storage, as for parnas blackbox; default: a file in the run folder."),
    ] = None,
    study: Annotated[str | None, Option(metavar="NAME", help="Name of the study in a shared storage.")] = None,
    run: Annotated[
        Path | None, Option(help="Folder to write or to resume; default: runs/tune-CONFIG, or runs/tune-STUDY.")
    ] = None,
) -> None:
    """Tune learning rates, dropouts or other settings with Optuna.

    The same command with --run resumes the study.
    """
    refuse_torchrun("tune")
    config, folder = resolve_config_and_study(*split_configuration(settings), run, phase, arch, storage, study)
    from parnas.cli.tables import show_tuned
    from parnas.figures.tuning import draw_tuning
    from parnas.runs.records import Kind
    from parnas.studies.tuning import TuneOptions, tune
    from parnas.studies.tuning_space import read_options, resolve_space

    tuned_phase: Kind = "search" if phase == "search" else "retrain"
    with remove_if_empty(None if run or study else folder), interruptible(lambda: study_resume_hint(folder)):
        search_space = resolve_space(space, read_options(ranges or []), config, tuned_phase, folder)
        options = TuneOptions(tuned_phase, search_space, trials, storage, study, prune)
        result = tune(config, options, folder, output.reporter())
    written = [*result.write(folder), *draw_tuning(folder)]
    output.show(show_tuned, result)
    if result.best is None:
        output.end(result.to_dict(), written)
        raise ParnasError("No trial finished with a finite loss; lower the learning rates of --set or --space.")
    output.end(result.to_dict(), written, f"parnas {phase} {shlex.quote(str(folder / 'best.yaml'))}")


@_command
def tune_eval(
    output: Output,
    arguments: Annotated[
        list[str],
        Argument(
            metavar="RUN [KEY=VALUE ...]",
            help="A run folder, and overrides of settings of evaluation, or of runtime.device, precision or threads.",
        ),
    ],
    lr: Annotated[str | None, Option(metavar="LIST", help="Learning rates of dynamic evaluation.")] = None,
    decay: Annotated[
        str | None, Option(metavar="LIST", help="Decay rates of dynamic evaluation towards the trained weights.")
    ] = None,
    theta: Annotated[
        str | None, Option(metavar="LIST", help="Factors of the similarity of hidden states in the cache.")
    ] = None,
    weight: Annotated[str | None, Option(metavar="LIST", help="Mixture weights of the cache.")] = None,
    protocols: Annotated[
        str, Option(metavar="LIST", help="Protocols to tune: dynamic, cache or both.")
    ] = "dynamic,cache",
    tokens: Annotated[int, Option(min=0, help="Leading tokens of the validation split to read; 0: all.")] = 30_000,
    best: Best = False,
) -> None:
    """Tune dynamic evaluation and the cache of a run, on the validation split.

    evaluate --tuned uses the chosen settings. A LIST has commas between its values.
    """
    refuse_torchrun("tune-eval")
    from parnas.cli.tables import show_eval_tuning
    from parnas.evaluation.loading import LENGTHS, EvalOptions
    from parnas.evaluation.tune_eval import read_grid, tune_eval
    from parnas.runs.files import to_json
    from parnas.runs.run import TUNED_EVAL

    runs, changes = split_runs(arguments)
    if len(runs) != 1:
        raise ParnasError(f"tune-eval takes one run, not {len(runs)}; name one.")
    run = runs[0]
    lists = {"lr": lr, "decay": decay, "theta": theta, "weight": weight, "protocols": protocols}
    grid = read_grid({name: text for name, text in lists.items() if text is not None}, tokens)
    options = EvalOptions(best=best, changes=changes)
    result = tune_eval(Run(run), grid, options, output.reporter())
    output.show(show_eval_tuning, result)
    lengths = [f"{key}={to_json(value)}" for key, value in options.changes.items() if key in LENGTHS]
    hint = shlex.join(["parnas", "evaluate", str(run), *["--best"] * best, "--split", "test", "--tuned", *lengths])
    output.end(result.to_dict(), [run / TUNED_EVAL], hint)
