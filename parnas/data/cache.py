"""The cache folder: downloads, corpora, token streams, and values computed from files, such as hashes."""

import hashlib
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from parnas.errors import ParnasError
from parnas.runs.files import expand_user, read_json, write_json

__all__ = ["Note", "cache_dir", "locked", "silent"]

RECENT_NS = 2_000_000_000
"""Nanoseconds in which a file may change twice with the same modification time, since file systems round times."""

Note = Callable[[str], None]
"""A function that displays a short line of progress, such as "training tokenizer"."""


def silent(_: str) -> None:
    """Ignore a line of progress; this `Note` function displays nothing."""


def cache_dir() -> Path:
    """Return the folder that the variable `PARNAS_CACHE` names or, without it, the user's cache folder for parnas."""
    if given := os.environ.get("PARNAS_CACHE"):
        return expand_user(given)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("parnas"))


@contextmanager
def locked(path: Path, note: Note = silent) -> Iterator[None]:
    """Lock `path` in the cache against other processes; wait if another process holds the lock.

    Raises:
        ParnasError: The lock or the body raises an `OSError`: the disk is full, or the cache is not writable.
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / f"{path.name}.lock")
        try:
            held = lock.acquire(blocking=False)
        except Timeout:
            note(f"waiting for another process that writes {path}")
            held = lock.acquire()
        with held:
            yield
    except OSError as error:
        raise ParnasError(
            f"The cache {cache_dir()} cannot be used: {error}. Make room there, or set PARNAS_CACHE to another folder."
        ) from error


def cached_value(path: Path, name: str, compute: Callable[[], Any]) -> Any:
    """Return a value computed from a file; it is computed again only if the file has changed.

    A file counts as changed if its path, size, inode, modification time or status-change time differs; programs can
    fake all of these except the status-change time. The value is not cached if the file changed within the 2 seconds
    (`RECENT_NS`) before the computation, or during it.

    Args:
        path: The file.
        name: Name of the value, unique for each way to compute it.
        compute: Function that reads the file and returns a JSON value; its exceptions are passed on.
    """
    identity, now = _identity(path), time.time_ns()
    entry = cache_dir() / "files" / f"{hashlib.sha256(repr((identity[0], name)).encode()).hexdigest()[:32]}.json"
    with suppress(ParnasError, OSError, TypeError, KeyError):
        cached = read_json(entry)
        if cached["file"] == identity:
            return cached["value"]
    value = compute()
    _, _, _, *times = identity
    if _identity(path) == identity and max(times) < now - RECENT_NS:
        with suppress(OSError):
            write_json(entry, {"file": identity, "name": name, "value": value})
    return value


def file_hash(path: Path, algorithm: str) -> str:
    """Return the hex digest of a file by an algorithm of `hashlib`, cached until the file changes."""

    def compute() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, algorithm).hexdigest()

    return str(cached_value(path, algorithm, compute))


def _identity(path: Path) -> list[Any]:
    """Return path, size in bytes, inode, modification time and status-change time (ns) of a file."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
