"""Files that are either whole or absent, whatever happens while they are written."""

import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
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


@contextmanager
def file_in_one_piece(path: Path) -> Iterator[Path]:
    """Yield a path beside `path`, with its ending, to write to; on leaving it is flushed and renamed to `path`.

    If the body raises, nothing is left behind and an earlier `path` stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield beside
        flush_to_disk(beside)
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    with file_in_one_piece(path) as beside:
        beside.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, whole or not at all; see `to_json`."""
    write_text(path, to_json(value, indent=2) + "\n")


def to_json(value: Any, indent: int | None = None) -> str:
    """JSON that every reader takes: numbers beyond it (infinity, not a number) become null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_text(path: Path) -> str:
    """Read a UTF-8 file; other bytes raise a `ParnasError` that names it."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ParnasError(f"{path} is not UTF-8 text; restore it or save it as such.") from error


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or broken one raises a `ParnasError` that names it."""
    try:
        return json.loads(read_text(path))
    except FileNotFoundError as error:
        raise ParnasError(f"{path} does not exist.") from error
    except ValueError as error:
        raise ParnasError(f"{path} is not valid JSON ({error}); restore it or make it anew.") from error


@contextmanager
def folder_in_one_piece(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` to fill; on leaving it is flushed and renamed to `path`.

    If the body raises, nothing is left behind. An existing `path` is replaced. One writer at a time.
    """
    for left_by_a_killed_writer in path.parent.glob(f".{path.name}.*.tmp"):
        shutil.rmtree(left_by_a_killed_writer, ignore_errors=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
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
