"""Tuning of the settings of dynamic evaluation and of the continuous cache by a grid search on the validation split."""

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from parnas.config.schema import CacheConfig, DynamicConfig
from parnas.errors import ParnasError
from parnas.evaluation.continuous_cache import mix
from parnas.evaluation.loading import EvalOptions, EvalRun, open_runs
from parnas.evaluation.protocols import EvalProtocol, SequentialReader, refuse_unused_rms_settings
from parnas.runs.records import TunedEvalRecord
from parnas.runs.run import PLAIN, TUNED_EVAL, Run
from parnas.training.perplexity import TotalLoss
from parnas.training.progress import Reporter

__all__ = ["EvalTuning", "Grid", "read_grid", "tune_eval"]

CACHE_SIZE = 2000  # positions, where the configuration has no cache; as in the paper on WikiText-2
_PROTOCOLS = ("dynamic", "cache")
_TUNED_SETTINGS = {
    "evaluation.dynamic.lr": ("dynamic", "lr"),
    "evaluation.dynamic.decay": ("dynamic", "decay"),
    "evaluation.cache.theta": ("cache", "theta"),
    "evaluation.cache.weight": ("cache", "weight"),
}
"""The settings to tune: for each, the protocol that reads it and the field of `Grid` with the values to try."""
_UNREAD_SETTINGS = {
    "evaluation.split": "tune-eval reads the validation split only; leave it out",
    "evaluation.stride": "sliding evaluation has no settings to tune; give the stride to parnas evaluate",
}
"""Settings of evaluation that have no effect on the tuning, and why."""


@dataclass(frozen=True)
class Grid:
    """The values to try for each setting, the protocols to tune, and how much text to read.

    `lr` and `decay` are settings of dynamic evaluation (`DynamicConfig`), `theta` and `weight` of the cache
    (`CacheConfig`).

    Raises:
        ParnasError: a list is empty or has a value that is not allowed, or `tokens` is less than 1.
    """

    lr: Sequence[float] = (1e-4, 2e-4, 4e-4, 8e-4)
    decay: Sequence[float] = (0.0, 3e-3, 1e-2, 3e-2)
    theta: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 1.0)
    weight: Sequence[float] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
    protocols: Sequence[str] = _PROTOCOLS
    tokens: int | None = 30_000  # from the beginning of the validation split; `None`: all

    def __post_init__(self) -> None:
        """Check all fields; raise `ParnasError` if a value is not allowed."""
        largest, below_1 = sys.float_info.max, math.nextafter(1, 0)
        for name, limit, allowed in (
            ("lr", largest, "of 0 or more, and finite"),
            ("decay", 1.0, "from 0 to 1"),
            ("theta", largest, "of 0 or more, and finite"),
            ("weight", below_1, "from 0 to below 1"),
        ):
            values = getattr(self, name)
            if not values or not all(0 <= value <= limit for value in values):
                raise ParnasError(f"{name} (--{name}) is {list(values)}; give numbers {allowed}.")
        if not self.protocols or not set(self.protocols) <= set(_PROTOCOLS):
            allowed = f"give some of {', '.join(_PROTOCOLS)}"
            raise ParnasError(f"protocols (--protocols) is {list(self.protocols)}; {allowed}.")
        if self.tokens is not None and self.tokens < 1:
            raise ParnasError(f"tokens (--tokens) is {self.tokens}; give 1 or more, or None (--tokens 0) for all.")


def read_grid(lists: Mapping[str, str], tokens: int) -> Grid:
    """Read a grid from the command line.

    `lists` holds comma-separated values by field of `Grid`; fields without an entry have their defaults. `tokens` is
    the number of validation tokens to read, 0 for all. Raises `ParnasError` for a wrong or unused list.
    """
    values: dict[str, Any] = {"tokens": tokens or None}
    for name, text in lists.items():
        parts = [part.strip() for part in text.split(",") if part.strip()]
        try:
            values[name] = parts if name == "protocols" else [float(part) for part in parts]
        except ValueError as error:
            raise ParnasError(f"--{name} is {text!r}; give numbers, separated by commas.") from error
    grid = Grid(**values)
    for protocol, name in _TUNED_SETTINGS.values():
        if name in lists and protocol not in grid.protocols:
            raise ParnasError(f"--{name} has no effect with --protocols {','.join(grid.protocols)}; leave it out.")
    return grid


@dataclass(frozen=True)
class _EvalTrial:
    """One trial of the grid search: a protocol with the settings that were tried, and the validation loss."""

    protocol: EvalProtocol
    total: TotalLoss

    @property
    def loss(self) -> float:
        """The loss in nats per token; infinity if it is not finite."""
        return self.total.per_token if math.isfinite(self.total.per_token) else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Return the trial's protocol name, settings, loss and perplexity as plain values."""
        metrics = {"loss": self.loss, "ppl": self.total.perplexity}
        return {"evaluation": self.protocol.name, "settings": self.protocol.settings, **metrics}


