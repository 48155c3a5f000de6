"""Seconds to find optimal cutoffs for a vocabulary of WikiText-103's size: `python benchmarks/cutoffs.py`."""

from collections.abc import Callable
from functools import partial

import harness
import numpy as np

from parnas.model.cutoffs import Cutoffs, optimal_cutoffs

WORDS = {"tiny": 1000, "short": 267_735, "full": 267_735}
ROUNDS = {"tiny": 2, "short": 3, "full": 10}
D_MODEL, PROJ_FACTOR = 512, 4


def make_searches(words: int) -> dict[int, Callable[[], Cutoffs]]:
    """A search for 3, 4 and 5 clusters, for counts that fall as those of natural vocabularies do (Zipf)."""
    counts = (1e7 / np.arange(1, words + 1)).astype(np.int64) + 1
    dims = [max(1, D_MODEL // PROJ_FACTOR**cluster) for cluster in range(5)]
    return {clusters: partial(optimal_cutoffs, counts, clusters, D_MODEL, dims[:clusters]) for clusters in (3, 4, 5)}


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark; it needs the CPU alone, whatever the device."""
    parsed = harness.make_parser(__doc__).parse_args(arguments)
    words = WORDS[parsed.size]
    searches = make_searches(words)
    timed = harness.take_turns(searches, ROUNDS[parsed.size], warm_up=1)
    records = [
        {"clusters": clusters, "cutoffs": list(search().cutoffs), **harness.describe_seconds(timed[clusters])}
        for clusters, search in searches.items()
    ]
    harness.print_table(
        f"Optimal cutoffs of {words:,} words",
        [{"clusters": r["clusters"], "seconds": r["median_seconds"], "cutoffs": r["cutoffs"]} for r in records],
    )
    payload = {"precisions": [], "words": words, "d_model": D_MODEL, "proj_factor": PROJ_FACTOR, "records": records}
    harness.write_result("cutoffs", harness.choose("cpu", "fp32"), payload, parsed)


if __name__ == "__main__":
    harness.run(main)
