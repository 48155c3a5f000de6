"""Custom layers on the command line: PARNAS_LAYERS lists files and modules that register them.

A run folder stores the letters of layers but not their code, so that reading a run folder executes no code from it: the
user chooses what is imported.
"""

import importlib
import importlib.util
import sys
from pathlib import Path

from parnas.errors import ParnasError
from parnas.runs.files import expand_user

__all__ = ["import_own_layers"]

_VARIABLE = "PARNAS_LAYERS"


def import_own_layers(listed: str) -> None:
    """Import the Python files and modules in `listed`, separated by commas; each registers its layers.

    A file or module that was imported before is not imported again.

    Raises:
        ParnasError: a file or module is missing, or raises an error.
    """
    for name in filter(None, map(str.strip, listed.split(","))):
        is_file = name.endswith(".py") or "/" in name
        if is_file and not expand_user(name).is_file():
            raise ParnasError(
                f"{_VARIABLE} names {name}, which is not a file; correct the path, or remove it from {_VARIABLE}."
            )
        try:
            if is_file:
                _import_file(expand_user(name).resolve())
            else:
                importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name != name:
                raise _failed(name, error) from error
            raise ParnasError(
                f"{_VARIABLE} names the module {name}, which is not installed; give the path of a file, such as "
                f"./{name}.py, or add its folder to PYTHONPATH."
            ) from error
        except Exception as error:
            raise _failed(name, error) from error


def _import_file(path: Path) -> None:
    name = str(path)  # as a module's name: files of one name in two folders stay apart
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ParnasError("this is not the name of a Python file; give the path of a file whose name ends in .py.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _failed(name: str, error: Exception) -> ParnasError:
    kind = "" if isinstance(error, ParnasError) else f"{type(error).__name__}: "
    return ParnasError(f"{name}, which {_VARIABLE} names, fails: {kind}{error}")
