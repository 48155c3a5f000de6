"""Tuning of settings by Optuna: each trial trains with other settings, and the validation loss is minimised.

A trial that is behind the median of the others is pruned. The test split is never read. `optuna_study.py` has what a
black-box search needs as well: storages, several workers, and retries of lost trials.
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
from parnas.runs.records import MetricsRecord
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
    Phase,
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
from parnas.training.session import flatten, resolve_corpus

__all__ = ["TuneOptions", "TuningResult", "tune"]

STORAGE, STUDY = "study.db", "tune"  # file in the folder, and the name of the study in it
_BEST, _TRIALS = "best.yaml", "trials"  # files in the folder
_STATES = ("complete", "pruned", "diverged", "skipped")
FOLDER = "folder"  # attribute of a trial: where it trains
TRAIN: Mapping[Phase, Callable[[Config, Path, Reporter, bool], Run]] = {"retrain": retrain, "search": search}
STARTUP_TRIALS = 5  # complete trials before any is pruned
_NEVER_FROZEN = 3 / 4  # fraction of the steps before which a search that trains alpha to its end is not pruned
_TOP_SHARE, _MIN_TOP = 0.25, 5
"""PED-ANOVA compares this share of the trials with all; fewer than five trials are too few to estimate a density."""


@dataclass(frozen=True)
class TuneOptions:
    """The options of a study; without a storage, its file is in the run folder."""

    phase: Phase
    space: Space
    trials: int
    storage: str | None = None
    study: str | None = None
    prune: bool = True


class TrialResult(NamedTuple):
    """A finished trial."""

    number: int
    state: str  # one of _STATES; skipped: its settings do not fit together
    loss: float | None  # nats per token of the validation split; of a pruned trial the last one
    step: int | None  # of the last validation
    seconds: float | None
    folder: str | None  # of its run, below the study's
    settings: Mapping[str, Any]  # by dotted key


@dataclass(frozen=True)
class TuningResult:
    """The trials of a study, the best of them, and the importance of each setting."""

    folder: Path
    study: str
    phase: Phase
    space: Space = field(repr=False)
    trials: tuple[TrialResult, ...] = field(repr=False)
    best: TrialResult | None
    """The least loss of the complete trials; `None` if there is none."""
    config: Config | None = field(repr=False)
    """The configuration with the best settings."""
    configured: TrialResult | None = field(repr=False)
    """The trial of the configuration as it was given, if there is one."""
    importance: Mapping[str, float] | None = field(repr=False)
    """Shares that add up to 1, by dotted key; `None` if there are too few trials."""

    @property
    def table(self) -> pd.DataFrame:
        """Return a row for each finished trial, by number."""
        columns = ["number", "state", "loss", "step", "seconds", "folder"]
        rows = [each._asdict() | {key: each.settings[key] for key in self.space} for each in self.trials]
        return pd.DataFrame(rows, columns=[*columns, *self.space]).rename(columns={"number": "trial"})

    def counts(self) -> dict[str, int]:
        """Return the number of trials by state."""
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
        """Write `trials.csv`, `trials.md`, `tuning.json`, and `best.yaml` for `parnas retrain` or `parnas search`."""
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
    """Run or resume a study until all its workers together have finished `options.trials` trials, each in a subfolder.

    The first trial is the configuration as it is, if the space contains it. An interrupted worker writes the results
    so far. Raises `ParnasError` if folder or study have other settings, or if a trial cannot train.
    """
    config = resolve_corpus(config)
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
        reporter.note(f"the configuration as it is will not be tried, since the space leaves out its {outside}")
    write_text(folder / SPACE, dump_space(options.space))
    try:
        run_trials(study, objective, options.trials, reporter, after=objective.drop_checkpoints)
    except BaseException:
        with suppress(Exception):
            _collect(study, objective).write(folder)
        raise
    return _collect(study, objective)


def _fingerprint(config: Config, options: TuneOptions, streams: TokenStreams, reporter: Reporter) -> dict[str, Any]:
    """Return all that the loss of a trial depends on besides its settings."""
    free = {*FREE_SETTINGS, *options.space, *OTHER_PHASE_SETTINGS[options.phase], "evaluation"}
    values = {"phase": options.phase, "text": streams.header.fingerprint, "space": describe_space(options.space)}
    values |= binding_settings(config, free)
    values["runtime.precision"] = choose_device(config.runtime).precision  # `auto` may differ between machines
    if options.phase == "search" and config.search.cost.target is not None:
        costs = find_costs(config, config.search.cost.metric, reporter)
        values |= {"metric": costs.metric, "costs": dict(costs.per_layer)}
    return values


def _refuse_misfits(config: Config, options: TuneOptions, streams: TokenStreams) -> None:
    """Raise `ParnasError` with all ends of ranges and choices that do not fit the vocabulary or the text.

    If the configuration itself does not fit, tuned settings may correct that, and only drawn combinations are judged.
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
        raise ParnasError("\n  - ".join([f"The text is unfit for {len(misfits)} of the values to tune:", *misfits]))


