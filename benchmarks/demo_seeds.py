"""Count the seeds with which the demo fails to train, by length of the warm-up: `python benchmarks/demo_seeds.py`.

The demo's interleaved network, with 4,000 pieces and 1,200 steps instead of 1,000 and 600, is trained by `--seeds`
seeds (20) with 200 steps of warm-up, as configs/demo.yaml says, then with 50, one training at a time on one thread. A
training counts as stuck where its validation perplexity ends above `STUCK`: the perplexity of a network that knows no
more than the frequencies of the tokens is about 500. Each training appends a row to demo_seeds.csv; a later start
trains what is missing.
"""

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import harness
from trainings import make_tiny, measure_missing

from parnas.config.loader import PRESETS, Config, load_config
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

WARMUPS = (200, 50)  # steps
STUCK = 200.0


class Row(NamedTuple):
    """A finished training."""

    warmup_steps: int
    seed: int
    ppl: float
    largest_gradient_norm: float
    seconds: float


def measure(config: Config, warmup_steps: int, seed: int) -> Row:
    """Train the network of a configuration; return its row."""
    config = config.replace(train__warmup_steps=warmup_steps, runtime__seed=seed)
    with tempfile.TemporaryDirectory(prefix="parnas-seeds-") as folder:
        run = retrain(config, Path(folder) / "run", Silent())
        norms = [line.gradient_norm for line in run.metrics() if line.split == "train"]
        summary = run.summary()
    return Row(warmup_steps, seed, summary.valid.ppl, max(norms), summary.seconds)


def describe(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a record of the trainings with one warm-up."""
    learnt = [row.ppl for row in rows if row.ppl <= STUCK]
    return {
        "warm-up, steps": rows[0].warmup_steps,
        "seeds": len(rows),
        "stuck": len(rows) - len(learnt),
        "ppl, median": f"{median(row.ppl for row in rows):.1f}",
        "ppl, least": f"{min(row.ppl for row in rows):.1f}",
        "ppl, largest": f"{max(row.ppl for row in rows):.1f}",
        "largest gradient norm": f"{max(row.largest_gradient_norm for row in rows):.3g}",
    }


def sentence(records: Sequence[dict[str, Any]]) -> str:
    """Return what the records show, for docs/faq.md."""
    parts = (
        f"{r['warm-up, steps']} steps of warm-up: {r['stuck']} of {r['seeds']} seeds got stuck "
        f"(perplexity {r['ppl, least']} to {r['ppl, largest']}, median {r['ppl, median']}; "
        f"gradient norms up to {r['largest gradient norm']})"
        for r in records
    )
    return "; ".join(parts)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark, or with `--report` write the result of the rows that there are."""
    parser = harness.make_parser(__doc__, ["tiny"], ["report"])
    parser.add_argument("--seeds", type=int, default=20)
    parsed: Namespace = parser.parse_args(arguments)
    path = harness.results_folder(parsed) / "demo_seeds.csv"
    with tempfile.TemporaryDirectory(prefix="parnas-seeds-") as name:
        tiny = parsed.size == "tiny"
        config = load_config(make_tiny(Path(name)) if tiny else PRESETS / "demo.yaml")
        if not tiny:
            config = config.replace(data__tokenizer__vocab_size=4000, train__steps=1200)
        steps = config.train.steps
        config = config.replace(
            **{"runtime__device": parsed.device, "runtime__threads": 1, "train__log_every": 1},
            **{"train__eval_every": steps, "train__save_every": steps},
            model__arch=f"interleaved-{config.search.blocks}",
        )
        warmups = [1, 2] if tiny else WARMUPS
        cases = [(warmup_steps, seed) for warmup_steps in warmups for seed in range(1, 1 + parsed.seeds)]
        rows = measure_missing(path, Row, cases, None if parsed.report else partial(measure, config))
    by_warmup = [[row for row in rows.values() if row.warmup_steps == each] for each in warmups]
    records = [describe(each) for each in by_warmup if each]
    harness.print_table("The demo's interleaved network, 4,000 pieces, by seeds", records)
    device = harness.choose(parsed.device, config.runtime.precision)
    payload = {"precisions": [device.precision], "config": config.model_dump(mode="json"), "records": records}
    harness.write_result("demo_seeds", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
