"""How much a command says, and in which form: `--quiet`, `--verbose` and `--json`, which all commands have."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parnas.errors import ParnasError
from parnas.files import to_json
from parnas.training.reporter import Reporter


@dataclass(frozen=True)
class Output:
    """What was asked for: results go to standard output, progress, notes and errors to standard error."""

    quiet: bool = False
    verbose: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ParnasError("--quiet and --verbose exclude each other; give one.")

    def reporter(self) -> Reporter:
        """Who is told of progress."""
        from parnas.reporters import make_reporter

        return make_reporter(self.quiet, self.verbose)

    def show(self, display: Callable[..., None], *arguments: Any) -> None:
        """Call what shows a result to people, unless it is for a program."""
        if not self.as_json:
            display(*arguments)

    def end(self, result: Mapping[str, Any], written: Sequence[Path] = (), hint: str | None = None) -> None:
        """Name the files that were written, and what comes next; with `--json`, print result and files as an object."""
        if self.as_json:
            lines = [to_json({**result, "written": [str(path) for path in written]})]
        elif self.quiet:
            return
        else:
            lines = [*(f"written: {path}" for path in written), *([] if hint is None else [f"next: {hint}"])]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