def _refuse_misfit(config: Config, phase: Phase, streams: TokenStreams) -> None:
    """Raise `ParnasError` for settings that do not fit the vocabulary or the length of the text."""
    if not isinstance(config.model.cutoffs, str):
        cluster_bounds(config.model, streams.header.vocab_size)
    for_weights, for_alpha = split_share(streams.tokens("train"), config.search.alpha_share if phase == "search" else 0)
    TrainingBatches(for_weights, config.data.batch_size, config.data.tgt_len)
    if len(for_alpha):
        make_arch_batches(config, for_alpha)


def make_pruner(config: Config, options: TuneOptions) -> BasePruner:
    """Return the median rule (Golovin et al. 2017, section 3.2.1), from the first step on that is comparable.

    Successive halving would end three quarters of the trials at their first validations. But the learning rate falls to
    zero linearly, or weights are averaged at the end, so a high rate may be behind in the middle and ahead at the end.
    """
    if not options.prune:
        return NopPruner()
    first = first_pruning_step(config, options.phase, options.space)
    return MedianPruner(STARTUP_TRIALS, n_warmup_steps=first, n_min_trials=STARTUP_TRIALS)


def first_pruning_step(config: Config, phase: Phase, space: Space) -> int:
    """Return the first step at which a validation may prune a trial, whatever its settings.

    A retraining may be pruned after a quarter of its steps. A search may be pruned once alpha is frozen or, if it never
    is, in the last quarter: before that, the shared weights do not belong to a single network.
    """
    if phase == "retrain":
        return config.train.steps // 4

    def possible(key: str, configured: Any) -> list[Any]:
        return space[key].extremes() if key in space else [configured]

    fractions = possible("search.uniform_fraction", config.search.uniform_fraction)
    frozen = max(fractions) if min(fractions) < 1 else _NEVER_FROZEN
    estimators = possible("search.estimator", config.search.estimator)
    return round(max(frozen if name == "uniform" else _NEVER_FROZEN for name in estimators) * config.search.steps)


