"""Exceptions for mistakes that a user can mend."""


class ParnasError(Exception):
    """A mistake in input, configuration or surroundings; its text says what is wrong and how to cure it.

    The command line prints the text without a traceback and exits with code 2.
    """


class Diverged(ParnasError):
    """A training whose losses, gradients or weights are no longer finite."""
