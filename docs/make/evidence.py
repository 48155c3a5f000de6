"""Write docs/evidence.md from the results of the benchmarks: `python docs/make/evidence.py`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from performance import RESULTS, mark, render_part

from parnas.config.schema import SearchConfig
from parnas.runs.files import read_json, write_text

PAGE = Path(__file__).resolve().parents[1] / "evidence.md"
DEFAULT = SearchConfig().estimator
CEILING_SHARE = 0.9  # goal of a ranking: this share of the agreement between two seeds of the table
MOST_LATENCY = 0.65  # of the interleaved network's blocks
UNIFORM_SHARE = 1 / 3  # of identity among three candidates
LEAST_CHANGE = 0.05  # smallest change of the share of identity that counts as an effect
SUBSETS = {
    "tau, all": "all networks",
    "tau, with attention": "networks with attention",
    "tau, attention alone": "networks of attention layers only",
    "tau, equal latency": "networks of equal latency",
}
INTRODUCTION = """# Is the search worth it?

Yes, if latency matters. A search finds networks that are as good as hand-designed networks of the same cost and slightly
better than random networks. It ranks networks nearly as reliably as training each of them once. But the same time, spent
on a longer training of the interleaved network, lowers the perplexity far more.
Two experiments on WikiText-2 show this:

* **The comparison**: one search over 12 blocks with a latency target. The derived network, hand-designed networks and random
  networks are trained in the same way ([baselines](baselines.md)).
* **The table**: *every* network of a small space (up to five blocks) is trained from scratch, from three seeds. The table
  shows how well a search ranks networks, and how far its network is from the best.

