"""Checkpoints: folders with the weights, the training state, and a manifest with the hashes of these two files."""

import errno
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_file
from torch import Tensor
from torch.utils._pytree import tree_map_only

from parnas.errors import ParnasError, says_out_of_memory
from parnas.runs.files import atomic_folder, read_json, read_json_object, write_json

__all__ = ["MANIFEST", "WEIGHTS", "Snapshot", "check_size", "load_weights", "save_checkpoint"]

WEIGHTS, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"
KEEP = 5  # newest checkpoints that stay in a folder; the best one stays too


class Best(NamedTuple):
    """The lowest validation loss so far, and the number of steps after which it was measured."""

    step: int
    loss: float  # nats per token


class Snapshot(NamedTuple):
    """The content of a checkpoint, copied to the CPU, so that training can continue while the copies are written."""

    step: int
    weights: dict[str, Tensor]
    state: Any  # nested dictionaries, lists and tuples of tensors and plain values
    best: Best | None = None

    @classmethod
    def copy(cls, step: int, model: torch.nn.Module, state: Mapping[str, Any], best: Best | None = None) -> "Snapshot":
        """Return a snapshot with copies of `state` and of the weights of `model`; tied weights are copied once."""
        weights, seen = {}, set[int]()
        for name, tensor in model.state_dict().items():
            if tensor.numel() == 0 or tensor.data_ptr() not in seen:
                weights[name] = tensor
                seen.add(tensor.data_ptr())
        return cls(step, _copy_to_cpu(weights), _copy_to_cpu(state), best)


class CheckpointWriter:
    """Writes checkpoints in a background thread, one at a time.

    If writing a checkpoint fails in the thread, the next call of `write` or `wait` raises the error.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[Path] | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Wait until the previous checkpoint is written, then start to write `snapshot` in the background."""
        self.wait()
        self._pending = self._thread.submit(save_checkpoint, self.folder, snapshot)

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise the error if writing it failed."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait until the last checkpoint is written, without raising an error, and end the thread."""
        self._thread.shutdown()


def save_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot atomically to `folder/step-NNNNNNNN` and return that path.

    Then remove all checkpoints from `folder` except the one with the lowest validation loss and the `KEEP` newest.
    """
    path = checkpoint_path(folder, snapshot.step)
    for left_by_a_killed_writer in folder.glob(".step-*.tmp"):
        shutil.rmtree(left_by_a_killed_writer, ignore_errors=True)
    with atomic_folder(path) as beside:
        _write(beside, snapshot)
        files = {name: _sha256(beside / name) for name in (WEIGHTS, STATE)}
        content = {"step": snapshot.step, "sha256": files}
        best = None if snapshot.best is None else snapshot.best._asdict()
        write_json(beside / MANIFEST, {**content, "best": best})
    best_path = None if snapshot.best is None else checkpoint_path(folder, snapshot.best.step)
    for old in list_checkpoints(folder)[:-KEEP]:
        if old != best_path:
            shutil.rmtree(old)
    return path


def _write(folder: Path, snapshot: Snapshot) -> None:
    """Write weights and training state into `folder`; raise `ParnasError` if that fails, as on a full disk."""
    try:
        save_file(snapshot.weights, str(folder / WEIGHTS))
        torch.save(snapshot.state, folder / STATE)
    except (SafetensorError, RuntimeError) as error:
        raise ParnasError(
            f"The checkpoint could not be written to {folder.parent}: {error}. Earlier checkpoints are unchanged; "
            "free disk space, then resume the run (--resume)."
        ) from error


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps, where `folder` is the folder of all checkpoints."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the number of training steps before a checkpoint, read from the name of its folder, `step-NNNNNNNN`."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the completely written checkpoints in `folder`, oldest first."""
    named = (path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,18}", path.name))
    return sorted((path for path in named if (path / MANIFEST).is_file()), key=step_of)


def newest_checkpoint(folder: Path, note: Callable[[str], None]) -> Path | None:
    """Return the newest intact checkpoint in `folder`, see `verify_checkpoint`; `None` if there is none.

    `note` is called with a line of text for each damaged checkpoint that is newer than the returned one.
    """
    for path in reversed(list_checkpoints(folder)):
        if verify_checkpoint(path):
            return path
        note(f"checkpoint {path} is damaged; the checkpoint before it is used instead")
    return None


