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
from parnas.runs.files import expand_user
from parnas.runs.records import Kind
from parnas.runs.run import ENVIRONMENT, LOCK, Run, read_derivation

__all__ = [
    "Settings",
    "launched_by_torchrun",
    "make_run_folder",
    "read_config",
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
    inherit: Path | None = None,
) -> tuple[Config, Path]:
    """Return the configuration and the run folder of a training.

    Args:
        settings: The configuration; by default that of `run` if `resume` is true, that of the run `inherit` if one
            is given, else the preset demo.
        overrides: Settings that replace those of the configuration.
        run: The run folder; by default a new `runs/COMMAND-CONFIG`, with a number appended if it exists.
        resume: Whether a run is to be resumed, which requires `run`.
        command: The command that trains; the name of a new folder begins with it.
        arch: An architecture, or a file or run folder with one; replaces `model.arch`.
        inherit: The run folder of a search or retraining whose weights the training starts from; replaces
            `train.inherit`. Without an architecture, that of the run is trained.

    Raises:
        ParnasError: `run` is required but not given, or the configuration or the architecture is not valid.
    """
    if resume and run is None:
        raise ParnasError("resume (--resume) needs run (--run FOLDER), the folder of the run to resume.")
    if run is None and launched_by_torchrun():
        raise ParnasError(
            "A training with torchrun needs run (--run FOLDER), so that all processes write to the same folder."
        )
    source = run if resume else inherit
    if settings is None and source is not None:
        own = Run(source).config()
        # The default architecture is that of the run, not `model.arch`, which a search ignores.
        settings = own if resume else own.replace(model__arch=None)
    settings = "demo" if settings is None else settings
    if arch is not None:
        overrides = [*overrides, ("model.arch", resolve_arch(arch))]
    if inherit is not None:
        overrides = [*overrides, ("train.inherit", str(inherit))]
    config = read_config(settings, overrides)
    if command == "retrain" and config.train.inherit is not None and config.model.arch is None:
        searched = Run(expand_user(config.train.inherit))
        config = config.replace(model__arch=str(searched.architecture() or searched.derivation().arch))
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
    """Return the configuration and the folder of a tuning.

    Without `run`, the folder is `runs/tune-STUDY` or, without `study`, a new one. Without `settings`, the configuration
    is that in the folder or, if it has none, the preset demo.

    Raises:
        ParnasError: Options contradict each other, or the configuration or the architecture is not valid.
    """
    if phase not in get_args(Kind):
        raise ParnasError(f"phase (--phase) is {phase!r:.40}; give retrain or search.")
    if arch is not None and phase == "search":
        raise ParnasError(
            "arch (--arch) is given, but phase (--phase) is search, which finds an architecture; leave out one of them."
        )
    if (storage is None) != (study is None):
        raise ParnasError("storage and study (--storage, --study) go together; give both, or neither.")
    folder = study_folder("tune", study) if run is None and study is not None else run
    exists = folder is not None and (folder / "config.yaml").is_file()
    return resolve_config_and_run(settings, overrides, folder, exists, "tune", arch)


def read_config(settings: Settings, overrides: list[Override]) -> Config:
    """Return the configuration with `overrides` applied; raise `ParnasError` that lists all errors."""
    if isinstance(settings, (str, Path)):
        return load_config(settings, overrides)
    tree = settings.model_dump() if isinstance(settings, Config) else settings
    return check_config(tree, "The configuration", overrides)


def read_overrides(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield dotted key and value of each setting in `changes`, a dictionary of dotted keys or nested sections."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from read_overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", to_yaml_values(value)


def resolve_arch(text: str) -> str:
    """Return the architecture given by an expression, a preset, the path of an `arch.yaml` or a run folder."""
    path = Path(text)
    exists = os.path.exists(path)  # noqa: PTH110 (`Path.exists` raises for texts longer than any file name)
    try:
        return str(Architecture.parse(text))
    except ParnasError:
        if not exists and path.suffix not in (".yaml", ".yml"):
            raise
    if not exists:
        raise ParnasError(f"There is no file {text}; give an arch.yaml that parnas derive wrote, or an architecture.")
    if not path.is_dir():
        return read_derivation(path).arch
    run = Run(path)
    trained = run.architecture() if (path / ENVIRONMENT).is_file() else None
    return str(trained or run.derivation().arch)


def make_run_folder(stem: str) -> Path:
    """Make and return the folder `runs/STEM` or, if it exists, the first free one of `runs/STEM-2` and so on."""
    for number in itertools.count(1):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable")


def study_folder(command: str, study: str) -> Path:
    """Return the folder `runs/COMMAND-STUDY`, with "-" for characters that should not be in file names."""
    name = re.sub(r"[^\w.-]+", "-", study)
    return Path("runs") / f"{command}-{name}"


@contextmanager
def remove_if_empty(folder: Path | None) -> Iterator[None]:
    """Delete a run folder if the body raises an exception before it has written a file; do nothing for `None`."""
    try:
        yield
    except BaseException:
        if folder is not None and all(path.name == LOCK or path.is_dir() for path in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def launched_by_torchrun() -> bool:
    """Return whether torchrun started this process together with others."""
    return "RANK" in os.environ and int(os.environ.get("WORLD_SIZE", "1")) > 1
