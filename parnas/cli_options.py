"""Arguments and options that several commands have."""

from pathlib import Path
from typing import Annotated

import typer

Settings = Annotated[
    list[str] | None,
    typer.Argument(metavar="[CONFIG] [SECTION.KEY=VALUE ...]", help="A YAML file (default: the demo's) and overrides."),
]
RunFolder = Annotated[Path | None, typer.Option("--run", help="Run folder to write; default: runs/COMMAND-CONFIG.")]
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
