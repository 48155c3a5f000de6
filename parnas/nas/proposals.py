"""What the next trial of a shared study evaluates: a network that a worker ended with, or a new draw of Optuna's."""

from collections import Counter
from typing import Any, Literal

import numpy as np
import optuna
from optuna.trial import FrozenTrial, TrialState

Sampler = Literal["tpe", "nsga2"]
NETWORK, SOURCE, INTERRUPTED = "network", "source", "interrupted"  # attributes of a trial; SOURCE: evaluation has begun
TRIES = 3  # evaluations of a network that end with their workers, before it is passed over


def failures(trials: list[FrozenTrial]) -> Counter[str]:
    """How many evaluations of each network ended with their workers, unless somebody interrupted them."""
    return Counter(trial.user_attrs[NETWORK] for trial in unfinished(trials) if INTERRUPTED not in trial.user_attrs)


def unfinished(trials: list[FrozenTrial]) -> list[FrozenTrial]:
    """The trials that failed in the middle of an evaluation."""
    return [trial for trial in trials if trial.state == TrialState.FAIL and SOURCE in trial.user_attrs]


def find_lost(trials: list[FrozenTrial]) -> FrozenTrial | None:
    """The first trial whose network no other evaluates or has evaluated since its worker ended."""
    kept = {
        trial.user_attrs.get(NETWORK)
        for trial in trials
        if trial.state in (TrialState.RUNNING, TrialState.COMPLETE, TrialState.PRUNED)
    }
    failed = failures(trials)
    lost = [trial for trial in unfinished(trials) if trial.user_attrs[NETWORK] not in kept]
    return next((trial for trial in lost if failed[trial.user_attrs[NETWORK]] < TRIES), None)


class Proposals(optuna.samplers.BaseSampler):
    """Proposes lost networks again, and otherwise what a sampler draws.

    The draws for a trial follow from the seed and the number of trials before it that have not failed, given those
    trials. So a study that was interrupted goes on as if it had not been, and workers with one seed do not draw the
    same.
    """

    def __init__(self, kind: Sampler, seed: int) -> None:
        self.kind, self.seed = kind, seed
        self.inner = make_sampler(kind, seed)
        self.lost: FrozenTrial | None = None  # what the last trial that was asked for proposes again

    def before_trial(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Look for what is lost, and begin the draws anew."""
        others = study.get_trials(deepcopy=False)
        self.lost = find_lost(others)
        place = sum(other.number < trial.number and other.state != TrialState.FAIL for other in others)
        self.inner = make_sampler(self.kind, int(np.random.SeedSequence([self.seed, place]).generate_state(1)[0]))
        self.inner.before_trial(study, trial)

    def infer_relative_search_space(self, study: optuna.Study, trial: FrozenTrial) -> dict[str, Any]:
        """As the sampler within."""
        return self.inner.infer_relative_search_space(study, trial)

    def sample_relative(self, study: optuna.Study, trial: FrozenTrial, search_space: dict[str, Any]) -> dict[str, Any]:
        """As the sampler within, which may number a generation here, but for what is lost."""
        drawn = self.inner.sample_relative(study, trial, search_space)
        return drawn if self.lost is None else {name: self.lost.params[name] for name in drawn}

    def sample_independent(
        self, study: optuna.Study, trial: FrozenTrial, param_name: str, param_distribution: Any
    ) -> Any:
        """As the sampler within, but for what is lost."""
        if self.lost is not None:
            return self.lost.params[param_name]
        return self.inner.sample_independent(study, trial, param_name, param_distribution)

    def after_trial(self, study: optuna.Study, trial: FrozenTrial, state: TrialState, values: Any) -> None:
        """As the sampler within."""
        self.inner.after_trial(study, trial, state, values)


def make_sampler(kind: Sampler, seed: int) -> optuna.samplers.BaseSampler:
    """Tree-structured Parzen estimators, which count running trials as bad ones, or NSGA-II (Deb et al. 2002)."""
    if kind == "nsga2":
        return optuna.samplers.NSGAIISampler(seed=seed)
    return optuna.samplers.TPESampler(seed=seed, constant_liar=True)
