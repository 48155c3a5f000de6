"""Write the headline and the table of results in README.md: `python docs/make/readme.py`."""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any, NamedTuple

from compression import decisive
from earlier_results import FORERUNNER
from hybrids import EQUAL_LATENCY, OTHER_SEARCH, best_of_latency, derived_and_by_hand, describe_difference, difference
from one_run import INTERLEAVED, ONE_RUN, SINGLE_MIXER, ranked_by_hand
from performance import RESULTS
from results import BOTH, LONGER, canonical, hours, perplexities, since_interleaved
from results import NAME as BY_WORDS

from parnas.runs.files import read_json, write_text
from parnas.runs.run import PLAIN

README = Path(__file__).resolve().parents[2] / "README.md"
HEADLINE_TARGET = "0.45"
"""Cost target of the derived network that the README names first."""
HYBRID = "attention, convolutions, feed-forward; 4,000 pieces"
WITHIN = "the same and recurrences, search within the training"
COMPRESSED = "a trained network; words"
COMPARISON = "attention, feed-forward, identity; 12,000 pieces"
TABLE = "all 63 networks of up to five such blocks"
WORDS = "words"
EARLIER = "sizes of an [earlier TensorFlow program](docs/earlier-results.md); 12,000 pieces"
"""Experiments. Perplexities of different experiments cannot be compared."""
LEAST_DIFFERENCE = 0.01  # bits per byte
SIGNIFICANT = 0.01  # p value, set before the trainings of equal time


class Row(NamedTuple):
    """A question about an experiment, with its figures and the answer in a sentence."""

    experiment: str
    question: str
    figures: str
    answer: str


def render() -> str:
    """Return the README with a new headline and a new table between their markers."""
    hybrid = result("hybrid-cpu")
    equal_time = result("equal_time-cpu")
    rows = [*hybrid_rows(hybrid), one_run_row(equal_time), *compression_rows(result("compress-cpu"))]
    rows += comparison_rows(result("comparison-cpu"))
    rows += [ranking_row(result("search_quality-cpu"))]
    words, longer = (result(f"word_level-{name}") for name in (BY_WORDS, LONGER))
    rows += [word_row(words, longer), forerunner_row(result("wikitext2-par"))]
    lines = [
        "| experiment | question | measured | answer |",
        "| --- | --- | --- | --- |",
        *(f"| {' | '.join(row)} |" for row in rows),
    ]
    text = README.read_text(encoding="utf-8")
    for name, content in {"headline": headline(hybrid, equal_time), "results": "\n".join(lines)}.items():
        begin, end = (f"<!-- {name}: {edge} -->" for edge in ("begin", "end"))
        part = f"{begin}\n{content}\n{end}"
        text = re.sub(f"{begin}.*{end}", lambda _, part=part: part, text, flags=re.DOTALL)  # type: ignore[misc]
    return text


def headline(hybrid: Mapping[str, Any], equal_time: Mapping[str, Any]) -> str:
    """Return the sentences on one derived network beside others, and on the price of a search within the training."""
    derived, by_hand = derived_and_by_hand(hybrid)
    (found,) = [each for each in derived if each["variant"].endswith(f" {HEADLINE_TARGET}")]
    best = best_of_latency(by_hand, found["latency"])
    assert best is not None
    why = (
        f"Why? Attention is the most expensive layer, and most of it can go. On WikiText-2, a search with the cost target "
        f"{HEADLINE_TARGET} derived `{found['arch']}`, with {found['arch'].count('s')} attention "
        f"layer{'s' * (found['arch'].count('s') != 1)}. Its blocks have {100 * found['latency']:.0f} % of the latency of twelve "
        f"interleaved blocks, and after the same training its perplexity is {abs(found['percent']):.1f} % "
        f"{'lower' if found['percent'] < 0 else 'higher'}. Relative to the best hand-designed network that is at most "
        f"{EQUAL_LATENCY:.0%} slower, `{best['arch']}`, it is {difference(found, best)} ([which mixer where?](docs/hybrids.md))."
    )
    return f"{wrap(why)}\n\n{wrap(describe_price(equal_time))}"


