"""What commands show of their results on the terminal: tables."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.columns import Columns
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from parnas.architecture import Architecture, describe_layer
from parnas.reporters import pi_bar
from parnas.training.reporter import describe_metrics

if TYPE_CHECKING:
    from parnas import doctor
    from parnas.data.streams import StreamHeader
    from parnas.evaluation.analyses import Analysis
    from parnas.nas.baselines import Baselines
    from parnas.nas.contest import Contest
    from parnas.nas.derive import Derivation, Ranked
    from parnas.nas.finalists import Finalist
    from parnas.nas.profile import Check, Profile
    from parnas.nas.stability import Stability
    from parnas.nas.trials import Finding
    from parnas.watch import State


def show_state(name: str, state: "State") -> None:
    """How far a run is, its last metrics, and pi of every block."""
    print(f"{name}: {state.kind}, step {state.step:,} of {state.steps:,}{', finished' * state.finished}")
    for record in state.latest().values():
        print(f"step {record['step']:,}: {describe_metrics(record)}")
    if state.pi:
        bars = [pi_bar(number, state.space, row) for number, row in enumerate(state.pi[-1]["pi"], 1)]
        Console().print(Columns(bars, padding=(0, 3)))


def show_derivation(derivation: "Derivation") -> None:
    """The string, its cost, the counts, pi, entropy and margin of each block, and what came next."""
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
        console.print(ranking_table(derivation.ranking))
    for warning in derivation.warnings:
        console.print(f"warning: {warning}", style="yellow", highlight=False)
    counted = derivation.architecture.counts().items()
    counts = ", ".join(f"{count} {describe_layer(name)}" for name, count in counted if count or name in space)
    print(f"architecture: {derivation.architecture} ({derivation.method})")
    if derivation.costs is not None:
        share, costs = derivation.costs.share(derivation.architecture), derivation.costs
        print(f"cost of the blocks: {share:.3f} of the interleaved network's {costs.metric}, as predicted")
    print(f"{counts}; {derivation.parameters:,} parameters")


def ranking_table(ranking: Sequence["Ranked"]) -> Table:
    """The networks that came next: string, probability, distance to the most probable, cost, and the second look."""
    table = Table(box=None, header_style="bold")
    for title in ("rank", "string", "probability", "nats behind", "cost", "inherited loss", "estimate"):
        table.add_column(title, justify="left" if title == "string" else "right")
    for number, each in enumerate(ranking, 1):
        cost = "" if each.cost is None else f"{each.cost:.3f}"
        losses = ("" if value is None else f"{value:.4f}" for value in (each.loss, each.estimate))
        odds = f"{each.probability:.2e}", f"{each.behind:.3f}"
        table.add_row(str(number), str(each.architecture), *odds, cost, *losses)
    return table


def show_finalists(finalists: Sequence["Finalist"]) -> None:
    """The strings that were trained for a while, the best first."""
    table = Table(box=None, header_style="bold")
    for title in ("finalist", "string", "cost", "ppl per token"):
        table.add_column(title, justify="left" if title == "string" else "right")
    for number, each in enumerate(finalists, 1):
        arch, costs = each.derivation.architecture, each.derivation.costs
        reached = "diverged" if each.ppl == math.inf else f"{each.ppl:.2f}"
        table.add_row(str(number), str(arch), "" if costs is None else f"{costs.share(arch):.3f}", reached)
    Console().print(table)


def show_stability(stability: "Stability") -> None:
    """The votes for each block, the string of each seed, their distances and the consensus."""
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
        names = [write_layers(figures[key][row]) for key in ("strings", "networks")]
        table.add_row(str(seed), *names, *(f"{sum(figures[key][row]) / others:.2f}" for key in ("hamming", "edit")))
    console.print(table)
    print(
        f"mean pairwise distance: {figures['mean_hamming']:.2f} of {len(stability.blocks)} blocks differ, "
        f"{figures['mean_edit']:.2f} edits between the networks"
    )
    differing = [str(number) for number, block in enumerate(stability.blocks, 1) if not block.agrees]
    agreement = f"not the majority's in block {', '.join(differing)}" if differing else "the majority's in every block"
    print(f"consensus: {write_layers(stability.consensus)}; {agreement}")


def write_layers(layers: Sequence[str]) -> str:
    """The string of layers; a dash where there is none."""
    return str(Architecture(layers)) if layers else "–"


def show_front(front: Sequence["Finding"], interleaved: float) -> None:
    """The Pareto front, the cheapest first, with costs as shares of the interleaved network's."""
    table = Table(box=None, header_style="bold")
    for title in ("network", "ppl/token", "cost", "blocks", "trial", "source"):
        table.add_column(title, justify="left" if title in ("network", "source") else "right", overflow="fold")
    for each in front:
        cost = f"{each.cost / interleaved:.3f}", f"{each.cost:,.0f}" if each.cost >= 1000 else f"{each.cost:.4g}"
        table.add_row(each.network, f"{each.valid_ppl:.2f}", *cost, str(each.trial), each.source)
    Console().print(table)


