"""The memory of a training step, counted without allocating any: the step runs on tensors that have no data.

`Ledger` adds up the storages that are alive, from each operation to the next. The step is the one of `Trainer`, forward
with full memory, loss and backward, under torch's FakeTensorMode, which keeps shapes, types, autocast and what autograd
saves, and computes nothing. What is left out: the workspace inside kernels, what Muon copies for its step, the rounding
and fragmentation of the allocator, what the driver and the processes of a GPU take for themselves (about half a GB),
and validation, which needs less than training. `tests/test_footprint.py` compares the count with steps on real
tensors, `benchmarks/plan.py` with what the system says that processes took.
"""

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from parnas.architecture import IDENTITY, Architecture
from parnas.config import Config
from parnas.errors import ParnasError
from parnas.model.blocks import Block
from parnas.model.estimators import Gates, LooseGates, PathGate, lesson_rows
from parnas.model.memory import Memory, join_rows
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.sections import ModelConfig, SearchConfig
from parnas.training.optimizers import suits_muon
from parnas.training.passes import take_rows

MIXED = ("soft", "straight_through")  # estimators that run all candidates


@dataclass(frozen=True)
class Footprint:
    """Bytes of one training step on one device."""

    parameters: int
    memory: int  # of the segments before, full
    kept: int  # activations that wait for the backward pass
    softmax: int  # the part of them that the softmax and the loss keep
    gradients: int
    peak: int  # most at once besides parameters and memory: activations, gradients and what comes and goes
    moments: int = 0  # of the optimizer, where the step has one
    average: int = 0  # of the weights, where there is one


