"""Write docs/compression.md from the results of the benchmarks: `python docs/make/compression.py`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hybrids import describe_difference, render_tables
from one_run import deviation
from performance import RESULTS, render_goals

from parnas.figures.pareto import ParetoPoint, draw_pareto
from parnas.runs.files import read_json, write_text

PAGE = Path(__file__).resolve().parents[1] / "compression.md"
PICTURE = PAGE.with_name("images") / "compression.png"
PARENT, SEARCH = "parent", "search"
KINDS = "scratch", "shallower", "taught", "short", "short-taught"
"""Trainings from scratch."""
ONE_SEED = "parent, twice", "SuperNet", "taught"
"""How the names of trainings begin that are planned for one seed."""
INTRODUCTION = """# Compression of trained networks: measurements

[`parnas compress`](pretrained.md) searches for cheaper layers in a trained network, assembles a smaller one, and heals it. This page
compares the result with its parent, and with trainings from scratch, as far as they are finished.
"""
GOALS = """## Goals

{goals}

The goals were set before the measurements, but for these changes after the first ones:

* The time of the healing is that of its steps; with loading, selection and validation, *{child}* takes {healing:.1%} of the
  parent's time. The time of the scores is that of the scores alone; with the selection and the validation at its end, and
  scaled in the same way, it would be {selection:.1%}.
* The loss with the weights of the search is judged as the score of the ranking, since it ranks better than pi.
* The goal of *short-taught* was added when *taught* was behind its own.

A goal counts as reached by the mean; the interval may include a miss. The healing was tuned with the target {target} and the
seeds 1 and 2. The test perplexity of *{child}* relative to its parent is {by_seed} for the seeds {seeds}.
"""
EXPERIMENT = """## The experiment

The parent is the interleaved network of 12 blocks, width 96, trained for 10,000 steps on WikiText-2 by words (33,278 words,
adaptive softmax). *Child T* is the network that the search selects within T of the latency of the parent's layers, healed for
{healing:.0%} of the parent's steps with the parent as its teacher. For one target, *scratch T* is the same network, trained
from scratch for the time of the parent's training, which is more steps (*scratch* of `parnas compress` has as many steps as the
parent); *taught T*, for the first seed, the same with the parent as its teacher for as many steps; and *shallower T* an interleaved
network of the same cost, trained from scratch for the time of the parent's training and of everything that the compression
took. *Short T* and *short-taught T* are *scratch T* and *taught T* with as few steps as the healing of *child T*; the teacher of
all seeds is the parent of the first.

* Perplexities are per word. Layers are scored and selected on the first 8,192 tokens of the validation split, so the figures
  of the test split decide.
* *Latency of the layers* is that of the slowest network of the row, without embedding and softmax, and *whole network* that with them,
  both relative to the parent's and measured in turns; the targets of the search are sums of the latencies of single layers, and so
  are *predicted* latencies.
* *Time* is processor time of one thread relative to the parent's training, with everything: loading, scores, selection,
  validation. It follows from the steps and the times of a step, which were measured in turns on one machine; that of the
  SuperNet search is as recorded.
* Trainings use bf16 where the processor is fast with it, and fp32 elsewhere (column *precision*).
* `benchmarks/compress.yaml` has the settings and was written before the first training. Some things were decided after the first
  measurements: the recipe of the healing and the steps in which a small target is reached, by trials with the target 0.5 and
  seeds 1 and 2; and that only the network within 0.5 is trained from scratch. *Taught* was planned for three seeds, and was not
  trained further when the first was far from its goal; *short* and *short-taught* were added then, after a trial of 3,000 steps.
* Run folders were not kept. For *taught*, *short-taught* and the random children, the parent of the first seed was trained again
  with the same settings, in fp32; for the random children it was also searched again.
* Besides its first weights, *child T* differs from *short-taught T* in the learning rate (0.7 of it), in its embedding and
  softmax, which keep the parent's weights, in the precision, and, for the other seeds, in the teacher.{missing}

{verdicts}

![perplexity over the latency of the layers: parent, children and trainings from scratch](images/{picture})

{tables}

Measured by `python benchmarks/compress.py`, on {cores} cores of {device}.
"""
PROBE = """## The time of a probe

