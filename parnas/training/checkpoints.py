"""Checkpoints: a folder with the weights, the training state and a manifest of their hashes."""

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
from parnas.runs.run import package_version

__all__ = ["MANIFEST", "WEIGHTS", "Snapshot", "check_size", "load_weights", "save_checkpoint"]

WEIGHTS, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"
KEEP = 5  # checkpoints in a folder, besides the best


class Best(NamedTuple):
    """The lowest validation loss so far, and the number of steps after which it was measured."""

    step: int
    loss: float  # nats per token


class Snapshot(NamedTuple):
    """The content of a checkpoint, as copies on the CPU, so that training can continue while they are written."""

    step: int
    weights: dict[str, Tensor]
    state: Any  # nested dictionaries, lists and tuples of tensors and plain values
    best: Best | None = None

    @classmethod
    def copy(cls, step: int, model: torch.nn.Module, state: Mapping[str, Any], best: Best | None = None) -> "Snapshot":
        """Return a snapshot with copies of the weights of `model`, tied weights once, and of `state`."""
        weights, seen = {}, set[int]()
        for name, tensor in model.state_dict().items():
            if tensor.numel() == 0 or tensor.data_ptr() not in seen:
                weights[name] = tensor
                seen.add(tensor.data_ptr())
        return cls(step, _copy_to_cpu(weights), _copy_to_cpu(state), best)


class CheckpointWriter:
    """Writes checkpoints in a background thread, one at a time; `write` and `wait` raise an earlier error."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1)
        self._pending: Future[Path] | None = None

    def write(self, snapshot: Snapshot) -> None:
        """Wait until the previous checkpoint is written, then start to write `snapshot` in the background."""
        self.wait()
        self._pending = self._thread.submit(save_checkpoint, self.folder, snapshot)

    def wait(self) -> None:
        """Wait until the last checkpoint is written; raise the error of writing it, if there was any."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Wait until the last checkpoint is written, without raising an error, and end the thread."""
        self._thread.shutdown()


def save_checkpoint(folder: Path, snapshot: Snapshot) -> Path:
    """Write a snapshot atomically to `folder/step-NNNNNNNN` and return that path.

    Afterwards remove all checkpoints but the best and the last five, the new one included.
    """
    path = checkpoint_path(folder, snapshot.step)
    for left_by_a_killed_writer in folder.glob(".step-*.tmp"):
        shutil.rmtree(left_by_a_killed_writer, ignore_errors=True)
    with atomic_folder(path) as beside:
        _write(beside, snapshot)
        files = {name: _sha256(beside / name) for name in (WEIGHTS, STATE)}
        content = {"step": snapshot.step, "sha256": files, "versions": _library_versions()}
        best = None if snapshot.best is None else snapshot.best._asdict()
        write_json(beside / MANIFEST, {**content, "best": best})
    best_path = None if snapshot.best is None else checkpoint_path(folder, snapshot.best.step)
    for old in list_checkpoints(folder)[:-KEEP]:
        if old != best_path:
            shutil.rmtree(old)
    return path


def _write(folder: Path, snapshot: Snapshot) -> None:
    """Write weights and state; turn the errors by which safetensors and torch report a full disk into `ParnasError`."""
    try:
        save_file(snapshot.weights, str(folder / WEIGHTS))
        torch.save(snapshot.state, folder / STATE)
    except (SafetensorError, RuntimeError) as error:
        raise ParnasError(
            f"The checkpoint could not be written to {folder.parent}: {error}. Earlier checkpoints are "
            "untouched; free disk space, then resume the run (--resume)."
        ) from error


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint after `step` steps, where `folder` is the folder of all checkpoints."""
    return folder / f"step-{step:08d}"


def step_of(path: Path) -> int:
    """Return the number of steps after which a checkpoint was written, which its path names."""
    return int(path.name.removeprefix("step-"))


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the paths of the completely written checkpoints in `folder`, oldest first."""
    named = (path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,18}", path.name))
    return sorted((path for path in named if (path / MANIFEST).is_file()), key=step_of)


