"""What keeps a search from drifting to identity: `python benchmarks/collapse.py`.

Searches of configs/wikitext2-par.yaml in `--steps` steps (1,200), by the estimators that train a candidate the more
often the more probable it is: first with nothing against the drift, alpha learning from the first step on, then with
each countermeasure by itself, and last by `uniform`, whose weights do not follow alpha. Identity share is the mean of
pi(i) at the end; bits per byte on the validation split are those of the network that derive would take, with the
SuperNet's weights. Medians over `--seeds` seeds.
"""

import tempfile
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import harness
from time_to_quality import make_tiny, require_corpus

from parnas.config import Config, load_config
from parnas.nas.search import search
from parnas.run import METRICS
from parnas.training.reporter import Silent

ESTIMATORS = ("gdas", "soft")
BARE = {"search__entropy_start": 0.0, "search__entropy_end": 0.0, "search__alpha_start_step": 0}
STEPS = 1200
START_SHARE = 0.1  # of the steps, for weights alone


def countermeasures(steps: int) -> dict[str, dict[str, Any]]:
    """Settings by name, each against a search that has nothing."""
    return {
        "nothing": {},
        f"alpha_start_step: {round(START_SHARE * steps)}": {"search__alpha_start_step": round(START_SHARE * steps)},
        "entropy: 0.02": {"search__entropy_start": 0.02, "search__entropy_end": 0.02},
        "entropy: 0.1 to 0": {"search__entropy_start": 0.1},
        "candidate_dropout: 0.2": {"search__candidate_dropout": 0.2},
        "space: [s, f]": {"search__space": ("s", "f")},
    }


def measure(config: Config, estimator: str, changes: dict[str, Any], seeds: Sequence[int]) -> dict[str, Any]:
    """A record: what the searches ended with, by seed."""
    ends = []
    for seed in seeds:
        changed = config.replace(search__estimator=estimator, runtime__seed=seed, **{**BARE, **changes})
        with tempfile.TemporaryDirectory(prefix="parnas-collapse-") as folder:
            run = search(changed, Path(folder) / "run", Silent())
            last = [line for line in run.records(METRICS) if line["split"] == "train"][-1]
            summary = run.summary()
        bits = summary["argmax"]["bits_per_byte"]
        ends.append({"arch": summary["arch"], "identity_share": last["identity_share"], "bits_per_byte": bits})
    return {"estimator": estimator, "ends": ends}


def describe(name: str, record: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    ends = record["ends"]
    return {
        "estimator": record["estimator"],
        "against the drift": name,
        "identity share": median(end["identity_share"] for end in ends),
        "argmax": " ".join(end["arch"] for end in ends),
        "bits per byte": f"{median(end['bits_per_byte'] for end in ends):.4f}",
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=2)
    parsed: Namespace = parser.parse_args(arguments)
    tiny = parsed.size == "tiny"
    with tempfile.TemporaryDirectory(prefix="parnas-collapse-") as name:
        config = load_config(make_tiny(Path(name)) if tiny else harness.PAR_CONFIG)
        steps = config.search.steps if tiny else parsed.steps
        ends = {"train__eval_every": steps, "train__save_every": steps, "train__log_every": max(1, steps // 10)}
        config = config.replace(runtime__device=parsed.device, search__steps=steps, **ends)
        require_corpus(config)
        records = {
            (estimator, name): measure(config, estimator, changes, range(1, 1 + parsed.seeds))
            for estimator in ESTIMATORS
            for name, changes in countermeasures(steps).items()
        }
        records["uniform", "nothing"] = measure(config, "uniform", {}, range(1, 1 + parsed.seeds))
    harness.print_table(
        f"Searches of {steps:,} steps", [describe(name, record) for (_, name), record in records.items()]
    )
    device = harness.choose(parsed.device, config.runtime.precision)
    result = [{"against": name, **record} for (_, name), record in records.items()]
    harness.write_result("collapse", device, {"precisions": [device.precision], "records": result}, parsed)


if __name__ == "__main__":
    harness.run(main)
