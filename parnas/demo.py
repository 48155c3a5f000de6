"""The whole journey on an embedded corpus: search, derive, retrain beside baselines, compare, draw."""

import sys
from pathlib import Path

from parnas.config import PACKAGED, load_config
from parnas.display import show_comparison, show_derivation
from parnas.evaluation.comparison import compare
from parnas.evaluation.entries import Conditions
from parnas.figures.curves import draw_learning_curves
from parnas.figures.draw import draw_run
from parnas.figures.heatmap import AnimationOptions
from parnas.nas.derive import derive, write_derivation
from parnas.nas.search import search
from parnas.training.repeated import train_once
from parnas.training.reporter import Reporter
from parnas.training.retrain import retrain


def run_demo(folder: Path, reporter: Reporter) -> None:
    """Run every phase of `demo.yaml` into `folder`, or go on, and print string, table and where the pictures are."""
    config = load_config(PACKAGED / "demo.yaml")
    found = train_once(search, config, folder / "search", reporter)
    derivation = derive(found)
    write_derivation(derivation, found, found.folder / "arch.yaml")
    blocks = config.search.blocks
    candidates = {
        "derived": str(derivation.architecture),
        "interleaved": f"interleaved-{blocks}",
        "all-f": f"all-f-{blocks}",
    }
    runs = [
        train_once(retrain, config.replace(model__arch=arch), folder / name, reporter)
        for name, arch in candidates.items()
    ]
    comparison = compare([run.folder for run in runs], Conditions(), reporter)
    pictures = draw_run(found, AnimationOptions())
    pictures.append(draw_learning_curves([found, *runs], folder / "curves.png"))
    comparison.write(folder)
    show_derivation(derivation)
    show_comparison(comparison)
    print("\npictures:\n" + "\n".join(f"  {path}" for path in pictures))
    print(activation_hint())


def activation_hint() -> str:
    """How to use the environment that this runs in."""
    if sys.prefix == sys.base_prefix:
        return "next: parnas --help"
    script = Path(sys.prefix) / ("Scripts/activate" if sys.platform == "win32" else "bin/activate")
    return f"activate the environment: source {script}"
