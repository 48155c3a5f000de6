"""Distillation: train a network to predict what trained networks, its teachers, predict (Hinton et al. 2015).

The gradient of a token is that of

    (1 - w) · cross-entropy + w · T² · KL(teacher ‖ network),      w = train.distill.weight,

with both distributions at the temperature T = train.distill.temperature (arXiv 1503.02531, section 2), while the loss
that is logged stays the cross-entropy. Several teachers count as one that predicts the mean of their probabilities.
With an adaptive softmax, the divergence is that of the head's distribution, over frequent ids and clusters, plus that
of the distribution within the cluster of the target if it is a rare id. Its mean over the text is the divergence of the
whole distribution, if targets are as frequent as the teacher says, without the cost of all clusters for all tokens.

Shapes: N tokens, D model width (each network has its own).
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parnas.config.schema import DistillConfig
from parnas.model.fused import SoftTargets
from parnas.model.memory import Memory
from parnas.model.transformer_xl import TransformerXL


class Teachers(NamedTuple):
    """Trained networks and the settings of the distillation from them."""

    networks: Sequence[TransformerXL]  # in evaluation mode, with the same vocabulary and clusters
    settings: DistillConfig

    @torch.no_grad()
    def predict(
        self, ids: Tensor, memories: Sequence[Memory | None]
    ) -> tuple[Callable[[int, Tensor | None], SoftTargets], tuple[Memory, ...]]:
        """Return the predictions for ids [B, T] as soft targets, and the memory of each teacher for the next segment.

        The soft targets are a function, as `SoftmaxHead.nll` takes it.
        """
        outputs = [
            network(ids, memory, inference=True) for network, memory in zip(self.networks, memories, strict=True)
        ]
        states = [output.hidden.flatten(0, 1) for output in outputs]  # [N, D] each

        @torch.no_grad()
        def soft_targets(cluster: int, rows: Tensor | None) -> SoftTargets:
            each = (
                self._probabilities(network, hidden if rows is None else hidden[rows], cluster)
                for network, hidden in zip(self.networks, states, strict=True)
            )
            mean = torch.stack([*each]).mean(dim=0) if len(states) > 1 else next(each)
            return SoftTargets(mean, self.settings.weight, self.settings.temperature)

        return soft_targets, tuple(output.memory for output in outputs)

    def _probabilities(self, network: TransformerXL, hidden: Tensor, cluster: int) -> Tensor:
        """Return the probabilities within a cluster at the temperature, [rows, ids of the cluster], in float32."""
        logits, temperature = network.head.cluster_logits(hidden, cluster), self.settings.temperature
        return (logits if temperature == 1 else logits.float() / temperature).softmax(dim=-1, dtype=torch.float32)
