"""What keeps a search from drifting to identity: `python benchmarks/collapse.py`.

Searches of configs/wikitext2-par.yaml in `--steps` steps (1,200), by the estimators that train a candidate the more
often the more probable it is: first with nothing against the drift, alpha learning from the first step on, then with
each countermeasure by itself, and last by `uniform`, whose weights do not follow alpha. Identity share is the mean of
pi(i) at the end; bits per byte on the validation split are those of the network that derive would take, with the
SuperNet's weights. Medians over `--seeds` seeds. Each search appends a row to collapse.csv; a later start goes on with
what is missing.
"""

import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import harness
from trainings import make_tiny, measure_missing, require_corpus

from parnas.config.loader import Config, load_config
from parnas.nas.search import search
from parnas.training.progress import Silent

ESTIMATORS = ("gdas", "soft")
BARE = {"search__entropy_start": 0.0, "search__entropy_end": 0.0, "search__alpha_start_step": 0}
NOTHING = "nothing"
STEPS = 1200
START_SHARES = (0.1, 0.5)  # of the steps, for weights alone


class Row(NamedTuple):
    """A finished search."""

    estimator: str
    against: str
    seed: int
    steps: int
    arch: str
    identity_share: float
    bits_per_byte: float


def countermeasures(steps: int) -> dict[str, dict[str, Any]]:
    """Return settings by name, each compared with a search without any."""
    starts = [round(share * steps) for share in START_SHARES]
    return {
        NOTHING: {},
        **{f"alpha_start_step: {start}": {"search__alpha_start_step": start} for start in starts},
        "entropy: 0.02": {"search__entropy_start": 0.02, "search__entropy_end": 0.02},
        "entropy: 0.1 to 0": {"search__entropy_start": 0.1},
        "candidate_dropout: 0.2": {"search__candidate_dropout": 0.2},
        "space: [s, f]": {"search__space": ("s", "f")},
    }


def cases(steps: int) -> Iterator[tuple[str, str]]:
    """Yield the pairs of estimator and countermeasure."""
    yield from ((estimator, against) for estimator in ESTIMATORS for against in countermeasures(steps))
    yield "uniform", NOTHING


def measure(config: Config, estimator: str, against: str, seed: int, steps: int) -> Row:
    """Run a search and return its final state."""
    changes = {**BARE, **countermeasures(steps)[against]}
    config = config.replace(search__estimator=estimator, runtime__seed=seed, **changes)
    with tempfile.TemporaryDirectory(prefix="parnas-collapse-") as folder:
        run = search(config, Path(folder) / "run", Silent())
        last = [line for line in run.metrics() if line.split == "train"][-1]
        summary = run.summary()
    bits = summary.argmax.bits_per_byte
    return Row(estimator, against, seed, steps, summary.arch, last.identity_share, bits)


def describe(rows: Sequence[Row]) -> dict[str, Any]:
    """Return a record of the searches of one case."""
    return {
        "estimator": rows[0].estimator,
        "against": rows[0].against,
        "identity share": median(row.identity_share for row in rows),
        "derived": " ".join(row.arch for row in rows),
        "bits per byte": f"{median(row.bits_per_byte for row in rows):.4f}",
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"])
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--seeds", type=int, default=1)
    parsed: Namespace = parser.parse_args(arguments)
    tiny, seeds = parsed.size == "tiny", range(1, 1 + parsed.seeds)
    path = harness.results_folder(parsed) / "collapse.csv"
    with tempfile.TemporaryDirectory(prefix="parnas-collapse-") as name:
        config = load_config(make_tiny(Path(name)) if tiny else harness.PAR_CONFIG)
        steps = config.search.steps if tiny else parsed.steps
        ends = {"train__eval_every": steps, "train__save_every": steps, "train__log_every": max(1, steps // 10)}
        config = config.replace(runtime__device=parsed.device, search__steps=steps, **ends)
        require_corpus(config)
        wanted = [(*case, seed, steps) for case in cases(steps) for seed in seeds]
        rows = measure_missing(path, Row, wanted, partial(measure, config))
    records = [describe([rows[*case, seed, steps] for seed in seeds]) for case in cases(steps)]
    harness.print_table(f"Searches of {steps:,} steps", records)
    device = harness.choose(parsed.device, config.runtime.precision)
    harness.write_result("collapse", device, {"precisions": [device.precision], "records": records}, parsed)


if __name__ == "__main__":
    harness.run(main)
