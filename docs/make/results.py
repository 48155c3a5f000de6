"""Write docs/results.md, the results on WikiText-2 by words, from result files: `python docs/make/results.py`."""

import math
import operator
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, NamedTuple

from performance import RESULTS, render_goals
from tabulate import tabulate

from parnas.architecture import IDENTITY, LETTERS, Architecture
from parnas.config.loader import Config, load_config
from parnas.runs.files import read_json, to_json, write_text
from parnas.runs.run import PLAIN
from parnas.training.session import flatten

PAGE = Path(__file__).resolve().parents[1] / "results.md"
NAME = "wikitext2-word-cpu"
LONGER = "wikitext2-word"
CONFIGS = (NAME, LONGER, "wikitext2-word-gpu")
EQUAL_TIMES, ONE_RUN, BOTH = ("equal_time_epochs", "equal_time_words"), "one run", "dynamic + cache"
NO_RECIPE = {"train.log_every", "train.eval_every", "train.save_every"}
"""Settings that do not change the trained weights."""
STEPS = ("train.steps", "train.warmup_steps")  # after the search of one run; they depend on its share


class Published(NamedTuple):
    """A published result."""

    network: str
    source: str
    valid: float
    test: float
    parameters: str
    dynamic: bool = False


PUBLISHED = (
    Published("AWD-LSTM", "Merity et al. 2017, arXiv 1708.02182", 68.6, 65.8, "33M"),
    Published("AWD-LSTM-MoS", "Yang et al. 2018, arXiv 1711.03953", 63.9, 61.5, "35M"),
    Published("AWD-LSTM-DOC", "Takase et al. 2018, arXiv 1808.10143", 60.3, 58.0, "37M"),
    Published("Mogrifier LSTM", "Melis et al. 2020, arXiv 1909.01792", 57.3, 55.1, "35M"),
    Published("AWD-LSTM, cache", "Merity et al. 2017, arXiv 1708.02182", 53.8, 52.0, "33M", dynamic=True),
    Published("AWD-LSTM, dynamic evaluation", "Krause et al. 2018, arXiv 1709.07432", 46.4, 44.3, "33M", dynamic=True),
    Published(
        "Mogrifier LSTM, dynamic evaluation", "Melis et al. 2020, arXiv 1909.01792", 40.2, 38.6, "35M", dynamic=True
    ),
)
MEASURE = """* **Perplexities are per word, as in the literature**: 33,278 cased words, no other training data, and the line end
  predicted and counted as a word (217,646 words in validation, 245,569 in test). In the *plain* protocol each word is
  scored once, with the segment and memory lengths of training.
* **The network of parnas has a pointer**, trained with it, which can copy from the last {pointer_len:,} words. The published
  networks of the first table have none. A pointer does what a continuous cache does, so compare its perplexity also with
  *AWD-LSTM, cache* in the second table.
* **Choices were made on the validation split.** The test split was read once for each evaluation in the tables."""


def render() -> str:
    """Return the page."""
    results = {name: read_json(path) for name in CONFIGS if (path := RESULTS / f"word_level-{name}.json").is_file()}
    equal_times = [found for name in EQUAL_TIMES if (found := optional(f"{name}-cpu"))]
    ablation, tuning = optional("ablation_hybrid-cpu"), optional("tuned_recipe-cpu")
    result = results[NAME]
    parts = [
        f"# Results on WikiText-2\n\n{headline(results)}\n\n{render_measure(result)}\n",
        f"    {describe_command(result)}\n",
        f"## Beside the literature\n\n{render_table(results)}",
        *(line for each in results.values() for line in render_network(each)),
        *(line for each in results.values() for line in render_by_hand(each, equal_times)),
        *render_times(results),
        *render_protocols(results),
        *(render_equal_times(equal_times) if equal_times else []),
        *(render_ablation(ablation) if ablation else []),
        *render_transfer(result),
        *(render_tuning(tuning) if tuning else []),
        *render_failures(result, equal_times, ablation),
        *render_goal_tables(results, equal_times),
        "These commands copy the results from their run folders to `benchmarks/results/` and write this page:\n",
        *(f"    python benchmarks/word_level.py runs/{name}" for name in results),
        "    python docs/make/results.py\n",
    ]
    return "\n".join(parts)


