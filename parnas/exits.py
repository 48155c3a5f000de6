"""How a command ends: one message and an exit code for what a user can mend, and for being interrupted."""

import errno
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from parnas.errors import ParnasError, says_out_of_memory

CURES = {
    errno.ENOSPC: "Make room, then give the same command again, with the same --run; what was written before is whole.",
    errno.EDQUOT: "Your quota is used up: make room, then give the same command again, with the same --run.",
    errno.EFBIG: "The file is larger than this place allows; choose another folder.",
    errno.EROFS: "The file system is read-only; choose another folder with --run or --out.",
    errno.EACCES: "You may not read or write there; choose another folder with --run or --out.",
    errno.EPERM: "You may not write there; choose another folder with --run or --out.",
    errno.EEXIST: "That name is taken by a file; choose another.",
    errno.ENOENT: "A part of the path does not exist; choose another folder.",
    errno.ENOTDIR: "A part of the path is a file; choose another folder.",
    errno.EISDIR: "That is a folder; give a file.",
    errno.ENAMETOOLONG: "Choose a shorter name.",
}


class Interrupted(Exception):
    """A signal stopped a command; the text says how to go on."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def told_in_one_message() -> Iterator[None]:
    """Mistakes end with a message and exit code 2, signals with 128 and their number; anything else is a bug."""
    try:
        yield
    except ParnasError as error:
        leave(f"error: {error}", 2)
    except OSError as error:
        if error.errno not in CURES:
            raise
        leave(f"error: {error.strerror}: {error.filename or 'while writing'}. {CURES[error.errno]}", 2)
    except (MemoryError, RuntimeError) as error:  # torch's own is a RuntimeError
        if not says_out_of_memory(error):
            raise
        leave(f"error: There is not enough memory ({error!s:.200}). Lower widths, lengths or batch sizes.", 2)
    except Interrupted as interruption:
        leave(str(interruption), 128 + interruption.number)


def leave(message: str, code: int) -> None:
    """Print to standard error, naming the process where torchrun has started several, and exit."""
    rank = os.environ.get("RANK", "0")
    print(message if rank == "0" else f"[process {rank}] {message}", file=sys.stderr)
    raise SystemExit(code) from None
