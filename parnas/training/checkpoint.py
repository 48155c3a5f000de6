"""Checkpoints: a folder with the weights, the state of training and a manifest of their hashes."""

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_model, save_model

from parnas.errors import ParnasError
from parnas.files import folder_in_one_piece, read_json, write_json

WEIGHTS, STATE, MANIFEST = "model.safetensors", "state.pt", "manifest.json"
KEEP = 5


def save_checkpoint(folder: Path, step: int, model: torch.nn.Module, state: dict[str, Any]) -> Path:
    """Write `folder/step-NNNNNNNN` whole or not at all, and remove all but the last five."""
    path = folder / f"step-{step:08d}"
    with folder_in_one_piece(path) as beside:
        _write(beside, model, state)
        files = {name: _sha256(beside / name) for name in (WEIGHTS, STATE)}
        write_json(beside / MANIFEST, {"step": step, "sha256": files})
    for old in list_checkpoints(folder)[:-KEEP]:
        shutil.rmtree(old)
    return path


def _write(folder: Path, model: torch.nn.Module, state: dict[str, Any]) -> None:
    """Both libraries report a full disk by exceptions of their own."""
    try:
        save_model(model, str(folder / WEIGHTS))
        torch.save(state, folder / STATE)
    except (SafetensorError, RuntimeError) as error:
        raise ParnasError(
            f"The checkpoint could not be written to {folder.parent}: {error}. Earlier ones are untouched; "
            "make room on the disk, then go on with --resume."
        ) from error


def list_checkpoints(folder: Path) -> list[Path]:
    """Finished checkpoints, the oldest first."""
    named = (path for path in folder.glob("step-*") if re.fullmatch(r"step-[0-9]{8,18}", path.name))
    return sorted((path for path in named if (path / MANIFEST).is_file()), key=lambda path: int(path.name[5:]))


def newest_checkpoint(folder: Path, note: Callable[[str], None]) -> Path | None:
    """The newest checkpoint whose files have the hashes of its manifest; others are passed over with a note."""
    for path in reversed(list_checkpoints(folder)):
        if verify_checkpoint(path):
            return path
        note(f"checkpoint {path} is damaged; using the one before it")
    return None


def verify_checkpoint(path: Path) -> bool:
    """Whether every file of the manifest is there with its hash."""
    try:
        hashes = read_json(path / MANIFEST)["sha256"]
        return all(_sha256(path / name) == hashes[name] for name in (WEIGHTS, STATE))
    except (ParnasError, OSError, KeyError, TypeError):
        return False


def load_weights(path: Path, model: torch.nn.Module) -> None:
    """Put the weights of a checkpoint into `model`; other shapes or names raise `ParnasError`."""
    try:
        load_model(model, str(path / WEIGHTS))
    except (RuntimeError, OSError, ValueError, SafetensorError) as error:
        raise ParnasError(f"The weights in {path} are not those of this network: {error}") from error


def refuse_larger(build: Callable[[], torch.nn.Module], path: Path) -> None:
    """Raise where a network has more parameters than its file of weights has bytes, before memory is taken for it."""
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in build().parameters())
    if size > (path / WEIGHTS).stat().st_size:
        raise ParnasError(f"The weights in {path} are not those of this network, which has {size:,} parameters.")


def load_state(path: Path) -> dict[str, Any]:
    """The state of training, on the CPU; plain data only, nothing in the file is executed.

    Raises `ParnasError` for anything else.
    """
    try:
        state = torch.load(path / STATE, map_location="cpu", weights_only=True)
    except Exception as error:  # whatever foreign bytes make of an unpickler
        reason = str(error).partition("\n")[0][:200]
        raise ParnasError(
            f"{path / STATE} holds something else than the state of a training, and nothing in it was executed "
            f"({type(error).__name__}: {reason}). Restore it, or remove {path} to go on from the checkpoint before."
        ) from error
    if not isinstance(state, dict):
        raise ParnasError(f"{path / STATE} is not the state of a training; restore it, or remove {path}.")
    return state


@contextmanager
def restoring(path: Path) -> Iterator[None]:
    """Turn what a state of the wrong structure raises, while a training takes it up, into a `ParnasError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise ParnasError(
            f"{path / STATE} is not a state of this training ({error!r:.200}); restore it, or remove {path} to go on "
            "from the checkpoint before."
        ) from error


def refuse_misshapen(optimizer: torch.optim.Optimizer) -> None:
    """Raise `ValueError` where an optimizer's state has not the shape of what it is about, which no kernel checks."""
    for parameter, state in optimizer.state.items():
        for name in ("exp_avg", "exp_avg_sq", "step"):
            if state[name].shape != (() if name == "step" else parameter.shape):
                raise ValueError(f"the optimizer's {name} has not the shape of its parameter")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
