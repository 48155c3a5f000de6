"""Resource plan: whether a training fits its GPUs, how long it takes and what it costs, before it starts.

Memory is estimated (`memory_estimate.py`), and the number of tokens follows from the settings. The speed in tokens per
second is measured in a short run (and scaled by FLOPs per token if that run trained another network) or given by the
user. FLOPs count the matrix products of `TransformerXL.multiply_adds`, with keys and values of memory counted once.

N GPUs share the batch (DistributedDataParallel) and average the gradients; each GPU sends and receives 2 (N - 1) / N
times the bytes of the gradients (ring all-reduce; Patarasuk & Yuan 2009). Averaging overlaps with the backward pass,
which takes about two thirds of a step, so a step is longer only by the time by which averaging exceeds its backward
pass. Validation, checkpoints and data loading are not included.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

from parnas.architecture import IDENTITY, Architecture
from parnas.config.loader import Config
from parnas.config.schema import SearchConfig
from parnas.data.cache import Note, silent
from parnas.data.streams import StreamHeader
from parnas.data.token_frequencies import estimate_token_counts, zipf
from parnas.errors import ParnasError
from parnas.model.blocks import Block
from parnas.model.estimators import ESTIMATORS, IDENTITY_WEIGHT, arch_batch_size
from parnas.model.supernet import StochasticBlock, SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.files import write_json
from parnas.runs.records import Kind
from parnas.runs.run import STREAMS, Run
from parnas.training.loaded_run import run_architecture
from parnas.training.planning.memory_estimate import MIXED, MemoryEstimate, count_retraining, count_search, without_data
from parnas.training.session import find_cutoffs

__all__ = ["GB", "MARGIN", "Machine", "PhasePlan", "Plan", "choose_rate", "make_machine", "plan"]

MARGIN = 0.1  # share added to the estimate, for rounding and fragmentation of torch's allocator and kernels' workspace
CONTEXT_BYTES = 1_000_000_000  # used by CUDA, its libraries and NCCL in each process, outside torch's allocator
_NODE = 8  # GPUs of one machine, connected by NVLink
NVLINK_GB_PER_S, NETWORK_GB_PER_S = 200.0, 25.0
"""Bandwidth of all-reduce: about two thirds of an A100's 300 GB/s in each direction, and one 200 Gb/s link."""
_BACKWARD_SHARE = 2 / 3  # of a step's time: the backward pass has two matrix products for each one of the forward pass
GB = 1e9


