"""Seconds to find optimal cutoffs for a vocabulary of WikiText-103's size: `python benchmarks/cutoffs.py`."""

import time

import numpy as np

from parnas.model.cutoffs import optimal_cutoffs

WORDS, D_MODEL, PROJ_FACTOR, REPETITIONS = 267_735, 512, 4, 5


def main() -> None:
    """Time counts that fall as natural vocabularies do (Zipf), for 3 to 5 clusters; print median and all times."""
    counts = (1e7 / np.arange(1, WORDS + 1)).astype(np.int64) + 1
    for clusters in (3, 4, 5):
        dims = [max(1, D_MODEL // PROJ_FACTOR**cluster) for cluster in range(clusters)]
        times = []
        for _ in range(REPETITIONS):
            started = time.perf_counter()
            found = optimal_cutoffs(counts, clusters, D_MODEL, dims)
            times.append(time.perf_counter() - started)
        listed = ", ".join(f"{seconds:.2f}" for seconds in times)
        print(f"{clusters} clusters: {np.median(times):.2f} s (all: {listed}), cutoffs {list(found.cutoffs)}")


if __name__ == "__main__":
    main()
