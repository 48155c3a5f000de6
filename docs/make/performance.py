"""Write docs/performance.md from the result files of the benchmarks: `python docs/make/performance.py`."""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parnas.config.yaml_file import read_yaml
from parnas.runs.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
GPU_ROUND = "gpu_round-h100-80gb-hbm3"
PARTS = (
    "time_to_quality",
    "search_step",
    "estimators",
    "train_step",
    "choices",
    "inference",
    "data",
    "scaling",
    "cutoffs",
    "softmax",
)

INTRODUCTION = """# Speed

On two CPU cores, parnas trains the same network {transformers} times as fast as Hugging Face transformers, and a network
of the same sizes {others} times as fast as x-transformers (*train_step* below). A search step that trains one path takes {steps} training steps of the interleaved
network among attention, feed-forward and identity (*search_step*); the default trains two paths, which takes longer, and [more with convolutions](one-run.md#a-step-of-the-search).
On a GPU, little has been measured so far ([below](#on-a-gpu)).

`make bench` and `make bench-quality` make short runs of most benchmarks; `python benchmarks/NAME.py` makes the full run
of one. The variants in a table are timed in turns in one process, and the tables come from different machines, so compare
numbers within a table, not across tables.

## Goals

The goals were set before the measurements. A search step is timed with pi fixed to uniform or to the interleaved network
(*interleaved pi*), and compared with a training step of the interleaved network and with the *plain mixture*: a step in
which all candidates of all blocks run, in float32 and without the optimisations below. The goal for the plain mixture is its
speed in an earlier measurement on another machine, scaled to this machine by the speeds of matrix products. While the plain
mixture is slower than this goal, speeds relative to it look better than they are.

{goals}

## Optimisations

* **One candidate per block.** With the default estimator `uniform`, a weight step runs two paths, each on half of the rows of
  the batch (`search.gate_samples`). Every fourth step is
  followed by an architecture step, which runs two paths forward on a few rows. `single_path` runs one path and, forward
  only, one other candidate of one block. The resulting gradient of alpha has the same expectation as `straight_through`, which runs
  all candidates, but a higher variance (`tests/model/test_estimators.py`). `gdas` runs only the path; its gradient is biased.
* **Hand-written gradients** where autograd copies more than it computes: attention, with the relative shift as a view,
  and the cross-entropy of the adaptive softmax, which keeps one matrix instead of three (`parnas/model/fused.py`). The
  tests compare both gradients with those of autograd for the plain versions in `benchmarks/plain.py`.
* **Cheap dropout masks**: 16 random bits per element instead of the double that torch draws on a CPU.
* **Reused memory**: freed memory is kept instead of returned to the system, which saves page faults.
* **bf16 by autocast** if the processor supports it. The number of rows in each softmax tail is rounded up, because oneDNN
  compiles a kernel for each new shape.
* **Gradient clipping inside the optimizer** saves a pass over the parameters. On a GPU, loss and gradient norm are
  copied to the CPU only when they are logged.
* **Cached keys and values**: in inference, memory holds keys and values instead of hidden states. Encodings of distances are computed once per length.
* **Parallel encoding** of the text on all cores. Token counts and encoded text are cached until the corpus file changes.

These were no faster, and are not used:

* `torch.compile` on a CPU: slower than eager mode at these sizes, after half a minute of compilation (*choices* below,
  measured while attention and dropout still interrupted each compiled graph).
* Attention or cross-entropy computed in several smaller parts; float32 for narrow softmax clusters.
* A hand-written gradient of the feed-forward layer, in-place ReLU, sparse gradients of a tied embedding.
* `scaled_dot_product_attention` for training on a CPU: its fast path supports neither dropout nor a bias with gradient.

## On a GPU

{gpu}

Batches and sampled paths are copied from pinned memory, so that the CPU does not wait; one operation of a step makes it
wait: sampling the path of `single_path` and `gdas`. CUDA graphs and FlexAttention are not used; they have not been measured.

## How to read the tables

Unless a table names other shapes, the network has the sizes of `configs/wikitext2-par.yaml`: 6 blocks, width 128, a
vocabulary of 12,000 pieces, batch 32, segment 32, memory 16.

| table | what is measured |
| --- | --- |
| time_to_quality | seconds from the start of a command with an empty cache to a validation of at most 1.488 bits per byte, the result of an earlier TensorFlow implementation; *s of command*: duration of the whole command |
| search_step | one step of a search with each estimator, with pi fixed to uniform or to the interleaved path; *training*: a step of the interleaved network; *baseline*: the plain mixture; *over* means divided by |
| estimators | searches of about the same time; bits per byte of the most probable network (*argmax*) and of the mixture of all candidates by pi, with the shared weights, one seed |
| train_step | the same token ids and adaptive softmax, and networks of the same sizes, in three libraries (that of x-transformers has another attention); *share of peak*: FLOP/s of the model relative to one large matrix product; *loss difference*: parnas minus transformers with equal weights, in nats per token, without sign |
| choices | a training step as built and with one optimisation removed, and with `torch.compile` (*blocks compiled*); a ratio above 1 means that the step as built is faster; *in turns*: the variants alternate in one process; *in processes*: each variant has its own process |
| inference | latency of scoring one segment with full memory |
| data | encoding speed; memory of `parnas data`; median and largest time from the start of a command to its first training step (or the end of `--help`) |
| scaling | time and memory of a step as one shape grows; an exponent p means that doubling the shape costs 2^p times as much |
| cutoffs | seconds to find the cutoffs of an adaptive softmax for the vocabulary of WikiText-103 |
| softmax | perplexity and CPU time of trainings with different cutoffs |

On the CPU, *search_step*, *time_to_quality* and *estimators* were measured with one path in each step of `uniform`
(`search.gate_samples: 1`).

`python docs/make/performance.py` writes this page from `benchmarks/results/`.
"""
TITLES = {
    "| situation ": "| pi ",
    "| fast enough ": "| reached ",
    "| near enough ": "| reached ",
    "choice taken back": "step",
    "over as built": "time relative to as built",
    "clipping in a pass of its own ": "clipping in a separate pass   ",
    "rows of the tails as they come": "tail rows not rounded up      ",
    "freed memory given back": "freed memory returned  ",
    "parnas' speed is": "parnas is x times as fast",
    "| s     | largest ": "| s, median | s, largest ",
    "multiply-adds of full": "multiply-adds relative to the full softmax",
    "Goals of uniform": "Goals of the estimator uniform",
    "seconds_exponent": "exponent of time",
    "memory_exponent": "exponent of memory",
    "by its softmax": "with different softmax layers",
}
"""Titles in the results of the benchmarks, with their replacements on the page."""


