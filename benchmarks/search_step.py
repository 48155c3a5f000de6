"""Training steps of the SuperNet beside those of the interleaved network: `python benchmarks/search_step.py`.

The shapes are those of configs/wikitext2-par.yaml, with the dropout of the TensorFlow forerunner (0.1) and without;
token ids are drawn by Zipf's law. A step is the trainer's own: forward, backward, clipping, AdamW for the weights and
Adam for alpha, which every estimator trains here. Its learning rate is so small that pi stays what it is: `uniform`, or
`interleaved`, where the path is always that of sfsfsf. tau is 1. The time of `uniform` includes its architecture steps.

training    a step of the discrete network sfsfsf
baseline    a step of the full mixture (`soft`) at uniform pi, in float32 and the textbook forms of plain.py

All of them take turns. At uniform pi each step draws another path, so means are compared, not medians. The baseline has
to be fit to be compared with: its floor is what a plain draft of it reached, in proportion to the machine's speed.
"""

import math
from argparse import Namespace
from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any, NamedTuple

import harness
import torch
from plain import plain_operations

from parnas.architecture import Architecture
from parnas.config.loader import Config, load_config
from parnas.config.schema import SearchConfig
from parnas.data.batching import TrainingBatches
from parnas.data.streams import Tokens
from parnas.errors import ParnasError
from parnas.model.estimators import ESTIMATORS, UniformPath
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.search import SearchTask, make_arch_batches
from parnas.training import trainer as training
from parnas.training.device import Device
from parnas.training.optimizers import Schedule
from parnas.training.progress import Silent
from parnas.training.retrain import RetrainTask

DROPOUTS = (0.1, 0.0)
DEFAULT = SearchConfig().estimator
SITUATIONS = ("uniform", "interleaved")
TRAINING, BASELINE = "training", "baseline"
CERTAIN = 30.0  # an alpha above zeros that no noise outweighs
FLOOR_STEPS, FLOOR_FLOPS = 10.0, 155e9  # steps/s of the plain draft where a float32 product reached that many FLOP/s
TIMES_BASELINE = 5.0  # goals of the default estimator: tokens/s over the baseline's,
TIMES_TRAINING = {"uniform": 0.9, "interleaved": 1.1}  # and seconds of a step over those of training at most
TINY = ["data.batch_size=3", "data.tgt_len=6", "model.d_model=16", "model.n_heads=2", "model.d_inner=32"]


class Plan(NamedTuple):
    """How much is measured."""

    rounds: int
    warm_up: int = 5  # rounds until the allocator has seen what all candidates need
    overrides: Sequence[str] = ()
    product_size: int | None = None  # of the whole benchmark: as large as the harness has it


PLANS = {"tiny": Plan(2, 1, TINY, 64), "short": Plan(20), "full": Plan(200)}


class Key(NamedTuple):
    """A candidate: an estimator in a situation, or training or baseline, and its precision."""

    name: str
    situation: str | None
    precision: str


class Step:
    """Calling it takes the next training step, as `Trainer.fit` does but at the peak of the learning rate."""

    def __init__(self, task: training.TrainingTask) -> None:
        self.task, self.trainer = task, training.Trainer(task)

    def __call__(self) -> None:
        self.trainer.train_step(self.task.schedule.lr)

    def losses(self) -> list[float]:
        """Nats per token of all steps; raises `ParnasError` where one is not finite: then it was no training."""
        losses: list[float] = self.trainer.recent.values[:, 0].tolist()
        if not all(map(math.isfinite, losses)):
            raise ParnasError(f"The losses of the {self.task.title} steps are not finite; lower the learning rate.")
        return losses


class BaselineStep(Step):
    """The same in the textbook forms."""

    def __call__(self) -> None:
        with plain_operations():
            super().__call__()


