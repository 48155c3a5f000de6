"""Find the configuration, the architecture and the run folder that the arguments of a command or a call name."""

import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeAlias, get_args

from parnas.architecture import Architecture
from parnas.config.loader import Config, Override, check_config, load_config, to_yaml_values
from parnas.errors import ParnasError
from parnas.runs.records import Kind
from parnas.runs.run import ENVIRONMENT, LOCK, Run, read_derivation

__all__ = [
    "Settings",
    "is_distributed",
    "make_run_folder",
    "read_overrides",
    "remove_if_empty",
    "resolve_config_and_run",
    "resolve_config_and_study",
    "study_folder",
]

Settings: TypeAlias = str | Path | Mapping[str, Any] | Config
"""A YAML file, the name of a preset, nested sections, or a whole configuration."""


def resolve_config_and_run(
    settings: Settings | None,
    overrides: list[Override],
    run: Path | None,
    resume: bool,
    command: str,
    arch: str | None = None,
) -> tuple[Config, Path]:
    """Return the configuration and the run folder of a training.

    Args:
        settings: The configuration; `None` for the run's own with `resume`, else for the demo's.
        overrides: Settings by dotted key.
        run: The run folder; `None` for a new `runs/COMMAND-NAME`, numbered if that exists.
        resume: Require `run`.
        command: The command that trains, which names a new folder.
        arch: An architecture, or a file or run folder with one; replaces `model.arch`.

    Raises:
        ParnasError: `run` is missing, or the configuration or the architecture is wrong.
    """
    if resume and run is None:
        raise ParnasError("resume (--resume) needs run (--run FOLDER), the folder of the run to resume.")
    if run is None and is_distributed():
        raise ParnasError("torchrun needs run (--run FOLDER), so that all processes use the same run.")
    if settings is None:
        settings = Run(run).config() if resume and run is not None else "demo"
    if arch is not None:
        overrides = [*overrides, ("model.arch", resolve_arch(arch))]
    config = read_config(settings, overrides)
    name = f"-{Path(settings).stem}" if isinstance(settings, (str, Path)) else ""
    return config, run or make_run_folder(command + name)


def resolve_config_and_study(
    settings: Settings | None,
    overrides: list[Override],
    run: Path | None,
    phase: str,
    arch: str | None,
    storage: str | None,
    study: str | None,
) -> tuple[Config, Path]:
    """Return the configuration and the folder of a tuning: without `run` the folder of the named study, or a new one.

    Without settings, an existing folder's own configuration is used. Raises `ParnasError` for conflicting options.
    """
    if phase not in get_args(Kind):
        raise ParnasError(f"phase (--phase) is {phase!r:.40}; give retrain or search.")
    if arch is not None and phase == "search":
        raise ParnasError("arch (--arch) is for phase retrain (--phase); a search derives its own.")
    if (storage is None) != (study is None):
        raise ParnasError("storage and study (--storage, --study) go together; give both, or neither.")
    folder = study_folder("tune", study) if run is None and study is not None else run
    exists = folder is not None and (folder / "config.yaml").is_file()
    return resolve_config_and_run(settings, overrides, folder, exists, "tune", arch)


def read_config(settings: Settings, overrides: list[Override]) -> Config:
    """Return a configuration with overrides applied; raise `ParnasError` with all errors."""
    if isinstance(settings, (str, Path)):
        return load_config(settings, overrides)
    tree = settings.model_dump() if isinstance(settings, Config) else settings
    return check_config(tree, "The configuration", overrides)


def read_overrides(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of each setting; `changes` has dotted keys, or sections inside each other."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from read_overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", to_yaml_values(value)


def resolve_arch(text: str) -> str:
    """Return the architecture that a text names: an architecture, a preset, an `arch.yaml` or a run folder."""
    path = Path(text)
    exists = os.path.exists(path)  # noqa: PTH110 (`Path.exists` raises for texts longer than any file name)
    try:
        return str(Architecture.parse(text))
    except ParnasError:
        if not exists and path.suffix not in (".yaml", ".yml"):
            raise
    if not exists:
        raise ParnasError(f"There is no file {text}; parnas derive writes an arch.yaml.")
    if not path.is_dir():
        return read_derivation(path).arch
    run = Run(path)
    trained = run.architecture() if (path / ENVIRONMENT).is_file() else None
    return str(trained or run.derivation().arch)


def make_run_folder(stem: str) -> Path:
    """Make `runs/STEM`, or `runs/STEM-2` and so on, so that two commands never get the same folder."""
    for number in itertools.count(1):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


def study_folder(command: str, study: str) -> Path:
    """Return the default folder of a command's results for a named study."""
    name = re.sub(r"[^\w.-]+", "-", study)
    return Path("runs") / f"{command}-{name}"


@contextmanager
def remove_if_empty(folder: Path | None) -> Iterator[None]:
    """Delete the run folder if the body fails and has written no file; do nothing for `None`."""
    try:
        yield
    except BaseException:
        if folder is not None and all(path.name == LOCK or path.is_dir() for path in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def is_distributed() -> bool:
    """Return whether torchrun has started several processes."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
