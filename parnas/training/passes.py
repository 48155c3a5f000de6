"""Forward and backward passes of training: over the parts of a batch, and in several processes at once."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from parnas.data.batching import Batch
from parnas.model.estimators import Gates
from parnas.model.memory import Memory, join_rows, map_memory
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device


class Forward(NamedTuple):
    """What reading a batch, or a part of its rows, gives to training."""

    loss: Tensor  # mean, nats per token
    memory: Memory
    compression: Tensor | None  # auxiliary loss of the compression of memory, where there is one


class TrainingLoss(nn.Module):
    """A network and its loss as one module, called once for each forward pass, as data-parallel training wants it."""

    def __init__(self, model: TransformerXL, device: Device) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, inputs: Tensor, targets: Tensor, memory: Memory | None, gates: Gates | None) -> Forward:
        """Ids and targets [B, T]."""
        with self.device.autocast():
            output = self.model(inputs, memory, gates)
            nll = self.model.score(output.hidden, targets)
        return Forward(nll.mean(), output.memory, output.loss)


class Passes:
    """Reads batches in up to so many parts, one after another: less memory, the same gradients.

    With several processes, each has its share of the rows, and gradients of `weights` are averaged over all of them. A
    weight that no process used has none.
    """

    def __init__(self, model: TransformerXL, weights: Iterable[nn.Parameter], device: Device, parts: int) -> None:
        self.device, self.parts = device, parts
        self.loss = TrainingLoss(model, device)
        self.parallel: DistributedDataParallel | None = None
        if device.ranks.count > 1:
            # What is used differs from step to step: candidates by the gates, clusters of the softmax by the targets.
            with without_gradient(model, weights), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # of newer versions, of a name that older ones need
                self.parallel = DistributedDataParallel(self.loss, find_unused_parameters=True, broadcast_buffers=False)

    def forward(self, batch: Batch, memory: Memory | None, gates: Gates | None) -> Iterator[Forward]:
        """What each part gives; with gradients of this process alone."""
        return self._read(self.loss, batch, memory, gates)

    def backward(self, batch: Batch, memory: Memory | None, gates: Gates | None) -> Forward:
        """Add up the gradients of a batch, of all processes; loss and memory are those of this process's rows."""
        results = []
        for result in self._read(self.parallel or self.loss, batch, memory, gates):
            total = result.loss if result.compression is None else result.loss + result.compression
            (total / self.divide(len(batch.inputs))).backward()
            compression = None if result.compression is None else result.compression.detach()
            results.append(Forward(result.loss.detach(), result.memory, compression))
        return join_parts(results)

    def _read(
        self, run: Callable[..., Forward], batch: Batch, memory: Memory | None, gates: Gates | None
    ) -> Iterator[Forward]:
        inputs, targets = (torch.from_numpy(part).to(self.device.device) for part in (batch.inputs, batch.targets))
        memory = None if batch.starts_epoch else memory
        parts = self.divide(len(batch.inputs))
        rows = len(inputs) // parts
        for part in range(parts):
            if self.parallel is not None:  # before forward: only with the last part are gradients exchanged
                self.parallel.require_backward_grad_sync = part + 1 == parts
            own = slice(part * rows, (part + 1) * rows)
            yield run(inputs[own], targets[own], memory if parts == 1 else take_rows(memory, own), gates)

    def divide(self, rows: int) -> int:
        """Into how many parts of equal size so many rows come: fewer than asked for where those do not divide them."""
        return math.gcd(self.parts, rows)


@contextmanager
def without_gradient(model: nn.Module, weights: Iterable[nn.Parameter]) -> Iterator[None]:
    """Let parameters other than `weights` need no gradient meanwhile, so that data-parallel training leaves them be."""
    own = {id(weight) for weight in weights}
    others = [parameter for parameter in model.parameters() if id(parameter) not in own and parameter.requires_grad]
    for parameter in others:
        parameter.requires_grad_(False)
    yield
    for parameter in others:
        parameter.requires_grad_(True)


def take_rows(memory: Memory | None, rows: slice) -> Memory | None:
    """The memory of some rows."""
    taken: Memory | None = map_memory(lambda kept: kept[rows], memory)
    return taken


def join_parts(results: list[Forward]) -> Forward:
    """The parts of a batch as one: means of the losses, and the memory of all rows."""
    if len(results) == 1:
        return results[0]
    compressions = [result.compression for result in results if result.compression is not None]
    return Forward(
        torch.stack([result.loss for result in results]).mean(),
        join_rows([result.memory for result in results]),
        torch.stack(compressions).mean() if compressions else None,
    )
