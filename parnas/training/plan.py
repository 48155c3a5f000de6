"""Whether a training fits its GPUs, how many days it takes and what it costs, told before anything is bought.

Memory is counted (`footprint.py`), tokens follow from the settings, and tokens per second must have been measured: by a
short run, whose rate is scaled by the FLOPs per token where its network is another one, or by whoever asks. FLOPs are
those of `TransformerXL.multiply_adds`, so of matrix products alone, with keys and values of memory counted once.

Several GPUs divide the batch (DistributedDataParallel) and average the gradients, of which each sends and receives
2 (N - 1) / N times their bytes (ring all-reduce; Patarasuk & Yuan 2009). That goes on while the backward pass does,
two thirds of a step: only what takes longer is waited for. Left out are validation, checkpoints and waiting for data.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, cast

from parnas.architecture import IDENTITY, Architecture
from parnas.config import Config
from parnas.data.cache import Note, silent
from parnas.data.foreseen import foresee, zipf
from parnas.data.streams import StreamHeader
from parnas.errors import ParnasError
from parnas.files import write_json
from parnas.model.blocks import Block
from parnas.model.estimators import ESTIMATORS, IDENTITY_WEIGHT, lesson_rows
from parnas.model.supernet import StochasticBlock, SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.run import METRICS, STREAMS, Kind, Run
from parnas.sections import SearchConfig
from parnas.training.footprint import MIXED, Footprint, count_retraining, count_search, without_data
from parnas.training.phases import find_cutoffs, run_architecture

PLAN = "plan.json"
MARGIN = 0.1  # of memory: rounding and fragmentation of torch's allocator, and workspaces of kernels
CONTEXT_BYTES = 1_000_000_000  # of CUDA, its libraries and NCCL in each process, outside torch's allocator
NODE = 8  # GPUs that NVLink joins
NVLINK_GB_PER_S, NETWORK_GB_PER_S = 200.0, 25.0
"""What all-reduce reaches: about two thirds of an A100's 300 GB/s in each direction, and one link of 200 Gb/s."""
BACKWARD_SHARE = 2 / 3  # of a step: the backward pass has two matrix products for each one of the forward pass
GB = 1e9


@dataclass(frozen=True)
class Machine:
    """What it shall run on."""

    gpus: int = 1
    memory_gb: float | None = None  # of each
    bandwidth_gb_per_s: float | None = None  # of each; none: NVLink's, or the network's beyond eight
    price_per_hour: float | None = None  # of one

    @property
    def bandwidth(self) -> float:
        """Bytes per second that each sends, and receives, when gradients are averaged."""
        default = NVLINK_GB_PER_S if self.gpus <= NODE else NETWORK_GB_PER_S
        return (self.bandwidth_gb_per_s or default) * GB


class Rate(NamedTuple):
    """What one GPU was measured to do."""

    tokens_per_s: float
    flops_per_token: float | None  # of the network that was measured; none: of the one to be retrained
    source: str


@dataclass(frozen=True)
class PhasePlan:
    """What one phase takes."""

    phase: Kind
    network: str
    parameters: int
    rows: int  # of the batch, on each GPU
    bytes: Mapping[str, int]  # on each GPU, by what they hold
    kept_bytes: int  # activations that wait for the backward pass
    softmax_bytes: int  # the softmax's part of them
    gradient_bytes: int
    needed_bytes: int  # with the margin
    fits: bool | None
    advice: tuple[str, ...]
    flops_per_token: float
    steps: int
    tokens: int
    tokens_per_s: float | None = None  # of all GPUs
    scaled_by: float | None = None  # FLOPs per token of what was measured, over those of this network
    hours: float | None = None
    price: float | None = None


@dataclass(frozen=True)
class Plan:
    """Both phases, and what must be known to read them."""

    machine: Machine
    phases: tuple[PhasePlan, ...]
    notes: tuple[str, ...]

    def write(self, folder: Path) -> Path:
        """`plan.json` in a folder, which is made."""
        write_json(folder / PLAN, asdict(self))
        return folder / PLAN


