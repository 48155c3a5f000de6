"""What the next trial of a shared study evaluates: what a worker ended with, or a new draw of Optuna's."""

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

Sampler = Literal["tpe", "nsga2"]
NETWORK, SOURCE, INTERRUPTED = "network", "source", "interrupted"  # attributes of a trial; SOURCE: evaluation has begun
TRIES = 3  # evaluations of the same that end with their workers, before it is passed over


def failures(trials: list[FrozenTrial], key: str) -> Counter[str]:
    """How many evaluations of each name in the attribute `key` ended with their workers, not by an interruption."""
    return Counter(trial.user_attrs[key] for trial in unfinished(trials) if INTERRUPTED not in trial.user_attrs)


def unfinished(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that failed in the middle of an evaluation."""
    return [trial for trial in trials if trial.state == TrialState.FAIL and SOURCE in trial.user_attrs]


def find_lost(trials: list[FrozenTrial], key: str) -> FrozenTrial | None:
    """The first trial that no other repeats or has repeated since its worker ended; equal `key`s are the same."""
    kept = {
        trial.user_attrs.get(key)
        for trial in trials
        if trial.state in (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)
    }
    failed = failures(trials, key)
    lost = [trial for trial in unfinished(trials) if trial.user_attrs[key] not in kept]
    return next((trial for trial in lost if failed[trial.user_attrs[key]] < TRIES), None)


class Proposals(optuna.samplers.BaseSampler):
    """Proposes again what is lost, and otherwise what a sampler draws, after the parameters `first`, where given.

    key: the attribute that tells trials apart.

    The draws for a trial follow from the seed and the number of trials before it that have not failed, given those
    trials. So a study that was interrupted goes on as if it had not been, and workers with one seed do not draw the
    same.
    """

    def __init__(self, kind: Sampler, seed: int, key: str, first: Mapping[str, Any] | None = None) -> None:
        self.kind, self.seed, self.key, self.first = kind, seed, key, first
        self.inner = make_sampler(kind, seed)
        self.lost: FrozenTrial | None = None  # what the last trial that was asked for proposes again
        self.fixed: Mapping[str, Any] | None = None  # its parameters, where they are not drawn

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Look for what is lost, and begin the draws anew."""
        others = study.get_trials(deepcopy=False)
        self.lost = find_lost(others, self.key)
        place = sum(other.number < trial.number and other.state != TrialState.FAIL for other in others)
        self.fixed = self.lost.params if self.lost is not None else self.first if place == 0 else None
        self.inner = make_sampler(self.kind, int(np.random.SeedSequence([self.seed, place]).generate_state(1)[0]))
        self.inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        """As the sampler within."""
        return self.inner.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        """As the sampler within, which may number a generation here, but for what is fixed."""
        drawn = self.inner.sample_relative(study, trial, search_space)
        return drawn if self.fixed is None else {name: self.fixed[name] for name in drawn}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        """As the sampler within, but for what is fixed."""
        if self.fixed is not None:
            return self.fixed[param_name]
        return self.inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        """As the sampler within."""
        self.inner.after_trial(study, trial, state, values)


def make_sampler(kind: Sampler, seed: int) -> optuna.samplers.BaseSampler:
    """Tree-structured Parzen estimators, which count running trials as bad ones, or NSGA-II (Deb et al. 2002)."""
    if kind == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
