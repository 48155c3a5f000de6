"""Compress a trained network: search for cheaper layers in it, derive a network within a budget, and heal that.

1. `search`: local distillation and scores of cheaper layers (`parnas/pretrained/local_distillation.py`).
2. The best network within the targets, as of any search.
3. `child`: a training of this network from the weights of the search, with the parent as its teacher.
4. Networks to compare with, from scratch: `scratch`, the same network for all steps of the parent's training, and
   `shallower`, an interleaved network of the same cost for as long as the parent and the compression took together.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.evaluation.comparison import Comparison, compare, to_rows
from parnas.evaluation.loading import EvalOptions
from parnas.figures.curves import draw_learning_curves
from parnas.figures.draw import draw_report, draw_run
from parnas.figures.heatmap import AnimationOptions
from parnas.figures.report.data import finite_values
from parnas.figures.report.result import describe_child
from parnas.nas.derive import Derivation, derive, read_constraints, write_derivation
from parnas.pretrained.local_distillation import search_parent
from parnas.pretrained.settings import heal_settings
from parnas.runs.run import ARCH_FILE, PLAIN, Run
from parnas.studies.baselines import EQUAL_COST, hand_designed
from parnas.studies.train_or_load import train_once
from parnas.training.progress import Reporter
from parnas.training.retrain import retrain

__all__ = ["CompressResult", "compress"]

_LEAST_SECONDS = 0.1  # a summary has tenths of seconds
CHILD, SCRATCH, SHALLOWER = "child", "scratch", "shallower"


@dataclass(frozen=True)
class CompressResult:
    """The results of a compression, and the files that it wrote."""

    folder: Path
    parent: Run
    search: Run
    derivation: Derivation
    runs: Mapping[str, Run] = field(repr=False)  # the retrainings by name, `child` first
    comparison: Comparison = field(repr=False)  # of parent and retrainings, on the validation split
    written: tuple[Path, ...] = field(repr=False)

    @property
    def answer(self) -> str:
        """How the child compares with the parent, in a sentence; empty if neither time nor loss could be measured."""
        rows = [row for row in to_rows(self.comparison.table) if row["evaluation"] == PLAIN]
        parent, child, *_ = map(finite_values, rows)
        return describe_child(self.derivation.architecture, child, parent)

    def to_dict(self) -> dict[str, Any]:
        """Return the answer, derivation and comparison as plain values."""
        return {
            "answer": self.answer,
            "parent": str(self.parent.folder),
            "derivation": self.derivation.to_record(self.search).to_dict(),
            "comparison": self.comparison.to_dict(),
        }


def compress(
    config: Config,
    within: Mapping[str, float],
    folder: Path,
    reporter: Reporter,
    *,
    baselines: bool = True,
) -> CompressResult:
    """Run or resume all phases of a compression in `folder`, draw the pictures and the report, and return the results.

    Args:
        config: the configuration of the search, with the parent in `search.parent`; see `search_settings`.
        within: largest costs by metric, as shares of the parent's.
        folder: the folder of the compression; each phase has a subfolder.
        reporter: receives the progress.
        baselines: also train the networks to compare with.

    Raises:
        ParnasError: there is no parent, the parent is within the targets, or no network is, or `folder` holds trainings
            of another configuration.
    """
    if config.search.parent is None:
        raise ParnasError("compress needs a trained network; give its run folder.")
    parent = Run(Path(config.search.parent))
    constraints = read_constraints(None, None, within=within)
    if not any(share < 1 for share in within.values()):
        raise ParnasError(
            "The network itself is within the cost targets (--within); give a share below 1 of its cost, such as "
            "latency=0.6."
        )
    metric, target = next(iter(constraints.within.items()))  # so that the search refuses a target that no network meets
    config = config.replace(search__cost__metric=metric, search__cost__target=target)
    # 1. Search in the parent, and derive.
    searched = train_once(search_parent, config, folder / "search", reporter)
    derivation = derive(searched, constraints, reporter)
    write_derivation(derivation, searched, searched.folder / ARCH_FILE)
    architecture = str(derivation.architecture)
    # 2. Heal the child.
    reporter.note(f"{CHILD}: training {architecture}")
    healing = heal_settings(searched).replace(model__arch=architecture)
    runs = {CHILD: train_once(retrain, healing, folder / CHILD, reporter)}
    # 3. The same network, and a shallower one of the same cost, from scratch.
    if baselines:
        inherited = parent.summary().inherited
        earlier_steps, earlier_seconds = (0, 0.0) if inherited is None else (inherited.steps, inherited.seconds)
        fresh = config.from_scratch(
            search__parent=None, train__teachers=(), train__steps=config.train.steps + earlier_steps
        )
        reporter.note(f"{SCRATCH}: training {architecture} from scratch")
        runs[SCRATCH] = train_once(retrain, fresh.replace(model__arch=architecture), folder / SCRATCH, reporter)
        assert derivation.costs is not None
        blocks = config.search.blocks
        (shallower,) = hand_designed([EQUAL_COST], derivation.architecture, derivation.costs, blocks).values()
        # Networks of equal cost take about equal steps, so that the steps for a time follow from those of `scratch`.
        seconds = earlier_seconds + sum(run.summary().seconds for run in (parent, searched, runs[CHILD]))
        trained = runs[SCRATCH].summary()
        steps = max(1, round(seconds * trained.steps / max(trained.seconds, _LEAST_SECONDS)))
        reporter.note(f"{SHALLOWER}: training {shallower} from scratch for {steps} steps")
        training = fresh.replace(model__arch=shallower, train__steps=steps)
        runs[SHALLOWER] = train_once(retrain, training, folder / SHALLOWER, reporter)
    # 4. Compare and draw.
    folders = [parent.folder, *(run.folder for run in runs.values())]
    comparison = compare(folders, EvalOptions(split="valid"), reporter)
    written = [*draw_run(searched, AnimationOptions())]
    written.append(draw_learning_curves([parent, *runs.values()], folder / "curves.png"))
    written += comparison.write(folder)
    written += draw_report([folder, searched.folder, *folders], folder, reporter.note)
    return CompressResult(folder, parent, searched, derivation, runs, comparison, tuple(written))
