"""What to say of a training that cannot go on: where it went wrong, and what to lower."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from traceback import walk_tb
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parnas.errors import OutOfMemory, says_out_of_memory
from parnas.model.blocks import Block, BlockOutput
from parnas.model.transformer_xl import TransformerXL
from parnas.training.ranks import LostProcess, Ranks, answered


class Wrong(NamedTuple):
    """The first step of some whose loss or gradient is not finite."""

    steps_ago: int  # counted from the last of them, which is 0
    what: str  # loss or gradient


def first_wrong(recent: Sequence[tuple[Tensor, Tensor]]) -> Wrong | None:
    """Of the losses and gradient norms of steps, the first that is not finite; none where all are."""
    if not recent:
        return None
    values = torch.stack([torch.stack([loss.float(), norm.float()]) for loss, norm in recent])  # [steps, 2]
    wrong = (~values.isfinite().all(dim=1)).nonzero()
    if len(wrong) == 0:
        return None
    index = int(wrong[0])
    return Wrong(len(recent) - 1 - index, "gradient" if values[index, 0].isfinite() else "loss")


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


def place_of_loss(model: TransformerXL, ranks: Ranks, read_again: Callable[[], Tensor]) -> str:
    """Where the numbers first go wrong, in any process, when the batch is read once more without memory."""
    places = [*(f"block {number}" for number in range(1, len(model.blocks) + 1)), "the softmax"]
    wrong: list[int] = []

    def watch(number: int, block: Block) -> Any:
        def look(_: nn.Module, __: object, output: BlockOutput) -> None:
            if not bool(output.hidden.isfinite().all()):
                wrong.append(number)

        return block.register_forward_hook(look)

    hooks = [watch(number, block) for number, block in enumerate(model.blocks)]  # type: ignore[arg-type]
    try:
        with torch.no_grad():
            if not bool(read_again().isfinite()):
                wrong.append(len(places) - 1)
    finally:
        for hook in hooks:
            hook.remove()
    first = -ranks.most(-min(wrong, default=len(places)))
    return places[first] if first < len(places) else "a place that reading the batch again does not show"


def describe_kept(kept: Path | None) -> str:
    """The sentence on the last good checkpoint."""
    return f"The last good checkpoint is {kept or 'none, as none was written yet'}."


@contextmanager
def explained(step: Callable[[], int], last_good: Callable[[], Path | None]) -> Iterator[None]:
    """Turn what ends a training, and is no fault of the code, into a `ParnasError` with the cure."""
    try:
        with answered():
            yield
    except LostProcess as error:
        raise LostProcess(f"At step {step()}: {error} {describe_kept(last_good())}") from error
    except (MemoryError, RuntimeError) as error:
        if not says_out_of_memory(error):
            raise
        raise OutOfMemory(
            f"Out of memory at step {step()}, in {_place_of_failure(error)}. {describe_kept(last_good())} Lower "
            "data.batch_size, or raise train.accumulate, which divides it; set runtime.checkpoint_activations: "
            "true; lower data.tgt_len or model.mem_len; in a search use estimator uniform or gdas."
        ) from error


def _place_of_failure(error: BaseException) -> str:
    """The block that was running, which is a local variable of the network's forward pass."""
    for frame, _ in walk_tb(error.__traceback__):
        if frame.f_code is TransformerXL.forward.__code__ and "index" in frame.f_locals:
            return f"block {frame.f_locals['index'] + 1}"
    return "the softmax, the backward pass or the update"
