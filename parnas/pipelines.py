"""The whole journey of one configuration: search, derive, retrain beside baselines, compare, draw."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

from parnas.architecture import Architecture
from parnas.config import Config
from parnas.errors import ParnasError
from parnas.evaluation.adapt import Grid
from parnas.evaluation.adapt import adapt as choose_adaptation
from parnas.evaluation.comparison import Comparison, compare, median_rate
from parnas.evaluation.entries import Conditions
from parnas.figures.curves import draw_learning_curves
from parnas.figures.draw import draw_report, draw_run
from parnas.figures.heatmap import AnimationOptions
from parnas.figures.report_runs import COMPARISON
from parnas.files import read_json
from parnas.nas.cost import Costs, costs_of_run
from parnas.nas.derive import Derivation, derive, write_derivation
from parnas.nas.finalists import Finalist, hold_final, refuse_other_network
from parnas.nas.search import search
from parnas.run import ADAPTED, Run
from parnas.trained import TrainedRun
from parnas.training.repeated import train_once
from parnas.training.reporter import Reporter
from parnas.training.retrain import retrain

EQUAL_COST, INTERLEAVED, ALL_F = "equal-cost", "interleaved", "all-f"
BASELINES = {
    EQUAL_COST: "the shortest interleaved network that costs as much as the derived one, or more",
    INTERLEAVED: "the interleaved network of the searched depth",
    ALL_F: "feed-forward layers alone",
}


@dataclass(frozen=True)
class Pipeline:
    """What a pipeline came to."""

    folder: Path
    search: TrainedRun
    derivation: Derivation
    finalists: tuple[Finalist, ...]
    """The best first, which is the derived network; empty where there was no final."""
    runs: Mapping[str, TrainedRun] = field(repr=False)
    """The retrainings, by name: `derived`, then the baselines."""
    comparison: Comparison = field(repr=False)
    """On the validation split."""
    test: Comparison | None = field(repr=False)
    """On the test split, where it was read this time."""
    written: tuple[Path, ...] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Derivation and comparisons, as plain values."""
        result = {
            "derivation": self.derivation.to_dict(Run(self.search.folder)),
            "finalists": [finalist.to_dict() for finalist in self.finalists],
            "comparison": self.comparison.to_dict(),
        }
        return result if self.test is None else {**result, "test": self.test.to_dict()}


def read_baselines(listed: str) -> list[str]:
    """Names from a list such as `equal-cost,all-f`; raises `ParnasError` for an unknown one."""
    return check_baselines(name.strip() for name in listed.split(",") if name.strip())


def check_baselines(names: Iterable[str]) -> list[str]:
    """Each name once; raises `ParnasError` for an unknown one."""
    found = list(dict.fromkeys(names))
    if unknown := [name for name in found if name not in BASELINES]:
        raise ParnasError(f"There is no baseline {unknown[0]!r} (--baselines); give some of {', '.join(BASELINES)}.")
    return found


