"""Commands that train many networks: to find what a search is worth, and which settings are the best."""

import shlex
from pathlib import Path
from typing import Annotated

import typer

from parnas.cli_options import RunFolder, Settings, with_output
from parnas.commands import again, interruptible, refuse_several, settle, split_configuration
from parnas.errors import ParnasError
from parnas.inputs import folder_of_study, not_left_empty, settle_study
from parnas.output import Output
from parnas.run import Run

comparisons = typer.Typer()


@comparisons.command()
@with_output
def stability(
    output: Output,
    settings: Settings = None,
    seeds: Annotated[int, typer.Option("--seeds", min=2, help="Searches, from runtime.seed on.")] = 5,
    run: RunFolder = None,
) -> None:
    """Search with several seeds, and compare the strings. Given again with --run, it goes on."""
    refuse_several("stability")
    begun = run is not None and (run / "config.yaml").is_file()
    config, folder = settle(settings, run, begun, "stability")
    from parnas.display import show_stability
    from parnas.figures.votes import draw_votes
    from parnas.nas.stability import stability as repeat

    with not_left_empty(None if run else folder), interruptible(lambda: again(folder)):
        found = repeat(config, folder, seeds, output.reporter())
    written = [*found.write(folder), draw_votes(folder)]
    output.show(show_stability, found)
    output.end(found.to_dict(), written)


@comparisons.command()
@with_output
def baselines(
    output: Output,
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a finished search.")],
    random: Annotated[int, typer.Option("--random", min=0, help="Random networks of the derived one's cost.")] = 8,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Trainings of each network but the random ones.")] = 3,
    seed: Annotated[
        int | None, typer.Option("--seed", min=0, help="The first seed, random strings' too; default: the search's.")
    ] = None,
    folder: Annotated[
        Path | None, typer.Option("--run", help="Folder for the trainings; default: RUN/baselines.")
    ] = None,
    only_list: Annotated[bool, typer.Option("--list", help="Print strings and costs, train nothing.")] = False,
) -> None:
    """Train guesses and random networks beside the derived one. Given again, it goes on."""
    from parnas.display import show_baselines, show_contest
    from parnas.figures.pareto import Marker, draw_pareto
    from parnas.nas.baselines import find_baselines
    from parnas.nas.contest import hold_contest

    refuse_several("baselines")
    config, folder, reporter = Run(run).config(), folder or run / "baselines", output.reporter()
    first = config.runtime.seed if seed is None else seed
    found = find_baselines(Run(run), random, first, reporter)
    if only_list:
        output.show(show_baselines, found)
        output.end(found.to_dict())
        return
    with interruptible(again):
        contest = hold_contest(found, config, folder, range(first, first + seeds), reporter)
    written = contest.write(folder)
    output.show(show_contest, contest)  # before the picture, which there is none of where no perplexity is finite
    markers = [Marker(each.name, each.share, each.mean, each.sd, each.random) for each in contest.standings]
    written.append(draw_pareto(markers, folder / "figures" / "pareto.png"))
    output.end(contest.to_dict(), written)


