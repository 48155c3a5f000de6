"""The mean of a network's weights over the last steps of a training."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class WeightAverage:
    """Mean of weights after each step from `first` on: stochastic weight averaging (Izmailov et al. 2018).

    arXiv 1803.05407, section 3, with the weights of every step. Training goes on from the weights themselves; the mean
    stands in their place while `in_place` lasts. Before step `first` there is none.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], first: int) -> None:
        self.parameters, self.first = list(parameters), first
        self.mean: list[Tensor] = []
        self.count = 0  # of the steps in the mean

    @torch.no_grad()
    def add(self, step: int) -> None:
        """Take in the weights after a step, counted from 1."""
        if step < self.first:
            return
        self.count += 1
        if self.count == 1:
            self.mean = copies(self.parameters)
        else:
            torch._foreach_lerp_(self.mean, list(self.parameters), 1 / self.count)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """The network with the mean as its weights; as it is where there is no mean yet."""
        if not self.count:
            yield
            return
        own = copies(self.parameters)
        copy_into(self.parameters, self.mean)
        try:
            yield
        finally:
            copy_into(self.parameters, own)

    def state(self) -> dict[str, Any]:
        """What a checkpoint whose weights are the mean needs besides them: those that training goes on from.

        As copies, since the mean may be in their place when they are written.
        """
        return {"first": self.first, "count": self.count, "weights": copies(self.parameters) if self.count else []}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up such a state, in a network with the weights of its checkpoint.

        Where the run has been lengthened since, the steps to average begin later: after all of the mean's, and it
        begins anew; among them, and it keeps those before as well, which it cannot lose. Raises `ValueError` for what
        is no such state.
        """
        first, count, weights = state["first"], state["count"], state["weights"]
        if type(count) is not int or count < 0:
            raise ValueError(f"its average is of {count!r:.40} steps")
        if not count:
            return
        if [weight.shape for weight in weights] != [parameter.shape for parameter in self.parameters]:
            raise ValueError("the weights beside its average have not the shapes of the network's")
        if self.first < first + count:
            self.first, self.mean, self.count = first, copies(self.parameters), count
        copy_into(self.parameters, weights)


def copies(weights: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of their own with the same values."""
    return [weight.detach().clone() for weight in weights]


@torch.no_grad()
def copy_into(parameters: Sequence[nn.Parameter], values: Sequence[Tensor]) -> None:
    """Give parameters new values."""
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
