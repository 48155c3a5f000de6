"""What this machine has, and what a training without further settings would use."""

import os
import platform
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from parnas.data.cache import cache_dir
from parnas.data.corpora import NAMES
from parnas.data.foreseen import at_hand
from parnas.errors import ParnasError
from parnas.run import package_version
from parnas.sections import RuntimeConfig
from parnas.training.device import choose_device

EXTRAS = {
    "tensorboard": "for live scalars and pictures of pi",
    "export": "for parnas export --to onnx or x-transformers",
    "postgresql": "for a study in PostgreSQL",
}
"""The extras for users, and what they are for."""
VARIABLES = ("PARNAS_DATA", "PARNAS_CACHE", "PARNAS_LAYERS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
LEAST_FREE_GB = 2.0  # for the cache of a corpus and some checkpoints


@dataclass(frozen=True)
class Finding:
    """A line of the doctor's: under which heading, what, and whether it wants attention."""

    topic: str
    name: str
    value: Any
    advice: str | None = None


def examine() -> list[Finding]:
    """All findings; nothing is downloaded or trained."""
    return [*versions(), *devices(), *folders(), *settings()]


def versions() -> Iterator[Finding]:
    """Python, the packages that are needed, and those that may be there."""
    yield Finding("versions", "python", platform.python_version())
    yield Finding("versions", "parnas", package_version("parnas"))
    for name, extra in requirements():
        if extra is None or extra in EXTRAS:
            advice = "missing: install parnas anew"
            if extra is not None:
                advice = f"{EXTRAS[extra]}: pip install -e '.[{extra}]' in its repository"
            version = package_version(name)
            yield Finding("versions", name, version, advice if version is None else None)


def requirements() -> Iterator[tuple[str, str | None]]:
    """The packages that parnas asks for, each with the extra that it is of; none for what is always needed."""
    for line in metadata.requires("parnas") or []:
        name, extra = re.match(r"[\w.-]+", line), re.search(r"extra == ['\"]([\w-]+)['\"]", line)
        if name is not None:
            yield name[0], extra and extra[1]


def devices() -> Iterator[Finding]:
    """Processor and GPUs, and what would be used of them."""
    yield Finding("devices", "cores", os.cpu_count())
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        yield Finding("devices", f"cuda:{index}", f"{properties.name}, {properties.total_memory / 1e9:.0f} GB")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        advice = None if built is None else f"this torch is built for CUDA {built}; see that nvidia-smi shows a GPU"
        yield Finding("devices", "cuda", "none", advice)
    try:
        device = choose_device(RuntimeConfig())
    except ParnasError as error:
        yield Finding("would be used", "device", None, str(error))
        return
    for name, value in device.describe().items():
        yield Finding("would be used", name.replace("_", " "), value)


def folders() -> Iterator[Finding]:
    """Where texts and runs would be kept, the room there, and which corpora need not be fetched."""
    cache = cache_dir()
    writable = os.access(nearest(cache), os.W_OK)
    advice = None if writable else "nothing can be written there; set PARNAS_CACHE to another folder"
    yield Finding("folders", "cache", str(cache), advice)
    kept = sum(size(path) for path in cache.rglob("*")) if cache.is_dir() else 0
    yield Finding("folders", "in the cache", f"{kept / 1e9:.2f} GB")
    for name, folder in {"free for the cache": cache, "free for runs here": Path()}.items():
        free = free_gb(folder)
        advice = None if free >= LEAST_FREE_GB else "make room: a corpus with its tokens and some checkpoints take more"
        yield Finding("folders", name, f"{free:.1f} GB", advice)
    yield Finding("folders", "corpora here", ", ".join(name for name in NAMES if at_hand(name)))


def free_gb(folder: Path) -> float:
    """Room on the disk of a folder, which need not exist yet, in 10^9 bytes."""
    return shutil.disk_usage(nearest(folder)).free / 1e9


def nearest(folder: Path) -> Path:
    """A folder, or the nearest one above it that exists."""
    return next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())


def size(path: Path) -> int:
    """Bytes of a file; nothing for a folder, or what another process has just removed."""
    try:
        return path.stat().st_size if path.is_file() else 0
    except FileNotFoundError:
        return 0


def settings() -> Iterator[Finding]:
    """Variables of the environment that change what happens."""
    for name in VARIABLES:
        value, advice = os.environ.get(name), None
        if name == "PARNAS_DATA" and value is not None and not Path(value).expanduser().is_dir():
            advice = "there is no such folder"
        yield Finding("environment", name, value, advice)
