"""Write docs/results.md, and its part of the README, from the results of the benchmarks: `docs/make_results.py`."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from make_evidence import README, fill_readme
from make_performance import RESULTS, mark
from tabulate import tabulate

from parnas.architecture import ATTENTION, Architecture
from parnas.config import load_config
from parnas.files import read_json, to_json, write_text
from parnas.run import PLAIN
from parnas.training.phases import flatten

PAGE = Path(__file__).with_name("results.md")
CONFIGS = {
    "wikitext2-word-cpu": "two CPU cores, within two hours for each phase",
    "wikitext2-word": "two CPU cores, within three hours for each phase",
    "wikitext2-word-gpu": "planned for one GPU of the H200 class, nine minutes for each phase",
    "wikitext2-pieces-cpu": "two CPU cores, by cased pieces",
}
IN_PIECES = ("wikitext2-pieces-cpu",)
"""Those whose tokens are not words, of which no word is unknown."""
SEARCHED_EARLIER = ("wikitext2-word-cpu",)
"""Those whose search is from before the recipe of the retrainings."""
GOALS = {"wikitext2-word-cpu": (110.0, 105.0), "wikitext2-word": (95.0, 91.0), "wikitext2-word-gpu": (68.6, 65.8)}
"""Perplexities in validation and test that the derived network was to reach, set before any was trained."""
NOT_RUN = "`configs/{}.yaml` has not been run.\n"


class Published(NamedTuple):
    """A figure of the literature."""

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
    Published("AWD-LSTM, dynamic evaluation", "Krause et al. 2018, arXiv 1709.07432", 46.4, 44.3, "33M", dynamic=True),
    Published(
        "Mogrifier LSTM, dynamic evaluation", "Melis et al. 2020, arXiv 1909.01792", 40.2, 38.6, "35M", dynamic=True
    ),
)
INTRODUCTION = """# Results on WikiText-2

Made by `python docs/make_results.py` from `benchmarks/results/`, which `python benchmarks/word_level.py` copied from run
folders: no figure here was typed, but for the published ones.

All 33,278 words of the training text, case kept, no other data. The line end is predicted and counted as a word
(217,646 of them in validation, 245,569 in test), so that perplexities are those of the literature. Choices were made on
the validation split; the test split was read by each network once, when it was final, so once for each recipe below, and
no choice was made on it. Plain evaluation means: the trained weights as they are, each word scored once, given the words
before it as far as memory reaches, with the lengths of training.
Each network was trained from one seed: differences as small as those between seeds in the ablation below say nothing.

    parnas pipeline wikitext2-word-cpu --finalists 2 --adapt --test --run runs/wikitext2-word-cpu
    python benchmarks/word_level.py runs/wikitext2-word-cpu
    python docs/make_results.py

