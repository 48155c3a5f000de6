"""Training of all parameters except alpha: gradients over micro-batches and processes, clipping, and updates."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from parnas.config.schema import TrainConfig
from parnas.data.batching import Batch
from parnas.model.gates import DetachedGates, Gates
from parnas.model.memory import Memory, join_rows, map_memory
from parnas.model.transfer import to_device
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device
from parnas.training.distillation import Teachers
from parnas.training.distributed import DistributedContext
from parnas.training.optimizers import Muon, check_shapes, gradient_norm, make_adamw, step_clipped, suits_muon

_COMPRESSION = "compression_optimizer"


class Forward(NamedTuple):
    """The result of a forward pass over a batch or a micro-batch."""

    loss: Tensor  # mean over the tokens read by this process, nats per token
    memory: Memory  # after the batch, for the next segment
    compression: Tensor | None  # auxiliary loss of compressive memory; None without compressive memory


class MicroBatch(NamedTuple):
    """A part of a batch that goes through the network at once."""

    rows: slice  # of the rows that this process reads
    gates: Gates | None  # None for a discrete network


class NetworkWithLoss(nn.Module):
    """A network and its loss in one module, because DistributedDataParallel wraps a module's forward pass.

    With teachers, the memory has one more element for each of them: its memory.
    """

    def __init__(self, model: TransformerXL, device: Device, teachers: Teachers | None = None) -> None:
        super().__init__()
        self.model, self.device = model, device
        self.teachers = teachers

    def forward(self, inputs: Tensor, targets: Tensor, memory: Memory | None, gates: Gates | None) -> Forward:
        """Return the mean loss of predicting ids from `inputs` [B, T], and the memory; `targets` [B, T] on the CPU."""
        own = self.model.memory_parts
        with self.device.autocast():
            output = self.model(inputs, memory and memory[:own], gates)
            soft, memories = None, tuple[Any, ...]()
            if self.teachers is not None:
                theirs = memory[own:] if memory else (None,) * len(self.teachers.networks)
                soft, memories = self.teachers.predict(inputs, theirs)
            loss = self.model.score(output, targets, soft).mean()
        return Forward(loss, (*output.memory, *memories), output.loss)


class GradientAccumulator:
    """Computes the gradients of a batch in up to `count` micro-batches, to use less memory of the device.

    The gradients are those of the mean loss of the whole batch. With several processes, each process reads its slice of
    the rows, and the gradients of `weights` are averaged over all processes. A weight that no process used has no
    gradient. With several samples of gates, each sample is for an equal part of the batch's rows.
    """

    def __init__(
        self,
        model: TransformerXL,
        weights: Iterable[nn.Parameter],
        device: Device,
        count: int,
        teachers: Teachers | None = None,
    ) -> None:
        self.device, self.count = device, count
        self.network = NetworkWithLoss(model, device, teachers)
        self.parallel: DistributedDataParallel | None = None
        if device.distributed.world_size > 1:
            # The parameters in use differ from step to step: candidates by gate, softmax clusters by target.
            with _only_trainable(model, weights), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer torch renames an argument that older torch needs
                self.parallel = DistributedDataParallel(
                    self.network, find_unused_parameters=True, broadcast_buffers=False
                )

    def divide(self, rows: int, samples: int) -> int:
        """Return the number of micro-batches for `rows` rows of this process; see `split`."""
        own = samples_of_process(samples, self.device.distributed.world_size)
        return rows // rows_of_micro_batch(rows, self.count, own)

    def split(self, rows: int, samples: Sequence[Gates | None]) -> list[MicroBatch]:
        """Divide the `rows` rows of this process into micro-batches of equally many rows.

        The number of samples must divide the number of rows of all processes together.
        """
        own = share_out(samples, self.device.distributed)
        each, size = rows // len(own), rows_of_micro_batch(rows, self.count, len(own))
        return [MicroBatch(slice(start, start + size), own[start // each]) for start in range(0, rows, size)]

    def forward(
        self, batch: Batch, memory: Memory | None, samples: Sequence[Gates | None], average_gradients: bool = False
    ) -> Iterator[Forward]:
        """Yield the result of the forward pass of each micro-batch (see `split`).

        Args:
            batch: this process's rows.
            memory: memory of the same rows; an empty memory is used instead if the batch starts an epoch.
            samples: one or more samples of gates; `[None]` for a discrete network.
            average_gradients: average the gradients of the weights over all processes in the backward pass.
        """
        network = self.parallel if average_gradients and self.parallel else self.network
        inputs, targets = to_device(torch.from_numpy(batch.inputs), self.device.device), torch.from_numpy(batch.targets)
        memory = None if batch.starts_epoch else memory
        micro_batches = self.split(len(inputs), samples)
        for number, (rows, gates) in enumerate(micro_batches, 1):
            if self.parallel is not None:  # set before forward: gradients are exchanged with the last micro-batch only
                self.parallel.require_backward_grad_sync = number == len(micro_batches)
            part = memory if len(micro_batches) == 1 else take_rows(memory, rows)
            yield network(inputs[rows], targets[rows], part, gates)

    def backward(self, batch: Batch, memory: Memory | None, samples: Sequence[Gates | None]) -> Forward:
        """Add the gradients of a batch, averaged over all processes, to `grad` of each weight.

        The arguments are those of `forward`. The losses and the memory returned are those of this process.
        """
        results, count = [], self.divide(len(batch.inputs), len(samples))
        for result in self.forward(batch, memory, samples, average_gradients=True):
            terms = [result.loss, result.compression]
            (torch.stack([term for term in terms if term is not None]).sum() / count).backward()
            compression = None if result.compression is None else result.compression.detach()
            results.append(Forward(result.loss.detach(), result.memory, compression))
        return join_micro_batches(results)

    def loss_of_gates(self, batch: Batch, memory: Memory | None, gates: Gates) -> tuple[Tensor, Memory]:
        """Return a scalar from which `gates` receive the gradient of the loss, and the memory after the batch.

        Let L be the mean loss of the batch over all processes. If `gates` require no gradient, the scalar is L itself.
        Otherwise it is the linearisation <gates, dL/dgates>, where dL/dgates is a constant: the scalar has the gradient
        of L, but another value. So each micro-batch is back-propagated to the gates before the next one is read, and
        only one autograd graph is in memory at a time. The weights receive no gradient.
        """
        detached, results = DetachedGates(gates), []
        for result in self.forward(batch, memory, [detached.gates]):
            if detached.leaf.requires_grad:
                result.loss.backward(inputs=[detached.leaf])
            results.append(result._replace(loss=result.loss.detach()))
        whole = join_micro_batches(results)
        if detached.leaf.grad is None:
            self.device.distributed.all_reduce_mean([whole.loss])
            return whole.loss, whole.memory
        detached.leaf.grad /= len(results)
        self.device.distributed.all_reduce_mean([detached.leaf.grad])
        return (detached.sampled * detached.leaf.grad).sum(), whole.memory


@contextmanager
def _only_trainable(model: nn.Module, weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Freeze all parameters except `weights` inside the context; DistributedDataParallel ignores frozen parameters."""
    own = {id(weight) for weight in weights}
    others = [parameter for parameter in model.parameters() if id(parameter) not in own and parameter.requires_grad]
    for parameter in others:
        parameter.requires_grad_(False)
    yield
    for parameter in others:
        parameter.requires_grad_(True)


