"""Changes of the search that plans of benchmarks/equal_time.py measure and that are no settings of parnas.

Each is a function without arguments that returns a context; a search inside it has the change. They are for the
estimator `uniform` in one process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional as F

from parnas.architecture import ATTENTION, IDENTITY, Architecture
from parnas.data.batching import Batch, TrainingBatches
from parnas.data.streams import Tokens
from parnas.model.estimators import UniformPath, make_path, sample_spread
from parnas.model.gates import Gates
from parnas.model.memory import Memory
from parnas.nas import search as search_module
from parnas.nas.search import SearchTask
from parnas.training.weight_optimizer import Forward, GradientAccumulator, join_micro_batches, take_rows

LARGEST, SMALLEST = ATTENTION, "k"  # the layers that take most and least time, identity excluded
SMALL = 2  # rows
PREFERENCE = 2.0  # logit: a probability of 0.71 among four candidates
SAMPLE = UniformPath.sample_several  # as it is, whatever else is tried
BACKWARD = GradientAccumulator.backward


@contextmanager
def paths_by_pi() -> Iterator[None]:
    """Sample a layer uniformly with probability tau, else by pi, so that probable layers are trained more and more."""

    def sample_by_pi(
        self: UniformPath, count: int, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None
    ) -> list[Gates]:
        if self.selected_path is not None:
            return SAMPLE(self, count, alpha, tau, generator)
        mixed = tau * self.probabilities.to(alpha) + (1 - tau) * alpha.detach().softmax(dim=-1)
        chosen = sample_spread(mixed, count, generator)
        return [make_path(path) for path in F.one_hot(chosen, len(self.space)).to(alpha.dtype)]

    with patch.object(UniformPath, "sample_several", sample_by_pi):
        yield


@contextmanager
def from_alternating() -> Iterator[None]:
    """Begin with a pi that prefers a network made by hand: `alternating-8`, then identity."""
    prepare = SearchTask.__init__

    def prepare_with_preference(self: SearchTask, *arguments: Any) -> None:
        prepare(self, *arguments)
        alphas = self.supernet.alphas()
        layers = [*Architecture.parse("alternating-8"), *[IDENTITY] * len(alphas)]
        for alpha, name in zip(alphas, layers, strict=False):
            alpha.data[self.search.candidates.index(name)] += PREFERENCE

    with patch.object(SearchTask, "__init__", prepare_with_preference):
        yield


class SmallBatches(TrainingBatches):
    """Batches of `SMALL` rows, whatever is asked for: more steps of a search in the same time."""

    def __init__(self, tokens: Tokens, batch_size: int, *others: Any) -> None:  # noqa: ARG002
        super().__init__(tokens, SMALL, *others)


@contextmanager
def sandwich() -> Iterator[None]:
    """Replace the first and the last path of a step by the largest and the smallest network (the sandwich rule).

    Yu & Huang 2019, arXiv 1903.05134; BigNAS, Yu et al. 2020, arXiv 2003.11142.
    """

    def sample_sandwich(
        self: UniformPath, count: int, alpha: Tensor, tau: Tensor | float, generator: torch.Generator | None = None
    ) -> list[Gates]:
        paths = SAMPLE(self, count, alpha, tau, generator)
        if len(paths) > 2:
            for place, name in ((0, LARGEST), (-1, SMALLEST)):
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
        parts, results = self.split(len(inputs), samples), []
        for rows, gates in parts:
            own = take_rows(memory, rows)
            with device.autocast():
                output = model(inputs[rows], own, gates)
                if gates is samples[0]:
                    loss = model.score(output.hidden, targets[rows]).mean()
                else:
                    with torch.no_grad():
                        teacher = model.head.log_probs(model(inputs[rows], own, samples[0]).hidden.flatten(0, 1)).exp()
                    loss = -(teacher * model.head.log_probs(output.hidden.flatten(0, 1))).sum(dim=-1).mean()
            (loss / len(parts)).backward()
            results.append(Forward(loss.detach(), output.memory, None))
        return join_micro_batches(results)

    with sandwich(), patch.object(GradientAccumulator, "backward", backward):
        yield


TRIED: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "distilled_in_place": distilled_in_place,
    "from_alternating": from_alternating,
    "paths_by_pi": paths_by_pi,
    "sandwich": sandwich,
    "small_batches": partial(patch.object, search_module, "TrainingBatches", SmallBatches),
}
"""By the name that the plans of benchmarks/equal_time.py give."""
