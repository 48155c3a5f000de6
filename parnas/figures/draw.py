"""The figures of a run folder, and the report that a command writes at its end."""

from collections.abc import Callable, Sequence
from pathlib import Path

from parnas.errors import ParnasError
from parnas.figures.curves import draw_learning_curves
from parnas.figures.diagram import draw_network
from parnas.figures.heatmap import DEFAULTS, AnimationOptions, draw_pi_animation, draw_pi_frames
from parnas.figures.panels import draw_pi_lines
from parnas.runs.pi_history import PiHistory
from parnas.runs.run import ARCH_FILE, Run

__all__ = ["draw_report", "draw_run"]


def draw_run(run: Run, options: AnimationOptions = DEFAULTS) -> list[Path]:
    """Draw the learning curves of a run, and of a search pi and the derived network, into its folder `figures`.

    Returns the paths of the pictures; raises `ParnasError` if the run logged nothing yet or its files contradict each
    other.
    """
    paths = []
    if run.kind() == "search":
        history = PiHistory.from_run(run)
        paths.append(draw_pi_animation(history, run.figures / "pi.gif", options))
        paths += draw_pi_frames(history, run.figures)
        paths.append(draw_pi_lines(history, run.figures / "pi-lines.png"))
        if (run.folder / ARCH_FILE).is_file():
            paths.append(draw_network(run.derivation(), run.folder))
    paths.append(draw_learning_curves([run], run.figures / "curves.png"))
    return paths


def draw_report(paths: Sequence[Path], folder: Path, note: Callable[[str], None]) -> list[Path]:
    """Write `report.html` on the runs in `paths` into `folder`, and return its path in a list.

    If the report fails, `note` receives a warning and the list is empty, so that the calling command can continue.
    """
    from parnas.figures.report.page import write_report

    try:
        return [write_report(paths, folder)]
    except ParnasError as error:
        note(f"warning: there is no report: {error}")
        return []
