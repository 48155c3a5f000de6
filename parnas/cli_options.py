"""Arguments and options that several commands have, and those that all of them have."""

import functools
import inspect
import traceback
from collections.abc import Callable
from inspect import Parameter
from pathlib import Path
from typing import Annotated, Any

import typer

from parnas.errors import ParnasError
from parnas.output import Output

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [SECTION.KEY=VALUE ...]", help="A YAML file (default: the demo's) and overrides."),
]
RunFolder = Annotated[
    Path | None,
    typer.Option(
        "--run",
        help="Run folder to write, or to go on with; default: runs/COMMAND-CONFIG, or the first free number behind.",
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the run in --run, by its own configuration where none is given; never anew.",
    ),
]
Runs = Annotated[list[Path], typer.Argument(metavar="RUN...", help="Run folders.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder for what is written.")]
FrameTime = Annotated[int | None, typer.Option("--frame-ms", help="Milliseconds per frame of the animation.")]
Width = Annotated[int | None, typer.Option("--width", help="Width of the animation in pixels.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show results and warnings alone, no progress.")]
Verbose = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="A line for each logged step, and where in the program a mistake came up."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write the result to standard output as one JSON object.")]


def with_output(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command the options `--quiet`, `--verbose` and `--json`; its parameter `output` is what they ask for."""
    signature = inspect.signature(command)
    flags = {"quiet": Quiet, "verbose": Verbose, "as_json": AsJson}

    @functools.wraps(command)
    def run(quiet: bool, verbose: bool, as_json: bool, **given: Any) -> None:
        try:
            command(output=Output(quiet, verbose, as_json), **given)
        except ParnasError:
            if verbose:
                traceback.print_exc()
            raise

    own = [parameter for name, parameter in signature.parameters.items() if name != "output"]
    own += [Parameter(name, Parameter.KEYWORD_ONLY, default=False, annotation=kind) for name, kind in flags.items()]
    run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in own} | {"return": None}
    return run
