"""All that is to be found out on a GPU, in one command of less than nine minutes: `python benchmarks/gpu_round.py`.

    PARNAS_DATA=DIR python benchmarks/gpu_round.py --out FOLDER

Needed are what parnas itself needs and WikiText-2 in DIR, no network and no other library. Every part runs in a process
of its own with a limit of its own, so that whatever fails there, a broken CUDA context included, costs that part alone;
the result is written again with each finding, and holds the traceback of what failed.
"""

import faulthandler
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from argparse import Namespace
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import harness
import search_step
import time_to_quality
import torch
import train_step
from networks import Parnas
from plain import plain_operations
from torch import Tensor
from trainings import make_tiny, require_corpus

from parnas.architecture import Architecture
from parnas.config.loader import load_config
from parnas.config.schema import ModelConfig
from parnas.data.batching import TrainingBatches
from parnas.errors import ParnasError
from parnas.model.recurrence import find_kernel
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device

TOTAL = 500.0  # seconds of all parts
TOLERANCE = {"fp32": 1e-4, "bf16": 0.1}  # of each loss in nats, and of each weight's gradient relative to its norm
GOALS = {
    "share_of_rate": 0.25,  # of the measured matrix rate at least, WT103 base in bf16
    "training_seconds_to_target": 40.0,  # at most, from the moment when the text is ready
}
ALL_LAYERS = "skrgcf"  # one of each kind
ROUNDS = {"tiny": 2, "full": 30}
ROUNDS_OF_SEARCH = 100
SEARCH_SECONDS, RETRAIN_SECONDS = 120.0, 100.0  # then what they reached is taken as it is
COMPILE_WARM_UP = 4  # steps: the first without memory, the second with it, and what each shape compiles again

SHOWN = (
    *("loss_difference", "gradient_difference", "agree", "tokens_per_second", "share_of_rate"),
    *("data_seconds", "first_line_seconds", "training_seconds_to_target", "command_seconds", "ended", "goal_met"),
)

Finding = tuple[str, Any]  # its name in the result, and what was found


class Segments(NamedTuple):
    """Results of three segments, on the CPU in float64."""

    losses: Tensor  # [3, B, T], nats
    gradients: dict[str, Tensor]  # of all weights, by name


class Task(NamedTuple):
    """What a part is given."""

    size: str
    device: str
    found: Mapping[str, Mapping[str, Any]]  # by the parts before


def check_operations(task: Task) -> Iterator[Finding]:
    """Compare losses and gradients: fused operations with the textbook forms, and a network of all layers with the CPU.

    On the CPU the textbook forms are computed too.
    """
    overrides = search_step.TINY if task.size == "tiny" else ()
    config = search_step.make_config(0.0, search_step.DEFAULT, overrides)
    text = harness.draw_ids(harness.VOCABULARY, 3 * config.data.batch_size * config.data.tgt_len + 1)
    batches = TrainingBatches(text, config.data.batch_size, config.data.tgt_len)
    for precision, tolerance in TOLERANCE.items():
        device = harness.choose(task.device, precision)
        found = run_segments(config.model, harness.INTERLEAVED, batches, device)
        with plain_operations():
            expected = run_segments(config.model, harness.INTERLEAVED, batches, device)
        yield precision, compare_segments(found, expected, tolerance)
    found = run_segments(config.model, ALL_LAYERS, batches, harness.choose(task.device, "fp32"))
    with plain_operations():
        expected = run_segments(config.model, ALL_LAYERS, batches, harness.choose("cpu", "fp32"))
    kernel = find_kernel() is not None
    yield "all layers beside the CPU", compare_segments(found, expected, TOLERANCE["fp32"]) | {"r_by_kernel": kernel}


def compare_segments(found: Segments, expected: Segments, tolerance: float) -> dict[str, Any]:
    """Return the largest difference of a loss, in nats, and of a weight's gradient, relative to its norm."""
    by_loss = float((found.losses - expected.losses).abs().max())
    by_weight = {
        name: float((found.gradients[name] - gradient).norm() / gradient.norm())
        for name, gradient in expected.gradients.items()
    }
    worst = max(by_weight, key=lambda name: by_weight[name])
    return {
        **{"loss_difference": by_loss, "gradient_difference": by_weight[worst], "of_weight": worst},
        **{"tolerance": tolerance, "agree": max(by_loss, by_weight[worst]) <= tolerance},
    }


