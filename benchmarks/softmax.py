"""Compare cutoffs of the adaptive softmax by perplexity and CPU time: `python benchmarks/softmax.py`.

The interleaved network of configs/wikitext2-par.yaml (12,000 pieces) is trained in a short recipe, `--seeds` times (2)
with each of `SOFTMAXES`, one training at a time on one thread: the full softmax, `cutoffs: auto` and `min_macs`, and
the cutoffs of that configuration. Each training appends a row to softmax.csv; a later start trains what is missing.
"""

import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import harness
from trainings import make_tiny, measure_missing, require_corpus

from parnas.architecture import Architecture
from parnas.config.loader import Config, load_config
from parnas.data.streams import prepare
from parnas.model.transformer_xl import TransformerXL
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

RECIPE = {"train__lr": 3e-3, "train__warmup_steps": 200}
STEPS = 800
SOFTMAXES: Mapping[str, Mapping[str, Any]] = {
    "full": {"model__cutoffs": (), "model__proj_factor": None},
    "auto": {"model__cutoffs": "auto"},
    "min_macs": {"model__cutoffs": "min_macs"},
    "auto, proj_factor 2": {"model__cutoffs": "auto", "model__proj_factor": 2},
    "min_macs, proj_factor 2": {"model__cutoffs": "min_macs", "model__proj_factor": 2},
    "as configured": {},
}


class Row(NamedTuple):
    """A finished training."""

    softmax: str
    seed: int
    steps: int
    cutoffs: str
    head_multiply_adds: float
    ppl: float
    cpu_seconds: float


def measure(config: Config, softmax: str, seed: int, steps: int) -> Row:
    """Train a network with one of `SOFTMAXES`; return its row, with the CPU seconds of this process."""
    config = config.replace(runtime__seed=seed, train__steps=steps, **SOFTMAXES[softmax])
    counts = prepare(config.data).train_counts()
    with tempfile.TemporaryDirectory(prefix="parnas-softmax-") as folder:
        began = time.process_time()
        run = retrain(config, Path(folder) / "run", Silent())
        seconds = time.process_time() - began
        model, summary = run.config().model, run.summary()
    head = TransformerXL.build(model, Architecture.parse(summary.arch), len(counts)).head
    cost = head.multiply_adds(head.cluster_shares(counts.tolist()))
    cutoffs = " ".join(map(str, model.cutoffs))
    return Row(softmax, seed, steps, cutoffs, cost, summary.valid.ppl, seconds)


def describe(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a record of the trainings with one softmax."""
    return {
        "cutoffs": rows[0].softmax,
        "clusters end at": rows[0].cutoffs or "–",
        "seeds": len(rows),
        "multiply-adds of the softmax per token": rows[0].head_multiply_adds,
        "ppl, median": f"{median(row.ppl for row in rows):.1f}",
        "CPU seconds, median": round(median(row.cpu_seconds for row in rows)),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, or with `--report` write the result of the rows that there are."""
    parser = harness.make_parser(__doc__, ["tiny"], ["report"])
    parser.add_argument("--seeds", type=int, default=2)
    parsed: Namespace = parser.parse_args(arguments)
    path = harness.results_folder(parsed) / "softmax.csv"
    with tempfile.TemporaryDirectory(prefix="parnas-softmax-") as name:
        tiny = parsed.size == "tiny"
        config = load_config(make_tiny(Path(name)) if tiny else harness.PAR_CONFIG)
        if not tiny:
            config = config.replace(**RECIPE, train__steps=STEPS)
        steps = config.train.steps
        config = config.replace(
            **{"runtime__device": parsed.device, "runtime__threads": 1, "train__log_every": 20},
            **{"train__eval_every": steps, "train__save_every": steps},
            model__arch=f"interleaved-{config.search.blocks}",
        )
        require_corpus(config)
        cases = [(softmax, seed, steps) for seed in range(1, 1 + parsed.seeds) for softmax in SOFTMAXES]
        rows = measure_missing(path, Row, cases, None if parsed.report else partial(measure, config))
    by_softmax = [[row for row in rows.values() if row.softmax == softmax] for softmax in SOFTMAXES]
    records = [describe(each) for each in by_softmax if each]
    harness.print_table(f"The interleaved network after {steps:,} steps, by its softmax", records)
    device = harness.choose(parsed.device, config.runtime.precision)
    payload = {"precisions": [device.precision], "config": config.model_dump(mode="json"), "records": records}
    harness.write_result("softmax", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
