"""What TensorBoard shows of a training: its metrics and pi as scalars, pi of a search as pictures besides."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from parnas.training.reporter import Loop, Silent

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

MOST_PICTURES = 50  # of pi in a run


class TensorBoard(Silent):
    """A reporter that writes into the folder `tensorboard` of each run; does nothing where that cannot be imported."""

    def __init__(self) -> None:
        self.writer: SummaryWriter | None = None
        self.next_picture, self.steps = 0, 0

    def start(self, loop: Loop) -> None:
        """Open the files of a run; what stands there of steps that come again no longer shows."""
        if loop.folder is None:
            return
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:  # not installed, or not whole, which must not end a training
            return
        self.steps, self.next_picture = loop.steps, loop.first_step
        after = loop.first_step + 1 if loop.first_step else None
        self.writer = SummaryWriter(str(loop.folder / "tensorboard"), purge_step=after)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """Every number of the line as `SPLIT/NAME`."""
        if self.writer is None:
            return
        for name, value in record.items():
            if isinstance(value, (int, float)) and name != "step":
                self.writer.add_scalar(f"{record['split']}/{name}", value, record["step"])

    def pi(self, space: Sequence[str], record: Mapping[str, Any]) -> None:
        """pi of each candidate of each block as `pi/block-NN/LAYER`, and now and then the heatmap of all of them."""
        if self.writer is None:
            return
        step, pi = record["step"], record["pi"]
        for number, row in enumerate(pi, 1):
            for name, value in zip(space, row, strict=True):
                self.writer.add_scalar(f"pi/block-{number:02d}/{name.replace(':', '_')}", value, step)
        if step >= self.next_picture:
            from parnas.figures.heatmap import Heatmap
            from parnas.figures.history import PiHistory

            picture = Heatmap(PiHistory.from_records([record], space)).picture(0)
            self.writer.add_image("pi", np.asarray(picture), step, dataformats="HWC")
            self.next_picture = step + self.steps // MOST_PICTURES

    def stop(self) -> None:
        """Close the files."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None
