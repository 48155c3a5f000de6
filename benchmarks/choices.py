"""Measure what each optimisation of a training step gains, one reverted at a time: `python benchmarks/choices.py`.

Timed are whole training steps of the interleaved network with the shapes of configs/wikitext2-par.yaml and dropout 0.1,
as built and with one optimisation reverted. Reuse of freed memory and compilation hold for a whole process, so they are
timed in separate processes. A ratio above 1 means that the optimisation saves time. Compilation is the exception:
parnas does not compile on a CPU by default, so its ratio is the time with compilation over the time without.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import harness
import plain
import torch
from search_step import TINY, Step, make_config, make_training
from torch import nn

from parnas.model import fused, heads
from parnas.training import device as devices
from parnas.training import weight_optimizer

DROPOUT = 0.1
AS_BUILT, COMPILED = "as built", "blocks compiled"


class Plan(NamedTuple):
    """Number of measurements, settings, and the compiler."""

    rounds: int
    warm_up: int
    processes: int  # of each kind
    overrides: tuple[str, ...] = ()
    backend: str = "inductor"  # of torch.compile


PLANS = {
    "tiny": Plan(2, 1, 1, (*TINY, "runtime.threads=1"), backend="eager"),
    "short": Plan(20, 5, 2),
    "full": Plan(60, 10, 4),
}


def clip_in_a_pass_of_its_own(
    optimizer: torch.optim.Optimizer, norm: torch.Tensor, clip: float, guarded: bool = False
) -> None:
    """Do what `optimizers.step_clipped` does, but scale the gradients in a separate pass before the step."""
    assert not guarded
    nn.utils.clip_grads_with_norm_(
        [weight for group in optimizer.param_groups for weight in group["params"]], clip, norm
    )
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)


TAKEN_BACK: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    AS_BUILT: nullcontext,
    "attention by autograd": partial(patch.object, fused, "relative_attention", plain.relative_attention),
    "cross-entropy by autograd": partial(patch.object, fused, "linear_cross_entropy", plain.linear_cross_entropy),
    "torch's dropout": partial(patch.object, fused, "dropout", torch.nn.functional.dropout),
    "clipping in a pass of its own": partial(patch.object, weight_optimizer, "step_clipped", clip_in_a_pass_of_its_own),
    "rows of the tails as they come": partial(patch.object, heads, "_round_up_rows", lambda rows: rows),
}
IN_PROCESSES: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    AS_BUILT: nullcontext,
    "freed memory given back": partial(patch.object, devices, "keep_freed_memory", lambda: None),
    COMPILED: nullcontext,
}


def make_step(name: str, precision: str, device: str, plan: Plan) -> Step:
    """Return the training step of a new network, compiled if the name says so."""
    config = make_config(DROPOUT, "soft", plan.overrides)
    data = config.data
    tokens = (plan.warm_up + plan.rounds) * data.batch_size * data.tgt_len + 1
    ids = harness.draw_ids(harness.VOCABULARY, tokens)
    task = make_training(config, harness.choose(device, precision), ids)
    if name == COMPILED:
        task.model.compile(backend=plan.backend)
    return Step(task)


def call_within(context: Callable[[], AbstractContextManager[Any]], step: Step) -> None:
    """Run a training step with one optimisation reverted."""
    with context():
        step()


def take_turns(precision: str, device: str, plan: Plan) -> dict[str, list[float]]:
    """Return the seconds of the steps with each optimisation reverted, in turns in this process."""
    steps = {name: make_step(name, precision, device, plan) for name in TAKEN_BACK}
    calls = {name: partial(call_within, context, steps[name]) for name, context in TAKEN_BACK.items()}
    return harness.take_turns(calls, plan.rounds, plan.warm_up, harness.choose(device, precision).device)


def run_alone(name: str, precision: str, device: str, plan: Plan) -> list[float]:
    """Return the seconds of the steps of one candidate; meant for a new process."""
    with IN_PROCESSES[name]():
        step = make_step(name, precision, device, plan)
        return harness.take_turns({name: step}, plan.rounds, plan.warm_up)[name]


def run_processes(precision: str, device: str, plan: Plan) -> dict[str, list[float]]:
    """Return the seconds of the steps of each candidate, in processes that take turns."""
    seconds: dict[str, list[float]] = {name: [] for name in IN_PROCESSES}
    with harness.processes(calls=1) as pool:
        for _ in range(plan.processes):
            for name in seconds:
                seconds[name] += pool.submit(run_alone, name, precision, device, plan).result()
    return seconds


def describe(precision: str, kind: str, seconds: Mapping[str, list[float]]) -> list[dict[str, Any]]:
    """Return a record for each candidate."""
    base = median(seconds[AS_BUILT])
    return [
        {"precision": precision, "measured": kind, "choice taken back": name, **harness.describe_seconds(of)}
        | {"over as built": median(of) / base}
        for name, of in seconds.items()
    ]


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed = harness.make_parser(__doc__).parse_args(arguments)
    plan = PLANS[parsed.size]
    records = []
    for precision in harness.DTYPES:
        records += describe(precision, "in turns", take_turns(precision, parsed.device, plan))
        records += describe(precision, "in processes", run_processes(precision, parsed.device, plan))
    rows = [{"ms": 1000 * record["median_seconds"], **record} for record in records]
    shown = ("precision", "measured", "choice taken back", "ms", "over as built")
    harness.print_table("Training step of sfsfsf", [{key: row[key] for key in shown} for row in rows])
    device = harness.choose(parsed.device, "fp32")
    harness.write_result("choices", device, {"precisions": list(harness.DTYPES), "records": records}, parsed)


if __name__ == "__main__":
    harness.run(main)