def best_checkpoint(folder: Path, note: Callable[[str], None]) -> Path | None:
    """Return the checkpoint in `folder` with the lowest validation loss, as recorded in the newest intact checkpoint.

    If no validation was done yet, return the newest intact checkpoint; if no checkpoint is intact, return `None`.
    `note` is called with a line of text for each damaged checkpoint that is newer than the newest intact one.

    Raises:
        ParnasError: the best checkpoint is missing or damaged.
    """
    newest = newest_checkpoint(folder, note)
    best = None if newest is None else read_json_object(newest / MANIFEST).get("best")
    if newest is None or best is None:
        return newest
    step = best.get("step") if isinstance(best, dict) else None
    path = checkpoint_path(folder, step if isinstance(step, int) else 0)
    if not verify_checkpoint(path):
        raise ParnasError(
            f"The best checkpoint, {path}, is missing or damaged; restore it, or leave out --best to use the newest "
            "checkpoint."
        )
    return path


def verify_checkpoint(path: Path) -> bool:
    """Return whether the checkpoint `path` is intact: its files exist and have the hashes listed in its manifest."""
    try:
        hashes = read_json(path / MANIFEST)["sha256"]
        return all(_sha256(path / name) == hashes[name] for name in (WEIGHTS, STATE))
    except (ParnasError, OSError, KeyError, TypeError):
        return False


def hash_of_weights(path: Path) -> str:
    """Return the SHA-256 hash of a checkpoint's weights from its manifest.

    Raises:
        ParnasError: the manifest is missing or damaged.
    """
    hashes = read_json_object(path / MANIFEST).get("sha256")
    found = hashes.get(WEIGHTS) if isinstance(hashes, dict) else None
    if not isinstance(found, str):
        raise ParnasError(f"{path / MANIFEST} has no hash of {WEIGHTS}; restore the file, or remove the folder {path}.")
    return found


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Load the weights of the checkpoint `path` into `model`.

    Raises:
        ParnasError: names or shapes of the stored weights are not those of the network.
    """
    try:
        load_model(model, str(path / WEIGHTS))
    except (RuntimeError, ValueError, SafetensorError) as error:
        if says_out_of_memory(error):
            raise
        raise ParnasError(
            f"The weights in {path} do not fit the network that the configuration describes; restore the original "
            f"weights and configuration: {error}"
        ) from error


def check_size(build: Callable[[], torch.nn.Module], path: Path) -> None:
    """Raise `ParnasError` if the network that `build` makes has more parameters than the weight file has bytes.

    `path` is the checkpoint. The network is made without memory for its weights, because a wrong size in a damaged
    configuration could exhaust the memory.
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build().parameters())
    if size > (path / WEIGHTS).stat().st_size:
        raise ParnasError(
            f"The weights in {path} are fewer than the {size:,} parameters of the network that the configuration "
            "describes; restore the original weights and configuration."
        )


def load_state(path: Path) -> dict[str, Any]:
    """Return the training state stored in the checkpoint `path`, on the CPU; code in the file is not executed.

    Raises:
        ParnasError: the file does not hold a dictionary of tensors and plain values.
    """
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # arbitrary bytes can make the unpickler raise anything
        if says_out_of_memory(error) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        reason = str(error).partition("\n")[0][:200]
        raise ParnasError(
            f"{path / STATE} does not hold the state of a training ({type(error).__name__}: {reason}); code in it was "
            f"not executed. {_restore_or_remove(path)}"
        ) from error
    if not isinstance(state, dict):
        raise ParnasError(f"{path / STATE} does not hold the state of a training. {_restore_or_remove(path)}")
    return state


def _restore_or_remove(path: Path) -> str:
    return f"Restore the file, or remove the folder {path} to resume from the checkpoint before it."


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Raise `ParnasError` instead of the original error if restoring the state of the checkpoint `path` fails."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if says_out_of_memory(error):
            raise
        raise ParnasError(
            f"{path / STATE} does not fit this training ({error!r:.200}). {_restore_or_remove(path)}"
        ) from error


def _copy_to_cpu(tree: Any) -> Any:
    """Return nested dictionaries, lists and tuples with every tensor replaced by a copy on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True).contiguous(), tree)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