def make_config(dropout: float, estimator: str, overrides: Sequence[str] = ()) -> Config:
    """Return the forerunner's shapes; alpha trains from the first step on, tau stays 1."""
    config = load_config(harness.PAR_CONFIG, overrides)
    schedule = {"search__alpha_start_step": 0, "search__tau_start": 1.0, "search__tau_end": 1.0}
    schedule["search__uniform_fraction"] = 1.0
    schedule["search__alpha_lr"] = 1e-12
    return config.replace(model__dropout=dropout, search__estimator=estimator, **schedule)


def make_session(config: Config, device: Device) -> training.Session:
    """Return a session with what a training step needs: no text and no run folder."""
    torch.manual_seed(config.runtime.seed)
    return training.Session(config, None, device, None, Silent())


def make_search(config: Config, device: Device, ids: Tokens, situation: str) -> SearchTask:
    """Return the search of a new SuperNet whose pi is fixed by the situation."""
    session = make_session(config, device)
    model = SuperNet.from_config(config.model, config.search, harness.VOCABULARY)
    if situation == "interleaved":
        for alpha, letter in zip(model.alphas(), harness.INTERLEAVED, strict=True):
            alpha.data[config.search.candidates.index(letter)] = CERTAIN
    arch_batches = make_arch_batches(config, ids) if config.search.alpha_share else None
    task = SearchTask(session, model, make_batches(config, ids), arch_batches)
    estimator = task.arch_optimizer.estimator
    if isinstance(estimator, UniformPath) and situation == "interleaved":
        estimator.probabilities = model.pi().cpu()  # its paths are uniform whatever alpha is
    return task


def make_batches(config: Config, ids: Tokens) -> TrainingBatches:
    """Return the text of the weights."""
    return TrainingBatches(ids, config.data.batch_size, config.data.tgt_len)


def make_training(config: Config, device: Device, ids: Tokens) -> RetrainTask:
    """Return the training of a new interleaved network."""
    session = make_session(config, device)
    model = TransformerXL.build(config.model, Architecture.parse(harness.INTERLEAVED), harness.VOCABULARY)
    schedule = Schedule(config.train.steps, config.train.lr, 0)
    return RetrainTask(session, model, make_batches(config, ids), schedule)


def make_steps(
    dropout: float, devices: Mapping[str, Device], plan: Plan, baseline_alone: bool = False
) -> dict[Key, Step]:
    """All candidates with that dropout, on the same text; `devices` by precision."""
    data = make_config(dropout, "soft", plan.overrides).data
    tokens = (plan.warm_up + plan.rounds) * data.batch_size * data.tgt_len + 1  # one epoch: memory stays full
    ids = harness.draw_ids(harness.VOCABULARY, tokens)
    config = {name: make_config(dropout, name, plan.overrides) for name in ESTIMATORS}
    exact = harness.choose(str(next(iter(devices.values())).device), "fp32")
    baseline = make_search(config["soft"], exact, ids, "uniform")
    steps: dict[Key, Step] = {Key(BASELINE, "uniform", "fp32"): BaselineStep(baseline)}
    for precision, device in {} if baseline_alone else devices.items():
        steps[Key(TRAINING, None, precision)] = Step(make_training(config["soft"], device, ids))
        for name in ESTIMATORS:
            for situation in SITUATIONS:
                search = make_search(config[name], device, ids, situation)
                steps[Key(name, situation, precision)] = Step(search)
    return steps


def compare(
    dropout: float, devices: Mapping[str, Device], plan: Plan, baseline_alone: bool = False
) -> list[dict[str, Any]]:
    """Time every candidate with that dropout; one record for each."""
    steps = make_steps(dropout, devices, plan, baseline_alone)
    device = next(iter(devices.values())).device
    seconds = harness.take_turns(steps, plan.rounds, plan.warm_up, device)
    means = {key: mean(of) for key, of in seconds.items()}
    baseline = means[Key(BASELINE, "uniform", "fp32")]
    records = []
    for key, step in steps.items():
        data = step.task.session.config.data
        trained = means.get(Key(TRAINING, None, key.precision))
        records.append(
            {"dropout": dropout, **key._asdict(), **harness.describe_seconds(seconds[key])}
            | {"mean_seconds": means[key], "steps_per_second": 1 / means[key]}
            | {"tokens_per_second": data.batch_size * data.tgt_len / means[key]}
            | {"times_baseline": baseline / means[key], "times_training": means[key] / trained if trained else None}
            | {"losses": step.losses()}
        )
    return records


