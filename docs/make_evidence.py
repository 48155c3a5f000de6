"""Write docs/evidence.md, and its part of the README, from the results of the benchmarks: `docs/make_evidence.py`."""

import re
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from make_performance import RESULTS, render_part

from parnas.files import read_json, write_text
from parnas.sections import SearchConfig

PAGE = Path(__file__).with_name("evidence.md")
README = PAGE.parent.parent / "README.md"
BEGIN, END = "<!-- evidence: begin -->", "<!-- evidence: end -->"
DEFAULT = SearchConfig().estimator
SCORES = ("estimate", "pi", "inherited")
CEILING_SHARE = 0.9  # of the table's own reliability, that a search's ranking is to reach
INTRODUCTION = """# Is the search worth it?

Made by `python docs/make_evidence.py` from `benchmarks/results/`: no figure here was typed. How the search works stands
in [search.md](search.md). Perplexities are per token, on the validation split where nothing else is said: that split is
what choices were made on, and the test split was read once by each network at its end.

{verdicts}
"""
NOTES = {
    "comparison": "![perplexity against latency, with the Pareto front](images/comparison.png)\n\n"
    "`benchmarks/comparison.yaml` was settled before its first search. Every network has the same steps and recipe, "
    "but the longer one.",
    "search_quality": "The truth is `benchmarks/results/ground_truth.csv`: every network of a small space, trained "
    "from scratch from several seeds by `benchmarks/ground_truth.py`.",
    "collapse": "Each countermeasure by itself, against a search with none.",
}


def read_results() -> dict[str, dict[str, Any]]:
    """The results that there are."""
    return {name: read_json(path) for name in NOTES if (path := RESULTS / f"{name}-cpu.json").is_file()}


def render_readme() -> str:
    """The README with its block between the markers made anew."""
    results = read_results()
    told = list(judge_comparison(results["comparison"])) if "comparison" in results else []
    if "search_quality" in results:
        told += judge_ranking(results["search_quality"], {f"{DEFAULT}: estimate"})
    block = "\n".join([BEGIN, *(f"* {line}" for line in told or ["Nothing has been measured yet."]), END])
    return re.sub(f"{BEGIN}.*{END}", lambda _: block, README.read_text(encoding="utf-8"), flags=re.DOTALL)


def render() -> str:
    """The whole page."""
    results = read_results()
    profile = RESULTS / "comparison_profile.json"
    told = [*(judge_profile(read_json(profile)) if profile.is_file() else []), *verdicts(results)]
    parts = [
        INTRODUCTION.format(verdicts="\n".join(f"* {line}" for line in told or ["Nothing has been measured yet."]))
    ]
    for name, result in results.items():
        answers = "".join(f"* {text}\n" for text in result.get("answers", []))
        parts.append(
            "\n\n".join(filter(None, [render_part(name, result).rstrip(), NOTES[name], answers.rstrip()])) + "\n"
        )
    return "\n".join(parts)


def verdicts(results: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """What was to be shown, and what was found."""
    if "comparison" in results:
        yield from judge_comparison(results["comparison"])
    if "search_quality" in results:
        yield from judge_ranking(results["search_quality"], {f"{DEFAULT}: {score}" for score in SCORES})
        yield from judge_derived(results["search_quality"])


def judge_profile(profile: dict[str, Any]) -> Iterator[str]:
    """How well layers add up to networks."""
    layers, check = profile["inference"]["layers"], profile["check"]
    ratio = layers["s"]["median_ms"] / layers["f"]["median_ms"]
    yield (
        f"Latency adds up: the sum over layers errs by {check['median_error']:.1%} in the median of "
        f"{len(check['networks'])} random networks of {profile['depth']} blocks (aim: 10 % at most), "
        f"{check['largest_error']:.1%} at most. One layer of attention costs {ratio:.1f} feed-forward layers there."
    )


def judge_comparison(result: dict[str, Any]) -> Iterator[str]:
    """The derived network's latency and perplexity."""
    row = {row["network"]: row for row in result["networks"]}
    derived, interleaved = row["derived"], row["interleaved"]
    whole = derived["whole network, ms"] / interleaved["whole network, ms"]
    yield (
        f"The blocks of the derived `{derived['string']}` take {derived['stack, share of interleaved']:.3f} of the "
        f"interleaved network's latency (aim: 0.65 at most), the whole network {whole:.3f}."
    )
    yield from result["answers"]


def judge_ranking(result: dict[str, Any], scores: Collection[str]) -> Iterator[str]:
    """Kendall's tau of the default estimator beside the ceiling and beside counts."""
    ranks = {(row["ranked by"], row["target"]): row for row in result["ranks"]}
    yield f"Reliability of the table, Kendall's tau between seeds: {result['ceiling']['all']:.2f} (0.8 at least)."
    for (by, target), row in ranks.items():
        if by in scores:
            aim = CEILING_SHARE * result["ceiling"]["all"]
            yield (
                f"Ranking of all networks by {by}, target {target}: tau {row['tau, all']:.2f}, and "
                f"{row['tau, one training']:.2f} with one training of each (aim: {aim:.2f}), "
                f"{row['tau, with attention']:.2f} among those with attention, {row['tau, equal latency']:.2f} among "
                f"those of equal latency; by parameters {_taus(ranks['parameters', ''])}, by multiply-adds "
                f"{_taus(ranks['multiply-adds', ''])}."
            )


def _taus(row: Mapping[str, Any]) -> str:
    return " / ".join(f"{row[key]:.2f}" for key in ("tau, all", "tau, with attention", "tau, equal latency"))


def judge_derived(result: dict[str, Any]) -> Iterator[str]:
    """What the default estimator derived beside the best network of its cost."""
    for row in result["derived"]:
        if row["estimator"] == DEFAULT and row["target"] != "none":
            yield (
                f"Derived within {row['target']} by {row['by']}: {row['behind the best']} behind the best network of "
                f"equal or lower cost, at least as good as {row['at least as good as']} (medians). Seeds of a network "
                f"deviate by {row['seed deviation']}, those of the best by {row['of the best']}."
            )


if __name__ == "__main__":
    write_text(PAGE, render())
    write_text(README, render_readme())
