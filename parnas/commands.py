"""What the commands have in common: reading their settings, being interrupted, drawing runs."""

import os
import re
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from parnas import inputs
from parnas.config import Config, Override, read_override
from parnas.errors import ParnasError
from parnas.exits import Interrupted
from parnas.files import write_text
from parnas.inputs import several
from parnas.output import Output
from parnas.run import Run

if TYPE_CHECKING:
    from parnas.evaluation.entries import Conditions
    from parnas.pipelines import Pipeline


@contextmanager
def interruptible(way_on: Callable[[], str]) -> Iterator[None]:
    """Turn Ctrl-C and the signals that end a training into a message with the command that goes on."""
    from parnas.training.stopping import Stopped

    try:
        yield
    except Stopped as stopped:
        raise Interrupted(f"{stopped}; go on with: {way_on()}", stopped.number) from None
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; go on with: {way_on()}") from None


def again(folder: Path | None = None) -> str:
    """That the same command goes on, where it names its folder."""
    return "the same command again" + ("" if folder is None else f", with --run {shlex.quote(str(folder))}")


def way_on(command: str, folder: Path) -> str:
    """How to go on with a training that was stopped, or had not yet begun."""
    if several():
        return "the same torchrun command again"
    return f"parnas {command} --run {shlex.quote(str(folder))} --resume" if Run(folder).begun() else again(folder)


def leads() -> bool:
    """Whether this process is the one that prints and draws, of those that torchrun has started."""
    return os.environ.get("RANK", "0") == "0"


def refuse_several(command: str) -> None:
    """Raise in a command that torchrun cannot share out."""
    if several():
        raise ParnasError(f"torchrun is for search and retrain; start {command} by itself, on any number of machines.")


def settle(
    settings: list[str] | None, run: Path | None, resume: bool, command: str, arch: str | None = None
) -> tuple[Config, Path]:
    """The configuration and the run folder that a training command means."""
    return inputs.settle(*split_configuration(settings), run, resume, command, arch)


def split_configuration(settings: list[str] | None) -> tuple[str | None, list[Override]]:
    """The configuration among the arguments of a training command, none where there is none, and the overrides."""
    given = settings or []
    overrides: list[Override] = [each for each in given if "=" in each and not Path(each).is_file()]
    files = [each for each in given if each not in overrides]
    if len(files) > 1:
        raise ParnasError(
            f"One configuration is read, not {len(files)}: {', '.join(files)}. Overrides look like key=value."
        )
    return files[0] if files else None, overrides


def split_settings(given: Sequence[str]) -> tuple[list[Path], dict[str, Any]]:
    """The run folders among the arguments of a command, and the settings, by dotted key."""
    settings = [each for each in given if re.match(r"\w+\.[\w.]+=", each) and not Path(each).exists()]
    changes = dict(read_override(each) for each in settings)
    return [Path(each) for each in given if each not in settings], changes


def evaluate_runs(
    runs: Sequence[Path], conditions: "Conditions", analyses: str | None, folder: Path, output: Output
) -> None:
    """Compare runs and analyse them: shows tables, writes tables and pictures into a folder."""
    from parnas.comparison_display import show_comparison
    from parnas.display import show_analysis
    from parnas.evaluation.analyses import analyse, read_names
    from parnas.evaluation.comparison import compare, to_rows
    from parnas.figures.analyses import DRAW
    from parnas.figures.curves import draw_learning_curves
    from parnas.figures.draw import draw_report
    from parnas.figures.report_runs import analysis_files

    names, reporter = [] if analyses is None else read_names(analyses), output.reporter()
    comparison = compare(runs, conditions, reporter)
    for path in analysis_files(folder):  # of an earlier comparison there
        path.unlink()
    written = comparison.write(folder)
    written.append(draw_learning_curves([Run(run) for run in runs], folder / "curves.png"))
    output.show(show_comparison, comparison)
    result = comparison.to_dict()
    for analysis in analyse(runs, conditions, names, reporter) if names else ():
        output.show(show_analysis, analysis)
        written.append(folder / f"{analysis.name}.csv")
        write_text(written[-1], analysis.table.to_csv(index=False))
        written += DRAW[analysis.name](analysis.table, folder)
        result[analysis.name] = {"rows": to_rows(analysis.table), "notes": list(analysis.notes)}
    output.end(result, [*written, *draw_report([folder, *runs], folder, reporter.note)])


def show_pipeline(found: "Pipeline", output: Output, hint: str) -> None:
    """Print string, tables and where the pictures are."""
    from parnas.comparison_display import show_comparison
    from parnas.display import show_derivation, show_finalists

    output.show(show_derivation, found.derivation)
    if found.finalists:
        output.show(show_finalists, found.finalists)
    for comparison in (found.comparison, found.test):
        if comparison is not None:
            output.show(show_comparison, comparison)
    output.show(print)
    output.end(found.to_dict(), found.written, hint)


def draw(runs: Sequence[Run], frame_ms: int | None = None, width: int | None = None) -> list[Path]:
    """Draw every picture of the runs and name the files."""
    from parnas.figures.draw import draw_run
    from parnas.figures.heatmap import FRAME_MS, AnimationOptions

    options = AnimationOptions(frame_ms or FRAME_MS, width)
    return [path for run in runs for path in draw_run(run, options)]
