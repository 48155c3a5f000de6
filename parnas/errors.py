"""Exceptions for mistakes that a user can mend."""

from collections.abc import Sequence


class ParnasError(Exception):
    """A mistake in input, configuration or surroundings; its text says what is wrong and how to cure it.

    The command line prints the text without a traceback and exits with code 2. `mistakes` are the lines of a text that
    tells of several.
    """

    def __init__(self, *message: str, mistakes: Sequence[str] = ()) -> None:
        super().__init__(*message)
        self.mistakes = tuple(mistakes)


class OverBudget(ParnasError):
    """No network costs as little as was asked for; `cheapest` is the cost of the cheapest, in the budget's unit."""

    def __init__(self, message: str, cheapest: float) -> None:
        super().__init__(message)
        self.cheapest = cheapest


class Diverged(ParnasError):
    """A training whose losses, gradients or weights are no longer finite."""


class OutOfMemory(ParnasError):
    """A training that needs more memory than there is."""


class NotCounted(ParnasError, NotImplementedError):
    """A layer of the user's own that does not count its multiply-adds, which it need not to be trained."""


REFUSALS = ("out of memory", "can't allocate memory", "not enough memory", "Cannot allocate memory", "ALLOC_FAILED")
"""What torch and the libraries below it say where memory is refused, some of them in a plain RuntimeError."""


def says_out_of_memory(error: BaseException) -> bool:
    """Whether an exception tells that there is not enough memory, on whichever device."""
    return isinstance(error, MemoryError) or any(text in str(error) for text in REFUSALS)
