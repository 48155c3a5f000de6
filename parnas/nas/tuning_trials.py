"""The trials of a study of settings: what each trains, where, and when it is ended early."""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from optuna.pruners import BasePruner, MedianPruner, NopPruner
from optuna.trial import FrozenTrial, Trial, TrialState

from parnas.config import Config
from parnas.data.batching import TrainingBatches, split_share
from parnas.data.streams import TokenStreams
from parnas.errors import Diverged, OutOfMemory, ParnasError
from parnas.model.heads import cluster_bounds
from parnas.nas.search import make_alpha_batches, search
from parnas.nas.storage import answered
from parnas.nas.tuned import Hopeless, TrialReporter
from parnas.nas.tuning_space import Choices, Phase, Space, as_configured, configure, to_label
from parnas.nas.workers import Outcome, Proposal, finished
from parnas.run import Run
from parnas.training.phases import flatten
from parnas.training.repeated import train_once
from parnas.training.reporter import Reporter
from parnas.training.retrain import retrain

TRAIN: Mapping[Phase, Callable[[Config, Path, Reporter, bool], Run]] = {"retrain": retrain, "search": search}
LOSS: Mapping[Phase, str] = {"retrain": "valid", "search": "argmax"}  # whose loss counts, in summary.json
SETTINGS, PLACE = "settings", "folder"  # attributes of a trial
STARTUP_TRIALS = 5  # that end before any is pruned
NEVER_RESTS = 3 / 4  # of a search in which alpha learns to the end, before which no trial is


@dataclass(frozen=True)
class Demands:
    """What is asked of a study. Without a storage, it is a file in its folder, which workers on a shared one share."""

    phase: Phase
    space: Space
    trials: int
    storage: str | None = None
    study: str | None = None
    prune: bool = True


