"""Write docs/compressive.md from the results of the benchmarks: `python docs/make_compressive.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from make_performance import RESULTS, render_part

from parnas.files import read_json, write_text

PAGE = Path(__file__).with_name("compressive.md")
PARTS = "compressive", "compressive_search", "compressive_step"
INTRODUCTION = """# Long memory

Made by `python docs/make_compressive.py` from `benchmarks/results/`: no figure here was typed.

The layer `c` is attention over compressive memory (Rae et al. 2020, arXiv 1911.05507): what leaves the last
`model.mem_len` positions is not forgotten but compressed, `model.memory.ratio` positions to one, into a queue of
`model.memory.cmem_len` positions. Attention sees compressed memory, memory and segment. `s` beside it has plain memory
of `model.mem_len`, so the letter says which a block has, and a search over `[s, c, f, i]` chooses.

    python retrain.py configs/wikitext2-par.yaml --arch compressive-6 --run runs/long
    python search.py configs/wikitext2-par.yaml 'search.space=[s, c, f, i]' --run runs/long-search
    python evaluate.py runs/long runs/par/interleaved --analyse attention,frequency,memory

## How it works here

* **What waits.** Of what a segment pushes out, whole groups of `ratio` positions are compressed; what is left over
  stays in memory, seen as it is, until its group is whole. So how a text is cut into segments does not change which
  positions are pooled together, and rows of an evaluation begin at multiples of the ratio.
* **Functions** (`model.memory.function`): `max_pool` and `mean_pool` of each feature; `conv`, a convolution with width
  and stride of the ratio, which begins as the mean; `dilated_conv`, the same over every second position, so that
  windows overlap, with zeros beyond what leaves at once; `most_used`, which keeps the positions that got most attention
  from the segment that pushed them out, in their order. For the last, attention to compressed memory is left out of
  the weights: what is kept then depends on the text a bounded way back, and an evaluation on nothing else.
* **Losses** (`model.memory.loss`) train a convolution: `attention` wants what the segment's queries see in the
  compressed positions by content to be what they saw in the memory that these were made of; `autoencode` has a decoder
  rebuild that memory; with `bptt` there is no loss besides the network's, and the compression is done inside the step
  that first attends to its result, so that the gradient reaches it. Auxiliary losses train the compression alone: all
  other gradients are stopped, and the compression has an optimizer and a clipping of its own, since one norm over both
  would let a large auxiliary loss slow the network down. Both losses are mean squares, where the paper writes norms.
* **Distances** (`model.memory.distance`): `slots` counts positions that attention sees, as in the paper, so that all
  distances are ones that the network meets at every step; `tokens` takes the mean distance of the tokens that a
  position stands for, so that attention can tell how old something is, at the price of encodings of `ratio` times as
  many distances.
* **Lengths in evaluation.** `--mem-len`, `--cmem-len`, `--tgt-len`, `--clamp-len N` (larger distances count as N) and
  `--same-length` (every query sees equally far back) may differ from training. `clamp_len` and `same_length` mean what
  they do in the code of Dai et al.; both can be trained with as well (`model.clamp_len`, `model.same_length`).
* **Checks.** `tests/slow_compressive.py` is the paper's algorithms 1 and 2, vector by vector; memories, losses and all
  gradients agree for each function, loss and kind of distance.

## What `--analyse` shows

* `attention`: average weight by age, six buckets each for compressed memory, memory and segment, of every block with
  attention, over 64 segments or more read with full memory. Later positions of a segment are seen by fewer queries.
* `frequency`: perplexity per word by how often the word occurs in the training text, for any tokenizer: a word's loss
  is the sum over its tokens, a line end counts as a word. What a tokenizer does not know is one word, `<unk>`.
* `memory`: perplexity with memory of 0 to 4 times the usual length, the share gained by each lengthening, in all and
  per position added, and the least length from which on more gains less than 1 %.

Of three runs of the table below, the first seed each, by `parnas evaluate --analyse attention,frequency,memory`:

{pictures}
## What was measured

{verdicts}

## What these figures do not say

* The networks are small and trained for 1.5 million pieces, a third of an epoch. More memory hardly helps such a
  network; longer *training* is worth far more (`plain, same span and time`), so the ranking of functions and losses
  here says little about networks that are trained to the end. In the paper, after long training on longer texts, `conv`
  with `attention` was best, and the gain larger: perplexity 17.1 against 18.1 on the test split of WikiText-103, with
  about a fifth less on rare words.
* A network was trained from one seed or two, as the table says, and the two differ by a standard deviation of {spread}
  in perplexity. What holds for one function at every ratio and seed, as with `max_pool`, is more than chance; what
  holds for one line is not.
* All choices were made on the validation split, which is what the tables show; the test split was not read.

