"""What both the command line and Python are given: a configuration, an architecture, a run folder."""

import itertools
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias, get_args

from parnas.architecture import Architecture
from parnas.config import Config, Override, check_config, load_config
from parnas.errors import ParnasError
from parnas.run import ENVIRONMENT, LOCK, Kind, Run, read_arch_file

DEMO = "demo"

Settings: TypeAlias = str | Path | Mapping[str, Any] | Config
"""A YAML file, the name of a shipped configuration, nested sections, or a whole configuration."""


def settle(
    settings: Settings | None,
    overrides: list[Override],
    run: Path | None,
    resume: bool,
    command: str,
    arch: str | None = None,
) -> tuple[Config, Path]:
    """The configuration and the run folder that a training means.

    Without settings it is the demo's configuration, or the run's own where `resume` is set; without `run`, the folder
    is `runs/COMMAND-NAME`, or the first free one with a number behind. `arch` replaces `model.arch`.
    """
    if resume and run is None:
        raise ParnasError("resume (--resume) needs run (--run FOLDER), the folder of the run to go on with.")
    if run is None and several():
        raise ParnasError("torchrun needs run (--run FOLDER), so that all processes mean the same run.")
    if resume and run is not None and settings is None:
        settings = Run(run).config()
    settings = DEMO if settings is None else settings
    more: list[Override] = [] if arch is None else [("model.arch", resolve_arch(arch))]
    config = read_config(settings, [*overrides, *more])
    name = f"-{Path(settings).stem}" if isinstance(settings, (str, Path)) else ""
    return config, run or fresh_folder(command + name)


def read_config(settings: Settings, overrides: list[Override]) -> Config:
    """The configuration that settings and overrides make; raises `ParnasError` with all mistakes."""
    if isinstance(settings, (str, Path)):
        return load_config(settings, overrides)
    tree = settings.model_dump() if isinstance(settings, Config) else plain(settings)
    return check_config(tree, "The configuration", overrides)


def read_overrides(changes: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Settings by dotted keys, or nested by section."""
    for key, value in changes.items():
        if isinstance(value, Mapping):
            yield from read_overrides(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", plain(value)


def plain(value: Any) -> Any:
    """A value of Python as YAML would give it: tuples for lists, strings for paths."""
    if isinstance(value, Mapping):
        return {key: plain(inner) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return tuple(plain(inner) for inner in value)
    return str(value) if isinstance(value, Path) else value


def resolve_arch(text: str) -> str:
    """The string that a string or preset stands for, or what an arch.yaml (or a run folder) says."""
    path = Path(text)
    try:
        return str(Architecture.parse(text))
    except ParnasError:
        if not _exists(path) and path.suffix not in (".yaml", ".yml"):
            raise
    if not _exists(path):
        raise ParnasError(f"There is no file {text}; derive.py writes an arch.yaml.")
    if path.is_dir():
        return arch_of_folder(Run(path))
    return str(read_arch_file(path)["arch"])


def _exists(path: Path) -> bool:
    """Whether there is a file or folder; a mistyped string may be longer than any file's name."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def arch_of_folder(run: Run) -> str:
    """What a run stands for, or what the `arch.yaml` of another folder says."""
    found = run.architecture() if (run.folder / ENVIRONMENT).is_file() else None
    return str(found or run.arch_file()["arch"])


def fresh_folder(stem: str) -> Path:
    """Make `runs/STEM`, or with the first free number behind it, so that two commands never get the same."""
    for number in itertools.count(1):
        folder = Path("runs") / (stem if number == 1 else f"{stem}-{number}")
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            continue
        return folder
    raise AssertionError("the numbers do not end")


def folder_of_study(command: str, study: str) -> Path:
    """Where a command writes what it says of a study, unless told otherwise."""
    plain = re.sub(r"[^\w.-]+", "-", study)
    return Path("runs") / f"{command}-{plain}"


def refuse_half_a_study(storage: str | None, study: str | None) -> None:
    """Raise where a study is named without its storage, or the other way round."""
    if (storage is None) != (study is None):
        raise ParnasError("storage and study (--storage, --study) go together; give both, or neither.")


def settle_study(
    settings: Settings | None,
    overrides: list[Override],
    run: Path | None,
    phase: str,
    arch: str | None,
    storage: str | None,
    study: str | None,
) -> tuple[Config, Path]:
    """The configuration and the folder that a tuning means, by default that of the study or a fresh one.

    Without settings, a folder that was begun goes on with its own. Raises `ParnasError` for what does not go together.
    """
    if phase not in get_args(Kind):
        raise ParnasError(f"phase (--phase) is {phase!r:.40}; give retrain or search.")
    if arch is not None and phase == "search":
        raise ParnasError("arch (--arch) is for phase retrain (--phase); a search finds its own.")
    refuse_half_a_study(storage, study)
    named = folder_of_study("tune", study) if run is None and study is not None else run
    begun = named is not None and (named / "config.yaml").is_file()
    return settle(settings, overrides, named, begun, "tune", arch)


@contextmanager
def not_left_empty(folder: Path | None) -> Iterator[None]:
    """Remove a folder that a failing command has made by `fresh_folder` and not written into; none is left alone."""
    try:
        yield
    except BaseException:
        if folder is not None and all(path.name == LOCK or path.is_dir() for path in folder.rglob("*")):
            shutil.rmtree(folder, ignore_errors=True)
        raise


def several() -> bool:
    """Whether torchrun has started more processes than this one."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1