def render() -> str:
    """Return the page."""
    results = {name: read_json(path) for name in PARTS if (path := RESULTS / f"{name}-cpu.json").is_file()}
    parts = [INTRODUCTION.format(goals=render_goals("speed"), gpu=render_gpu(), **ratios(results))]
    parts += [rename(render_part(name, result)) for name, result in results.items()]
    return "\n".join(parts)


def render_gpu() -> str:
    """Return the results of a GPU: speed of training, latency of layers, search steps, and trainings of equal time."""
    result, profile = read_json(RESULTS / f"{GPU_ROUND}.json"), read_json(RESULTS / "equal_time_gpu_profile.json")
    eager, compiled = (
        next(found for found in result["parts"][part].values() if "tokens_per_second" in found)
        for part in ("training", "training-compiled")
    )
    times = [profile[mode]["layers"] for mode in ("inference", "training")]
    layers = [layer for layer in times[0] if layer != "i"]
    rows = read_rows(RESULTS / "equal_time_gpu.csv")
    minutes = read_yaml(
        (ROOT / "benchmarks" / "equal_time_gpu.yaml").read_text(encoding="utf-8"), "equal_time_gpu.yaml"
    )
    return f"""Measured on one {result["machine"]["device_name"]} with torch {result["machine"]["versions"]["torch"]}. Losses and gradients of all layers agree with the CPU.

A training step of WikiText-103 base (NVIDIA's shapes, {eager["tgt_len"]} tokens in {eager["batch_size"]} rows) runs at {eager["tokens_per_second"]:,.0f} tokens/s, {eager["share_of_rate"]:.0%} of the rate of large
matrix products: most of the time is the overhead of many small operations. `runtime.compile` reached {compiled["tokens_per_second"]:,.0f} tokens/s, since attention and dropout
interrupted each compiled graph at that time. Now each network is one graph, which has not been measured on a GPU.

Milliseconds of a layer in bf16, {profile["shapes"]["batch_size"]} rows of {profile["shapes"]["tgt_len"]} tokens with {profile["shapes"]["mem_len"]} positions of memory, width {profile["shapes"]["d_model"]} (`benchmarks/equal_time.py --plan equal_time_gpu --profile`):

| | {" | ".join(f"`{layer}`" for layer in layers)} |
| --- |{" --- |" * len(layers)}
| inference | {" | ".join(f"{times[0][layer]['median_ms']:.2f}" for layer in layers)} |
| training step | {" | ".join(f"{times[1][layer]['median_ms']:.2f}" for layer in layers)} |

Hand-designed networks in these shapes, each trained for {minutes["equal_time_gpu"]["minutes"]:g} predicted minute on the words of WikiText-2 (one seed, perplexity
per word). This is far from convergence, and here the network with the most attention is ahead. The search of this plan has
not been run.

| network | layers | steps | perplexity |
| --- | --- | --- | --- |
{chr(10).join(f"| {row['name']} | `{row['arch']}` | {int(row['steps']):,} | {float(row['ppl']):.1f} |" for row in rows)}

Steps of a search with the sizes of `configs/wikitext2-par.yaml`, as in *search_step* below. Here `uniform` trains two paths
in each step, which is the default; *baseline* is the plain mixture.

{bold_title(next(table for table in result["tables"] if table.startswith("Whole training steps")))}"""