def rows_of_micro_batch(rows: int, accumulate: int, samples: int) -> int:
    """Return the number of rows of a micro-batch, given those of the process.

    It is the largest number that divides the rows of each of the process's `samples` of gates and, if `accumulate`
    divides `rows`, is at most `rows` / `accumulate`.
    """
    most, part = rows // math.gcd(accumulate, rows), rows // samples
    return next(size for size in range(min(most, part), 0, -1) if part % size == 0)


def share_out(samples: Sequence[Gates | None], distributed: DistributedContext) -> list[Gates | None]:
    """Return the samples of gates that this process uses, each for an equal part of its rows.

    The rows of the whole batch are divided evenly among the samples, in order, and then among the processes. All
    processes have equally many parts, so a sample can be listed twice: with 2 samples and 3 processes, the parts of the
    processes are those of the samples 0 and 0, 0 and 1, 1 and 1.
    """
    count, processes = len(samples), distributed.world_size
    each = samples_of_process(count, processes)
    first = distributed.rank * each
    return [samples[part * count // (processes * each)] for part in range(first, first + each)]


def samples_of_process(count: int, processes: int) -> int:
    """Return the number of parts of a process, each with its sample of gates (see `share_out`)."""
    return count // math.gcd(count, processes)


def take_rows(memory: Memory | None, rows: slice) -> Memory | None:
    """Return the part of `memory` that belongs to the given rows of a batch; `None` if `memory` is `None`."""
    part: Memory | None = map_memory(lambda tensor: tensor[rows], memory)
    return part


def join_micro_batches(results: list[Forward]) -> Forward:
    """Return the result of a batch from the `results` of its micro-batches: mean losses, and the memory of all rows."""
    if len(results) == 1:
        return results[0]
    compressions = [result.compression for result in results if result.compression is not None]
    return Forward(
        torch.stack([result.loss for result in results]).mean(),
        join_rows([result.memory for result in results]),
        torch.stack(compressions).mean() if compressions else None,
    )


class WeightOptimizer:
    """Clips the gradients of the weights and updates the weights, with up to three torch optimizers.

    AdamW trains all weights; with `train.optimizer: muon`, Muon trains the matrices of layers instead. The weights that
    compress memory have a separate AdamW and are clipped separately, so that their auxiliary loss does not change the
    clipping of the other gradients.
    """

    def __init__(
        self,
        model: TransformerXL,
        weights: Mapping[str, nn.Parameter],
        train: TrainConfig,
        device: Device,
        lr: float,
        teachers: Teachers | None = None,
    ) -> None:
        self.clip = train.clip
        self.accumulator = GradientAccumulator(model, weights.values(), device, train.accumulate, teachers)
        compressing = model.compression_names()
        compression = {name: weight for name, weight in weights.items() if name in compressing}
        others = {name: weight for name, weight in weights.items() if name not in compressing}
        self.parameters, self.compression_parameters = list(others.values()), list(compression.values())
        matrices = {}
        if train.optimizer == "muon":
            matrices = {name: weight for name, weight in others.items() if suits_muon(name, weight)}
        vectors = {name: weight for name, weight in others.items() if name not in matrices}
        self.optimizers: dict[str, torch.optim.Optimizer] = {"optimizer": make_adamw(vectors, lr, train.weight_decay)}
        if matrices:
            dtype = torch.bfloat16 if device.precision == "bf16" else torch.float32
            self.optimizers["muon"] = Muon(matrices.values(), lr, train.weight_decay, dtype)
        if compression:
            self.optimizers[_COMPRESSION] = make_adamw(compression, lr, train.weight_decay)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate of all optimizers."""
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = lr

    def gradient_norms(self) -> list[Tensor]:
        """Return the gradient norm of the weights that do not compress memory, and that of the weights that do.

        Without compressive memory, return the first norm alone.
        """
        groups = [self.parameters, *([self.compression_parameters] if self.compression_parameters else [])]
        return [gradient_norm(parameters).detach() for parameters in groups]

    def step(self, norms: list[Tensor], skip_non_finite: bool) -> Tensor:
        """Clip the gradients, update the weights, and return the gradient norm of those that do not compress memory.

        The result is NaN if the gradient norm of the weights that compress memory is not finite.

        Args:
            norms: the result of `gradient_norms`.
            skip_non_finite: leave the weights that a norm belongs to unchanged if this norm is not finite. The GPU
                tests the norms, so that the CPU does not wait for the GPU.
        """
        for name, optimizer in self.optimizers.items():
            norm = norms[1] if name == _COMPRESSION else norms[0]
            step_clipped(optimizer, norm, self.clip, skip_non_finite)
        return norms[0] if len(norms) == 1 else norms[0] + 0 * norms[1]  # 0 times infinity is NaN

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each torch optimizer, by its name in `optimizers`."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the torch optimizers; raise `ValueError` if a stored tensor has another shape than its parameter."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
            check_shapes(optimizer)
