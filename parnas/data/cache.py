"""Where downloads, gathered texts and token streams are kept between runs."""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from parnas.errors import ParnasError
from parnas.files import expand_user

Note = Callable[[str], None]
"""Takes a short line of progress, such as "training tokenizer"."""


def silent(_: str) -> None:
    """The `Note` that tells nobody."""


def cache_dir() -> Path:
    """`$PARNAS_CACHE`, or the user's cache folder for parnas."""
    if given := os.environ.get("PARNAS_CACHE"):
        return expand_user(given)
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("parnas"))


@contextmanager
def locked(path: Path, note: Note = silent) -> Iterator[None]:
    """Keep other processes out of `path` in the cache; trouble with the disk becomes a `ParnasError`.

    Raises `ParnasError` where the cache cannot be written (full, read-only, no permission).
    """
    from filelock import FileLock, Timeout

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = FileLock(path.parent / f"{path.name}.lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            note(f"waiting for another process that makes {path}")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()
    except OSError as error:
        raise ParnasError(
            f"The cache {cache_dir()} cannot be used: {error}. Make room there, or set PARNAS_CACHE to another folder."
        ) from error