def show_baselines(found: "Baselines") -> None:
    """The strings of the derived network and of those it is compared with, with their predicted costs."""
    table = Table(box=None, header_style="bold")
    for title in ("name", "string", "cost share"):
        table.add_column(title, justify="right" if title == "cost share" else "left", overflow="fold")
    for each in found.networks:
        table.add_row(each.name, str(each.architecture), f"{each.share:.3f}")
    show_with_notes(table, found.metric, found.notes)


def show_contest(contest: "Contest") -> None:
    """What each network reached, and whether the derived one is better."""
    table = Table(box=None, header_style="bold")
    for title in ("name", "string", "cost share", "valid ppl/token", "± sd", "n"):
        table.add_column(title, justify="left" if title in ("name", "string") else "right", overflow="fold")
    for each in contest.standings:
        spread = "" if each.sd is None else f"{each.sd:.2f}"
        table.add_row(each.name, each.arch, f"{each.share:.3f}", f"{each.mean:.2f}", spread, str(len(each.ppl)))
    show_with_notes(table, contest.metric, contest.notes)
    print("\n".join(each.text for each in contest.answers()))


def show_with_notes(table: Table, metric: str, notes: Sequence[str]) -> None:
    """A table of networks, what its costs are, and notes."""
    console = Console()
    console.print(table)
    for note in (f"cost share: predicted {metric} of the blocks, of the interleaved network's", *notes):
        console.print(f"* {note}", highlight=False)


def show_analysis(analysis: "Analysis") -> None:
    """The table of an analysis, with a column for each run where it is long, and its notes."""
    from pandas.api.types import is_numeric_dtype as is_number

    frame, console = analysis.table, Console()
    console.print(f"\n{analysis.title}", style="bold")
    if analysis.name == "attention":
        frame = frame.pivot_table("weight", ["run", "block", "layer"], "part", "sum", sort=False).reset_index()
    elif analysis.name == "frequency":
        wide = frame.pivot(index="occurrences", columns="run", values="ppl")
        words = frame.drop_duplicates("occurrences").set_index("occurrences")["words"]
        frame = wide.reindex(index=words.index, columns=frame["run"].unique())
        frame.insert(0, "words", words)  # of the first run; others differ where their tokenizers do
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
    """A cell: numbers with four digits that count, whole ones whole, nothing where there is none."""
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else escape(str(value))
    return "" if math.isnan(value) else f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def show_profile(profile: "Profile") -> None:
    """What each layer costs, and how well that predicts whole networks."""
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
    """Milliseconds of the fixed part and of each layer in both modes, and how many feed-forward layers that is."""
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
    """To the microsecond where it is less than ten milliseconds, else to the tenth."""
    return f"{milliseconds:.3f}" if abs(milliseconds) < 10 else f"{milliseconds:.1f}"


def check_table(check: "Check") -> Table:
    """Predicted and measured milliseconds of inference of each network."""
    table = Table(box=None, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column("string", overflow="fold")
    for title in ("predicted ms", "measured ms", "error"):
        table.add_column(title, justify="right")
    for network in check.networks:
        figures = f"{network.predicted_ms:.2f}", f"{network.measured_ms:.2f}", f"{network.error:+.1%}"
        table.add_row(network.arch, *figures)
    return table


def show_findings(findings: Sequence["doctor.Finding"]) -> None:
    """What was found under each heading, and below it what wants attention."""
    console, topic = Console(), None
    for found in findings:
        if found.topic != topic:
            topic = found.topic
            console.print(topic, style="bold")
        console.print(
            f"  {found.name:<20} {'–' if found.value is None else found.value}", highlight=False, markup=False
        )
        if found.advice is not None:
            console.print(f"  {'':<20} {found.advice}", style="yellow", highlight=False, markup=False)


def show_counts(header: "StreamHeader") -> None:
    """The counts of a corpus after encoding."""
    table = Table(box=None, header_style="bold")
    for title in ("split", "tokens", "words", "line ends", "lines", "bytes", "unknown"):
        table.add_column(title, justify="left" if title == "split" else "right")
    for split, counts in header.splits.items():
        values = (counts.tokens, counts.words, counts.line_ends, counts.lines, counts.bytes, counts.unknown)
        table.add_row(split, *(f"{value:,}" for value in values))
    Console().print(table)
    lost = ", ".join({"case": "upper and lower case", "unknown": "unknown words"}[kind] for kind in header.loses)
    print(f"vocabulary {header.vocab_size:,}; the tokenizer loses {lost or 'nothing'}")
