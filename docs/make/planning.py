"""Write docs/planning.md, whose figures `parnas plan` counts: `python docs/make/planning.py`."""

from pathlib import Path

from tabulate import tabulate

from parnas.config.loader import Config, load_config
from parnas.data.token_frequencies import PUBLISHED, zipf
from parnas.runs.files import read_json, write_text
from parnas.training.planning.resource_plan import (
    CONTEXT_BYTES,
    GB,
    MARGIN,
    NETWORK_GB_PER_S,
    NVLINK_GB_PER_S,
    Machine,
    PhasePlan,
    Rate,
    flops_of,
    plan_phase,
)

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "planning.md"
MEASURED = ROOT / "benchmarks" / "results" / "plan-cpu.json"
PUBLISHED_TOKENS_PER_S = 59_961  # one A100, mixed precision, training: NVIDIA DeepLearningExamples, Transformer-XL base
GPUS = (1, 8, 64)
CONFIGS = {
    "base, NVIDIA's variant": ("wikitext103-base-nvidia", {}),
    "base, 64 rows": ("wikitext103-base", {"data__batch_size": 64}),  # 60 are not divided by 8
    "large": ("wikitext103-large", {}),
}

TEXT = """# Plan a training

`parnas plan` says before a training how much GPU memory it needs, whether the GPU has enough, and what time and price to
expect:

    parnas plan configs/wikitext103-large.yaml --gpus 8 --memory 80 --from runs/short --price-per-hour 2

It prints, for the search and for the retraining, the memory of each GPU, the settings to change if the GPU has too little,
and time and price. Nothing is trained or downloaded and no GPU is needed. If the text is not on this machine, the
vocabulary has its published or configured size, and token frequencies follow Zipf's law.

* **Memory is counted.** A whole training step runs on tensors that have shapes and types but no data, and the bytes of the
  live tensors are added up after each operation. The count includes full memory of earlier segments, the moments of the
  optimizer (two per weight for AdamW, one for Muon), averaged weights, gradient buckets, `train.accumulate` and
  `runtime.checkpoint_activations`. For a search, the step is that of the configured estimator, on the path that needs most memory.
  Precision is bf16 unless `runtime.precision` is fp32.
* **A margin of {margin:.0%} and {context:.0f} GB** covers memory that is not counted: workspaces of kernels, temporary copies of
  Muon, rounding and fragmentation of the allocator, CUDA and NCCL. `torch.compile` is ignored.
* **Speed must be measured.** `--from RUN` takes the median speed of a short run of some 200 steps, `--tokens-per-s` takes
  a number. For another network than the measured one, the speed is scaled by the FLOPs per token of matrix products. This
  assumes equal utilisation of the GPU, which is lower for small networks and few sequences per GPU, so measure with the
  planned optimizer and number of sequences per GPU.
  Validation and checkpoints are not included.
* **Several GPUs**: the speed is assumed to grow with their number. If averaging the gradients takes longer than the backward
  pass, the difference is added to the time of each step.
  The default of `--bandwidth` is {nvlink:.0f} GB/s for up to eight GPUs (NVLink) and {network:.0f} GB/s for more.

## Accuracy

The counted bytes of tensors are exact (`tests/training/planning/test_memory_estimate.py`). On a CPU the measured peak memory of
the process is {least:.2f} to {most:.2f} times the planned memory if the system maps each tensor separately (`benchmarks/plan.py`).
Trainings on a CPU keep freed memory for later tensors; fragmentation makes their peak {kept_least:.2f} to {kept_most:.2f} times the planned memory.
**No memory was measured on a GPU**, whose allocator differs.

## Example: WikiText-103

**This is a projection, not a measurement.** The base network is assumed to reach the {speed:,} tokens/s that NVIDIA
published for its variant of this network on one A100 (DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL); the speeds of the
other rows are scaled from this one by FLOPs per token. *Rows* are sequences of a batch, *rows each* the batch size per GPU. *GB per GPU* includes the
margin; *step* is the part of activations, gradients and temporary tensors, in GB at their peak.

{table}

If each of 64 GPUs has only a few sequences, averaging the gradients takes longer than the backward pass and determines
the time.

`python docs/make/planning.py` writes this page.
"""


def render() -> str:
    """Return the page."""
    counts = zipf(PUBLISHED["wikitext-103", "word"]).tolist()
    configs = {name: read_config(*given) for name, given in CONFIGS.items()}
    measured = flops_of(configs["base, NVIDIA's variant"], "retrain", counts)
    rate = Rate(PUBLISHED_TOKENS_PER_S, measured, "published")
    rows = [
        describe(name, gpus, plan_phase(config, "retrain", counts, Machine(gpus), rate))
        for name, config in configs.items()
        for gpus in GPUS
    ]
    records = read_json(MEASURED)["records"]
    ratios, with_heap = (
        [record[key] for record in records] for key in ("measured_over_predicted", "kept_heap_over_predicted")
    )
    return TEXT.format(
        margin=MARGIN,
        context=CONTEXT_BYTES / GB,
        nvlink=NVLINK_GB_PER_S,
        network=NETWORK_GB_PER_S,
        least=min(ratios),
        most=max(ratios),
        kept_least=min(with_heap),
        kept_most=max(with_heap),
        speed=PUBLISHED_TOKENS_PER_S,
        table=tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True),
    )


def read_config(name: str, changes: dict[str, int]) -> Config:
    """Return a shipped configuration with changes."""
    return load_config(ROOT / "configs" / f"{name}.yaml").replace(**changes)


def describe(name: str, gpus: int, plan: PhasePlan) -> dict[str, str]:
    """Return a row of the table."""
    assert plan.tokens_per_s is not None
    assert plan.hours is not None
    return {
        "network": name,
        "parameters": f"{plan.parameters:,}",
        "MFLOPs/token": f"{plan.flops_per_token / 1e6:,.0f}",
        "GPUs": str(gpus),
        "rows each": str(plan.rows),
        "GB per GPU": f"{plan.needed_bytes / GB:.0f}",
        "step": f"{plan.bytes['a step at its peak'] / GB:.0f}",
        "tokens": f"{plan.tokens:.2g}",
        "tokens/s": f"{plan.tokens_per_s:,.0f}",
        "days": f"{plan.hours / 24:,.2f}",
    }


if __name__ == "__main__":
    write_text(PAGE, render())