@dataclass(frozen=True)
class Machine:
    """The GPUs to train on."""

    gpus: int = 1
    memory_gb: float | None = None  # of each GPU; None: not known
    bandwidth_gb_per_s: float | None = None  # of each GPU; None: NVLink's for up to eight GPUs, else the network's
    price_per_hour: float | None = None  # of one GPU, in any currency

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each GPU can send and, at the same time, receive when gradients are averaged."""
        default = NVLINK_GB_PER_S if self.gpus <= _NODE else NETWORK_GB_PER_S
        return (self.bandwidth_gb_per_s or default) * GB


class Rate(NamedTuple):
    """The measured speed of training on one GPU."""

    tokens_per_s: float
    flops_per_token: float | None  # of the measured network; None: the measured network is the one to retrain
    source: str  # description of the measurement, as text for the notes of a plan


@dataclass(frozen=True)
class PhasePlan:
    """The resources that one phase, search or retraining, needs."""

    phase: Kind
    network: str  # description as text
    parameters: int
    rows: int  # of the batch, on each GPU
    estimate: MemoryEstimate  # of a training step on one GPU
    bytes: Mapping[str, int]  # on each GPU, by use; see `memory_by_use`
    needed_bytes: int  # on each GPU, see `required_bytes`
    fits: bool | None  # whether `needed_bytes` fit; None: the memory of the GPUs is not known
    advice: tuple[str, ...]  # on settings
    flops_per_token: float
    steps: int
    tokens: int
    tokens_per_s: float | None = None  # of all GPUs
    scaled_by: float | None = None  # factor of the measured rate: its network's FLOPs per token divided by this one's
    hours: float | None = None
    price: float | None = None  # of all GPUs for these hours


@dataclass(frozen=True)
class Plan:
    """The resources that search and retraining need, and the assumptions behind these estimates."""

    machine: Machine
    phases: tuple[PhasePlan, ...]
    notes: tuple[str, ...]

    def write(self, folder: Path) -> Path:
        """Write `plan.json` into `folder`, which is created if missing, and return its path."""
        path = folder / "plan.json"
        write_json(path, asdict(self))
        return path


def plan(config: Config, machine: Machine, rate: Rate | None = None, note: Note = silent) -> Plan:
    """Return the resources that the search and the retraining of a configuration need.

    Without `model.arch`, the network to retrain is the preset interleaved-N, where N is `search.blocks`. A `rate`
    without FLOPs per token is taken as measured on the network to retrain.

    Raises:
        ParnasError: the GPUs cannot share a batch evenly, or the vocabulary is unknown.
    """
    if config.data.batch_size % machine.gpus:
        raise ParnasError(
            f"data.batch_size is {config.data.batch_size}, which {machine.gpus} GPUs cannot share evenly; set it to a "
            f"multiple of {machine.gpus}, such as {machine.gpus * math.ceil(config.data.batch_size / machine.gpus)}."
        )
    text = estimate_token_counts(config.data, note)
    if isinstance(config.model.cutoffs, str):
        config = find_cutoffs(config, text.counts)
    if config.model.arch is None:
        config = config.replace(model__arch=f"interleaved-{config.search.blocks}")
    counts = text.counts.tolist()
    if rate is not None and rate.flops_per_token is None:
        rate = rate._replace(flops_per_token=flops_of(config, "retrain", counts))
    phases = tuple(plan_phase(config, kind, counts, machine, rate) for kind in ("search", "retrain"))
    return Plan(machine, phases, tuple(_notes_on(machine, rate, f"vocabulary of {len(counts):,}; {text.source}")))


def plan_phase(config: Config, phase: Kind, counts: Sequence[int], machine: Machine, rate: Rate | None) -> PhasePlan:
    """Return the plan of one phase; `config` must have an architecture and numeric cutoffs.

    `counts` [V] are the frequencies of the tokens in the training text.
    """
    rows = config.data.batch_size // machine.gpus
    estimate = estimate_step(config, phase, counts, rows)
    bytes_by_use = memory_by_use(estimate, machine.gpus)
    needed = required_bytes(bytes_by_use)
    fits = None if machine.memory_gb is None else needed <= machine.memory_gb * GB
    advice = [*advise_rows(config, machine.gpus)] if phase == "search" else []
    if fits is False:
        advice += _advise_memory(config, phase, counts, machine)
    flops = flops_of(config, phase, counts)
    steps = config.search.steps if phase == "search" else config.train.steps
    step_tokens = config.data.batch_size * config.data.tgt_len
    speed = scale = hours = price = None
    if rate is not None:
        scale = (rate.flops_per_token or flops) / flops
        speed = throughput(rate.tokens_per_s * scale, machine.gpus, step_tokens, estimate.parameters, machine.bandwidth)
        hours = steps * step_tokens / speed / 3600
        price = None if machine.price_per_hour is None else machine.price_per_hour * machine.gpus * hours
    return PhasePlan(
        phase=phase,
        network=_describe_network(config, phase),
        parameters=estimate.parameters // 4,  # of four bytes
        rows=rows,
        estimate=estimate,
        bytes=bytes_by_use,
        needed_bytes=needed,
        fits=fits,
        advice=tuple(advice),
        flops_per_token=flops,
        steps=steps,
        tokens=steps * step_tokens,
        tokens_per_s=speed,
        scaled_by=scale,
        hours=hours,
        price=price,
    )


def throughput(tokens_per_s: float, gpus: int, step_tokens: int, gradient_bytes: int, bandwidth: float) -> float:
    """Return the tokens per second of `gpus` GPUs together, where a single GPU reaches `tokens_per_s`.

    Each step trains on `step_tokens` tokens, then the GPUs average `gradient_bytes` bytes of gradients, which each GPU
    sends at `bandwidth` bytes per second.
    """
    computing = step_tokens / (tokens_per_s * gpus)
    averaging = 2 * (gpus - 1) / gpus * gradient_bytes / bandwidth
    return step_tokens / (computing + max(0.0, averaging - _BACKWARD_SHARE * computing))


def memory_by_use(estimate: MemoryEstimate, gpus: int) -> dict[str, int]:
    """Return the estimated bytes on one GPU at the peak of a training step, by the name of their use."""
    held = {"parameters": estimate.parameters, "moments of the optimizer": estimate.moments}
    if estimate.buffers:
        held["buffers"] = estimate.buffers
    if estimate.average:
        held["average of the weights"] = estimate.average
    if gpus > 1:
        held["buckets for averaging"] = estimate.parameters
    return held | {"memory of segments": estimate.memory, "a step at its peak": estimate.peak}


def required_bytes(bytes_by_use: Mapping[str, int]) -> int:
    """Return the bytes of memory needed on a GPU: the sum of `bytes_by_use`, 10 % more as margin, and 1 GB for CUDA."""
    return round((1 + MARGIN) * sum(bytes_by_use.values())) + CONTEXT_BYTES


def estimate_step(config: Config, phase: Kind, counts: Sequence[int], rows: int) -> MemoryEstimate:
    """Return the memory estimate of a training step on `rows` rows, in bf16 unless `runtime.precision` is fp32."""
    precision = "fp32" if config.runtime.precision == "fp32" else "bf16"
    if phase == "search":
        return count_search(config, counts, rows, precision)
    return count_retraining(config, run_architecture(config), counts, rows, precision)


def advise_rows(config: Config, gpus: int) -> Iterator[str]:
    """Yield advice on `data.batch_size` if the GPUs cannot evenly share the batch of a search's architecture step."""
    rows, search = config.data.batch_size, config.search
    arch_rows = arch_batch_size(search.estimator, rows)
    if search.alpha_share and arch_rows % gpus:
        divisor = gpus * ESTIMATORS[search.estimator].arch_batch_divisor
        yield (
            f"an architecture step reads {arch_rows} of the {rows} rows, which {gpus} GPUs cannot share evenly: set "
            f"data.batch_size to a multiple of {divisor}, such as {divisor * math.ceil(rows / divisor)}"
        )


