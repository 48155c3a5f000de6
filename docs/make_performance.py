"""Write docs/performance.md from the result files of the benchmarks: `python docs/make_performance.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parnas.files import read_json, write_text

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "performance.md"
RESULTS = ROOT / "benchmarks" / "results"
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
)

INTRODUCTION = """# Speed

Made by `python docs/make_performance.py` from `benchmarks/results/`: no figure here was typed. `make bench` and
`make bench-quality` measure most of it in short form, `python benchmarks/NAME.py` one in full. Candidates take turns in
one run, so compare the ratios, not the seconds of different tables: with many networks taking turns, each finds its
data gone from the caches, and a step takes longer than in training alone. All was measured on the processor named below
each title; **nothing has been measured on a GPU yet** (`benchmarks/gpu_round.py` is ready to).

## What pays, and stayed

* **One candidate per block.** A search step runs one path. With the default, `search.estimator: uniform`, alpha learns
  from pairs of paths that are read forward only, on few rows, in every fourth step. With `single_path` one more
  candidate of one block runs forward in each step: what alpha learns from it has the same expectation as with
  `straight_through`, which runs every candidate (`tests/test_estimators.py` adds up all probes); the price is variance,
  which a running mean lowers. `gdas` leaves the probe out, and its gradient is biased: a candidate that did not run
  counts as one that changes nothing. Identity costs nothing, so at uniform pi a step is cheaper than one of training.
* **Gradients by hand** where autograd copies and fills with zeros more than it computes: attention with the relative
  shift as a view, and the cross-entropy of the adaptive softmax, which keeps one matrix instead of three
  (`parnas/model/fused.py`; `benchmarks/plain.py` has the textbook forms, and the tests compare the two).
* **Cheap dropout masks.** torch draws a double for each element on a CPU; 16 random bits are enough.
* **Freed memory is kept.** glibc gives every large tensor back to the system and takes page faults to get it again.
* **bf16 by autocast** where the processor has it, with the rows of the softmax's tails rounded up: ever new shapes make
  oneDNN compile ever new kernels.
* **Clipping inside the optimizer**, which reads the gradients anyway: no difference below, but one pass less over all
  parameters where these are many for the tokens of a step. Loss and norm are read only when logged.
* **In inference, memory holds keys and values**, so no segment projects those of the one before anew. Encodings of
  distances are made once for each length.
* **Encoding in blocks** on all cores, with sentencepiece's threads and the counting side by side; what was learnt from
  reading a corpus is remembered until the file changes.

## What did not pay, and went

* `torch.compile` on CPU: slower than eager at these sizes, after half a minute of compiling (see *choices* below).
* Attention by parts of heads, to stay in the cache: slower, since the products get smaller.
* The cross-entropy by parts of rows: slower. In float32 for narrow clusters: hardly a difference.
* A hand-written gradient for the feed-forward layer: autograd's is as fast.
* ReLU in place, and sparse gradients for a tied embedding: slower, and no difference.
* `scaled_dot_product_attention` is no candidate for training on a CPU: its fast path takes neither a bias that needs
  a gradient nor dropout, and the position term is such a bias.

## Not built, since it could not be measured

