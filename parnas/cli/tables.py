"""Functions that print the results of commands as tables and text."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from parnas.architecture import Architecture, describe_layer
from parnas.runs.run import FROM_SCRATCH, PLAIN
from parnas.training.planning.resource_plan import GB, MARGIN, Machine, PhasePlan, Plan
from parnas.training.progress import describe_metrics, pi_bar

if TYPE_CHECKING:
    import pandas as pd

    from parnas.cli import doctor
    from parnas.cli.watch import State
    from parnas.data.streams import StreamHeader
    from parnas.evaluation.analyses import Analysis
    from parnas.evaluation.comparison import Comparison
    from parnas.nas.derive import Derivation
    from parnas.nas.front import Front
    from parnas.nas.latency_table import Check, Profile
    from parnas.pretrained.findings import Findings
    from parnas.runs.records import TunedEvalRecord
    from parnas.studies.baseline_comparison import BaselineComparison
    from parnas.studies.baselines import Baselines
    from parnas.studies.blackbox import EvaluatedNetwork
    from parnas.studies.finalists import Finalist
    from parnas.studies.stability import Stability
    from parnas.studies.tuning import TuningResult


def _make_table(
    titles: Iterable[str], rows: Iterable[Iterable[str]], left: Collection[str] = (), gap: int = 2
) -> Table:
    """Return a table without lines, with `gap` spaces between columns; columns whose title is in `left` align left."""
    table = Table(box=None, header_style="bold", padding=(0, gap, 0, 0))
    for title in titles:
        table.add_column(escape(title), justify="left" if title in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        Console().print(f"* {note}", highlight=False, markup=False)


def _decimals(value: float | None, digits: int) -> str:
    """Return a number with `digits` decimals, or an empty text for `None`."""
    return "" if value is None else f"{value:.{digits}f}"


def show_state(name: str, state: "State") -> None:
    """Print the current step of a run, its last metrics and the last pi of every block."""
    print(f"{name}: {state.kind}, step {state.step:,} of {state.steps:,}{', finished' * state.finished}")
    for record in state.latest().values():
        print(f"step {record.step:,}: {describe_metrics(record)}")
    if state.pi:
        bars = [pi_bar(number, state.space, row) for number, row in enumerate(state.pi[-1].pi, 1)]
        Console().print(Columns(bars, padding=(0, 3)))


_MOST_LETTERS = 12  # of the names of all candidates, for a column for each
_MOST_PROBABLE = 3


def show_derivation(derivation: "Derivation") -> None:
    """Print pi of each block, the ranked networks, warnings, and the derived architecture with its cost."""
    console, space = Console(), list(derivation.blocks[0].pi)
    is_short = len("".join(space)) <= _MOST_LETTERS
    rows = []
    for number, block in enumerate(derivation.blocks, 1):
        if is_short:
            chances = [f"{chance:.3f}" for chance in block.pi.values()]
        else:  # a column for each candidate would be too narrow: list the most probable
            first = sorted(block.pi.items(), key=lambda pair: -pair[1])[:_MOST_PROBABLE]
            chances = [", ".join(f"{name} {chance:.3f}" for name, chance in first)]
        layer = describe_layer(block.layer) if is_short else block.layer
        rows.append([str(number), layer, *chances, f"{block.entropy:.3f}", f"{block.margin:.3f}"])
    pi = [f"pi({name})" for name in space] if is_short else ["highest pi"]
    console.print(_make_table(["block", "layer", *pi, "entropy", "margin"], rows, left=["layer", "highest pi"]))
    if len(derivation.ranking) > 1:
        titles = ["rank", "architecture", "probability", "nats behind", "cost", "shared-weight loss", "score"]
        rows = [
            [str(rank), str(each.architecture), f"{each.probability:.2e}", _decimals(each.behind, 3)]
            + [_decimals(value, digits) for value, digits in ((each.cost, 3), (each.loss, 4), (each.score, 4))]
            for rank, each in enumerate(derivation.ranking, 1)
        ]
        console.print(_make_table(titles, rows, left=["architecture"]))
    for warning in derivation.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    counts = dict.fromkeys(space, 0) | derivation.architecture.counts()
    listed = ", ".join(f"{count} {describe_layer(name)}" for name, count in counts.items())
    print(f"architecture: {derivation.architecture} ({derivation.method})")
    costs_of_network = [derivation.costs, *(costs for costs, _ in derivation.further)]
    for costs in filter(None, costs_of_network):
        print(f"cost of the blocks: {costs.share(derivation.architecture):.3f} of {costs.reference_name}, as predicted")
    print(f"{listed}; {derivation.parameters:,} parameters")


def show_derived_front(front: "Front") -> None:
    """Print the network within each cost target, with its predicted cost and its estimated loss."""
    rows = []
    for row in front.to_rows():
        losses = _decimals(row["loss"], 4), _decimals(row["score"], 4)
        rows.append([f"{row['target']:g}", row["arch"], _decimals(row["cost"], 3), *losses, f"{row['parameters']:,}"])
    titles = ["target", "architecture", "cost", "shared-weight loss", "score", "parameters"]
    Console().print(_make_table(titles, rows, left=["architecture"]))


def show_finalists(finalists: Sequence["Finalist"]) -> None:
    """Print architecture, cost and perplexity of the finalists, the lowest perplexity first."""
    rows = []
    for rank, each in enumerate(finalists, 1):
        arch, costs = each.derivation.architecture, each.derivation.costs
        ppl = "diverged" if each.ppl == math.inf else f"{each.ppl:.2f}"
        rows.append([str(rank), str(arch), _decimals(costs.share(arch) if costs else None, 3), ppl])
    Console().print(_make_table(["finalist", "architecture", "cost", "ppl per token"], rows, left=["architecture"]))


def show_stability(stability: "Stability") -> None:
    """Print each block's votes, each seed's architecture and mean distance to the other seeds, and the consensus."""
    space = list(dict.fromkeys(candidate for block in stability.blocks for candidate in block.votes))
    titles = ["block", *(f"votes({c})" for c in space), *(f"pi({c})" for c in space), "consensus", "majority"]
    rows = [
        [str(number), *(str(block.votes.get(c, "")) for c in space)]
        + [f"{block.mean_pi[c]:.3f}" if c in block.mean_pi else "" for c in space]
        + [block.consensus, block.majority or "tied"]
        for number, block in enumerate(stability.blocks, 1)
    ]
    Console().print(_make_table(titles, rows, left=["consensus", "majority"]))
    figures, others = stability.to_dict(), max(1, len(stability.seeds) - 1)
    rows = [
        [str(seed), *(_write_layers(figures[key][row]) for key in ("strings", "networks"))]
        + [f"{sum(figures[key][row]) / others:.2f}" for key in ("hamming", "edit")]
        for row, seed in enumerate(stability.seeds)
    ]
    titles = ["seed", "architecture", "network", "hamming", "edit"]
    Console().print(_make_table(titles, rows, left=["architecture", "network"]))
    print(
        f"mean pairwise distance: {figures['mean_hamming']:.2f} of {len(stability.blocks)} blocks differ, "
        f"{figures['mean_edit']:.2f} edits between the networks"
    )
    differing = [str(number) for number, block in enumerate(stability.blocks, 1) if not block.agrees]
    agreement = f"not the majority's in block {', '.join(differing)}" if differing else "the majority's in every block"
    print(f"consensus: {_write_layers(stability.consensus)}; {agreement}")


def _write_layers(layers: Sequence[str]) -> str:
    """Return layers as an architecture text such as `(sf)*8`, or a dash if there are no layers."""
    return str(Architecture(layers)) if layers else "–"


def show_front(front: Sequence["EvaluatedNetwork"], reference: float) -> None:
    """Print the Pareto front, the cheapest network first; `reference` is the cost that shares are relative to."""
    rows = [
        [each.network, f"{each.valid_ppl:.2f}", f"{each.cost / reference:.3f}"]
        + [_cell(value) for value in (each.cost, each.trial, each.source)]
        for each in front
    ]
    titles = ["network", "ppl/token", "cost share", "cost", "trial", "source"]
    Console().print(_make_table(titles, rows, left=["network", "source"]))


def show_baselines(baselines: "Baselines") -> None:
    """Print the derived network and its baselines with their predicted costs."""
    rows = [[each.name, str(each.architecture), f"{each.share:.3f}"] for each in baselines.networks]
    Console().print(_make_table(["name", "architecture", "cost share"], rows, left=["name", "architecture"]))
    _print_notes([_explain_cost_share(baselines.metric), *baselines.notes])


def show_baseline_results(comparison: "BaselineComparison") -> None:
    """Print each network's perplexity over its seeds, and whether the derived one is better than its baselines."""
    rows = [
        (each.name, each.arch, f"{each.share:.3f}", f"{each.mean:.2f}", _decimals(each.sd, 2), str(len(each.ppl)))
        for each in comparison.networks
    ]
    titles = ["name", "architecture", "cost share", "valid ppl/token", "± sd", "n"]
    Console().print(_make_table(titles, rows, left=["name", "architecture"]))
    _print_notes([_explain_cost_share(comparison.metric), *comparison.notes])
    print("\n".join(each.text for each in comparison.verdicts()))