def describe_price(equal_time: Mapping[str, Any]) -> str:
    """Return the sentences on a search within the training, and what parnas is good for in view of them."""
    of = {record["name"]: record for record in equal_time["networks"]}
    price, single, best = of[ONE_RUN]["to_scratch"]["percent"], of[SINGLE_MIXER], ranked_by_hand(equal_time)[0]
    better = single["percent"] < 0 and single["p"] < SIGNIFICANT
    verdict = "significantly better" if better else f"not significantly better over {single['pairs']} seeds"
    use = "finds such networks" if better and best["percent"] < 0 else "measures how little attention is enough"
    return (
        f"A search can also be the first part of a training. In trainings of equal time it costs {price:.1f} % of perplexity "
        f"relative to a training that knows the network from the start. The result is {-of[INTERLEAVED[0]]['percent']:.1f} % "
        f"below the interleaved network, {describe_difference(single)} relative to the best network of one mixer and "
        f"feed-forward layers, `{single['archs'][0]}` ({verdict}), and {describe_difference(best)} relative to the best hand-designed network "
        f"of all, `{best['archs'][0]}` ([a search within the training](docs/one-run.md)). So parnas {use} for your text, your "
        "hardware and your cost target, and gives networks of several costs from one search; compare them with "
        "hand-designed ones."
    )


def wrap(text: str) -> str:
    """Return a text in lines of up to 120 characters; a number and its sign stay on one line."""
    lines = fill(text.replace(" %", "\u00a0%"), 120, break_on_hyphens=False, break_long_words=False)
    return lines.replace("\u00a0", " ")


def result(name: str) -> dict[str, Any]:
    """Return the recorded result of a benchmark."""
    content: dict[str, Any] = read_json(RESULTS / f"{name}.json")
    return content


