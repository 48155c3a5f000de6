"""Estimate the memory of a training step: count the bytes of a step that runs on tensors without data.

A training step (forward pass with full memory, loss, backward pass) runs under torch's FakeTensorMode, which keeps
shapes, types, autocast and the tensors that autograd saves, but computes nothing. `MemoryTracker` adds up the storages
that are alive after each operation. Not counted: workspace inside kernels, copies in Muon's update, rounding and
fragmentation of the allocator, the memory of driver and GPU processes (about half a GB), and validation, which needs
less than a training step. `tests/training/planning/test_memory_estimate.py` compares the estimate with steps on real
tensors, `benchmarks/plan.py` compares it with the memory that training processes used.
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
from parnas.config.loader import Config
from parnas.config.schema import ModelConfig, SearchConfig
from parnas.errors import ParnasError
from parnas.model.estimators import arch_batch_size
from parnas.model.gates import DetachedGates, Gates, PathGate
from parnas.model.memory import Memory, join_rows
from parnas.model.supernet import StochasticBlock, SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.training.optimizers import suits_muon
from parnas.training.weight_optimizer import rows_of_micro_batch, samples_of_process, take_rows

MIXED = ("soft", "straight_through")  # estimators that run all candidates


@dataclass(frozen=True)
class MemoryEstimate:
    """The bytes that one training step needs on one device, by their use."""

    parameters: int
    memory: int  # the network's full memory of earlier segments
    saved_activations: int  # saved for the backward pass
    softmax: int  # the part of `saved_activations` that softmax and loss save
    gradients: int
    peak: int  # largest sum, over all moments of the step, of activations, gradients and temporary tensors
    moments: int = 0  # state of the optimizer
    average: int = 0  # running mean of the weights; 0 if weights are not averaged
    buffers: int = 0  # tensors of the network that are not trained


class MemoryTracker(TorchDispatchMode):
    """Counts the bytes of tensor storages in use that operations inside the context made or `hold` received.

    `live` is the present number of bytes, `peak` the largest number so far. `rows` lists how many indices each call of
    `nonzero` returns, in order of the calls, since this number depends on data that the tensors do not have.
    """

    def __init__(self, rows: Iterable[int] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live, self.peak, self.rows = 0, 0, list(rows)
        self.counted: dict[int, Any] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Run an operation of torch and count the storages of its result."""
        if self.rows and func is torch.ops.aten.nonzero.default:
            result = args[0].new_zeros((self.rows.pop(0), args[0].dim()), dtype=torch.int64)
        else:
            result = func(*args, **(kwargs or {}))
        self.hold(result)
        return result

    def hold(self, tensors: Any) -> int:
        """Count the storages of tensors in nested containers that are not counted yet, and return their bytes."""
        before = self.live
        for tensor in tree_leaves(tensors):
            if isinstance(tensor, Tensor):
                self._add(tensor.untyped_storage())
        self.peak = max(self.peak, self.live)
        return self.live - before

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self.counted:
            return

        def forget(_: object) -> None:
            del self.counted[key]
            self.live -= size

        self.counted[key] = weakref.ref(storage, forget)
        self.live += size


