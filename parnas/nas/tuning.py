"""Settings of a training tuned by Optuna: each trial trains one configuration, and hopeless ones are ended early.

The workers of a study, and what becomes of a dead one's trials, are those of a black-box search (`workers.py`). What is
minimised is the loss of the validation split; the test split is never read.
"""

import inspect
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import FrozenTrial, TrialState, create_trial

from parnas.config import Config
from parnas.data.streams import TokenStreams, prepare
from parnas.errors import ParnasError
from parnas.files import read_json_object, write_json, write_text
from parnas.nas.cost import find_costs
from parnas.nas.storage import answered, keepable, open_storage
from parnas.nas.trials import FREE
from parnas.nas.tuned import TrialResult, Tuned
from parnas.nas.tuning_space import (
    Phase,
    Space,
    SpaceLike,
    configure,
    default_space,
    describe_space,
    dump_space,
    read_file,
    read_mapping,
    read_space,
    to_label,
)
from parnas.nas.tuning_trials import PLACE, Demands, Tuning, drop_checkpoints, is_finite, refuse_misfit
from parnas.nas.workers import REUSED, finished, open_shared, work
from parnas.run import OF_THE_OTHER_PHASE
from parnas.training.device import choose_device
from parnas.training.phases import flatten, resolve_corpus, run_architecture
from parnas.training.repeated import settle_folder
from parnas.training.reporter import Reporter, Silent

SPACE, STORAGE, STUDY = "space.yaml", "study.log", "study.json"
TOP_SHARE, LEAST_TOP = 0.25, 5  # of the trials, those whose settings importance is told from; and how many they must be
"""Fewer than five are too few for their density (Optuna on PED-ANOVA)."""


def tune(config: Config, demands: Demands, folder: Path, reporter: Reporter) -> Tuned:
    """Go on with a study until all its workers together have finished `demands.trials` trials; each in a subfolder.

    The first trial is the configuration as it is, where the space has it. Where a worker is interrupted, it writes what
    there is by then. Raises `ParnasError` where folder or study were begun with other things, or a trial cannot train.
    """
    config = resolve_corpus(config)
    if demands.phase == "retrain" and "model.arch" not in demands.space:
        run_architecture(config)
    streams = prepare(config.data, reporter.note)
    refuse_misfits(config, demands, streams)
    settle_folder(folder, config, FREE - {"model.arch"})
    demands = settle_study(demands, folder)
    job = Tuning(config, demands, folder, streams, terms_of(config, demands, streams, reporter), reporter)
    storage = demands.storage or f"journal:{folder / STORAGE}"
    name = demands.study or own_study(storage) or folder.resolve().name
    study = open_shared(storage, name, "tpe", job)
    if demands.storage is not None:
        write_json(folder / STUDY, {"storage": keepable(demands.storage), "study": demands.study})
    if outside := job.outside():
        reporter.note(f"the configuration as it is will not be tried, since what is tuned leaves out its {outside}")
    write_text(folder / SPACE, dump_space(demands.space))
    try:
        work(study, job, demands.trials, NotesAlone(reporter))
    except BaseException:
        with suppress(Exception):
            collect(study, job, name).write(folder)
        raise
    return collect(study, job, name)


def refuse_misfits(config: Config, demands: Demands, streams: TokenStreams) -> None:
    """Raise `ParnasError` with all ends of ranges and choices that the vocabulary or the text refuses by themselves.

    Where they refuse the configuration itself, what is tuned may mend that, and the draws are judged alone.
    """

    def misfit(settings: Mapping[str, Any]) -> str:
        try:
            refuse_misfit(configure(config, settings), demands.phase, streams)
        except ParnasError as error:
            return "" if error.mistakes else str(error)  # such as the configuration has are told elsewhere
        return ""

    ends = [(key, value) for key, dimension in demands.space.items() for value in dimension.ends()]
    told = [f"{key} {to_label(value)}: {problem}" for key, value in ends if (problem := misfit({key: value}))]
    if told and not misfit({}):
        raise ParnasError("\n  - ".join([f"The text refuses {len(told)} of what is to be tuned:", *told]))


def settle_study(demands: Demands, folder: Path) -> Demands:
    """The demands with the study that the folder keeps; raises `ParnasError` for another one than that."""
    path = folder / STUDY
    if not path.is_file():
        if demands.storage is not None and (folder / STORAGE).exists():
            raise ParnasError(f"{folder} has a study of its own; choose another --run for {demands.study}.")
        return demands
    kept = read_json_object(path)
    if not isinstance(kept.get("study"), str) or not isinstance(kept.get("storage"), str | None):
        raise ParnasError(f"{path} does not say which study it is; remove it, and give --storage and --study.")
    if demands.storage is None:
        if kept["storage"] is None:
            raise ParnasError(f"{folder} belongs to the study {kept['study']}; give its --storage and --study.")
        return replace(demands, storage=kept["storage"], study=kept["study"])
    if (kept["storage"], kept["study"]) != (keepable(demands.storage), demands.study):
        place = "" if kept["storage"] is None else f" in {kept['storage']}"
        raise ParnasError(f"{folder} belongs to the study {kept['study']}{place}; choose another --run.")
    return demands


def own_study(storage: str) -> str | None:
    """The study in the file of a folder, which has the name that the folder had when it was begun; none as yet."""
    return next(iter(answered(partial(optuna.get_all_study_names, open_storage(storage)))), None)


