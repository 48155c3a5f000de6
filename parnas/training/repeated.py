"""Several trainings of one configuration in subfolders of one folder: kept where finished, gone on with where begun."""

import math
from collections.abc import Callable, Collection
from pathlib import Path

from parnas.config import Config, dump_config
from parnas.errors import Diverged, ParnasError
from parnas.files import write_text
from parnas.run import Run
from parnas.training.phases import refuse_changes, refuse_other_results
from parnas.training.reporter import Reporter

Train = Callable[[Config, Path, Reporter, bool], Run]
"""`search` or `retrain`: configuration, run folder, reporter, whether to go on with what is there."""


def settle_folder(folder: Path, config: Config, allowed: Collection[str] = ()) -> None:
    """Keep the configuration that the trainings in `folder` have in common.

    Raises for another one, but for the `allowed` keys, and for other files.
    """
    base = Run(folder)
    path = folder / "config.yaml"
    if not path.is_file():
        try:
            base.refuse_used()
        except ParnasError:
            if not path.is_file():  # else another worker has begun here in the meantime
                raise
        else:
            folder.mkdir(parents=True, exist_ok=True)
            write_text(path, dump_config(config))
    refuse_changes(base, config, allowed)


def train_once(train: Train, config: Config, folder: Path, reporter: Reporter) -> Run:
    """A training that is kept where it is finished, else gone on with or begun.

    Raises for another configuration; where it is finished, not for settings of the other phase.
    """
    run = Run(folder)
    if run.finished():
        refuse_other_results(run, config)
        reporter.note(f"{folder} is finished and kept")
        return run
    return train(config, folder, reporter, False)


def reached_perplexity(train: Callable[[], Run], reporter: Reporter) -> float:
    """Validation perplexity per token at the end of a training; infinite where it diverges, with a note."""
    try:
        run = train()
    except Diverged as error:
        reporter.note(f"{error} It counts as infinite here.")
        return math.inf
    try:
        ppl = run.summary()["valid"]["ppl"]
        return math.inf if ppl is None else float(ppl)  # JSON has no infinity
    except (KeyError, TypeError, ValueError) as error:
        raise ParnasError(
            f"{run.folder}/summary.json holds no perplexity; restore it, or remove {run.folder}."
        ) from error
