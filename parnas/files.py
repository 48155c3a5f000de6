"""Files that are either whole or absent, whatever happens while they are written."""

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parnas.errors import ParnasError


def flush_to_disk(path: Path) -> None:
    """fsync a file or a folder (a folder's fsync makes a rename inside it durable)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_text(path: Path, text: str) -> None:
    """Write `text` beside `path`, flush it, and rename it into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or broken one raises a `ParnasError` that names it."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ParnasError(f"{path} does not exist.") from error
    except ValueError as error:
        raise ParnasError(f"{path} is not valid JSON ({error}); restore it or make it anew.") from error


@contextmanager
def folder_in_one_piece(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` to fill; on leaving it is flushed and renamed to `path`.

    If the body raises, nothing is left behind. An existing `path` is replaced.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    try:
        yield beside
        for file in beside.rglob("*"):
            flush_to_disk(file)
        flush_to_disk(beside)
        if path.exists():
            shutil.rmtree(path)
        beside.replace(path)
        flush_to_disk(path.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