def newest_checkpoint(folder: Path, note: Callable[[str], None]) -> Path | None:
    """Return the newest checkpoint whose files match its manifest, or `None`; `note` is called for each damaged one."""
    for path in reversed(list_checkpoints(folder)):
        if verify_checkpoint(path):
            return path
        note(f"checkpoint {path} is damaged; using the one before it")
    return None


def best_checkpoint(folder: Path, note: Callable[[str], None]) -> Path | None:
    """Return the checkpoint with the lowest validation loss, whose step the newest intact checkpoint records.

    Before the first validation this is the newest intact checkpoint itself; `None` if no checkpoint is intact.

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
            f"The best checkpoint, {path}, is missing or damaged; restore it, or use the last one (without --best)."
        )
    return path


def verify_checkpoint(path: Path) -> bool:
    """Return whether weights and state exist and have the hashes that the manifest lists."""
    try:
        hashes = read_json(path / MANIFEST)["sha256"]
        return all(_sha256(path / name) == hashes[name] for name in (WEIGHTS, STATE))
    except (ParnasError, OSError, KeyError, TypeError):
        return False


def describe_other_versions(path: Path) -> str | None:
    """Return a warning that a checkpoint was written with another version of torch or numpy; `None` if not."""
    before, now = read_json_object(path / MANIFEST).get("versions"), _library_versions()
    before = before if isinstance(before, dict) else {}
    changed = [f"{name} {before[name]}, now {now[name]}" for name in now if before.get(name, now[name]) != now[name]]
    return (
        f"{path.name} was written with {'; '.join(changed)}: the last digits of results may differ" if changed else None
    )


def _library_versions() -> dict[str, str | None]:
    """Return the versions of torch and numpy, on which the numbers of a training depend."""
    return {name: package_version(name) for name in ("torch", "numpy")}


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Load the weights of a checkpoint into `model`; raise `ParnasError` where names or shapes do not match."""
    try:
        load_model(model, str(path / WEIGHTS))
    except (RuntimeError, ValueError, SafetensorError) as error:
        if says_out_of_memory(error):
            raise
        raise ParnasError(
            f"The weights in {path} do not fit the network that its configuration describes; restore both: {error}"
        ) from error


def check_size(build: Callable[[], torch.nn.Module], path: Path) -> None:
    """Raise `ParnasError` where a network has more parameters than the weight file in `path` has bytes.

    `build` makes the network, here without allocating memory, which a wrong size in a configuration could exhaust.
    """
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build().parameters())
    if size > (path / WEIGHTS).stat().st_size:
        raise ParnasError(
            f"The weights in {path} are too few for the network that its configuration describes, which has {size:,} "
            "parameters; restore both."
        )


def load_state(path: Path) -> dict[str, Any]:
    """Return the training state stored in a checkpoint, on the CPU; nothing in the file is executed.

    Raises:
        ParnasError: the file holds anything but a dictionary of tensors and plain values.
    """
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # arbitrary bytes can make the unpickler raise anything
        if says_out_of_memory(error) or (isinstance(error, OSError) and error.errno != errno.EINVAL):
            raise
        reason = str(error).partition("\n")[0][:200]
        raise ParnasError(
            f"{path / STATE} does not hold the state of a training; nothing in it was executed "
            f"({type(error).__name__}: {reason}). Restore it, or remove {path} to resume from the previous checkpoint."
        ) from error
    if not isinstance(state, dict):
        raise ParnasError(
            f"{path / STATE} does not hold the state of a training; restore it, or remove {path} to resume from the "
            "previous checkpoint."
        )
    return state


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Turn exceptions inside the context, raised where a state from `path` does not fit, into a `ParnasError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        if says_out_of_memory(error):
            raise
        raise ParnasError(
            f"{path / STATE} does not fit this training ({error!r:.200}); restore it, or remove {path} to resume "
            "from the previous checkpoint."
        ) from error


def _copy_to_cpu(tree: Any) -> Any:
    """Return nested dictionaries, lists and tuples with every tensor replaced by a copy on the CPU."""
    return tree_map_only(Tensor, lambda tensor: tensor.detach().to("cpu", copy=True).contiguous(), tree)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
