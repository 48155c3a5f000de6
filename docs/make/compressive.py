"""Write docs/compressive.md from the results of the benchmarks: `python docs/make/compressive.py`."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from performance import RESULTS, render_part

from parnas.runs.files import read_json, write_text

PAGE = Path(__file__).resolve().parents[1] / "compressive.md"
PARTS = "compressive", "compressive_search", "compressive_step"
INTRODUCTION = """# Use long memory

The layer `c` is self-attention with compressive memory (Rae et al. 2020, arXiv 1911.05507). As with `s`, attention sees
the hidden states of the last `model.mem_len` positions. Older positions are not dropped: every `model.memory.ratio` of
them are compressed into one, and the last `model.memory.cmem_len` compressed positions stay visible. A search over
`[s, c, f, i]` chooses the kind of memory for each block.

    parnas retrain configs/wikitext2-par.yaml --arch compressive-6 --run runs/long
    parnas search configs/wikitext2-par.yaml 'search.space=[s, c, f, i]' --run runs/long-search
    parnas evaluate runs/long runs/par/interleaved --analyse attention,frequency,memory

In the small networks measured below, compressive memory lowers the perplexity by less than 2 %.

## Settings

* **Functions** (`model.memory.function`) compress `ratio` positions into one:
    * `max_pool`, `mean_pool`: the maximum or mean of each feature;
    * `conv`: a convolution whose width and stride are `ratio`, initialised as the mean;
    * `dilated_conv`: the same convolution over every second position, so that its windows overlap;
    * `most_used`: keeps the positions that received the most attention. For this comparison, each query's attention to
      memory and segment is rescaled to sum to 1, without compressed memory. Otherwise the positions kept would depend on
      those kept earlier, and so on the whole text before.
* **Losses** (`model.memory.loss`) train the two convolutions. `attention` and `autoencode` train only the compression, with a
  separate optimizer and separate clipping:
    * `attention`: the mean squared difference between attention over the compressed and over the original positions
      (the paper has a norm instead of the mean square);
    * `autoencode`: the mean squared error of a decoder that reconstructs the original positions;
    * `bptt`: no additional loss; the compression learns from the gradient of the next segment's loss.
* **Distances** (`model.memory.distance`) between a query and a compressed position: `slots` counts the visible positions
  between them, as in the paper; `tokens` takes the mean distance, in tokens, to the positions that were compressed
  into it, which needs encodings for `ratio` times as many distances.
* **Groups.** Only complete groups of `ratio` positions are compressed; an incomplete group waits in memory. The result is therefore
  independent of how the text is divided into segments.
* **Lengths** may differ between training and evaluation: `--mem-len`, `--cmem-len`, `--tgt-len`, `--clamp-len N`
  (distances above N count as N) and `--same-length` (every query attends equally far back). `clamp_len` and `same_length`
  mean the same as in the code of Dai et al. and are also settings of training (`model.clamp_len`, `model.same_length`).

`tests/slow_compressive.py` implements the paper's algorithms 1 and 2 one vector at a time. The tests compare memories,
losses and gradients with it for every function, loss and kind of distance.

## Analyses

`parnas evaluate --analyse` writes tables and pictures:

* `attention`: mean attention weight per block by the age of the attended position, in six ranges of age for each of
  compressed memory, memory and segment; measured on at least 64 segments with full memory.
* `frequency`: perplexity per word by the frequency of the word in the training text, for any tokenizer. The loss of a
  word is the sum over its tokens. A line end counts as a word; unknown words count as `<unk>`.
* `memory`: perplexity with 0 to 4 times the memory length of training, the gain of each extension, and the shortest
  length beyond which memory gains less than 1 %.

The pictures compare three networks of the experiment below, each trained from the first seed:

{pictures}
## Results

`benchmarks/compressive.yaml` trains networks of three attention and three feed-forward layers on WikiText-2, in
lower-cased sentencepiece pieces. Memory has 16 positions and compressed memory 16. Perplexities are per piece on the
validation split. Percentages are relative to *plain, same span*; *2:1*, *3:1* and *4:1* mean `ratio` 2, 3 and 4.

| plain memory | `mem_len` |
| --- | --- |
| plain, same span | 32: attention sees as many positions as with compressed memory |
| plain, same reach | 64: memory reaches as far back in the text as compressed memory at 3:1 |
| plain, same span, longer training | 32, with 24 % more steps: the training takes as long as with compressed memory |
| plain, no compressed memory | 16: the same memory, without compressed memory |

{verdicts}

## Caveats

* The networks are small and were trained on 1.5 million pieces, a third of an epoch. At this size longer training gains
  far more than longer memory (*plain, same span, longer training*), so the ranking may differ for fully trained networks. In
  the paper, after long training on longer texts, `conv` with `attention` was best and gained more: perplexity 17.1 with
  compressed and 18.1 with plain memory on the test split of WikiText-103, and a perplexity about a fifth lower on rare words.
* Each network has one or two seeds. The standard deviation over two seeds is {spread} in perplexity. Trust effects that
  appear at every ratio and seed, such as the gain of `max_pool`, rather than a single row of the table.
* The test split was not read.

`python docs/make/compressive.py` writes this page from `benchmarks/results/`.

