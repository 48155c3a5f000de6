"""The optimizer of a network's weights: gradients, clipping and updates of everything but alpha."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from parnas.config.schema import TrainConfig
from parnas.data.batching import Batch
from parnas.model.estimators import Gates
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL
from parnas.training.device import Device
from parnas.training.micro_batches import Forward, GradientAccumulator
from parnas.training.optimizers import Muon, check_shapes, gradient_norm, make_adamw, step_clipped, suits_muon

_COMPRESSION = "compression_optimizer"


class WeightOptimizer:
    """Accumulates the gradients of the weights and updates them, by up to three torch optimizers.

    AdamW trains the weights, or with `train.optimizer: muon` those that are no matrices of a layer, while Muon trains
    the matrices. The weights that compress memory have an AdamW and a clipping of their own, because their auxiliary
    loss must not scale the gradients of the others.
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

    def backward(self, batch: Batch, memory: Memory | None, gates: Gates | None) -> Forward:
        """Accumulate the gradients of a batch; see `GradientAccumulator.backward`."""
        return self.accumulator.backward(batch, memory, gates)

    def gradient_norms(self) -> list[Tensor]:
        """Return the gradient norm of the weights and, where memory is compressed, that of the compression."""
        groups = [self.parameters, *([self.compression_parameters] if self.compression_parameters else [])]
        return [gradient_norm(parameters).detach() for parameters in groups]

    def step(self, norms: list[Tensor], skip_non_finite: bool) -> Tensor:
        """Clip the gradients and update the weights; return the gradient norm, not finite where any norm is not.

        Args:
            norms: what `gradient_norms` returned.
            skip_non_finite: leave the weights unchanged, on the device, where a norm is not finite.
        """
        for name, optimizer in self.optimizers.items():
            norm = norms[1] if name == _COMPRESSION else norms[0]
            step_clipped(optimizer, norm, self.clip, skip_non_finite)
        return norms[0] if len(norms) == 1 else norms[0] + 0 * norms[1]

    def state_dict(self) -> dict[str, Any]:
        """Return the state of each optimizer by name."""
        return {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the optimizers; raises `ValueError` where a state has not the shape of its parameter."""
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
            check_shapes(optimizer)