No GPU was at hand, so what pays only there is missing: token streams on the device, CUDA graphs for a whole step (only
`runtime.compile`, torch's default mode), FlexAttention. Two places of a step wait for the GPU: the number of rows in
each tail of an adaptive softmax, and the path of `single_path` and `gdas`; `soft` with a full softmax has neither.

## The goals

{verdicts}
"""


def render() -> str:
    """The whole page."""
    results = {name: read_json(path) for name in PARTS if (path := RESULTS / f"{name}-cpu.json").is_file()}
    parts = [INTRODUCTION.format(verdicts="\n".join(f"* {line}" for line in verdicts(results)))]
    parts += [render_part(name, result) for name, result in results.items()]
    return "\n".join(parts)


def render_part(name: str, result: dict[str, Any]) -> str:
    """The tables of a benchmark, under the machine that they were measured on."""
    machine = result["machine"]
    told = f"{machine['cores']} cores of {machine['device_name']}, torch {machine['versions']['torch']}"
    tables = []
    for table in result["tables"]:
        title, _, rest = table.partition("\n")
        tables.append(f"**{title}**\n{rest}")
    return f"## {name}\n\n`benchmarks/{name}.py`, {result['size']} form; {told}.\n\n" + "\n\n".join(tables) + "\n"


def verdicts(results: dict[str, dict[str, Any]]) -> list[str]:
    """Each goal with what was measured."""
    judges = {
        "search_step": judge_search_step,
        "train_step": judge_train_step,
        "time_to_quality": judge_time_to_quality,
        "data": judge_data,
    }
    return [line for name, judge in judges.items() if name in results for line in judge(results[name])]


def mark(reached: bool) -> str:
    """Whether an aim was."""
    return "reached" if reached else "**missed**"


def judge_search_step(result: dict[str, Any]) -> Iterator[str]:
    """Of the estimator that was the default, and of the baseline."""
    name = result["default_estimator"]
    for goal in result["goals"]:
        if goal["precision"] == "bf16":
            step, limit = goal["step over training"], goal["at most"]
            yield (
                f"Search step of {name}, {goal['situation']} pi, dropout {goal['dropout']}, bf16: {step:.2f} times a "
                f"training step (goal: at most {limit}, {mark(goal['near enough'])})."
            )
        if goal["precision"] == "bf16" and goal["situation"] == "uniform":
            speed, least = goal["tokens/s over baseline"], goal["at least"]
            told = mark(goal["fast enough"])
            yield f"Tokens/s of that step: {speed:.1f} times the baseline's (goal: {least:.0f}, {told})."
    baseline = result["baseline"]
    for dropout, speed in baseline["steps_per_second"].items():
        yield (
            f"The baseline itself, dropout {dropout}: {speed:.1f} steps/s (goal: {baseline['floor']:.1f}, what a plain "
            f"draft of it reached elsewhere, in proportion to the float32 product of this machine, "
            f"{mark(baseline['above_floor'][dropout])}: masks and memory do not get faster with the product). A slow "
            "baseline flatters the ratio."
        )


def judge_train_step(result: dict[str, Any]) -> Iterator[str]:
    """Beside transformers, and of the peak."""
    records = {(r["size"], r["work"], r["network"], r["precision"]): r for r in result["records"]}
    for precision, goal in (("bf16", 2.0), ("fp32", 1.4)):
        ours, theirs = (records["12 blocks", "step", name, precision] for name in ("parnas", "transformers"))
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        apart = ours["loss_difference"]
        told = (
            f"{ratio:.2f} times transformers' tokens/s (goal: {goal}, {mark(ratio >= goal)}), losses {apart:.0e} apart"
        )
        yield f"12 blocks, {precision}: {told}."
    share = records["WT103 base, 2 layers", "blocks", "parnas", "bf16"]["share_of_peak"]
    yield f"Blocks of WT103 base in bf16: {share:.0%} of the measured peak (goal: 40%, {mark(share >= 0.4)})."


def judge_time_to_quality(result: dict[str, Any]) -> Iterator[str]:
    """Of search and retraining."""
    target, goal = result["target_bits_per_byte"], result["goal_seconds"]
    for repetition in result["repetitions"]:
        for name, phase in ((name, repetition[name]) for name in ("search", "retrain")):
            took = f"{phase['reached']['seconds']:.0f} s" if phase["reached"] else "not at all"
            told = mark(repetition["within_goal"][name])
            yield (
                f"{name.capitalize()} to {target} bits per byte from a cold start: {took} (goal: {goal:.0f} s, {told}), "
                f"{phase['end']['bits_per_byte']:.4f} at the end."
            )


def judge_data(result: dict[str, Any]) -> Iterator[str]:
    """Of encoding."""
    shares = [value for key, value in result["encoding"].items() if key.startswith("share_of")]
    yield f"Encoding: {min(shares):.0%} of sentencepiece's own speed (goal: 90%, {mark(min(shares) >= 0.9)})."


if __name__ == "__main__":
    write_text(PAGE, render())
