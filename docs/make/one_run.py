"""Write docs/one-run.md from the results of the benchmarks: `python docs/make/one_run.py`."""

from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from statistics import stdev
from typing import Any

from hybrids import describe_difference, render_tables
from performance import RESULTS, render_goals

from parnas.figures.colours import RUN_COLOURS
from parnas.figures.pareto import ParetoPoint, draw_pareto
from parnas.figures.style import INK, MARKERS, SMALL_SIZE, new_figure, save_png, styled, tidy
from parnas.runs.files import read_json, write_text

PAGE = Path(__file__).resolve().parents[1] / "one-run.md"
PICTURE = PAGE.with_name("images") / "one-run.png"
DRAWN = f"![perplexity against latency of the one run, the networks of the front and hand-designed networks](images/{PICTURE.name})"
INHERITANCE, DIFFERENCE = PICTURE.with_name("inheritance.png"), "difference of perplexity from inherited weights"
AREA = "search within the training"
ONE_RUN, INTERLEAVED, SINGLE_MIXER = "one run", ("interleaved, 12 blocks", "interleaved, 5 blocks"), "recurrences alone"
"""Names of trainings: of the one run, and of networks that the page names beside the best one."""
SHALLOW, MOST_CHEAP = "interleaved, 4 blocks", 0.4  # what the cheapest networks of a front are compared with
INTRODUCTION = """# A search within the training

A search that is followed by a training from scratch costs time that the training could use. With

    parnas pipeline CONFIG --one-run

the search is the first part of the training: the derived network starts from its weights in the SuperNet
([inherited weights](how-it-works.md#inherited-weights)). With

    parnas pipeline CONFIG --front 0.3,0.5,0.8

one search serves several networks: the largest is trained in this way, and each cheaper one is made by removing layers
from the one before, and trained further. This page compares both with the same networks, and with hand-designed ones, trained from scratch for the
same time, and shows how well a search of few steps ranks networks and what a step costs.
"""
GOALS = """
## Goals

The goals were set before the measurements.

{goals}
"""
SECTIONS = {
    "equal_time": (
        "Trainings of equal predicted time",
        "Each training has as many steps as fit into {minutes} minutes of an idle core by a profile of one machine, search and re-ranking included. *Seconds* is "
        "the median of the measured times, of trainings from three or more seeds; two trainings ran at once, at times beside "
        "other programs, so that seconds of different rows are not comparable. The search has 15 % of the time, about 9 % of the steps; the default of `parnas pipeline --one-run` is 20 % of the steps. The largest network of a front is a one run within the highest target; each "
        "cheaper one is made by removing layers from the one before, and trained for a quarter of the time; its minutes, seconds and steps include those of the larger networks. *Latency share* is the latency of the blocks relative to that of the "
        "interleaved 12 blocks, by the profile that the searches used (inference on {profiled_on}); *measured* is the same on {measured_on}. "
        "*Steps* are those of the search and of the training, perplexity is per piece on the validation split of WikiText-2, "
        "differences are paired by seed. Measured by `python benchmarks/equal_time.py`",
    ),
    "one_run": (
        "Variants of the search",
        "Variants of the one-run training, each within {minutes} minutes of predicted time on an idle core, search and re-ranking "
        "included: *share* is that of the time for the search, by default 0.2. *One run relative to it* is the perplexity "
        "of the one run with the defaults relative to that of the row: positive where the row is better. *Successive halving*: the network is "
        "selected among four by short trainings from their weights in the SuperNet; *sandwich sampling* (arXiv 1903.05134) trains the largest, the smallest and "
        "two random paths in each step, *in-place distillation* (arXiv 2003.11142) all but the largest by its predictions. Measured by `python benchmarks/equal_time.py --plan one_run`",
    ),
    "short_search": (
        "How well a short search ranks networks",
        "Searches of {steps} steps, as in a one-run training, on the table of 150 trained networks of at most 6 blocks "
        "([how well the search ranks networks](hybrids.md#how-well-the-search-ranks-networks)). *Blocks share estimates*: "
        "`search.block_ridge` is 100, as in a one-run training; this matters for pi, from which the evolutionary search starts, and less for the "
        "estimate after re-ranking. *pi*, *inherited* and *estimate* are the log probability "
        "of a network, its loss with the shared weights, and both together ([re-ranking](how-it-works.md#from-pi-to-an-architecture)). *Behind the best*: the perplexity of the network of the best score "
        "within {target} of the interleaved network's latency, relative to the best one within it; *with attention*: the "
        "same for the choice among networks with at least one attention layer (`search.least_attention`). The second table compares, at equal numbers of evaluations, the most "
        "probable networks with attention with a local search: half of the evaluations are of the most probable networks, the others "
        "of networks that resemble the best one so far. Local "
        "search is not better here. The last table shows why a short search underrates attention: with the shared weights, an "
        "attention layer lowers the loss only after a longer search. Measured by `python benchmarks/short_search.py`",
    ),
    "inheritance": (
        "The value of inherited weights",
        "A hand-designed network, trained from its weights in the SuperNet of a search, and from scratch. *The steps after "
        "the search*: the training from scratch is as long as that from inherited weights, and the search is not counted. *The steps in all*: the training from scratch has the steps of the search as well. A negative difference "
        "means that inherited weights are better. Measured by `python benchmarks/inheritance.py`",
    ),
    "search_overhead": (
        "A step of the search",
        "Training steps of networks sampled from the space `hybrid`, and of the SuperNet that holds them. "
        "Measured by `python benchmarks/search_overhead.py`",
    ),
}
"""By result: title of the section and note."""
SEVERAL = ("equal_time", "one_run", "inheritance")
SEVERAL_MACHINES = "several machines with 2 cores (AMD EPYC, Intel Xeon); each training takes the steps of the plan"
"""Results whose trainings were spread over several days, and where they ran."""