def _advise_memory(config: Config, phase: Kind, counts: Sequence[int], machine: Machine) -> list[str]:
    """Return advice on settings that reduce the memory of a phase, in the order in which to try them."""
    rows, limit = config.data.batch_size // machine.gpus, (machine.memory_gb or 0) * GB

    def required_with(**changes: Any) -> int:
        changed = config.replace(**changes)
        return required_bytes(memory_by_use(estimate_step(changed, phase, counts, rows), machine.gpus))

    advice = []
    if phase == "search" and config.search.estimator in MIXED:
        size = required_with(search__estimator="uniform") / GB
        advice.append(f"search.estimator=uniform runs one candidate per block instead of all: {size:.1f} GB")
    parts = [number for number in range(config.train.accumulate + 1, rows + 1) if rows % number == 0]
    if parts:
        most, least = (required_with(train__accumulate=number) for number in (parts[0], parts[-1]))
        fitting = rows_that_fit(rows // parts[0], most, rows // parts[-1], least, limit)
        fit = next((number for number in parts if rows // number <= fitting), None)
        advice.append(
            f"train.accumulate={fit} reads the batch in {fit} micro-batches: the same gradients"
            if fit
            else f"train.accumulate does not suffice: {least / GB:.1f} GB even with one row at a time"
        )
    if not config.runtime.checkpoint_activations:
        size = required_with(runtime__checkpoint_activations=True) / GB
        advice.append(f"runtime.checkpoint_activations=true stores less, for a third more time: {size:.1f} GB")
    advice.append("more GPUs have fewer rows each; a lower data.tgt_len or model.mem_len changes the network")
    return advice


def rows_that_fit(rows: int, taken: int, fewer: int, taken_by_fewer: int, limit: float) -> int:
    """Return how many rows, at most `rows`, fit into `limit` bytes; 0 if not even `fewer` rows fit.

    A step on `rows` rows takes `taken` bytes, and one on `fewer` rows takes `taken_by_fewer` bytes; the bytes for
    numbers of rows in between are interpolated linearly.
    """
    if taken <= limit:
        return rows
    if taken_by_fewer > limit:
        return 0
    return fewer + math.floor((limit - taken_by_fewer) / (taken - taken_by_fewer) * (rows - fewer))


def flops_of(config: Config, phase: Kind, counts: Sequence[int]) -> float:
    """Return the FLOPs to train on one token: two per multiply-add of the forward pass, and four for the backward pass.

    In a search, a block counts as the mean of its candidates under a uniform pi, or as the sum of its candidates if the
    estimator runs all of them; FLOPs of architecture steps on held-out text are added. With
    `runtime.checkpoint_activations` a second forward pass of the whole network is added, which is slightly too much,
    because the softmax is not recomputed.
    """
    tgt_len, reach = config.data.tgt_len, config.model.reach
    passes = 4 if config.runtime.checkpoint_activations else 3
    with without_data():
        if phase == "retrain":
            network = TransformerXL.build(config.model, run_architecture(config), len(counts))
            return 2 * passes * network.multiply_adds(tgt_len, reach, counts)
        search = config.search
        supernet = SuperNet.from_config(config.model, search, len(counts))
    multiply_adds = supernet.multiply_adds(tgt_len, reach, counts)
    if search.estimator not in MIXED:
        for block, names in zip(supernet.blocks, search.block_spaces, strict=True):
            layers = cast(StochasticBlock, block).candidates
            costs = [cast(Block, layers[name]).multiply_adds(tgt_len, reach) for name in names]
            multiply_adds += _mean_over_paths(costs, names, search.estimator) - sum(costs)
    return 2 * multiply_adds * (passes + arch_step_passes(search))


def _mean_over_paths(values: Sequence[float], names: Sequence[str], estimator: str) -> float:
    """Return the mean of `values` of a block's candidates `names`, weighted by their probability under a uniform pi.

    The estimator `uniform` samples identity less often than other candidates.
    """
    weights = [IDENTITY_WEIGHT if estimator == "uniform" and name == IDENTITY else 1.0 for name in names]
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def arch_step_passes(search: SearchConfig) -> float:
    """Return the cost of architecture steps on held-out text per weight step, in forward passes over a whole batch.

    An architecture step reads a part of a batch and counts as two forward passes over its rows: with the estimator
    `uniform`, the forward passes of two paths; with other estimators, a forward pass and a backward pass that computes
    no gradients of the weights.
    """
    if not search.alpha_share:
        return 0.0
    share = (search.alpha_end_step - search.alpha_start_step) / search.steps / search.alpha_every
    return 2 * share / ESTIMATORS[search.estimator].arch_batch_divisor


def make_machine(gpus: int, memory: float | None, bandwidth: float | None, price: float | None) -> Machine:
    """Return the machine that the options of `parnas plan` describe.

    `memory` of each GPU is in GB, `bandwidth` of each GPU in GB/s; `price` is that of one GPU per hour.

    Raises:
        ParnasError: memory or bandwidth is not a positive number.
    """
    for option, value in (("--memory", memory), ("--bandwidth", bandwidth)):
        if value is not None and not 0 < value < math.inf:
            raise ParnasError(f"{option} is {value:g}; give a positive number.")
    return Machine(gpus, memory, bandwidth, price)


def choose_rate(measured: Path | None, tokens_per_s: float | None, note: Note = silent) -> Rate | None:
    """Return the training speed: of the run `measured`, or the given `tokens_per_s`; `None` if neither is given.

    Raises:
        ParnasError: both are given, the run has no metrics, or `tokens_per_s` is not positive.
    """
    if measured is not None and tokens_per_s is not None:
        raise ParnasError("--from RUN and --tokens-per-s both give the speed; leave out one of them.")
    if measured is not None:
        return read_rate(Run(measured), note)
    if tokens_per_s is None:
        return None
    if not 0 < tokens_per_s < math.inf:
        raise ParnasError(f"--tokens-per-s is {tokens_per_s:g}; give a positive number.")
    return Rate(tokens_per_s, None, "--tokens-per-s")


def read_rate(run: Run, note: Note = silent) -> Rate:
    """Return a run's speed on one GPU, the median over its metrics, with the FLOPs per token of the run's network."""
    records = [record for record in run.metrics() if record.tokens_per_s]
    if not records:
        raise ParnasError(
            f"{run.folder} has no metrics of training yet; train the run for at least train.log_every steps."
        )
    config, environment = run.config(), run.environment()
    size = StreamHeader.read(run.folder / STREAMS).vocab_size
    counts = estimate_token_counts(config.data, note).counts
    kind = run.kind()
    flops = flops_of(config, kind, (counts if len(counts) == size else zipf(size)).tolist())
    gpus = records[-1].processes or 1
    machine = f"{gpus} times {environment.device_name}" if gpus > 1 else str(environment.device_name)
    source = f"{run.folder}, a {kind} on {machine} in {environment.precision}"
    rates = [(record.tokens_per_s or 0) / (record.processes or 1) for record in records]
    return Rate(median(rates), flops, source)


def _describe_network(config: Config, phase: Kind) -> str:
    """Return the architecture of a retraining, or the blocks, candidates and estimator of a search, as text."""
    if phase == "retrain":
        return str(Architecture.parse(config.model.arch or ""))
    search = config.search
    return f"{search.blocks} blocks over {', '.join(search.candidates)}, {search.estimator}"


def _notes_on(machine: Machine, rate: Rate | None, text: str) -> list[str]:
    """Return the assumptions behind a plan, as sentences; the first one, on the training text, is passed as `text`."""
    notes = [
        text,
        f"memory is the estimated peak of a step, plus {MARGIN:.0%} for kernels' workspace and fragmentation, and "
        f"{CONTEXT_BYTES / GB:.0f} GB for CUDA",
    ]
    if rate is None:
        return [
            *notes,
            "no time without a measured speed: train 200 steps on one GPU of this kind, then give --from RUN",
        ]
    notes.append(
        f"one GPU trains on {rate.tokens_per_s:,.0f} tokens/s, from {rate.source}; time excludes validation and "
        "checkpoints"
    )
    if machine.gpus > 1:
        notes.append(f"gradients are averaged at {machine.bandwidth / GB:g} GB/s per GPU, during the backward pass")
    return notes