def render_measure(result: Mapping[str, Any]) -> str:
    """Return what was measured, and how it compares with the literature."""
    return MEASURE.format(pointer_len=result["runs"]["derived"]["settings"]["model"]["pointer_len"])


def describe_command(result: Mapping[str, Any]) -> str:
    """Return the command of the pipeline that trained the networks of a result."""
    by_hand = ",".join(name for name in result["runs"] if name != "derived") or '""'
    return f"parnas pipeline {result['name']} --one-run --baselines {by_hand} --tune-eval --test --run runs/{result['name']}"


def optional(name: str) -> dict[str, Any] | None:
    """Return a result file of that name if there is one."""
    path = RESULTS / f"{name}.json"
    return read_json(path) if path.is_file() else None


def headline(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the sentences with which the page begins."""
    result = results[NAME]
    derived = result["runs"]["derived"]
    text = (
        f"Within {hours(result):.1f} hours of two CPU cores, in {derived['machine']['precision']}, the search included, one "
        f"run found and trained a network of {derived['parameters'] / 1e6:.1f} million parameters with a perplexity of "
        f"{describe_reached(result)}."
    )
    if longer := results.get(LONGER):
        settings = (each["runs"]["derived"]["settings"] for each in (longer, result))
        others = [f"`{each}`" for each in differences(*settings) if not each.startswith(STEPS)]
        text += (
            f" With {' and '.join(['twice the steps', *others])}, another, of {hours(longer):.1f} hours, reached "
            f"{describe_reached(longer)}."
        )
    if earlier := since_interleaved(result["earlier"]):
        before = perplexities(earlier[0])
        was = f"{before['valid', 'derived', PLAIN]:.1f} and {before['test', 'derived', PLAIN]:.1f}"
        text += (
            f" Before pointer, subword features, convolutions and recurrences, the derived network had {was} "
            "([earlier results](earlier-results.md))."
        )
    return text


def describe_reached(result: Mapping[str, Any]) -> str:
    """Return the perplexities of the derived network, plain and, if measured, with dynamic evaluation and a cache."""
    of = perplexities(result)
    text = f"{of['valid', 'derived', PLAIN]:.1f} in validation and {of['test', 'derived', PLAIN]:.1f} in test"
    if ("test", "derived", BOTH) in of:
        tuned = f"{of['valid', 'derived', BOTH]:.1f} and {of['test', 'derived', BOTH]:.1f}"
        text += f" ({tuned} with dynamic evaluation and a cache)"
    return text


def since_interleaved(earlier: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
    """Return the last earlier result of a search among attention, feed-forward layers and identity, and all after it.

    It is the last with a retraining of the interleaved network; later searches are part of one run, without one.
    """
    with_interleaved = [index for index, each in enumerate(earlier) if "equal-cost" in each["runs"]]
    return earlier[with_interleaved[-1] :] if with_interleaved else earlier


def perplexities(result: Mapping[str, Any]) -> dict[tuple[str, str, str], float]:
    """Return perplexities per word by split, run and protocol."""
    return {
        (split, row["run"], row["evaluation"]): row["word_ppl"]
        for split, rows in result["comparison"].items()
        for row in rows
    }


def hours(result: Mapping[str, Any]) -> float:
    """Return the hours of search and training of the derived network, validation included."""
    return float(result["search"]["seconds"] + result["runs"]["derived"]["seconds"]) / 3600


def render_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the published perplexities with ours, the lowest validation perplexity first."""
    lines: list[tuple[Any, ...]] = [each[:-1] for each in PUBLISHED if not each.dynamic]
    tuned: list[tuple[Any, ...]] = [each[:-1] for each in PUBLISHED if each.dynamic]
    for name, result in results.items():
        for each in (result, *since_interleaved(result["earlier"])):
            source, of = f"`{name}`" + describe_earlier(each) * (each is not result), perplexities(each)
            parameters = {row["run"]: row["parameters"] for row in plain(each, "valid")}
            for (split, run, protocol), ppl in of.items():
                if split == "valid":
                    label = f"**parnas, {run}**" + f", {protocol}" * (protocol != PLAIN)
                    line = (label, source, ppl, of.get(("test", run, protocol)), f"{parameters[run] / 1e6:.1f}M")
                    (lines if protocol == PLAIN else tuned).append(line)
    headers = ("plain protocol", "source", "validation", "test", "parameters")
    return "\n\n".join(
        [
            table(headers, sorted(lines, key=lambda line: line[2])),
            table(("dynamic evaluation and caches", *headers[1:]), sorted(tuned, key=lambda line: line[2])) + "\n",
        ]
    )


def describe_earlier(earlier: Mapping[str, Any]) -> str:
    """Return how the network of an earlier result was searched; only those of one run have the space of their search."""
    return ", earlier one run" if earlier.get("space") else ", earlier search"


def render_network(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of the derived network, with its diagram and curves."""
    derivation = result["search"]["derivation"]
    layers = Architecture.parse(derivation["arch"]).layers
    counts = Counter(layer for layer in layers if layer != IDENTITY)
    contents = ", ".join(
        f"{count} of `{name}` ({LETTERS[name[0]].description})" for name, count in counts.most_common()
    )
    cost = derivation["cost"]
    yield f"## The network of `{result['name']}`\n"
    yield f"`{canonical(derivation['arch'])}`, from the input to the output: {contents}."
    if cost is not None:
        yield (
            f"The predicted {cost['metric']} of its blocks is {cost['share']:.3f} of that of {len(layers)} interleaved "
            f"blocks; the target was {cost['target']}."
        )
    yield f"Selected: {derivation['method']}. {describe_pi(derivation['blocks'])}\n"
    yield f"![layers of the derived network, and pi of each block](images/{result['name']}-network.png)\n"
    yield f"![pi over the steps of the search](images/{result['name']}-pi.gif)\n"
    yield f"![perplexity over the steps](images/{result['name']}-curves.png)\n"


def describe_pi(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return the most probable layers, and in how many blocks another layer was selected."""
    likeliest = "".join(max(block["pi"], key=block["pi"].__getitem__) for block in blocks)
    against = sum(block["margin"] < 0 for block in blocks)
    entropy, most = fmean(block["entropy"] for block in blocks), max(math.log(len(block["pi"])) for block in blocks)
    return (
        f"The most probable layers alone would be `{likeliest}`, but the entropy of pi is still {entropy:.2f} nats in the mean "
        f"of the blocks, where a uniform pi has {most:.2f}. In {against} of {len(blocks)} blocks the cost target and "
        "re-ranking selected another layer."
    )


def render_by_hand(result: Mapping[str, Any], equal_times: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of the derived network beside hand-designed ones at full size."""
    runs, search, of = result["runs"], result["search"], perplexities(result)
    if len(runs) == 1:
        return
    derived = runs["derived"]
    slower = search["seconds"] / search["steps"] / (derived["seconds"] / derived["steps"])
    yield f"## Beside hand-designed networks: `{result['name']}`\n"
    yield "The same recipe and the same number of steps, including those of the search; a step of the search took as long as"
    yield f"{slower:.2f} steps of training. *Latency* is that of the blocks, predicted, relative to an interleaved network with as"
    yield "many blocks as the SuperNet; *relative* is the validation perplexity of the derived network relative to the row's. Each"
    yield f"row is one training{describe_deviation(equal_times)}.\n"
    lines = []
    for name, run in runs.items():
        layers = Architecture.parse(run["arch"]).canonical().layers
        latency = sum(search["costs"]["per_layer"][layer] for layer in layers) / search["costs"]["interleaved"]
        valid, test = (of.get((split, name, PLAIN)) for split in ("valid", "test"))
        steps, share = f"0 + {run['steps']:,}", f"{100 * (of['valid', 'derived', PLAIN] / valid - 1):+.1f} %"
        if run is derived:
            steps, share = f"{search['steps']:,} + {run['steps']:,}", "–"
        lines.append((name, f"`{canonical(run['arch'])}`", f"{latency:.2f}", steps, valid, test, share))
    yield table(("network", "layers", "latency", "steps", "validation", "test", "relative"), lines) + "\n"


def describe_deviation(equal_times: Sequence[Mapping[str, Any]]) -> str:
    """Return how much the perplexity of a network differs between seeds, in the first trainings of equal time."""
    deviations = [
        100 * stdev(record["ppl_by_seed"].values()) / record["ppl"]
        for result in equal_times[:1]
        for record in result["networks"]
        if record["name"] in result["by_hand"] and record["seeds"] > 1
    ]
    if not deviations:
        return ""
    return (
        f"; in the first trainings of equal time below, the perplexity of a network has a standard deviation of\n"
        f"{fmean(deviations):.1f} % between seeds"
    )


def render_times(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the table of the times of search and training."""
    yield "## Times\n"
    lines = []
    for name, result in results.items():
        for phase, each in (("search", result["search"]), *result["runs"].items()):
            spent = f"{each['seconds'] / 3600:.2f}"
            lines.append((f"`{name}`", phase, each["steps"], spent, describe_machine(each)))
        lines.append((f"`{name}`", "**search and derived**", "", f"**{hours(result):.2f}**", ""))
    yield table(("configuration", "phase", "steps", "hours", "machine"), lines) + "\n"
    yield "Hours are wall-clock time and include validation; latencies of the layers are measured once for each machine,"
    yield "which takes about a minute more. Threads are those of the last start, since a run may be resumed with others; hours"
    yield "with different numbers of threads cannot be compared."
    if missing := [f"`{name}`" for name in CONFIGS if name not in results]:
        yield f"Not run yet: {' and '.join(missing)}."
    yield ""


def render_protocols(results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the results of other evaluation protocols."""
    of = {
        (split, f"`{name}`, {row['run']}", row["evaluation"], describe_lengths(row)): row
        for name, result in results.items()
        for split, row in other_protocols(result)
    }
    if not of:
        return
    yield "## Evaluation protocols\n"
    if any(protocol != PLAIN for _, _, protocol, _ in of):
        yield "Perplexity per word with [protocols](evaluation.md) that learn from the text they have read, and with other lengths"
    else:
        yield "Perplexity per word with other lengths"
    yield "of segments and memory, in words. Settings and lengths were chosen on the validation split, so that the"
    yield "validation figures are slightly too good:\n"
    lines: list[tuple[Any, ...]] = []
    for (split, *key), row in of.items():
        if split == "valid":
            lines.append((*key, row.get("settings", ""), row["word_ppl"], of.get(("test", *key), {}).get("word_ppl")))
    yield table(("network", "protocol", "lengths", "settings", "validation", "test"), lines) + "\n"
    if any(row["evaluation"] != PLAIN for row in of.values()):
        yield "`parnas tune-eval RUN/derived evaluation.tgt_len=N` chooses the settings, and"
        yield "`parnas evaluate RUN/derived --tuned --tgt-len N` evaluates with them.\n"


def other_protocols(result: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield split and row of the evaluations that are not plain, or that have other lengths than the training."""
    for split, rows in result["comparison"].items():
        yield from ((split, row) for row in rows if row["evaluation"] != PLAIN)
    yield from ((row["split"], row) for row in result["lengths"])


def describe_lengths(row: Mapping[str, Any]) -> str:
    """Return the lengths of segments and memory of an evaluation."""
    kinds = {"tgt_len": "segments", "mem_len": "memory", "cmem_len": "compressed memory", "pointer_len": "pointer"}
    return ", ".join(f"{kind} {row[key]:,}" for key, kind in kinds.items() if row.get(key))


def render_equal_times(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the section of trainings of equal time, in which the search has to pay for itself."""
    yield "## Trainings of equal time\n"
    yield "All trainings of a table take the same time, the search included, as predicted for an idle core from a profile of"
    yield "one machine. *Steps* are those of search and training; *latency* is that of the blocks, measured, relative to an"
    yield "interleaved network with as many blocks as the SuperNet; *relative* is the perplexity of the one run relative to the"
    yield "row's, paired by seed, with a 95 % interval. In the trainings of 7 minutes, space, share of the search and initial"
    yield "values were chosen by validation from these same seeds, so that the figures of *one run* may be slightly too good. Recipe"
    yield "and sizes are in `benchmarks/PLAN.yaml`, and `python benchmarks/equal_time.py --plan PLAN` measures them.\n"
    for result in results:
        yield f"Trainings of {describe_time(result)} (`PLAN` {result['benchmark']}):\n"
        yield render_equal_time(result)


def describe_time(result: Mapping[str, Any]) -> str:
    """Return the time and the text of trainings of equal time."""
    text = f" on {100 * result['text']:g} % of the training text, whose vocabulary is smaller"
    return f"{result['minutes']:g} minutes" + text * (result["text"] < 1)


def render_equal_time(result: Mapping[str, Any]) -> str:
    """Return the table of trainings of equal time."""
    lines = []
    for record in result["networks"]:
        archs = ", ".join(f"`{canonical(arch)}`" for arch in record["archs"])
        lines.append(
            (
                record["name"],
                archs,
                record["seeds"],
                f"{record.get('measured_latency', record['latency']):.2f}",
                f"{record['search_steps']:,.0f} + {record['steps']:,.0f}",
                record["ppl"],
                record.get("test"),
                relative(record),
                relative(record.get("test_difference", {})),
            )
        )
    headers = ("network", "layers", "seeds", "latency", "steps", "validation", "test", "relative", "in test")
    return table(headers, lines) + "\n"


def relative(record: Mapping[str, Any]) -> str:
    """Return a difference with its interval."""
    if "percent" not in record:
        return "–"
    interval = f" ({record['low']:+.1f} to {record['high']:+.1f} %)" if record["p"] is not None else ""
    return f"{record['percent']:+.1f} %{interval}"


def render_ablation(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the table of what parts of the recipe are worth."""
    yield "## What each part is worth\n"
    yield "One change at a time of the recipe, with a network a quarter as large, on an eighth of the text, and as many epochs;"
    yield "`ppl` is the validation perplexity per word, mean of the seeds. Measured by `python benchmarks/ablation.py --plan"
    yield f"ablation_hybrid`, one thread each, {' and '.join(result['precisions'])}. Times are left out, since the machines were not"
    yield "equally fast. *The recipe* here is that of the configuration before four of the changes: initial values by the number of"
    yield "inputs, a pointer over 2048 positions, dropout 0.1 and the average of the last quarter. The [ablation of an earlier"
    yield "recipe](earlier-results.md#ablation-of-the-recipe) has optimizers, dropouts, averages and schedules.\n"
    keys = ("change", "source", "seeds", "ppl", "± sd", "against the recipe", "parameters")
    yield table(keys, [[change[key] for key in keys] for change in result["changes"]]) + "\n"


def render_transfer(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the results at full size in the order in which the recipe changed."""
    recipes = [*since_interleaved(result["earlier"]), {**result, "space": result["search"]["settings"]["space"]}]
    if len(recipes) == 1:
        return
    yield "## The changes at full size\n"
    yield "The parts of the recipe that are worth most at small size, in the configuration itself. Each row has the changes of"
    yield "the rows before. *Steps* are those after the search; *relative* is the validation perplexity relative to the row"
    yield "before. Each row is one training with the layers of its own search, so small differences may be chance:\n"
    ppl = [perplexities(each)["valid", "derived", PLAIN] for each in recipes]
    changes = ["–", *(", ".join(changes_at_full_size(*pair)) for pair in pairwise(recipes))]
    shares = ["–", *(f"{100 * (now / before - 1):+.1f} %" for before, now in pairwise(ppl))]
    lines: list[tuple[Any, ...]] = []
    for each, change, valid, share in zip(recipes, changes, ppl, shares, strict=True):
        run, test = each["runs"]["derived"], perplexities(each).get(("test", "derived", PLAIN))
        network = f"`{canonical(run['arch'])}`"
        lines.append((change, network, run["steps"], run["machine"]["precision"], valid, test, share))
    yield table(("changes", "network", "steps", "precision", "validation", "test", "relative"), lines) + "\n"


def changes_at_full_size(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings and candidates of a result that the one before did not have, the number of steps aside."""
    found = differences(*(each["runs"]["derived"]["settings"] for each in (now, before)))
    yield from (text for text in found if not text.startswith(STEPS))
    if now["space"] != before.get("space"):
        yield f"candidates {', '.join(now['space'])}"


def render_tuning(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what `parnas tune` gains on the recipe."""
    trials, counts = sum(result["counts"].values()), result["counts"]
    yield "## Tuned settings\n"
    yield f"`parnas tune` had {trials} trials of `{canonical(result['arch'])}`, of the size of the ablation, with {result['steps']:,} steps each,"
    yield f"of which {counts['pruned']} ended early. The best of many trials has a low perplexity partly by chance, so its settings"
    yield "and those of the recipe were then trained from further seeds. Perplexities are per word on the validation split;"
    yield "measured by `python benchmarks/tuned_recipe.py`. The recipe is that of the configuration before it took over dropout and"
    yield "average. In the ablation above, where it is the only change, this average does not help.\n"
    keys = list(result["space"])
    seeds = list(result["ppl"]["the recipe"])
    lines = [
        (name, *(f"{settings[key]:.2g}" for key in keys), result["study"][name], *map(result["ppl"][name].get, seeds))
        for name, settings in result["settings"].items()
    ]
    yield table(("settings", *keys, "study", *(f"seed {seed}" for seed in seeds)), lines) + "\n"
    if result["difference"]:
        found = {**result["difference"], "percent": result["difference"]["mean"]}
        yield f"The perplexity with the tuned settings relative to the recipe's, paired by the further seeds, with a 95 % interval: {relative(found)}.\n"


def render_failures(
    result: Mapping[str, Any], equal_times: Sequence[Mapping[str, Any]], ablation: Mapping[str, Any] | None
) -> Iterator[str]:
    """Yield the list of what did not help."""
    lines = []
    pairs = [perplexities(each) for each in result["earlier"]]
    pairs = [of for of in pairs if {("valid", "derived", PLAIN), ("valid", "equal-cost", PLAIN)} <= of.keys()]
    if pairs:
        shares = [100 * (of["valid", "derived", PLAIN] / of["valid", "equal-cost", PLAIN] - 1) for of in pairs]
        lines.append(
            f"A search among attention, feed-forward layers and identity: relative to the interleaved network of equal "
            f"latency, the perplexity of its network was {min(shares):+.1f} to {max(shares):+.1f} % with {len(shares)} recipes."
        )
    for each in equal_times:
        of = {record["name"]: record for record in each["networks"]}
        by_hand = [of[name] for name in each["by_hand"] if "percent" in of.get(name, {})]  # that are trained
        better = [record for record in by_hand if record["ppl"] < of[ONE_RUN]["ppl"]]
        if better:
            best = min(better, key=operator.itemgetter("ppl"))
            lines.append(
                f"A search of {of[ONE_RUN]['search_steps']:,.0f} steps in trainings of {describe_time(each)}: "
                f"{len(better)} of the {len(by_hand)} hand-designed networks had a lower perplexity than the one run, whose "
                f"perplexity is {relative(best)} relative to that of the best, *{best['name']}*."
            )
    worse = [
        f"{change['change']} ({change['against the recipe']})"
        for change in (ablation["changes"] if ablation else [])
        if percent(change["against the recipe"]) >= 0
        and not change["change"].startswith("no ")  # a part that does help
    ]
    if worse:
        lines.append(f"In the ablation above: {', '.join(worse)}.")
    if lines:
        yield "## What did not help\n"
        yield "\n".join(f"* {line}" for line in lines) + "\n"


def percent(text: str) -> float:
    """Return the number at the start of a text such as `+1.2 % (no pointer)`; not a number where there is none."""
    found = re.match(r"[+-][\d.]+", text)
    return float(found[0]) if found else math.nan


def render_goal_tables(
    results: Mapping[str, Mapping[str, Any]], equal_times: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    """Yield the goals, which were set before the measurements, and what they still need."""
    goals = render_goals(*(f"WikiText-2, {name}" for name in results), "WikiText-2, equal time")
    plain_only = [f"`{name}`" for name, each in results.items() if ("valid", "derived", BOTH) not in perplexities(each)]
    missing = [f"dynamic evaluation with a cache of {' and '.join(plain_only)}"] if plain_only else []
    missing += (
        [] if equal_times else ["trainings of equal time beside the interleaved network and the best hybrid by hand"]
    )
    if goals:
        yield f"## Goals\n\nThe goals were set before the measurements.\n\n{goals}\n"
    if missing:
        yield f"There are also goals for what has not been measured yet: {'; '.join(missing)}.\n"


def recipe_of(name: str) -> dict[str, Any]:
    """Return the settings of a retraining by the present configuration."""
    return load_config(name).model_dump(mode="json", include={"data", "model", "train"})


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of a recipe that differ now, with removed options that were in use.

    An option that is missing, since it was added later, has its default.
    """
    defaults = flatten(Config().model_dump(mode="json", include=set(now)))
    then, today = flatten(before), flatten(now)
    for key in {**then, **today}:
        if key in NO_RECIPE:
            continue
        if key.startswith("train.distill.") and not (then.get("train.teachers") or today.get("train.teachers")):
            continue  # without teachers they play no part
        value, other = (settings.get(key, defaults.get(key)) for settings in (then, today))
        if value != other and (value or other):
            named = value or (value is None and key in then)
            yield f"{key} {to_json(value)}" if named else f"no {key}"


def describe_machine(run: Mapping[str, Any]) -> str:
    """Return the machine and precision of a training."""
    machine = run["machine"]
    return (
        f"{machine['threads']} thread(s) on {machine['cores']} cores of {machine['device_name']}, "
        f"{machine['precision']}, torch {machine['versions']['torch']}"
    )


def canonical(arch: str) -> str:
    """Return the architecture without identity layers."""
    return str(Architecture.parse(arch).canonical())


def plain(result: Mapping[str, Any], split: str) -> list[Mapping[str, Any]]:
    """Return the rows of the plain protocol."""
    return [row for row in result["comparison"][split] if row["evaluation"] == PLAIN]


def table(headers: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """Return a Markdown table with two decimals."""
    return tabulate([[cell(value) for value in line] for line in lines], headers, "github", disable_numparse=True)


def cell(value: object) -> str:
    """Return a value as text, a dash for `None`."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and value >= 1000 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    write_text(PAGE, render())
