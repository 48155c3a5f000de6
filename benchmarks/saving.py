"""Measure how long a checkpoint delays training: `python benchmarks/saving.py`.

In one training, groups of steps that begin with a checkpoint alternate with groups that do not. The difference of their
seconds is the delay by one checkpoint: weights are copied before the next step, and the thread that writes, hashes and
flushes the files slows the steps beside it. The delay is also given as a share of the time of 500 steps, the default of
`train.save_every`.
"""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import harness
import torch

from parnas.architecture import Architecture
from parnas.config.loader import Config, load_config
from parnas.data.batching import TrainingBatches
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.run import Run
from parnas.training.device import Device
from parnas.training.optimizers import Schedule
from parnas.training.progress import Silent
from parnas.training.retrain import RetrainTask
from parnas.training.trainer import Session, Trainer

SAVE_EVERY = Config().train.save_every


class Plan(NamedTuple):
    """Number of measurements and of steps, and the networks."""

    rounds: int
    group: int  # steps
    networks: Mapping[str, Mapping[str, Any]]


LARGER = {"model__d_model": 512, "model__d_inner": 2048, "model__n_heads": 8}
PLANS = {
    "tiny": Plan(1, 2, {"tiny": {"model__d_model": 16, "model__n_heads": 2, "model__d_inner": 32}}),
    "short": Plan(6, 20, {"the forerunner's shapes": {}}),
    "full": Plan(12, 40, {"the forerunner's shapes": {}, "four times as wide": LARGER}),
}


def measure(config: Config, device: Device, plan: Plan) -> dict[str, Any]:
    """Return the delay by a checkpoint, and the seconds of groups of steps with and without one."""
    torch.manual_seed(config.runtime.seed)
    ids = harness.draw_ids(harness.VOCABULARY, 50 * config.data.batch_size * config.data.tgt_len + 1)
    batches = TrainingBatches(ids, config.data.batch_size, config.data.tgt_len)
    with tempfile.TemporaryDirectory(prefix="parnas-saving-") as folder:
        session = Session(config, None, device, Run(folder), Silent())  # type: ignore[arg-type]
        network = TransformerXL.build(config.model, Architecture.parse("interleaved-6"), harness.VOCABULARY)
        trainer = Trainer(RetrainTask(session, network, batches, Schedule(10**6, 1e-4, 0)))

        def group(saving: bool) -> None:
            if saving:
                trainer.save()
            for _ in range(plan.group):
                trainer.train_step(lr=1e-4)
            trainer.recent.clear()
            trainer.finish_saving()  # writing that outlasts the group counts too

        turns = {"without": lambda: group(False), "with": lambda: group(True)}
        seconds = harness.take_turns(turns, plan.rounds, 1, device.device)
        size = next(Path(folder).rglob("*.safetensors")).stat().st_size  # every checkpoint holds the same tensors
        shutil.rmtree(Path(folder) / "checkpoints")
    stall = median(b - a for a, b in zip(seconds["without"], seconds["with"], strict=True))
    step = median(seconds["without"]) / plan.group
    return {
        "weights, MB": size / 1e6,
        "step, ms": 1e3 * step,
        "checkpoint, ms": 1e3 * stall,
        f"share at every {SAVE_EVERY} steps": stall / (SAVE_EVERY * step),
        "seconds": seconds,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write the result."""
    given = harness.make_parser(__doc__).parse_args(arguments)
    plan, device = PLANS[given.size], harness.choose("cpu", "bf16")
    rows = []
    for name, changes in plan.networks.items():
        config = load_config(harness.PAR_CONFIG).replace(**changes)
        rows.append({"network": name, **measure(config, device, plan)})
    table = [{key: value for key, value in row.items() if key != "seconds"} for row in rows]
    harness.print_table("What a checkpoint stalls", table)
    harness.write_result("saving", device, {"precision": "bf16", "rows": rows}, given)


if __name__ == "__main__":
    harness.run(main)
