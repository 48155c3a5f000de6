"""Write docs/hybrids.md from the results of the benchmarks: `python docs/make/hybrids.py`."""

import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from performance import RESULTS, render_goals

from parnas.architecture import ATTENTION
from parnas.config.yaml_file import read_yaml
from parnas.figures.pareto import ParetoPoint, draw_pareto
from parnas.runs.files import read_json, write_text
from parnas.studies.baseline_comparison import paired_difference

PAGE = Path(__file__).resolve().parents[1] / "hybrids.md"
PICTURE = PAGE.with_name("images") / "hybrids.png"
SHAKESPEARE = RESULTS / "word_level-shakespeare.json"
INTRODUCTION = """# Which mixer where?

Attention is one of several layers that let the positions of a text exchange information. A gated short convolution (`k`)
sees a few positions; a gated recurrence (`r`) carries a state of constant size through the whole text; attention with a
window (`s:window=N`) sees the last N positions ([layers](layers.md)). In inference at width {width} on a CPU, `k` costs {k} of
a feed-forward layer and `r` {r}; narrower layers and GPUs have other ratios, so measure on your device (`parnas profile`). This page shows what these layers cost, what they are worth in networks of equal latency, and what
changes of the training recipe are worth for a network of attention, convolution and feed-forward layers.

## Goals

The goals were set before the measurements.

{goals}
"""
EQUAL_LATENCY = 0.1
"""Networks whose measured latencies differ by at most this share count as equally fast."""
OTHER_SEARCH = ", search from seed"
"""In the names of networks that further searches derived."""
AREAS = ("cost of layers", "search in the space hybrid", "ranking in the space hybrid", "Tiny Shakespeare")
SECTIONS = {
    "hybrid": (
        "Derived networks",
        "One search in the space `hybrid` = [s, k, f, i] of 12 blocks, and the networks that it derives with three cost targets, beside "
        "hand-designed networks; a search from another seed shows how far the derived networks depend on it. All networks are trained from scratch by the same recipe; *latency share* is the measured latency "
        "of the blocks relative to the interleaved network's, *time* that of the training relative to the first, perplexity is per "
        "piece on the validation split of WikiText-2, differences are paired by seed. Measured by "
        "`python benchmarks/variants.py hybrid`",
    ),
    "search_quality_hybrid_truth": (
        "How well the search ranks networks",
        "The reference is `benchmarks/results/hybrid_truth.csv`: 150 random networks of at most 6 blocks, drawn evenly over latency, "
        "each trained from scratch, 30 of them from three seeds. *Reliability* is the rank correlation between the trainings from two "
        "seeds: a search that reaches it ranks networks as well as a second training would. *pi*: the log probability of a network; *inherited*: minus its loss with the SuperNet's "
        "weights; *estimate*: both together, by which `derive` chooses. Measured by "
        "`python benchmarks/search_quality.py --config benchmarks/hybrid_truth.yaml`",
    ),
    "search_quality_slices_truth": (
        "Slices of weights",
        "With `search.share_slices`, small layers use slices of the weights of large ones. The reference are 24 random networks of "
        "two sizes of `s` and of `f`, each trained from scratch. Pi ranks them worse with shared slices than without; re-ranking "
        "makes up for most of it. Measured by "
        "`python benchmarks/search_quality.py --config benchmarks/slices_truth.yaml`",
    ),
    "mixers": (
        "Cost of layers",
        "Latencies relative to an attention layer in the same run, in the shapes of `benchmarks/comparison.yaml` (width 256, "
        "segment 256). *Memory* is `mem_len`. Bytes are those that one layer keeps between tokens in generation, for one text in "
        "float32. Measured by `python benchmarks/mixers.py`",
    ),
    "layers": (
        "Value of layers",
        "Each network has about the latency of the first, except the interleaved network of 12 blocks; *latency share* is "
        "the measured latency of its blocks relative to that network's. Perplexity per piece on the validation split of WikiText-2, "
        "differences are paired by seed. Measured by `python benchmarks/variants.py layers`",
    ),
    "recipe": (
        "Changes of the training recipe",
        "Each row changes one part of the recipe of `benchmarks/recipe.yaml`, for a network `skfskf`. Most changes were trained from one seed for "
        "1,000 steps, also some that were better; those that gain less than 2 % from three seeds were not trained for 4,000 steps. "
        "*Time* is that of the training relative to the first, roughly, since two trainings shared the machine. "
        "Changes that are no settings of parnas are in `benchmarks/tried_layers.py`. Measured by "
        "`python benchmarks/variants.py recipe`",
    ),
}
"""By result: title of the section and note."""


