"""Events that end a training early: signals, lost processes, exhausted memory, and numbers that are not finite."""

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
"""Signals by Ctrl-C; by SLURM, docker and systemd before they kill a process; by SLURM's --signal=USR1@SECONDS."""


class Stopped(Exception):
    """Raised when a signal has ended a training and the last checkpoint is written; `number` is the signal's number."""

    def __init__(self, number: int, step: int) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name} after step {step}, which is saved")
        self.number = number


class StopSignals:
    """Context in which a signal that usually ends the process sets `received` to the signal's number instead.

    A second Ctrl-C interrupts at once. The context has no effect outside the main thread, since no other thread can
    handle signals. Signals that the process ignored before stay ignored. If the context ends by `LostProcess`, SIGTERM
    is ignored from then on: torchrun sends it to the remaining processes, which must still report the lost process.
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
            # The signal may interrupt a print, which must not be called a second time from within itself.
            os.write(2, b"\nfinishing this step, then saving; press Ctrl-C again to end at once without saving\n")


# Lost processes and exhausted memory.


def describe_last_checkpoint(path: Path | None) -> str:
    """Return a sentence that names `path` as the last intact checkpoint, or says that there is none yet."""
    return "No checkpoint was written yet." if path is None else f"The last intact checkpoint is {path}."


@contextmanager
def explain_failures(step: Callable[[], int], last_checkpoint: Callable[[], Path | None]) -> Iterator[None]:
    """Raise `ParnasError` with advice if another process is lost, or memory is exhausted, inside the context.

    `step` and `last_checkpoint` are called to name the last finished step and the newest intact checkpoint in the
    message.
    """
    try:
        with detecting_lost_processes():
            yield
    except LostProcess as error:
        raise LostProcess(f"After step {step()}: {error} {describe_last_checkpoint(last_checkpoint())}") from error
    except (MemoryError, RuntimeError) as error:
        if not says_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"Out of memory after step {step()}, in {_running_part(error)}. "
            f"{describe_last_checkpoint(last_checkpoint())} Raise train.accumulate, which reads each batch in parts, "
            "or lower data.batch_size; set runtime.checkpoint_activations: true; lower data.tgt_len or model.mem_len; "
            "in a search, use estimator uniform or gdas."
        ) from error


def _running_part(error: BaseException) -> str:
    """Return the part of the network in which `error` was raised, such as "block 3", according to its traceback."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is TransformerXL.forward.__code__ and "index" in frame.f_locals:
            return f"block {frame.f_locals['index'] + 1}"
    return "the softmax, the backward pass, the update or a validation"


# Numbers that are not finite.


class NonFinite(Exception):
    """Raised if `quantity`, such as the "loss" or the "gradient" of a step, is not finite, before it is used."""

    def __init__(self, quantity: str) -> None:
        super().__init__(quantity)
        self.quantity = quantity


def first_non_finite(steps: Tensor) -> tuple[int, str] | None:
    """Find the first step whose loss or gradient norm is not finite; return `None` if all values are finite.

    `steps` [steps, 2] holds loss and gradient norm of consecutive steps. The result is the number of steps after the
    step found, and the quantity that is not finite, "loss" or "gradient".
    """
    failed = (~steps.isfinite().all(dim=1)).nonzero()
    if len(failed) == 0:
        return None
    index = int(failed[0])
    return len(steps) - 1 - index, "gradient" if steps[index, 0].isfinite() else "loss"


def locate_gradient(model: TransformerXL) -> str:
    """Return the part of the network, such as "block 3", where gradients stop being finite.

    Backpropagation starts at the output, so this is the part nearest to the output with a gradient that is not finite.
    """
    tied = {id(parameter) for parameter in model.embedding.parameters()}  # receive gradients from both ends
    parts = {"the softmax": [parameter for parameter in model.head.parameters() if id(parameter) not in tied]}
    if model.pointer is not None:
        parts["the pointer"] = list(model.pointer.parameters())
    parts |= {f"block {n}": list(block.parameters()) for n, block in reversed(list(enumerate(model.blocks, 1)))}
    parts["the embedding"] = list(model.embedding.parameters())
    for name, parameters in parts.items():
        if any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in parameters):
            return name
    return "an unknown part"


def locate_loss(model: TransformerXL, distributed: DistributedContext, read_again: Callable[[], Tensor]) -> str:
    """Return the first part of the network, such as "block 3", whose output is not finite in at least one process.

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
