"""What was found out about a file by reading all of it, remembered in the cache until the file changes."""

import hashlib
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from parnas.data.cache import cache_dir
from parnas.errors import ParnasError
from parnas.files import read_json, write_json

SETTLED_NS = 2_000_000_000
"""A file changed less than this before it was read may change again within the same tick of the file system's clock."""


def remember(path: Path, fact: str, find_out: Callable[[], Any]) -> Any:
    """What `find_out()` tells of a file, a JSON value, or what it told when the file was the very same.

    fact: names what is found out, and changes whenever `find_out` would tell otherwise of the same content.

    A file is the same while its path, size, inode and its times of content and of status are; a program can put back
    all of these but the last. Nothing is remembered of a file that has just changed, or changes meanwhile. What
    `find_out` raises passes through.
    """
    before, now = _identity(path), time.time_ns()
    entry = cache_dir() / "files" / f"{hashlib.sha256(repr((before[0], fact)).encode()).hexdigest()[:32]}.json"
    with suppress(ParnasError, OSError, TypeError, KeyError):
        remembered = read_json(entry)
        if remembered["file"] == before:
            return remembered["found"]
    found = find_out()
    _, _, _, *times = before
    if _identity(path) == before and max(times) < now - SETTLED_NS:
        with suppress(OSError):
            write_json(entry, {"file": before, "fact": fact, "found": found})
    return found


def _identity(path: Path) -> list[Any]:
    status = path.stat()
    return [str(path.resolve()), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
