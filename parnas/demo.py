"""The pipeline on an embedded corpus, for a first look."""

import sys
from pathlib import Path

from parnas.commands import show_pipeline
from parnas.config import PACKAGED, load_config
from parnas.output import Output
from parnas.pipelines import ALL_F, INTERLEAVED, run_pipeline


def run_demo(folder: Path, output: Output) -> None:
    """Run every phase of `demo.yaml` into `folder`, or go on, and print string, table and where the pictures are."""
    config = load_config(PACKAGED / "demo.yaml")
    found = run_pipeline(config, [INTERLEAVED, ALL_F], folder, output.reporter())
    show_pipeline(found, output, next_step())


def next_step() -> str:
    """How to use the environment that this runs in."""
    if sys.prefix == sys.base_prefix:
        return "parnas --help"
    return f"source {Path(sys.prefix) / 'bin/activate'}, which activates this environment; then parnas --help"
