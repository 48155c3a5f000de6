"""Tables and results as the commands print them."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from parnas.architecture import Architecture, describe_layer
from parnas.runs.run import PLAIN
from parnas.studies.tuning_result import TrialResult, TuningResult
from parnas.training.progress import describe_metrics, pi_bar
from parnas.training.resource_plan import GB, MARGIN, Machine, PhasePlan, Plan

if TYPE_CHECKING:
    import pandas as pd

    from parnas.cli import doctor
    from parnas.cli.watch import State
    from parnas.data.streams import StreamHeader
    from parnas.evaluation.analyses import Analysis
    from parnas.evaluation.comparison import Comparison
    from parnas.evaluation.tune_eval import EvalTuning
    from parnas.nas.derive import Derivation, Ranked
    from parnas.nas.latency_table import Check, Profile
    from parnas.studies.baseline_comparison import BaselineComparison
    from parnas.studies.baselines import Baselines
    from parnas.studies.blackbox import EvaluatedNetwork
    from parnas.studies.finalists import Finalist
    from parnas.studies.stability import Stability


def show_state(name: str, state: "State") -> None:
    """Print the step of a run, its last metrics and pi of every block."""
    print(f"{name}: {state.kind}, step {state.step:,} of {state.steps:,}{', finished' * state.finished}")
    for record in state.latest().values():
        print(f"step {record.step:,}: {describe_metrics(record)}")
    if state.pi:
        bars = [pi_bar(number, state.space, row) for number, row in enumerate(state.pi[-1].pi, 1)]
        Console().print(Columns(bars, padding=(0, 3)))


def show_derivation(derivation: "Derivation") -> None:
    """Print the architecture, pi of each block, the ranking, warnings, cost and counts."""
    console = Console()
    space = list(derivation.blocks[0].pi)
    table = Table(box=None, header_style="bold")
    for title in ["block", "layer", *(f"pi({name})" for name in space), "entropy", "margin"]:
        table.add_column(title, justify="left" if title == "layer" else "right")
    for number, block in enumerate(derivation.blocks, 1):
        values = [*block.pi.values(), block.entropy, block.margin]
        table.add_row(str(number), describe_layer(block.layer), *(f"{value:.3f}" for value in values))
    console.print(table)
    if len(derivation.ranking) > 1:
        console.print(_ranking_table(derivation.ranking))
    for warning in derivation.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    counted = derivation.architecture.counts().items()
    counts = ", ".join(f"{count} {describe_layer(name)}" for name, count in counted if count or name in space)
    print(f"architecture: {derivation.architecture} ({derivation.method})")
    if derivation.costs is not None:
        share, costs = derivation.costs.share(derivation.architecture), derivation.costs
        print(f"cost of the blocks: {share:.3f} of the interleaved network's {costs.metric}, as predicted")
    print(f"{counts}; {derivation.parameters:,} parameters")


def _ranking_table(ranking: Sequence["Ranked"]) -> Table:
    """Return the table of the most probable networks: probability, cost, and the losses of re-ranked ones."""
    table = Table(box=None, header_style="bold")
    for title in ("rank", "string", "probability", "nats behind", "cost", "shared-weight loss", "score"):
        table.add_column(title, justify="left" if title == "string" else "right")
    for number, each in enumerate(ranking, 1):
        cost = "" if each.cost is None else f"{each.cost:.3f}"
        losses = ("" if value is None else f"{value:.4f}" for value in (each.loss, each.estimate))
        probability = f"{each.probability:.2e}", f"{each.behind:.3f}"
        table.add_row(str(number), str(each.architecture), *probability, cost, *losses)
    return table


def show_finalists(finalists: Sequence["Finalist"]) -> None:
    """Print the finalists, the best first."""
    table = Table(box=None, header_style="bold")
    for title in ("finalist", "string", "cost", "ppl per token"):
        table.add_column(title, justify="left" if title == "string" else "right")
    for number, each in enumerate(finalists, 1):
        arch, costs = each.derivation.architecture, each.derivation.costs
        ppl = "diverged" if each.ppl == math.inf else f"{each.ppl:.2f}"
        table.add_row(str(number), str(arch), "" if costs is None else f"{costs.share(arch):.3f}", ppl)
    Console().print(table)


def show_stability(stability: "Stability") -> None:
    """Print the votes for each block, the architecture of each seed, their distances and the consensus."""
    console = Console()
    space = list(dict.fromkeys(candidate for block in stability.blocks for candidate in block.votes))
    table = Table(box=None, header_style="bold")
    for title in ["block", *(f"votes({c})" for c in space), *(f"pi({c})" for c in space), "consensus", "majority"]:
        table.add_column(title, justify="left" if title in ("consensus", "majority") else "right")
    for number, block in enumerate(stability.blocks, 1):
        votes = [str(block.votes.get(candidate, "")) for candidate in space]
        means = [f"{block.mean_pi[candidate]:.3f}" if candidate in block.mean_pi else "" for candidate in space]
        table.add_row(str(number), *votes, *means, block.consensus, block.majority or "tied")
    console.print(table)
    figures = stability.to_dict()
    table = Table(box=None, header_style="bold")
    for title in ("seed", "string", "network", "hamming", "edit"):
        table.add_column(title, justify="left" if title in ("string", "network") else "right", overflow="fold")
    others = max(1, len(stability.seeds) - 1)
    for row, seed in enumerate(stability.seeds):
        names = [_write_layers(figures[key][row]) for key in ("strings", "networks")]
        table.add_row(str(seed), *names, *(f"{sum(figures[key][row]) / others:.2f}" for key in ("hamming", "edit")))
    console.print(table)
    print(
        f"mean pairwise distance: {figures['mean_hamming']:.2f} of {len(stability.blocks)} blocks differ, "
        f"{figures['mean_edit']:.2f} edits between the networks"
    )
    differing = [str(number) for number, block in enumerate(stability.blocks, 1) if not block.agrees]
    agreement = f"not the majority's in block {', '.join(differing)}" if differing else "the majority's in every block"
    print(f"consensus: {_write_layers(stability.consensus)}; {agreement}")


def _write_layers(layers: Sequence[str]) -> str:
    """Return the architecture string of layers; a dash for no layers."""
    return str(Architecture(layers)) if layers else "–"


def show_front(front: Sequence["EvaluatedNetwork"], interleaved: float) -> None:
    """Print the Pareto front, the cheapest first, with costs as shares of the interleaved network's."""
    table = Table(box=None, header_style="bold")
    for title in ("network", "ppl/token", "cost", "blocks", "trial", "source"):
        table.add_column(title, justify="left" if title in ("network", "source") else "right", overflow="fold")
    for each in front:
        cost = f"{each.cost / interleaved:.3f}", f"{each.cost:,.0f}" if each.cost >= 1000 else f"{each.cost:.4g}"
        table.add_row(each.network, f"{each.valid_ppl:.2f}", *cost, str(each.trial), each.source)
    Console().print(table)


