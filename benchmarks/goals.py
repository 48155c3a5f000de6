"""Write benchmarks/results/goals.json, each goal with its result, from the result files: `python benchmarks/goals.py`.

A goal is a record of `area`, `goal`, `value`, `reached` and the `command` that measures it. Goals whose result file is
missing are left out.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import harness

from parnas.runs.files import read_json, write_json

NAME = "goals.json"
LATENCY = {"k": (0.20, 0.25), "s:window=64": (0.45, 0.5), "r": (0.45, 0.6)}
"""Largest latency relative to attention: inference, training step."""
SWIGLU = 1.1  # largest latency of g relative to f
GROWTH = 1.1  # largest ratio of latencies at the longest and the shortest memory, for layers that should not grow
BETTER = -5.0  # per cent: perplexity of a derived network relative to the interleaved network
TARGETS = ("0.45", "0.65")
SIGNIFICANT = 0.01
RELIABLE = 0.85  # share of the reliability of the reference table
SHAKESPEARE_BITS, SHAKESPEARE_SECONDS = 2.05, 240


class Goal(NamedTuple):
    """A goal and what was measured."""

    area: str
    goal: str
    value: str
    reached: bool
    command: str


def judge_mixers(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of latency and of memory in generation."""
    area, command = "cost of layers", "python benchmarks/mixers.py"
    shortest = min(row["memory"] for row in result["latency"])
    longest = max(row["memory"] for row in result["latency"])
    of = {(row["precision"], row["memory"], row["mode"]): row for row in result["latency"]}
    for number, mode in enumerate(("inference", "training step")):
        for precision in ("bf16", "fp32"):
            row = of[precision, shortest, mode]
            for layer, limits in LATENCY.items():
                goal = f"{mode} of {layer} in {precision}: at most {limits[number]} of s"
                yield Goal(area, goal, f"{row[layer]:.2f}", row[layer] <= limits[number], command)
            ratio = row["g"] / row["f"]
            goal = f"{mode} of g in {precision}: at most {SWIGLU} of f"
            yield Goal(area, goal, f"{ratio:.2f}", ratio <= SWIGLU, command)
    first, last = (of["bf16", memory, "inference"] for memory in (shortest, longest))
    for layer in LATENCY:
        growth = last[layer] * last["s, ms"] / (first[layer] * first["s, ms"])
        goal = f"latency of {layer} at mem_len {longest:,} is that at {shortest}"
        yield Goal(area, goal, f"{growth:.2f} times", growth <= GROWTH, command)
    kept = {row["layer"]: list(row.values())[1:] for row in result["generation_bytes"]}
    for layer in LATENCY:
        goal = f"bytes of {layer} in generation do not grow to 16,384 tokens"
        yield Goal(area, goal, f"{kept[layer][0]:,} to {kept[layer][-1]:,}", len(set(kept[layer])) == 1, command)


def judge_search(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of derived networks against the interleaved network."""
    longest = max(record["steps"] for record in result["variants"])
    of = {record["variant"]: record for record in result["variants"] if record["steps"] == longest}
    for target in TARGETS:
        if found := of.get(f"derived within {target}"):
            value = (
                f"{found['percent']:+.1f} %, p = {found['p']:.1g}, {found['seeds']} seeds, share {found['latency']:.2f}"
            )
            reached = found["percent"] <= BETTER and found["p"] < SIGNIFICANT and found["latency"] <= float(target)
            goal = f"derived within {target}: perplexity 5 % below the interleaved network's, p < {SIGNIFICANT}"
            yield Goal("search in the space hybrid", goal, value, reached, "python benchmarks/variants.py hybrid")


def judge_ranking(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of the default estimator's ranking."""
    area = "ranking in the space hybrid"
    command = "python benchmarks/search_quality.py --config benchmarks/hybrid_truth.yaml"
    ranks = {row["ranked by"]: row for row in result["ranks"] if row["target"] in ("", "none")}
    ours = ranks["uniform: estimate"]
    for title, column, ceiling in (
        ("all networks", "tau, one training", result["ceiling"]["all"]),
        ("networks of equal latency", "tau, equal latency", result["ceiling"]["equal latency"]),
    ):
        tau = ours[column]
        goal = f"Kendall's tau among {title}: at least {RELIABLE} of the reliability {ceiling:.2f}"
        yield Goal(area, goal, f"{tau:.2f}", tau >= RELIABLE * ceiling, command)
    most = max(ranks[name]["tau, all"] for name in ("parameters", "multiply-adds", "latency"))
    goal = f"Kendall's tau above that of every count, {most:.2f}"
    yield Goal(area, goal, f"{ours['tau, all']:.2f}", ours["tau, all"] > most, command)


JUDGES: dict[str, Callable[[dict[str, Any]], Iterator[Goal]]] = {
    "mixers-cpu": judge_mixers,
    "hybrid-cpu": judge_search,
    "search_quality_hybrid_truth-cpu": judge_ranking,
}
"""By the name of the result file."""


def judge_all(folder: Path) -> list[Goal]:
    """Return all goals whose results are in a folder."""
    found = [(judge, folder / f"{name}.json") for name, judge in JUDGES.items()]
    return [goal for judge, path in found if path.is_file() for goal in judge(read_json(path))]


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parsed = harness.make_parser(__doc__, []).parse_args(arguments)
    folder = harness.results_folder(parsed)
    goals = judge_all(folder)
    harness.print_table("Goals", [goal._asdict() for goal in goals])
    write_json(folder / NAME, [goal._asdict() for goal in goals])


if __name__ == "__main__":
    harness.run(main)
