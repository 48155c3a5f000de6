"""Several trainings in subfolders of one folder: finished trainings are loaded, others started or resumed."""

import math
from collections.abc import Callable, Collection
from pathlib import Path

from parnas.config.loader import Config, dump_config
from parnas.errors import Diverged, ParnasError
from parnas.runs.files import write_text
from parnas.runs.run import Run
from parnas.training.progress import Reporter
from parnas.training.session import check_same_results, refuse_changes

_Train = Callable[[Config, Path, Reporter, bool], Run]
"""`search` or `retrain`; arguments: configuration, run folder, reporter, whether the run must exist already."""


def prepare_folder(folder: Path, config: Config, allowed: Collection[str] = ()) -> None:
    """Write the configuration that several trainings share to `folder/config.yaml`, or compare it with that file.

    Raises `ParnasError` if the file has another configuration (except for the dotted keys in `allowed`), or if the
    folder holds files but no `config.yaml`.
    """
    base = Run(folder)
    path = folder / "config.yaml"
    if not path.is_file():
        try:
            base.refuse_used()
        except ParnasError:
            if not path.is_file():  # otherwise another worker has just written it
                raise
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, dump_config(config))
    refuse_changes(base, config, allowed)


def train_once(train: _Train, config: Config, folder: Path, reporter: Reporter) -> Run:
    """Return the finished run of a training in `folder`: load it if it is finished, otherwise start or resume it.

    Raises `ParnasError` if the run was started with another configuration. If the run is finished, settings that it did
    not use may differ: a search does not use the settings of retrainings, a retraining not those of searches.
    """
    run = Run(folder)
    if run.finished():
        check_same_results(run, config)
        reporter.note(f"{folder} is finished and kept")
        return run
    return train(config, folder, reporter, False)


def reached_perplexity(train: Callable[[], Run], reporter: Reporter) -> float:
    """Run a training and return its final validation perplexity per token; infinity, with a note, if it diverges."""
    try:
        run = train()
    except Diverged as error:
        reporter.note(f"{error} The perplexity counts as infinite.")
        return math.inf
    ppl = run.summary().valid.ppl
    return math.inf if math.isnan(ppl) else ppl  # `summary.json` cannot store infinity