def read_rows(path: Path) -> list[dict[str, str]]:
    """Return the rows of a CSV file."""
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def bold_title(table: str) -> str:
    """Return a printed table with its title in bold."""
    title, _, rest = table.partition("\n")
    return f"**{title}**\n{rest}"


def ratios(results: Mapping[str, Mapping[str, Any]]) -> dict[str, str]:
    """Return the ranges of the introduction: speed relative to two libraries, and search steps in training steps."""
    records = [record for record in results["train_step"]["records"] if record["work"] == "step"]
    times = {(record["size"], record["precision"], record["network"]): record["median_seconds"] for record in records}

    def faster(network: str) -> list[float]:
        return [time / times[size, dtype, "parnas"] for (size, dtype, name), time in times.items() if name == network]

    ranges = {
        "transformers": faster("transformers"),
        "others": faster("x-transformers"),
        "steps": [goal["step over training"] for goal in results["search_step"]["goals"]],
    }
    return {name: f"{min(values):.1f} to {max(values):.1f}" for name, values in ranges.items()}


def rename(page: str) -> str:
    """Replace the titles in `TITLES`."""
    for title, replacement in TITLES.items():
        page = page.replace(title, replacement)
    return page


def render_part(name: str, result: dict[str, Any]) -> str:
    """Return the tables of a benchmark and the machine."""
    machine = result["machine"]
    device = f"{machine['cores']} cores of {machine['device_name']}, torch {machine['versions']['torch']}"
    tables = [bold_title(table) for table in result["tables"]]
    source = f"Measured by `benchmarks/{name}.py` ({result['size']} run) on {device}."
    return f"## {name}\n\n{source}\n\n" + "\n\n".join(tables) + "\n"


def render_goals(*areas: str) -> str:
    """Return a table of the goals of some areas, from benchmarks/results/goals.json; empty if there are none."""
    goals = [goal for goal in read_json(RESULTS / "goals.json") if goal["area"] in areas]
    head = ["| goal | measured | |", "| --- | --- | --- |"] if goals else []
    lines = [f"| {goal['goal']} | {goal['value']} | {mark(goal['reached'])} |" for goal in goals]
    return "\n".join([*head, *lines])


def mark(reached: bool) -> str:
    """Return a word for the result of a goal."""
    return "reached" if reached else "**missed**"


if __name__ == "__main__":
    write_text(PAGE, render())