Perplexities are per token on the validation split, unless stated otherwise; each network was evaluated on the test split
once, at its end. Lines that begin with *derived against* give the difference in perplexity (negative: the derived network
is better) with its [95 % interval](baselines.md#the-statistics); *cost share* is the latency of the other network's blocks
relative to the interleaved network. Random networks have one seed, so they are compared with the mean of the derived
network and with its training from the same seed.

{verdicts}

## Caveats

* The settings of the estimator `uniform` were tuned on parts of the table: how often uniform paths contain identity, how
  architecture steps compare two paths, the entropy weight, and the sum in re-ranking. The comparison was not used for
  tuning: its configuration and seeds were fixed before.
* Three seeds are few: most intervals contain 0. They are not corrected for the number of comparisons.
* Attention is expensive in the comparison, as much as three feed-forward layers, because its heads are together wider than
  the model. With cheaper attention less can be saved.
* The searches have `uniform_fraction: 1`: no steps fine-tune the selected path.

## Alternatives that were tried

* **A penalty on the expected cost** distorts pi with `uniform`. Selecting within the target ranks better (*uniform,
  penalised* in the tables).
* **Other estimators** train the more probable candidates more often, so early leaders stay ahead.
* **Uniform paths with identity as frequent as other layers** sample deep networks too rarely and rank them too low.
* **Selecting by pi or by shared-weight loss alone** ranks worse than [their sum](how-it-works.md#from-pi-to-an-architecture).

`python docs/make/evidence.py` writes this page from `benchmarks/results/`.
"""
NOTES = {
    "comparison": "![perplexity against latency, with the Pareto front](images/comparison.png)\n\n"
    "*Stack* is the measured latency of the blocks, without embedding and softmax. All networks have the same steps and "
    "settings, except *interleaved, longer*, which the picture omits. `benchmarks/comparison.yaml` has the settings; "
    "`python benchmarks/comparison.py` with `--profile`, `--search`, `--train`, `--latency` and then without option "
    "repeats the experiment.",
    "search_quality": "*tau* and *rho* are Kendall's and Spearman's rank correlations with the mean perplexities of the table; "
    "*tau, one training* uses single seeds. A search ranks by *pi* (log-probability of the "
    "network), by *inherited* (loss with shared weights) or by *estimate* (the sum that re-ranking uses, see [how it "
    "works](how-it-works.md#from-pi-to-an-architecture)). *Behind the best* is the difference in perplexity to the best "
    "network of equal or lower cost, *seed deviation* the standard deviation over seeds, averaged over networks, and *of "
    "the best* the same for the best network. `benchmarks/results/ground_truth.csv` is the table, written by "
    "`python benchmarks/ground_truth.py`. `python benchmarks/search_quality.py` with `--profile`, `--search` and then "
    "without option repeats the searches.",
    "blackbox_quality": "Each row lists the best networks of five studies with Optuna's TPE after that many trainings. Each "
    "training is looked up in the table.",
    "collapse": "Each row adds one remedy to a search in which alpha learns from the first step. *identity share* is the mean "
    "probability of identity at the end, *bits per byte* that of the derived network with shared weights.",
}


def read_results() -> dict[str, dict[str, Any]]:
    """Return the available results by name."""
    return {name: read_json(path) for name in NOTES if (path := RESULTS / f"{name}-cpu.json").is_file()}


def render() -> str:
    """Return the page."""
    results = read_results()
    profile = RESULTS / "comparison_profile.json"
    lines = [*(judge_profile(read_json(profile)) if profile.is_file() else []), *verdicts(results)]
    parts = [
        INTRODUCTION.format(verdicts="\n".join(f"* {line}" for line in lines or ["Nothing has been measured yet."]))
    ]
    parts += [f"{render_part(name, result).rstrip()}\n\n{NOTES[name]}\n" for name, result in results.items()]
    return "\n".join(parts)


def verdicts(results: Mapping[str, dict[str, Any]]) -> Iterator[str]:
    """Yield each goal with its result."""
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
    """Yield how well the sum of layer latencies predicts networks."""
    layers, check = profile["inference"]["layers"], profile["check"]
    ratio = layers["s"]["median_ms"] / layers["f"]["median_ms"]
    yield (
        f"**The sum of layer latencies predicts the latency of a network** with a median error of {check['median_error']:.1%} for "
        f"{len(check['networks'])} random networks of {profile['depth']} blocks (goal: at most 10 %, "
        f"{mark(check['median_error'] <= 0.1)}), and {check['largest_error']:.1%} at most. An attention layer costs as "
        f"much as {ratio:.1f} feed-forward layers."
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
    share = derived["stack, share of interleaved"]
    yield (
        f"Latency relative to the interleaved network: the blocks of the derived network `{derived['string']}` take "
        f"{share:.3f} (goal: at most {MOST_LATENCY}, {mark(share <= MOST_LATENCY)}), the whole network {whole:.3f}."
    )
    random = median(each["valid ppl"] for name, each in row.items() if name.startswith("random"))
    rivals = [interleaved["valid ppl"], row["shallower"]["valid ppl"], random]
    ours = derived["valid ppl"]
    yield (
        f"Mean perplexity: derived {ours:.2f}; interleaved {rivals[0]:.2f} (goal: derived not higher, "
        f"{mark(ours <= rivals[0])}); shallower, of equal latency {rivals[1]:.2f} (goal: derived lower, "
        f"{mark(ours < rivals[1])}); median of random networks of equal cost {random:.2f} (goal: derived lower, "
        f"{mark(ours < random)})."
    )
    yield from result["answers"]


def judge_ranking(result: dict[str, Any]) -> Iterator[str]:
    """Yield Kendall's tau of the default estimator's ranking, beside that of two seeds and of simple counts."""
    ranks = {(row["ranked by"], row["target"]): row for row in result["ranks"]}
    ceiling = result["ceiling"]["all"]
    aim = CEILING_SHARE * ceiling
    yield (
        "**The table** is reliable: the rankings of its networks by two seeds have a Kendall's tau (rank correlation) of "
        f"{ceiling:.2f} (goal: 0.8, {mark(ceiling >= 0.8)})."
    )
    counts = [ranks[count, ""] for count in ("parameters", "multiply-adds")]
    for (by, target), row in ranks.items():
        if by == f"{DEFAULT}: estimate":
            yield (
                f"Ranking by a search with cost target {target}: tau {row['tau, all']:.2f} with the mean over seeds (goal: "
                f"{aim:.2f}, {mark(row['tau, all'] >= aim)}), {row['tau, one training']:.2f} with one training of each "
                "network."
            )
            for title, among in SUBSETS.items():
                tau, *others = (each[title] for each in (row, *counts))
                yield (
                    f"Among {among}: tau {tau:.2f}; by parameters {others[0]:.2f}, by multiply-adds {others[1]:.2f} (goal: above "
                    f"both, {mark(tau > max(others))})."
                )


def judge_derived(result: dict[str, Any]) -> Iterator[str]:
    """Yield the distance of the derived networks to the best ones of their cost."""
    for row in result["derived"]:
        if row["estimator"] == DEFAULT and row["target"] != "none" and row["by"] == "search and derive":
            behind, pooled, own = (
                float(row[key].partition(" ")[0]) for key in ("behind the best", "seed deviation", "of the best")
            )
            yield (
                f"Derived with cost target {row['target']}: perplexity {row['behind the best']} above the best network of equal "
                f"or lower cost, at least as good as {row['at least as good as']} such networks (medians over searches). "
                f"Goal: at most the standard deviation over seeds, {row['seed deviation']} on average "
                f"({mark(behind <= pooled)}), {row['of the best']} for the best network ({mark(behind <= own)})."
            )


def judge_blackbox(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result of a black-box search with as many training steps as a search."""
    equal = result["trainings_of_a_search"]
    for record in result["records"]:
        if record["trainings"] == equal:
            yield (
                f"Black-box search with as many steps as one search ({equal:g} trainings), cost target {record['target']}: "
                f"perplexity {record['behind the best']} above the best network (median)."
            )


def judge_collapse(result: dict[str, Any]) -> Iterator[str]:
    """Yield the effect of each remedy on the share of identity, if it has grown without any."""
    shares = {(record["estimator"], record["against"]): record["identity share"] for record in result["records"]}
    for (estimator, against), share in shares.items():
        before = shares[estimator, "nothing"]
        if against != "nothing" and before > UNIFORM_SHARE:
            yield (
                f"Mean probability of identity, `{estimator}` with `{against}`: {share:.2f}, without the remedy {before:.2f} "
                f"({'it helps' if share < before - LEAST_CHANGE else 'no difference'})."
            )


if __name__ == "__main__":
    write_text(PAGE, render())
