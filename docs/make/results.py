"""Write docs/results.md from the results of the benchmarks: `python docs/make/results.py`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from performance import RESULTS, render_goals
from tabulate import tabulate

from parnas.architecture import ATTENTION, Architecture
from parnas.config.loader import load_config
from parnas.runs.files import read_json, to_json, write_text
from parnas.runs.run import PLAIN
from parnas.training.session import flatten

PAGE = Path(__file__).resolve().parents[1] / "results.md"
CONFIGS = {
    "wikitext2-word-cpu": "two CPU cores, at most two hours per phase",
    "wikitext2-word": "two CPU cores, at most three hours per phase",
    "wikitext2-word-gpu": "planned for one GPU of the H200 class, nine minutes per phase",
    "wikitext2-pieces-cpu": "two CPU cores, cased sentencepiece pieces",
}
IN_PIECES = ("wikitext2-pieces-cpu",)
"""Configurations whose tokens are pieces, so no word is unknown."""
SEARCHED_EARLIER = ("wikitext2-word-cpu",)
"""Configurations whose search ran before the final recipe of the retrainings."""
FORERUNNER = 1.488  # bits per byte of the earlier TensorFlow program, after 37 minutes on a GPU
WARNING = re.compile(r"(\w+) leads by ([\d.]+) only")
WARNING_NOW = r"the probability of `\1` leads by a margin of \2"
NOT_RUN = "`configs/{}.yaml` has not been run.\n"


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
    Published("AWD-LSTM, dynamic evaluation", "Krause et al. 2018, arXiv 1709.07432", 46.4, 44.3, "33M", dynamic=True),
    Published(
        "Mogrifier LSTM, dynamic evaluation", "Melis et al. 2020, arXiv 1909.01792", 40.2, 38.6, "35M", dynamic=True
    ),
)
INTRODUCTION = """# Results on WikiText-2

With a vocabulary of words, after 1.3 hours of search and 1.7 hours of training on one CPU core, the derived network reaches a test
perplexity of about 80, and of 53 with dynamic evaluation and a cache. The interleaved network of equal cost is
ahead by less than 1 % in validation with every recipe, which is less than the spread over seeds.

* **Perplexities are per word, as in the literature**: 33,278 cased words, no other training data, and the line end
  predicted and counted as a word (217,646 words in validation, 245,569 in test). In the *plain* protocol each word is
  scored once, with the segment and memory lengths of training.