class Ledger(TorchDispatchMode):
    """Bytes of the storages alive that operations made since it was entered, or that it was told to `hold`.

    `rows` are how many elements each `nonzero` finds, in order, where tensors have no data to look for them.
    """

    def __init__(self, rows: Iterable[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak, self.rows = 0, 0, list(rows)
        self.known: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation and add what it made."""
        if self.rows and func is torch.ops.aten.nonzero.default:
            result = args[0].new_zeros((self.rows.pop(0), args[0].dim()), dtype=torch.int64)
        else:
            result = func(*args, **(kwargs or {}))
        self.hold(result)
        return result

    def hold(self, tensors: Any) -> int:
        """Add tensors, however nested, whose storages are not yet known; the bytes of these."""
        before = self.live
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return self.live - before

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.known:
            return

        def forget(_: object) -> None:
            del self.known[key]
            self.live -= size

        self.known[key] = weakref.ref(storage, forget)
        self.live += size


@dataclass
class Step:
    """What a step is counted of: the network, so many rows of `tgt_len`, and the precision.

    `tails` are the tails' shares of the text, by which the softmax and a narrowing embedding divide the rows; none
    where the tensors are real and say it themselves.
    """

    network: TransformerXL
    rows: int
    tgt_len: int
    precision: str  # fp32 or bf16
    gates: Gates | None = None
    tails: Sequence[float] | None = None
    parts: int = 1  # that the rows are read in
    tokens: Tensor = field(init=False)  # [B, T]

    def __post_init__(self) -> None:
        self.tokens = torch.zeros(self.rows, self.tgt_len, dtype=torch.int64)

    def autocast(self) -> torch.autocast:
        """As `Device.autocast`: the types are those of every device, the CPU's tensors need none."""
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def found_rows(self, rows: int) -> tuple[list[int], list[int]]:
        """Of so many rows, the ids in each cluster of an embedding that narrows, and in each tail of the softmax."""
        tokens = rows * self.tgt_len
        tails = [round(share * tokens) for share in self.tails or ()]
        embedded = [tokens - sum(tails), *tails] if self.network.embedding.projections else []
        return (embedded, tails) if self.tails else ([], [])

    def full_memory(self) -> Memory:
        """Memory after as many segments as fill it."""
        reach, blocks = self.network.config.reach, cast(list[Block], list(self.network.blocks))
        most = max((block.memory_tokens(reach) for block in blocks), default=0)
        memory: Memory = (None,) * len(blocks)
        with torch.no_grad(), self.autocast():
            for _ in range(math.ceil(most / self.tgt_len)):
                with Ledger(self.found_rows(self.rows)[0]):
                    memory = self.network(self.tokens, memory, self.gates).memory
        return memory

    def count(self) -> Footprint:
        """Bytes of the forward and backward passes of a step, as `Passes.backward` makes them."""
        old, memories, weights = self.full_memory(), list[Memory](), list(self.network.parameters())
        rows, ledger, kept, softmax = self.rows // self.parts, Ledger(), 0, 0
        ledger.hold([weights, old, self.tokens, self.gates])
        with ledger:
            for part in sorted({0, self.parts - 1}):  # those between are as the first, but for memory that gathers
                ledger.live += max(0, part - 1) * storage_bytes(memories)
                own = slice(part * rows, (part + 1) * rows)
                ledger.rows = [each for found in self.found_rows(rows) for each in found]
                with self.autocast():
                    output = self.network(self.tokens[own], take_rows(old, own) if self.parts > 1 else old, self.gates)
                    body = ledger.live
                    nll = self.network.score(output.hidden, self.tokens[own])
                    softmax = ledger.live - body
                loss = nll.mean() if output.loss is None else nll.mean() + output.loss
                memories.append(output.memory)
                del output, nll
                kept = ledger.live - storage_bytes([weights, [weight.grad for weight in weights], old, memories])
                loss.backward()
            memory = storage_bytes(join_rows(memories[:1] * self.parts))
        parameters, gradients = storage_bytes(weights), storage_bytes([weight.grad for weight in weights])
        return Footprint(parameters, memory, kept, softmax, gradients, ledger.peak - parameters - memory)


def storage_bytes(tensors: Any) -> int:
    """Bytes of the distinct storages of tensors, however nested."""
    return Ledger().hold(tensors)


@contextmanager
def without_data() -> Iterator[None]:
    """Tensors made here have shape and type, but no data; networks too, which training must not be given afterwards.

    Raises `ParnasError` where a layer needs the data to know its shapes.
    """
    try:
        with FakeTensorMode():
            yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ParnasError(
            f"A layer looks at what its tensors hold ({error.func}), so that it cannot be counted without data."
        ) from error


def count_step(
    network: TransformerXL, config: Config, counts: Sequence[int], rows: int, precision: str, gates: Gates | None
) -> Footprint:
    """Footprint of a step of a network that was made without data."""
    network.train().checkpoint_activations = config.runtime.checkpoint_activations
    tails, parts = network.head.cluster_shares(counts), math.gcd(config.train.accumulate, rows)
    found = Step(network, rows, config.data.tgt_len, precision, gates, tails, parts).count()
    return replace(found, moments=moment_bytes(network, config.train.optimizer))


def moment_bytes(network: TransformerXL, optimizer: str) -> int:
    """Bytes of the optimizers' state: two moments of each weight by AdamW, one by Muon."""
    one = set()
    if optimizer == "muon":
        one = {name for name, weight in network.named_parameters() if suits_muon(name, weight)}
        one -= network.compression_names()
    return sum(weight.nbytes * (1 if name in one else 2) for name, weight in network.named_parameters())


def count_retraining(
    config: Config, architecture: Architecture, counts: Sequence[int], rows: int, precision: str
) -> Footprint:
    """Footprint of training a discrete network on so many rows; `counts` [V] as for `TransformerXL.multiply_adds`."""
    with without_data():
        network = TransformerXL.build(config.model, architecture, len(counts))
        found = count_step(network, config, counts, rows, precision, None)
        return replace(found, average=found.parameters) if config.train.average else found


def count_search(config: Config, counts: Sequence[int], rows: int, precision: str) -> Footprint:
    """Footprint of training the SuperNet on so many rows; of an estimator that runs paths, for the largest of them."""
    search, tgt_len = config.search, config.data.tgt_len
    with without_data():
        network = SuperNet(config.model, search.space, search.blocks, len(counts))
        if search.estimator in MIXED:
            drawn: Gates = network.alpha().softmax(dim=-1)
        else:
            kept = {name: kept_by(name, config.model, rows, tgt_len, precision) for name in search.candidates}
            drawn = path_gates(network, search, kept)
        found = count_step(network, config, counts, rows, precision, LooseGates(drawn).gates)
    if not search.alpha_share:
        return found
    of_alpha = found.memory * lesson_rows(search.estimator, rows) // rows
    return replace(found, memory=found.memory + of_alpha)


def kept_by(name: str, model: ModelConfig, rows: int, tgt_len: int, precision: str) -> int:
    """Bytes that a layer keeps for its backward pass, and an embedding and softmax that are the same for all."""
    if name == IDENTITY:
        return 0
    narrow = {"cutoffs": (), "div_val": 1, "proj_factor": None, "proj_dims": None, "tie_weights": True}
    network = TransformerXL.build(model.model_copy(update=narrow), Architecture([name]), 2).train()
    return Step(network, rows, tgt_len, precision).count().kept


def path_gates(network: SuperNet, search: SearchConfig, kept: Mapping[str, int]) -> list[PathGate]:
    """The path through the candidates that keep most, as the estimator would have the gates of such a path.

    Weights have a gradient where alpha learns from the same step; `single_path` probes one more candidate.
    """
    weights = network.alpha().softmax(dim=-1)
    rows = (weights.detach() if search.estimator == "uniform" else weights).unbind()
    gates, probing = [], search.estimator == "single_path"
    for row, names in zip(rows, search.block_spaces, strict=True):
        ranked = sorted(names, key=lambda name: kept[name], reverse=True)
        probed = network.space.index(ranked[1]) if probing and len(ranked) > 1 and ranked[1] != IDENTITY else None
        probing = probing and probed is None
        gates.append(PathGate(row, network.space.index(ranked[0]), probed))
    return gates