def show_baselines(baselines: "Baselines") -> None:
    """Print the derived network and its baselines with their predicted costs."""
    table = Table(box=None, header_style="bold")
    for title in ("name", "string", "cost share"):
        table.add_column(title, justify="right" if title == "cost share" else "left", overflow="fold")
    for each in baselines.networks:
        table.add_row(each.name, str(each.architecture), f"{each.share:.3f}")
    _show_with_notes(table, baselines.metric, baselines.notes)


def show_baseline_results(comparison: "BaselineComparison") -> None:
    """Print the perplexity of each network, and whether the derived one is better."""
    table = Table(box=None, header_style="bold")
    for title in ("name", "string", "cost share", "valid ppl/token", "± sd", "n"):
        table.add_column(title, justify="left" if title in ("name", "string") else "right", overflow="fold")
    for each in comparison.networks:
        spread = "" if each.sd is None else f"{each.sd:.2f}"
        table.add_row(each.name, each.arch, f"{each.share:.3f}", f"{each.mean:.2f}", spread, str(len(each.ppl)))
    _show_with_notes(table, comparison.metric, comparison.notes)
    print("\n".join(each.text for each in comparison.verdicts()))


def _show_with_notes(table: Table, metric: str, notes: Sequence[str]) -> None:
    """Print a table of networks, the meaning of its costs, and notes."""
    console = Console()
    console.print(table)
    for note in (f"cost share: predicted {metric} of the blocks, as a share of the interleaved network's", *notes):
        console.print(f"* {note}", highlight=False)