@comparisons.command()
@with_output
def blackbox(
    output: Output,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Finished trials of all workers together.")],
    storage: Annotated[
        str, typer.Option("--storage", metavar="URL", help="sqlite:///FILE, journal:FILE or postgresql://…; shared.")
    ],
    study: Annotated[str, typer.Option("--study", metavar="NAME", help="Name of the study in the storage.")],
    settings: Settings = None,
    train_steps: Annotated[
        int | None, typer.Option("--train-steps", min=1, help="Train each network from scratch for so many steps.")
    ] = None,
    supernet: Annotated[
        Path | None, typer.Option("--supernet", metavar="RUN", help="Evaluate with the weights of this search instead.")
    ] = None,
    sampler: Annotated[str, typer.Option("--sampler", help="tpe or nsga2.")] = "tpe",
    within: Annotated[
        float | None,
        typer.Option("--within", min=0, help="Most cost of the chosen network, a share of the interleaved network's."),
    ] = None,
    run: Annotated[
        Path | None, typer.Option("--run", help="Folder for what is written; default: runs/blackbox-STUDY.")
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep each training as trial-NUMBER in that folder.")] = False,
) -> None:
    """Search by Optuna, as a baseline. The same command goes on with the study, here or on other machines."""
    refuse_several("blackbox")
    if sampler not in ("tpe", "nsga2"):
        raise ParnasError(f"--sampler is {sampler!r}; give tpe or nsga2.")
    if (train_steps is None) == (supernet is None):
        raise ParnasError("Give one of --train-steps STEPS, to train each network, and --supernet RUN, a search.")
    if supernet is not None and split_configuration(settings)[0] is None:
        Run(supernet).config()
        settings = [str(supernet / "config.yaml"), *(settings or [])]
    config, folder = settle(settings, run or folder_of_study("blackbox", study), False, "blackbox")
    from parnas.display import show_front
    from parnas.nas import trials as results
    from parnas.nas.blackbox import blackbox as go_on
    from parnas.nas.blackbox import findings, open_study

    reporter = output.reporter()
    if supernet is not None:
        task = results.inheriting_task(config, supernet, reporter)
    else:
        task = results.training_task(config, train_steps or 0, folder if keep else None, reporter)
    with interruptible(again):
        shared = open_study(storage, study, "nsga2" if sampler == "nsga2" else "tpe", task)
        go_on(shared, task, trials, reporter)
    front, best = results.write_results(findings(shared), task, study, within, folder)
    output.show(show_front, front, task.costs.interleaved)
    written, chosen = [folder / "pareto.csv"], folder / "arch.yaml"
    result = {
        "study": study,
        "front": [each._asdict() for each in front],
        "arch": None if best is None else best.network,
    }
    if best is None:
        output.end(result, written)
        raise ParnasError("No network that was evaluated costs so little; raise --within or --trials.")
    output.end(result, [*written, chosen], f"parnas retrain CONFIG --arch {shlex.quote(str(chosen))}")


@comparisons.command()
@with_output
def tune(
    output: Output,
    settings: Settings = None,
    phase: Annotated[str, typer.Option("--phase", help="retrain or search: which training is tuned.")] = "retrain",
    arch: Annotated[str | None, typer.Option("--arch", help="As of retrain; for that phase.")] = None,
    wanted: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUES",
            help="A setting to tune: KEY=LOW..HIGH, KEY=log:LOW..HIGH or KEY=VALUE,VALUE; may be given several times.",
        ),
    ] = None,
    space: Annotated[
        Path | None, typer.Option("--space", metavar="FILE", help="YAML with the same, key by key; --set adds to it.")
    ] = None,
    trials: Annotated[int, typer.Option("--trials", min=1, help="Finished trials of all workers together.")] = 30,
    prune: Annotated[
        bool, typer.Option("--prune/--no-prune", help="End trials early that are behind the median of the others.")
    ] = True,
    storage: Annotated[
        str | None, typer.Option("--storage", metavar="URL", help="As of blackbox; default: a file in the run folder.")
    ] = None,
    study: Annotated[
        str | None, typer.Option("--study", metavar="NAME", help="Name of the study in a storage that is given.")
    ] = None,
    run: Annotated[
        Path | None,
        typer.Option("--run", help="Folder to write, or to go on with; default: runs/tune-CONFIG, or runs/tune-STUDY."),
    ] = None,
) -> None:
    """Tune learning rates, dropouts or other settings by Optuna. Given again with --run, it goes on."""
    refuse_several("tune")
    config, folder = settle_study(*split_configuration(settings), run, phase, arch, storage, study)
    from parnas.figures.tuning import draw_tuning
    from parnas.nas import tuning_space
    from parnas.nas.tuning import ask_space
    from parnas.nas.tuning import tune as go_on
    from parnas.nas.tuning_trials import Demands
    from parnas.tuning_display import show_tuned

    chosen: tuning_space.Phase = "search" if phase == "search" else "retrain"
    with not_left_empty(None if run or study else folder), interruptible(lambda: again(folder)):
        options = tuning_space.read_options(wanted or [])
        asked = ask_space(space, options, config, chosen, folder)
        found = go_on(config, Demands(chosen, asked, trials, storage, study, prune), folder, output.reporter())
    written = [*found.write(folder), *draw_tuning(folder)]
    output.show(show_tuned, found)
    if found.best is None:
        output.end(found.to_dict(), written)
        raise ParnasError("No trial came to its end with a finite loss; lower the learning rates that are tried.")
    output.end(found.to_dict(), written, f"parnas {phase} {shlex.quote(str(folder / 'best.yaml'))}")
