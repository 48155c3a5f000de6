"""Commands that show and export runs, and commands that prepare a training: plan, profile, cutoffs, data, doctor."""

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option, Typer

from parnas.cli.common import (
    Output,
    draw,
    interruptible,
    refuse_torchrun,
    resolve_arguments,
    split_configuration,
    study_resume_hint,
)
from parnas.cli.options import TOOLS, Arch, Best, Settings, register
from parnas.config.loader import check_config, load_config
from parnas.errors import ParnasError
from parnas.runs.resolve import make_run_folder, remove_if_empty
from parnas.runs.run import Run

tools = Typer()
_command = register(tools, TOOLS)


@_command
def probe(
    output: Output,
    model: Annotated[
        Path, Argument(metavar="MODEL", help="A retraining, a search, or a folder with a model of transformers.")
    ],
    text: Annotated[
        str | None,
        Option(help="A text file, or a corpus, whose validation split is read; default: that of the run's own text."),
    ] = None,
    tokens: Annotated[int, Option(min=64, help="Tokens to read.")] = 4096,
    pairs: Annotated[int, Option(min=0, help="Pairs of layers to leave out together.")] = 8,
    settings: Annotated[
        list[str] | None, Argument(metavar="[runtime.KEY=VALUE ...]", help="Overrides of the section runtime.")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for the results; default: MODEL/probe.")] = None,
) -> None:
    """Measure what a trained model loses without each of its layers, and with cheaper ones, without training."""
    from parnas.cli.tables import show_probe
    from parnas.pretrained.findings import check_folder, write_findings
    from parnas.pretrained.probe_model import ROUNDS, probe_model, read_runtime

    unknown, overrides = split_configuration(settings)
    if unknown is not None:
        raise ParnasError(f"A probe takes no configuration, but {unknown} is given; give runtime.KEY=VALUE.")
    runtime = read_runtime(overrides)
    folder = out or model / "probe"
    check_folder(folder)
    findings = probe_model(model, text, tokens, pairs, ROUNDS, runtime, output.reporter().note)
    written = write_findings(findings, folder)
    output.show(show_probe, findings)
    output.end(findings.to_dict(), written, f"open {shlex.quote(str(folder / 'report.html'))} in a browser")


@_command
def import_(
    output: Output,
    model: Annotated[
        Path,
        Argument(
            metavar="MODEL",
            help="A folder with the weights, and perhaps config.json, of TransfoXL of transformers or of the original "
            "Transformer-XL of PyTorch; or its file of weights. A pickled module is refused.",
        ),
    ],
    settings: Annotated[
        list[str] | None,
        Argument(
            metavar="[CONFIG] [SECTION.KEY=VALUE ...]",
            help="Settings that the model does not say, such as data.corpus and data.tokenizer.vocabulary; if some are "
            "missing, a message lists them. search --from and compress train for shares of train.steps, by default "
            "2000, and up to train.lr: set them to those of the model's training.",
        ),
    ] = None,
    run: Annotated[
        Path | None,
        Option("--run", help="Folder to write; default: runs/import-MODEL, with a number if that is taken."),
    ] = None,
) -> None:
    """Make a run of a trained Transformer-XL of another program, with its predictions up to rounding."""
    refuse_torchrun("import")
    from parnas.pretrained.import_transfo_xl import import_settings, import_transfo_xl
    from parnas.pretrained.transfo_xl import read_transfo_xl

    named, overrides = split_configuration(settings)
    found = read_transfo_xl(model)
    config = import_settings(found, named, overrides)
    folder = run or make_run_folder(f"import-{model.resolve().stem}")
    with remove_if_empty(None if run else folder), interruptible(study_resume_hint):
        imported = import_transfo_xl(found, config, folder, output.reporter())
    summary = imported.summary()
    output.show(print, f"imported {summary.arch}: validation perplexity {summary.valid.ppl:.2f} per token")
    hint = f"parnas probe {shlex.quote(str(folder))}"
    output.end({"run": str(folder), **summary.to_dict()}, draw([imported]), hint)


@_command
def watch(
    output: Output,
    run: Annotated[Path, Argument(metavar="RUN", help="Folder of a search or retraining.")],
    once: Annotated[bool, Option("--once", help="Print the current state and exit; --json implies it.")] = False,
) -> None:
    """Show, from another terminal, the progress of a run until it ends."""
    from parnas.cli.tables import show_state
    from parnas.cli.watch import read_state, watch
    from parnas.training.progress import make_display

    state = read_state(Run(run))
    if not (once or output.as_json or state.finished):
        with interruptible(lambda: f"parnas watch {shlex.quote(str(run))}"):
            state = watch(Run(run), make_display(output.quiet, every=True, live=not output.verbose))
    output.show(show_state, str(run), state)
    output.end(state.to_dict())


@_command
def plot(
    output: Output,
    runs: Annotated[list[Path], Argument(metavar="RUN...", help="Run folders.")],
    frame_ms: Annotated[int | None, Option(help="Milliseconds per frame of the animation.")] = None,
    width: Annotated[int | None, Option(help="Width of the animation in pixels.")] = None,
) -> None:
    """Draw the pictures of runs again."""
    output.end({"runs": [str(run) for run in runs]}, draw([Run(run) for run in runs], frame_ms, width))


@_command
def report(
    output: Output,
    runs: Annotated[
        list[Path],
        Argument(metavar="RUN...", help="Run folders, or folders that evaluate, baselines, blackbox or probe wrote."),
    ],
    out: Annotated[
        Path | None, Option(help="Folder for report.html; default: RUN if only one is given, else runs/report.")
    ] = None,
) -> None:
    """Write an HTML page that shows the results of runs, for any browser and without network."""
    from parnas.figures.report.page import write_report

    output.end({"runs": [str(run) for run in runs]}, [write_report(runs, out)])


@_command
def export(
    output: Output,
    run: Annotated[Path, Argument(metavar="RUN", help="A retraining, or a search to export its derived network.")],
    target: Annotated[str, Option("--to", help="Format: safetensors, x-transformers, pt2 or onnx.")],
    best: Best = False,
    out: Annotated[Path | None, Option(help="Folder for the files; default: RUN/exports/FORMAT.")] = None,
) -> None:
    """Export the network of a run to another format, and verify its outputs."""
    from parnas.export import export_run

    written = export_run(run, target, out, best)
    output.show(print, written.describe())
    output.end(written.to_dict(), [written.folder / name for name in written.files])


@_command
def profile(
    output: Output,
    settings: Settings = None,
    batch_size: Annotated[int | None, Option(help="Batch size; default: as configured.")] = None,
    tgt_len: Annotated[int | None, Option(help="Tokens of a segment; default: as configured.")] = None,
    mem_len: Annotated[int | None, Option(help="Positions of memory; default: as configured.")] = None,
    rounds: Annotated[int, Option(min=1, help="Number of timings of each network.")] = 50,
    check: Annotated[
        int,
        Option(
            min=0,
            help="Number of random networks whose latency is compared with the sum over their layers; 0: none.",
        ),
    ] = 20,
    out: Annotated[
        Path | None,
        Option(help="Folder for the profile; default: runs/profile-CONFIG, with a number if that is taken."),
    ] = None,
) -> None:
    """Measure the latency of each layer on this machine, and compare sums of layer latencies with whole networks."""
    shape = {"data.batch_size": batch_size, "data.tgt_len": tgt_len, "model.mem_len": mem_len}
    overrides = [f"{key}={value}" for key, value in shape.items() if value is not None]
    config, folder = resolve_arguments([*(settings or []), *overrides], out, False, "profile")
    from parnas.cli.tables import show_profile
    from parnas.nas.latency_table import PROFILE, profile

    with remove_if_empty(None if out else folder):
        table = profile(config, output.reporter(), rounds=rounds, check=check)
        table.write(folder / PROFILE)
    output.show(show_profile, table)
    output.end(asdict(table), [folder / PROFILE])


@_command
def plan(
    output: Output,
    settings: Settings = None,
    gpus: Annotated[int, Option(min=1, help="Number of GPUs that share each batch.")] = 1,
    arch: Arch = None,
    memory: Annotated[
        float | None, Option(metavar="GB", help="Memory of each GPU in 10^9 bytes, to check the fit.")
    ] = None,
    measured: Annotated[
        Path | None,
        Option("--from", metavar="RUN", help="Run on one GPU of the planned kind; its speed is used."),
    ] = None,
    tokens_per_s: Annotated[float | None, Option(help="Tokens per second when one GPU retrains this network.")] = None,
    bandwidth: Annotated[
        float | None,
        Option(metavar="GB_PER_S", help="Bandwidth of each GPU; default: 200 for up to eight GPUs, else 25."),
    ] = None,
    price_per_hour: Annotated[float | None, Option(min=0, help="Price of one GPU hour, in any currency.")] = None,
    out: Annotated[Path | None, Option(help="Folder for plan.json; default: the plan is only printed.")] = None,
) -> None:
    """Estimate memory, days and price of search and retraining before they run.

    Memory needs no measurement; days and price need a measured speed. Without an architecture, the plan is for
    retraining the interleaved network.
    """
    config, _ = resolve_arguments(settings, out or Path(), False, "plan", arch)
    from parnas.cli.tables import show_plan
    from parnas.training.planning.resource_plan import choose_rate, make_machine, plan

    note = output.reporter().note
    machine = make_machine(gpus, memory, bandwidth, price_per_hour)
    result = plan(config, machine, choose_rate(measured, tokens_per_s, note), note)
    output.show(show_plan, result)
    output.end(asdict(result), [] if out is None else [result.write(out)])


@_command
def cutoffs(
    output: Output,
    source: Annotated[str, Argument(metavar="RUN|COUNTS", help="A run folder, or a file with a count per line.")],
    clusters: Annotated[int, Option(min=2, help="Number of clusters, including the head.")] = 3,
    d_model: Annotated[int | None, Option(min=1, help="Width of the network; for COUNTS only, default 512.")] = None,
    proj_factor: Annotated[int | None, Option(min=1, help="model.proj_factor; for COUNTS only, default 4.")] = None,
    min_macs: Annotated[
        bool,
        Option("--min-macs", help="Allow a head of any size, for the fewest multiply-adds; as model.cutoffs=min_macs."),
    ] = False,
) -> None:
    """Find the optimal cutoffs of an adaptive softmax."""
    from parnas.data.streams import prepare
    from parnas.data.token_frequencies import read_counts
    from parnas.model.cutoffs import HEAD_SHARE, optimal_cutoffs

    if Path(source).is_dir():
        if d_model or proj_factor:
            raise ParnasError(f"{source} is a run, which defines --d-model and --proj-factor; leave them out.")
        config = Run(source).config()
        counts, d_model = prepare(config.data).train_counts(), config.model.d_model
        dims = config.replace(model__cutoffs=tuple(range(1, clusters))).model.softmax_dims()
    else:
        counts, d_model, proj_factor = read_counts(Path(source)), d_model or 512, proj_factor or 4
        dims = [d_model // proj_factor**cluster for cluster in range(clusters)]
    best = optimal_cutoffs(counts, clusters, d_model, dims, 0.0 if min_macs else HEAD_SHARE)
    output.show(print, f"model.cutoffs: {list(best.cutoffs)}")
    output.show(print, f"expected multiply-adds per token: {best.cost:,.0f}, {best.relative:.1%} of the full softmax")
    output.end({"cutoffs": list(best.cutoffs), "multiply_adds_per_token": best.cost, "of_full": best.relative})


@_command
def data(
    output: Output,
    corpus: Annotated[
        str, Argument(metavar="CORPUS", help="Name of a corpus, a folder, a text file, or a CONFIG.yaml.")
    ],
    overrides: Annotated[
        list[str] | None, Argument(metavar="[data.KEY=VALUE ...]", help="Overrides of data settings.")
    ] = None,
) -> None:
    """Download, verify and encode a corpus, and print its counts."""
    if corpus.endswith((".yaml", ".yml")):
        config = load_config(corpus, overrides or [])
    else:
        config = check_config({"data": {"corpus": corpus}}, "the command line", overrides=overrides or [])
    from parnas.cli.tables import show_counts
    from parnas.data.streams import prepare

    header = prepare(config.data, output.reporter().note).header
    output.show(show_counts, header)
    output.end(header.to_dict())


@_command
def doctor(output: Output) -> None:
    """Show versions, devices and folders of this machine, and what is missing."""
    from parnas.cli.doctor import examine
    from parnas.cli.tables import show_findings

    findings = examine()
    output.show(show_findings, findings)
    output.end({"findings": [asdict(each) for each in findings]})
