"""Parts that the commands share: output, exit codes, interruption, and reading of arguments."""

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
from typing import TYPE_CHECKING, Any

from parnas.config.loader import Config, Override, read_override
from parnas.errors import ParnasError, says_out_of_memory
from parnas.runs import resolve
from parnas.runs.files import to_json, write_text
from parnas.runs.resolve import is_distributed
from parnas.runs.run import Run
from parnas.training.progress import Reporter

if TYPE_CHECKING:
    from parnas.evaluation.loading import EvalOptions
    from parnas.studies.pipeline import PipelineResult

_SAME_COMMAND = "run the same command again"
_OS_ERROR_HINTS = {
    errno.ENOSPC: "Free some space, then run the same command again with the same --run; the files so far are intact.",
    errno.EDQUOT: "Your quota is used up: free some space, then run the same command again with the same --run.",
    errno.EFBIG: "The file system allows no file of that size; choose another folder.",
    errno.EROFS: "The file system is read-only; choose another folder with --run or --out.",
    errno.EACCES: "You have no permission to read or write there; choose another folder with --run or --out.",
    errno.EPERM: "You have no permission to write there; choose another folder with --run or --out.",
    errno.EEXIST: "A file has that name; choose another name.",
    errno.ENOENT: "A part of the path does not exist; choose another folder.",
    errno.ENOTDIR: "A part of the path is a file; choose another folder.",
    errno.EISDIR: "This is a folder; give a file.",
    errno.ENAMETOOLONG: "The name is too long; choose a shorter one.",
}


class Interrupted(Exception):
    """A command ended by a signal; the text names the command that resumes it."""

    def __init__(self, message: str, number: int = signal.SIGINT) -> None:
        super().__init__(message)
        self.number = number


@contextmanager
def exit_on_error() -> Iterator[None]:
    """Exit with code 2 and a message on user errors, with 128 plus its number on a signal; let bugs pass."""
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
    except Interrupted as interruption:
        _exit_with(str(interruption), 128 + interruption.number)


def _exit_with(message: str, code: int) -> None:
    """Print a message to standard error and exit; under torchrun the message names the process."""
    rank = os.environ.get("RANK", "0")
    print(message if rank == "0" else f"[process {rank}] {message}", file=sys.stderr)
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
        """Return the reporter of progress."""
        from parnas.training.progress import make_reporter

        return make_reporter(self.quiet, self.verbose)

    def show(self, display: Callable[..., None], *arguments: Any) -> None:
        """Call a function that prints a result, unless the output is JSON."""
        if not self.as_json:
            display(*arguments)

    def end(self, result: Mapping[str, Any], written: Sequence[Path] = (), hint: str | None = None) -> None:
        """Print the written files and the next command; with `--json`, print result and files as one object."""
        if self.as_json:
            lines = [to_json({**result, "written": [str(path) for path in written]})]
        elif self.quiet:
            return
        else:
            lines = [*(f"written: {path}" for path in written), *([] if hint is None else [f"next: {hint}"])]
        sys.stdout.write("".join(f"{line}\n" for line in lines))


