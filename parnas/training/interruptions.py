"""Signals that end a training: it finishes its step, saves, and says how to resume."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from parnas.training.distributed import LostProcess

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; what SLURM, docker and systemd send before they kill; and what SLURM's --signal=USR1@SECONDS sends ahead."""


class Stopped(Exception):
    """A signal ended a training, whose checkpoint is written."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}, which is saved")
        self.number = number


class StopSignals:
    """Records signals that would end the process in `received`, inside the context; a second Ctrl-C interrupts.

    Does nothing outside the main thread, which alone may handle signals. Ignored signals stay ignored. After another
    process was lost, SIGTERM is ignored: torchrun sends it to the remaining processes, which are about to end and must
    still report why.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is LostProcess and signal.SIGTERM in self._before:
            self._before[signal.SIGTERM] = signal.SIG_IGN
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if number == self.received == signal.SIGINT:
            raise KeyboardInterrupt
        self.received = number
        if number == signal.SIGINT:
            # Not by print, which must not be entered a second time from within itself.
            os.write(2, b"\nfinishing this step, then saving; Ctrl-C again to leave at once\n")