def run_pipeline(
    config: Config,
    baselines: Sequence[str],
    folder: Path,
    reporter: Reporter,
    *,
    finalists: int = 1,
    adapt: bool = False,
    test: bool = False,
) -> Pipeline:
    """Run every phase into `folder`, or go on, and draw the pictures and the page of all.

    `finalists`: up to how many networks, of less and less attention, are trained for a while before one counts as
    derived. `adapt`: evaluate dynamically and with a cache besides, with settings chosen on the validation split.
    `test`: read the test split too, once all networks are trained, into a folder of its own; a comparison that is there
    is kept.
    """
    if config.model.arch is not None:
        raise ParnasError("A pipeline trains what its search derives; leave out model.arch, or give parnas retrain.")
    if finalists < 1:
        raise ParnasError(f"finalists (--finalists) is {finalists}; give 1 or more.")
    found = train_once(search, config, folder / "search", reporter)
    derivation = derive(found)
    final = hold_final(found, derivation, finalists, config, folder / "finalists", reporter) if finalists > 1 else []
    if final:
        strings = tuple(str(finalist.derivation.architecture) for finalist in final)
        derivation = replace(final[0].derivation, finalists=strings)
    costs = derivation.costs or costs_of_run(found.folder, found.config(), config.search.cost.metric, reporter)
    candidates = {"derived": str(derivation.architecture)}
    candidates |= baseline_strings(baselines, derivation.architecture, costs, config.search.blocks)
    for name, arch in candidates.items():
        refuse_other_network(folder / name, arch)
    write_derivation(derivation, found, found.folder / "arch.yaml")
    runs: dict[str, Run] = {}
    for name, arch in candidates.items():
        reporter.note(f"{name}: training {arch}")
        runs[name] = train_once(retrain, config.replace(model__arch=arch), folder / name, reporter)
    folders = [run.folder for run in runs.values()]
    for run in runs.values() if adapt else []:
        if not (run.folder / ADAPTED).is_file():
            choose_adaptation(run, Grid(), Conditions(), reporter).write()
    tested, place = None, folder / "test"
    kept = (place / COMPARISON).is_file()
    if kept:
        refuse_other_networks(place / COMPARISON, runs)
    comparison = compare(folders, Conditions(split="valid", adapted=adapt), reporter)
    pictures = draw_run(found, AnimationOptions())
    pictures.append(draw_learning_curves([found, *runs.values()], folder / "curves.png"))
    written = [*pictures, *comparison.write(folder)]
    if test and kept:
        reporter.note(f"{place} is kept, whatever was read there; remove it to read the test split again")
    elif test:
        tested = compare(folders, Conditions(split="test", adapted=adapt), reporter)
        written += tested.write(place)
    compared = [folder, *([place] if test or kept else [])]
    written += draw_report([*compared, found.folder, *folders], folder, reporter.note)
    read = {name: TrainedRun.read(run) for name, run in runs.items()}
    return Pipeline(folder, TrainedRun.read(found), derivation, tuple(final), read, comparison, tested, tuple(written))


def refuse_other_networks(path: Path, runs: Mapping[str, Run]) -> None:
    """Raise where a comparison, made before, has figures of a run that has since been trained anew.

    That is told by its string, its steps and its rate, which no two trainings share.
    """
    for row in read_json(path):
        try:
            if (run := runs.get(row["run"])) is None:
                continue
            now, then, rate = run.summary(), row["train_tokens_per_s"], median_rate(run)
            trained_anew = not (math.isnan(rate) if then is None else math.isclose(then, rate))
            trained_anew |= (row["arch"], row["steps"]) != (now["arch"], now["steps"])
            of_test = row["split"] == "test"
        except (KeyError, TypeError) as error:
            raise ParnasError(f"{path} is not what evaluate wrote; remove {path.parent}.") from error
        if not of_test:
            raise ParnasError(f"{path} is of the split {row['split']}; remove {path.parent}, or move it elsewhere.")
        if trained_anew:
            raise ParnasError(
                f"{path.parent} was made of another network named {row['run']}; remove it, and give --test to read the "
                "test split anew."
            )


def baseline_strings(names: Sequence[str], derived: Architecture, costs: Costs, blocks: int) -> Mapping[str, str]:
    """The architectures that the names of `BASELINES` stand for, beside that derived network."""
    strings = {INTERLEAVED: f"interleaved-{blocks}", ALL_F: f"all-f-{blocks}"}
    if EQUAL_COST in names:
        strings[EQUAL_COST] = str(interleaved_of_cost(costs.cost(derived), costs))
    return {name: strings[name] for name in names}


def interleaved_of_cost(cost: float, costs: Costs) -> Architecture:
    """The shortest interleaved network whose blocks cost so much or more, in the metric's unit."""
    candidates = (Architecture.parse(f"interleaved-{blocks}") for blocks in count(1))
    return next(found for found in candidates if costs.cost(found) >= cost * (1 - 1e-9))
