"""Files that are either whole or absent, whatever happens while they are written."""

import glob
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from parnas.errors import ParnasError

MAX_JSON_BYTES = 256 << 20
"""Of a JSON file; a tokenizer's of a million words is a tenth of that."""

MAX_INTEGER = 2**64
"""JSON integers are smaller by magnitude, so that they fit floats."""


def expand_user(name: str) -> Path:
    """A path whose `~` or `~user` is that home; raises `ParnasError` for a user who is not known here."""
    try:
        return Path(name).expanduser()
    except RuntimeError as error:
        raise ParnasError(
            f"The path {name!r:.80} names a user who has no home here; write the path in full."
        ) from error


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
        flush_to_disk(path.parent)
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


def read_text(path: Path, most: int) -> str:
    """Read a UTF-8 file of at most `most` bytes; another, or what is no file, raises a `ParnasError` that names it."""
    if path.exists() and not path.is_file():
        raise ParnasError(f"{path} is no file; give one.")  # a device or a pipe may never end
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise ParnasError(f"{path} is larger than {most:,} bytes, as no such file is; restore it.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ParnasError(f"{path} is not UTF-8 text; restore it or save it as such.") from error


def read_json(path: Path) -> Any:
    """Read a JSON file; a missing or broken one raises a `ParnasError` that names it."""
    try:
        return from_json(read_text(path, MAX_JSON_BYTES))
    except FileNotFoundError as error:
        raise ParnasError(f"{path} does not exist.") from error
    except ValueError as error:
        raise ParnasError(f"{path} is not valid JSON ({error}); restore it or make it anew.") from error


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object; anything else raises a `ParnasError` that names it."""
    found = read_json(path)
    if not isinstance(found, dict):
        raise ParnasError(f"{path} holds no JSON object; restore it or make it anew.")
    return found


def from_json(text: str) -> Any:
    """The value of a JSON text; numbers that are infinite or none are null, as in `to_json`.

    Raises `ValueError` for what is no JSON, and for what nobody can use: integers beyond 64 bits, halves of characters,
    and nesting beyond Python's recursion.
    """
    try:
        value = _DECODER.decode(text)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error
    if "\\ud" in text or "\\uD" in text:
        json.dumps(value, ensure_ascii=False).encode("utf-8")  # halves of characters are a UnicodeEncodeError
    return value


def _finite_number(text: str) -> float | None:
    return value if math.isfinite(value := float(text)) else None


def _small_integer(text: str) -> int:
    if len(text) > 21 or abs(value := int(text)) >= MAX_INTEGER:
        raise ValueError(f"{text[:20]}... is too large a number")
    return value


_DECODER = json.JSONDecoder(parse_constant=_finite_number, parse_float=_finite_number, parse_int=_small_integer)


@contextmanager
def folder_in_one_piece(path: Path) -> Iterator[Path]:
    """Yield a folder beside `path` to fill; on leaving it is flushed and renamed to `path`.

    If the body raises, nothing is left behind. An existing `path` is replaced. One writer at a time.
    """
    for left_by_a_killed_writer in path.parent.glob(f".{glob.escape(path.name)}.[0-9]*.tmp"):
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


def refuse_foreign_links(folder: Path) -> None:
    """Raise where anything in a folder is a symbolic link that leads out of it, or neither a file nor a folder.

    A folder that came from somewhere else must not make us read or write in other places, nor wait for a pipe. It may
    be a link itself.
    """
    waiting = [os.fspath(folder)]
    while waiting:
        place = waiting.pop()
        try:
            entries = list(os.scandir(place))
        except FileNotFoundError:  # of a training that goes on: it has renamed or removed a folder meanwhile
            if place == os.fspath(folder):
                raise
            continue
        for entry in entries:
            if entry.is_symlink():
                refuse_foreign_link(Path(entry.path), folder)
            elif entry.is_dir(follow_symlinks=False):
                waiting.append(entry.path)
            elif not entry.is_file(follow_symlinks=False):
                raise ParnasError(f"{entry.path} is neither a file nor a folder; remove it.")


def refuse_foreign_link(path: Path, folder: Path) -> None:
    """Raise where one path within a folder is a symbolic link that leads out of it."""
    if path.is_symlink() and leads_out(path, folder):
        raise ParnasError(
            f"{path} is a link that leads out of {folder}; replace it by what it should be, or remove it."
        )


def leads_out(path: Path, folder: Path) -> bool:
    """Whether a path within a folder is in truth outside of it, by way of links."""
    home = os.path.realpath(folder)
    return os.path.commonpath([home, os.path.realpath(path)]) != home