def _explain_cost_share(metric: str) -> str:
    return f"cost share: predicted {metric} of the blocks, as a share of the interleaved network's"


def show_analysis(analysis: "Analysis") -> None:
    """Print the table and notes of an analysis: attention summed over ages, word frequencies with a column per run."""
    from pandas.api.types import is_numeric_dtype

    frame, console = analysis.table, Console()
    console.print(f"\n{analysis.title}", style="bold")
    if analysis.name == "attention":
        frame = frame.pivot_table("weight", ["run", "block", "layer"], "part", "sum", sort=False).reset_index()
    elif analysis.name == "frequency":
        wide = frame.pivot(index="occurrences", columns="run", values="ppl")
        words = frame.drop_duplicates("occurrences").set_index("occurrences")["words"]
        frame = wide.reindex(index=words.index, columns=frame["run"].unique())
        frame.insert(0, "words", words)  # of the first run; with other tokenizers they differ
        frame = frame.reset_index()
    frame = frame.rename(columns={"gain_per_position": "per position"})
    left = [str(title) for title in frame if not is_numeric_dtype(frame[title])]
    rows = ([_cell(value) for value in row] for _, row in frame.iterrows())
    console.print(_make_table(map(str, frame), rows, left, gap=1))
    _print_notes(analysis.notes)


