"""What it saves to end trials early, and what it loses: `python benchmarks/tuning_pruners.py`.

    python benchmarks/tuning_pruners.py --train   # 24 trainings of a small network, none ended early, and the table
    python benchmarks/tuning_pruners.py           # write the table again from the stored trials
    python benchmarks/tuning_pruners.py STUDY     # that of another study: the folder of a `parnas tune --no-prune`

The validations of all trials, known to the end, are told to each rule again, in a hundred orders: how many of the steps
would have been trained, how often the best trial would have come to its end, and how far behind the best of those that
did would be on average. `--train` goes on with a study that was cut off, in runs/tuning-pruners or STUDY, and keeps its
settings and validations in tuning_pruners_trials.json. The table of another STUDY is written down with `--out` alone.
The CPU is enough, whatever the device.
"""

import argparse
import random
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import optuna
from optuna.pruners import BasePruner, HyperbandPruner, MedianPruner, SuccessiveHalvingPruner
from optuna.trial import TrialState
from trainings import make_tiny

from parnas.config.loader import Config, load_config
from parnas.errors import ParnasError
from parnas.runs.files import read_json, read_json_object, write_json
from parnas.runs.run import TUNING, Run
from parnas.studies.tuning import STARTUP_TRIALS, TuneOptions, tune
from parnas.studies.tuning_space import read_space
from parnas.training.progress import Reporter, Silent

ORDERS = 100
TRIALS = {"full": 24, "tiny": 8}
FOLDER = harness.ROOT / "runs" / "tuning-pruners"
KEPT = "tuning_pruners_trials.json"
SETTINGS = {
    **{"model.arch": "sfsfff", "model.d_model": 48, "model.d_inner": 192},
    **{"train.steps": 120, "train.warmup_steps": 10, "train.log_every": 20, "train.eval_every": 20},
    **{"train.save_every": 120, "runtime.precision": "fp32", "runtime.threads": 1},
}
"""Of the study, beside those of configs/demo.yaml."""
SPACE = {
    "train.lr": "log:6e-4..1.5e-2",
    "model.dropout": "0..0.5",
    "train.weight_decay": "log:1e-3..0.3",
    "model.norm": ["post", "pre"],
}
REMEDY = "give the folder of a parnas tune --no-prune."
Curve = Sequence[tuple[int, float]]  # step and loss of each validation


class Replay(NamedTuple):
    """What a pruner makes of trials in one order."""

    steps: float  # share of all steps
    behind: float  # of the best that came to its end, in nats per token behind the best of all


class Notes(Silent):
    """Says what a study notes of its trials."""

    def note(self, text: str) -> None:
        print(text, flush=True)


