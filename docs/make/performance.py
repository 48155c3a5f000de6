"""Write docs/performance.md from the result files of the benchmarks: `python docs/make/performance.py`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from parnas.runs.files import read_json, write_text

ROOT = Path(__file__).resolve().parents[2]
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
    "softmax",
)

INTRODUCTION = """# Speed

On two CPU cores, parnas trains the same network 1.5 to 2.4 times as fast as Hugging Face transformers (*train_step* below),
and a search step takes about as long as a training step of one network (*search_step*). **Nothing has been
measured on a GPU**; `benchmarks/gpu_round.py` is prepared for it.

`make bench` and `make bench-quality` make short runs of most benchmarks; `python benchmarks/NAME.py` makes the full run
of one. The variants in a table are timed in turns in one process, and the tables come from different machines, so compare
numbers within a table, not across tables.

## Goals

The goals were set before the measurements. A search step is timed with pi fixed to uniform or to the interleaved network
(*interleaved pi*), and compared with a training step of the interleaved network and with the *plain mixture*: a step in
which all candidates of all blocks run, in float32 and without the optimisations below. The goal for the plain mixture is its
speed in an earlier measurement on another machine, scaled to this machine by the speeds of matrix products. While the plain
mixture is slower than this goal, speeds relative to it look better than they are.

{verdicts}

## Optimisations

* **One candidate per block.** With the default estimator `uniform`, a weight step runs one path. Every fourth step is
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

* `torch.compile` on a CPU: slower than eager mode at these sizes, after half a minute of compilation (*choices* below).
* Attention or cross-entropy computed in several smaller parts; float32 for narrow softmax clusters.
* A hand-written gradient of the feed-forward layer, in-place ReLU, sparse gradients of a tied embedding.
* `scaled_dot_product_attention` for training on a CPU: its fast path supports neither dropout nor a bias with gradient.

Optimisations for GPUs are missing: token streams on the device, CUDA graphs, FlexAttention. Two operations of a step
make a GPU wait for the CPU: counting the rows of each softmax tail, and sampling the path of `single_path` and `gdas`.

## How to read the tables

Unless a table names other shapes, the network has the sizes of `configs/wikitext2-par.yaml`: 6 blocks, width 128, a
vocabulary of 12,000 pieces, batch 32, segment 32, memory 16.

| table | what is measured |
| --- | --- |
| time_to_quality | seconds from the start of a command with an empty cache to a validation of at most 1.488 bits per byte, the result of an earlier TensorFlow implementation; *s of command*: duration of the whole command |
| search_step | one step of a search with each estimator, with pi fixed to uniform or to the interleaved path; *training*: a step of the interleaved network; *baseline*: the plain mixture; *over* means divided by |
| estimators | searches of about the same time; bits per byte of the most probable network (*argmax*) and of the mixture of all candidates by pi, with the shared weights, one seed |
| train_step | the same network, token ids and adaptive softmax in three libraries; *share of peak*: FLOP/s of the model relative to one large matrix product; *loss difference*: parnas minus transformers with equal weights, in nats per token, without sign |
| choices | a training step as built and with one optimisation removed, and with `torch.compile` (*blocks compiled*); a ratio above 1 means that the step as built is faster; *in turns*: the variants alternate in one process; *in processes*: each variant has its own process |
| inference | latency of scoring one segment with full memory |
| data | encoding speed; memory of `parnas data`; median and largest time from the start of a command to its first training step (or the end of `--help`) |
| scaling | time and memory of a step as one shape grows; an exponent p means that doubling the shape costs 2^p times as much |
| cutoffs | seconds to find the cutoffs of an adaptive softmax for the vocabulary of WikiText-103 |
| softmax | perplexity and CPU time of trainings with different cutoffs |

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
    parts = [INTRODUCTION.format(verdicts="\n".join(f"* {line}" for line in verdicts(results)))]
    parts += [rename(render_part(name, result)) for name, result in results.items()]
    return "\n".join(parts)


def rename(page: str) -> str:
    """Replace the titles in `TITLES`."""
    for title, replacement in TITLES.items():
        page = page.replace(title, replacement)
    return page