@dataclass(frozen=True)
class EvalTuning:
    """The result of a grid search for one run: all trials, and the best trial of each protocol."""

    run: Run
    measured: Mapping[str, Any]  # network, weights, text and lengths of the trials
    plain: _EvalTrial
    trials: tuple[_EvalTrial, ...]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> dict[str, _EvalTrial]:
        """The trial with the least loss of each protocol, by the protocol's name."""
        names = dict.fromkeys(trial.protocol.name for trial in self.trials)
        by_loss = sorted(self.trials, key=lambda trial: trial.loss)
        return {name: next(trial for trial in by_loss if trial.protocol.name == name) for name in names}

    def to_dict(self) -> dict[str, Any]:
        """Return the content of `tuned_eval.json`."""
        return {
            **self.measured,
            PLAIN: self.plain.to_dict(),
            "chosen": {name: {**trial.protocol.to_dict(), **trial.to_dict()} for name, trial in self.chosen.items()},
            "trials": [trial.to_dict() for trial in self.trials],
            "notes": list(self.notes),
        }

    def write(self) -> Path:
        """Write `tuned_eval.json` into the run's folder and return its path.

        If the file has results for the same weights, text and lengths, its result of `dynamic` or `cache` is kept
        unless this search tuned that protocol. An earlier result of `dynamic + cache` is never kept, since it depends
        on both.
        """
        record = TunedEvalRecord.model_validate(self.to_dict())
        with suppress(ParnasError):  # a missing or foreign file is replaced
            earlier = self.run.tuned_eval()
            if all(getattr(earlier, key) == value for key, value in self.measured.items()):
                record = self._merge(earlier, record)
        return self.run.write_tuned_eval(record)

    def _merge(self, earlier: TunedEvalRecord, record: TunedEvalRecord) -> TunedEvalRecord:
        """Return `record` with the earlier results of the protocols that this search has not tuned."""
        others = [name for name in _PROTOCOLS if name in earlier.chosen and name not in self.chosen]
        merged = {
            "chosen": {**{name: earlier.chosen[name] for name in others}, **record.chosen},
            "trials": [*(trial for trial in earlier.trials if trial.evaluation in others), *record.trials],
            "notes": [*(note for note in earlier.notes if note.partition(":")[0] in others), *record.notes],
        }
        return record.model_copy(update=merged)


def tune_eval(run: Run, grid: Grid, options: EvalOptions, reporter: Reporter) -> EvalTuning:
    """Try all settings of a grid on the validation split of a run and return all trials.

    The protocols are dynamic evaluation, the cache, and both together. For both together only the cache is tuned:
    dynamic evaluation keeps the settings that are best without a cache. `options.split` is not used.

    Raises:
        ParnasError: `options.changes` has a setting that the search chooses or does not use, or no trial of a protocol
            has a finite loss.
    """
    _refuse_unread_changes(options, grid)
    eval_run = open_runs([run.folder], options)[0]
    refuse_unused_rms_settings(eval_run.loaded.config.evaluation.dynamic, options.changes)
    reader = SequentialReader(eval_run, eval_run.streams.tokens("valid")[: grid.tokens], reporter)
    # 1. The caches beside the trained weights; one reading serves all of them.
    size = eval_run.loaded.config.evaluation.cache.size or CACHE_SIZE
    thetas = grid.theta if "cache" in grid.protocols else ()
    caches = [[CacheConfig(size=size, theta=theta, weight=weight) for weight in grid.weight] for theta in thetas]
    plain, *trials = _try_caches(reader, None, caches)
    # 2. Dynamic evaluation, one reading for each pair of learning rate and decay.
    if "dynamic" in grid.protocols:
        dynamic_trials = list(_try_dynamic(reader, grid))
        best = min(dynamic_trials, key=lambda trial: trial.loss)
        if not math.isfinite(best.loss):
            raise ParnasError("Dynamic evaluation diverged with every setting; give lower learning rates (--lr).")
        trials += dynamic_trials
        # 3. The caches beside the best dynamic evaluation.
        if caches:
            trials += _try_caches(reader, best.protocol.dynamic, caches)[1:]
    measured = {**_describe_weights(eval_run), "split": "valid", "tokens": len(reader.tokens)}
    tuning = EvalTuning(run, measured, plain, tuple(trials))
    if not all(math.isfinite(trial.loss) for trial in tuning.chosen.values()):
        raise ParnasError("No cache gives a finite loss; give lower sharpnesses (--theta).")
    return replace(tuning, notes=tuple(_edge_notes(tuning.chosen, grid)))