def show_analysis(analysis: "Analysis") -> None:
    """Print the table of an analysis and its notes; long tables get a column per run."""
    from pandas.api.types import is_numeric_dtype as is_number

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
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    for title in frame:
        table.add_column(str(title), justify="right" if is_number(frame[title]) else "left", overflow="fold")
    for _, row in frame.iterrows():
        table.add_row(*(figure(value) for value in row))
    console.print(table)
    for note in analysis.notes:
        console.print(f"* {note}", highlight=False)


def figure(value: object) -> str:
    """Return a value as a cell: floats with four significant digits, NaN as an empty cell."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else escape(str(value))
    return "" if math.isnan(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show_profile(profile: "Profile") -> None:
    """Print the latency of each layer, and how well their sum predicts whole networks."""
    console = Console()
    console.print(profile_table(profile))
    shapes = ", ".join(f"{name} {value}" for name, value in profile.shapes.items())
    console.print(
        f"* for a whole batch on {profile.machine['device_name']}, {profile.precision}; {shapes}", highlight=False
    )
    console.print(f"* median and 10th to 90th percentile of {profile.rounds} rounds", highlight=False)
    if check := profile.check:
        console.print()
        console.print(check_table(check))
        errors = f"median {check.median_error:.1%}, largest {check.largest_error:.1%}"
        console.print(f"* absolute relative error of {len(check.networks)} networks: {errors}", highlight=False)


def profile_table(profile: "Profile") -> Table:
    """Return the milliseconds of each layer and of the fixed part, also in units of a feed-forward layer."""
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("layer", overflow="fold")
    modes = [mode for mode in (profile.inference, profile.training) if mode is not None]
    for title in ("inference ms", "p10–p90", "× f", "training ms", "p10–p90", "× f")[: 3 * len(modes)]:
        table.add_column(title, justify="right")
    for name in ["fixed", *profile.inference.layers]:
        cells = []
        for mode in modes:
            timing, unit = mode.fixed if name == "fixed" else mode.layers[name], mode.layers["f"].median_ms
            cells += [short(timing.median_ms), f"{short(timing.p10_ms)}–{short(timing.p90_ms)}"]
            cells.append(f"{timing.median_ms / unit:.2f}" if unit else "")
        table.add_row(name, *cells)
    return table


def short(milliseconds: float) -> str:
    """Return milliseconds with three decimals below ten milliseconds, else with one."""
    return f"{milliseconds:.3f}" if abs(milliseconds) < 10 else f"{milliseconds:.1f}"


def check_table(check: "Check") -> Table:
    """Return the table of predicted and measured inference latencies."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("string", overflow="fold")
    for title in ("predicted ms", "measured ms", "error"):
        table.add_column(title, justify="right")
    for network in check.networks:
        figures = f"{network.predicted_ms:.2f}", f"{network.measured_ms:.2f}", f"{network.error:+.1%}"
        table.add_row(network.arch, *figures)
    return table


def show_findings(findings: Sequence["doctor.Finding"]) -> None:
    """Print the findings by topic, each with its advice."""
    console, topic = Console(), None
    for finding in findings:
        if finding.topic != topic:
            topic = finding.topic
            console.print(topic, style="bold")
        console.print(
            f"  {finding.name:<20} {'–' if finding.value is None else finding.value}", highlight=False, markup=False
        )
        if finding.advice is not None:
            console.print(f"  {'':<20} {finding.advice}", style="yellow", highlight=False, markup=False)


def show_counts(header: "StreamHeader") -> None:
    """Print the counts of an encoded corpus."""
    table = Table(box=None, header_style="bold")
    for title in ("split", "tokens", "words", "line ends", "lines", "bytes", "unknown"):
        table.add_column(title, justify="left" if title == "split" else "right")
    for split, counts in header.splits.items():
        values = (counts.tokens, counts.words, counts.line_ends, counts.lines, counts.bytes, counts.unknown)
        table.add_row(split, *(f"{value:,}" for value in values))
    Console().print(table)
    lost = ", ".join({"case": "upper and lower case", "unknown": "unknown words"}[kind] for kind in header.loses)
    print(f"vocabulary {header.vocab_size:,}; the tokenizer loses {lost or 'nothing'}")


_DAY = 24  # hours


