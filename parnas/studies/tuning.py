"""Tuning of settings by Optuna: each trial trains with other settings, and the validation loss is minimised.

A trial is pruned (ended early) if its lowest validation loss so far exceeds the median loss of the complete trials at
the same step. The test split is never read. `optuna_study.py` has the parts that black-box search uses too: storages,
several workers, retries of lost trials.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import optuna
import pandas as pd
from optuna.exceptions import TrialPruned
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.trial import FrozenTrial, Trial, TrialState, create_trial

from parnas.config.loader import Config, dump_config
from parnas.data.batching import TrainingBatches, split_share
from parnas.data.streams import TokenStreams, prepare
from parnas.errors import Diverged, OutOfMemory, ParnasError
from parnas.model.heads import cluster_bounds
from parnas.nas.cost import find_costs
from parnas.nas.search import make_arch_batches, search
from parnas.runs.files import write_json, write_text
from parnas.runs.records import Kind, MetricsRecord
from parnas.runs.run import OTHER_PHASE_SETTINGS, TUNING, Run
from parnas.studies.optuna_study import (
    FREE_SETTINGS,
    NAME,
    REUSED,
    StudySettings,
    binding_settings,
    evaluate_once,
    finished_trials,
    open_shared_study,
    run_trials,
)
from parnas.studies.train_or_load import prepare_folder, train_once
from parnas.studies.tuning_space import (
    SPACE,
    Space,
    as_configured,
    configure,
    describe_space,
    dump_space,
    to_label,
)
from parnas.training.device import choose_device
from parnas.training.loaded_run import run_architecture
from parnas.training.progress import CombinedReporter, Loop, Reporter
from parnas.training.retrain import retrain
from parnas.training.session import MAY_CHANGE, flatten, refuse_changes, resolve_paths

__all__ = ["TuneOptions", "TuningResult", "tune"]

STORAGE, STUDY = "study.db", "tune"  # default storage, a file in the run folder, and default name of the study
_BEST, _TRIALS = "best.yaml", "trials"  # result files in the run folder; trials.csv and trials.md
_STATES = ("complete", "pruned", "diverged", "skipped")
_OF_WORKER = FREE_SETTINGS - MAY_CHANGE  # may differ between workers, but must not change in a resumed training
FOLDER = "folder"  # user attribute of a trial: the name of its run folder
TRAIN: Mapping[Kind, Callable[[Config, Path, Reporter, bool], Run]] = {"retrain": retrain, "search": search}
STARTUP_TRIALS = 5  # complete trials before any is pruned
_NEVER_FROZEN = 3 / 4  # a search that never freezes alpha is not pruned before this fraction of its steps
_TOP_SHARE, _MIN_TOP = 0.25, 5
"""Share of the trials that PED-ANOVA counts as best, and the least number of best trials that it needs."""


@dataclass(frozen=True)
class TuneOptions:
    """The options of a tuning study."""

    phase: Kind
    space: Space
    trials: int  # finished trials of all workers together
    storage: str | None = None  # address of the storage; `None`: a file in the run folder
    study: str | None = None  # name of the study in the storage; `None`: `STUDY`
    prune: bool = True


class TrialResult(NamedTuple):
    """The settings and the result of a finished trial."""

    number: int
    state: str  # one of `_STATES`; skipped: the settings are invalid together, so nothing was trained
    loss: float | None  # final validation loss in nats per token; of a pruned trial the last that was measured
    step: int | None  # training step of the last validation
    seconds: float | None
    folder: str | None  # name of its run folder within the study's folder
    settings: Mapping[str, Any]  # by dotted key


@dataclass(frozen=True)
class TuningResult:
    """The result of tuning: all finished trials, the best trial, and the importance of each setting."""

    folder: Path
    study: str  # its name in texts: that in a shared storage, or that of the folder
    phase: Kind
    space: Space = field(repr=False)
    trials: tuple[TrialResult, ...] = field(repr=False)
    best: TrialResult | None
    """The complete trial with the least loss; `None` if no trial is complete with a finite loss."""
    config: Config | None = field(repr=False)
    """The configuration with the settings of the best trial; `None` without a best trial."""
    configured: TrialResult | None = field(repr=False)
    """The trial with the settings of the configuration to tune; `None` if there is no such trial."""
    importance: Mapping[str, float] | None = field(repr=False)
    """Share of each setting in the differences of loss, by dotted key; see `importance`. `None` for too few trials."""

    @property
    def table(self) -> pd.DataFrame:
        """A table with a row for each finished trial, in the order of numbers, and a column for each setting."""
        columns = ["number", "state", "loss", "step", "seconds", "folder"]
        rows = [each._asdict() | {key: each.settings[key] for key in self.space} for each in self.trials]
        return pd.DataFrame(rows, columns=[*columns, *self.space]).rename(columns={"number": "trial"})

    def counts(self) -> dict[str, int]:
        """Return the number of finished trials in each state."""
        states = [each.state for each in self.trials]
        return {state: states.count(state) for state in _STATES}

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `tuning.json`."""
        return {
            "study": self.study,
            "phase": self.phase,
            "counts": self.counts(),
            "best": None if self.best is None else self.best._asdict(),
            "configured": None if self.configured is None else self.configured._asdict(),
            "importance": self.importance,
            "space": describe_space(self.space),
            "trials": [each._asdict() for each in self.trials],
        }

    def write(self, folder: Path) -> list[Path]:
        """Write `trials.csv`, `trials.md`, `tuning.json` and `best.yaml` into `folder`, and return their paths.

        `best.yaml` is the best configuration, for `parnas retrain` or `parnas search`; without a best trial it is left
        out.
        """
        table = self.table.map(lambda value: to_label(value) if isinstance(value, list | tuple) else value)
        texts = {
            f"{_TRIALS}.csv": table.to_csv(index=False),
            f"{_TRIALS}.md": table.to_markdown(index=False, floatfmt=".4g", missingval="") + "\n",
        }
        if self.best is not None and self.config is not None:
            heading = f"# The best of {len(self.trials)} trials of {self.study}: trial {self.best.number}, "
            heading += f"validation loss {self.best.loss:.4f}.\n"
            texts[_BEST] = heading + f"# parnas {self.phase} {_BEST}\n" + dump_config(self.config)
        for name, text in texts.items():
            write_text(folder / name, text)
        write_json(folder / TUNING, self.to_dict())
        return [*(folder / name for name in texts), folder / TUNING]