* **Choices were made on the validation split.** Each training was evaluated on the test split once, when it had ended; so were those with earlier recipes, which are listed below.
* **Each network was trained from one seed.** Differences below twice the standard deviation over seeds, which the
  [ablation](#ablation-of-the-recipe) measured on a smaller network, may be chance.

These commands gave the result of `wikitext2-word-cpu`. They may now derive another network, since the configuration has
a higher cost target and another recipe, and re-ranking now includes an evolutionary search:

    parnas pipeline wikitext2-word-cpu --finalists 2 --tune-eval --test --run runs/wikitext2-word-cpu
    python benchmarks/word_level.py runs/wikitext2-word-cpu
    python docs/make/results.py

The first command searches, selects the number of attention layers by short trainings ([the amount of
attention](how-it-works.md#the-amount-of-attention)), trains the derived network and the interleaved network of equal
cost (*equal-cost*) from scratch, and compares them. The other commands copy the results from the run folder to
`benchmarks/results/` and write this page from them.
"""


def read_results() -> dict[str, dict[str, Any]]:
    """Return the available results by configuration."""
    return {name: read_json(path) for name in CONFIGS if (path := RESULTS / f"word_level-{name}.json").is_file()}


def render() -> str:
    """Return the page."""
    results = read_results()
    parts = [INTRODUCTION, "## Comparison with the literature\n", render_table(results)]
    for name, title in CONFIGS.items():
        parts += [f"## `{name}`: {title}\n"]
        parts += render_pipeline(results[name], results) if name in results else [NOT_RUN.format(name)]
    parts += [render_forerunner(read_json(RESULTS / "wikitext2-par.json"))]
    path = RESULTS / "ablation-cpu.json"
    if path.is_file():
        parts += [render_ablation(read_json(path))]
    return "\n".join(parts)


def render_table(results: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the published perplexities with ours, the lowest validation perplexity first."""
    lines: list[tuple[Any, ...]] = [each[:-1] for each in PUBLISHED if not each.dynamic]
    tuned: list[tuple[Any, ...]] = [each[:-1] for each in PUBLISHED if each.dynamic]
    for name, result in results.items():
        tested = {(row["run"], row["evaluation"]): row["word_ppl"] for row in result["comparison"]["test"]}
        parameters = {row["run"]: row["parameters"] for row in plain(result, "valid")}
        for row in result["comparison"]["valid"]:
            run, protocol = row["run"], row["evaluation"]
            label = f"**parnas, {run}**" + ", in pieces" * (name in IN_PIECES) + f", {protocol}" * (protocol != PLAIN)
            line = (label, f"`{name}`", row["word_ppl"], tested.get((run, protocol)), parameters[run])
            (lines if protocol == PLAIN else tuned).append(line)
    headers = ("plain protocol", "source", "validation", "test", "parameters")
    return "\n\n".join(
        [
            table(headers, sorted(lines, key=lambda line: line[2])),
            table(("dynamic evaluation and caches", *headers[1:]), sorted(tuned, key=lambda line: line[2])),
            "",
        ]
    )


def render_pipeline(result: Mapping[str, Any], results: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield the section of one pipeline; `results` holds all of them."""
    name, search = result["name"], result["search"]
    other = search.get("of")  # the configuration whose architecture this one uses
    yield describe_derived(result) + "\n"
    if not other:
        yield describe_pi(search["derivation"]["blocks"]) + "\n"
    changes = sorted(
        {change for run in result["runs"].values() for change in differences(run["settings"], recipe_of(name))}
    )
    if name in SEARCHED_EARLIER:
        yield "The search and the finalists used the recipe in the first row of the table of earlier recipes below.\n"
    if changes:
        yield f"The recipe of the retrainings differs from the configuration: {', '.join(changes)}.\n"
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
    headers = ("network", "architecture", "validation", "test", "parameters", "MACs per token", "cost of blocks")
    yield table((*headers, "steps", "epochs", "threads", "hours"), lines) + "\n"
    verdicts = [*judge(result), *([describe_same_architecture(result, results[other])] if other else [])]
    yield "\n".join(f"* {line}" for line in verdicts) + "\n"
    if goals := render_goals(f"WikiText-2, {result['name']}"):
        yield goals + "\n"
    yield from render_earlier(result)
    yield f"![validation perplexity over the steps](images/{name}-curves.png)\n"
    if not other:
        yield f"![pi over the search](images/{name}-pi.gif)\n"
    yield from render_protocols(result)
    times = [f"Retrainings: {'; '.join(dict.fromkeys(map(describe_machine, result['runs'].values())))}."]
    if not other:
        hours = search["seconds"] / 3600
        times = [f"Search: {search['steps']:,} steps in {hours:.2f} hours, {describe_machine(search)}.", *times]
    yield " ".join([*times, "Hours are wall-clock time and include validation."]) + "\n"


def render_earlier(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the results of the same networks with earlier recipes."""
    if not result["earlier"]:
        return
    yield "The same networks trained with earlier recipes, by their differences from the present configuration:\n"
    now = recipe_of(result["name"])
    lines: list[tuple[Any, ...]] = []
    shares: list[str] = []
    for each in [*result["earlier"], result]:
        rows = {(row["run"], split): row for split in ("valid", "test") for row in plain(each, split)}
        recipe = ", ".join(differences(next(iter(each["runs"].values()))["settings"], now)) or "the configuration"
        for run in sorted(each["runs"]):
            lines.append((recipe, run, *(rows.get((run, split), {}).get("word_ppl") for split in ("valid", "test"))))
        if {"derived", "equal-cost"} <= each["runs"].keys():
            own, other = (rows[run, "valid"]["word_ppl"] for run in ("derived", "equal-cost"))
            shares.append(f"{100 * (own / other - 1):+.1f} %")
    yield table(("difference of the recipe", "network", "validation", "test"), lines) + "\n"
    if any("model.locked_dropout" in line[0] for line in lines):
        yield "`model.locked_dropout`, a removed option, drew one dropout mask for all positions of a segment.\n"
    yield f"Validation perplexity of the derived network relative to the interleaved network of equal cost, one value per recipe in the order of the table: {', '.join(shares)}.\n"


def recipe_of(name: str) -> dict[str, Any]:
    """Return the settings of a retraining by the present configuration."""
    return load_config(name).model_dump(mode="json", include={"data", "model", "train"})


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of a recipe that differ now, with removed options that were in use."""
    then, today = flatten(before), flatten(now)
    for key in {**then, **today}:
        if key.startswith("train.distill.") and not (then.get("train.teachers") or today.get("train.teachers")):
            continue  # without teachers they play no part
        value, other = then.get(key), today.get(key)
        if value != other and (value or other):  # a missing option equals one that is off
            yield f"{key} {to_json(value)}" if value else f"no {key}"


def describe_machine(run: Mapping[str, Any]) -> str:
    """Return the machine and precision of a training."""
    machine = run["machine"]
    return (
        f"{machine['threads']} thread(s) on {machine['cores']} cores of {machine['device_name']}, "
        f"{machine['precision']}, torch {machine['versions']['torch']}"
    )


def describe_derived(result: Mapping[str, Any]) -> str:
    """Return the derived architecture, its selection and its cost."""
    arch, cost = result["search"]["derivation"]["arch"], describe_cost(result["search"])
    if other := result["search"].get("of"):
        return f"`{result['name']}` uses the architecture that `{other}` derived, `{canonical(arch)}`."
    derived = f"`{canonical(arch)}` ({cost})"
    own = [canonical(each["arch"]) for each in result["finalists"] if not each["max"]]
    if not own or own == [canonical(arch)]:
        return f"The search of `{result['name']}` derived {derived}."
    return (
        f"The search of `{result['name']}` ranked `{own[0]}` first. {len(result['finalists'])} finalists, this network and "
        f"the best with fewer attention layers, were trained briefly. The derived network is the better finalist, {derived}."
    )


def describe_same_architecture(result: Mapping[str, Any], searched: Mapping[str, Any]) -> str:
    """Return the result relative to the same architecture and recipe with the tokens of its search."""
    recipe = result["runs"]["derived"]["settings"]
    alike = [
        each
        for each in (searched, *searched["earlier"])
        if not [
            change
            for change in differences(each["runs"]["derived"]["settings"], recipe)
            if "data.tokenizer" not in change
        ]
    ]
    if not alike:
        return f"`{searched['name']}` was not trained with this recipe, so the effect of the tokens cannot be compared."
    own, other = (
        [row["word_ppl"] for split in ("valid", "test") for row in plain(each, split) if row["run"] == "derived"]
        for each in (result, alike[0])
    )
    pairs = zip(own, other, ("validation", "test"), strict=False)
    changes = " and ".join(f"{100 * (mine / theirs - 1):+.1f} % in {split}" for mine, theirs, split in pairs)
    return (
        f"Perplexity per word, relative to the same architecture trained on words (`{searched['name']}`) with the same recipe "
        f"and number of tokens: {changes}."
    )


def describe_pi(blocks: Sequence[Mapping[str, Any]]) -> str:
    """Return how often pi prefers attention, and how often another layer was selected."""
    likeliest = [max(block["pi"], key=block["pi"].__getitem__) for block in blocks]
    leading = [block["pi"][ATTENTION] for block, layer in zip(blocks, likeliest, strict=True) if layer == ATTENTION]
    spread = f" (probability {min(leading):.2f} to {max(leading):.2f})" if leading else ""
    against = sum(block["margin"] < 0 for block in blocks)
    return (
        f"Attention is the most probable layer in {len(leading)} of {len(blocks)} blocks{spread}. In {against} blocks the "
        "most probable layer was not selected, because of the cost target or re-ranking."
    )


def judge(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the result of the derived network beside the other networks."""
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
    for name in [each for each in reached if each != "derived"]:
        shares = [100 * (own / other - 1) for own, other in zip(derived, reached[name], strict=False)]
        changes = " and ".join(
            f"{share:+.1f} % in {split}" for split, share in zip(("validation", "test"), shares, strict=False)
        )
        network = "the interleaved network of equal cost" if name == "equal-cost" else f"`{name}`"
        yield f"Perplexity relative to {network}, trained for the same steps with the same recipe: {changes}."


def canonical(arch: str) -> str:
    """Return the architecture without identity layers."""
    return str(Architecture.parse(arch).canonical())


def share_of_cost(arch: str, costs: Mapping[str, Any]) -> float:
    """Return the cost of an architecture by the costs of the search, as a share of its interleaved network."""
    return sum(costs["per_layer"][layer] for layer in Architecture.parse(arch).layers) / costs["interleaved"]


def describe_cost(search: Mapping[str, Any]) -> str:
    """Return the cost of the blocks and the target."""
    derivation, cost = search["derivation"], search["derivation"]["cost"]
    if cost is None:
        return "no cost target"
    during = search["settings"]["cost"]["target"]
    target = f"cost target {cost['target']}" + f" in the selection, {during} in the search" * (during != cost["target"])
    return (
        f"predicted {cost['metric']} of its blocks: {cost['share']:.3f} of that of {len(derivation['blocks'])} interleaved "
        f"blocks; {target}"
    )


def render_finalists(finalists: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the results of the finalists, if there were any."""
    if finalists:
        yield f"Validation perplexity per token of the finalists after {finalists[0]['steps']:,} steps:\n"
        ordered = sorted(finalists, key=lambda each: -Architecture.parse(each["arch"]).layers.count(ATTENTION))
        lines = [(f"`{canonical(each['arch'])}`", each["ppl"], each["cost"]) for each in ordered]
        yield table(("finalist", "validation", "cost of blocks"), lines) + "\n"


def plain(result: Mapping[str, Any], split: str) -> list[Mapping[str, Any]]:
    """Return the rows of the plain protocol."""
    return [row for row in result["comparison"][split] if row["evaluation"] == PLAIN]


def render_protocols(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the results of other evaluation protocols."""
    reached = {
        split: {(row["run"], row["evaluation"]): row["word_ppl"] for row in rows}
        for split, rows in result["comparison"].items()
    }
    others = [key for key in reached["valid"] if key[1] != PLAIN]
    if others:
        lines = [(*key, reached["valid"][key], reached["test"].get(key)) for key in others]
        yield "Perplexity per word with [protocols](evaluation.md) that learn from the text they have read. Their settings were"
        yield "chosen on the validation split, so the validation figures are slightly too good:\n"
        yield table(("network", "protocol", "validation", "test"), lines) + "\n"


def render_forerunner(record: Mapping[str, Any]) -> str:
    """Return the section of the search with the sizes of the earlier TensorFlow program."""
    rows, device = record["comparison"], record["device"]
    headers = ("run", "network", "architecture", "bits per byte", "ppl per token", "ppl per word", "parameters")
    headers += ("MACs per token", "ms per segment", "steps", "minutes")
    lines = [
        (
            row["run"],
            row["network"],
            f"`{row['arch']}`",
            f"{row['bits_per_byte']:.4f}",
            row["ppl"],
            row["word_ppl"],
            row["parameters"],
            round(row["multiply_adds_per_token"]),
            row["latency_ms"],
            round(row["steps"]),
            f"{row['train_seconds'] / 60:.1f}",
        )
        for row in rows
    ]
    reached = "; ".join(
        f"{name} at step {at['step']:,}" if at else f"{name} never" for name, at in record["reached"].items()
    )
    warnings = record["derivation"]["warnings"]
    return "\n".join(
        [
            "## `wikitext2-par`: the sizes of the earlier TensorFlow program\n",
            "An earlier TensorFlow implementation of this method reached a perplexity of 39.41 per lower-cased piece after 37",
            f"minutes on a GPU, which equals {FORERUNNER} bits per byte. `wikitext2-par` has the same tokenizer, batch,",
            "segment, memory, widths, cutoffs and number of blocks, and no cost target. Unlike that implementation it uses",
            "no dropout, a higher learning rate and fewer steps, predicts a token at the end of each line, and encodes unknown",
            "characters as bytes.\n",
            "    parnas search configs/wikitext2-par.yaml --run runs/par/search",
            "    parnas derive runs/par/search",
            "    parnas retrain configs/wikitext2-par.yaml --arch runs/par/search/arch.yaml --run runs/par/derived",
            "    parnas retrain configs/wikitext2-par.yaml --arch interleaved-6 --run runs/par/interleaved",
            "    parnas evaluate runs/par/search runs/par/derived runs/par/interleaved --out runs/par/comparison",
            "    python benchmarks/update_readme.py runs/par/search runs/par/comparison runs/par/derived runs/par/interleaved\n",
            f"Results on the validation split ({rows[0]['bytes']:,} bytes, {rows[0]['words']:,} words, {rows[0]['tokens']:,} "
            f"tokens), on {device['cores']} cores of {device['device_name']} in {device['precision']}:\n",
            table(headers, lines) + "\n",
            f"The first validation at or below {FORERUNNER} bits per byte: {reached}."
            + "".join(f" `parnas derive` warned: {WARNING.sub(WARNING_NOW, warning)}." for warning in warnings)
            + "\n",
            "![learning curves of the search, the derived and the interleaved network](images/wikitext2-curves.png)\n",
        ]
    )


def render_ablation(result: dict[str, Any]) -> str:
    """Return the table of the recipe's parts."""
    return "\n".join(
        [
            "## Ablation of the recipe\n",
            "Each row changes one part of the training recipe of a small network on an eighth of the text. *ppl* is the",
            "validation perplexity per word, *time* the training time relative to the unchanged recipe on the same machine.",
            "Most changes were trained from one seed: ignore differences below twice the standard deviation of the recipe.\n",
            "* Averaged weights at a constant learning rate (`train.average`), partial shuffling (`data.shuffle`) and label",
            "  smoothing help and are settings of parnas. The changes that do not help are not part of parnas; `benchmarks/tried.py` has them.",
            "* *The recipe* is an earlier one, with one dropout mask for all positions of a segment (*locked*). The last row of the",
            "  table is the present recipe.",
            "* The best dropout depends on the sizes of text and network. With the whole text and the larger network of the",
            "  configurations, dropout 0.2 without label smoothing is better (table of earlier recipes above); with the small network",
            "  of this ablation it is much worse unless weights are averaged.",
            "* Only changes of the optimizer and averaged weights were tried with several learning rates; no other setting was tuned.\n",
            f"Measured by `python benchmarks/ablation.py`, one thread each, on {' and '.join(result['devices'])}.\n",
            result["tables"][0].partition("\n\n")[2].replace("keys and values apart", "separate keys, values") + "\n",
        ]
    )


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
