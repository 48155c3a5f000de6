"""New processes for tests, forked from one that has imported the libraries: importing torch takes seconds."""

import multiprocessing

__all__ = ["CONTEXT"]

CONTEXT = multiprocessing.get_context("forkserver")
"""Starts processes. The modules below are imported once: the first list that is set counts for all later processes."""
CONTEXT.set_forkserver_preload(
    [
        "torch.utils.tensorboard",
        "parnas.cli.main",
        "parnas.figures.draw",
        "parnas.nas.search",
        "parnas.studies.blackbox",
        "parnas.studies.tuning",
        "parnas.training.retrain",
    ]
)