A probe of a model with the sizes of GPT-2 ({parameters:.0f} million parameters, random weights), {tokens:,} tokens and {replacements}
replacements, takes {minutes:.1f} minutes in {precision} on {cores} cores of {device}. Measured by `python benchmarks/probe.py`.
"""
INCOMPLETE = """

**The trainings are not complete**: the column *seeds* says how many there are. {missing}"""
TRIED = """## What was tried

These were trials of the healing with one seed each, whose results are not stored. The teacher matters most: without it, the
network learns the text by heart when it reads it again, and healing ends far above the parent. With an adaptive softmax, the
teacher must teach rare words too, not only the frequent ones and the clusters. A weight of the teacher
(`train.distill.weight`) of 0.75 was better than 0.5, and 0.9 was worse than both. Losses between hidden states, of the last or
of all layers, made the result worse by 0.7 to 1.5 %. Embedding and softmax that keep the parent's weights make a step faster
and the result no worse with the 33,278 words here, but not with the 1,000 tokens of `parnas demo`, so `compress` keeps them
only if they have most of the parent's parameters. They also allow a higher learning rate: 0.7 of the parent's was better than
0.4, and than 1.0. A temperature of 2 was 0.2 % better, but a step took longer.

The selection matters as much. With scores in the parent alone, networks within a half of its latency were far worse than their
scores say. Scoring the candidates again in the networks within larger targets was tried in searches of three seeds: it lowers
the loss before healing by 0.04 to 0.08 nats for two of them, and changes nothing for the other. An evolutionary search with as
many evaluations did as well for one of these two.
"""


def render() -> str:
    """Return the page."""
    found = {
        name: read_json(path) for name in ("compress", "probe") if (path := RESULTS / f"{name}-cpu.json").is_file()
    }
    parts = [INTRODUCTION]
    if result := found.get("compress"):
        parts += [describe_goals(result), describe_experiment(result)]
    if result := found.get("probe"):
        sizes = result["probe"] | {"parameters": result["probe"]["parameters"] / 1e6}
        parts.append(PROBE.format(**sizes, minutes=sizes["seconds"] / 60, **describe_machine(result)))
    parts += [TRIED, "`python docs/make/compression.py` writes this page from `benchmarks/results/`.\n"]
    return "\n".join(parts)


def describe_machine(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of cores and the name of the processor of a result."""
    return {"cores": result["machine"]["cores"], "device": result["machine"]["device_name"]}


def describe_goals(result: Mapping[str, Any]) -> str:
    """Return the section of the goals, with what was changed after the first measurements."""
    of, target = {record["name"]: record for record in result["networks"]}, result["from_scratch"]
    child, search = of[f"child {target:g}"], of[SEARCH]
    rises = {seed: 100 * (ppl / of[PARENT]["test_by_seed"][seed] - 1) for seed, ppl in child["test_by_seed"].items()}
    return GOALS.format(
        goals=render_goals("trained models"),
        child=child["name"],
        healing=child["total"],
        selection=(search["total"] - search["training"]) * 8 * result["blocks"] / result["alternatives"],
        target=f"{target:g}",
        by_seed=", ".join(f"{rise:+.1f} %" for rise in rises.values()),
        seeds=", ".join(rises),
    )


def describe_experiment(result: Mapping[str, Any]) -> str:
    """Return the section of the experiment."""
    of = {record["name"]: record for record in result["networks"]}
    healing = next(record["steps"] for name, record in of.items() if name.startswith("child")) / of[PARENT]["steps"]
    return EXPERIMENT.format(
        healing=healing,
        missing=describe_missing(result),
        verdicts="\n".join(f"* {line}" for line in verdicts(result)),
        picture=PICTURE.name,
        tables=render_tables("compress", result),
        **describe_machine(result),
    )


def describe_missing(result: Mapping[str, Any]) -> str:
    """Return which trainings are missing; empty if there are none."""
    seeds = {record["name"]: record["seeds"] for record in result["networks"]}
    kinds = [f"{kind} {result['from_scratch']:g}" for kind in KINDS]
    missing = [f"*{name}*" for name in kinds if name not in seeds]
    if not missing and all(seeds[name] == seeds[PARENT] for name in seeds if not name.startswith(ONE_SEED)):
        return ""
    return INCOMPLETE.format(missing=f"There is no training yet of {', '.join(missing)}." if missing else "").rstrip()


