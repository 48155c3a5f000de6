"""Every picture that the files of a run allow, and the page of several."""

from collections.abc import Callable, Sequence
from pathlib import Path

from parnas.errors import ParnasError
from parnas.figures.curves import draw_learning_curves
from parnas.figures.heatmap import DEFAULTS, AnimationOptions, draw_pi_animation, draw_pi_frames
from parnas.figures.history import PiHistory
from parnas.figures.lines import draw_pi_lines
from parnas.run import Run


def draw_run(run: Run, options: AnimationOptions = DEFAULTS) -> list[Path]:
    """Draw the pictures of a run anew into its folder `figures`: curves always, pi of a search besides.

    Returns their paths; raises `ParnasError` if the run logged nothing yet or its files do not fit.
    """
    paths = []
    if run.kind() == "search":
        history = PiHistory.from_run(run)
        paths.append(draw_pi_animation(history, run.figures / "pi.gif", options))
        paths += draw_pi_frames(history, run.figures)
        paths.append(draw_pi_lines(history, run.figures / "pi-lines.png"))
    paths.append(draw_learning_curves([run], run.figures / "curves.png"))
    return paths


def draw_report(paths: Sequence[Path], folder: Path, note: Callable[[str], None]) -> list[Path]:
    """Write `report.html` at the end of a command; where its other files cannot be shown, it ends well all the same."""
    from parnas.figures.report import write_report

    try:
        return [write_report(paths, folder)]
    except ParnasError as error:
        note(f"warning: there is no report: {error}")
        return []
