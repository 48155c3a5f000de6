"""The whole journey on an embedded corpus: search, derive, retrain beside baselines, compare, draw."""

import sys
from pathlib import Path

from parnas.commands import report
from parnas.config import PACKAGED, load_config
from parnas.display import show_comparison, show_derivation
from parnas.evaluation.comparison import compare
from parnas.evaluation.entries import Conditions
from parnas.figures.curves import draw_learning_curves
from parnas.figures.draw import draw_run
from parnas.figures.heatmap import AnimationOptions
from parnas.nas.derive import derive, write_derivation
from parnas.nas.search import search
from parnas.output import Output
from parnas.training.repeated import train_once
from parnas.training.retrain import retrain


def run_demo(folder: Path, output: Output) -> None:
    """Run every phase of `demo.yaml` into `folder`, or go on, and print string, table and where the pictures are."""
    config, reporter = load_config(PACKAGED / "demo.yaml"), output.reporter()
    found = train_once(search, config, folder / "search", reporter)
    derivation = derive(found)
    write_derivation(derivation, found, found.folder / "arch.yaml")
    blocks = config.search.blocks
    candidates = {
        "derived": str(derivation.architecture),
        "interleaved": f"interleaved-{blocks}",
        "all-f": f"all-f-{blocks}",
    }
    runs = []
    for name, arch in candidates.items():
        reporter.note(f"{name}: training {arch}")
        runs.append(train_once(retrain, config.replace(model__arch=arch), folder / name, reporter))
    comparison = compare([run.folder for run in runs], Conditions(), reporter)
    pictures = draw_run(found, AnimationOptions())
    pictures.append(draw_learning_curves([found, *runs], folder / "curves.png"))
    written = [*pictures, *comparison.write(folder)]
    written += report([folder, found.folder, *(run.folder for run in runs)], folder, reporter)
    output.show(show_derivation, derivation)
    output.show(show_comparison, comparison)
    output.show(print)
    output.end({"derivation": derivation.to_dict(found), "comparison": comparison.to_dict()}, written, next_step())


def next_step() -> str:
    """How to use the environment that this runs in."""
    if sys.prefix == sys.base_prefix:
        return "parnas --help"
    return f"source {Path(sys.prefix) / 'bin/activate'}, which activates this environment; then parnas --help"
