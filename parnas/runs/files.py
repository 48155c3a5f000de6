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

import pydantic_core

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
"""Largest size of a JSON file; a tokenizer with a million words takes a tenth of it."""


def expand_user(name: str) -> Path:
    """Replace `~` or `~user` by the home folder; raise `ParnasError` for an unknown user."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ParnasError(f"The path {name!r:.80} names an unknown user; write the path in full.") from error


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder to disk by fsync; flushing a folder makes renames inside it durable."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a temporary path with the suffix of `path`; on exit, flush the file written there and rename it to `path`.

    If the body raises an exception, the temporary file is deleted and an existing `path` stays unchanged.
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
    """Write `value` as indented JSON, atomically, with null for non-finite numbers."""
    write_text(path, to_json(value, indent=2) + "\n")


def to_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as standard JSON, with null for non-finite numbers."""
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
        raise ParnasError(f"{path} does not exist; restore it or make it again.") from error
    except ValueError as error:
        raise ParnasError(f"{path} is not valid JSON ({error}); restore it or make it again.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file; raise `ParnasError` with its path if it is missing, broken or no object."""
    content = read_json(path)
    if not isinstance(content, dict):
        raise ParnasError(f"{path} holds no JSON object; restore it or make it again.")
    return content


def from_json(text: str | bytes) -> Any:
    """Parse JSON, also NaN and infinities; raise `ValueError` if it is invalid, too deep or has lone surrogates."""
    return pydantic_core.from_json(text)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; on exit, flush it and rename it to `path`, replacing an existing folder.

    If the body raises an exception, the temporary folder is deleted. Only one process may write `path` at a time.
    """
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.[0-9]*.tmp"):  # of a process that was killed
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

    So a run folder from another person can neither read or write outside itself nor block on a pipe. The folder itself
    may be a link.
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
    """Return whether a path inside a folder is, or lies behind, a link to a place outside the folder."""
    root = os.path.realpath(folder)
    return os.path.commonpath([root, os.path.realpath(path)]) != root
