"""The command line: arguments in, run folders and tables out. Work is imported only when a command needs it."""

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from parnas.commands import draw, evaluate_runs, interruptible, leads, refuse_several, settle
from parnas.config import check_config, load_config
from parnas.errors import ParnasError
from parnas.exits import told_in_one_message
from parnas.run import Run, fresh_folder

app = typer.Typer(
    name="parnas",
    help="Find where a language model needs attention, and where a cheaper layer does as well.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [SECTION.KEY=VALUE ...]", help="A YAML file (default: the demo's) and overrides."),
]
RunFolder = Annotated[Path | None, typer.Option("--run", help="Run folder to write; default: runs/COMMAND-CONFIG.")]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the run in --run, by its own configuration where none is given; never anew.",
    ),
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for what is written.")]
FrameTime = Annotated[int | None, typer.Option("--frame-ms", help="Milliseconds per frame of the animation.")]
Width = Annotated[int | None, typer.Option("--width", help="Width of the animation in pixels.")]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; see `exits.py` for how it ends."""
    with told_in_one_message():
        app(args=list(sys.argv[1:] if arguments is None else arguments), prog_name="parnas")


@app.callback()
def import_layers() -> None:
    """Register the user's own layers before any configuration is checked."""
    if listed := os.environ.get("PARNAS_LAYERS"):
        from parnas.model.own_layers import import_own_layers

        import_own_layers(listed)


@app.command()
def search(settings: Settings = None, run: RunFolder = None, resume: Resume = False) -> None:
    """Train a SuperNet and record pi."""
    config, folder = settle(settings, run, resume, "search")
    from parnas.display import make_reporter
    from parnas.nas.search import search as train

    reporter = make_reporter()
    with interruptible(f"parnas search --run {folder} --resume"):
        finished = train(config, folder, reporter, resume)
    if not leads():
        return
    draw([finished], reporter)
    typer.echo(f"search finished: {finished.summary()['arch']}\nnext: parnas derive {folder}")