def tune(config: Config, options: TuneOptions, folder: Path, reporter: Reporter) -> TuningResult:
    """Tune settings of a configuration: run or resume a study in `folder`, and return the result.

    Trials are run until all workers of the study together have finished `options.trials` trials, each in a subfolder.
    The first trial uses the settings of `config`, if the space contains them. An interrupted worker writes the results
    so far. Raises `ParnasError` if the folder or the study belongs to another configuration or space, if a value of the
    space does not fit the text, or if a training stops with an error other than divergence or lack of memory.
    """
    config = resolve_paths(config)
    if options.phase == "retrain" and "model.arch" not in options.space:
        run_architecture(config)  # raises without an architecture
    streams = prepare(config.data, reporter.note)
    _refuse_misfits(config, options, streams)
    prepare_folder(folder, config, FREE_SETTINGS)
    objective = TuningObjective(config, options, folder, streams, reporter)
    hint = "choose another --run, or tune the same settings (--set, --space) of the same configuration"
    if options.storage is not None:
        hint = "choose another --study, and another --run"
    settings = StudySettings(
        "tune",
        _fingerprint(config, options, streams, reporter),
        hint,
        config.runtime.seed,
        pruner=make_pruner(config, options),
        first=objective.configured_parameters(),
    )
    storage = options.storage or f"sqlite:///{folder / STORAGE}"
    study = open_shared_study(storage, options.study or STUDY, settings, reporter.note)
    if outside := objective.outside():
        reporter.note(f"no trial will use the settings as configured, since these are outside the space: {outside}")
    write_text(folder / SPACE, dump_space(options.space))
    try:
        run_trials(study, objective, options.trials, reporter, after=objective.drop_checkpoints)
    except BaseException:
        with suppress(Exception):
            _collect(study, objective).write(folder)
        raise
    return _collect(study, objective)


def _fingerprint(config: Config, options: TuneOptions, streams: TokenStreams, reporter: Reporter) -> dict[str, Any]:
    """Return all values that the loss of a trial depends on, except the tuned settings, by name.

    All workers of a study must have equal fingerprints.
    """
    free = {*FREE_SETTINGS, *options.space, *OTHER_PHASE_SETTINGS[options.phase], "evaluation"}
    values = {"phase": options.phase, "text": streams.header.fingerprint, "space": describe_space(options.space)}
    values |= binding_settings(config, free)
    values["runtime.precision"] = choose_device(config.runtime).precision  # `auto` may differ between machines
    if options.phase == "search" and config.search.cost.target is not None:
        costs = find_costs(config, config.search.cost.metric, reporter)
        values |= {"metric": costs.metric, "costs": dict(costs.per_layer)}
    return values


