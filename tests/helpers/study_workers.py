"""Processes that work on one study, forked from a server that imports the package once."""

import os
from collections.abc import Callable
from pathlib import Path

from helpers.processes import CONTEXT


class StudyWorker:
    """A process that calls a function of a helper module, with its output in a file."""

    def __init__(self, output: Path, target: Callable[..., object], *arguments: object) -> None:
        self.output = output
        self.process = CONTEXT.Process(target=call, args=(output, target, *arguments))
        self.process.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.join()

    def result(self) -> str:
        """Return the output of the process, which must end well."""
        self.process.join(150)
        text = self.output.read_text()
        assert self.process.exitcode == 0, text
        assert "Traceback" not in text
        return text


def call(output: Path, target: Callable[..., object], *arguments: object) -> None:
    """Call a function with its standard output and error in a file."""
    file = os.open(output, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    target(*arguments)
