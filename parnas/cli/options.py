"""Arguments and options that several commands share, and the registration of commands."""

import functools
import inspect
import signal
import sys
import traceback
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option, Typer

from parnas.cli.common import Output
from parnas.errors import ParnasError

MAIN_STEPS, STUDIES, TOOLS = "Main steps", "Studies", "Tools"
"""Groups of commands in `parnas --help`."""

_CONFIG_HELP = "YAML file or name of a shipped configuration (default: demo), and overrides."
_RUN_HELP = "Folder to write or to resume; default: runs/COMMAND-CONFIG, with a number if that is taken."
_RESUME_HELP = "Resume the run in --run; an error if there is none. Without CONFIG, its own configuration is used."
_ARCH_HELP = (
    "Architecture such as (sf)*8 or 's:heads=2 f', an arch.yaml, a run folder, or a preset of docs/layers.md such as "
    "interleaved-N or lfm2-N, with N blocks; default: model.arch."
)
_VERBOSE_HELP = "Print a line for each logged step, and a traceback with each error."
Settings = Annotated[list[str] | None, Argument(metavar="[CONFIG] [SECTION.KEY=VALUE ...]", help=_CONFIG_HELP)]
RunFolder = Annotated[Path | None, Option("--run", help=_RUN_HELP)]
Resume = Annotated[bool, Option("--resume", help=_RESUME_HELP)]
Arch = Annotated[str | None, Option(help=_ARCH_HELP)]
Best = Annotated[bool, Option("--best", help="Use the weights of the lowest validation loss, not the final ones.")]
_Quiet = Annotated[bool, Option("--quiet", "-q", help="Print results and warnings only, no progress.")]
_Verbose = Annotated[bool, Option("--verbose", "-v", help=_VERBOSE_HELP)]
_AsJson = Annotated[bool, Option("--json", help="Print the result as one JSON object.")]


def register(group: Typer, panel: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Return a decorator that adds a command, with the options `--quiet`, `--verbose` and `--json`, to a group.

    Args:
        group: The application, or a part of it.
        panel: Heading of the command in `parnas --help`.
    """

    def add(command: Callable[..., None]) -> Callable[..., None]:
        name = command.__name__.rstrip("_").replace("_", "-")  # `import_` is the command import
        return group.command(name, rich_help_panel=panel)(_with_output(command))

    return add


def _with_output(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command with the options `--quiet`, `--verbose` and `--json` instead of the parameter `output`."""
    signature = inspect.signature(command)
    flags = {"quiet": _Quiet, "verbose": _Verbose, "as_json": _AsJson}

    @functools.wraps(command)
    def run(quiet: bool, verbose: bool, as_json: bool, **arguments: Any) -> None:
        try:
            command(output=Output(quiet, verbose, as_json), **arguments)
        except (ParnasError, OSError, MemoryError):
            if verbose:
                traceback.print_exc()
            raise
        except KeyboardInterrupt:  # of a command that has nothing to resume; see `interruptible`
            print("interrupted", file=sys.stderr)
            raise SystemExit(128 + signal.SIGINT) from None

    own = [parameter for name, parameter in signature.parameters.items() if name != "output"]
    own += [Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind) for name, kind in flags.items()]
    run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in own} | {"return": None}
    return run