"""
PICTURES = {
    "attention": "Average attention weight by age",
    "frequency": "Perplexity by word frequency, plain and compressed memory",
    "memory": "Perplexity over the length of memory",
}


def render() -> str:
    """The whole page."""
    results = {name: read_json(path) for name in PARTS if (path := RESULTS / f"{name}-cpu.json").is_file()}
    images = PAGE.parent / "images"
    shown = {name: images / f"compressive-{name}.png" for name in PICTURES}
    pictures = "\n".join(f"![{PICTURES[name]}](images/{path.name})\n" for name, path in shown.items() if path.is_file())
    lines = results["compressive"]["networks"] if "compressive" in results else []
    deviations = [float(line["± sd"]) for line in lines if line["± sd"] != "–"]
    spread = f"{min(deviations):.2f} to {max(deviations):.2f}" if deviations else "an unknown size"
    parts = [
        INTRODUCTION.format(
            pictures=pictures, spread=spread, verdicts="\n".join(f"* {line}" for line in verdicts(results))
        )
    ]
    parts += [render_part(name, result) for name, result in results.items()]
    return "\n".join(parts)


def verdicts(results: dict[str, dict[str, Any]]) -> list[str]:
    """Each comparison with what was measured."""
    judges = {"compressive": judge_table, "compressive_search": judge_search, "compressive_step": judge_step}
    return [line for name, judge in judges.items() if name in results for line in judge(results[name])]


def judge_table(result: dict[str, Any]) -> Iterator[str]:
    """Compressed beside plain memory, as differences in per cent."""
    lines = result["networks"]
    base = next(line for line in lines if line["memory"] == "plain, same span")
    yield f"Plain memory of the same span: {describe(base)}; what follows is compared with it."
    for line in lines:
        if line["memory"].startswith("plain") and line is not base:
            yield f"{line['memory'].capitalize()}: {describe(line)}, {compared(line)}."
    compressed = [line for line in lines if not line["memory"].startswith("plain")]
    ranked = sorted(compressed, key=lambda line: float(line["ppl"]))
    for title, line in (("The best", ranked[0]), ("The worst", ranked[-1])):
        yield f"{title} of {len(ranked)} compressed memories, {line['memory']}: {describe(line)}, {compared(line)}."
    in_slots = [line for line in compressed if not line["memory"].endswith("tokens")]
    yield f"By function and loss, over all trainings of all ratios: {', '.join(by_function(in_slots))}."
    default = next(line for line in compressed if line["memory"] == "conv, attention, 3:1")
    gains = {
        words: 100 * (1 - as_number(default[f"words {words}"]) / as_number(base[f"words {words}"]))
        for words in ("under 100", "10,000 and more")
    }
    yield (
        f"The default function and loss at 3:1: {describe(default)}, {compared(default)}; on words under 100 "
        f"occurrences {say(gains['under 100'])}, on those of 10,000 and more {say(gains['10,000 and more'])}."
    )


def by_function(lines: list[dict[str, Any]]) -> list[str]:
    """The mean perplexity of each function and loss, the best first, with the number of trainings."""
    found: dict[str, list[tuple[float, int]]] = {}
    for line in lines:
        found.setdefault(line["memory"].rpartition(", ")[0], []).append((float(line["ppl"]), line["seeds"]))
    of = {
        name: (sum(ppl * seeds for ppl, seeds in each), sum(seeds for _, seeds in each)) for name, each in found.items()
    }
    ranked = sorted(of.items(), key=lambda item: item[1][0] / item[1][1])
    return [f"{name} {total / count:.2f} ({count})" for name, (total, count) in ranked]


def judge_search(result: dict[str, Any]) -> Iterator[str]:
    """What a search with both kinds of memory takes."""
    arch, weights = result["arch"], [block["c"] for block in result["pi"]]
    yield (
        f"A search over `[s, c, f, i]` derived `{arch}` at {result['share']:.3f} of the interleaved network's latency "
        f"(target {result['target']}), with compressed memory in {arch.count('c')} of {len(arch)} blocks; pi of `c` is "
        f"between {min(weights):.2f} and {max(weights):.2f}."
    )
    trained = ", ".join(f"{line['network']} `{line['string']}` {line['ppl']:.2f}" for line in result["networks"])
    yield f"Trained from scratch, {result['networks'][0]['seeds']} seeds each: {trained}."


def judge_step(result: dict[str, Any]) -> Iterator[str]:
    """The cost of a training step."""
    yield (
        f"A training step takes at most {result['slowest']:.2f} times one with plain memory of the same span (goal: "
        f"{result['goal']:g}), `most_used` aside."
    )
    exempt = max(
        row["of plain, same span"]
        for of in result["results"]
        for row in of["rows"]
        if row["memory"].startswith("most_used")
    )
    yield f"`most_used`, which needs the weights of attention: at most {exempt:.2f} times."


def describe(line: dict[str, Any]) -> str:
    """Perplexity per piece and its spread."""
    spread = "" if line["± sd"] == "–" else f" ± {line['± sd']}"
    return f"{line['ppl']}{spread} ({line['seeds']} seed{'s' * (line['seeds'] > 1)})"


def compared(line: dict[str, Any]) -> str:
    """By how much a network is better or worse than plain memory of its span."""
    return say(float(line["better than plain, same span"].removesuffix(" %")))


def say(gain: float) -> str:
    """A gain in per cent."""
    return f"{abs(gain):.2f} % {'worse' if gain < 0 else 'better'}"


def as_number(text: str) -> float:
    """A figure of the table."""
    return float(text.replace(",", ""))


if __name__ == "__main__":
    write_text(PAGE, render())