def render() -> str:
    """Return the page."""
    results = {name: read_json(path) for name in SECTIONS if (path := RESULTS / f"{name}-cpu.json").is_file()}
    costs = {layer: describe_cost(results["mixers"], layer) for layer in ("k", "r")}
    shapes = RESULTS.parent / "comparison.yaml"  # of the benchmark `mixers`
    width = read_yaml(shapes.read_text(encoding="utf-8"), shapes.name)["model"]["d_model"]
    parts = [INTRODUCTION.format(goals=render_goals(*AREAS), width=width, **costs)]
    for name, (title, note) in SECTIONS.items():
        if name in results:
            machine = results[name]["machine"]
            device = f"{machine['cores']} cores of {machine['device_name']}"
            said = f"{DESCRIPTIONS[name](results[name])}\n\n" if name in DESCRIPTIONS else ""
            parts.append(f"## {title}\n\n{note}, on {device}.\n\n{said}{render_tables(name, results[name])}\n")
    if SHAKESPEARE.is_file():
        parts.append(render_shakespeare(read_json(SHAKESPEARE)))
    parts.append("`python docs/make/hybrids.py` writes this page from `benchmarks/results/`.\n")
    return "\n".join(parts)


def describe_cost(mixers: Mapping[str, Any], layer: str) -> str:
    """Return the inference latency of a layer as a share of a feed-forward layer's, a range over the precisions."""
    shortest = min(row["memory"] for row in mixers["latency"])
    shares = [
        row[layer] / row["f"] for row in mixers["latency"] if row["memory"] == shortest and row["mode"] == "inference"
    ]
    low, high = f"{min(shares):.1f}", f"{max(shares):.1f}"
    return low if low == high else f"{low} to {high}"


def describe_layers(result: Mapping[str, Any]) -> str:
    """Return what the table of layers says, in sentences."""
    of = {record["variant"]: record for record in result["variants"]}
    base, *others = result["variants"]
    alone, whole = of["attention alone"], of["interleaved, 12 blocks"]
    best = min(result["variants"], key=lambda record: record["ppl"])
    lines = [
        f"At about equal latency, attention and feed-forward layers alone have a perplexity {alone['percent']:.1f} % above that of "
        f"*{base['variant']}*. The interleaved network of 12 blocks is {whole['percent']:.1f} % above it, at "
        f"{whole['latency'] / base['latency']:.1f} times its latency.",
        f"The lowest perplexity of the table has *{best['variant']}*"
        + (f" ({best['percent']:+.1f} % relative to the first)." if best is not base else "."),
    ]
    worse = [record["variant"] for record in others if record["low"] is not None and record["low"] > 0]
    lines.append(f"Significantly worse than the first (95 % interval above 0): {'; '.join(worse)}." if worse else "")
    return "\n".join(f"* {line}" for line in lines if line)