@app.command()
def derive(
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
    """Take the architecture that pi speaks for within the cost target into arch.yaml."""
    from parnas.display import make_reporter, show_derivation
    from parnas.nas.derive import derive as choose
    from parnas.nas.derive import read_demands, write_derivation

    of = Run(run)
    derivation = choose(of, read_demands(within, metric, most or [], top_k, rescore), make_reporter())
    folder = out or run
    folder.mkdir(parents=True, exist_ok=True)
    write_derivation(derivation, of, folder / "arch.yaml")
    show_derivation(derivation)
    typer.echo(f"written: {folder / 'arch.yaml'}\nnext: parnas retrain CONFIG --arch {folder / 'arch.yaml'}")


@app.command()
def retrain(
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
    from parnas.display import make_reporter
    from parnas.training.retrain import retrain as train

    reporter = make_reporter()
    with interruptible(f"parnas retrain --run {folder} --resume"):
        finished = train(config, folder, reporter, resume)
    if not leads():
        return
    draw([finished], reporter)
    valid = finished.summary()["valid"]
    typer.echo(
        f"retrain finished: {finished.summary()['arch']}, validation perplexity {valid['ppl']:.2f} per token, "
        f"{valid['bits_per_byte']:.3f} bits per byte\nnext: parnas evaluate {folder} OTHER_RUN"
    )


@app.command()
def evaluate(
    runs: Runs,
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
    analyses: Annotated[
        str | None,
        typer.Option("--analyse", metavar="LIST", help="Some of attention,frequency,memory: tables and pictures."),
    ] = None,
    out: Out = None,
) -> None:
    """Compare perplexities and costs of runs in one table, and see what they attend to."""
    if split not in (None, "train", "valid", "test"):
        raise ParnasError(f"--split is {split!r}; give train, valid or test.")
    from parnas.display import make_reporter
    from parnas.evaluation.entries import Conditions

    conditions = Conditions(split, tgt_len, mem_len, cmem_len, clamp_len, same_length)
    folder = out or Path("runs") / "comparison"
    written = evaluate_runs(runs, conditions, analyses, folder, make_reporter())
    typer.echo("\n".join(f"written: {path}" for path in written))


@app.command()
def profile(
    settings: Settings = None,
    batch_size: Annotated[int | None, typer.Option("--batch-size", help="Rows; default: as configured.")] = None,
    tgt_len: Annotated[
        int | None, typer.Option("--tgt-len", help="Tokens of a segment; default: as configured.")
    ] = None,
    mem_len: Annotated[
        int | None, typer.Option("--mem-len", help="Positions of memory; default: as configured.")
    ] = None,
    rounds: Annotated[int, typer.Option("--rounds", min=1, help="How often each network is timed.")] = 50,
    check: Annotated[
        int, typer.Option("--check", min=0, help="Random networks to predict and to time; 0 for none.")
    ] = 20,
    out: Out = None,
) -> None:
    """Measure what each layer costs on this machine, and how well the sum predicts networks."""
    shape = {"data.batch_size": batch_size, "data.tgt_len": tgt_len, "model.mem_len": mem_len}
    overrides = [f"{key}={value}" for key, value in shape.items() if value is not None]
    config, folder = settle([*(settings or []), *overrides], out, False, "profile")
    from parnas.display import make_reporter, show_profile
    from parnas.nas.profile import PROFILE
    from parnas.nas.profile import profile as measure

    found = measure(config, make_reporter(), rounds=rounds, check=check)
    found.write(folder / PROFILE)
    show_profile(found)
    typer.echo(f"written: {folder / PROFILE}")


@app.command()
def plan(
    settings: Settings = None,
    gpus: Annotated[int, typer.Option("--gpus", min=1, help="GPUs that share each batch.")] = 1,
    arch: Annotated[
        str | None, typer.Option("--arch", help="As of retrain; default: model.arch, or the interleaved network.")
    ] = None,
    memory: Annotated[
        float | None, typer.Option("--memory", metavar="GB", help="Of each GPU, in 10^9 bytes: says whether it fits.")
    ] = None,
    measured: Annotated[
        Path | None, typer.Option("--from", metavar="RUN", help="A run on one such GPU, whose tokens/s count.")
    ] = None,
    tokens_per_s: Annotated[
        float | None, typer.Option("--tokens-per-s", help="Of one GPU retraining this network, where it is known.")
    ] = None,
    bandwidth: Annotated[
        float | None,
        typer.Option("--bandwidth", metavar="GB_PER_S", help="Of each GPU; default: 200 up to eight, 25 beyond."),
    ] = None,
    price: Annotated[float | None, typer.Option("--price-per-hour", min=0, help="Of one GPU, in any currency.")] = None,
    out: Out = None,
) -> None:
    """Count the memory that both phases take, and tell days and price from a measured speed; trains nothing."""
    config, _ = settle(settings, out or Path(), False, "plan", arch)
    from parnas.display import make_reporter
    from parnas.plan_display import show_plan
    from parnas.training.plan import choose_rate, make_machine
    from parnas.training.plan import plan as count

    note = make_reporter().note
    found = count(config, make_machine(gpus, memory, bandwidth, price), choose_rate(measured, tokens_per_s, note), note)
    show_plan(found)
    if out is not None:
        typer.echo(f"written: {found.write(out)}")


@app.command()
def plot(runs: Runs, frame_ms: FrameTime = None, width: Width = None) -> None:
    """Redraw every picture of runs."""
    from parnas.display import make_reporter

    draw([Run(run) for run in runs], make_reporter(), frame_ms, width)


@app.command()
def cutoffs(
    source: Annotated[str, typer.Argument(metavar="RUN|COUNTS", help="A run folder, or a file with a count per line.")],
    clusters: Annotated[int, typer.Option("--clusters", min=2, help="Number of clusters, the head included.")] = 3,
    d_model: Annotated[
        int | None, typer.Option("--d-model", min=1, help="Width of the network; for COUNTS only, default 512.")
    ] = None,
    proj_factor: Annotated[
        int | None, typer.Option("--proj-factor", min=1, help="As in a configuration; for COUNTS only, default 4.")
    ] = None,
) -> None:
    """Find the optimal cutoffs of an adaptive softmax."""
    from parnas.data.counts import read_counts
    from parnas.data.streams import prepare
    from parnas.model.cutoffs import optimal_cutoffs

    if Path(source).is_dir():
        if d_model or proj_factor:
            raise ParnasError(f"{source} is a run and has its own --d-model and --proj-factor; leave them out.")
        config = Run(source).config()
        counts, d_model = prepare(config.data).train_counts(), config.model.d_model
        dims = config.replace(model__cutoffs=tuple(range(1, clusters))).model.softmax_dims()
    else:
        counts, d_model, proj_factor = read_counts(Path(source)), d_model or 512, proj_factor or 4
        dims = [d_model // proj_factor**cluster for cluster in range(clusters)]
    found = optimal_cutoffs(counts, clusters, d_model, dims)
    typer.echo(f"model.cutoffs: {list(found.cutoffs)}")
    typer.echo(f"expected multiply-adds per token: {found.cost:,.0f}, {found.relative:.1%} of the full softmax")


@app.command()
def data(
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="A corpus, a folder, a text, or a CONFIG.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[data.KEY=VALUE ...]")] = None,
) -> None:
    """Fetch, verify and encode a corpus, and print its counts."""
    if corpus.endswith((".yaml", ".yml")):
        config = load_config(corpus, overrides or [])
    else:
        config = check_config({"data": {"corpus": corpus}}, "the command line", overrides=overrides or [])
    from parnas.data.streams import prepare
    from parnas.display import make_reporter, show_counts

    show_counts(prepare(config.data, make_reporter().note).header)


@app.command()
def stability(
    settings: Settings = None,
    seeds: Annotated[int, typer.Option("--seeds", min=2, help="Searches, from runtime.seed on.")] = 5,
    run: RunFolder = None,
) -> None:
    """Search with several seeds and see whether they find the same; given again with --run, it goes on."""
    refuse_several("stability")
    begun = run is not None and (run / "config.yaml").is_file()
    config, folder = settle(settings, run, begun, "stability")
    from parnas.display import make_reporter, show_stability
    from parnas.figures.votes import draw_votes
    from parnas.nas.stability import stability as repeat

    with interruptible(f"parnas stability --seeds {seeds} --run {folder}"):
        found = repeat(config, folder, seeds, make_reporter())
    written = [*found.write(folder), draw_votes(folder)]
    show_stability(found)
    typer.echo("\n".join(f"written: {path}" for path in written))


@app.command()
def baselines(
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
    """Train what one would have guessed, and random networks, beside the derived one; given again, it goes on."""
    from parnas.display import make_reporter, show_baselines, show_contest
    from parnas.figures.pareto import Marker, draw_pareto
    from parnas.nas.baselines import find_baselines
    from parnas.nas.contest import hold_contest

    refuse_several("baselines")
    config, folder, reporter = Run(run).config(), folder or run / "baselines", make_reporter()
    first = config.runtime.seed if seed is None else seed
    found = find_baselines(Run(run), random, first, reporter)
    if only_list:
        show_baselines(found)
        return
    with interruptible("the same command again"):
        contest = hold_contest(found, config, folder, range(first, first + seeds), reporter)
    written = contest.write(folder)
    show_contest(contest)  # before the picture, which there is none of where no perplexity is finite
    markers = [Marker(each.name, each.share, each.mean, each.sd, each.random) for each in contest.standings]
    written.append(draw_pareto(markers, folder / "figures" / "pareto.png"))
    typer.echo("\n".join(f"written: {path}" for path in written))


@app.command()
def blackbox(
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
    """Search by Optuna, as a baseline; the same command goes on with the study, here or on other machines."""
    refuse_several("blackbox")
    if sampler not in ("tpe", "nsga2"):
        raise ParnasError(f"--sampler is {sampler!r}; give tpe or nsga2.")
    if (train_steps is None) == (supernet is None):
        raise ParnasError("Give one of --train-steps STEPS, to train each network, and --supernet RUN, a search.")
    if supernet is not None and all("=" in setting for setting in settings or []):
        Run(supernet).config()
        settings = [str(supernet / "config.yaml"), *(settings or [])]
    plain = re.sub(r"[^\w.-]+", "-", study)
    config, folder = settle(settings, run or Path("runs") / f"blackbox-{plain}", False, "blackbox")
    from parnas.display import make_reporter, show_front
    from parnas.nas import trials as results
    from parnas.nas.blackbox import blackbox as go_on
    from parnas.nas.blackbox import findings, open_study

    reporter = make_reporter()
    if supernet is not None:
        task = results.inheriting_task(config, supernet, reporter)
    else:
        task = results.training_task(config, train_steps or 0, folder if keep else None, reporter)
    with interruptible("the same command again"):
        shared = open_study(storage, study, "nsga2" if sampler == "nsga2" else "tpe", task)
        go_on(shared, task, trials, reporter)
    front, best = results.write_results(findings(shared), task, study, within, folder)
    show_front(front, task.costs.interleaved)
    typer.echo(f"written: {folder / 'pareto.csv'}")
    if best is None:
        raise ParnasError("No network that was evaluated costs so little; raise --within or --trials.")
    typer.echo(f"written: {folder / 'arch.yaml'}\nnext: parnas retrain CONFIG --arch {folder / 'arch.yaml'}")


@app.command()
def demo(
    run: Annotated[Path | None, typer.Option("--run", help="Folder for the runs; default: runs/demo.")] = None,
) -> None:
    """Search, derive, retrain and compare on an embedded corpus, in minutes."""
    from parnas.demo import run_demo
    from parnas.display import make_reporter

    run_demo(run or fresh_folder("demo"), make_reporter())