def ask_space(given: SpaceLike, options: Mapping[str, Any], config: Config, phase: Phase, folder: Path) -> Space:
    """What is to be tuned: of a file or mapping, with `options` besides; by default that of the folder, or the usual.

    Raises `ParnasError` with all mistakes at once.
    """
    if given is None and not options:
        before = folder / SPACE
        wanted = read_file(before) if before.is_file() else default_space(config, phase)
        return read_space(wanted, config, phase)
    base = {} if given is None else read_mapping(given) if isinstance(given, Mapping) else read_file(Path(given))
    return read_space({**base, **options}, config, phase)


class NotesAlone(Silent):
    """Hands on what workers note; the trainings show their progress themselves."""

    def __init__(self, reporter: Reporter) -> None:
        self.reporter = reporter

    def note(self, text: str) -> None:
        self.reporter.note(text)


def terms_of(config: Config, demands: Demands, streams: TokenStreams, reporter: Reporter) -> dict[str, Any]:
    """All that the loss of a trial depends on besides its settings."""
    phase = demands.phase
    free = (FREE - {"model.arch"}) | demands.space.keys()
    unused = (*OF_THE_OTHER_PHASE[phase], "evaluation")
    terms = {"phase": phase, "text": streams.header.fingerprint, "space": describe_space(demands.space)}
    terms |= {
        key: value
        for key, value in flatten(config.model_dump(mode="json")).items()
        if key not in free and not any(f"{key}.".startswith(f"{each}.") for each in unused)
    }
    terms["runtime.precision"] = choose_device(config.runtime).precision  # `auto` may differ between machines
    if phase == "search" and config.search.cost.target is not None:
        costs = find_costs(config, config.search.cost.metric, reporter)
        terms |= {"metric": costs.metric, "costs": dict(costs.of)}
    return terms


# What came out.


def collect(study: optuna.Study, job: Tuning, name: str) -> Tuned:
    """What the finished trials of a study tell."""
    trials = finished(study)
    by_number = {trial.number: trial for trial in trials}
    results = tuple(result_of(trial, by_number[trial.user_attrs.get(REUSED, trial.number)], job) for trial in trials)
    given = None if job.first is None else job.settings(job.first)  # to the digits that a trial has
    first = next((each for each in results if each.settings == given), None)
    complete = [each for each in results if each.loss is not None and each.state == "complete"]
    best = min(complete, key=lambda each: (each.loss or 0.0, each.number), default=None)
    if best is not None:
        drop_checkpoints(*(job.folder / each.folder for each in complete if each.folder and each.folder != best.folder))
    chosen = None if best is None else configure(job.config, best.settings)
    demands = job.demands
    return Tuned(
        job.folder, name, job.phase, demands.space, results, best, chosen, first, importance(trials, demands.space)
    )


def result_of(trial: FrozenTrial, trained: FrozenTrial, job: Tuning) -> TrialResult:
    """What a finished trial came to; losses and folder are of the trial that `trained` its settings."""
    reached = sorted(trained.intermediate_values.items())
    step, loss = reached[-1] if reached else (None, None)
    if trial.state == TrialState.PRUNED:
        state = "passed over" if passed_over(trial) else "pruned"
    else:
        state, loss = ("complete", float(trial.values[0])) if is_finite(trial) else ("diverged", None)
    seconds = None
    if trial.datetime_start is not None and trial.datetime_complete is not None:
        seconds = (trial.datetime_complete - trial.datetime_start).total_seconds()
    folder = trained.user_attrs.get(PLACE)
    return TrialResult(trial.number, state, loss, step, seconds, folder, job.settings(trial.params))


def passed_over(trial: FrozenTrial) -> bool:
    """Whether a trial ended without any training, of its own or of the same settings."""
    return trial.state == TrialState.PRUNED and not trial.intermediate_values and REUSED not in trial.user_attrs


def importance(trials: Sequence[FrozenTrial], space: Space) -> dict[str, float] | None:
    """The share of each setting in what tells the best trials from all; none of too few trials.

    By PED-ANOVA (Watanabe et al. 2023), which asks only which trials are the best ones: a quarter of all, or those that
    came to their end, if these are fewer. Those that were ended early or diverged count as worse than any other, and
    those that were passed over say nothing.
    """
    losses = [float(trial.values[0]) for trial in trials if is_finite(trial)]
    drawn = [trial for trial in trials if trial.params.keys() == space.keys() and not passed_over(trial)]
    if len(losses) < LEAST_TOP or len(drawn) * TOP_SHARE < LEAST_TOP:
        return None
    study = optuna.create_study(direction="minimize")
    for trial in drawn:
        loss = float(trial.values[0]) if is_finite(trial) else max(losses) + 1
        study.add_trial(create_trial(params=trial.params, distributions=trial.distributions, value=loss))
    evaluator: Any = PedAnovaImportanceEvaluator
    known = inspect.signature(evaluator).parameters
    quantile = "target_quantile" if "target_quantile" in known else "baseline_quantile"  # its name in Optuna 4
    found = get_param_importances(study, evaluator=evaluator(**{quantile: min(TOP_SHARE, len(losses) / len(drawn))}))
    return {key: float(value) for key, value in found.items()}