def check_baseline(records: Sequence[Mapping[str, Any]], flops: float) -> dict[str, Any]:
    """Steps/s of the baseline by dropout, and the floor at a float32 matrix product of so many FLOP/s."""
    floor = FLOOR_STEPS * flops / FLOOR_FLOPS
    speeds = {str(r["dropout"]): r["steps_per_second"] for r in records if r["name"] == BASELINE}
    above = {dropout: speed >= floor for dropout, speed in speeds.items()}
    return {"fp32_flops": flops, "floor": floor, "steps_per_second": speeds, "above_floor": above}


def check_goals(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return which goals the default estimator reached."""
    goals = []
    for r in records:
        if r["name"] == DEFAULT:
            limit = TIMES_TRAINING[r["situation"]]
            fast, near = r["times_baseline"] >= TIMES_BASELINE, r["times_training"] <= limit
            goals.append(
                {key: r[key] for key in ("dropout", "precision", "situation")}
                | {"tokens/s over baseline": r["times_baseline"], "at least": TIMES_BASELINE, "fast enough": fast}
                | {"step over training": r["times_training"], "at most": limit, "near enough": near}
            )
    return goals


def print_records(records: Sequence[Mapping[str, Any]]) -> None:
    """One table a dropout."""
    for dropout in dict.fromkeys(r["dropout"] for r in records):
        rows = [
            {
                "step": r["name"],
                "pi": r["situation"],
                "precision": r["precision"],
                "mean ms": 1000 * r["mean_seconds"],
                "steps/s": r["steps_per_second"],
                "tokens/s": r["tokens_per_second"],
                "tokens/s over baseline": r["times_baseline"],
                "step over training": r["times_training"],
            }
            for r in records
            if r["dropout"] == dropout
        ]
        harness.print_table(f"Whole training steps, dropout {dropout}", rows)


def measure_product(device: Device, plan: Plan) -> float:
    """FLOP/s of a float32 matrix product."""
    return harness.matrix_rate(torch.float32, device.device, plan.product_size)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__)
    parser.add_argument("--baseline", action="store_true", help="measure the baseline alone")
    parsed: Namespace = parser.parse_args(arguments)
    plan = PLANS[parsed.size]
    devices = {precision: harness.choose(parsed.device, precision) for precision in harness.DTYPES}
    device, records, rates = devices["fp32"], [], []
    for dropout in DROPOUTS:
        rates.append(measure_product(device, plan))
        records += compare(dropout, devices, plan, parsed.baseline)
    rates.append(measure_product(device, plan))
    baseline, goals = check_baseline(records, max(rates)), check_goals(records)
    print_records(records)
    if goals:
        harness.print_table(f"Goals of {DEFAULT}", goals)
    for dropout, speed in baseline["steps_per_second"].items():
        said = "above" if baseline["above_floor"][dropout] else "BELOW"
        print(f"Baseline, dropout {dropout}: {speed:.2f} steps/s, {said} its floor of {baseline['floor']:.2f}.")
    config = make_config(DROPOUTS[0], DEFAULT, plan.overrides)
    payload = {
        "precisions": list(devices),
        "settings": {name: getattr(config, name).model_dump(mode="json") for name in ("data", "model", "search")},
        "vocab_size": harness.VOCABULARY,
        "interleaved": harness.INTERLEAVED,
        "default_estimator": DEFAULT,
        "rates": rates,
        "baseline": baseline,
        "goals": goals,
        "records": records,
    }
    harness.write_result("search_step" + ("-baseline" if parsed.baseline else ""), device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
