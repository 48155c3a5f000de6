"""Exceptions for errors that a user can fix."""

from collections.abc import Sequence

__all__ = ["Diverged", "OutOfMemory", "OverBudget", "ParnasError", "says_out_of_memory"]


class ParnasError(Exception):
    """An error in input, configuration or environment; its message says what is wrong and how to fix it.

    The command line prints the message without a traceback and exits with code 2. If the message lists several errors,
    `errors` holds them one by one.
    """

    def __init__(self, *message: str, errors: Sequence[str] = ()) -> None:
        super().__init__(*message)
        self.errors = tuple(errors)


class OverBudget(ParnasError):
    """No network meets the cost target; `cheapest` is the cost of the cheapest network, in the unit of the target."""

    def __init__(self, message: str, cheapest: float) -> None:
        super().__init__(message)
        self.cheapest = cheapest

    def __reduce__(self) -> tuple[type["OverBudget"], tuple[str, float]]:  # by default without `cheapest`
        return type(self), (str(self), self.cheapest)


class Diverged(ParnasError):
    """A training whose losses, gradients or weights are no longer finite."""


class OutOfMemory(ParnasError):
    """A training that needs more memory than is available."""


_OUT_OF_MEMORY = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "Cannot allocate memory",
    "ALLOC_FAILED",
)
"""Parts of the messages with which torch and its libraries report a failed allocation, some as a RuntimeError."""


def says_out_of_memory(error: BaseException) -> bool:
    """Return whether an exception reports that memory is exhausted, on any device."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in _OUT_OF_MEMORY)