def plan(config: Config, machine: Machine, rate: Rate | None = None, note: Note = silent) -> Plan:
    """What search and retraining of `model.arch`, or of the interleaved network, take.

    A speed without FLOPs is taken to be that of the network to be retrained.

    Raises `ParnasError` where the GPUs do not divide the batch, or the vocabulary is not known.
    """
    if config.data.batch_size % machine.gpus:
        raise ParnasError(
            f"data.batch_size is {config.data.batch_size}, which {machine.gpus} GPUs do not divide; set it to a "
            f"multiple, such as {machine.gpus * math.ceil(config.data.batch_size / machine.gpus)}."
        )
    text = foresee(config.data, note)
    if config.model.cutoffs == "auto":
        config = find_cutoffs(config, text.counts)
    if config.model.arch is None:
        config = config.replace(model__arch=f"interleaved-{config.search.blocks}")
    counts = text.counts.tolist()
    if rate is not None and rate.flops_per_token is None:
        rate = rate._replace(flops_per_token=flops_of(config, "retrain", counts))
    phases = tuple(plan_phase(config, kind, counts, machine, rate) for kind in ("search", "retrain"))
    return Plan(machine, phases, tuple(notes_on(machine, rate, f"vocabulary of {len(counts):,}; {text.source}")))


def plan_phase(config: Config, phase: Kind, counts: Sequence[int], machine: Machine, rate: Rate | None) -> PhasePlan:
    """One phase of a configuration whose architecture and cutoffs are settled."""
    rows = config.data.batch_size // machine.gpus
    footprint = count(config, phase, counts, rows)
    held = memory_of(footprint, machine.gpus)
    steps = config.search.steps if phase == "search" else config.train.steps
    segment = config.data.batch_size * config.data.tgt_len
    flops = flops_of(config, phase, counts)
    fits = None if machine.memory_gb is None else needed(held) <= machine.memory_gb * GB
    found = PhasePlan(
        phase,
        describe(config, phase),
        footprint.parameters // 4,
        rows,
        held,
        footprint.kept,
        footprint.softmax,
        footprint.gradients,
        needed(held),
        fits,
        (
            *(refused_rows(config, machine.gpus) if phase == "search" else ()),
            *(advise(config, phase, counts, machine) if fits is False else ()),
        ),
        flops,
        steps,
        steps * segment,
    )
    return found if rate is None else in_time(found, machine, rate, segment)


def in_time(found: PhasePlan, machine: Machine, rate: Rate, segment: int) -> PhasePlan:
    """The same with tokens per second, hours and price; `segment` is the tokens of a step."""
    scale = (rate.flops_per_token or found.flops_per_token) / found.flops_per_token
    speed = throughput(rate.tokens_per_s * scale, machine.gpus, segment, 4 * found.parameters, machine.bandwidth)
    hours = found.tokens / speed / 3600
    price = None if machine.price_per_hour is None else machine.price_per_hour * machine.gpus * hours
    return PhasePlan(**{**vars(found), "tokens_per_s": speed, "scaled_by": scale, "hours": hours, "price": price})


def throughput(tokens_per_s: float, gpus: int, segment: int, gradient_bytes: int, bandwidth: float) -> float:
    """Tokens per second of so many GPUs, given those of one; `segment` is the tokens of a step on all of them."""
    computing = segment / (tokens_per_s * gpus)
    averaging = 2 * (gpus - 1) / gpus * gradient_bytes / bandwidth
    return segment / (computing + max(0.0, averaging - BACKWARD_SHARE * computing))


def memory_of(footprint: Footprint, gpus: int) -> dict[str, int]:
    """Bytes on one GPU when most are held at once, by what they are for; all parameters are float32."""
    held = {"parameters": footprint.parameters, "moments of the optimizer": footprint.moments}
    if footprint.average:
        held["average of the weights"] = footprint.average
    if gpus > 1:
        held["buckets for averaging"] = footprint.parameters
    return held | {"memory of segments": footprint.memory, "a step at its peak": footprint.peak}


def needed(held: Mapping[str, int]) -> int:
    """Bytes that a GPU should have."""
    return round((1 + MARGIN) * sum(held.values())) + CONTEXT_BYTES


