"""Functions that several commands share: output, exit codes, interruption, and reading of arguments."""

import errno
import os
import re
import shlex
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from parnas.config.loader import Config, Override, read_override
from parnas.errors import ParnasError, says_out_of_memory
from parnas.runs import resolve
from parnas.runs.files import to_json
from parnas.runs.resolve import launched_by_torchrun
from parnas.runs.run import Run
from parnas.training.progress import Reporter, make_reporter

if TYPE_CHECKING:
    from parnas.studies.pipeline import PipelineResult

_NO_SPACE = "Free some space, then run the same command again with the same --run; the files so far are intact."
_OS_ERROR_HINTS = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _NO_SPACE),
    **dict.fromkeys(
        (errno.EACCES, errno.EPERM, errno.EROFS, errno.EFBIG), "Choose another folder with --run or --out."
    ),
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG), "Choose another path."),
    errno.EEXIST: "Choose another name.",
}
"""Advice for the errors of the operating system that a user can fix."""


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Turn errors that a user can fix into a message and exit code 2; let all others pass, as they are bugs."""
    try:
        yield
    except ParnasError as error:
        _exit_with(f"error: {error}", 2)
    except OSError as error:
        if error.errno not in _OS_ERROR_HINTS:
            raise
        place = error.filename or "while writing"
        _exit_with(f"error: {error.strerror}: {place}. {_OS_ERROR_HINTS[error.errno]}", 2)
    except (MemoryError, RuntimeError) as error:  # torch raises RuntimeError when memory ends
        if not says_out_of_memory(error):
            raise
        _exit_with(f"error: There is not enough memory ({error!s:.200}). Lower widths, lengths or batch sizes.", 2)


@contextmanager
def interruptible(resume_hint: Callable[[], str]) -> Iterator[None]:
    """On Ctrl-C or a signal that ends a training, print `resume_hint()` and exit with 128 plus the signal's number."""
    from parnas.training.interruptions import Stopped

    try:
        yield
    except Stopped as stopped:
        _exit_with(f"{stopped}; to resume: {resume_hint()}", 128 + stopped.number)
    except KeyboardInterrupt:
        _exit_with(f"interrupted; to resume: {resume_hint()}", 128 + signal.SIGINT)


def _exit_with(message: str, code: int) -> NoReturn:
    """Print a message to standard error and exit; under torchrun the message names the process."""
    prefix = "" if is_main_process() else f"[process {os.environ['RANK']}] "
    print(f"{prefix}{message}", file=sys.stderr)
    raise SystemExit(code) from None


@dataclass(frozen=True)
class Output:
    """The output options of a command: results go to standard output, progress and messages to standard error."""

    quiet: bool = False
    verbose: bool = False
    as_json: bool = False

    def __post_init__(self) -> None:
        if self.quiet and self.verbose:
            raise ParnasError("--quiet and --verbose exclude each other; give one.")

    def reporter(self) -> Reporter:
        """Return a reporter of progress that follows `--quiet` and `--verbose`."""
        return make_reporter(self.quiet, self.verbose)

    def show(self, display: Callable[..., None], *arguments: Any) -> None:
        """Call `display` with the arguments, to print a result, unless `--json` is given."""
        if not self.as_json:
            display(*arguments)

    def end(self, result: Mapping[str, Any], written: Sequence[Path] = (), hint: str | None = None) -> None:
        """Print the written files and the next command (`hint`); with `--json`, result and files as one JSON object."""
        if self.as_json:
            print(to_json({**result, "written": [str(path) for path in written]}))
        elif not self.quiet:
            for line in [*(f"written: {path}" for path in written), *([f"next: {hint}"] if hint else [])]:
                print(line)


def study_resume_hint(folder: Path | None = None) -> str:
    """Return the hint to run the same command again, with `--run` if a folder is given."""
    return "run the same command again" + ("" if folder is None else f", with --run {shlex.quote(str(folder))}")


def training_resume_hint(command: str, folder: Path) -> str:
    """Return the command that resumes an interrupted search or retraining."""
    if launched_by_torchrun():
        return "run the same torchrun command again"
    started = Run(folder).started()
    return f"parnas {command} --run {shlex.quote(str(folder))} --resume" if started else study_resume_hint(folder)


def is_main_process() -> bool:
    """Check whether this process prints and draws: under torchrun only the process with rank 0, else always."""
    return os.environ.get("RANK", "0") == "0"


def refuse_torchrun(command: str) -> None:
    """Raise `ParnasError` if torchrun started several processes, which cannot share `command`."""
    if launched_by_torchrun():
        raise ParnasError(f"torchrun is for search and retrain; run {command} without torchrun.")


def resolve_arguments(
    settings: list[str] | None,
    run: Path | None,
    resume: bool,
    command: str,
    arch: str | None = None,
    inherit: Path | None = None,
    base: Config | None = None,
) -> tuple[Config, Path]:
    """Return the configuration and the run folder from the arguments of `command`.

    `settings` are the configuration and the overrides; `base` is the configuration if `settings` names none and no run
    is resumed. Without `run`, a new folder is made in `runs/`.
    """
    named, overrides = split_configuration(settings)
    source = base if named is None and not resume else named
    return resolve.resolve_config_and_run(source, overrides, run, resume, command, arch, inherit)


def split_configuration(settings: list[str] | None) -> tuple[str | None, list[Override]]:
    """Split arguments into the configuration (`None` if there is none) and the overrides `key=value`."""
    arguments = settings or []
    # `os.path` returns false for texts longer than any file name, where `Path.is_file` raises.
    overrides: list[Override] = [each for each in arguments if "=" in each and not os.path.isfile(each)]  # noqa: PTH113
    files = [each for each in arguments if each not in overrides]
    if len(files) > 1:
        raise ParnasError(
            f"Give one configuration, not {len(files)}: {', '.join(files)}. Overrides look like key=value."
        )
    return files[0] if files else None, overrides


def split_runs(arguments: Sequence[str]) -> tuple[list[Path], dict[str, Any]]:
    """Split arguments into run folders and overrides `evaluation.key=value`, returned as values by key."""
    overrides = [each for each in arguments if re.match(r"\w+\.[\w.]+=", each) and not os.path.exists(each)]  # noqa: PTH110
    return [Path(each) for each in arguments if each not in overrides], dict(map(read_override, overrides))


def show_pipeline(result: "PipelineResult", output: Output, hint: str) -> None:
    """Print the derived architecture, the comparisons, the written files and the next command of a pipeline."""
    from parnas.cli.tables import show_comparison, show_derivation, show_finalists
    from parnas.studies.baselines import DERIVED

    if DERIVED in result.runs:  # not with a front, whose networks the comparison lists
        output.show(show_derivation, result.derivation)
    if result.finalists:
        output.show(show_finalists, result.finalists)
    for comparison in (result.comparison, result.test):
        if comparison is not None:
            output.show(show_comparison, comparison)
    output.show(print)
    output.end(result.to_dict(), result.written, hint)


def draw(runs: Sequence[Run], frame_ms: int | None = None, width: int | None = None) -> list[Path]:
    """Draw all pictures of the runs into their folders and return the paths.

    `frame_ms` is the time of a frame of the animation in milliseconds, `width` its width in pixels.
    """
    from parnas.figures.draw import draw_run
    from parnas.figures.heatmap import FRAME_MS, AnimationOptions

    options = AnimationOptions(FRAME_MS if frame_ms is None else frame_ms, width)
    return [path for run in runs for path in draw_run(run, options)]
