"""Write docs/evidence.md from the results of the benchmarks: `python docs/make/evidence.py`."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from performance import RESULTS, render_goals, render_part

from parnas.config.schema import SearchConfig
from parnas.runs.files import read_json, write_text

PAGE = Path(__file__).resolve().parents[1] / "evidence.md"
DEFAULT = SearchConfig().estimator
UNIFORM_SHARE = 1 / 3  # probability of identity among three equally probable candidates
LEAST_GAIN = 0.01  # bits per byte: smallest gain of the derived network that counts as an effect
COLUMNS = {
    "Reliability of the table: Kendall's tau between seeds": "Reliability of the reference table: Kendall's tau between "
    "the rankings by two seeds",
    "Agreement with the table": "Rank correlations with the reference table",
    "tau,": "Kendall's tau,",
    "| tau ": "| Kendall's tau ",
    "rho,": "Spearman's rho,",
    "| against": "| remedy ",
    "| nothing": "| none   ",
    "stack, share of interleaved": "blocks, share of interleaved",
    "Black-box search; a search takes the steps of 2 trainings": "Black-box search (one search takes as many steps as 2 "
    "trainings)",
    "Searches of 1,200 steps": "Remedies for collapse, in searches of 1,200 steps",
}
"""Titles in the results of the benchmarks, with their replacements on the page."""
INTRODUCTION = """# Is the search worth it?

Yes, if latency matters. Among attention, feed-forward and identity, the layers of this page, a search finds networks
that are as good as hand-designed networks of the same cost and slightly better than random networks. It ranks networks
nearly as reliably as training each of them once. But a training of the interleaved network that takes as long as search
and retraining together reaches a far lower perplexity. With convolutions, derived networks are clearly better than the
interleaved network and about as good as the best hand-designed ones ([which mixer where?](hybrids.md)); a search within
the training costs less ([one run](one-run.md)).

Two experiments on WikiText-2 show this:

* **The comparison**: one search over 12 blocks with a latency target. The derived network, hand-designed networks and random
  networks are trained in the same way ([baselines](baselines.md)).
* **The reference table**: *every* network of a small search space (up to five blocks) is trained from scratch, from three
  seeds. It shows how well a search ranks networks, and how close the derived network is to the best one.

