"""Commands that tell what something costs or holds, before anything is trained."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from parnas.cli_options import Out, Settings, with_output
from parnas.commands import settle
from parnas.config import check_config, load_config
from parnas.errors import ParnasError
from parnas.inputs import not_left_empty
from parnas.output import Output
from parnas.run import Run

tools = typer.Typer()


@tools.command()
@with_output
def profile(
    output: Output,
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
    """Measure what each layer costs on this machine. A check says how well their sum predicts networks."""
    shape = {"data.batch_size": batch_size, "data.tgt_len": tgt_len, "model.mem_len": mem_len}
    overrides = [f"{key}={value}" for key, value in shape.items() if value is not None]
    config, folder = settle([*(settings or []), *overrides], out, False, "profile")
    from parnas.display import show_profile
    from parnas.nas.profile import PROFILE
    from parnas.nas.profile import profile as measure

    with not_left_empty(None if out else folder):
        found = measure(config, output.reporter(), rounds=rounds, check=check)
        found.write(folder / PROFILE)
    output.show(show_profile, found)
    output.end(asdict(found), [folder / PROFILE])


@tools.command()
@with_output
def plan(
    output: Output,
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
    """Tell what a training will take. Counts the memory of both phases; days and price follow from a measured speed."""
    config, _ = settle(settings, out or Path(), False, "plan", arch)
    from parnas.plan_display import show_plan
    from parnas.training.plan import choose_rate, make_machine
    from parnas.training.plan import plan as count

    note = output.reporter().note
    found = count(config, make_machine(gpus, memory, bandwidth, price), choose_rate(measured, tokens_per_s, note), note)
    output.show(show_plan, found)
    output.end(asdict(found), [] if out is None else [found.write(out)])


@tools.command()
@with_output
def cutoffs(
    output: Output,
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
    output.show(print, f"model.cutoffs: {list(found.cutoffs)}")
    output.show(print, f"expected multiply-adds per token: {found.cost:,.0f}, {found.relative:.1%} of the full softmax")
    output.end({"cutoffs": list(found.cutoffs), "multiply_adds_per_token": found.cost, "of_full": found.relative})


@tools.command()
@with_output
def data(
    output: Output,
    corpus: Annotated[str, typer.Argument(metavar="CORPUS", help="A corpus, a folder, a text, or a CONFIG.yaml.")],
    overrides: Annotated[list[str] | None, typer.Argument(metavar="[data.KEY=VALUE ...]", help="Overrides.")] = None,
) -> None:
    """Fetch, verify and encode a corpus, and print its counts."""
    if corpus.endswith((".yaml", ".yml")):
        config = load_config(corpus, overrides or [])
    else:
        config = check_config({"data": {"corpus": corpus}}, "the command line", overrides=overrides or [])
    from parnas.data.streams import prepare
    from parnas.display import show_counts

    header = prepare(config.data, output.reporter().note).header
    output.show(show_counts, header)
    output.end(asdict(header))


@tools.command()
@with_output
def doctor(output: Output) -> None:
    """Tell what this machine has, and what is missing. And which device and precision would be used."""
    from parnas.display import show_findings
    from parnas.doctor import examine

    findings = examine()
    output.show(show_findings, findings)
    output.end({"findings": [asdict(found) for found in findings]})