def show_plan(plan: Plan) -> None:
    """Print memory, work, time and price of each phase, and the notes."""
    console = Console()
    for phase in plan.phases:
        console.print(f"{phase.phase}: {phase.network}", style="bold", highlight=False)
        table = Table(box=None, show_header=False, padding=(0, 2, 0, 2))
        table.add_column()
        table.add_column(justify="right")
        for name, value in [*_memory_rows(phase, plan.machine), *_work_rows(phase, plan.machine)]:
            table.add_row(name, value, style="dim" if name.startswith(" ") else None)
        console.print(table)
        if phase.fits is not None:
            verdict = f"{'fits' if phase.fits else 'does not fit'} in {plan.machine.memory_gb:g} GB"
            console.print(f"  {verdict}", style="green" if phase.fits else "red", highlight=False)
        for line in phase.advice:
            console.print(f"  - {line}", highlight=False)
        console.print()
    for note in plan.notes:
        console.print(f"* {note}", highlight=False)


def _memory_rows(phase: PhasePlan, machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield the memory of one GPU by purpose; the parts of a step's peak are indented."""
    rows = "row" if phase.rows == 1 else "rows"
    yield (
        f"memory of {'each of ' if machine.gpus > 1 else ''}{machine.gpus} GPU{'s' * (machine.gpus > 1)}",
        (f"{phase.rows} {rows}"),
    )
    for name, size in phase.bytes.items():
        yield name, gigabytes(size)
    yield "  activations saved for backward", gigabytes(phase.kept_bytes)
    yield "  of these, in the softmax", gigabytes(phase.softmax_bytes)
    yield "  gradients of activations", gigabytes(phase.gradient_bytes)
    yield "total", gigabytes(sum(phase.bytes.values()))
    yield f"with CUDA and {MARGIN:.0%} margin", gigabytes(phase.needed_bytes)


def _work_rows(phase: PhasePlan, machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield parameters and work, and time and price if they are known."""
    yield "", ""  # an empty line after the memory
    yield "parameters", f"{phase.parameters:,}"
    yield "training FLOPs per token", f"{phase.flops_per_token / 1e6:,.1f} million"
    yield "tokens to train on", f"{phase.tokens:,}"
    if phase.tokens_per_s is None or phase.hours is None:
        return
    scaled = abs((phase.scaled_by or 1) - 1) > 0.005
    yield "tokens/s, scaled by FLOPs" if scaled else "tokens/s", f"{phase.tokens_per_s:,.0f}"
    yield "time", _describe_hours(phase.hours)
    if machine.gpus > 1:
        yield "GPU hours", f"{machine.gpus * phase.hours:,.1f}"
    if phase.price is not None:
        yield "price", f"{phase.price:,.2f}"


def _describe_hours(hours: float) -> str:
    """Return a duration in minutes, hours or days."""
    if hours < 1:
        return f"{hours * 60:.1f} minutes"
    return f"{hours:.1f} hours" if hours < 2 * _DAY else f"{hours / _DAY:,.1f} days"


def gigabytes(size: float) -> str:
    """Return a number of bytes in units of 10^9, or of 10^6 if it is small."""
    return f"{size / GB:,.2f} GB" if size >= GB / 10 else f"{size / 1e6:,.1f} MB"


_MOST_SHOWN = 5  # trials


def show_tuned(tuned: TuningResult) -> None:
    """Print the best trials beside the configured settings, the counts of trials, and the importance of settings."""
    table = Table(box=None, header_style="bold")
    for title in ("trial", "loss", "ppl/token", *(escape(key.rpartition(".")[2]) for key in tuned.space)):
        table.add_column(title, justify="right", overflow="fold")
    first = tuned.configured
    complete = sorted((each for each in tuned.trials if each.state == "complete"), key=lambda each: each.loss or 0.0)
    settings = [each.settings for each in complete]
    if first not in complete:
        configured_note = "" if first is None else f"; as configured: {first.state}"
        first = None
    else:
        configured_note = "; *: as configured"
    distinct = [each for place, each in enumerate(complete) if each.settings not in settings[:place]]
    for each in [*distinct[:_MOST_SHOWN], *([first] if first in distinct[_MOST_SHOWN:] else [])]:
        table.add_row(*_trial_cells(each, first))
    Console().print(table)
    counts = ", ".join(f"{count} {state}" for state, count in tuned.counts().items() if count)
    print(f"{len(tuned.trials)} trials: {counts}{configured_note}")
    if tuned.importance is not None:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in tuned.importance.items())
        print(f"importance among the best trials: {shares}")
    if tuned.best is None or tuned.best.loss is None:
        return
    gain = 0.0 if first is None or first.loss is None else first.loss - tuned.best.loss
    gained = f", {gain:.4f} less than as configured" if gain > 0 else ""
    print(f"best: trial {tuned.best.number}, validation loss {tuned.best.loss:.4f} nats per token{gained}")


def _trial_cells(each: TrialResult, configured: TrialResult | None) -> list[str]:
    """Return the cells of a trial: number, loss, perplexity and settings."""
    loss = each.loss or 0.0
    values = [f"{value:.4g}" if isinstance(value, float) else escape(str(value)) for value in each.settings.values()]
    return [f"{'*' * (each == configured)}{each.number}", f"{loss:.4f}", f"{math.exp(min(loss, 700)):.2f}", *values]


QUALITY = {
    "network": ("network", "{}"),
    "arch": ("string", "{}"),
    "evaluation": ("evaluation", "{}"),
    "bits_per_byte": ("bits/byte", "{:.4f}"),
    "ppl": ("ppl/token", "{:.2f}"),
    "word_ppl": ("ppl/word", "{:.2f}"),
    "parameters": ("parameters", "{:,.0f}"),
}
COST = {
    "without_embeddings": ("w/o embed.", "{:,.0f}"),
    "multiply_adds_per_token": ("MACs/tok", "{:,.0f}"),
    "latency_ms": ("ms/seg.", "{:.2f}"),
    "latency_p95_ms": ("p95", "{:.2f}"),
    "train_tokens_per_s": ("train tok/s", "{:,.0f}"),
    "train_seconds": ("train s", "{:,.0f}"),
    "tgt_len": ("tgt", "{:.0f}"),
    "mem_len": ("mem", "{:.0f}"),
    "cmem_len": ("cmem", "{:.0f}"),
}


def show_comparison(comparison: "Comparison") -> None:
    """Print a comparison as two tables that fit a terminal, perplexities and costs, and its notes."""
    console, table = Console(), comparison.table
    plain = table[table["evaluation"] == PLAIN]
    quality = {key: column for key, column in QUALITY.items() if key != "evaluation" or len(plain) < len(table)}
    console.print(comparison_table(table, quality))
    console.print(comparison_table(plain, COST))  # costs are of the plain evaluation
    first = table.iloc[0]
    divisors = ", ".join(f"{first[key]:,.0f} {key}" for key in ("tokens", "words", "bytes") if key in first)
    settings = [
        f"{row['run']}, {row['evaluation']}: {row['settings']}" for _, row in table.iterrows() if "settings" in row
    ]
    settings = [text for text in settings if not text.endswith(": ")]
    for note in [f"divided by {divisors}", *comparison.notes, *settings]:
        console.print(f"* {note}", highlight=False, markup=False)


def show_eval_tuning(tuning: "EvalTuning") -> None:
    """Print the chosen settings of each protocol beside the plain evaluation, and the notes."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    for title in ("evaluation", "ppl/token", "tried", "settings"):
        table.add_column(title, justify="right" if title in ("ppl/token", "tried") else "left", overflow="fold")
    for trial in (tuning.plain, *tuning.chosen.values()):
        tried = sum(each.protocol.name == trial.protocol.name for each in tuning.trials)
        table.add_row(trial.protocol.name, f"{trial.total.perplexity:.2f}", str(tried or ""), trial.protocol.settings)
    console = Console()
    console.print(table)
    text = f"on the first {tuning.measured['tokens']:,} tokens of the validation split"
    for note in (text, *tuning.notes):
        console.print(f"* {note}", highlight=False, markup=False)


def comparison_table(frame: "pd.DataFrame", columns: Mapping[str, tuple[str, str]]) -> Table:
    """Return the table of the given columns (title and format by key), one row per run; a dash for missing figures."""
    import pandas as pd

    shown = {key: column for key, column in columns.items() if key in frame}
    table = Table(box=None, header_style="bold", padding=(0, 1, 0, 0))
    table.add_column("run", overflow="fold")
    for title, form in shown.values():
        table.add_column(title, justify="left" if form == "{}" else "right", overflow="fold")
    for _, row in frame.iterrows():
        cells = ("–" if pd.isna(row[key]) else form.format(row[key]) for key, (_, form) in shown.items())
        table.add_row(escape(str(row["run"])), *cells)
    return table
