"""Token counts from a file, for `parnas cutoffs`."""

from pathlib import Path

import numpy as np

from parnas.errors import ParnasError


def read_counts(path: Path) -> np.ndarray:
    """Counts [V], the largest first, from a text file whose lines end in a count: `123` or `word 123`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        counts = np.array([int(line.split()[-1]) for line in lines if line.strip()], dtype=np.int64)
    except FileNotFoundError as error:
        raise ParnasError(f"There is no run folder or file {path}.") from error
    except (ValueError, OverflowError) as error:
        raise ParnasError(f"{path} is no list of counts: each line must end in a whole number ({error}).") from error
    return np.sort(counts)[::-1]