@contextmanager
def interruptible(resume_hint: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C and the signals that end a training into a message that says how to resume."""
    from parnas.training.interruptions import Stopped

    try:
        yield
    except Stopped as stopped:
        raise Interrupted(f"{stopped}; to resume: {resume_hint()}", stopped.number) from None
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; to resume: {resume_hint()}") from None


def study_resume_hint(folder: Path | None = None) -> str:
    """Return the hint to run the same command again, with the run folder where it has one."""
    return _SAME_COMMAND + ("" if folder is None else f", with --run {shlex.quote(str(folder))}")


def training_resume_hint(command: str, folder: Path) -> str:
    """Return the command that resumes an interrupted search or retraining."""
    if is_distributed():
        return "run the same torchrun command again"
    started = Run(folder).started()
    return f"parnas {command} --run {shlex.quote(str(folder))} --resume" if started else study_resume_hint(folder)


def is_main_process() -> bool:
    """Return whether this process prints and draws; under torchrun only one does."""
    return os.environ.get("RANK", "0") == "0"


def refuse_torchrun(command: str) -> None:
    """Raise `ParnasError` under torchrun, for a command that several processes cannot share."""
    if is_distributed():
        raise ParnasError(f"torchrun is for search and retrain; run {command} without torchrun.")


def resolve_arguments(
    settings: list[str] | None, run: Path | None, resume: bool, command: str, arch: str | None = None
) -> tuple[Config, Path]:
    """Return the configuration and the run folder that the arguments of a training command name."""
    return resolve.resolve_config_and_run(*split_configuration(settings), run, resume, command, arch)


def split_configuration(settings: list[str] | None) -> tuple[str | None, list[Override]]:
    """Split arguments into the configuration, `None` if there is none, and the overrides."""
    arguments = settings or []
    overrides: list[Override] = [each for each in arguments if "=" in each and not Path(each).is_file()]
    files = [each for each in arguments if each not in overrides]
    if len(files) > 1:
        raise ParnasError(f"Give one configuration, not {len(files)}: {', '.join(files)}. Overrides have key=value.")
    return files[0] if files else None, overrides


def split_runs(arguments: Sequence[str]) -> tuple[list[Path], dict[str, Any]]:
    """Split arguments into run folders and overrides by dotted key."""
    overrides = [each for each in arguments if re.match(r"\w+\.[\w.]+=", each) and not Path(each).exists()]
    return [Path(each) for each in arguments if each not in overrides], dict(map(read_override, overrides))


def evaluate_runs(
    runs: Sequence[Path], options: "EvalOptions", analyses: str | None, folder: Path, output: Output
) -> None:
    """Compare and analyse runs: print the tables, write tables, pictures and the report into the folder."""
    from parnas.cli.tables import show_analysis, show_comparison
    from parnas.evaluation.analyses import analyse, read_names
    from parnas.evaluation.comparison import compare, to_rows
    from parnas.figures.analyses import DRAW
    from parnas.figures.curves import draw_learning_curves
    from parnas.figures.draw import draw_report
    from parnas.figures.report.data import analysis_files

    names, reporter = [] if analyses is None else read_names(analyses), output.reporter()
    comparison = compare(runs, options, reporter)
    for path in analysis_files(folder):  # left by an earlier comparison in this folder
        path.unlink()
    written = comparison.write(folder)
    written.append(draw_learning_curves([Run(run) for run in runs], folder / "curves.png"))
    output.show(show_comparison, comparison)
    result = comparison.to_dict()
    for analysis in analyse(runs, options, names, reporter) if names else ():
        output.show(show_analysis, analysis)
        written.append(folder / f"{analysis.name}.csv")
        write_text(written[-1], analysis.table.to_csv(index=False))
        written += DRAW[analysis.name](analysis.table, folder)
        result[analysis.name] = {"rows": to_rows(analysis.table), "notes": list(analysis.notes)}
    output.end(result, [*written, *draw_report([folder, *runs], folder, reporter.note)])


def show_pipeline(result: "PipelineResult", output: Output, hint: str) -> None:
    """Print the architecture, the tables and the written files of a pipeline."""
    from parnas.cli.tables import show_comparison, show_derivation, show_finalists

    output.show(show_derivation, result.derivation)
    if result.finalists:
        output.show(show_finalists, result.finalists)
    for comparison in (result.comparison, result.test):
        if comparison is not None:
            output.show(show_comparison, comparison)
    output.show(print)
    output.end(result.to_dict(), result.written, hint)


def draw(runs: Sequence[Run], frame_ms: int | None = None, width: int | None = None) -> list[Path]:
    """Draw every picture of the runs and return the files."""
    from parnas.figures.draw import draw_run
    from parnas.figures.heatmap import FRAME_MS, AnimationOptions

    options = AnimationOptions(frame_ms or FRAME_MS, width)
    return [path for run in runs for path in draw_run(run, options)]