@dataclass(frozen=True)
class Tuning:
    """Trials that train the configuration with other settings."""

    config: Config
    demands: Demands
    folder: Path
    streams: TokenStreams
    terms: Mapping[str, Any]
    reporter: Reporter
    command: str = "tune"
    key: str = SETTINGS
    source: str = "trained"
    objectives: int = 1

    @property
    def cure(self) -> str:
        """What to do where the study was begun with other things."""
        if self.demands.storage is not None:
            return "choose another --study, and another --run"
        return "choose another --run, or tune the same settings (--set, --space) of the same configuration"

    @property
    def phase(self) -> Phase:
        """Which training is tuned."""
        return self.demands.phase

    @property
    def seed(self) -> int:
        """As configured."""
        return self.config.runtime.seed

    @property
    def pruner(self) -> BasePruner:
        """The median rule (Golovin et al. 2017, section 3.2.1), from a step on that tells something.

        Not successive halving, which ends three quarters of the trials by their first validations: the learning rate
        falls to zero in a line, or weights are averaged at the end, so a high rate may be behind in the middle, and
        ahead at the end. For the same reason the first quarter of a training decides nothing; nor does a search before
        alpha rests, or before its last quarter where alpha does not, since until then its weights are not those of one
        network.
        """
        if not self.demands.prune:
            return NopPruner()
        first = first_telling_step(self.config, self.phase, self.demands.space)
        return MedianPruner(STARTUP_TRIALS, n_warmup_steps=first, n_min_trials=STARTUP_TRIALS)

    @property
    def first(self) -> Mapping[str, Any] | None:
        """The configuration as it is, so that others are held against it; none where the space does not have it."""
        params = {key: found for key, (_, found) in self._configured().items()}
        return None if None in params.values() else params

    def outside(self) -> str:
        """The settings of the configuration that the space does not have; empty where it has all."""
        left_out = {key: value for key, (value, found) in self._configured().items() if found is None}
        if left_out == {"model.arch": None}:  # none was given
            return ""
        return ", ".join(f"{key} {to_label(value)}" for key, value in left_out.items())

    def _configured(self) -> dict[str, tuple[Any, Any]]:
        """Of each setting that is tuned, the configured value, and what stands for it in the space."""
        configured = flatten(self.config.model_dump())
        values = {key: as_configured(key, configured.get(key)) for key in self.demands.space}
        return {key: (value, self.demands.space[key].find(value)) for key, value in values.items()}

    def propose(self, trial: Trial) -> Proposal:
        """Draw the settings; such as do not go together are passed over."""
        for key, each in self.demands.space.items():
            if isinstance(each, Choices):
                trial.suggest_categorical(key, each.labels())
            elif each.whole:
                trial.suggest_int(key, int(each.low), int(each.high), log=each.log)
            else:
                trial.suggest_float(key, each.low, each.high, log=each.log)
        settings = self.settings(trial.params)
        name = describe_settings(settings)
        try:
            refuse_misfit(configure(self.config, settings), self.phase, self.streams)
        except ParnasError as error:
            return Proposal(name, f"{name}: {'; '.join(error.mistakes) or error}")
        return Proposal(name)

    def settings(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """The settings that a trial's parameters stand for, by dotted key."""
        return {key: each.read(params[key]) for key, each in self.demands.space.items()}

    def evaluate(self, trial: Trial, name: str, lost: FrozenTrial | None) -> Outcome:
        """Train to the end, or as far as it is worth it; an unfinished training of the same settings is taken up."""
        place = self.place(trial.number, lost)
        trial.set_user_attr(PLACE, place.name)
        self.reporter.note(f"trial {trial.number}: {name}")
        config = configure(self.config, self.settings(trial.params))
        told = TrialReporter(self.reporter, f"trial {trial.number}", LOSS[self.phase], partial(self.report, trial))
        if Run(place).finished():  # by a worker that could not tell the study any more
            told.retell(place)
        try:
            loss = self.loss_of(train_once(TRAIN[self.phase], config, place, told))
        except Hopeless as hopeless:
            drop_checkpoints(place)
            Run(place).write_log(str(hopeless))
            return Outcome(state=TrialState.PRUNED, note=str(hopeless))
        except (Diverged, OutOfMemory) as error:
            drop_checkpoints(place)
            self.reporter.note(f"{error} It counts as infinite here.")
            loss = math.inf
        least = self.keep_best(trial, place, loss)
        return Outcome([loss], note=f"loss {loss:.4f}, the least of all trials by now is {least:.4f}")

    def loss_of(self, run: Run) -> float:
        """Of a finished training, in nats per token."""
        try:
            return float(run.summary()[LOSS[self.phase]]["loss"])
        except (KeyError, TypeError, ValueError) as error:
            raise ParnasError(
                f"{run.folder}/summary.json holds no loss; restore it, or remove {run.folder}."
            ) from error

    def place(self, number: int, lost: FrozenTrial | None) -> Path:
        """Where a trial trains: where the lost one did, if that can be taken up here; else in a folder of its own."""
        before = "" if lost is None else str(lost.user_attrs.get(PLACE, ""))
        run = Run(self.folder / Path(before).name)
        if before and (run.finished() or any(run.checkpoints.glob("step-*"))):
            with suppress(ParnasError), run.locked():  # which it is where its worker was given up and lives
                return run.folder
        return self.folder / f"trial-{number}"

    def report(self, trial: Trial, step: int, loss: float, last: bool) -> None:
        """Tell the study of a validation; raises `Hopeless` where the training is not worth going on with."""
        answered(partial(trial.report, loss, step), self.reporter.note)
        if not last and answered(trial.should_prune, self.reporter.note):
            raise Hopeless(
                f"ended early after step {step} with a loss of {loss:.4f}: its least one so far is behind the median's"
            )

    def keep_best(self, trial: Trial, place: Path, loss: float) -> float:
        """Of the checkpoints of finished trials, keep those of the best, which can be used as it is; the least loss."""
        others = [each for each in finished(trial.study) if is_finite(each) and PLACE in each.user_attrs]
        least, number = min(((float(each.values[0]), each.number) for each in others), default=(math.inf, -1))
        if (loss, trial.number) < (least, number):  # of equal ones the first, as the study has it
            drop_checkpoints(*(self.folder / str(each.user_attrs[PLACE]) for each in others))
        else:
            drop_checkpoints(place)
        return min(loss, least)

    def describe(self, name: str, values: Sequence[float]) -> str:
        """The loss and the settings."""
        return f"loss {values[0]:.4f}  {name}"


def refuse_misfit(config: Config, phase: Phase, streams: TokenStreams) -> None:
    """Raise `ParnasError` for settings that the vocabulary or the length of the text refuses."""
    if config.model.cutoffs != "auto":
        cluster_bounds(config.model, streams.header.vocab_size)
    for_weights, for_alpha = split_share(streams.tokens("train"), config.search.alpha_share if phase == "search" else 0)
    TrainingBatches(for_weights, config.data.batch_size, config.data.tgt_len)
    if len(for_alpha):
        make_alpha_batches(config, for_alpha)


def first_telling_step(config: Config, phase: Phase, space: Space) -> int:
    """The first step at which a validation may end a trial, whatever it draws."""
    if phase == "retrain":
        return config.train.steps // 4

    def possible(key: str, configured: Any) -> list[Any]:
        return space[key].ends() if key in space else [configured]

    shares = possible("search.fair_share", config.search.fair_share)
    rest = max(shares) if min(shares) < 1 else NEVER_RESTS
    names = possible("search.estimator", config.search.estimator)
    return round(max(rest if name == "uniform" else NEVER_RESTS for name in names) * config.search.steps)


def describe_settings(settings: Mapping[str, Any]) -> str:
    """Settings as they are given on the command line."""
    return " ".join(f"{key}={to_label(value)}" for key, value in settings.items())


def drop_checkpoints(*places: Path) -> None:
    """Remove the checkpoints of runs; what they did and reached stays."""
    for run in map(Run, places):
        for folder in (run.checkpoints, run.even):
            shutil.rmtree(folder, ignore_errors=True)


def is_finite(trial: FrozenTrial) -> bool:
    """Whether a trial came to its end, with a loss."""
    return trial.state == TrialState.COMPLETE and math.isfinite(trial.values[0])
