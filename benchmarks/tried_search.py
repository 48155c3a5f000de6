"""Changes of the search that plans of benchmarks/equal_time.py measure and that are no settings of parnas.

Each is a function without arguments that returns a context; a search inside it has the change. They are for the
estimator `uniform` in one process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from parnas.architecture import ATTENTION
from parnas.data.batching import Batch
from parnas.model.estimators import UniformPath, make_path
from parnas.model.gates import Gates
from parnas.model.memory import Memory
from parnas.training.weight_optimizer import Forward, GradientAccumulator, join_micro_batches, take_rows

LARGEST, SMALLEST = ATTENTION, "k"  # the layers that take most and least time, identity excluded
SAMPLE = UniformPath.sample_several  # as it is, whatever else is tried
BACKWARD = GradientAccumulator.backward


@contextmanager
def sandwich() -> Iterator[None]:
    """Replace two random paths of a step by the largest and the smallest network (the sandwich rule).

    Yu & Huang 2019, arXiv 1903.05134; BigNAS, Yu et al. 2020, arXiv 2003.11142.
    """

    def sample_sandwich(
        self: UniformPath, count: int, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None
    ) -> list[Gates]:
        paths = SAMPLE(self, count, alpha, tau, generator)
        if len(paths) > 2:
            # At random places: the rows of a place are always from the same part of the text.
            places = torch.randperm(len(paths), generator=generator)[:2].tolist()
            for place, name in zip(places, (LARGEST, SMALLEST), strict=True):
                chosen = torch.full((len(alpha),), self.space.index(name))
                paths[place] = make_path(F.one_hot(chosen, len(self.space)).to(alpha))
        return paths

    with patch.object(UniformPath, "sample_several", sample_sandwich):
        yield


@contextmanager
def distilled_in_place() -> Iterator[None]:
    """As `sandwich`; all but the largest network learn the distribution that the largest predicts for their rows.

    In-place distillation: BigNAS, arXiv 2003.11142, section 3.
    """

    def backward(self: GradientAccumulator, batch: Batch, memory: Memory | None, samples: Sequence[Gates]) -> Forward:
        if len(samples) < 3:
            return BACKWARD(self, batch, memory, samples)
        model, device = self.network.model, self.device
        inputs, targets = (torch.from_numpy(each).to(device.device) for each in batch[:2])
        memory = None if batch.starts_epoch else memory
        attention = model.space.index(LARGEST)
        largest = next(gates for gates in samples if all(gate.chosen == attention for gate in gates))
        parts, results = self.split(len(inputs), samples), []
        for rows, gates in parts:
            own = take_rows(memory, rows)
            with device.autocast():
                output = model(inputs[rows], own, gates)
                if gates is largest:
                    loss = model.score(output, targets[rows]).mean()
                else:
                    with torch.no_grad():
                        teacher = model.head.log_probs(model(inputs[rows], own, largest).hidden.flatten(0, 1)).exp()
                    loss = -(teacher * model.head.log_probs(output.hidden.flatten(0, 1))).sum(dim=-1).mean()
            (loss / len(parts)).backward()
            results.append(Forward(loss.detach(), output.memory, None))
        return join_micro_batches(results)

    with sandwich(), patch.object(GradientAccumulator, "backward", backward):
        yield


TRIED: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "distilled_in_place": distilled_in_place,
    "sandwich": sandwich,
}
"""By the name that the plans of benchmarks/equal_time.py give."""
