"""Write docs/evidence.md, and its part of the README, from the results of the benchmarks: `docs/make_evidence.py`."""

import re
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

from make_performance import RESULTS, mark, render_part

from parnas.files import read_json, write_text
from parnas.sections import SearchConfig

PAGE = Path(__file__).with_name("evidence.md")
README = PAGE.parent.parent / "README.md"
DEFAULT = SearchConfig().estimator
CEILING_SHARE = 0.9  # of the table's own reliability, that a search's ranking is to reach
MOST_LATENCY = 0.65  # of the interleaved network's blocks
EVEN_SHARE = 1 / 3  # of identity among three candidates
LEAST_CHANGE = 0.05  # of the share of identity, that counts
SUBSETS = {
    "tau, all": "all networks",
    "tau, with attention": "those with attention",
    "tau, attention alone": "those of attention alone",
    "tau, equal latency": "those of equal latency",
}
INTRODUCTION = """# Is the search worth it?

Made by `python docs/make_evidence.py` from `benchmarks/results/`: no figure here was typed. How the search works stands
in [search.md](search.md). Perplexities are per token, on the validation split where nothing else is said: that split is
what choices were made on, and the test split was read once by each network at its end.

{verdicts}

## What these figures do not say

* The settings of `uniform` were chosen by how well searches agreed with parts of the table of networks: identity half
  as often as other layers in even paths, lessons by pairs of paths on few rows, the weight of the entropy, the sum of
  two estimates. Its figures are those of the space that it was tuned on. Seeds were fixed beforehand, and the
  comparison of 12 blocks played no part: nothing that its search finds was changed once its trainings had begun.
* The searches of the table and of the comparison have `fair_share: 1`: what matters there is the string, and no steps
  are spent on settling weights.
* Three seeds are few: the intervals are wide, most of them contain 0, and each stands for itself.
* Heads and widths of the comparison were chosen so that attention costs as much as was asked for, with heads that are
  together wider than the model; at other shapes attention costs less beside a feed-forward layer, and there is less to
  save.

## What was tried on the way

* A penalty on the expected cost, which draws pi towards the target: with `uniform` it blurs what layers are worth, and
  the exact choice within the target does better (*uniform, penalised* below).
* `gdas`, `single_path`, `straight_through` and `soft`, whose weights follow alpha: what leads early is trained more.
* Even paths with identity as likely as other layers: deep networks came too seldom, and were ranked too low.
* pi alone: it ranks strings block by block, and prefers attention everywhere, or nowhere, since it does not see that
  the second layer of a kind is worth less. The inherited loss alone: it sees that, but each network was trained too
  briefly to be told from its like. The sum of both, the estimate, is better than either.
"""
NOTES = {
    "comparison": "![perplexity against latency, with the Pareto front](images/comparison.png)\n\n"
    "`benchmarks/comparison.yaml` was settled before its first search. Every network has the same steps and recipe, "
    "but the longer one, which the picture leaves out. Made by `python benchmarks/comparison.py` with `--profile`, "
    "`--search`, `--train`, `--latency` and with nothing, in that order.",
    "search_quality": "The truth is `benchmarks/results/ground_truth.csv`: every network of a small space, trained "
    "from scratch from several seeds by `python benchmarks/ground_truth.py`. Made by `python "
    "benchmarks/search_quality.py` with `--profile`, `--search` and with nothing, in that order.",
    "blackbox_quality": "Optuna's TPE, whose every trial is one training of the same table.",
    "collapse": "Each countermeasure by itself, against a search with none.",
}


def read_results() -> dict[str, dict[str, Any]]:
    """The results that there are."""
    return {name: read_json(path) for name in NOTES if (path := RESULTS / f"{name}-cpu.json").is_file()}


def render_readme() -> str:
    """The README with its block between the markers, what was found of the comparison and first of the table, made anew."""
    results = read_results()
    told: list[str] = []
    if "comparison" in results:
        told += [describe_comparison(results["comparison"]), *judge_comparison(results["comparison"])]
    if "search_quality" in results:
        told += islice(judge_ranking(results["search_quality"]), 2)
        told += judge_derived(results["search_quality"])
    return fill_readme("evidence", told or ["Nothing has been measured yet."])