def pruners(first: int, steps: int) -> dict[str, Callable[[], BasePruner]]:
    """By name; `first` is the step of the first validation."""
    median = partial(MedianPruner, STARTUP_TRIALS, n_min_trials=STARTUP_TRIALS)
    return {
        "median from a quarter of the steps (parnas tune)": lambda: median(steps // 4),
        "median from the first validation": lambda: median(0),
        "hyperband, factor 3": lambda: HyperbandPruner(first, steps, 3),
        "successive halving, factor 2": lambda: SuccessiveHalvingPruner(first, 2),
        "successive halving, factor 4": lambda: SuccessiveHalvingPruner(first, 4),
    }


def train(config: Config, trials: int, folder: Path, reporter: Reporter) -> None:
    """Make the study, or go on with it: all trials to their ends."""
    options = TuneOptions("retrain", read_space(SPACE, config, "retrain"), trials, prune=False)
    tune(config, options, folder, reporter).write(folder)


def read_study(folder: Path) -> dict[str, Any]:
    """Return a study's settings and the validations of each finished trial."""
    path = folder / TUNING
    study = read_json_object(path) if path.is_file() else {}
    if study.get("phase") != "retrain":
        raise ParnasError(f"{folder} is no study of retrainings; {REMEDY}")
    if ended := study["counts"]["pruned"]:
        raise ParnasError(f"{folder} holds {ended} trial(s) ended early, so not all losses are known; {REMEDY}")
    trials = []
    for trial in study["trials"]:
        if trial["state"] == "complete":
            lines = [line for line in Run(folder / trial["folder"]).metrics() if line.split == "valid"]
            validations = [[line.step, line.loss] for line in lines]
            trials.append({"trial": trial["number"], "settings": trial["settings"], "validations": validations})
    if len(trials) < 2:
        raise ParnasError(f"{folder} holds no two finished trials; {REMEDY}")
    config = Run(folder).config().model_dump(mode="json")
    return {"phase": study["phase"], "config": config, "space": study["space"], "trials": trials}


def replay(curves: Sequence[Curve], pruner: BasePruner, name: str = "replay") -> Replay:
    """Tell the validations of trials to a pruner, one trial after the other.

    Hyperband chooses a trial's bracket by its number and the study's name: the same one gives the same again.
    """
    study, trained, ends = optuna.create_study(pruner=pruner, study_name=name), 0, []
    for curve in curves:
        trial = study.ask()
        for step, loss in curve:
            trial.report(loss, step)
            if step < curve[-1][0] and trial.should_prune():
                study.tell(trial, state=TrialState.PRUNED)
                break
        else:
            study.tell(trial, loss)
            ends.append(loss)
        trained += step
    best = min(curve[-1][1] for curve in curves)
    return Replay(trained / sum(curve[-1][0] for curve in curves), min(ends) - best)


def measure(curves: Sequence[Curve]) -> list[dict[str, Any]]:
    """Return a record for each pruner."""
    records = []
    for rule, make in pruners(curves[0][0][0], curves[0][-1][0]).items():
        orders = [(random.Random(order).sample(curves, len(curves)), f"order {order}") for order in range(ORDERS)]
        found = [replay(shuffled, make(), name) for shuffled, name in orders]
        records.append(
            {
                "rule": rule,
                "steps_trained": sum(each.steps for each in found) / ORDERS,
                "best_kept": sum(each.behind == 0 for each in found) / ORDERS,
                "nats_behind": sum(each.behind for each in found) / ORDERS,
            }
        )
    return records


def place_of_best(curves: Sequence[Curve]) -> int:
    """Which the best trial was at its first validation, counted from 1."""
    best = min(curves, key=lambda curve: curve[-1][1])
    return 1 + sum(curve[0][1] < best[0][1] for curve in curves)


def describe(record: dict[str, Any]) -> dict[str, str]:
    """Return a row of the table."""
    return {
        "rule": record["rule"],
        "steps trained": f"{record['steps_trained']:.0%}",
        "best trial kept": f"{record['best_kept']:.0%}",
        "nats behind": f"{record['nats_behind']:.4f}",
    }


def find_study(parsed: argparse.Namespace) -> dict[str, Any]:
    """Return the stored study, or that of a folder, run first if asked for."""
    kept = (parsed.out or harness.RESULTS) / KEPT
    if not parsed.train:
        return read_study(parsed.study) if parsed.study else read_json(kept)
    tiny = parsed.size == "tiny"
    results = harness.results_folder(parsed)
    folder = parsed.study or (results / "study" if tiny else FOLDER)
    base = make_tiny(parsed.out) if tiny else harness.ROOT / "configs" / "demo.yaml"
    changes = {"model.arch": "sfs"} if tiny else SETTINGS
    config = load_config(base, [*changes.items(), ("runtime.device", "cpu")])
    train(config, TRIALS[parsed.size], folder, Notes())
    study = read_study(folder)
    write_json(kept, {"machine": harness.machine(harness.choose("cpu", config.runtime.precision)), **study})
    return study


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"])
    parser.add_argument("study", nargs="?", type=Path, metavar="STUDY", help="folder of a parnas tune --no-prune")
    parser.add_argument("--train", action="store_true", help="make the study first, or go on with it")
    parsed = parser.parse_args(arguments)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    study = find_study(parsed)
    curves = [trial["validations"] for trial in study["trials"]]
    records = measure(curves)
    harness.print_table(f"{len(curves)} trials in {ORDERS} orders", list(map(describe, records)))
    if parsed.study and not parsed.train and not parsed.out:
        return
    told = {
        **{key: study[key] for key in ("phase", "config", "space")},
        **{"trials": len(curves), "orders": ORDERS, "validated_at": [step for step, _ in curves[0]]},
        **{"best_at_first": place_of_best(curves), "records": records},
    }
    harness.write_result("tuning_pruners", harness.choose("cpu", "fp32"), {"precisions": [], **told}, parsed)


if __name__ == "__main__":
    harness.run(main)
