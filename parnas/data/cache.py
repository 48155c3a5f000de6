"""The cache folder: downloads, the text of pydoc, token streams, and hashes and other values computed from files."""

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
"""A file changed less than this before it was read may change again within the same tick of the file system's clock."""

Note = Callable[[str], None]
"""A function that gets a short line of progress, such as "training tokenizer"."""


def silent(_: str) -> None:
    """Ignore a line of progress."""


def cache_dir() -> Path:
    """Return `$PARNAS_CACHE`, or the user's cache folder for parnas."""
    if given := os.environ.get("PARNAS_CACHE"):
        return expand_user(given)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("parnas"))


@contextmanager
def locked(path: Path, note: Note = silent) -> Iterator[None]:
    """Lock `path` in the cache against other processes; wait if another process holds the lock.

    Raises:
        ParnasError: The cache cannot be written, or the body raises an `OSError` (full, read-only, no permission).
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / f"{path.name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            note(f"waiting for another process that makes {path}")
        with lock:
            yield
    except OSError as error:
        raise ParnasError(
            f"The cache {cache_dir()} cannot be used: {error}. Make room there, or set PARNAS_CACHE to another folder."
        ) from error


def cached_fact(path: Path, fact: str, compute: Callable[[], Any]) -> Any:
    """Return `compute()`, a JSON value computed from a file, from the cache as long as the file stays the same.

    A file is the same while its path, size, inode, modification time and status time are; programs can restore all of
    these but the last. The value of a file that has just changed, or changes meanwhile, is not cached.

    Args:
        path: The file.
        fact: Name of the value, with the version of the computation.
        compute: Reads the file; its errors pass through.
    """
    identity, now = _identity(path), time.time_ns()
    entry = cache_dir() / "files" / f"{hashlib.sha256(repr((identity[0], fact)).encode()).hexdigest()[:32]}.json"
    with suppress(ParnasError, OSError, TypeError, KeyError):
        cached = read_json(entry)
        if cached["file"] == identity:
            return cached["value"]
    value = compute()
    _, _, _, *times = identity
    if _identity(path) == identity and max(times) < now - RECENT_NS:
        with suppress(OSError):
            write_json(entry, {"file": identity, "fact": fact, "value": value})
    return value


def file_hash(path: Path, algorithm: str) -> str:
    """Return the hex digest of a file, cached as long as the file stays the same."""

    def compute() -> str:
        with path.open("rb") as file:
            return hashlib.file_digest(file, algorithm).hexdigest()

    return str(cached_fact(path, algorithm, compute))


def _identity(path: Path) -> list[Any]:
    """Return path, size, inode and times of a file."""
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