def _cell(value: object) -> str:
    """Return a value as a cell: floats with four significant digits, NaN as an empty cell."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else escape(str(value))
    return "" if math.isnan(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show_profile(profile: "Profile") -> None:
    """Print the latency of each layer, and for some networks the sum of their layers beside the measured latency."""
    Console().print(profile_table(profile))
    shapes = ", ".join(f"{name} {value}" for name, value in profile.shapes.items())
    machine = f"for a whole batch on {profile.machine['device_name']}, {profile.precision}; {shapes}"
    _print_notes([machine, f"median and 10th to 90th percentile of {profile.rounds} rounds"])
    if check := profile.check:
        Console().print("", check_table(check))
        errors = f"median {check.median_error:.1%}, largest {check.largest_error:.1%}"
        _print_notes([f"absolute relative error of {len(check.networks)} networks: {errors}"])


def profile_table(profile: "Profile") -> Table:
    """Return a table of latencies, of each layer and of all other parts, in ms and relative to a feed-forward layer."""
    modes = [mode for mode in (profile.inference, profile.training) if mode is not None]
    rows = []
    for name in ["fixed", *profile.inference.layers]:
        cells = [name]
        for mode in modes:
            timing, unit = mode.fixed if name == "fixed" else mode.layers[name], mode.layers["f"].median_ms
            median, p10, p90 = (
                f"{ms:.3f}" if abs(ms) < 10 else f"{ms:.1f}" for ms in (timing.median_ms, timing.p10_ms, timing.p90_ms)
            )
            cells += [median, f"{p10}–{p90}", f"{timing.median_ms / unit:.2f}" if unit else ""]
        rows.append(cells)
    titles = ["layer", "inference ms", "p10–p90", "× f", "training ms", "p10–p90", "× f"]
    return _make_table(titles[: 1 + 3 * len(modes)], rows, left=["layer"], gap=1)


def check_table(check: "Check") -> Table:
    """Return a table of networks with their predicted and measured inference latencies in ms."""
    rows = [
        [each.arch, f"{each.predicted_ms:.2f}", f"{each.measured_ms:.2f}", f"{each.error:+.1%}"]
        for each in check.networks
    ]
    return _make_table(["architecture", "predicted ms", "measured ms", "error"], rows, left=["architecture"])


def show_findings(findings: Sequence["doctor.Finding"]) -> None:
    """Print the findings by topic, each with its advice."""
    console, topic = Console(highlight=False, markup=False), None
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            console.print(topic, style="bold")
        console.print(f"  {finding.name:<20} {'–' if finding.value is None else finding.value}")
        if finding.advice is not None:
            console.print(f"  {'':<20} {finding.advice}", style="yellow")


def show_counts(header: "StreamHeader") -> None:
    """Print the counts of tokens, words, lines and bytes in each split of an encoded corpus."""
    rows = [
        [split, *(f"{n:,}" for n in (each.tokens, each.words, each.line_ends, each.lines, each.bytes, each.unknown))]
        for split, each in header.splits.items()
    ]
    titles = ["split", "tokens", "words", "line ends", "lines", "bytes", "unknown"]
    Console().print(_make_table(titles, rows, left=["split"]))
    lost = ", ".join({"case": "upper and lower case", "unknown": "unknown words"}[kind] for kind in header.loses)
    print(f"vocabulary {header.vocab_size:,}; the tokenizer loses {lost or 'nothing'}")


def show_plan(plan: Plan) -> None:
    """Print the estimated memory, FLOPs, time and price of each phase, and the notes of the plan."""
    console = Console(highlight=False)
    for phase in plan.phases:
        console.print(f"{phase.phase}: {phase.network}", style="bold")
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column()
        table.add_column(justify="right")
        for name, value in [*_memory_rows(phase, plan.machine), ("", ""), *_work_rows(phase, plan.machine)]:
            table.add_row(name, value, style="dim" if name.startswith(" ") else None)
        console.print(table)
        if phase.fits is not None:
            verdict = f"{'fits' if phase.fits else 'does not fit'} in {plan.machine.memory_gb:g} GB"
            console.print(f"  {verdict}", style="green" if phase.fits else "red")
        for line in phase.advice:
            console.print(f"  - {line}")
        console.print()
    _print_notes(plan.notes)


def _memory_rows(phase: PhasePlan, machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield name and size of each part of one GPU's memory; names of subparts begin with spaces."""
    gpus = "1 GPU" if machine.gpus == 1 else f"each of {machine.gpus} GPUs"
    yield f"memory of {gpus}", f"batch size {phase.rows}"
    sizes = {
        **phase.bytes,
        "  activations saved for backward": phase.estimate.saved_activations,
        "  of these, in the softmax": phase.estimate.softmax,
        "  gradients of activations": phase.estimate.gradients,
        "total": sum(phase.bytes.values()),
        f"with CUDA and {MARGIN:.0%} margin": phase.needed_bytes,
    }
    for name, size in sizes.items():
        yield name, f"{size / GB:,.2f} GB" if size >= GB / 10 else f"{size / 1e6:,.1f} MB"