def _refuse_misfits(config: Config, options: TuneOptions, streams: TokenStreams) -> None:
    """Raise `ParnasError` with all values of the space that do not fit the vocabulary or the length of the text.

    Each end of a range and each value of a list is tested with all other settings as configured. If the configuration
    itself does not fit, nothing is raised, since tuned settings may correct that; each trial then checks its settings.
    """

    def misfit(settings: Mapping[str, Any]) -> str:
        try:
            _refuse_misfit(configure(config, settings), options.phase, streams)
        except ParnasError as error:
            return "" if error.errors else str(error)  # `read_space` reports errors of the configuration
        return ""

    extremes = [(key, value) for key, dimension in options.space.items() for value in dimension.extremes()]
    misfits = [f"{key} {to_label(value)}: {problem}" for key, value in extremes if (problem := misfit({key: value}))]
    if misfits and not misfit({}):
        heading = f"{len(misfits)} of the values to tune do not fit the text; choose others:"
        raise ParnasError("\n  - ".join([heading, *misfits]))


def _refuse_misfit(config: Config, phase: Kind, streams: TokenStreams) -> None:
    """Raise `ParnasError` if the configuration does not fit the vocabulary or the length of the text."""
    if not isinstance(config.model.cutoffs, str):
        cluster_bounds(config.model, streams.header.vocab_size)
    for_weights, for_alpha = split_share(streams.tokens("train"), config.search.alpha_share if phase == "search" else 0)
    TrainingBatches(for_weights, config.data.batch_size, config.data.tgt_len)
    if len(for_alpha):
        make_arch_batches(config, for_alpha)


def make_pruner(config: Config, options: TuneOptions) -> BasePruner:
    """Return the pruner of a study: the median rule (Golovin et al. 2017, section 3.2.1), or none if `prune` is false.

    Trials are pruned from `first_pruning_step` on, when their losses become comparable. Successive halving is not used:
    it would end three quarters of the trials at their first validations, although a trial with averaged weights or a
    high learning rate (which falls to zero linearly) may be worse than others early in training and better at the end.
    """
    if not options.prune:
        return NopPruner()
    first = first_pruning_step(config, options.phase, options.space)
    return MedianPruner(STARTUP_TRIALS, n_warmup_steps=first, n_min_trials=STARTUP_TRIALS)


def first_pruning_step(config: Config, phase: Kind, space: Space) -> int:
    """Return the first step at which a trial may be pruned, the same for all settings in the space.

    For a retraining it is a quarter of the steps. For a search it is the step at which alpha is frozen or, if alpha is
    never frozen, three quarters of the steps: before this step, the shared weights are trained for several networks.
    """
    if phase == "retrain":
        return config.train.steps // 4

    def possible(key: str, configured: Any) -> list[Any]:
        return space[key].extremes() if key in space else [configured]

    fractions = possible("search.uniform_fraction", config.search.uniform_fraction)
    frozen = max(_NEVER_FROZEN if fraction == 1 else fraction for fraction in fractions)
    estimators = possible("search.estimator", config.search.estimator)
    return round(max(frozen if name == "uniform" else _NEVER_FROZEN for name in estimators) * config.search.steps)


