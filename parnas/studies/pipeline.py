"""The pipeline of one configuration: search, derive, retrain the derived network and baselines, compare, draw.

Perplexities are compared on the validation split and, if requested, on the test split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.evaluation.comparison import Comparison, compare, median_rate
from parnas.evaluation.loading import EvalOptions
from parnas.evaluation.tune_eval import Grid
from parnas.evaluation.tune_eval import tune_eval as tune_evaluation
from parnas.figures.curves import draw_learning_curves
from parnas.figures.draw import draw_report, draw_run
from parnas.figures.heatmap import AnimationOptions
from parnas.figures.report.data import COMPARISON
from parnas.nas.cost import costs_of_run
from parnas.nas.derive import Derivation, derive, write_derivation
from parnas.nas.search import search
from parnas.runs.files import read_json
from parnas.runs.records import parse_rows
from parnas.runs.run import TUNED_EVAL, Run
from parnas.runs.trained_run import TrainedRun
from parnas.studies.baselines import DERIVED, hand_designed
from parnas.studies.finalists import Finalist, refuse_other_network, train_finalists
from parnas.studies.train_or_load import train_once
from parnas.training.progress import Reporter
from parnas.training.retrain import retrain

__all__ = ["PipelineResult", "run_pipeline"]


@dataclass(frozen=True)
class PipelineResult:
    """The results of all phases of a pipeline, and the files that it wrote."""

    folder: Path
    search: TrainedRun
    derivation: Derivation
    finalists: tuple[Finalist, ...]
    """The finalists, best first, so that the first has the `derivation`; empty if no finalists were trained."""
    runs: Mapping[str, TrainedRun] = field(repr=False)
    """The retrainings, by name: `derived`, then the baselines."""
    comparison: Comparison = field(repr=False)
    """The comparison of `runs` on the validation split."""
    test: Comparison | None = field(repr=False)
    """The comparison of `runs` on the test split; `None` if this call did not read that split."""
    written: tuple[Path, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the derivation, the finalists and the comparisons as plain values."""
        result = {
            "derivation": self.derivation.to_record(Run(self.search.folder)).to_dict(),
            "finalists": [finalist.to_dict() for finalist in self.finalists],
            "comparison": self.comparison.to_dict(),
        }
        return result if self.test is None else {**result, "test": self.test.to_dict()}


def run_pipeline(
    config: Config,
    baselines: Sequence[str],
    folder: Path,
    reporter: Reporter,
    *,
    finalists: int = 1,
    tune_eval: bool = False,
    test: bool = False,
) -> PipelineResult:
    """Run or resume all phases of a pipeline in `folder`, draw the pictures and the report, and return the results.

    Args:
        config: the configuration of all phases, without `model.arch`.
        baselines: names of the baselines to retrain and to compare with the derived network; see `hand_designed`.
        folder: the folder of the pipeline; each training has a subfolder.
        reporter: receives the progress.
        finalists: train up to this many networks briefly, the derived network and others with fewer and fewer attention
            layers, and take the best of them as the derived network; 1 for no such trainings.
        tune_eval: also evaluate dynamically and with a cache, with settings tuned on the validation split.
        test: also compare on the test split, in the subfolder `test`; a comparison that exists there is kept.

    Raises:
        ParnasError: `config` has an architecture, `finalists` is less than 1, or `folder` holds trainings of another
            configuration or network.
    """
    if config.model.arch is not None:
        raise ParnasError(
            "A pipeline trains the network that its search derives; leave out model.arch, or use parnas retrain."
        )
    if finalists < 1:
        raise ParnasError(f"finalists (--finalists) is {finalists}; give 1 or more.")
    # 1. Search and derive a network, or select a network with less attention by short trainings.
    searched = train_once(search, config, folder / "search", reporter)
    derivation, trained_finalists = derive(searched), list[Finalist]()
    if finalists > 1:
        finalist_folder = folder / "finalists"
        trained_finalists = train_finalists(searched, derivation, finalists, config, finalist_folder, reporter)
    if trained_finalists:
        strings = tuple(str(finalist.derivation.architecture) for finalist in trained_finalists)
        derivation = replace(trained_finalists[0].derivation, finalists=strings)

    # 2. Retrain the derived network and the baselines.
    costs = derivation.costs or costs_of_run(searched.folder, searched.config(), config.search.cost.metric, reporter)
    networks = {DERIVED: str(derivation.architecture)}
    networks |= hand_designed(baselines, derivation.architecture, costs, config.search.blocks)
    for name, arch in networks.items():
        refuse_other_network(folder / name, arch)
    write_derivation(derivation, searched, searched.folder / "arch.yaml")
    runs: dict[str, Run] = {}
    for name, arch in networks.items():
        reporter.note(f"{name}: training {arch}")
        runs[name] = train_once(retrain, config.replace(model__arch=arch), folder / name, reporter)

    # 3. Compare them: on the validation split in each call, on the test split only once.
    folders = [run.folder for run in runs.values()]
    for run in runs.values() if tune_eval else []:
        if not (run.folder / TUNED_EVAL).is_file():
            tune_evaluation(run, Grid(), EvalOptions(), reporter)
    test_comparison, test_folder = None, folder / "test"
    tested_before = (test_folder / COMPARISON).is_file()
    if tested_before:
        _refuse_retrained_networks(test_folder / COMPARISON, runs)
    comparison = compare(folders, EvalOptions(split="valid", tuned=tune_eval), reporter)
    pictures = draw_run(searched, AnimationOptions())
    pictures.append(draw_learning_curves([searched, *runs.values()], folder / "curves.png"))
    written = [*pictures, *comparison.write(folder)]
    if test and tested_before:
        reporter.note(f"{test_folder} is kept with its results; remove it to evaluate on the test split again")
    elif test:
        test_comparison = compare(folders, EvalOptions(split="test", tuned=tune_eval), reporter)
        written += test_comparison.write(test_folder)
    compared = [folder, *([test_folder] if test or tested_before else [])]
    written += draw_report([*compared, searched.folder, *folders], folder, reporter.note)
    return PipelineResult(
        folder,
        TrainedRun.read(searched),
        derivation,
        tuple(trained_finalists),
        {name: TrainedRun.read(run) for name, run in runs.items()},
        comparison,
        test_comparison,
        tuple(written),
    )


def _refuse_retrained_networks(path: Path, runs: Mapping[str, Run]) -> None:
    """Raise `ParnasError` if a run has been trained again since it was compared on the test split.

    `path` is the JSON file of that comparison. A run counts as trained again if its architecture, its steps or its
    median training speed differs from the file: no two trainings have exactly the same speed.
    """
    for row in parse_rows(read_json(path), str(path), f"remove {path.parent}"):
        if (run := runs.get(row.run)) is None:
            continue
        if row.split != "test":
            raise ParnasError(
                f"{path} has results on the split {row.split}, not test; remove {path.parent}, or move it elsewhere."
            )
        trained = run.summary()
        rates = math.nan if row.train_tokens_per_s is None else row.train_tokens_per_s, median_rate(run)
        same_rate = math.isclose(*rates) or all(map(math.isnan, rates))
        if not same_rate or (row.arch, row.steps) != (trained.arch, trained.steps):
            raise ParnasError(
                f"{path.parent} holds results of an earlier training of {row.run}; remove {path.parent}, and give "
                "--test to evaluate on the test split again."
            )