def render() -> str:
    """Return the page."""
    results = {name: read_json(path) for name in SECTIONS if (path := RESULTS / f"{name}-cpu.json").is_file()}
    parts = [INTRODUCTION]
    if any(goal["area"] == AREA for goal in read_json(RESULTS / "goals.json")):
        parts.append(GOALS.format(goals=render_goals(AREA)))
    for name, result in results.items():
        title, note = SECTIONS[name]
        note = note.format_map(defaultdict(str, result))
        machine = result["machine"]
        device = SEVERAL_MACHINES if name in SEVERAL else f"{machine['cores']} cores of {machine['device_name']}"
        described = DESCRIPTIONS[name](result) if name in DESCRIPTIONS else ""
        parts.append(f"## {title}\n\n{note}, on {device}.\n\n{described}{render_tables(name, result)}\n")
    parts.append("`python docs/make/one_run.py` writes this page from `benchmarks/results/`.\n")
    return "\n".join(parts)


def describe_equal_time(result: Mapping[str, Any]) -> str:
    """Return what the table of trainings of equal time says, in sentences, and the picture."""
    of = {record["name"]: record for record in result["networks"]}
    ours = of[ONE_RUN]
    best = ranked_by_hand(result)[0]
    lines = [f"One run ends with a perplexity of {ours['ppl']:.1f}, the mean of {ours['seeds']} seeds."]
    if "to_scratch" in ours:
        lines.append(
            f"Relative to the same networks trained from scratch for the whole time, the one run is {describe_difference(ours['to_scratch'])}: "
            "the price of the search."
        )
    others = [of[name] for name in (*INTERLEAVED, SINGLE_MIXER) if name in of and of[name] is not best]
    lines += [
        f"Relative to *{record['name']}* (`{record['archs'][0]}`) the one run is {describe_difference(record)}"
        + ("." if record is not best else ": the best of the hand-designed networks, chosen after all were trained.")
        for record in [*others, best]
    ]
    fronts = [record for name, record in of.items() if name.startswith("front ") and "to_scratch" in record]
    if fronts:
        gaps = ", ".join(
            f"{record['to_scratch']['percent']:+.1f} % ({record['name'].split()[1]})" for record in reversed(fronts)
        )
        seeds = min(record["to_scratch"]["pairs"] for record in fronts)
        shallow, own = of[SHALLOW], [of[f"{record['name']}: its network, from scratch"] for record in fronts]
        cheap = [record for record in reversed(own) if record["latency"] <= MOST_CHEAP]
        better = ", ".join(
            f"{100 * (record['ppl'] / shallow['ppl'] - 1):+.1f} % (`{record['archs'][0]}`)" for record in cheap
        )
        choice = f"From scratch, the cheapest of these networks are {better} relative to *{SHALLOW}*. On the front they are behind these trainings, although they had at least as many steps in all; the reason is not known."
        lines.append(
            f"The networks of a front, relative to the same networks from scratch for the whole time ({seeds} seed{'s' * (seeds > 1)}): {gaps}."
        )
        if cheap:
            lines.append(choice)
    return "\n".join(f"* {line}" for line in lines) + f"\n\n{DRAWN}\n\n"