def derived_and_by_hand(result: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """Return the records of derived networks, and those of hand-designed networks, of as many steps as the first."""
    records = [record for record in result["variants"] if record["steps"] == result["variants"][0]["steps"]]
    derived = [record for record in records if record["variant"].startswith("derived")]
    return derived, [record for record in records if record not in derived]


def best_of_latency(records: Iterable[Mapping[str, Any]], latency: float) -> Mapping[str, Any] | None:
    """Return the record of the lowest perplexity among those of at most about this latency; `None` if there is none."""
    allowed = [each for each in records if each["latency"] <= latency * (1 + EQUAL_LATENCY)]
    return min(allowed, key=lambda each: each["ppl"], default=None)


def difference(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Return the difference of perplexities, paired by seed, in per cent of `theirs`, as `describe_difference`."""
    found = paired_difference(ours["ppl_by_seed"], theirs["ppl_by_seed"])
    return describe_difference({**found._asdict(), "percent": found.mean})


def describe_difference(record: Mapping[str, Any]) -> str:
    """Return a difference of perplexities in words, with its interval if there are several seeds."""
    interval = (
        " (1 seed)" if record["low"] is None else f" (95 % interval {record['low']:+.1f} to {record['high']:+.1f} %)"
    )
    return f"{record['percent']:+.1f} %{interval}"


def describe_search(result: Mapping[str, Any]) -> str:
    """Return a picture, a summary, a table of the derived networks beside others, and the gain of longer trainings."""
    derived, by_hand = derived_and_by_hand(result)
    rows = []
    for record in derived:
        best = best_of_latency(by_hand, record["latency"])
        places = [str(number) for number, layer in enumerate(record["arch"], 1) if layer == ATTENTION]
        rows.append(
            {
                "network": record["variant"],
                "layers": f"`{record['arch']}`",
                "blocks with attention": ", ".join(places) or "–",
                "latency share": f"{record['latency']:.2f}",
                "seeds": record["seeds"],
                "relative to interleaved": f"{record['percent']:+.1f} %",
                "relative to hand-designed": f"`{best['arch']}`: {difference(record, best)}" if best else "–",
            }
        )
    shares, gains = ([record[key] for record in derived] for key in ("latency", "percent"))
    summary = (
        f"The derived networks have perplexities from {min(gains):+.1f} to {max(gains):+.1f} % relative to the interleaved network, "
        f"at {min(shares):.0%} to {max(shares):.0%} of its latency. The last column compares with the best hand-designed network "
        f"that is at most {EQUAL_LATENCY:.0%} slower."
    )
    lines = []
    for record in result["variants"]:
        once = next(
            (each for each in by_hand if each["arch"] == record["arch"] and each["steps"] < record["steps"]), None
        )
        if once:
            gain = -paired_difference(record["ppl_by_seed"], once["ppl_by_seed"]).mean
            lines.append(
                f"With {record['steps'] / once['steps']:g} times the steps, *{once['variant']}* has a perplexity "
                f"{gain:.1f} % lower ({record['seeds']} seed{'s' * (record['seeds'] > 1)})."
            )
    picture = f"![perplexity against latency of derived networks and of hand-designed networks](images/{PICTURE.name})"
    return "\n".join([summary, "", picture, "", table(rows), "", *(f"* {line}" for line in lines)])


def describe_recipe(result: Mapping[str, Any]) -> str:
    """Return what the table of recipes says, in sentences."""
    lines = []
    for steps in sorted({record["steps"] for record in result["variants"]}):
        others = [record for record in result["variants"] if record["steps"] == steps and "percent" in record]
        repeated = [record for record in others if record["low"] is not None]  # from several seeds
        clear = [record for record in repeated if record["high"] < 0] if repeated else others
        of = "95 % interval below 0" if repeated else "one seed"
        listed = [
            f"*{record['variant']}* ({record['percent']:+.1f} %, {record['time']:.1f} times the time)"
            for record in sorted(clear, key=lambda each: float(each["percent"]))
        ]
        lines.append(f"After {steps:,} steps, relative to the recipe ({of}): {', '.join(listed)}.")
    return "\n".join(f"* {line}" for line in [*lines, *RECIPE_CONCLUSIONS])


RECIPE_CONCLUSIONS = (
    "The softmax matters most. Tails of full width are the default of parnas (`model.proj_factor: null`), and so is the full "
    "softmax, which the configurations with small vocabularies have (`demo`, `own-text`, `shakespeare`).",
    "Muon pays at equal steps, but not at equal time in shapes as small as these: in the time of 1,000 steps of Muon, AdamW "
    "reaches a lower perplexity (interpolated between its trainings of 1,000 and 4,000 steps). AdamW is the default.",
    "A shorter warm-up helps short trainings alone.",
    "NorMuon was not compared further with Muon. The other changes in `benchmarks/tried_layers.py` gain less than 2 % and are "
    "not part of parnas.",
)


DESCRIPTIONS: Mapping[str, Callable[[Mapping[str, Any]], str]] = {
    "layers": describe_layers,
    "hybrid": describe_search,
    "recipe": describe_recipe,
}
"""By result: what its tables say."""


def draw_search(result: Mapping[str, Any], path: Path = PICTURE) -> None:
    """Draw perplexity against latency of the networks that the first search derived and of hand-designed ones."""
    derived, by_hand = derived_and_by_hand(result)
    first = [each for each in derived if OTHER_SEARCH not in each["variant"]]
    points = [ParetoPoint(f"derived: {each['arch']}", each["latency"], each["ppl"]) for each in first]
    points += [ParetoPoint(each["arch"], each["latency"], each["ppl"]) for each in by_hand]
    draw_pareto(points, path, "measured latency of the blocks, interleaved = 1")


def render_tables(name: str, result: Mapping[str, Any]) -> str:
    """Return the tables of a result."""
    if name != "mixers":
        return "\n\n".join(
            f"**{part.partition(chr(10))[0]}**\n{part.partition(chr(10))[2]}" for part in result["tables"]
        )
    latency = [
        {key: f"{value:.2f}" if isinstance(value, float) else value for key, value in row.items()}
        for row in result["latency"]
    ]
    kept = [
        {key: f"{value:,}" if isinstance(value, int) else value for key, value in row.items()}
        for row in result["generation_bytes"]
    ]
    return f"**Latency relative to `s`**\n\n{table(latency)}\n\n**Bytes kept in generation**\n\n{table(kept)}"


def render_shakespeare(result: Mapping[str, Any]) -> str:
    """Return the section on Tiny Shakespeare."""
    search, machine = result["search"], result["search"]["machine"]
    rows = [
        {
            "network": f"`{row['arch']}`",
            "evaluation": row["evaluation"],
            "bits per byte": f"{row['bits_per_byte']:.3f}",
            "nats per byte": f"{row['bits_per_byte'] * math.log(2):.3f}",
            "parameters": f"{row['parameters']:,}",
            "ms per segment": f"{row['latency_ms']:.1f}" if row["latency_ms"] is not None else "–",
            "seconds of training": f"{row['train_seconds']:.0f}",
        }
        for row in result["comparison"]["valid"]
    ]
    return (
        "## Tiny Shakespeare\n\nThe configuration `shakespeare`: byte by byte, the first 90 % of the text for training and the last 10 % for "
        f"validation, as in char-rnn and nanoGPT. The search took {search['seconds']:.0f} seconds and derived "
        f"`{search['derivation']['arch']}`; the networks below it are hand-designed and have about its latency. Dynamic evaluation and "
        "cache were tuned on the first 30,000 bytes of the validation split, which therefore makes them look slightly better than they are. For comparison, nanoGPT's network of "
        "10.7 million parameters reaches 1.47 nats per character in about 3 minutes of an A100, and its small one 1.88 in about 3 minutes of a processor. "
        "Measured by `parnas pipeline shakespeare --tune-eval --run runs/shakespeare` and "
        f"`python benchmarks/word_level.py runs/shakespeare`, on {machine['cores']} cores of {machine['device_name']}.\n\n"
        "![pi of each block over the steps of the search](images/shakespeare-pi.gif)\n\n"
        "![pi of each candidate as a line for each block](images/shakespeare-pi-lines.png)\n\n"
        f"{table(rows)}\n\n![loss of the networks over their training steps](images/shakespeare-curves.png)\n"
    )


def table(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    rows = list(rows)
    head = list(rows[0])
    lines = [head, ["---"] * len(head), *([str(row[key]) for key in head] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    draw_search(read_json(RESULTS / "hybrid-cpu.json"))
    write_text(PAGE, render())