@dataclass(frozen=True)
class TuningObjective:
    """The objective of a tuning study: draws settings for a trial, trains with them, returns the validation loss."""

    config: Config
    options: TuneOptions
    folder: Path
    streams: TokenStreams
    reporter: Reporter

    def __call__(self, trial: Trial) -> Sequence[float]:
        """Draw the settings of a trial, train with them, and return the validation loss in nats per token, as a list.

        Raises `TrialPruned` if the settings are invalid together or do not fit the text, or if the trial is pruned.
        """
        folder = self._trial_folder(trial)  # reads the attribute FOLDER of a retry, which `_train` overwrites
        settings = {key: dimension.draw(trial, key) for key, dimension in self.options.space.items()}
        name = " ".join(f"{key}={to_label(value)}" for key, value in settings.items())  # as on the command line
        try:
            config = configure(self.config, settings)
            _refuse_misfit(config, self.options.phase, self.streams)
        except ParnasError as error:
            trial.set_user_attr(NAME, name)
            raise TrialPruned(f"skipped {name}: {'; '.join(error.errors) or error}") from error
        values = evaluate_once(trial, name, lambda: [self._train(trial, config, folder, name)])
        self.reporter.note(f"trial {trial.number}: loss {values[0]:.4f}  {name}")
        return values

    def settings(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Convert the parameters of an Optuna trial to settings, by dotted key."""
        return {key: dimension.to_setting(parameters[key]) for key, dimension in self.options.space.items()}

    def _train(self, trial: Trial, config: Config, folder: Path, name: str) -> float:
        """Train in `folder`, or resume the training there; return the final validation loss in nats per token.

        The loss is infinite if the training diverges or runs out of memory. Raises `TrialPruned` if the trial is
        pruned. `name` is shown in the notes.
        """
        phase = self.options.phase
        trial.set_user_attr(FOLDER, folder.name)
        self.reporter.note(f"trial {trial.number}: {name}")
        progress = _TrialReporter(self.reporter, trial, phase)
        if Run(folder).finished():  # by a worker that could not store the loss in the study
            progress.report_earlier(folder)
        try:
            summary = train_once(TRAIN[phase], config, folder, progress).summary()
        except TrialPruned as pruned:
            Run(folder).write_log(str(pruned))
            raise
        except (Diverged, OutOfMemory) as error:
            self.reporter.note(f"{error} The loss of the trial counts as infinite.")
            return math.inf
        measured = summary.valid if phase == "retrain" else summary.argmax
        if measured is None:
            raise ParnasError(
                f"summary.json in {folder} has no argmax, the loss of the network that derive would select; "
                "restore that file."
            )
        return measured.loss

    def _trial_folder(self, trial: Trial) -> Path:
        """Return a trial's run folder: `trial-NUMBER`, but for a retry the folder of the lost trial if resumable.

        It is resumable if the other worker had the same device, compilation and path of the text.
        """
        earlier = str(trial.user_attrs.get(FOLDER, ""))
        run = Run(self.folder / Path(earlier).name)
        if earlier and (run.finished() or any(run.checkpoints.glob("step-*"))):
            with suppress(ParnasError), run.locked():  # fails while the worker of the lost trial still trains in it
                refuse_changes(run, self.config, flatten(self.config.model_dump()).keys() - _OF_WORKER)
                return run.folder
        return self.folder / f"trial-{trial.number}"

    def drop_checkpoints(self, study: optuna.Study, _: FrozenTrial | None = None) -> None:
        """Remove the checkpoints of all finished trials except the best one; metrics and logs are kept."""
        trials = finished_trials(study)
        best = _best_of(trials)
        folders = {trial.user_attrs.get(FOLDER) for trial in trials if trial is not best}
        for name in folders - {None, best and best.user_attrs.get(FOLDER)}:
            run = Run(self.folder / str(name))
            for folder in (run.checkpoints, run.supernet):
                shutil.rmtree(folder, ignore_errors=True)

    def configured_parameters(self) -> Mapping[str, Any] | None:
        """Return the tuned settings as configured, as Optuna parameters; `None` if one is outside the space."""
        space = self.options.space
        parameters = {key: space[key].to_parameter(value) for key, value in self._configured().items()}
        return None if None in parameters.values() else parameters

    def outside(self) -> str:
        """Return the tuned settings whose configured value is outside the space, as text; "" if there are none."""
        configured = self._configured().items()
        left_out = {key: value for key, value in configured if self.options.space[key].to_parameter(value) is None}
        if left_out == {"model.arch": None}:  # no architecture was given
            return ""
        return ", ".join(f"{key} {to_label(value)}" for key, value in left_out.items())

    def _configured(self) -> dict[str, Any]:
        """Return the value that the configuration has for each tuned setting, by dotted key."""
        configured = flatten(self.config.model_dump())
        return {key: as_configured(key, configured.get(key)) for key in self.options.space}


class _TrialReporter(CombinedReporter):
    """A reporter for the training of a trial: shows its progress, and reports each validation loss to the study.

    When a training is resumed, the validations before the interruption are reported again.
    """

    def __init__(self, reporter: Reporter, trial: Trial, phase: Kind) -> None:
        super().__init__(reporter)
        self.trial, self.phase, self.steps = trial, phase, 0

    def start(self, loop: Loop) -> None:
        """Start the progress display under the trial's number; report earlier validations if the run is resumed."""
        self.steps = loop.steps
        super().start(loop._replace(title=f"trial {self.trial.number}"))
        if loop.first_step and loop.folder is not None:
            self.report_earlier(loop.folder)

    def metrics(self, record: MetricsRecord) -> None:
        """Show a line of metrics; if it is the result of a validation, report its loss to the study."""
        super().metrics(record)
        self._report(record)

    def report_earlier(self, folder: Path) -> None:
        """Report all validations that a run folder has logged to the study."""
        for record in Run(folder).metrics():
            self._report(record)

    def _report(self, record: MetricsRecord) -> None:
        """Report a validation loss to the study; raise `TrialPruned` if the study's pruner ends the trial.

        Other metrics are ignored, and a trial is not pruned at its last step.
        """
        if record.split != "valid":
            return
        step, loss = record.step, record.loss if self.phase == "retrain" else record.argmax_loss
        if loss is None:
            raise ParnasError(
                f"metrics.jsonl of trial {self.trial.number} has no argmax_loss, the loss of the network that derive "
                f"would select, for the validation at step {step}; restore that file."
            )
        self.trial.report(loss, step)
        if step < self.steps and self.trial.should_prune():
            raise TrialPruned(
                f"pruned after step {step} (loss {loss:.4f}): its lowest loss so far exceeds the median of the "
                "complete trials at this step"
            )


def _is_finite(trial: FrozenTrial) -> bool:
    """Return whether a trial is complete and has a finite loss."""
    return trial.state == TrialState.COMPLETE and math.isfinite(trial.values[0])


def _best_of(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the complete trial with the least finite loss, the first of equal ones; `None` if there is none."""
    return min(filter(_is_finite, trials), key=lambda trial: (trial.values[0], trial.number), default=None)


def _collect(study: optuna.Study, objective: TuningObjective) -> TuningResult:
    """Return the result of a study from its finished trials; remove the checkpoints of all but the best trial."""
    objective.drop_checkpoints(study)
    trials, options = finished_trials(study), objective.options
    results = {trial.number: _describe_trial(trial, trials, objective) for trial in trials}
    first, best = objective.configured_parameters(), _best_of(trials)
    configured = None if first is None else objective.settings(first)  # with the digits of a trial
    return TuningResult(
        objective.folder,
        options.study or objective.folder.resolve().name,
        options.phase,
        options.space,
        tuple(results.values()),
        None if best is None else results[best.number],
        config=None if best is None else configure(objective.config, results[best.number].settings),
        configured=next((each for each in results.values() if each.settings == configured), None),
        importance=importance(trials, options.space),
    )


def _describe_trial(trial: FrozenTrial, trials: Sequence[FrozenTrial], objective: TuningObjective) -> TrialResult:
    """Return the result of one of the finished `trials`.

    A trial that reused the result of an equal trial has the losses and the run folder of that trial.
    """
    trained = next(each for each in trials if each.number == trial.user_attrs.get(REUSED, trial.number))
    step, loss = max(trained.intermediate_values.items(), default=(None, None))
    if trial.state == TrialState.PRUNED:
        state = "skipped" if _was_skipped(trial) else "pruned"
    else:
        state, loss = ("complete", float(trial.values[0])) if _is_finite(trial) else ("diverged", None)
    seconds = None if trial.duration is None else trial.duration.total_seconds()
    folder = trained.user_attrs.get(FOLDER)
    return TrialResult(trial.number, state, loss, step, seconds, folder, objective.settings(trial.params))


def _was_skipped(trial: FrozenTrial) -> bool:
    """Return whether a trial was not trained, since its settings were invalid together or did not fit the text."""
    return trial.state == TrialState.PRUNED and not trial.intermediate_values and REUSED not in trial.user_attrs


def importance(trials: Sequence[FrozenTrial], space: Space) -> dict[str, float] | None:
    """Return the importance of each setting by dotted key, as shares that add up to 1; `None` for too few trials.

    A setting is important if its values in the best trials are distributed differently from its values in all trials
    (PED-ANOVA, Watanabe et al. 2023). The best trials are the quarter with the lowest losses, or all complete trials if
    these are fewer. Pruned and diverged trials are ranked below all complete trials; skipped trials are left out.
    """
    losses = [float(trial.values[0]) for trial in trials if _is_finite(trial)]
    drawn = [trial for trial in trials if trial.params.keys() == space.keys() and not _was_skipped(trial)]
    if len(losses) < _MIN_TOP or len(drawn) * _TOP_SHARE < _MIN_TOP:
        return None
    study = optuna.create_study(direction="minimize")
    for trial in drawn:
        loss = float(trial.values[0]) if _is_finite(trial) else max(losses) + 1
        study.add_trial(create_trial(params=trial.params, distributions=trial.distributions, value=loss))
    evaluator = PedAnovaImportanceEvaluator(target_quantile=min(_TOP_SHARE, len(losses) / len(drawn)))
    return {key: float(share) for key, share in get_param_importances(study, evaluator=evaluator).items()}