Perplexities are per token (12,000 lower-cased pieces) on the validation split, unless stated otherwise. Each network was evaluated on the test split
once, at the end of its training. Differences in perplexity have a [95 % interval](baselines.md#the-statistics); a negative
difference means that the derived network is better. *Cost share* is the latency of a network's blocks relative to the
blocks of the interleaved network.

{verdicts}

## Goals

The goals were set before the measurements. *Tau* is Kendall's tau between a ranking and the perplexities of the reference table.

{goals}

## Caveats

* Four choices of the estimator `uniform` were made on part of the reference table, so the results of `uniform` on that table
  may be slightly too good: how often uniformly sampled paths contain identity; how an architecture step compares the losses of two
  paths; the weight of the entropy term; and which two estimates of a network's loss are added for re-ranking. The
  comparison was not used for any choice: its configuration and seeds were fixed before.
* Three seeds are few: most 95 % intervals contain 0. The intervals are not corrected for the number of comparisons.
* In the comparison an attention layer costs as much as three feed-forward layers, because its heads are together wider than
  the model. Where attention is cheaper, a search can save less.
* The searches of the comparison and of the table of collapse are older than two of the defaults of `uniform`. For a search
  like theirs set `search.gate_samples=1` (one path in each step) and `search.evolution_steps=0` (no evolutionary search).
* The searches of the comparison and of the reference table have `uniform_fraction: 1`: no steps fine-tune the selected
  path. In the table of collapse, `uniform` fine-tunes in 45 % of its steps, and each row is one search.

## Alternatives that were tried

* **A penalty on the expected cost** distorts pi if the estimator is `uniform`. Rankings are better if the search has no
  penalty and only the selection enforces the cost target (*uniform, penalised* in the tables is the search with a penalty).
* **Other estimators** train the more probable candidates more often, so candidates that lead early stay ahead.
* **Uniform paths with identity as frequent as other layers** sample deep networks too rarely and rank them too low.
* **Selecting by pi or by shared-weight loss alone** ranks worse than [the sum of both
  estimates](how-it-works.md#from-pi-to-an-architecture).

`python docs/make/evidence.py` writes this page from `benchmarks/results/`.
"""
NOTES = {
    "comparison": "![perplexity against latency, with the Pareto front](images/comparison.png)\n\n"
    "*Blocks* is the measured latency without embedding and softmax; *± sd* is the standard deviation of the validation perplexity over seeds. All networks were trained with the same "
    "settings for the same number of steps, except *interleaved, longer*, which the picture omits. `benchmarks/comparison.yaml` has the settings. "
    "To repeat the experiment, run `python benchmarks/comparison.py` five times: with `--profile`, `--search`, `--train` and "
    "`--latency`, then without an option.",
    "search_quality": "Rank correlations are with the mean perplexity over three seeds in the reference table; *one training* is the "
    "mean of the correlations with the perplexities of each single seed. *Attention alone* means networks of attention layers only. *Ranked by* names a count, or an estimator and its score: *pi* (log-probability of the "
    "network), *inherited* (loss with the shared weights) or *estimate* (the sum by which re-ranking selects, see [how it "
    "works](how-it-works.md#from-pi-to-an-architecture)). The table of derived architectures has one network per search in each row, and medians over these searches. *Pi alone* means without re-ranking, *share of latency* is relative to the interleaved network, and *best* is the network "
    "with the lowest mean perplexity within the cost target. *Behind the best* is how much higher the selected network's perplexity is than that of this best network. "
    "*Seed deviation* is the standard deviation of perplexity over seeds, averaged over all networks; *of the best* is that of the best network alone. *At least as good as* is a share of the networks within the cost target. `python benchmarks/ground_truth.py` writes the reference table, "
    "`benchmarks/results/ground_truth.csv`. To repeat the searches, run `python benchmarks/search_quality.py` three "
    "times: with `--profile`, with `--search`, then without an option.",
    "blackbox_quality": "Each row lists the best network of each of five Optuna studies (TPE sampler) after the given number of trainings; – means that no network within the cost target was found. The "
    "perplexity of each training is looked up in the reference table. *Behind the best* is how much higher the perplexity of the found network is than that of the best network within the cost target (median over the studies).",
    "collapse": "Each row adds one remedy to a search in which alpha learns from the first step. *Identity share* is the mean "
    "probability of identity over the blocks at the end of the search. *Bits per byte* is the result of the derived network with the shared weights.",
}


def read_results() -> dict[str, dict[str, Any]]:
    """Return the available results by name."""
    return {name: read_json(path) for name in NOTES if (path := RESULTS / f"{name}-cpu.json").is_file()}


def render() -> str:
    """Return the page."""
    results = read_results()
    profile = RESULTS / "comparison_profile.json"
    lines = [*([describe_profile(read_json(profile))] if profile.is_file() else []), *verdicts(results)]
    parts = [
        INTRODUCTION.format(
            verdicts="\n".join(f"* {line}" for line in lines or ["Nothing has been measured yet."]),
            goals=render_goals("search among s, f and i"),
        )
    ]
    parts += [f"{rename(render_part(name, result)).rstrip()}\n\n{NOTES[name]}\n" for name, result in results.items()]
    return "\n".join(parts)


def rename(part: str) -> str:
    """Replace the titles in `COLUMNS`."""
    for title, replacement in COLUMNS.items():
        part = part.replace(title, replacement)
    return part


def verdicts(results: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield the results in sentences."""
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


def describe_profile(profile: dict[str, Any]) -> str:
    """Return the error of the sum of layer latencies as a prediction of the latency of a network."""
    layers, check = profile["inference"]["layers"], profile["check"]
    ratio = layers["s"]["median_ms"] / layers["f"]["median_ms"]
    return (
        f"**The sum of layer latencies predicts the latency of a network** with a median error of {check['median_error']:.1%} for "
        f"{len(check['networks'])} random networks of {profile['depth']} blocks and a largest error of "
        f"{check['largest_error']:.1%}. An attention layer costs as much as {ratio:.1f} feed-forward layers."
    )


def describe_comparison(result: dict[str, Any]) -> str:
    """Return the size of the comparison."""
    steps = {row["network"]: row["steps"] for row in result["networks"]}
    return (
        f"**The comparison** has {result['search']['search']['blocks']} blocks. Every network is trained for "
        f"{steps['derived']:,} steps, except *interleaved, longer* with {result['search']['longer_steps']:,} steps: its "
        "training takes as long as search and retraining together."
    )


def judge_comparison(result: dict[str, Any]) -> Iterator[str]:
    """Yield latency and perplexity of the derived network beside the others."""
    row = {row["network"]: row for row in result["networks"]}
    derived, interleaved = row["derived"], row["interleaved"]
    whole = derived["whole network, ms"] / interleaved["whole network, ms"]
    yield (
        f"Latency relative to the interleaved network: the blocks of the derived network `{derived['string']}` take "
        f"{derived['stack, share of interleaved']:.3f}, the whole network {whole:.3f}."
    )
    yield from map(explain, result["answers"])


def explain(answer: str) -> str:
    """Return an answer of the benchmark as a sentence that names both networks."""
    answer = re.sub(
        r"derived against (.+) \((cost share [\d.]+)\): (\S+ %) perplexity, (.+), (\d+) pair\(s\) of seeds: ",
        r"Perplexity of the derived network relative to *\1* (\2): \3 over \5 seeds, \4: ",
        answer,
    )
    return re.sub(
        r"derived against the median of (\d+) random networks of its cost: (\S+ %) perplexity; better than (\d+) of .*"
        r"its (\d+) seeds, than (\d+) .*",
        r"Perplexity of the derived network relative to the median of \1 random networks of the same cost: \2. Its mean over "
        r"\4 seeds is lower than the perplexity of \3 of them. Random networks are trained from one seed; with the same seed, "
        r"the derived network is better than \5 of them.",
        answer,
    )


def judge_ranking(result: dict[str, Any]) -> Iterator[str]:
    """Yield Kendall's tau of rankings with the reference table: by the default estimator and by one seed."""
    ceiling = result["ceiling"]["all"]
    yield (
        "**The reference table** (every network of a small search space, trained from scratch) is reliable: two seeds rank its "
        f"networks almost alike, with a Kendall's tau of {ceiling:.2f}."
    )
    for row in result["ranks"]:
        if row["ranked by"] == f"{DEFAULT}: estimate":
            search = "without a cost target" if row["target"] == "none" else f"with cost target {row['target']}"
            yield (
                f"Kendall's tau between the ranking of all networks by a search {search} and by their mean perplexity over seeds: "
                f"{row['tau, all']:.2f}; by their perplexity in one training instead: {row['tau, one training']:.2f}."
            )


def judge_derived(result: dict[str, Any]) -> Iterator[str]:
    """Yield the difference between the derived networks and the best network within the cost target."""
    for row in result["derived"]:
        if row["estimator"] == DEFAULT and row["target"] != "none" and row["by"] == "search and derive":
            yield (
                f"The networks derived with cost target {row['target']} have a perplexity {row['behind the best']} above that of "
                f"the best network within the target and are at least as good as {row['at least as good as']} networks within it "
                "(medians over searches)."
            )


def judge_blackbox(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result of a black-box search with as many training steps as a search."""
    equal = result["trainings_of_a_search"]
    for record in result["records"]:
        if record["trainings"] == equal:
            yield (
                f"A black-box search with as many training steps as one search (enough for {equal:g} trainings) and cost target {record['target']} "
                f"finds a network whose perplexity is {record['behind the best']} above that of the best network within the "
                f"target (median over studies)."
            )


def judge_collapse(result: dict[str, Any]) -> Iterator[str]:
    """Yield the remedies that lower the loss of the derived network, for estimators that prefer identity without one."""
    by_estimator: dict[str, dict[str, Mapping[str, Any]]] = defaultdict(dict)
    for record in result["records"]:
        by_estimator[record["estimator"]][record["against"]] = record
    for estimator, of in by_estimator.items():
        before = of.pop("nothing")
        if before["identity share"] <= UNIFORM_SHARE:
            continue
        least = float(before["bits per byte"]) - LEAST_GAIN
        helpful = {name for name, record in of.items() if float(record["bits per byte"]) <= least}
        listed = (", ".join(f"`{name}`" for name in of if (name in helpful) == wanted) for wanted in (True, False))
        yield (
            "[Collapse](how-it-works.md#collapse) of `{}` to identity (mean probability {:.2f}): these remedies lower the loss of "
            "the derived network by {} bits per byte or more: {}; these do not: {}.".format(
                estimator, before["identity share"], LEAST_GAIN, *listed
            )
        )


if __name__ == "__main__":
    write_text(PAGE, render())
