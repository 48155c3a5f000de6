"""Write docs/earlier-results.md, results on WikiText-2 with earlier recipes: `python docs/make/earlier_results.py`."""

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from performance import RESULTS
from results import LONGER, STEPS, canonical, describe_machine, differences, perplexities, plain, recipe_of, table

from parnas.runs.files import read_json, write_text
from parnas.runs.run import PLAIN

PAGE = Path(__file__).resolve().parents[1] / "earlier-results.md"
WORDS, PIECES = "wikitext2-word-cpu", "wikitext2-pieces-cpu"
FORERUNNER = 1.488  # bits per byte of the earlier TensorFlow program, after 37 minutes on a GPU
WARNING = re.compile(r"(\w+) leads by ([\d.]+) only")
WARNING_NOW = r"the probability of `\1` leads by a margin of \2"
INTRODUCTION = """# Earlier results on WikiText-2

Networks that were searched and trained before the recipe of [today's results](results.md): by words, by pieces, with the
sizes of an earlier program, and the ablation of an earlier recipe.
"""


def render() -> str:
    """Return the page."""
    words, longer, pieces = (read_json(RESULTS / f"word_level-{name}.json") for name in (WORDS, LONGER, PIECES))
    parts = [
        INTRODUCTION,
        *render_earlier(words),
        *render_one_runs([words, longer]),
        *render_pieces(pieces, words),
        render_forerunner(read_json(RESULTS / "wikitext2-par.json")),
        render_ablation(read_json(RESULTS / "ablation-cpu.json")),
    ]
    return "\n".join(parts)


def render_earlier(result: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of networks by words that were trained with earlier recipes, best recipe last."""
    yield "## Words: a search among attention, feed-forward layers and identity\n"
    yield "A search of 9,000 steps, then trainings from scratch: of the derived network, the better of two finalists, and of"
    yield "the interleaved network of equal predicted latency (*equal-cost*). Rows with one recipe have the same steps:\n"
    now = recipe_of(result["name"])
    lines: list[tuple[Any, ...]] = []
    shares: list[str] = []
    for each in result["earlier"]:
        if "equal-cost" not in each["runs"]:
            continue
        recipe = ", ".join(differences(next(iter(each["runs"].values()))["settings"], now)) or "none"
        ppl = perplexities(each)
        for name, run in sorted(each["runs"].items()):
            reached = (ppl.get((split, name, PLAIN)) for split in ("valid", "test"))
            lines.append((recipe, name, f"`{canonical(run['arch'])}`", *reached))
        if "derived" in each["runs"]:
            own, other = (ppl["valid", run, PLAIN] for run in ("derived", "equal-cost"))
            shares.append(f"{100 * (own / other - 1):+.1f} %")
    headers = ("differences from the recipe of today", "network", "architecture", "validation", "test")
    yield table(headers, lines) + "\n"
    if any("model.locked_dropout" in line[0] for line in lines):
        yield "`model.locked_dropout`, a removed option, drew one dropout mask for all positions of a segment.\n"
    yield "Validation perplexity of the derived network relative to the interleaved network of equal cost, one value per"
    yield f"recipe in the order of the table: {', '.join(shares)}.\n"


def render_one_runs(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the section of earlier one-run trainings by words, whose searches are part of the training."""
    yield "## Words: earlier one-run trainings\n"
    yield "The search is part of the training, as today, with the same number of steps in all:\n"
    lines = []
    for result in results:
        now = recipe_of(result["name"])
        for each in result["earlier"]:
            if "equal-cost" in each["runs"]:
                continue
            run, ppl = each["runs"]["derived"], perplexities(each)
            changed = ", ".join(text for text in differences(run["settings"], now) if not text.startswith(STEPS))
            about = f"`{result['name']}`", changed, ", ".join(each["space"]), f"`{canonical(run['arch'])}`"
            lines.append((*about, *(ppl.get((split, "derived", PLAIN)) for split in ("valid", "test"))))
    differing = "differences from the recipe of today"
    headers = ("configuration", differing, "candidates", "architecture", "validation", "test")
    yield table(headers, lines) + "\n"


def render_pieces(result: Mapping[str, Any], words: Mapping[str, Any]) -> Iterator[str]:
    """Yield the section of the network that was trained on cased sentencepiece pieces."""
    (run,), (valid,), (test,) = result["runs"].values(), plain(result, "valid"), plain(result, "test")
    yield f"## `{PIECES}`: cased sentencepiece pieces\n"
    yield f"The network `{canonical(run['arch'])}`, which the search by words derived, trained on pieces for"
    yield f"{run['steps']:,} steps: perplexity per word {valid['word_ppl']:.2f} in validation and {test['word_ppl']:.2f} in test,"
    yield f"{run['parameters']:,} parameters, {run['seconds'] / 3600:.2f} hours with {describe_machine(run)}.\n"
    yield f"{describe_same_architecture(result, words)}\n"
    yield f"![validation perplexity over the steps](images/{PIECES}-curves.png)\n"


def describe_same_architecture(result: Mapping[str, Any], searched: Mapping[str, Any]) -> str:
    """Return the result relative to the same architecture and recipe with the tokens of its search."""
    own = result["runs"]["derived"]
    alike = [
        each
        for each in (searched, *searched["earlier"])
        if canonical(each["runs"]["derived"]["arch"]) == canonical(own["arch"])
        and not [
            change
            for change in differences(each["runs"]["derived"]["settings"], own["settings"])
            if "data.tokenizer" not in change
        ]
    ]
    if not alike:
        return f"`{searched['name']}` was not trained with this recipe, so the effect of the tokens cannot be compared."
    ours, theirs = (
        [row["word_ppl"] for split in ("valid", "test") for row in plain(each, split) if row["run"] == "derived"]
        for each in (result, alike[0])
    )
    pairs = zip(ours, theirs, ("validation", "test"), strict=False)
    changes = " and ".join(f"{100 * (mine / other - 1):+.1f} % in {split}" for mine, other, split in pairs)
    return (
        f"Perplexity per word, relative to the same architecture trained on words with the same recipe and number of "
        f"tokens: {changes}."
    )


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
            "characters as bytes. The search below is older than two defaults: it has `search.gate_samples=1`, which is faster",
            "than the two paths of today, and `search.evolution_steps=0`.\n",
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
            "  table is a later recipe, still without pointer and subword features.",
            "* The best dropout depends on the sizes of text and network. With the whole text and the larger network of the",
            "  configurations, dropout 0.2 without label smoothing is better (table of earlier recipes above); with the small network",
            "  of this ablation it is much worse unless weights are averaged.",
            "* Only changes of the optimizer and averaged weights were tried with several learning rates; no other setting was tuned.\n",
            f"Measured by `python benchmarks/ablation.py`, one thread each, on {' and '.join(result['devices'])}.\n",
            result["tables"][0].partition("\n\n")[2].replace("keys and values apart", "separate keys, values") + "\n",
        ]
    )


if __name__ == "__main__":
    write_text(PAGE, render())