"""
PICTURES = {
    "attention": "Average attention weight by age",
    "frequency": "Perplexity by word frequency, plain and compressed memory",
    "memory": "Perplexity over the length of memory",
}


def render() -> str:
    """Return the page."""
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
    parts += [rename(render_part(name, result)) for name, result in results.items()]
    return "\n".join(parts)


def rename(part: str) -> str:
    """Replace titles in the results of the benchmarks."""
    part = re.sub(r"memory (\d+) \+ (\d+),", r"memory \1, compressed memory \2,", part)
    return part.replace("| of plain, same span ", "| time relative to plain, same span ")


def verdicts(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return each comparison with its result."""
    judges = {"compressive": judge_table, "compressive_search": judge_search, "compressive_step": judge_step}
    return [line for name, judge in judges.items() if name in results for line in judge(results[name])]


def judge_table(result: dict[str, Any]) -> Iterator[str]:
    """Yield the perplexity with compressed memory, each with its difference to plain memory in per cent."""
    lines = result["networks"]
    base = next(line for line in lines if line["memory"] == "plain, same span")
    yield f"*Plain, same span*, the reference: {describe(base)}."
    for line in lines:
        if line["memory"].startswith("plain") and line is not base:
            yield f"*{line['memory'].capitalize()}*: {describe(line)}, {compared(line)}."
    compressed = [line for line in lines if not line["memory"].startswith("plain")]
    ranked = sorted(compressed, key=lambda line: -float(line["better than plain, same span"].removesuffix(" %")))
    for title, line in (("The best", ranked[0]), ("The worst", ranked[-1])):
        yield f"{title} of {len(ranked)} variants of compressed memory, *{line['memory']}*: {describe(line)}, {compared(line)}."
    in_slots = [line for line in compressed if not line["memory"].endswith("tokens")]
    yield f"Mean perplexity of each function and loss over all ratios (number of trainings): {'; '.join(by_function(in_slots))}."
    default = next(line for line in compressed if line["memory"] == "conv, attention, 3:1")
    gains = {
        words: 100 * (1 - as_number(default[f"words {words}"]) / as_number(base[f"words {words}"]))
        for words in ("under 100", "10,000 and more")
    }
    yield (
        f"The default function and loss, `conv` with `attention`, at 3:1: {describe(default)}, {compared(default)}; "
        f"{say(gains['under 100'])} on words that occur less than 100 times in the training text, "
        f"{say(gains['10,000 and more'])} on words that occur at least 10,000 times."
    )


def by_function(lines: list[dict[str, Any]]) -> list[str]:
    """Return the mean perplexity of each function and loss, the best first, with the number of trainings."""
    groups: dict[str, list[tuple[float, int]]] = {}
    for line in lines:
        groups.setdefault(line["memory"].rpartition(", ")[0], []).append((float(line["ppl"]), line["seeds"]))
    sums = {
        name: (sum(ppl * seeds for ppl, seeds in each), sum(seeds for _, seeds in each))
        for name, each in groups.items()
    }
    ranked = sorted(sums.items(), key=lambda item: item[1][0] / item[1][1])
    return [f"{name} {total / count:.2f} ({count})" for name, (total, count) in ranked]


def judge_search(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result of a search over both kinds of memory."""
    arch, weights = result["arch"], [block["c"] for block in result["pi"]]
    yield (
        f"A search over `[s, c, f, i]` derived `{arch}` (`i` blocks do nothing) at {result['share']:.3f} of the interleaved "
        f"network's latency "
        f"(target {result['target']}), with compressed memory in {arch.count('c')} of {len(arch)} blocks. The final probability "
        f"of `c` is between {min(weights):.2f} and {max(weights):.2f} in all blocks."
    )
    trained = "; ".join(f"{line['network']} `{line['string']}` {line['ppl']:.2f}" for line in result["networks"])
    yield (
        f"Perplexity after training from scratch, {result['networks'][0]['seeds']} seeds each: {trained}. *At any cost*: selected "
        "from the same search without the cost target."
    )


def judge_step(result: dict[str, Any]) -> Iterator[str]:
    """Yield the time of a training step."""
    yield (
        f"With all functions but `most_used`, a training step with compressed memory takes at most {result['slowest']:.2f} times as "
        f"long as with plain memory of the same span."
    )
    exempt = max(
        row["of plain, same span"]
        for setting in result["results"]
        for row in setting["rows"]
        if row["memory"].startswith("most_used")
    )
    yield (
        f"With `most_used`, which needs the attention weights, a step takes at most {exempt:.2f} times as "
        "long as with plain memory of the same span."
    )


def describe(line: dict[str, Any]) -> str:
    """Return perplexity per piece and its standard deviation."""
    spread = "" if line["± sd"] == "–" else f" ± {line['± sd']}"
    return f"{line['ppl']}{spread} ({line['seeds']} seed{'s' * (line['seeds'] > 1)})"


def compared(line: dict[str, Any]) -> str:
    """Return the difference to plain memory of the same span."""
    return say(float(line["better than plain, same span"].removesuffix(" %")))


def say(gain: float) -> str:
    """Return a gain in words."""
    return f"{abs(gain):.2f} % {'worse' if gain < 0 else 'better'}"


def as_number(text: str) -> float:
    """Return a figure of the table."""
    return float(text.replace(",", ""))


if __name__ == "__main__":
    write_text(PAGE, render())