def count(config: Config, phase: Kind, counts: Sequence[int], rows: int) -> Footprint:
    """Footprint of a step; matrix products are in bf16 unless `runtime.precision` is fp32."""
    precision = "fp32" if config.runtime.precision == "fp32" else "bf16"
    if phase == "search":
        return count_search(config, counts, rows, precision)
    return count_retraining(config, run_architecture(config), counts, rows, precision)


def refused_rows(config: Config, gpus: int) -> Iterator[str]:
    """What to change where a search would be refused, since its GPUs cannot share the rows of alpha's own text."""
    rows, search = config.data.batch_size, config.search
    of_alpha = lesson_rows(search.estimator, rows)
    if search.alpha_share and of_alpha % gpus:
        divisor = gpus * ESTIMATORS[search.estimator].lesson_part
        yield (
            f"alpha's text has {of_alpha} of the {rows} rows, which {gpus} GPUs do not divide: a search needs a "
            f"data.batch_size such as {divisor * math.ceil(rows / divisor)}"
        )


def advise(config: Config, phase: Kind, counts: Sequence[int], machine: Machine) -> list[str]:
    """What to change where memory does not suffice, what costs least first."""
    rows, limit = config.data.batch_size // machine.gpus, (machine.memory_gb or 0) * GB

    def taken(**changes: Any) -> int:
        changed = config.replace(**changes)
        return needed(memory_of(count(changed, phase, counts, rows), machine.gpus))

    advice = []
    if phase == "search" and config.search.estimator in MIXED:
        size = taken(search__estimator="uniform") / GB
        advice.append(f"search.estimator=uniform runs one candidate of each block, not all: {size:.1f} GB")
    parts = [number for number in range(config.train.accumulate + 1, rows + 1) if rows % number == 0]
    if parts:
        most, least = (taken(train__accumulate=number) for number in (parts[0], parts[-1]))
        fitting = rows_that_fit(rows // parts[0], most, rows // parts[-1], least, limit)
        fit = next((number for number in parts if rows // number <= fitting), None)
        advice.append(
            f"train.accumulate={fit} reads the batch in {fit} parts, one after another: the same gradients"
            if fit
            else f"train.accumulate does not suffice: {least / GB:.1f} GB even with one row at a time"
        )
    if not config.runtime.checkpoint_activations:
        size = taken(runtime__checkpoint_activations=True) / GB
        advice.append(f"runtime.checkpoint_activations=true keeps less, for a third more time: {size:.1f} GB")
    advice.append("more GPUs have fewer rows each; a lower data.tgt_len and model.mem_len make another network of it")
    return advice


def rows_that_fit(rows: int, taken: int, fewer: int, taken_by_fewer: int, limit: float) -> int:
    """Rows within the limit, on the line through the bytes that two numbers of rows take; 0 where none are."""
    if taken <= limit:
        return rows
    if taken_by_fewer > limit:
        return 0
    return fewer + math.floor((limit - taken_by_fewer) / (taken - taken_by_fewer) * (rows - fewer))


def flops_of(config: Config, phase: Kind, counts: Sequence[int]) -> float:
    """FLOPs to train on one token: two for each multiply-add, and as much twice again for the gradients.

    Of a search, of the path that the estimator draws on average before pi has learnt anything, and with what alpha
    learns from text of its own. With `runtime.checkpoint_activations` one more forward pass is counted, for the softmax
    too, which has none.
    """
    tgt_len, reach = config.data.tgt_len, config.model.reach
    passes = 4 if config.runtime.checkpoint_activations else 3
    with without_data():
        if phase == "retrain":
            network = TransformerXL.build(config.model, run_architecture(config), len(counts))
            return 2 * passes * network.multiply_adds(tgt_len, reach, counts)
        search = config.search
        supernet = SuperNet(config.model, search.space, search.blocks, len(counts))
    multiply_adds = supernet.multiply_adds(tgt_len, reach, counts)
    if search.estimator not in MIXED:
        for block, names in zip(supernet.blocks, search.block_spaces, strict=True):
            layers = cast(StochasticBlock, block).candidates
            of = [cast(Block, layers[name]).multiply_adds(tgt_len, reach) for name in names]
            multiply_adds += expected(of, names, search.estimator) - sum(of)
    return 2 * multiply_adds * (passes + lesson_passes(search))


def expected(values: Sequence[float], names: Sequence[str], estimator: str) -> float:
    """Mean over a block's candidates, as a path is drawn while pi is even."""
    weights = [IDENTITY_WEIGHT if estimator == "uniform" and name == IDENTITY else 1.0 for name in names]
    return math.fsum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)


def lesson_passes(search: SearchConfig) -> float:
    """Forward passes over a whole batch, or as much work, that alpha's own text takes for each step of the weights.

    `uniform` reads it twice forward; others forward and backward, without the weights' gradients.
    """
    if not search.alpha_share:
        return 0.0
    share = (search.alpha_end_step - search.alpha_start_step) / search.steps / search.alpha_every
    return 2 * share / ESTIMATORS[search.estimator].lesson_part


def make_machine(gpus: int, memory: float | None, bandwidth: float | None, price: float | None) -> Machine:
    """From what the command line gives; raises `ParnasError` for sizes that are not positive."""
    for option, value in (("--memory", memory), ("--bandwidth", bandwidth)):
        if value is not None and not 0 < value < math.inf:
            raise ParnasError(f"{option} is {value:g}; give a positive number.")
    return Machine(gpus, memory, bandwidth, price)


def choose_rate(measured: Path | None, tokens_per_s: float | None, note: Note = silent) -> Rate | None:
    """What a run or the user says of one GPU; none where neither does. Raises `ParnasError` for both."""
    if measured is not None and tokens_per_s is not None:
        raise ParnasError("Give --from RUN or --tokens-per-s, not both.")
    if measured is not None:
        return read_rate(Run(measured), note)
    if tokens_per_s is None:
        return None
    if not 0 < tokens_per_s < math.inf:
        raise ParnasError(f"--tokens-per-s is {tokens_per_s:g}; give a positive number.")
    return Rate(tokens_per_s, None, "--tokens-per-s")


def read_rate(run: Run, note: Note = silent) -> Rate:
    """Median tokens per second of a run, divided by its GPUs, and its network's FLOPs per token."""
    records = [record for record in run.records(METRICS) if record.get("tokens_per_s")]
    if not records:
        raise ParnasError(f"{run.folder} has no line of training yet; let it train for train.log_every steps and more.")
    config, described = run.config(), run.environment()
    size = StreamHeader.read(run.folder / STREAMS).vocab_size
    counts = foresee(config.data, note).counts
    kind: Kind = "search" if run.kind() == "search" else "retrain"
    flops = flops_of(config, kind, (counts if len(counts) == size else zipf(size)).tolist())
    gpus = int(records[-1].get("processes", 1))
    machine = f"{gpus} times {described.get('device_name')}" if gpus > 1 else str(described.get("device_name"))
    source = f"{run.folder}, a {kind} on {machine} in {described.get('precision')}"
    rates = [record["tokens_per_s"] / record.get("processes", 1) for record in records]
    return Rate(median(rates), flops, source)


def describe(config: Config, phase: Kind) -> str:
    """The network of a phase in a few words."""
    if phase == "retrain":
        return str(Architecture.parse(config.model.arch or ""))
    search = config.search
    return f"{search.blocks} blocks over {', '.join(search.candidates)}, {search.estimator}"


def notes_on(machine: Machine, rate: Rate | None, text: str) -> list[str]:
    """What the figures rest on."""
    notes = [
        text,
        f"memory is counted, without kernels' workspaces and fragmentation: hence {MARGIN:.0%} more, and "
        f"{CONTEXT_BYTES / GB:.0f} GB for CUDA",
    ]
    if rate is None:
        return [*notes, "no time without a measured speed: train 200 steps on one such GPU, then give --from RUN"]
    notes.append(f"{rate.tokens_per_s:,.0f} tokens/s of one GPU, from {rate.source}; time is of training alone")
    if machine.gpus > 1:
        notes.append(f"gradients are averaged at {machine.bandwidth / GB:g} GB/s per GPU, beside the backward pass")
    return notes