def run_segments(model: ModelConfig, arch: str, batches: TrainingBatches, device: Device) -> Segments:
    """Return losses and gradients of a network for three segments with memory carried on."""
    torch.manual_seed(1)
    network = TransformerXL.build(model, Architecture.parse(arch), harness.VOCABULARY)
    network.to(device.device)
    memory, losses = None, []
    for step in range(3):
        inputs, targets, _ = batches.batch(step)
        ids, wanted = (torch.from_numpy(part).to(device.device) for part in (inputs, targets))
        with device.autocast():
            nll, memory = network.nll(ids, wanted, memory)
        nll.mean().backward()
        losses.append(nll.detach().double())
    gradients = {name: of.grad.double().cpu() for name, of in network.named_parameters() if of.grad is not None}
    return Segments(torch.stack(losses).cpu(), gradients)


def time_training(task: Task) -> Iterator[Finding]:
    """Training steps at the shapes of WT103 base, eager."""
    yield from training_steps(task, compiled=False)


def time_compiled(task: Task) -> Iterator[Finding]:
    """Time the same steps, compiled."""
    yield from training_steps(task, compiled=True)


def training_steps(task: Task, compiled: bool) -> Iterator[Finding]:
    """Time a step of `train_step.py` in bf16, and its share of the rate of large matrix products."""
    device = harness.choose(task.device, "bf16")
    *_, size = train_step.sizes("tiny" if task.size == "tiny" else "full", device.device)
    rounds, warm_up = ROUNDS[task.size], COMPILE_WARM_UP if compiled else train_step.WARM_UP
    segments = train_step.draw_segments(size, warm_up + rounds, device.device)
    torch.manual_seed(1)
    network = Parnas(size).to(device.device).train()
    if compiled:
        # The kernels of inductor take longer to make than a tiny round may.
        network.network.compile(backend="eager" if task.size == "tiny" else "inductor")
    step = train_step.TrainStep(network, segments, device)
    warming = harness.take_turns({"step": step}, warm_up, 0, device.device)["step"]
    yield "warm_up", {"seconds": warming}
    seconds = harness.describe_seconds(harness.take_turns({"step": step}, rounds, 0, device.device)["step"])
    products = 64 if task.size == "tiny" else None
    rate = harness.matrix_rate(torch.bfloat16, device.device, products)
    shares = size.cluster_shares(torch.cat([segment.targets for segment in segments[warm_up:]]))
    speed = size.tokens / seconds["median_seconds"]
    flops = 6 * (size.block_multiply_adds() + size.head_multiply_adds(shares))
    share = speed * flops / rate
    yield (
        size.name,
        {**size.describe(), "precision": "bf16", **seconds, **step.describe(), "tokens_per_second": speed}
        | {
            "flops_per_token": flops,
            "matrix_flops": rate,
            "share_of_rate": share,
            "goal_met": share >= GOALS["share_of_rate"],
        },
    )


def time_search_steps(task: Task) -> Iterator[Finding]:
    """`search_step.py` in bf16, with dropout and without."""
    plan = search_step.PLANS["tiny"] if task.size == "tiny" else search_step.Plan(ROUNDS_OF_SEARCH)
    for dropout in search_step.DROPOUTS:
        yield f"dropout {dropout}", search_step.compare(dropout, {"bf16": harness.choose(task.device, "bf16")}, plan)


def reach_quality(task: Task) -> Iterator[Finding]:
    """`time_to_quality.py`: search, derive, retrain, each from an empty cache."""
    with tempfile.TemporaryDirectory(prefix="parnas-gpu-") as name:
        folder = Path(name)
        config, target, overrides = quality_settings(task, folder)
        found = judge_phase(time_to_quality.search(config, folder, target, overrides, SEARCH_SECONDS))
        yield "search", found
        retrained = time_to_quality.retrain(config, folder, found["derived"], target, overrides, RETRAIN_SECONDS)
        yield "retrain", judge_phase(retrained)


def reach_quality_compiled(task: Task) -> Iterator[Finding]:
    """Repeat the retraining, compiled."""
    found = task.found.get("quality", {}).get("search")
    if found is None:
        raise ParnasError("No architecture was derived: the part quality has to run, and to succeed, before.")
    with tempfile.TemporaryDirectory(prefix="parnas-gpu-") as name:
        folder = Path(name)
        config, target, overrides = quality_settings(task, folder)
        if task.size != "tiny":
            overrides.append("runtime.compile=true")
        retrained = time_to_quality.retrain(config, folder, found["derived"], target, overrides, RETRAIN_SECONDS)
        yield "retrain", judge_phase(retrained)


def quality_settings(task: Task, folder: Path) -> tuple[Path, float, list[str]]:
    """Return configuration, target in bits per byte, and overrides."""
    tiny = task.size == "tiny"
    config = make_tiny(folder) if tiny else harness.PAR_CONFIG
    overrides = [f"runtime.device={task.device}"]
    require_corpus(load_config(config, overrides))
    return config, time_to_quality.TINY_TARGET if tiny else time_to_quality.TARGET, overrides


