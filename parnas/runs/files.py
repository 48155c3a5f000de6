"""Atomic writing of files and folders, JSON with strict bounds, and refusal of links that lead out of a folder."""

import glob
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parnas.config.yaml_file import read_text
from parnas.errors import ParnasError

__all__ = [
    "atomic_file",
    "atomic_folder",
    "expand_user",
    "is_outside",
    "read_json",
    "read_json_object",
    "refuse_outside_link",
    "refuse_outside_links",
    "to_json",
    "write_json",
    "write_text",
]

MAX_JSON_BYTES = 256 << 20
"""Largest JSON file; the tokenizer of a million words takes a tenth of it."""

_MAX_INTEGER = 2**64
"""Bound of the magnitude of JSON integers, so that they can be converted to floats."""


def expand_user(name: str) -> Path:
    """Replace `~` or `~user` by the home folder; raise `ParnasError` for an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ParnasError(f"The path {name!r:.80} names an unknown user; write the path in full.") from error


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder with fsync; for a folder this makes a rename inside it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, with the same suffix; on exit it is flushed and renamed to `path`.

    If the body raises, the temporary file is removed and an earlier `path` stays.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}.tmp{path.suffix}")
    try:
        yield temporary
        flush_to_disk(temporary)
        temporary.replace(path)
        flush_to_disk(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, atomically; see `to_json`."""
    write_text(path, to_json(value, indent=2) + "\n")


def to_json(value: Any, indent: int | None = None) -> str:
    """Return standard JSON, in which non-finite numbers are null."""
    return json.dumps(_finite(value), indent=indent, ensure_ascii=False, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; raise `ParnasError` with its path if it is missing or broken."""
    try:
        return from_json(read_text(path, MAX_JSON_BYTES))
    except FileNotFoundError as error:
        raise ParnasError(f"{path} does not exist.") from error
    except ValueError as error:
        raise ParnasError(f"{path} is not valid JSON ({error}); restore it or make it again.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise `ParnasError` with its path if it is missing, broken or no object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ParnasError(f"{path} holds no JSON object; restore it or make it again.")
    return content


def from_json(text: str) -> Any:
    """Parse JSON; non-finite numbers become `None`, as in `to_json`.

    Raises:
        ValueError: Invalid JSON, integers beyond 64 bits, lone surrogates, or nesting beyond Python's recursion limit.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # lone surrogates raise UnicodeEncodeError
    return value


def _finite_number(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _small_integer(text: str) -> int:
    if len(text) > 21 or abs(value := int(text)) >= _MAX_INTEGER:
        raise ValueError(f"{text[:20]}... is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_finite_number, parse_float=_finite_number, parse_int=_small_integer)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; on exit it is flushed and renamed to `path`.

    If the body raises, the temporary folder is removed. An existing `path` is replaced. One writer at a time.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.[0-9]*.tmp"):  # of a killed writer
        shutil.rmtree(leftover, ignore_errors=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.mkdir(parents=True)
    try:
        yield temporary
        for file in temporary.rglob("*"):
            flush_to_disk(file)
        flush_to_disk(temporary)
        if path.exists():
            shutil.rmtree(path)
        temporary.replace(path)
        flush_to_disk(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def refuse_outside_links(folder: Path) -> None:
    """Raise `ParnasError` if a folder holds a symbolic link that leads out of it, a pipe or a device.

    A run folder from somewhere else must not cause reads or writes in other places, nor block on a pipe. The folder
    itself may be a link.
    """
    pending = [os.fspath(folder)]
    while pending:
        current = pending.pop()
        try:
            entries = list(os.scandir(current))
        except FileNotFoundError:  # a running training has renamed or removed a folder meanwhile
            if current == os.fspath(folder):
                raise
            continue
        for entry in entries:
            if entry.is_symlink():
                refuse_outside_link(Path(entry.path), folder)
            elif entry.is_dir(follow_symlinks=False):
                pending.append(entry.path)
            elif not entry.is_file(follow_symlinks=False):
                raise ParnasError(f"{entry.path} is neither a file nor a folder; remove it.")


def refuse_outside_link(path: Path, folder: Path) -> None:
    """Raise `ParnasError` if a path inside a folder is a symbolic link that leads out of it."""
    if path.is_symlink() and is_outside(path, folder):
        raise ParnasError(f"{path} is a link that leads out of {folder}; replace it by a file or folder, or remove it.")


def is_outside(path: Path, folder: Path) -> bool:
    """Return whether a path inside a folder resolves, through links, to a place outside."""
    root = os.path.realpath(folder)
    return os.path.commonpath([root, os.path.realpath(path)]) != root