def _refuse_unread_changes(options: EvalOptions, grid: Grid) -> None:
    """Raise `ParnasError` if `options.changes` fixes a setting that the grid search chooses or does not use."""
    for key in options.changes:
        if key in _TUNED_SETTINGS:
            name = _TUNED_SETTINGS[key][1]
            raise ParnasError(f"{key} is chosen by tune-eval; give the values to try as {name} (--{name}).")
        if key in _UNREAD_SETTINGS:
            raise ParnasError(f"{key} has no effect: {_UNREAD_SETTINGS[key]}.")
        if any(key.startswith(f"evaluation.{name}.") for name in set(_PROTOCOLS) - set(grid.protocols)):
            raise ParnasError(f"{key} has no effect with --protocols {','.join(grid.protocols)}; leave it out.")


def _try_dynamic(reader: SequentialReader, grid: Grid) -> Iterator[_EvalTrial]:
    """Try every pair of learning rate and decay in the grid; yield each trial and report its perplexity."""
    configured = reader.run.loaded.config.evaluation.dynamic
    for lr, decay in itertools.product(grid.lr, grid.decay):
        settings = DynamicConfig.model_validate({**configured.model_dump(), "lr": lr, "decay": decay})
        nats = reader.read(f"lr {lr:g}, decay {decay:g}", settings)[0]
        trial = _EvalTrial(EvalProtocol(dynamic=settings), TotalLoss.of(nats))
        reader.reporter.note(f"lr {lr:g}, decay {decay:g}: ppl {trial.total.perplexity:.2f}")
        yield trial


def _try_caches(
    reader: SequentialReader, dynamic: DynamicConfig | None, caches: Sequence[Sequence[CacheConfig]]
) -> list[_EvalTrial]:
    """Score the text once and return the trial without a cache, followed by the trials with each cache.

    `dynamic` holds the settings of dynamic evaluation, or `None` for none. `caches` has a list for each theta, with a
    cache for each weight: the weight does not change the cache's log-probabilities, so each theta needs only one
    pass through the cache.
    """
    nats, *log_probs = reader.read(f"{reader.run.name} on valid", dynamic, [by_weight[0] for by_weight in caches])
    trials = [_EvalTrial(EvalProtocol(dynamic=dynamic), TotalLoss.of(nats))]
    for by_weight, cached in zip(caches, log_probs, strict=True):
        for cache in by_weight:
            total = TotalLoss.of(mix(nats, cached, cache.weight))
            trials.append(_EvalTrial(EvalProtocol(dynamic=dynamic, cache=cache), total))
    return trials


def _edge_notes(chosen: Mapping[str, _EvalTrial], grid: Grid) -> Iterator[str]:
    """Yield a note for each best setting that is the least or greatest value tried: a better value may lie beyond it.

    `chosen` holds the best trial by protocol name.
    """
    for name, trial in chosen.items():
        settings = trial.protocol.to_dict()
        for protocol, key in _TUNED_SETTINGS.values():
            value, tried = settings.get(protocol, {}).get(key), getattr(grid, key)
            if value and len(tried) > 1 and value in (min(tried), max(tried)):  # nothing is below 0
                listed = ", ".join(f"{each:g}" for each in tried)
                yield f"{name}: the best {key}, {value:g}, is at the edge of what was tried ({listed}); widen --{key}"


def _describe_weights(run: EvalRun) -> dict[str, Any]:
    """Return what identifies the weights and lengths of a run: architecture, training step and all lengths."""
    arch = str(run.loaded.architecture.canonical())
    return {"arch": arch, "step": run.loaded.step, "tgt_len": run.tgt_len, **run.reach._asdict()}


def read_tuned_protocols(run: EvalRun) -> tuple[list[EvalProtocol], list[str]]:
    """Read the tuned protocols of a run from `tuned_eval.json`.

    Also returns a list that is empty, or has a note that the weights or lengths have changed since tuning.

    Raises:
        ParnasError: the run has no such file, or the file is invalid.
    """
    record, current = run.source.tuned_eval(), _describe_weights(run)
    protocols = [EvalProtocol(dynamic=trial.dynamic, cache=trial.cache) for trial in record.chosen.values()]
    if any(protocol.name == PLAIN for protocol in protocols):
        raise ParnasError(
            f"{run.source.folder / TUNED_EVAL} has a result without settings; run parnas tune-eval again."
        )
    earlier = {key: getattr(record, key) for key in current}
    changed = [f"{key} {earlier[key]} then, {value} now" for key, value in current.items() if earlier[key] != value]
    return protocols, [f"{TUNED_EVAL} was tuned with other values ({'; '.join(changed)})"] if changed else []
