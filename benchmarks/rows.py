"""Tables that grow by rows: CSV files of named tuples, filled by several processes."""

import csv
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")


def read_rows(path: Path, kind: Callable[..., Any]) -> list[Any]:
    """Rows as named tuples of a kind, with its types; none where there is no file."""
    if not path.is_file():
        return []
    types = kind.__annotations__
    with path.open(newline="", encoding="utf-8") as file:
        return [kind(**{key: types[key](value) for key, value in line.items()}) for line in csv.DictReader(file)]


def append_rows(path: Path, rows: Sequence[Any]) -> None:
    """Add named tuples, and their head to a new file; on the disk when this returns."""
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(rows[0]._fields)
        writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows)
        file.flush()
        os.fsync(file.fileno())


def work_off(work: Callable[[Job], Result], jobs: Iterable[Job], workers: int) -> Iterator[Result]:
    """Results as they come, of `workers` processes at a time; `work` and jobs have to be picklable.

    A job that fails does not keep the others from being done: the first error is raised at the end.
    """
    failed: list[BaseException] = []
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        for future in as_completed([pool.submit(work, job) for job in jobs]):
            if error := future.exception():
                failed.append(error)
            else:
                yield future.result()
    if failed:
        raise failed[0]
