"""Everything that ends a training early: signals, lost processes, exhausted memory, and numbers that are not finite."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from parnas.errors import OutOfMemory, says_out_of_memory
from parnas.model.blocks import Block, BlockOutput
from parnas.model.transformer_xl import TransformerXL
from parnas.training.distributed import DistributedContext, LostProcess, detecting_lost_processes

__all__ = ["NonFinite", "Stopped"]

# Signals.

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
"""Ctrl-C; the signal that SLURM, docker and systemd send before they kill; that of SLURM's --signal=USR1@SECONDS."""


class Stopped(Exception):
    """Raised when a signal, of this `number`, has ended a training and its checkpoint is written."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}, which is saved")
        self.number = number


class StopSignals:
    """Stores, inside the context, the number of a signal to end in `received` instead of ending the process.

    A second Ctrl-C interrupts at once. Has no effect outside the main thread, which alone may handle signals. Signals
    that were ignored before stay ignored. After a `LostProcess`, SIGTERM is ignored: torchrun sends it to the remaining
    processes, which are about to end and must still report why.
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


# Lost processes and exhausted memory.


def describe_last_checkpoint(path: Path | None) -> str:
    """Return a sentence that names `path` as the last intact checkpoint, or says that there is none yet."""
    return "No checkpoint was written yet." if path is None else f"The last intact checkpoint is {path}."


@contextmanager
def explain_failures(step: Callable[[], int], last_checkpoint: Callable[[], Path | None]) -> Iterator[None]:
    """Turn a lost process or exhausted memory inside the context into a `ParnasError` that says what to do.

    `step` and `last_checkpoint` return the current step and the newest intact checkpoint, which the message names.
    """
    try:
        with detecting_lost_processes():
            yield
    except LostProcess as error:
        raise LostProcess(f"At step {step()}: {error} {describe_last_checkpoint(last_checkpoint())}") from error
    except (MemoryError, RuntimeError) as error:
        if not says_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"Out of memory at step {step()}, in {_running_part(error)}. {describe_last_checkpoint(last_checkpoint())} "
            "Lower data.batch_size, or raise train.accumulate, which reads each batch in parts; set "
            "runtime.checkpoint_activations: true; lower data.tgt_len or model.mem_len; in a search use estimator "
            "uniform or gdas."
        ) from error


def _running_part(error: BaseException) -> str:
    """Return the part of the network in which `error` was raised, such as "block 3", read from its traceback."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is TransformerXL.forward.__code__ and "index" in frame.f_locals:
            return f"block {frame.f_locals['index'] + 1}"
    return "the softmax, the backward pass or the update"


# Numbers that are not finite.


class NonFinite(Exception):
    """Raised before an update because the step's `quantity`, "loss" or "gradient", is not finite."""

    def __init__(self, quantity: str) -> None:
        super().__init__(quantity)
        self.quantity = quantity


def first_non_finite(steps: Tensor) -> tuple[int, str] | None:
    """Find the first step whose loss or gradient norm is not finite; return `None` if all are finite.

    `steps` [steps, 2] holds loss and gradient norm of consecutive steps. Returns how many steps before the last row the
    failed step is, and "loss" or "gradient".
    """
    failed = (~steps.isfinite().all(dim=1)).nonzero()
    if len(failed) == 0:
        return None
    index = int(failed[0])
    return len(steps) - 1 - index, "gradient" if steps[index, 0].isfinite() else "loss"


def locate_gradient(model: TransformerXL) -> str:
    """Return the part of the network nearest to the output with a gradient that is not finite, such as "block 3".

    Backpropagation starts at the output, so that the failure began in this part.
    """
    tied = {id(parameter) for parameter in model.embedding.parameters()}  # receive gradients from both ends
    parts = {"the softmax": [parameter for parameter in model.head.parameters() if id(parameter) not in tied]}
    parts |= {f"block {n}": list(block.parameters()) for n, block in reversed(list(enumerate(model.blocks, 1)))}
    parts["the embedding"] = list(model.embedding.parameters())
    for name, parameters in parts.items():
        if any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in parameters):
            return name
    return "an unknown part"


def locate_loss(model: TransformerXL, distributed: DistributedContext, read_again: Callable[[], Tensor]) -> str:
    """Return the first part of the network, such as "block 3", whose output is not finite in any of the processes.

    `read_again` repeats the forward pass of the failed batch and returns the loss.
    """
    places = [*(f"block {number}" for number in range(1, len(model.blocks) + 1)), "the softmax"]
    failed: list[int] = []

    def watch(number: int, block: Block) -> Any:
        def check(_: nn.Module, __: object, output: BlockOutput) -> None:
            if not bool(output.hidden.isfinite().all()):
                failed.append(number)

        return block.register_forward_hook(check)

    hooks = [watch(number, block) for number, block in enumerate(model.blocks)]  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            if not bool(read_again().isfinite()):
                failed.append(len(places) - 1)
    finally:
        for hook in hooks:
            hook.remove()
    first = -distributed.max(-min(failed, default=len(places)))
    return places[first] if first < len(places) else "a place that a second pass over the batch does not show"
