"""What this machine has, and what a training without further settings would use."""

import os
import platform
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
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

NEEDED = ("parnas", "torch", "numpy", "sentencepiece", "safetensors", "pydantic", "optuna", "pandas", "matplotlib")
OPTIONAL = {
    "tensorboard": "live scalars and pictures of pi: pip install 'parnas[tensorboard]'",
    "psycopg": "a study in PostgreSQL: pip install 'parnas[postgresql]'",
}
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
    for name in NEEDED:
        yield Finding("versions", name, package_version(name))
    for name, use in OPTIONAL.items():
        version = package_version(name)
        yield Finding("versions", name, version, use if version is None else None)


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
    kept = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file()) if cache.is_dir() else 0
    yield Finding("folders", "cache", str(cache))
    yield Finding("folders", "in the cache", f"{kept / 1e9:.2f} GB")
    for name, folder in {"free for the cache": cache, "free for runs here": Path()}.items():
        free = free_gb(folder)
        advice = None if free >= LEAST_FREE_GB else "make room: a corpus with its tokens and some checkpoints take more"
        yield Finding("folders", name, f"{free:.1f} GB", advice)
    yield Finding("folders", "corpora here", ", ".join(name for name in NAMES if at_hand(name)))


def free_gb(folder: Path) -> float:
    """Room on the disk of a folder, which need not exist yet, in 10^9 bytes."""
    there = next(place for place in (folder.absolute(), *folder.absolute().parents) if place.exists())
    return shutil.disk_usage(there).free / 1e9


def settings() -> Iterator[Finding]:
    """Variables of the environment that change what happens."""
    for name in VARIABLES:
        value, advice = os.environ.get(name), None
        if name == "PARNAS_DATA" and value is not None and not Path(value).expanduser().is_dir():
            advice = "there is no such folder"
        yield Finding("environment", name, value, advice)
