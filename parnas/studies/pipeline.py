"""The pipeline of one configuration: search, derive, retrain the derived network and baselines, compare, draw.

Perplexities are compared on the validation split and, if requested, on the test split.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from parnas.architecture import IDENTITY, Architecture
from parnas.config.loader import Config
from parnas.errors import OverBudget, ParnasError
from parnas.evaluation.comparison import Comparison, compare, median_rate
from parnas.evaluation.loading import EvalOptions
from parnas.evaluation.tune_eval import Grid
from parnas.evaluation.tune_eval import tune_eval as tune_evaluation
from parnas.figures.curves import draw_learning_curves
from parnas.figures.draw import draw_report, draw_run
from parnas.figures.heatmap import AnimationOptions
from parnas.nas.cost import Costs, costs_of_run
from parnas.nas.derive import Derivation, derive, write_derivation
from parnas.nas.front import check_targets
from parnas.nas.one_run import healing, split_training
from parnas.nas.search import search
from parnas.nas.shrink import shrink
from parnas.runs.files import read_json
from parnas.runs.records import parse_rows
from parnas.runs.run import ARCH_FILE, COMPARISON, TUNED_EVAL, Run
from parnas.runs.trained_run import TrainedRun
from parnas.studies.baselines import DERIVED, hand_designed
from parnas.studies.finalists import Finalist, refuse_other_network, train_finalists
from parnas.studies.train_or_load import train_once
from parnas.training.progress import Reporter
from parnas.training.retrain import retrain

__all__ = ["PipelineResult", "run_pipeline"]

_SPENT = 0.9  # least cost of the largest network of a front, as a share of its target


@dataclass(frozen=True)
class PipelineResult:
    """The results of all phases of a pipeline, and the files that it wrote."""

    folder: Path
    search: TrainedRun
    derivation: Derivation
    finalists: tuple[Finalist, ...]
    """The finalists, best first, so that the first has the `derivation`; empty if no finalists were trained."""
    runs: Mapping[str, TrainedRun] = field(repr=False)
    """The retrainings, by name: `derived`, or `front-TARGET` for each network of a front, then the baselines."""
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
    one_run: bool = False,
    front: Sequence[float] = (),
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
        one_run: make the search a part of the training: see `split_training`.
        front: cost targets. The search is a part of the training of the network within the highest target; for each
            lower one this network shrinks further (see `_train_front`). By default one network within
            `search.cost.target` is trained.
        finalists: train up to this many networks briefly, the derived network and others with fewer and fewer attention
            layers, and take the best of them as the derived network; 1 for no such trainings.
        tune_eval: also evaluate dynamically and with a cache, with settings tuned on the validation split.
        test: also compare on the test split, in the subfolder `test`; a comparison that exists there is kept.

    Raises:
        ParnasError: `config` has an architecture or `train.inherit`, `finalists` is less than 1, more than one of
            `finalists`, `front` and `one_run` is given, or `folder` holds trainings of another
            configuration or network.
    """
    _check_arguments(config, one_run, front, finalists)
    # 1. Search and derive a network, or select a network with less attention by short trainings.
    search_config = derived_config = config
    if front:  # search for the network within the highest target, which then shrinks
        front = check_targets(front, str(list(front))[:60])
        config = config.replace(search__cost__target=front[-1], search__cost__spend=config.search.cost.spend or _SPENT)
    if one_run or front:
        search_config, derived_config = split_training(config, folder / "search")
    searched = train_once(search, search_config, folder / "search", reporter)
    derivation, trained_finalists = derive(searched), list[Finalist]()
    if finalists > 1:
        finalist_folder = folder / "finalists"
        trained_finalists = train_finalists(searched, derivation, finalists, config, finalist_folder, reporter)
    if trained_finalists:
        strings = tuple(str(finalist.derivation.architecture) for finalist in trained_finalists)
        derivation = replace(trained_finalists[0].derivation, finalists=strings)

    # 2. Retrain the derived network, or those of the front, and the baselines.
    costs = derivation.costs or costs_of_run(searched.folder, searched.config(), config.search.cost.metric, reporter)
    derived = f"front-{front[-1]:g}" if front else DERIVED
    trainings = {derived: derived_config.replace(model__arch=str(derivation.architecture))}
    for name, arch in hand_designed(baselines, derivation.architecture, costs, config.search.blocks).items():
        trainings[name] = config.replace(model__arch=arch)
    for name, training in trainings.items():
        refuse_other_network(folder / name, str(training.model.arch))
    write_derivation(derivation, searched, searched.folder / ARCH_FILE)
    runs: dict[str, Run] = {}
    for name, training in trainings.items():
        reporter.note(f"{name}: training {training.model.arch}")
        runs[name] = train_once(retrain, training, folder / name, reporter)
        if front and name == derived:
            runs |= _train_front(runs[name], front, config, search_config.search.least_attention or 0, costs, reporter)

    # 3. Compare and draw them.
    comparison, test_comparison, written = _compare(folder, searched, runs, tune_eval, test, reporter)
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