def verdicts(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the tables say, in sentences."""
    of = {record["name"]: record for record in result["networks"]}
    differences: dict[str, dict[str, Any]] = {}
    for each in result["comparisons"]:
        differences.setdefault(each["network"], {})[each["relative_to"]] = each
    for name, others in differences.items():
        kind, _, target = name.partition(" ")
        if kind == "child":
            time = of[SEARCH]["total"] + of[name]["total"]
            split, ppl = ("test", of[name]["test"]) if of[name]["test"] else ("validation", of[name]["ppl"])
            sentence = (
                f"**{name}** ends at a {split} perplexity of {ppl:.1f}, {describe_difference(decisive(others[PARENT]))} relative to its "
                f"parent; search and healing take {time:.0%} of the time of the parent's training."
            )
            comparisons = ", ".join(
                f"{describe_difference(decisive(others[other]))} relative to *{other}*"
                for other in (f"scratch {target}", f"shallower {target}", f"short-taught {target}")
                if other in others
            )
            yield sentence + (f" It is {comparisons}." if comparisons else "")
            yield from compare_with_training(of, others, target)
        elif kind.endswith("taught"):
            ((other, difference),) = others.items()
            yield f"The same network with a teacher (*{name}*) is {describe_difference(decisive(difference))} relative to *{other}*."
    if ranking := result["ranking"]:
        taus = {(each["search"], each["score"]): each["tau"] for each in ranking["scores"]}
        other = max(tau for (search, _), tau in taus.items() if search != SEARCH)
        yield (
            f"The loss with the weights of the search ranks {ranking['networks']} random networks, each healed for "
            f"{ranking['steps']} steps, with Kendall's tau {taus[SEARCH, 'inherited']:.2f}; two seeds of the healing agree with "
            f"{ranking['reliability']:.2f}. pi ranks them with {taus[SEARCH, 'pi']:.2f}, and loss and pi together with "
            f"{taus[SEARCH, 'both']:.2f}, no better than the loss, so `derive` uses the loss alone here. A SuperNet that is trained "
            f"from scratch for the same time ranks them with {other:.2f} at best; the networks are healed from the weights of the "
            f"search in the parent, which favours it. All networks are of one parent and one search."
        )


def compare_with_training(
    of: Mapping[str, Mapping[str, Any]], others: Mapping[str, Mapping[str, Any]], target: str
) -> Iterator[str]:
    """Yield what a compression within a target gains if a shallower network, trained for long, is better.

    Args:
        of: the records of the trainings by name.
        others: differences of the child, by the name of the other training.
        target: of the child.
    """
    shallower, short = others.get(f"shallower {target}"), others.get(f"short-taught {target}")
    if not shallower or not short or decisive(shallower)["percent"] <= 0:
        return
    longer = of[f"shallower {target}"]
    yield (
        f"So within {target} a long training from scratch is better in the mean, and a compression is a shorter way to about the "
        f"same perplexity: it takes {of[SEARCH]['total'] + of[f'child {target}']['total']:.0%} of the time of the parent's training, "
        f"*scratch {target}* {of[f'scratch {target}']['total']:.0%}, and *shallower {target}* {longer['total']:.0%}, with "
        f"{longer['steps'] / of[PARENT]['steps']:.1f} times the steps. For the steps of the healing alone, the weights from the parent "
        f"lower the perplexity by {-decisive(short)['percent']:.1f} %, relative to a training from scratch with a teacher. Where "
        "longer training still helps as much as here, train a cheap network for long if you can."
    )


def decisive(difference: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a difference on the test split, or on the validation split where the test split was not read."""
    return difference["test"] or difference


def draw(result: Mapping[str, Any], path: Path = PICTURE) -> None:
    """Draw perplexity against latency of all networks."""
    points = [
        ParetoPoint(record["name"], record["latency"], record["ppl"], deviation(record))
        for record in result["networks"]
        if "latency" in record
    ]
    draw_pareto(points, path, "latency of the layers, parent = 1")


if __name__ == "__main__":
    if (COMPRESS := RESULTS / "compress-cpu.json").is_file():
        draw(read_json(COMPRESS))
    write_text(PAGE, render())