def render_part(name: str, result: dict[str, Any]) -> str:
    """Return the tables of a benchmark and the machine."""
    machine = result["machine"]
    device = f"{machine['cores']} cores of {machine['device_name']}, torch {machine['versions']['torch']}"
    tables = []
    for table in result["tables"]:
        title, _, rest = table.partition("\n")
        tables.append(f"**{title}**\n{rest}")
    source = f"Measured by `benchmarks/{name}.py` ({result['size']} run) on {device}."
    return f"## {name}\n\n{source}\n\n" + "\n\n".join(tables) + "\n"


def verdicts(results: dict[str, dict[str, Any]]) -> list[str]:
    """Return each goal with its result."""
    judges = {
        "search_step": judge_search_step,
        "train_step": judge_train_step,
        "time_to_quality": judge_time_to_quality,
        "data": judge_data,
    }
    return [line for name, judge in judges.items() if name in results for line in judge(results[name])]


def mark(reached: bool) -> str:
    """Return a word for the result of a goal."""
    return "reached" if reached else "**missed**"


def judge_search_step(result: dict[str, Any]) -> Iterator[str]:
    """Yield the results of the default estimator and of the baseline."""
    name = result["default_estimator"]
    for goal in result["goals"]:
        if goal["precision"] == "bf16":
            step, limit = goal["step over training"], goal["at most"]
            yield (
                f"A search step with the estimator `{name}`, {goal['situation']} pi, dropout {goal['dropout']}, bf16 takes {step:.2f} "
                f"times as long as a training step (goal: at most {limit}, {mark(goal['near enough'])})."
            )
        if goal["precision"] == "bf16" and goal["situation"] == "uniform":
            speed, least = goal["tokens/s over baseline"], goal["at least"]
            verdict = mark(goal["fast enough"])
            yield f"This search step processes {speed:.1f} times the tokens/s of the plain mixture (goal: at least {least:.0f}, {verdict})."
    baseline = result["baseline"]
    for dropout, speed in baseline["steps_per_second"].items():
        yield (
            f"The plain mixture, dropout {dropout}: {speed:.1f} steps/s (goal: at least {baseline['floor']:.1f}, "
            f"{mark(baseline['above_floor'][dropout])})."
        )


def judge_train_step(result: dict[str, Any]) -> Iterator[str]:
    """Yield the results beside transformers, and relative to the peak."""
    records = {(r["size"], r["work"], r["network"], r["precision"]): r for r in result["records"]}
    for precision, goal in (("bf16", 2.0), ("fp32", 1.4)):
        ours, theirs = (records["12 blocks", "step", name, precision] for name in ("parnas", "transformers"))
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        apart = ours["loss_difference"]
        yield (
            f"A training step of 12 blocks in {precision}: {ratio:.2f} times the tokens/s of Hugging Face transformers (goal: at least {goal}, "
            f"{mark(ratio >= goal)}); with equal weights their losses differ by {apart:.0e} nats per token."
        )
    share = records["WT103 base, 2 layers", "blocks", "parnas", "bf16"]["share_of_peak"]
    yield (
        f"The blocks of the WikiText-103 base network in bf16 reach {share:.0%} of the processor's measured peak FLOP/s (goal: at least 40%, "
        f"{mark(share >= 0.4)})."
    )


def judge_time_to_quality(result: dict[str, Any]) -> Iterator[str]:
    """Yield the results of search and retraining."""
    target, goal = result["target_bits_per_byte"], result["goal_seconds"]
    for repetition in result["repetitions"]:
        for name, phase in ((name, repetition[name]) for name in ("search", "retrain")):
            seconds = f"{phase['reached']['seconds']:.0f} s" if phase["reached"] else "not reached"
            verdict = mark(repetition["within_goal"][name])
            yield (
                f"Time of `{name}` until a validation of at most {target} bits per byte, from an empty cache: {seconds} "
                f"(goal: at most {goal:.0f} s, {verdict}); "
                f"{phase['end']['bits_per_byte']:.4f} bits per byte at the end."
            )


def judge_data(result: dict[str, Any]) -> Iterator[str]:
    """Yield the result of encoding."""
    shares = [value for key, value in result["encoding"].items() if key.startswith("share_of")]
    yield f"Encoding text: {min(shares):.0%} of the speed of sentencepiece alone (goal: at least 90%, {mark(min(shares) >= 0.9)})."


if __name__ == "__main__":
    write_text(PAGE, render())
