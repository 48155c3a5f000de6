"""Signals that ask a training to end: it finishes its step, saves, and says how to go on."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from parnas.training.ranks import LostProcess

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; what SLURM, docker and systemd send before they kill; and what SLURM's --signal=USR1@SECONDS sends ahead."""


class Stopped(Exception):
    """A signal has ended a training, whose checkpoint is written."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}, which is saved")
        self.number = number


class StopSignals:
    """While it is entered, a signal that would end the process is noted in `received`; a second Ctrl-C interrupts.

    Outside the main thread, which alone may handle signals, it does nothing. Signals that are ignored stay so. Where
    another process was lost, SIGTERM is ignored afterwards: torchrun sends it to those that are left, which are ending
    and have yet to tell why.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in SIGNALS:
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
