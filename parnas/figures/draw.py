"""Every picture that the files of a run allow."""

from pathlib import Path

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