One command searches, derives ([how much attention](search.md#how-much-attention) by trainings of an eighth of the
steps), trains the derived network from scratch and beside it the interleaved network of equal cost, and compares both;
stopped, it goes on where it was.
"""


def read_results() -> dict[str, dict[str, Any]]:
    """The results that there are, by configuration."""
    return {name: read_json(path) for name in CONFIGS if (path := RESULTS / f"word_level-{name}.json").is_file()}


def render_readme() -> str:
    """The README with what was reached made anew."""
    by_words = [result for name, result in read_results().items() if name not in IN_PIECES]
    told = [line for result in by_words for line in (describe_derived(result), *judge(result))]
    return fill_readme("words", told or ["Nothing has been measured yet."])


def render() -> str:
    """The whole page."""
    results = read_results()
    parts = [INTRODUCTION, "## Beside the literature\n", render_table(results)]
    for name, title in CONFIGS.items():
        parts += [f"## `{name}`: {title}\n"]
        parts += render_pipeline(results[name], results) if name in results else [NOT_RUN.format(name)]
    path = RESULTS / "ablation-cpu.json"
    if path.is_file():
        parts += [render_ablation(read_json(path))]
    return "\n".join(parts)


def render_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Published perplexities with those of the derived networks, the lowest in validation first."""
    lines: list[tuple[Any, ...]] = [each[:-1] for each in PUBLISHED if not each.dynamic]
    adapted: list[tuple[Any, ...]] = [each[:-1] for each in PUBLISHED if each.dynamic]
    for name, result in results.items():
        tested = {(row["run"], row["evaluation"]): row["word_ppl"] for row in result["comparison"]["test"]}
        parameters = {row["run"]: row["parameters"] for row in plain(result, "valid")}
        for row in result["comparison"]["valid"]:
            run, way = row["run"], row["evaluation"]
            told = f"**parnas, {run}**" + ", in pieces" * (name in IN_PIECES) + f", {way}" * (way != PLAIN)
            line = (told, f"`{name}`", row["word_ppl"], tested.get((run, way)), parameters[run])
            (lines if way == PLAIN else adapted).append(line)
    headers = ("plain evaluation", "source", "validation", "test", "parameters")
    return "\n\n".join(
        [
            table(headers, sorted(lines, key=lambda line: line[2])),
            table(("dynamic evaluation and caches", *headers[1:]), sorted(adapted, key=lambda line: line[2])),
            "",
        ]
    )


def render_pipeline(result: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """String, table, curves, ways to evaluate and times of one pipeline; `results` are those of all."""
    name, search = result["name"], result["search"]
    other = search.get("of")  # the result that was searched, where this one was not
    yield describe_derived(result) + "\n"
    if not other:
        yield describe_pi(search["derivation"]["blocks"]) + "\n"
    changes = sorted(
        {told for run in result["runs"].values() for told in differences(run["settings"], recipe_of(name))}
    )
    if name in SEARCHED_EARLIER:
        yield "Search and finalists are from the first recipe of the table of recipes below.\n"
    if changes:
        yield f"The retrainings are from before the recipe of the configuration; they had {', '.join(changes)}.\n"
    yield from render_finalists(result["finalists"])
    tested = {row["run"]: row for row in plain(result, "test")}
    lines = []
    for row in plain(result, "valid"):
        run = result["runs"][row["run"]]
        lines.append(
            (
                row["run"],
                f"`{canonical(row['arch'])}`",
                row["word_ppl"],
                tested.get(row["run"], {}).get("word_ppl"),
                row["parameters"],
                row["multiply_adds_per_token"],
                share_of_cost(row["arch"], search["costs"]),
                row["steps"],
                row["epochs"],
                run["machine"]["threads"],
                f"{run['seconds'] / 3600:.2f}",
            )
        )
    headers = ("network", "string", "validation", "test", "parameters", "MACs per token", "cost of blocks")
    yield table((*headers, "steps", "epochs", "threads", "hours"), lines) + "\n"
    told = [*judge(result), *([describe_same_string(result, results[other])] if other else [])]
    yield "\n".join(f"* {line}" for line in told) + "\n"
    yield from render_earlier(result)
    yield f"![validation perplexity over the steps](images/{name}-curves.png)\n"
    if not other:
        yield f"![pi over the search](images/{name}-pi.gif)\n"
    yield from render_ways(result)
    times = [f"Retrainings: {'; '.join(dict.fromkeys(map(describe_machine, result['runs'].values())))}."]
    if not other:
        hours = search["seconds"] / 3600
        times = [f"Search: {search['steps']:,} steps in {hours:.2f} hours, {describe_machine(search)}.", *times]
    yield " ".join([*times, "Hours are wall clock, with validations and with whatever else the machine did."]) + "\n"


def render_earlier(result: Mapping[str, Any]) -> Iterator[str]:
    """What the same networks reached by the recipes before; nothing where there was none."""
    if not result["earlier"]:
        return
    yield "The same networks, recipe by recipe:\n"
    now = recipe_of(result["name"])
    lines: list[tuple[Any, ...]] = []
    shares: list[str] = []
    for each in [*result["earlier"], result]:
        rows = {(row["run"], split): row for split in ("valid", "test") for row in plain(each, split)}
        told = ", ".join(differences(next(iter(each["runs"].values()))["settings"], now)) or "that of the configuration"
        for run in sorted(each["runs"]):
            lines.append((told, run, *(rows.get((run, split), {}).get("word_ppl") for split in ("valid", "test"))))
        if {"derived", "equal-cost"} <= each["runs"].keys():
            own, other = (rows[run, "valid"]["word_ppl"] for run in ("derived", "equal-cost"))
            shares.append(f"{100 * (own / other - 1):+.1f} %")
    yield table(("recipe, where it differs", "network", "validation", "test"), lines) + "\n"
    if any("model.locked_dropout" in line[0] for line in lines):
        yield "`model.locked_dropout`, no option any more, drew one mask of dropout for all positions of a segment.\n"
    yield f"Derived against equal-cost in validation, recipe by recipe: {', '.join(shares)}.\n"


def recipe_of(name: str) -> dict[str, Any]:
    """The settings of a retraining by a configuration as it is."""
    return load_config(name).model_dump(mode="json", include={"data", "model", "train"})


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Settings of a recipe that are others now; options that are gone, where they were in use."""
    then, today = flatten(before), flatten(now)
    for key in {**then, **today}:
        value, other = then.get(key), today.get(key)
        if value != other and (value or other):  # an option that was not there is as good as one that was off
            yield f"{key} {to_json(value)}" if value else f"no {key}"


def describe_machine(run: Mapping[str, Any]) -> str:
    """Where and how a training ran."""
    machine = run["machine"]
    return (
        f"{machine['threads']} thread(s) on {machine['cores']} cores of {machine['device_name']}, "
        f"{machine['precision']}, torch {machine['versions']['torch']}"
    )


def describe_derived(result: Mapping[str, Any]) -> str:
    """The string that was found, how, and what its blocks cost."""
    arch, cost = result["search"]["derivation"]["arch"], describe_cost(result["search"])
    if other := result["search"].get("of"):
        return f"`{result['name']}` has not been searched: its string, `{canonical(arch)}`, is that of `{other}`."
    found = f"`{canonical(arch)}`, which is `{arch}` without identity ({cost})"
    own = [canonical(each["arch"]) for each in result["finalists"] if not each["max"]]
    if not own or own == [canonical(arch)]:
        return f"The search of `{result['name']}` derived {found}."
    return (
        f"The search of `{result['name']}` found `{own[0]}` best. {len(result['finalists'])} finalists were trained for a "
        "short time: that one, and the best of the search with fewer layers of attention than the one before; the derived "
        f"network is the one that came out ahead, {found}."
    )


def describe_same_string(result: Mapping[str, Any], searched: Mapping[str, Any]) -> str:
    """What the derived network reaches here and, by the same recipe, with the tokens that its search was made with."""
    recipe = result["runs"]["derived"]["settings"]
    alike = [
        each
        for each in (searched, *searched["earlier"])
        if not [
            told for told in differences(each["runs"]["derived"]["settings"], recipe) if "data.tokenizer" not in told
        ]
    ]
    if not alike:
        return f"`{searched['name']}` was never trained by this recipe, so that there is nothing to compare with."
    own, other = (
        [row["word_ppl"] for split in ("valid", "test") for row in plain(each, split) if row["run"] == "derived"]
        for each in (result, alike[0])
    )
    pairs = zip(own, other, ("validation", "test"), strict=False)
    told = " and ".join(f"{100 * (mine / theirs - 1):+.1f} % in {split}" for mine, theirs, split in pairs)
    return f"Per word, against the same string and recipe by `{searched['name']}`, as many tokens in training: {told}."


def describe_pi(blocks: Sequence[Mapping[str, Any]]) -> str:
    """What pi alone says, and how often budget and second look went against it."""
    likeliest = [max(block["pi"], key=block["pi"].__getitem__) for block in blocks]
    leading = [block["pi"][ATTENTION] for block, layer in zip(blocks, likeliest, strict=True) if layer == ATTENTION]
    spread = f" ({min(leading):.2f} to {max(leading):.2f})" if leading else ""
    against = sum(block["margin"] < 0 for block in blocks)
    return (
        f"pi has attention as the likeliest layer of {len(leading)} of {len(blocks)} blocks{spread}; in {against} of them "
        "the budget or a second look took another layer than the likeliest."
    )


def judge(result: Mapping[str, Any]) -> Iterator[str]:
    """What was to be reached, and what was."""
    reached = {
        row["run"]: [
            row["word_ppl"],
            *(test["word_ppl"] for test in plain(result, "test") if test["run"] == row["run"]),
        ]
        for row in plain(result, "valid")
    }
    if "derived" not in reached:
        yield "The derived network has not been trained yet."
        return
    derived = reached["derived"]
    if goals := GOALS.get(result["name"]):
        pairs = list(zip(("validation", "test"), derived, goals, strict=False))
        told = " and ".join(f"{ppl:.2f} in {split} (aim: {goal:g} at most)" for split, ppl, goal in pairs)
        yield f"Derived network: {told}, {mark(all(ppl <= goal for _, ppl, goal in pairs))}."
    for name in [each for each in reached if each != "derived"]:
        shares = [100 * (own / other - 1) for own, other in zip(derived, reached[name], strict=False)]
        told = " and ".join(
            f"{share:+.1f} % in {split}" for split, share in zip(("validation", "test"), shares, strict=False)
        )
        yield f"Against {name}, same steps and recipe: {told} (aim: lower, {mark(max(shares) < 0)})."


def canonical(arch: str) -> str:
    """A string without identity."""
    return str(Architecture.parse(arch).canonical())


def share_of_cost(arch: str, costs: Mapping[str, Any]) -> float:
    """What a string's blocks cost, by the costs of the search, as a share of its interleaved network."""
    return sum(costs["of"][layer] for layer in Architecture.parse(arch).layers) / costs["interleaved"]


def describe_cost(search: Mapping[str, Any]) -> str:
    """What the blocks cost, and what was asked for."""
    derivation, cost = search["derivation"], search["derivation"]["cost"]
    if cost is None:
        return "no target of cost"
    during = search["settings"]["cost"]["target"]
    asked = f"{during} during the search, " * (during != cost["target"])
    return (
        f"predicted cost of its blocks: {cost['share']:.3f} of the interleaved network of {len(derivation['blocks'])} "
        f"blocks, at most {cost['target']} asked for, {asked}metric {cost['metric']}"
    )


def render_finalists(finalists: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What short trainings made of the networks that the search proposed; nothing where there were none."""
    if finalists:
        yield f"What the finalists reached in {finalists[0]['steps']:,} steps, per token of the validation split:\n"
        ordered = sorted(finalists, key=lambda each: -Architecture.parse(each["arch"]).layers.count(ATTENTION))
        lines = [(f"`{canonical(each['arch'])}`", each["ppl"], each["cost"]) for each in ordered]
        yield table(("finalist", "validation", "cost of blocks"), lines) + "\n"


def plain(result: Mapping[str, Any], split: str) -> list[Mapping[str, Any]]:
    """The rows of the plain evaluation."""
    return [row for row in result["comparison"][split] if row["evaluation"] == PLAIN]


def render_ways(result: Mapping[str, Any]) -> Iterator[str]:
    """Other ways to evaluate, each in a row of its own."""
    reached = {
        split: {(row["run"], row["evaluation"]): row["word_ppl"] for row in rows}
        for split, rows in result["comparison"].items()
    }
    others = [key for key in reached["valid"] if key[1] != PLAIN]
    if others:
        lines = [(*key, reached["valid"][key], reached["test"].get(key)) for key in others]
        yield "Ways to evaluate that use the text they have read ([evaluation.md](evaluation.md)); of their settings,"
        yield "chosen on the validation split, the figures for that split are the best of many:\n"
        yield table(("network", "way", "validation", "test"), lines) + "\n"


def render_ablation(result: dict[str, Any]) -> str:
    """The table of the recipe's parts."""
    return "\n".join(
        [
            "## What each part of the recipe is worth\n",
            "Made by `python benchmarks/ablation.py`, at the budget of `benchmarks/ablation.yaml`: a small network on an",
            "eighth of the text. The recipe was trained from several seeds, whose standard deviation is what chance",
            "does; most changes from one, so that only differences of more than twice that deviation say anything. Rates",
            "were tried for the optimizers and beside the average; no change has any other setting tuned for it.\n",
            "The recipe of the table is an earlier one, with dropout locked over positions; the last change is to that of",
            "the configurations. What pays here, label smoothing, partial shuffling and an average of the last weights at a",
            "rate that does not fall (`train.average`), is an option; what does not is none: `benchmarks/tried.py` keeps",
            "what was tried. How strong such means should be does not carry over: with the whole text and a network as",
            "large as in the configurations, dropout of 0.2 without smoothing does better (the recipes above), and here it",
            "does much worse, unless weights are averaged.\n",
            f"One thread each, on {' and '.join(result['devices'])}; times are ratios on one of them.\n",
            result["tables"][0].partition("\n\n")[2] + "\n",
        ]
    )


def table(headers: Sequence[str], lines: Sequence[Sequence[Any]]) -> str:
    """A Markdown table with two digits behind the point."""
    return tabulate([[cell(value) for value in line] for line in lines], headers, "github", disable_numparse=True)


def cell(value: object) -> str:
    """A number as people read it, a dash where there is none."""
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if value.is_integer() and value >= 1000 else f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


if __name__ == "__main__":
    write_text(PAGE, render())
    write_text(README, render_readme())