def hybrid_rows(hybrid: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for what one search with gated convolutions derived within each target."""
    derived, by_hand = derived_and_by_hand(hybrid)
    base = by_hand[0]
    for record in derived:
        if OTHER_SEARCH in record["variant"]:
            continue
        target, verdict = record["variant"].rpartition(" ")[2], "Yes." if record["high"] < 0 else "No."
        if best := best_of_latency(by_hand, record["latency"]):
            verdict += f" Relative to the best hand-designed network that is at most {EQUAL_LATENCY:.0%} slower (`{best['arch']}`): {difference(record, best)}."
        yield Row(
            HYBRID,
            f"Is the network derived with cost target {target} (`{record['arch']}`) better than the interleaved network of "
            f"{len(base['arch'])} blocks?",
            f"blocks: {record['latency']:.0%} of its latency; perplexity {record['ppl']:.1f} against {base['ppl']:.1f}, {record['percent']:+.1f} % "
            f"(95 % interval {record['low']:+.1f} to {record['high']:+.1f} %, {record['seeds']} seeds)",
            verdict,
        )


def one_run_row(equal_time: Mapping[str, Any]) -> Row:
    """Return the row of one-run trainings beside networks that were trained as long without a search."""
    of = {record["name"]: record for record in equal_time["networks"]}
    ours, whole = of[ONE_RUN], of[INTERLEAVED[0]]
    best, *others = ranked_by_hand(equal_time)
    verdict = "Yes" if whole["percent"] < 0 else "No"
    verdict += (
        f". Relative to the best of {1 + len(others)} hand-designed networks, chosen afterwards (`{best['archs'][0]}`)"
    )
    return Row(
        WITHIN,
        f"Does a search within the training pay? One run of {equal_time['minutes']} minutes, search included, against networks "
        "trained for the same time without a search (times predicted for an idle core).",
        f"blocks: {ours['latency']:.0%} of the interleaved network's latency; perplexity {ours['ppl']:.1f} against "
        f"{whole['ppl']:.1f}, {describe_difference(whole)}; relative to the same networks from scratch "
        f"{describe_difference(ours['to_scratch'])} ({ours['seeds']} seeds)",
        f"{verdict}: {describe_difference(best)}{'' if best['low'] > 0 or best['high'] < 0 else ', not significant'}.",
    )


def compression_rows(compression: Mapping[str, Any]) -> Iterator[Row]:
    """Yield a row for each target of the compression of trained networks."""
    of = {record["name"]: record for record in compression["networks"]}
    differences = {(each["network"], each["relative_to"]): decisive(each) for each in compression["comparisons"]}
    parent, longer = of["parent"], differences["parent, twice the steps", "parent"]
    gain = -longer["percent"]
    for name in sorted((name for name in of if name.startswith("child ")), reverse=True):
        child, found = of[name], differences[name, "parent"]
        target = float(name.removeprefix("child "))
        time = of["search"]["total"] + child["total"]
        answer = "No." if found["low"] > 0 else "Yes." if found["high"] < 0 else "Not decided: the interval includes 0."
        answer += (
            f" It was trained for {time:.0%} more time than its parent; twice the steps lower the parent's perplexity by "
            f"{gain:.1f} % (validation, {longer['pairs']} seed{'s' * (longer['pairs'] != 1)})."
        )
        others = {
            f"scratch {target:g}": "the same network, trained from scratch for the parent's time",
            f"shallower {target:g}": "a shallower network of its latency, for the time of parent and compression",
        }
        for other, description in others.items():
            difference = differences.get((name, other))
            if difference is not None and difference["pairs"] == found["pairs"]:
                answer += f" Relative to {description}: {describe_difference(difference)}."
        yield Row(
            COMPRESSED,
            f"Does a compressed network (`parnas compress --within latency={target:g}`) predict as well as its parent, the "
            f"interleaved network of {compression['blocks']} blocks?",
            f"layers: {child['latency']:.0%} of the parent's latency, whole network: {child['whole']:.0%}; test perplexity "
            f"{child['test']:.1f} against {parent['test']:.1f}, {describe_difference(found)} ({found['pairs']} seeds); search and healing "
            f"take {time:.0%} of the parent's training time",
            answer,
        )


def comparison_rows(comparison: Mapping[str, Any]) -> Iterator[Row]:
    """Yield the rows of the search of 12 blocks with a cost target, whose networks were trained from several seeds."""
    networks = {row["network"]: row for row in comparison["networks"]}
    derived, interleaved = networks["derived"], networks["interleaved"]
    seeds = derived["seeds"]
    blocks = derived["stack, share of interleaved"]
    latency = derived["whole network, ms"] / interleaved["whole network, ms"]
    gain, interval, verdict = against(comparison, "interleaved", seeds)
    yield Row(
        COMPARISON,
        f"Is the derived network (`{derived['string']}`) cheaper than the interleaved network (`{interleaved['string']}`)?",
        f"blocks: {blocks:.0%} of its latency, whole network: {latency:.0%}; perplexity {derived['valid ppl']:.1f} against {interleaved['valid ppl']:.1f}, "
        f"{gain:+.2f} % ({interval})",
        f"{'Yes' if latency < 1 else 'No'}. Perplexity: {verdict}.",
    )
    ppl = [row["valid ppl"] for name, row in networks.items() if name.startswith("random")]
    change = 100 * (derived["valid ppl"] / median(ppl) - 1)
    # The random networks were trained from one seed.
    (worse,) = [found[1] for answer in comparison["answers"] if (found := re.search(r"than (\d+) by the seed", answer))]
    yield Row(
        COMPARISON,
        "Is the derived network better than random networks of the same cost?",
        f"perplexity {change:+.2f} % relative to the median of random networks, and lower than that of {worse} of {len(ppl)} from the same seed",
        "Yes, by a small margin." if change < 0 else "No.",
    )
    gain, interval, verdict = against(comparison, "shallower", seeds)
    yield Row(
        COMPARISON,
        "Is the derived network better than a shallower interleaved network of the same cost?",
        f"perplexity {gain:+.2f} % ({interval})",
        f"{verdict[0].upper()}{verdict[1:]}.",
    )
    gain, interval, _ = against(comparison, "interleaved, longer", seeds)
    yield Row(
        COMPARISON,
        "Is the derived network better than the interleaved network trained for the time of search and retraining together?",
        f"perplexity {gain:+.0f} % ({interval}) relative to the longer training",
        "No. All trainings are short, and more steps help more than another network." if gain > 0 else "Yes.",
    )


def against(comparison: Mapping[str, Any], name: str, seeds: int) -> tuple[float, str, str]:
    """Return the difference to a baseline in per cent, its 95 % interval, and the verdict."""
    pattern = rf"derived against {name} \(.*: ([+-][\d.]+) % perplexity, 95 % interval ([+-][\d.]+) to ([+-][\d.]+) %"
    (match,) = [found for answer in comparison["answers"] if (found := re.match(pattern, answer))]
    gain, low, high = map(float, match.groups())
    verdict = (
        f"no significant difference over {seeds} seeds"
        if low <= 0 <= high
        else "it is better"
        if high < 0
        else "it is worse"
    )
    return gain, f"95 % interval {low:+.2f} to {high:+.2f} %", verdict


def ranking_row(quality: Mapping[str, Any]) -> Row:
    """Return the row of the table of networks, each trained from scratch from several seeds."""
    ceiling = quality["ceiling"]["all"]
    (tau,) = [
        row["tau, one training"]  # as that between two seeds
        for row in quality["ranks"]
        if (row["ranked by"], row["target"]) == ("uniform: estimate", "none")
    ]
    return Row(
        TABLE,
        "Does a search rank networks in the same order as training each of them from scratch?",
        f"rank correlation (Kendall's tau) of search and trainings {tau:.2f}; of trainings from two seeds {ceiling:.2f}",
        "Almost as reliably as a second training of each network." if tau >= 0.9 * ceiling else "Only in part.",
    )


def word_row(words: Mapping[str, Any], longer: Mapping[str, Any]) -> Row:
    """Return the row of WikiText-2 by words, with the result of the configuration with twice the steps."""
    valid, test = word_figures(words)
    old_valid, old_test = word_figures(since_interleaved(words["earlier"])[0])
    cores = f"two CPU cores in {words['runs']['derived']['machine']['precision']}"
    return Row(
        WORDS,
        f"How good is a network that was searched and trained within {hours(words):.1f} hours of {cores}?",
        f"perplexity {valid:.2f} in validation, {test:.2f} in test (one seed){describe_tuned(words)}. With twice the steps, "
        f"another reached {' and '.join(f'{ppl:.2f}' for ppl in word_figures(longer))} in {hours(longer):.1f} hours"
        f"{describe_tuned(longer)}",
        f"{100 * (test / old_test - 1):+.1f} % in test relative to the derived network of an earlier recipe, which had "
        f"{old_valid:.2f} and {old_test:.2f}." + describe_by_hand(words),
    )


def word_figures(result: Mapping[str, Any]) -> list[float]:
    """Return the perplexities of the derived network in validation and test, plain protocol."""
    return [perplexities(result)[split, "derived", PLAIN] for split in ("valid", "test")]


def describe_tuned(result: Mapping[str, Any]) -> str:
    """Return the perplexities with dynamic evaluation and a cache, if they were measured."""
    of, keys = perplexities(result), [(split, "derived", BOTH) for split in ("valid", "test")]
    if not of.keys() >= {*keys}:
        return ""
    return f"; {' and '.join(f'{of[key]:.2f}' for key in keys)} with dynamic evaluation and a cache"


def describe_by_hand(words: Mapping[str, Any]) -> str:
    """Return a sentence on the hand-designed networks of the same recipe and number of steps, if there are any."""
    of = perplexities(words)
    relative = [
        f"{100 * (of['test', 'derived', PLAIN] / of['test', name, PLAIN] - 1):+.1f} % (`{canonical(run['arch'])}`)"
        for name, run in words["runs"].items()
        if name != "derived"
    ]
    text = " Relative to hand-designed networks of the same recipe and number of steps, one seed: "
    return f"{text}{', '.join(relative)}." if relative else ""


def forerunner_row(record: Mapping[str, Any]) -> Row:
    """Return the row of the search with the settings of the TensorFlow program, which has no cost target."""
    of = {row["run"]: row for row in record["comparison"]}
    derived, interleaved, search = (of[name] for name in ("derived", "interleaved", "search"))
    minutes = [f"{row['train_seconds'] / 60:.1f}" for row in (search, derived)]
    ours, theirs = derived["bits_per_byte"], interleaved["bits_per_byte"]
    return Row(
        EARLIER,
        "How good is a derived network without cost target?",
        f"{ours:.3f} bits per byte after {minutes[0]} minutes of search and {minutes[1]} of training on two cores; the interleaved "
        f"network with the same recipe {theirs:.3f}; the TensorFlow program {FORERUNNER} after 37 minutes on a GPU",
        f"{'Better' if ours < FORERUNNER else 'Worse'} than that program, because of the recipe of the training; "
        f"{'hardly better' if 0 < theirs - ours < LEAST_DIFFERENCE else 'better' if ours < theirs else 'not better'} than the interleaved network.",
    )


if __name__ == "__main__":
    write_text(README, render())