@dataclass
class Step:
    """A training step to estimate: the network, a batch of `rows` rows of `tgt_len` tokens, and the precision.

    `tails` holds the share of the text's tokens in each tail cluster of the adaptive softmax and embedding, since
    tokens without data do not determine their clusters; `None` for a step on real tensors.
    """

    network: TransformerXL
    rows: int
    tgt_len: int
    precision: str  # fp32 or bf16
    gates: Gates | None = None
    tails: Sequence[float] | None = None
    micro_batches: int = 1
    tokens: Tensor = field(init=False)  # [B, T]

    def __post_init__(self) -> None:
        self.tokens = torch.zeros(self.rows, self.tgt_len, dtype=torch.int64)

    def autocast(self) -> torch.autocast:
        """Return a context for the step's precision: autocast of the CPU, which yields the same dtypes as on a GPU."""
        return torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.precision == "bf16")

    def rows_per_cluster(self, rows: int) -> tuple[list[int], list[int]]:
        """Return how many tokens of `rows` rows are in each cluster of the embedding, and in each tail of the softmax.

        The first list is empty if all clusters of the embedding have the same width (see `div_val`). Without `tails`
        both lists are empty.
        """
        tokens = rows * self.tgt_len
        tails = [round(share * tokens) for share in self.tails or ()]
        embedded = [tokens - sum(tails), *tails] if self.network.embedding.projections else []
        return (embedded, tails) if self.tails else ([], [])

    def full_memory(self) -> Memory:
        """Return the network's memory after reading as many segments as it takes to fill it."""
        most = self.network.memory_tokens(self.network.config.reach)
        memory: Memory = (None,) * self.network.memory_parts
        with torch.no_grad(), self.autocast():
            for _ in range(math.ceil(most / self.tgt_len)):
                with MemoryTracker(self.rows_per_cluster(self.rows)[0]):
                    memory = self.network(self.tokens, memory, self.gates).memory
        return memory

    def count(self) -> MemoryEstimate:
        """Run the step with the same passes as `GradientAccumulator.backward`, and return the bytes it needs."""
        old, memories = self.full_memory(), list[Memory]()
        weights, buffers = list(self.network.parameters()), list(self.network.buffers())
        rows, tracker, saved, softmax = self.rows // self.micro_batches, MemoryTracker(), 0, 0
        tracker.hold([weights, buffers, old, self.tokens, self.gates])
        with tracker:
            # The first and the last micro-batch suffice: those between repeat the first and add their memories.
            for number in sorted({0, self.micro_batches - 1}):
                tracker.live += max(0, number - 1) * storage_bytes(memories)
                own = slice(number * rows, (number + 1) * rows)
                tracker.rows = [count for counts in self.rows_per_cluster(rows) for count in counts]
                with self.autocast():
                    memory = take_rows(old, own) if self.micro_batches > 1 else old
                    output = self.network(self.tokens[own], memory, self.gates)
                    body = tracker.live
                    nll = self.network.score(output, self.tokens[own])
                    softmax = tracker.live - body
                loss = nll.mean() if output.loss is None else nll.mean() + output.loss
                memories.append(output.memory)
                del output, nll, memory
                gradients = [weight.grad for weight in weights]
                saved = tracker.live - storage_bytes([weights, buffers, gradients, old, memories])
                loss.backward()
            memory_bytes = storage_bytes(join_rows(memories[:1] * self.micro_batches))
        gradient_bytes = storage_bytes([weight.grad for weight in weights])
        peak = tracker.peak - storage_bytes([weights, buffers]) - memory_bytes
        return MemoryEstimate(
            storage_bytes(weights), memory_bytes, saved, softmax, gradient_bytes, peak, buffers=storage_bytes(buffers)
        )


def storage_bytes(tensors: Any) -> int:
    """Return the bytes of all tensors in nested containers; a storage that several tensors share is counted once."""
    return MemoryTracker().hold(tensors)


@contextmanager
def without_data() -> Iterator[None]:
    """Context in which new tensors have a shape and a dtype but no data, for networks that only serve for estimates.

    Raises:
        ParnasError: shapes in a layer depend on the values of tensors.
    """
    try:
        with FakeTensorMode():
            yield
    except (DynamicOutputShapeException, DataDependentOutputException) as error:
        raise ParnasError(
            f"The memory cannot be estimated: shapes in a layer depend on values of its tensors (by {error.func}), "
            "and the estimate runs on tensors without values. Change the layer, or measure a short training."
        ) from error


def _count_step(
    network: TransformerXL,
    config: Config,
    counts: Sequence[int],
    rows: int,
    precision: str,
    gates: Gates | None,
    samples: int = 1,
) -> MemoryEstimate:
    """Return the estimate of a step on `rows` rows; `network` must be made inside the context `without_data`.

    `samples` is the number of samples of gates, each for an equal part of the rows.
    """
    network.train().checkpoint_activations = config.runtime.checkpoint_activations
    tails = network.head.cluster_shares(counts)
    micro_batches = rows // rows_of_micro_batch(rows, config.train.accumulate, samples)
    estimate = Step(network, rows, config.data.tgt_len, precision, gates, tails, micro_batches).count()
    return replace(estimate, moments=_moment_bytes(network, config.train.optimizer))


def _moment_bytes(network: TransformerXL, optimizer: str) -> int:
    """Return the bytes of the optimizers' state: two moments per weight that AdamW trains, one if Muon trains it."""
    compressing = network.compression_names()
    total = 0
    for name, weight in network.named_parameters():
        if not weight.requires_grad:
            continue
        by_muon = optimizer == "muon" and suits_muon(name, weight) and name not in compressing
        total += weight.nbytes * (1 if by_muon else 2)
    return total


