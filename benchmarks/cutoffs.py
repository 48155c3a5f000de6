"""Seconds to find optimal cutoffs for a vocabulary of WikiText-103's size: `python benchmarks/cutoffs.py`."""

from collections.abc import Callable
from functools import partial

import harness
import numpy as np

from parnas.model.cutoffs import HEAD_SHARE, Cutoffs, optimal_cutoffs

WORDS = {"tiny": 1000, "short": 267_735, "full": 267_735}
ROUNDS = {"tiny": 2, "short": 3, "full": 10}
D_MODEL, PROJ_FACTOR = 512, 4
HEAD_SHARES = {"auto": HEAD_SHARE, "min_macs": 0.0}


def make_searches(words: int) -> dict[tuple[str, int], Callable[[], Cutoffs]]:
    """Return a search for 3, 4 and 5 clusters by each rule, for counts that follow Zipf's law."""
    counts = (1e7 / np.arange(1, words + 1)).astype(np.int64) + 1
    dims = [max(1, D_MODEL // PROJ_FACTOR**cluster) for cluster in range(5)]
    return {
        (name, clusters): partial(optimal_cutoffs, counts, clusters, D_MODEL, dims[:clusters], head_share)
        for name, head_share in HEAD_SHARES.items()
        for clusters in (3, 4, 5)
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; it needs the CPU alone, whatever the device."""
    parsed = harness.make_parser(__doc__).parse_args(arguments)
    words = WORDS[parsed.size]
    searches = make_searches(words)
    timed = harness.take_turns(searches, ROUNDS[parsed.size], warm_up=1)
    records, rows = [], []
    for (name, clusters), search in searches.items():
        optimal, seconds = search(), harness.describe_seconds(timed[name, clusters])
        records.append({"rule": name, "clusters": clusters, "cutoffs": list(optimal.cutoffs), **seconds})
        row = {"rule": name, "clusters": clusters, "seconds": seconds["median_seconds"]}
        rows.append({**row, "cutoffs": list(optimal.cutoffs), "multiply-adds of full": f"{optimal.relative:.1%}"})
    harness.print_table(f"Optimal cutoffs of {words:,} words", rows)
    payload = {"precisions": [], "words": words, "d_model": D_MODEL, "proj_factor": PROJ_FACTOR, "records": records}
    harness.write_result("cutoffs", harness.choose("cpu", "fp32"), payload, parsed)


if __name__ == "__main__":
    harness.run(main)
