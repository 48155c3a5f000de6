"""Write docs/planning.md, whose figures `parnas plan` counts: `python docs/make_planning.py`."""

from pathlib import Path

from tabulate import tabulate

from parnas.config import Config, load_config
from parnas.data.foreseen import PUBLISHED, zipf
from parnas.files import read_json, write_text
from parnas.training.plan import (
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

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "planning.md"
MEASURED = ROOT / "benchmarks" / "results" / "plan-cpu.json"
PUBLISHED_TOKENS_PER_S = 59_961  # one A100, mixed precision, training: NVIDIA DeepLearningExamples, Transformer-XL base
GPUS = (1, 8, 64)
CONFIGS = {
    "base, NVIDIA's variant": ("wikitext103-base-nvidia", {}),
    "base, 64 rows": ("wikitext103-base", {"data__batch_size": 64}),  # 60 are not divided by 8
    "large": ("wikitext103-large", {}),
}

TEXT = """# Planning a training

Made by `python docs/make_planning.py`: no figure here was typed.

    parnas plan configs/wikitext103-large.yaml --gpus 8 --memory 80 --from runs/short --price-per-hour 2

tells for the search and for retraining how much memory each GPU needs, whether it fits and what to set if not, how long
it takes and what it costs. Nothing is allocated or trained, and no text is fetched: where it is not on this machine,
its vocabulary is the published or configured one, and how rows divide among the clusters of an adaptive softmax follows
from Zipf's law (`parnas/data/foreseen.py`).

* **Memory is counted**, not estimated: a whole step, forward with full memory, loss and backward, runs on tensors that
  have shapes and types but no data, and the storages alive are added up after each operation; besides these the
  moments of the optimizer (two of each weight by AdamW, one by Muon), an average of the weights where one is asked for,
  and with several GPUs the buckets in which gradients are averaged. `train.accumulate` and `runtime.checkpoint_activations` count as in training. In a search it is
  the step of its estimator; where that draws paths, the path that keeps most. Precision is bf16 unless
  `runtime.precision` is fp32.
* **Not counted** are the workspace of kernels, the copies that Muon makes for a step, the allocator's rounding and
  fragmentation, and what CUDA and NCCL take: for these stand {margin:.0%} and {context:.0f} GB more.
  `torch.compile` is planned as if it were not there.
* **Speed must be measured**: by a run of some 200 steps (`--from RUN`, the median of its lines), or given
  (`--tokens-per-s`). That of another network is scaled by the FLOPs per token of matrix products, which takes for
  granted that both use the device equally well; small networks do not. Nor do GPUs with few rows each: measure with as
  many rows as a GPU will have, and with the optimizer of the training: what that computes is not among the FLOPs.
  Validation and checkpoints are not in it.
* **Several GPUs** are as many times as fast, less what averaging the gradients takes longer than the backward pass;
  `--bandwidth` is {nvlink:.0f} GB/s by default within eight GPUs, as NVLink reaches, and {network:.0f} GB/s beyond.

## How good the count is

With real tensors the count is the same to the byte (`tests/test_footprint.py`). Measured by `benchmarks/plan.py` on a
CPU as what a process takes at its peak: {least:.2f} to {most:.2f} times the sum of the plan, where each tensor is
mapped for itself. With the heap that training on a CPU keeps for its speed it is {kept_least:.2f} to {kept_most:.2f}
times, by fragmentation. **Nothing was measured on a GPU**, whose allocator has ways of its own.

## An example: WikiText-103

**A projection, not a measurement.** Retraining as configured. Time is by the {speed:,} tokens/s that NVIDIA published
for its variant of the base network on one A100 (DeepLearningExamples, PyTorch/LanguageModeling/Transformer-XL), scaled
to the others, and with the same share of the device's speed however few rows a GPU has.

{table}

GB per GPU: with the margin. Of that, step: activations, gradients and what comes and goes, at their peak. With few rows
on each of 64 GPUs the network decides: gradients are as many as ever, and the backward pass no longer covers them.
"""


def render() -> str:
    """The whole page."""
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
    ratios, kept = (
        [record[key] for record in records] for key in ("measured_over_predicted", "kept_heap_over_predicted")
    )
    return TEXT.format(
        margin=MARGIN,
        context=CONTEXT_BYTES / GB,
        nvlink=NVLINK_GB_PER_S,
        network=NETWORK_GB_PER_S,
        least=min(ratios),
        most=max(ratios),
        kept_least=min(kept),
        kept_most=max(kept),
        speed=PUBLISHED_TOKENS_PER_S,
        table=tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True),
    )


def read_config(name: str, changes: dict[str, int]) -> Config:
    """A shipped configuration, changed."""
    return load_config(ROOT / "configs" / f"{name}.yaml").replace(**changes)


def describe(name: str, gpus: int, found: PhasePlan) -> dict[str, str]:
    """A row of the table."""
    assert found.tokens_per_s is not None
    assert found.hours is not None
    return {
        "network": name,
        "parameters": f"{found.parameters:,}",
        "MFLOPs/token": f"{found.flops_per_token / 1e6:,.0f}",
        "GPUs": str(gpus),
        "rows each": str(found.rows),
        "GB per GPU": f"{found.needed_bytes / GB:.0f}",
        "step": f"{found.bytes['a step at its peak'] / GB:.0f}",
        "tokens": f"{found.tokens:.2g}",
        "tokens/s": f"{found.tokens_per_s:,.0f}",
        "days": f"{found.hours / 24:,.2f}",
    }


if __name__ == "__main__":
    write_text(PAGE, render())