def count_retraining(
    config: Config, architecture: Architecture, counts: Sequence[int], rows: int, precision: str
) -> MemoryEstimate:
    """Estimate the memory of a retraining step on `rows` rows, without training.

    `counts` [V] are the frequencies of the tokens in the training text; `precision` is fp32 or bf16.
    """
    with without_data():
        network = TransformerXL.build(config.model, architecture, len(counts))
        if config.train.freeze_embedding:
            network.freeze_embedding()
        estimate = _count_step(network, config, counts, rows, precision, None)
        return replace(estimate, average=estimate.parameters) if config.train.average else estimate


def count_search(config: Config, counts: Sequence[int], rows: int, precision: str) -> MemoryEstimate:
    """Estimate the memory of a weight step of a search on `rows` rows, plus hidden states kept for architecture steps.

    If the estimator samples paths, the estimate is for the path whose saved activations take most bytes, and the
    gradients are those of this and of other paths, as many as the step samples, with different layers in every block.
    `counts` [V] are the frequencies of the tokens in the training text; `precision` is fp32 or bf16.
    """
    search, tgt_len = config.search, config.data.tgt_len
    with without_data():
        network = SuperNet.from_config(config.model, search, len(counts))
        if search.estimator in MIXED:
            sampled: Gates = network.alpha().softmax(dim=-1)
        else:
            saved = {name: _saved_by(name, config.model, rows, tgt_len, precision) for name in search.candidates}
            sampled = path_gates(network, search, saved)
        samples = search.samples_of_batch(config.data.batch_size)
        own = samples_of_process(samples, config.data.batch_size // rows)
        estimate = _count_step(network, config, counts, rows, precision, DetachedGates(sampled).gates, own)
        if not isinstance(sampled, Tensor):
            # Gradients of the paths of other samples, which other processes may have run, stay until the update.
            further = _largest_other_gradients(network, sampled, samples - 1)
            estimate = replace(estimate, gradients=estimate.gradients + further, peak=estimate.peak + further)
    if not search.alpha_share:
        return estimate
    arch_memory = estimate.memory * arch_batch_size(search.estimator, rows) // rows
    return replace(estimate, memory=estimate.memory + arch_memory)


def _largest_other_gradients(network: SuperNet, path: Sequence[PathGate], count: int) -> int:
    """Return the most bytes of gradients that `count` paths have in addition to those of `path`."""
    total = 0
    for block, gate in zip(network.blocks, path, strict=True):
        layers = dict(cast(StochasticBlock, block).candidates)
        known = {id(weight) for weight in layers.pop(network.space[gate.chosen]).parameters()}
        sizes = [sum(each.nbytes for each in layer.parameters() if id(each) not in known) for layer in layers.values()]
        total += sum(sorted(sizes, reverse=True)[:count])
    return total


def _saved_by(name: str, model: ModelConfig, rows: int, tgt_len: int, precision: str) -> int:
    """Return the bytes of activations that a network of the single layer `name` saves for the backward pass."""
    if name == IDENTITY:
        return 0
    network = TransformerXL.build(model.without_clusters(), Architecture([name]), 2).train()
    return Step(network, rows, tgt_len, precision).count().saved_activations


def path_gates(network: SuperNet, search: SearchConfig, saved: Mapping[str, int]) -> list[PathGate]:
    """Return gates, one per block, that choose the block's candidate with the most `saved` bytes.

    The gates have the form that `search.estimator` gives them: with `uniform` they are constants, with other estimators
    they depend on alpha and need a gradient; with `single_path`, one block also runs a second candidate, the one with
    the second most bytes.
    """
    weights = network.alpha().softmax(dim=-1)
    rows = (weights.detach() if search.estimator == "uniform" else weights).unbind()
    gates, probing = [], search.estimator == "single_path"
    for row, names in zip(rows, search.block_spaces, strict=True):
        ranked = sorted(names, key=lambda name: saved[name], reverse=True)
        probed = network.space.index(ranked[1]) if probing and len(ranked) > 1 and ranked[1] != IDENTITY else None
        probing = probing and probed is None
        gates.append(PathGate(row, network.space.index(ranked[0]), probed))
    return gates