@dataclass(frozen=True)
class TuningObjective:
    """The validation loss of the configuration with the settings of a trial."""

    config: Config
    options: TuneOptions
    folder: Path
    streams: TokenStreams
    reporter: Reporter

    def __call__(self, trial: Trial) -> Sequence[float]:
        """Draw settings, train with them, and return the loss; raise `TrialPruned` if they do not fit together."""
        folder = self._trial_folder(trial)  # before FOLDER of a retried trial is overwritten
        settings = {key: dimension.draw(trial, key) for key, dimension in self.options.space.items()}
        name = " ".join(f"{key}={to_label(value)}" for key, value in settings.items())  # as on the command line
        try:
            config = configure(self.config, settings)
            _refuse_misfit(config, self.options.phase, self.streams)
        except ParnasError as error:
            trial.set_user_attr(NAME, name)
            raise TrialPruned(f"{name}: {'; '.join(error.errors) or error}, skipped") from error
        values = evaluate_once(trial, name, lambda: [self._train(trial, config, folder, name)])
        self.reporter.note(f"trial {trial.number}: loss {values[0]:.4f}  {name}")
        return values

    def settings(self, parameters: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings of Optuna's parameters, by dotted key."""
        return {key: dimension.to_setting(parameters[key]) for key, dimension in self.options.space.items()}

    def _train(self, trial: Trial, config: Config, folder: Path, name: str) -> float:
        """Train to the end, or until the trial is pruned; resume the training of a retried trial.

        Returns the loss in nats per token.
        """
        phase = self.options.phase
        trial.set_user_attr(FOLDER, folder.name)
        self.reporter.note(f"trial {trial.number}: {name}")
        progress = _TrialReporter(self.reporter, trial, phase)
        if Run(folder).finished():  # by a worker that could not store the loss
            progress.report_earlier(folder)
        try:
            summary = train_once(TRAIN[phase], config, folder, progress).summary()
        except TrialPruned as pruned:
            Run(folder).write_log(str(pruned))
            raise
        except (Diverged, OutOfMemory) as error:
            self.reporter.note(f"{error} Its loss counts as infinite here.")
            return math.inf
        measured = summary.valid if phase == "retrain" else summary.argmax
        if measured is None:
            raise ParnasError(f"{folder} has no loss of the derived network in its summary.json; restore the file.")
        return measured.loss

    def _trial_folder(self, trial: Trial) -> Path:
        """Return the run folder of a trial. A retry uses the lost trial's folder if it can resume the training."""
        earlier = str(trial.user_attrs.get(FOLDER, ""))
        run = Run(self.folder / Path(earlier).name)
        if earlier and (run.finished() or any(run.checkpoints.glob("step-*"))):
            with suppress(ParnasError), run.locked():  # a worker that was given up may still train in it
                return run.folder
        return self.folder / f"trial-{trial.number}"

    def drop_checkpoints(self, study: optuna.Study, _: FrozenTrial | None = None) -> None:
        """Remove the checkpoints of all finished trials but the best; their metrics and logs stay."""
        trials = finished_trials(study)
        best = _best_of(trials)
        folders = {trial.user_attrs.get(FOLDER) for trial in trials if trial is not best}
        for name in folders - {None, best and best.user_attrs.get(FOLDER)}:
            run = Run(self.folder / str(name))
            for folder in (run.checkpoints, run.supernet):
                shutil.rmtree(folder, ignore_errors=True)

    def configured_parameters(self) -> Mapping[str, Any] | None:
        """Return the parameters of the configuration as it is, or `None` if the space does not contain it."""
        space = self.options.space
        parameters = {key: space[key].to_parameter(value) for key, value in self._configured().items()}
        return None if None in parameters.values() else parameters

    def outside(self) -> str:
        """Return the settings of the configuration that the space does not contain; empty if it contains all."""
        configured = self._configured().items()
        left_out = {key: value for key, value in configured if self.options.space[key].to_parameter(value) is None}
        if left_out == {"model.arch": None}:  # no architecture was given
            return ""
        return ", ".join(f"{key} {to_label(value)}" for key, value in left_out.items())

    def _configured(self) -> dict[str, Any]:
        """Return the configured value of each tuned setting."""
        configured = flatten(self.config.model_dump())
        return {key: as_configured(key, configured.get(key)) for key in self.options.space}


class _TrialReporter(CombinedReporter):
    """Pass progress on under the trial's name, and report validations to the study.

    A resumed training reports its earlier validations again.
    """

    def __init__(self, reporter: Reporter, trial: Trial, phase: Phase) -> None:
        super().__init__(reporter)
        self.trial, self.phase, self.steps = trial, phase, 0

    def start(self, loop: Loop) -> None:
        """Show the trial's number, and report the validations of the resumed run."""
        self.steps = loop.steps
        super().start(loop._replace(title=f"trial {self.trial.number}"))
        if loop.first_step and loop.folder is not None:
            self.report_earlier(loop.folder)

    def metrics(self, record: MetricsRecord) -> None:
        """Pass a line on, and report it."""
        super().metrics(record)
        self._report(record)

    def report_earlier(self, folder: Path) -> None:
        """Report the validations of a run folder."""
        for record in Run(folder).metrics():
            self._report(record)

    def _report(self, record: MetricsRecord) -> None:
        """Report a validation; raise `TrialPruned` if the pruner ends the trial before its last step."""
        if record.split != "valid":
            return
        step, loss = record.step, record.loss if self.phase == "retrain" else record.argmax_loss
        if loss is None:
            raise ParnasError(
                f"The validation of step {step} has no loss of the derived network; restore metrics.jsonl."
            )
        self.trial.report(loss, step)
        if step < self.steps and self.trial.should_prune():
            raise TrialPruned(
                f"pruned after step {step} with a loss of {loss:.4f}: its least loss so far is behind the median"
            )


def _is_finite(trial: FrozenTrial) -> bool:
    """Return whether a trial is complete and has a finite loss."""
    return trial.state == TrialState.COMPLETE and math.isfinite(trial.values[0])


def _best_of(trials: Sequence[FrozenTrial]) -> FrozenTrial | None:
    """Return the trial of the least finite loss, of equal ones the first, or `None`."""
    return min(filter(_is_finite, trials), key=lambda trial: (trial.values[0], trial.number), default=None)


def _collect(study: optuna.Study, objective: TuningObjective) -> TuningResult:
    """Return the results of the finished trials, and remove the checkpoints of all but the best."""
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
    """Return the result of a finished trial; a reused result has the losses and the folder of the original trial."""
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
    """Return whether a trial ended without any training of its settings."""
    return trial.state == TrialState.PRUNED and not trial.intermediate_values and REUSED not in trial.user_attrs


def importance(trials: Sequence[FrozenTrial], space: Space) -> dict[str, float] | None:
    """Return the share of each setting in what distinguishes the best trials from all; `None` for too few trials.

    By PED-ANOVA (Watanabe et al. 2023), which only needs to know which trials are the best: a quarter of all, or the
    complete ones if these are fewer. Pruned and diverged trials count as the worst; skipped ones do not count.
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