def judge_phase(phase: dict[str, Any]) -> dict[str, Any]:
    """Add the seconds from the start of training to the target, compilation included."""
    if phase["reached"] is None:
        return {**phase, "training_seconds_to_target": None, "goal_met": False}
    seconds = phase["reached"]["seconds"] - phase["data_seconds"]
    in_time = seconds < GOALS["training_seconds_to_target"]
    return {**phase, "training_seconds_to_target": seconds, "goal_met": in_time}


class Part(NamedTuple):
    """A part of the round and the most seconds that it may take."""

    work: Callable[[Task], Iterator[Finding]]
    seconds: float


PARTS = {
    "operations": Part(check_operations, 60),
    "training": Part(time_training, 60),
    "search-steps": Part(time_search_steps, 80),
    "quality": Part(reach_quality, 240),
    "training-compiled": Part(time_compiled, 120),
    "quality-compiled": Part(reach_quality_compiled, 120),
}


def run_in_child(name: str, task: Task, limit: float, findings: Connection) -> None:
    """Run a part in a process of its own, which sends each finding, or the traceback of an error."""
    os.setsid()  # so that what it starts can be ended with it
    faulthandler.dump_traceback_later(max(1.0, limit - 5))  # says where a part hangs, before it is ended
    try:
        for finding in PARTS[name].work(task):
            findings.send(finding)
    except Exception:
        findings.send(("error", traceback.format_exc()))


def run_part(name: str, task: Task, limit: float, tell: Callable[[str, Any], None]) -> None:
    """Run a part in a fresh process and end it, and all that it started, after `limit` seconds."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "search_step", "time_to_quality", "train_step"])
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=run_in_child, args=(name, task, limit, theirs))
    started = time.monotonic()
    process.start()
    theirs.close()
    try:
        while ours.poll(max(0.0, started + limit - time.monotonic())):
            tell(*ours.recv())
        tell("error", f"ended after its {limit:.0f} seconds")
    except EOFError:
        process.join(5)
        if process.exitcode:
            tell("error", f"the process died with exit code {process.exitcode}")
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()
        tell("wall_seconds", time.monotonic() - started)


class Round:
    """All parts, one after another; `parts` holds the findings of each by name, and so does the result file."""

    def __init__(self, parsed: Namespace, device: Device) -> None:
        self.parsed, self.device, self.began = parsed, device, time.monotonic()
        self.parts: dict[str, dict[str, Any]] = {name: {} for name in parsed.parts}

    def run(self) -> None:
        """Run every part for which time is left."""
        for name in self.parts:
            limit = min(PARTS[name].seconds, TOTAL - self.passed())
            if limit > 0:
                run_part(
                    name, Task(self.parsed.size, str(self.device.device), self.parts), limit, partial(self.tell, name)
                )
            else:
                self.tell(name, "error", "no time was left")

    def passed(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def tell(self, part: str, name: str, value: Any) -> None:
        """Add a finding and write the result."""
        self.parts[part][name] = value
        print(f"{self.passed():5.0f} s  {part}: {value if name == 'error' else name}", flush=True)
        self.write()

    def write(self) -> None:
        """Write the result, with the tables that were printed."""
        payload = {"precisions": list(TOLERANCE), "goals": GOALS, "parts": self.parts}
        harness.write_result("gpu_round", self.device, payload, self.parsed)


def print_round(found: Mapping[str, Mapping[str, Any]]) -> None:
    """Print the result of each part in a line, and the search steps as tables."""
    rows = []
    for part, findings in found.items():
        for name, value in findings.items():
            told = {key: value[key] for key in SHOWN if key in value} if isinstance(value, dict) else {}
            error = str(value).strip().splitlines()[-1] if name == "error" else None
            if told or error:
                rows.append({"part": part, "": name, **told, "error": error})
    harness.print_table("The round", rows)
    steps = found.get("search-steps", {})
    search_step.print_records([record for of in steps.values() if isinstance(of, list) for record in of])


def main(arguments: list[str] | None = None) -> None:
    """Run the round."""
    parser = harness.make_parser(__doc__, ["tiny"])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="only these, in this order")
    parsed = parser.parse_args(arguments)
    device = harness.choose(parsed.device, "bf16")
    if parsed.size == "full" and device.device.type != "cuda":
        raise ParnasError("There is no GPU here; --tiny tries all parts on the CPU.")
    gpu_round = Round(parsed, device)
    gpu_round.run()
    print_round(gpu_round.parts)
    gpu_round.write()


if __name__ == "__main__":
    harness.run(main)
