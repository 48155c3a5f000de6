"""Distillation: train a network to predict what trained networks, its teachers, predict (Hinton et al. 2015).

The loss of a token is

    (1 - w) · cross-entropy + w · T² · KL(teacher ‖ network),      w = train.distill.weight,

with both distributions at the temperature T = train.distill.temperature (arXiv 1503.02531, section 2). Several teachers
count as one that predicts the mean of their probabilities. With an adaptive softmax, the divergence is that of the
head's distribution, over frequent ids and clusters, plus that of the distribution within the cluster of the target if
it is a rare id. Its mean over the text is the divergence of the whole distribution, if targets are as frequent as the
teacher says, without the cost of all clusters for all tokens.

Shapes: N tokens, D model width (each network has its own).
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from parnas.config.schema import DistillConfig
from parnas.model.heads import SoftmaxHead
from parnas.model.memory import Memory
from parnas.model.transfer import to_device
from parnas.model.transformer_xl import TransformerXL


class Teachers(NamedTuple):
    """Trained networks and the settings of the distillation from them."""

    networks: Sequence[TransformerXL]  # in evaluation mode, with the same vocabulary and clusters
    settings: DistillConfig

    def predict(self, ids: Tensor, memories: Sequence[Memory | None]) -> tuple[list[Tensor], list[Memory]]:
        """Return the hidden states [B, T, D] of each teacher for ids [B, T], and its memory for the next segment."""
        with torch.no_grad():
            outputs = [
                network(ids, memory, inference=True) for network, memory in zip(self.networks, memories, strict=True)
            ]
        return [output.hidden for output in outputs], [output.memory for output in outputs]

    def divergence(self, head: SoftmaxHead, hidden: Tensor, own: Sequence[Tensor], targets: Tensor) -> Tensor:
        """Return the mean of T² · KL over the tokens, a scalar.

        Args:
            head: the softmax of the trained network.
            hidden: its hidden states [N, D].
            own: the hidden states of each teacher, [N, D].
            targets: ids [N], on the CPU or on the device.
        """
        temperature, total = self.settings.temperature, hidden.new_zeros((), dtype=torch.float32)
        for cluster, rows, _ in head.by_cluster(targets):
            chosen = None if rows is None else to_device(rows, hidden.device)
            ours = self._log_probs(head, hidden, cluster, chosen)
            with torch.no_grad():
                each = [
                    self._log_probs(network.head, states, cluster, chosen)
                    for network, states in zip(self.networks, own, strict=True)
                ]
                theirs = torch.stack(each).logsumexp(dim=0) - math.log(len(each))
            total = total + (theirs.exp() * (theirs - ours)).sum()
        return temperature**2 * total / len(targets)

    def _log_probs(self, head: SoftmaxHead, hidden: Tensor, cluster: int, rows: Tensor | None) -> Tensor:
        """Return the log-probabilities within a cluster at the temperature, [rows, ids of the cluster], in float32."""
        logits = head.cluster_logits(hidden if rows is None else hidden[rows], cluster)
        return (logits.float() / self.settings.temperature).log_softmax(dim=-1)
