"""Training of the weights: gradients over micro-batches and processes, clipping, and updates of all but alpha."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from parnas.config.schema import TrainConfig
from parnas.data.batching import Batch
from parnas.model.gates import DetachedGates, Gates
from parnas.model.memory import Memory, join_rows, map_memory
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device
from parnas.training.optimizers import Muon, check_shapes, gradient_norm, make_adamw, step_clipped, suits_muon

__all__ = ["take_rows"]

_COMPRESSION = "compression_optimizer"


class Forward(NamedTuple):
    """The result of a forward pass over a batch or a micro-batch."""

    loss: Tensor  # mean, nats per token
    memory: Memory  # after the batch, for the next segment
    compression: Tensor | None  # auxiliary loss of compressive memory, where the network has one


class NetworkWithLoss(nn.Module):
    """A network and its loss in one module, because DistributedDataParallel wraps a module's forward pass."""

    def __init__(self, model: TransformerXL, device: Device) -> None:
        super().__init__()
        self.model, self.device = model, device

    def forward(self, inputs: Tensor, targets: Tensor, memory: Memory | None, gates: Gates | None) -> Forward:
        """Return the mean loss of predicting the ids `targets` [B, T] from `inputs` [B, T], and the next memory."""
        with self.device.autocast():
            output = self.model(inputs, memory, gates)
            nll = self.model.score(output.hidden, targets)
        return Forward(nll.mean(), output.memory, output.loss)


class GradientAccumulator:
    """Computes the gradients of a batch in up to `count` micro-batches: the same gradients, with less device memory.

    With several processes each reads its slice of the rows, and the gradients of `weights` are averaged over all
    processes. A weight that no process used has no gradient.
    """

    def __init__(self, model: TransformerXL, weights: Iterable[nn.Parameter], device: Device, count: int) -> None:
        self.device, self.count = device, count
        self.network = NetworkWithLoss(model, device)
        self.parallel: DistributedDataParallel | None = None
        if device.distributed.world_size > 1:
            # The parameters in use differ from step to step: candidates by gate, softmax clusters by target.
            with _only_trainable(model, weights), warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # newer torch renames an argument that older torch needs
                self.parallel = DistributedDataParallel(
                    self.network, find_unused_parameters=True, broadcast_buffers=False
                )

    def divide(self, rows: int) -> int:
        """Return the number of equal micro-batches for `rows`: the greatest common divisor of `count` and `rows`."""
        return math.gcd(self.count, rows)

    def forward(
        self, batch: Batch, memory: Memory | None, gates: Gates | None, average_gradients: bool = False
    ) -> Iterator[Forward]:
        """Yield the result of the forward pass of each micro-batch.

        Args:
            batch: this process's rows.
            memory: memory of the same rows; ignored if the batch starts an epoch.
            gates: gates of the candidates; `None` for a discrete network.
            average_gradients: average the gradients of the weights over all processes in the backward pass.
        """
        network = self.parallel if average_gradients and self.parallel else self.network
        device = self.device.device
        inputs, targets = torch.from_numpy(batch.inputs).to(device), torch.from_numpy(batch.targets).to(device)
        memory = None if batch.starts_epoch else memory
        count = self.divide(len(inputs))
        size = len(inputs) // count
        for number in range(count):
            if self.parallel is not None:  # set before forward: gradients are exchanged with the last micro-batch only
                self.parallel.require_backward_grad_sync = number + 1 == count
            rows = slice(number * size, (number + 1) * size)
            yield network(inputs[rows], targets[rows], memory if count == 1 else take_rows(memory, rows), gates)

    def backward(self, batch: Batch, memory: Memory | None, gates: Gates | None) -> Forward:
        """Accumulate the gradients of a batch, averaged over processes; return losses and memory of this process."""
        results = []
        for result in self.forward(batch, memory, gates, average_gradients=True):
            total = result.loss if result.compression is None else result.loss + result.compression
            (total / self.divide(len(batch.inputs))).backward()
            compression = None if result.compression is None else result.compression.detach()
            results.append(Forward(result.loss.detach(), result.memory, compression))
        return join_micro_batches(results)

    def loss_of_gates(self, batch: Batch, memory: Memory | None, gates: Gates) -> tuple[Tensor, Memory]:
        """Return a batch's mean loss over all processes as a function of the gates, and the memory after it.

        The weights receive no gradient. If the gates require a gradient, each micro-batch is back-propagated directly,
        so that only one graph is alive at a time. The returned scalar is then the linearisation
        <gates, d loss / d gates>: it has the gradient of the loss, but not its value.
        """
        detached, results = DetachedGates(gates), []
        for result in self.forward(batch, memory, detached.gates):
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
    """Freeze all parameters but `weights` inside the context, so that DistributedDataParallel ignores the others."""
    own = {id(weight) for weight in weights}
    others = [parameter for parameter in model.parameters() if id(parameter) not in own and parameter.requires_grad]
    for parameter in others:
        parameter.requires_grad_(False)
    yield
    for parameter in others:
        parameter.requires_grad_(True)


def take_rows(memory: Memory | None, rows: slice) -> Memory | None:
    """Return the memory of the rows `rows` of the batch; `None` if there is no memory."""
    part: Memory | None = map_memory(lambda tensor: tensor[rows], memory)
    return part


def join_micro_batches(results: list[Forward]) -> Forward:
    """Return the result of a batch from the results of its micro-batches: mean losses, and the memory of all rows."""
    if len(results) == 1:
        return results[0]
    compressions = [result.compression for result in results if result.compression is not None]
    return Forward(
        torch.stack([result.loss for result in results]).mean(),
        join_rows([result.memory for result in results]),
        torch.stack(compressions).mean() if compressions else None,
    )


class WeightOptimizer:
    """Clips the gradients of the weights and updates the weights, by up to three torch optimizers.

    AdamW trains all weights or, with `train.optimizer: muon`, all but the matrices of layers, which Muon trains. The
    weights that compress memory have a separate AdamW and are clipped separately, so that their auxiliary loss does not
    change the clipping of the other gradients.
    """

    def __init__(
        self, model: TransformerXL, weights: Mapping[str, nn.Parameter], train: TrainConfig, device: Device, lr: float
    ) -> None:
        self.clip = train.clip
        self.accumulator = GradientAccumulator(model, weights.values(), device, train.accumulate)
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
        """Return the gradient norm of the weights and, if some compress memory, the separate norm of those weights."""
        groups = [self.parameters, *([self.compression_parameters] if self.compression_parameters else [])]
        return [gradient_norm(parameters).detach() for parameters in groups]

    def step(self, norms: list[Tensor], skip_non_finite: bool) -> Tensor:
        """Clip the gradients and update the weights; return the first of `norms`, or NaN if the second is not finite.

        Args:
            norms: the gradient norms that `gradient_norms` returned.
            skip_non_finite: leave the weights unchanged if a norm is not finite; the device decides, so that the CPU
                does not wait for it.
        """
        for name, optimizer in self.optimizers.items():
            norm = norms[1] if name == _COMPRESSION else norms[0]
            step_clipped(optimizer, norm, self.clip, skip_non_finite)
        return norms[0] if len(norms) == 1 else norms[0] + 0 * norms[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each torch optimizer, by its name in `optimizers`."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the torch optimizers; raise `ValueError` where a state has another shape than its parameter."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
            check_shapes(optimizer)
