"""The findings of `parnas doctor`: versions, devices, folders and environment variables of this machine."""

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

from parnas.config.schema import RuntimeConfig
from parnas.data.cache import cache_dir
from parnas.data.corpora import NAMES
from parnas.data.token_frequencies import is_local
from parnas.errors import ParnasError
from parnas.runs.run import package_version
from parnas.training.device import choose_device

_EXTRAS = {
    "tensorboard": "for live scalars and pictures of pi",
    "export": "for parnas export --to onnx or x-transformers",
    "postgresql": "for a study in PostgreSQL",
}
"""Optional extras of the package and their purpose."""
_VARIABLES = ("PARNAS_DATA", "PARNAS_CACHE", "PARNAS_LAYERS", "OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
_LEAST_FREE_GB = 2.0  # for the cache of a corpus and some checkpoints


@dataclass(frozen=True)
class Finding:
    """A line of `parnas doctor`: a named value, with advice if the user should change something."""

    topic: str
    name: str
    value: Any
    advice: str | None = None


def examine() -> list[Finding]:
    """Return the findings on versions, devices, folders and environment variables, without a download or a training."""
    return [*_versions(), *_devices(), *_folders(), *_variables()]


def _versions() -> Iterator[Finding]:
    """Yield the versions of Python, parnas, its required packages and the packages of its optional extras."""
    yield Finding("versions", "python", platform.python_version())
    yield Finding("versions", "parnas", package_version("parnas"))
    for line in metadata.requires("parnas") or []:
        match = re.match(r"([\w.-]+)(?:.*extra == ['\"]([\w-]+))?", line)
        if match is None or match[2] not in (None, *_EXTRAS):
            continue
        name, extra = match.groups()
        advice = "missing; reinstall parnas"
        if extra is not None:
            advice = f"{_EXTRAS[extra]}: pip install -e '.[{extra}]' in its repository"
        version = package_version(name)
        yield Finding("versions", name, version, advice if version is None else None)


def _devices() -> Iterator[Finding]:
    """Yield the number of CPU cores, the GPUs, and the device that a training would use."""
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


def _folders() -> Iterator[Finding]:
    """Yield the folders of texts and runs, their free space, and the corpora that need no download."""
    cache = cache_dir()
    writable = os.access(_nearest_existing(cache), os.W_OK)
    yield Finding("folders", "cache", str(cache), None if writable else "not writable; set PARNAS_CACHE to a folder")
    cached_bytes = sum(path.stat().st_size for path in cache.rglob("*") if path.is_file())
    yield Finding("folders", "in the cache", f"{cached_bytes / 1e9:.2f} GB")
    for name, folder in {"free for the cache": cache, "free for runs here": Path()}.items():
        free = free_gb(folder)
        advice = "free some space: a corpus with its tokens and some checkpoints take more"
        yield Finding("folders", name, f"{free:.1f} GB", advice if free < _LEAST_FREE_GB else None)
    yield Finding("folders", "corpora here", ", ".join(name for name in NAMES if is_local(name)))


def free_gb(folder: Path) -> float:
    """Return the free space, in 10^9 bytes, on the disk of a folder; the folder need not exist yet."""
    return shutil.disk_usage(_nearest_existing(folder)).free / 1e9


def _nearest_existing(folder: Path) -> Path:
    """Return the folder if it exists, else its nearest parent that exists."""
    return next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())


def _variables() -> Iterator[Finding]:
    """Yield the values of the environment variables that influence parnas."""
    for name in _VARIABLES:
        value, advice = os.environ.get(name), None
        if name == "PARNAS_DATA" and value is not None and not Path(value).expanduser().is_dir():
            advice = "there is no such folder; create it or unset the variable"
        yield Finding("environment", name, value, advice)
