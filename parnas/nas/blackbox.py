"""A black-box search as a baseline: Optuna proposes strings, knowing only what the ones before were worth."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import optuna
from optuna.trial import FrozenTrial, Trial, TrialState

from parnas.architecture import Architecture
from parnas.nas.proposals import NETWORK, SOURCE, Sampler
from parnas.nas.storage import answered
from parnas.nas.trials import Finding, Task, name_network
from parnas.nas.workers import REUSED, Outcome, Proposal, open_shared, work
from parnas.training.reporter import Reporter


@dataclass(frozen=True)
class Networks:
    """Trials that evaluate a string: its perplexity, and the cost of its blocks."""

    task: Task
    command: str = "blackbox"
    cure: str = "choose another --study"
    key: str = NETWORK
    objectives: int = 2
    pruner: None = None
    first: None = None

    @property
    def source(self) -> str:
        """As the task."""
        return self.task.source

    @property
    def terms(self) -> Mapping[str, Any]:
        """As the task."""
        return self.task.terms

    @property
    def seed(self) -> int:
        """As configured."""
        return self.task.config.runtime.seed

    def propose(self, trial: Trial) -> Proposal:
        """A layer for each block; identity alone is no language model: counted, and never evaluated."""
        network = name_network(self.layers(trial))
        return Proposal(network, None if network else "identity alone")

    def layers(self, trial: Trial) -> list[str]:
        """The layers that are drawn for a trial, the same ones whenever it is asked."""
        return [trial.suggest_categorical(f"block {n}", each) for n, each in enumerate(self.task.candidates, 1)]

    def evaluate(self, trial: Trial, name: str, lost: FrozenTrial | None) -> Outcome:  # noqa: ARG002
        """Perplexity and cost."""
        layers = self.layers(trial)
        values = [self.task.perplexity(trial.number, Architecture(layers)), self.task.costs.cost(layers)]
        return Outcome(values, note=self.describe(name, values))

    def describe(self, name: str, values: Sequence[float]) -> str:
        """The network, its perplexity, and its cost as a share of the interleaved network's."""
        return f"{name}  ppl {values[0]:.2f}  cost {values[1] / self.task.costs.interleaved:.2f}"


def blackbox(study: optuna.Study, task: Task, trials: int, reporter: Reporter) -> None:
    """Go on with a study until all its workers together have finished `trials` trials; see `workers.py`."""
    work(study, Networks(task), trials, reporter)


def open_study(storage: str, name: str, sampler: Sampler, task: Task) -> optuna.Study:
    """Open or begin a study that minimises perplexity and cost.

    Raises `ParnasError` where the storage cannot be opened, or the study was begun on other terms.
    """
    return open_shared(storage, name, sampler, Networks(task))


def findings(study: optuna.Study) -> list[Finding]:
    """Each network that was evaluated, once, in the order of the trials."""
    return [
        Finding(trial.user_attrs[NETWORK], trial.values[0], trial.values[1], trial.number, trial.user_attrs[SOURCE])
        for trial in answered(partial(study.get_trials, deepcopy=False, states=(TrialState.COMPLETE,)))
        if REUSED not in trial.user_attrs
    ]
