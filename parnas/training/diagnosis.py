"""What to say of a training that cannot go on: where it went wrong, and what to lower."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import DistError

from parnas.errors import OutOfMemory, ParnasError
from parnas.model.blocks import Block, BlockOutput
from parnas.model.transformer_xl import TransformerXL

REFUSED = ("can't allocate memory", "not enough memory")  # what torch says where the CPU's memory is used up
LOST = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting", "NCCL")


def place_of_gradient(model: TransformerXL) -> str:
    """Where gradients first went wrong, coming from above: the highest part of the network with one not finite."""
    tied = {id(parameter) for parameter in model.embedding.parameters()}  # have gradients from both ends
    parts = {"the softmax": [parameter for parameter in model.head.parameters() if id(parameter) not in tied]}
    parts |= {f"block {n}": list(block.parameters()) for n, block in reversed(list(enumerate(model.blocks, 1)))}
    parts["the embedding"] = list(model.embedding.parameters())
    for name, parameters in parts.items():
        if any(p.grad is not None and not bool(p.grad.isfinite().all()) for p in parameters):
            return name
    return "a part that cannot be told"


def place_of_loss(model: TransformerXL, read_again: Callable[[], Tensor]) -> str:
    """Where the numbers first go wrong when the batch is read once more, without memory."""
    wrong: list[str] = []

    def watch(name: str, block: Block) -> Any:
        def look(_: nn.Module, __: object, output: BlockOutput) -> None:
            if not bool(output.hidden.isfinite().all()):
                wrong.append(name)

        return block.register_forward_hook(look)

    hooks = [watch(f"block {number}", block) for number, block in enumerate(model.blocks, 1)]  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            loss = read_again()
    finally:
        for hook in hooks:
            hook.remove()
    if wrong:
        return wrong[0]
    return "the softmax" if not bool(loss.isfinite()) else "a place that reading the batch again does not show"


def describe_kept(kept: Path | None) -> str:
    """The sentence on the last good checkpoint."""
    return f"The last good checkpoint is {kept or 'none, as none was written yet'}."


@contextmanager
def explained(step: int, last_good: Callable[[], Path | None]) -> Iterator[None]:
    """Turn what ends a step, and is no fault of the code, into a `ParnasError` with the cure."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if is_out_of_memory(error):
            raise OutOfMemory(
                f"Out of memory at step {step}, in {_place_of_failure(error)}. {describe_kept(last_good())} Lower "
                "data.batch_size, or raise train.accumulate, which divides it; set runtime.checkpoint_activations: "
                "true; lower data.tgt_len or model.mem_len; in a search use estimator uniform or gdas."
            ) from error
        if isinstance(error, DistError) or any(sign in str(error) for sign in LOST):
            raise ParnasError(
                f"Another process of this job was lost at step {step}. {describe_kept(last_good())} The same command "
                "goes on from it; torchrun --max-restarts=3 gives it by itself."
            ) from error
        raise


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory was refused, on whichever device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(sign in str(error) for sign in REFUSED)


def _place_of_failure(error: BaseException) -> str:
    """The block that was running, which is a local variable of the network's forward pass."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is TransformerXL.forward.__code__ and "index" in frame.f_locals:
            return f"block {frame.f_locals['index'] + 1}"
    return "the softmax, the backward pass or the update"