def _check_arguments(config: Config, one_run: bool, front: Sequence[float], finalists: int) -> None:
    """Raise `ParnasError` if an argument of `run_pipeline` is not valid, or excludes another."""
    if config.model.arch is not None:
        raise ParnasError(
            "A pipeline trains the network that its search derives; leave out model.arch, or use parnas retrain."
        )
    if finalists < 1:
        raise ParnasError(f"finalists (--finalists) is {finalists}; give 1 or more.")
    if (finalists > 1) + bool(front) + one_run > 1:
        raise ParnasError(
            "finalists, front and one_run (--finalists, --front, --one-run) exclude each other; give one."
        )
    if config.train.inherit is not None:
        raise ParnasError("train.inherit is for parnas retrain; a pipeline searches first (--one-run inherits too).")


def _compare(
    folder: Path, searched: Run, runs: Mapping[str, Run], tune_eval: bool, test: bool, reporter: Reporter
) -> tuple[Comparison, Comparison | None, list[Path]]:
    """Compare the runs, and draw them and the search; return the comparisons and the written files.

    The validation split is evaluated in each call, the test split only once, if `test` is set: the second comparison is
    `None` if this call did not evaluate it.
    """
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
    return comparison, test_comparison, written


def _train_front(
    largest: Run, targets: Sequence[float], config: Config, least_attention: int, costs: Costs, reporter: Reporter
) -> dict[str, Run]:
    """Shrink a trained network to each target below the highest, train what is left, and return the runs by name.

    From the highest target to the lowest, each network is a part of the one before and starts from its weights. Runs
    that exist keep their networks, since losses that were measured on another machine differ in the last digits, and
    start from the run that they started from, also where targets have been added or left out since.

    Args:
        largest: the retraining of the network within the highest target; the others are written beside it.
        targets: cost targets, ascending.
        config: the configuration of the whole training.
        least_attention: least number of attention layers of each network.
        costs: the costs of layers.
        reporter: receives notes and the progress.
    """
    runs, before = dict[str, Run](), largest
    for target in reversed(targets[:-1]):
        folder = largest.folder.with_name(f"front-{target:g}")
        try:
            earlier = Run(folder).config() if Run(folder).started() else None
            kept = (
                shrink(before, costs, target, least_attention, reporter)
                if earlier is None
                else Architecture.parse(str(earlier.model.arch))
            )
        except OverBudget as error:
            reporter.note(f"the front has no network within {target:g}: {error}")
            break
        if IDENTITY not in kept.layers:
            reporter.note(f"the network within {target:g} is that of a higher target")
            continue
        reporter.note(f"{folder.name}: training {kept.canonical()}")
        source = before.folder if earlier is None else Path(str(earlier.train.inherit))
        training = healing(config, source).replace(model__arch=str(kept))
        before = runs[folder.name] = train_once(retrain, training, folder, reporter)
    return runs


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