def describe_inheritance(result: Mapping[str, Any]) -> str:
    """Return what the table of inherited weights says, in sentences, and the picture."""
    first, last = result["budgets"][0], result["budgets"][-1]
    lines = []
    for key, others in (
        ("equal_training", "Relative to a training from scratch of the same length, without the search,"),
        ("equal_total", "Relative to a training from scratch that also has the steps of the search,"),
    ):
        if key in first and key in last:
            gains = ", ".join(
                f"{record[key]['percent']:+.1f} % after {record['steps']:,} steps" for record in result["budgets"]
            )
            lines.append(f"* {others} the perplexity from inherited weights differs by {gains}.")
    return "\n".join(lines) + f"\n\n![{DIFFERENCE} over the steps after the search](images/{INHERITANCE.name})\n\n"


DESCRIPTIONS = {"equal_time": describe_equal_time, "inheritance": describe_inheritance}


def ranked_by_hand(result: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the records of hand-designed networks that have as many seeds as the one run, best first."""
    of: dict[str, Mapping[str, Any]] = {record["name"]: record for record in result["networks"]}
    known = [of[name] for name in result["by_hand"] if name in of and of[name]["seeds"] >= of[ONE_RUN]["seeds"]]
    return sorted(known, key=lambda record: float(record["ppl"]))


def deviation(record: Mapping[str, Any]) -> float | None:
    """Return the standard deviation of the perplexity over the seeds; `None` for one seed."""
    values = list(record["ppl_by_seed"].values())
    return stdev(values) if len(values) > 1 else None


def draw(result: Mapping[str, Any], path: Path = PICTURE) -> None:
    """Draw perplexity against latency of the one run, the front and the hand-designed networks."""
    records = {record["name"]: record for record in result["networks"]}
    points = [
        ParetoPoint(
            record["archs"][0] if name in result["by_hand"] else name,  # short enough for a label
            record["latency"],
            record["ppl"],
            deviation(record),
        )
        for name, record in records.items()
        if name in result["by_hand"] or record["search_steps"]
    ]
    draw_pareto(points, path, "latency of the blocks by the profile of the searches, interleaved = 1")


@styled
def draw_inheritance(result: Mapping[str, Any], path: Path = INHERITANCE) -> None:
    """Draw the difference that inherited weights make over the steps after the search, with 95 % intervals."""
    figure = new_figure(5.4, 3.2)
    axes = tidy(figure.add_subplot())
    for key, label, colour, marker in (
        ("equal_total", "from scratch for all steps, those of the search included", RUN_COLOURS[0], MARKERS[0]),
        ("equal_training", "from scratch for the steps after the search", RUN_COLOURS[1], MARKERS[1]),
    ):
        records = [record for record in result["budgets"] if key in record]
        found = [record[key] for record in records]
        bars = [[each["percent"] - each["low"] for each in found], [each["high"] - each["percent"] for each in found]]
        steps, percent = [record["steps"] for record in records], [each["percent"] for each in found]
        axes.errorbar(steps, percent, bars, color=colour, marker=marker, capsize=3, label=label)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.set_xscale("log")
    steps = [record["steps"] for record in result["budgets"]]
    axes.set_xticks(steps, [f"{number:,}" for number in steps])
    axes.minorticks_off()
    axes.set_xlabel("steps after the search")
    axes.set_ylabel("difference of perplexity, %")
    axes.legend(title="relative to a training", title_fontsize=SMALL_SIZE)
    save_png(figure, path)


if __name__ == "__main__":
    if (EQUAL_TIME := RESULTS / "equal_time-cpu.json").is_file():
        draw(read_json(EQUAL_TIME))
    if (BUDGETS := RESULTS / "inheritance-cpu.json").is_file():
        draw_inheritance(read_json(BUDGETS))
    write_text(PAGE, render())