def _work_rows(phase: PhasePlan, machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield names and values of a phase: parameters, FLOPs and tokens, and time and price if they are known."""
    yield "parameters", f"{phase.parameters:,}"
    yield "training FLOPs per token", f"{phase.flops_per_token / 1e6:,.1f} million"
    yield "tokens to train on", f"{phase.tokens:,}"
    if phase.tokens_per_s is None or (hours := phase.hours) is None:
        return
    scaled = abs((phase.scaled_by or 1) - 1) > 0.005
    yield "tokens/s, scaled by FLOPs" if scaled else "tokens/s", f"{phase.tokens_per_s:,.0f}"
    duration = f"{hours:.1f} hours" if hours < 48 else f"{hours / 24:,.1f} days"
    yield "time", f"{hours * 60:.1f} minutes" if hours < 1 else duration
    if machine.gpus > 1:
        yield "GPU hours", f"{machine.gpus * hours:,.1f}"
    if phase.price is not None:
        yield "price", f"{phase.price:,.2f}"


_SHOWN_TRIALS = 5


def show_tuned(tuned: "TuningResult") -> None:
    """Print the best trials (`*`: settings as configured), the number of trials by state, and setting importance."""
    complete = sorted((each for each in tuned.trials if each.state == "complete"), key=lambda each: each.loss or 0.0)
    settings = [each.settings for each in complete]
    distinct = [each for place, each in enumerate(complete) if each.settings not in settings[:place]]
    configured = tuned.configured if tuned.configured in complete else None
    rows = []
    for each in [*distinct[:_SHOWN_TRIALS], *(each for each in distinct[_SHOWN_TRIALS:] if each == configured)]:
        loss, mark = each.loss or 0.0, "*" * (each == configured)
        values = (f"{value:.4g}" if isinstance(value, float) else str(value) for value in each.settings.values())
        rows.append([f"{mark}{each.number}", f"{loss:.4f}", f"{math.exp(min(loss, 700)):.2f}", *map(escape, values)])
    titles = ["trial", "loss", "ppl/token", *(key.rpartition(".")[2] for key in tuned.space)]
    Console().print(_make_table(titles, rows))
    note = "" if tuned.configured is None else f"; as configured: {tuned.configured.state}"
    counts = ", ".join(f"{count} {state}" for state, count in tuned.counts().items() if count)
    print(f"{len(tuned.trials)} trials: {counts}{'; *: as configured' if configured else note}")
    if tuned.importance is not None:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in tuned.importance.items())
        print(f"importance among the best trials: {shares}")
    if tuned.best is None or tuned.best.loss is None:
        return
    gain = configured.loss - tuned.best.loss if configured and configured.loss is not None else 0.0
    gained = f", {gain:.4f} less than as configured" if gain > 0 else ""
    print(f"best: trial {tuned.best.number}, validation loss {tuned.best.loss:.4f} nats per token{gained}")


# Title and format by key of `Comparison.table`. A table shows the keys that the comparison has, in this order; keys
# that are not listed here are only in the files that `evaluate` writes.
QUALITY_COLUMNS = {
    "network": ("network", "{}"),
    "arch": ("architecture", "{}"),
    "evaluation": ("evaluation", "{}"),
    "bits_per_byte": ("bits/byte", "{:.4f}"),
    "ppl": ("ppl/token", "{:.2f}"),
    "word_ppl": ("ppl/word", "{:.2f}"),
    "parameters": ("parameters", "{:,.0f}"),
}
SPEED_COLUMNS = {
    "train_tokens_per_s": ("train tok/s", "{:,.0f}"),
    "train_seconds": ("train s", "{:,.0f}"),
}
COST_COLUMNS = {
    "without_embeddings": ("w/o embed.", "{:,.0f}"),
    "multiply_adds_per_token": ("MACs/tok", "{:,.0f}"),
    "latency_ms": ("ms/seg.", "{:.2f}"),
    "latency_p95_ms": ("p95", "{:.2f}"),
    **SPEED_COLUMNS,
    "tgt_len": ("tgt", "{:.0f}"),
    "mem_len": ("mem", "{:.0f}"),
    "cmem_len": ("cmem", "{:.0f}"),
    "pointer_len": ("pointer", "{:.0f}"),
}
TRAINING_COLUMNS = {
    "weights": ("weights", "{}"),
    **SPEED_COLUMNS,
    "inherited_steps": ("inherited steps", "{:,.0f}"),
    "total_seconds": ("total s", "{:,.0f}"),
}


def show_comparison(comparison: "Comparison") -> None:
    """Print a comparison as tables that fit a terminal, with notes: perplexities, costs, and how the runs were trained.

    If all runs were trained alike from scratch, a note says so, and the table of costs has their speed and time.
    """
    console, table = Console(), comparison.table
    plain = table[table["evaluation"] == PLAIN]
    quality = {key: column for key, column in QUALITY_COLUMNS.items() if key != "evaluation" or len(plain) < len(table)}
    # Cost does not depend on the evaluation protocol, so each run is listed once.
    weights = set(plain["weights"])
    alike = f"weights of all networks: {weights.pop()}" if weights == {FROM_SCRATCH} else None
    costs = {key: column for key, column in COST_COLUMNS.items() if alike or key not in SPEED_COLUMNS}
    console.print(comparison_table(table, quality), comparison_table(plain, costs))
    if alike is None:
        console.print(comparison_table(plain, TRAINING_COLUMNS))
    first = table.iloc[0]
    divisors = ", ".join(f"{first[key]:,.0f} {key}" for key in ("tokens", "words", "bytes") if key in first)
    rows = table.to_dict("records")
    settings = [f"{row['run']}, {row['evaluation']}: {row['settings']}" for row in rows if row.get("settings")]
    trained = [] if alike is None else [alike]
    _print_notes([f"perplexities are normalised by {divisors}", *trained, *comparison.notes, *settings])


def show_probe(findings: "Findings") -> None:
    """Print the answer of a probe, what each replacement costs, and the networks with less attention."""
    console, found = Console(), findings.probe
    names = list(dict.fromkeys(name for each in found.changes for name in each))
    rows = [
        [str(number), own, *(f"{changes[name].kl:.3f}" if name in changes else "" for name in names)]
        for number, (own, changes) in enumerate(zip(found.layers, found.changes, strict=True), 1)
    ]
    console.print("KL divergence from the unchanged model, nats per token, by replacement:")
    console.print(_make_table(["layer", "", *names], rows, left=[""]))
    fewer = [
        [
            _describe_replaced(found.layers, each.layers),
            f"{each.latency:.2f}",
            f"{each.speed:.2f}",
            f"{each.perplexity:+.1%}",
        ]
        for each in (*findings.attention, *findings.front)
    ]
    titles = ["replaced, without training", "latency of the layers", "speed of the model", "perplexity"]
    console.print(_make_table(titles, fewer, left=titles[:1]))
    console.print(findings.answer, highlight=False)


def _describe_replaced(own: Sequence[str], layers: Sequence[str]) -> str:
    """Return which layers of a network differ from `own`, with their numbers, such as `i: 3, 5; f:d_inner=16: 2`."""
    replaced: dict[str, list[str]] = {}
    for number, (before, layer) in enumerate(zip(own, layers, strict=True), 1):
        if layer != before:
            replaced.setdefault(layer, []).append(str(number))
    return "; ".join(f"{layer}: {', '.join(numbers)}" for layer, numbers in replaced.items())


def show_eval_tuning(tuning: "TunedEvalRecord") -> None:
    """Print a row for the plain evaluation and one for the chosen settings of each protocol, and the notes."""
    rows = []
    for trial in (tuning.plain, *tuning.chosen.values()):
        tried = sum(each.evaluation == trial.evaluation for each in tuning.trials)
        rows.append([trial.evaluation, f"{trial.ppl:.2f}", str(tried or ""), trial.settings])
    titles = ["evaluation", "ppl/token", "tried", "settings"]
    Console().print(_make_table(titles, rows, left=["evaluation", "settings"]))
    measured = f"on the first {tuning.tokens:,} tokens of the validation split"
    _print_notes([measured, *tuning.notes])


def comparison_table(frame: "pd.DataFrame", columns: Mapping[str, tuple[str, str]]) -> Table:
    """Return a table with a row per run and those `columns` (title and format by key) that `frame` has.

    A missing value is a dash.
    """
    import pandas as pd

    shown = {key: column for key, column in columns.items() if key in frame}
    left = ["run", *(title for title, form in shown.values() if form == "{}")]
    rows = (
        [escape(str(row["run"]))]
        + ["–" if pd.isna(row[key]) else form.format(row[key]) for key, (_, form) in shown.items()]
        for _, row in frame.iterrows()
    )
    return _make_table(["run", *(title for title, _ in shown.values())], rows, left, gap=1)