def fill_readme(name: str, told: Iterable[str]) -> str:
    """The README with the list between the markers of that name made anew."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    block = "\n".join([begin, *(f"* {line}" for line in told), end])
    return re.sub(f"{begin}.*{end}", lambda _: block, README.read_text(encoding="utf-8"), flags=re.DOTALL)


def render() -> str:
    """The whole page."""
    results = read_results()
    profile = RESULTS / "comparison_profile.json"
    told = [*(judge_profile(read_json(profile)) if profile.is_file() else []), *verdicts(results)]
    parts = [
        INTRODUCTION.format(verdicts="\n".join(f"* {line}" for line in told or ["Nothing has been measured yet."]))
    ]
    parts += [f"{render_part(name, result).rstrip()}\n\n{NOTES[name]}\n" for name, result in results.items()]
    return "\n".join(parts)


def verdicts(results: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """What was to be shown, and what was found."""
    if "comparison" in results:
        yield describe_comparison(results["comparison"])
        yield from judge_comparison(results["comparison"])
    if "search_quality" in results:
        yield from judge_ranking(results["search_quality"])
        yield from judge_derived(results["search_quality"])
    if "blackbox_quality" in results:
        yield from judge_blackbox(results["blackbox_quality"])
    if "collapse" in results:
        yield from judge_collapse(results["collapse"])


def judge_profile(profile: dict[str, Any]) -> Iterator[str]:
    """How well layers add up to networks."""
    layers, check = profile["inference"]["layers"], profile["check"]
    ratio = layers["s"]["median_ms"] / layers["f"]["median_ms"]
    yield (
        f"Latency adds up: the sum over layers errs by {check['median_error']:.1%} in the median of "
        f"{len(check['networks'])} random networks of {profile['depth']} blocks (aim: 10 % at most, "
        f"{mark(check['median_error'] <= 0.1)}), {check['largest_error']:.1%} at most. One layer of attention costs "
        f"{ratio:.1f} feed-forward layers there."
    )


def describe_comparison(result: dict[str, Any]) -> str:
    """What was trained for how long."""
    steps = {row["network"]: row["steps"] for row in result["networks"]}
    return (
        f"The comparison: a search of {result['search']['search']['blocks']} blocks, and {steps['derived']:,} steps for "
        f"every network but *interleaved, longer*, which has {result['search']['longer_steps']:,}: the time of search "
        "and retraining together."
    )


def judge_comparison(result: dict[str, Any]) -> Iterator[str]:
    """The derived network's latency and perplexity."""
    row = {row["network"]: row for row in result["networks"]}
    derived, interleaved = row["derived"], row["interleaved"]
    whole = derived["whole network, ms"] / interleaved["whole network, ms"]
    share = derived["stack, share of interleaved"]
    yield (
        f"The blocks of the derived `{derived['string']}` take {share:.3f} of the interleaved network's latency "
        f"(aim: 0.65 at most, {mark(share <= MOST_LATENCY)}), the whole network {whole:.3f}."
    )
    random = median(of["valid ppl"] for name, of in row.items() if name.startswith("random"))
    rivals = [interleaved["valid ppl"], row["shallower"]["valid ppl"], random]
    ours = derived["valid ppl"]
    yield (
        f"Its mean perplexity is {ours:.2f}: the interleaved network's {rivals[0]:.2f} (aim: at or below it, "
        f"{mark(ours <= rivals[0])}), the shallower one's of its latency {rivals[1]:.2f} (aim: below it, "
        f"{mark(ours < rivals[1])}), the median of random ones of its cost {random:.2f} (aim: below it, "
        f"{mark(ours < random)})."
    )
    yield from result["answers"]


def judge_ranking(result: dict[str, Any]) -> Iterator[str]:
    """Kendall's tau of what the default estimator chooses by, beside the ceiling and beside counts."""
    ranks = {(row["ranked by"], row["target"]): row for row in result["ranks"]}
    ceiling = result["ceiling"]["all"]
    aim = CEILING_SHARE * ceiling
    yield (
        "A second experiment, the table: every network of a small space trained from scratch from several seeds. "
        f"Their orders agree by Kendall's tau of {ceiling:.2f} from seed to seed (aim: 0.8, {mark(ceiling >= 0.8)})."
    )
    counts = [ranks[count, ""] for count in ("parameters", "multiply-adds")]
    for (by, target), row in ranks.items():
        if by == f"{DEFAULT}: estimate":
            yield (
                f"Ranking of all its networks by the estimate of a search, target {target}: tau {row['tau, all']:.2f} "
                f"(aim: {aim:.2f}, {mark(row['tau, all'] >= aim)}), and {row['tau, one training']:.2f} with one "
                "training of each."
            )
            for title, among in SUBSETS.items():
                of, *others = (each[title] for each in (row, *counts))
                yield (
                    f"The same among {among}: {of:.2f}, by parameters {others[0]:.2f}, by multiply-adds "
                    f"{others[1]:.2f} (aim: above both, {mark(of > max(others))})."
                )


def judge_derived(result: dict[str, Any]) -> Iterator[str]:
    """What the default estimator derived beside the best network of its cost."""
    for row in result["derived"]:
        if row["estimator"] == DEFAULT and row["target"] != "none" and row["by"] == "search and derive":
            behind, pooled, own = (
                float(row[key].partition(" ")[0]) for key in ("behind the best", "seed deviation", "of the best")
            )
            yield (
                f"Derived within {row['target']}: {row['behind the best']} behind the best network of equal or lower "
                f"cost, at least as good as {row['at least as good as']} (medians). Seeds of a network deviate by "
                f"{row['seed deviation']} (aim: no further behind, {mark(behind <= pooled)}), those of the best by "
                f"{row['of the best']} ({mark(behind <= own)})."
            )


def judge_blackbox(result: dict[str, Any]) -> Iterator[str]:
    """What a black-box search finds by as many steps of training as a search takes."""
    equal = result["trainings_of_a_search"]
    for record in result["records"]:
        if record["trainings"] == equal:
            yield (
                f"A black-box search of as many steps, {equal:g} trainings, within {record['target']}: "
                f"{record['behind the best']} behind the best (median)."
            )


def judge_collapse(result: dict[str, Any]) -> Iterator[str]:
    """By how much each countermeasure lowers the share of identity, where it has grown without any."""
    shares = {(record["estimator"], record["against"]): record["identity share"] for record in result["records"]}
    for (estimator, against), share in shares.items():
        before = shares[estimator, "nothing"]
        if against != "nothing" and before > EVEN_SHARE:
            yield (
                f"Share of identity in pi by {estimator}, with {against}: {share:.2f}, {before:.2f} with nothing "
                f"against the drift ({'it matters' if share < before - LEAST_CHANGE else 'no difference'} here)."
            )


if __name__ == "__main__":
    write_text(PAGE, render())
    write_text(README, render_readme())
