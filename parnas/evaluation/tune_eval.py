"""Tuning of the settings of dynamic evaluation and of the continuous cache by a grid search on the validation split."""

import itertools
import math
import operator
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from parnas.config.schema import CacheConfig, DynamicConfig
from parnas.errors import ParnasError
from parnas.evaluation.continuous_cache import mix
from parnas.evaluation.loading import EvalOptions, EvalRun, open_runs
from parnas.evaluation.protocols import EvalProtocol, SequentialReader, refuse_unused_rms_settings
from parnas.runs.records import ChosenTrialRecord, TunedEvalRecord
from parnas.runs.run import PLAIN, TUNED_EVAL, Run
from parnas.training.perplexity import TotalLoss
from parnas.training.progress import Reporter

__all__ = ["Grid", "read_grid", "tune_eval"]

CACHE_SIZE = 2000  # positions, if evaluation.cache.size is not set; as Grave et al. 2017 use on WikiText-2
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
    "evaluation.batch_size": "tune-eval reads the text as one row",
    "evaluation.stride": "sliding evaluation has no settings to tune; give the stride to parnas evaluate",
}
"""Settings of the section `evaluation` that tune-eval does not use, each with the reason, as text for a message."""


@dataclass(frozen=True)
class Grid:
    """The values to try for each setting, the protocols to tune, and the number of tokens to score in each trial.

    `lr` and `decay` are settings of dynamic evaluation (`DynamicConfig`); `theta` and `weight` are settings of the
    cache (`CacheConfig`).

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
    """Read a grid from options of the command line.

    `lists` holds comma-separated values by field of `Grid`; fields without an entry have their defaults. `tokens` is
    the number of validation tokens to score, 0 for all. Raises `ParnasError` if a list has values that are not allowed,
    or belongs to a protocol that is not tuned.
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


def _write(run: Run, record: TunedEvalRecord) -> None:
    """Write the result of a grid search to `tuned_eval.json` in the run folder.

    If the file holds a result for the same weights, text and lengths, its trials are kept for those of the protocols
    `dynamic` and `cache` that this grid search did not tune. Earlier trials of `dynamic + cache` are never kept, since
    they depend on the settings of both protocols.
    """
    with suppress(ParnasError):  # a missing or foreign file is replaced
        earlier = run.tuned_eval()
        conditions = TunedEvalRecord.model_fields.keys() - {"plain", "chosen", "trials", "notes"}
        if all(getattr(earlier, key) == getattr(record, key) for key in conditions):
            record = _merge(earlier, record)
    run.write_tuned_eval(record)


def _merge(earlier: TunedEvalRecord, record: TunedEvalRecord) -> TunedEvalRecord:
    """Return `record` with the trials of `earlier` for those protocols, `dynamic` or `cache`, that `record` lacks."""
    kept = [name for name in _PROTOCOLS if name in earlier.chosen and name not in record.chosen]
    merged = {
        "chosen": {**{name: earlier.chosen[name] for name in kept}, **record.chosen},
        "trials": [*(trial for trial in earlier.trials if trial.evaluation in kept), *record.trials],
        "notes": [*(note for note in earlier.notes if note.partition(":")[0] in kept), *record.notes],
    }
    return record.model_copy(update=merged)


def tune_eval(run: Run, grid: Grid, options: EvalOptions, reporter: Reporter) -> TunedEvalRecord:
    """Try all settings of a grid on the validation split of a run; return all trials and the best of each protocol.

    The result is also written to `tuned_eval.json` in the run folder; see `_write`.

    The protocols are dynamic evaluation, the cache, and dynamic evaluation with the cache. When used together, dynamic
    evaluation has the settings that are best without a cache, and the settings of the cache are tuned.
    `options.split` is ignored.

    Raises:
        ParnasError: `options.changes` has a setting that the grid search chooses or does not use, or no trial of a
            protocol has a finite loss.
    """
    _refuse_unread_changes(options, grid)
    eval_run = open_runs([run.folder], options)[0]
    refuse_unused_rms_settings(eval_run.loaded.config.evaluation.dynamic, options.changes)
    reader = SequentialReader(eval_run, eval_run.streams.tokens("valid")[: grid.tokens], reporter)
    # 1. Plain evaluation, and all caches with the trained weights, in one pass over the text.
    size = eval_run.loaded.config.evaluation.cache.size or CACHE_SIZE
    thetas = grid.theta if "cache" in grid.protocols else ()
    caches = [[CacheConfig(size=size, theta=theta, weight=weight) for weight in grid.weight] for theta in thetas]
    plain, *trials = _try_caches(reader, None, caches)
    # 2. Dynamic evaluation, in one pass for each pair of learning rate and decay.
    if "dynamic" in grid.protocols:
        dynamic_trials = list(_try_dynamic(reader, grid))
        best = min(dynamic_trials, key=_loss_of)
        if not math.isfinite(best.loss):
            raise ParnasError("Dynamic evaluation diverged with every setting; give lower learning rates (--lr).")
        trials += dynamic_trials
        # 3. All caches with the best dynamic evaluation, in one pass.
        if caches:
            trials += _try_caches(reader, best.dynamic, caches)[1:]
    names = dict.fromkeys(trial.evaluation for trial in trials)
    chosen = {name: min((trial for trial in trials if trial.evaluation == name), key=_loss_of) for name in names}
    if not all(math.isfinite(trial.loss) for trial in chosen.values()):
        raise ParnasError("No setting of the cache gives a finite loss; give lower values of theta (--theta).")
    record = TunedEvalRecord(
        **_describe_weights(eval_run),
        split="valid",
        tokens=len(reader.tokens),
        plain=plain,
        chosen=chosen,
        trials=trials,
        notes=list(_edge_notes(chosen, grid)),
    )
    _write(run, record)
    return record


_loss_of = operator.attrgetter("loss")


def _make_trial(protocol: EvalProtocol, nats: Tensor) -> ChosenTrialRecord:
    """Return the result of a trial, given its protocol and the loss of each token in nats, [N].

    A mean loss that is not finite becomes infinity, so that the trial is never the best.
    """
    total = TotalLoss.of(nats)
    loss = total.per_token if math.isfinite(total.per_token) else math.inf
    return ChosenTrialRecord(
        evaluation=protocol.name,
        settings=protocol.settings,
        loss=loss,
        ppl=total.perplexity,
        **protocol.to_dict(),
    )


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


def _try_dynamic(reader: SequentialReader, grid: Grid) -> Iterator[ChosenTrialRecord]:
    """Try every pair of learning rate and decay in the grid; yield each trial and report its perplexity."""
    configured = reader.run.loaded.config.evaluation.dynamic
    for lr, decay in itertools.product(grid.lr, grid.decay):
        settings = DynamicConfig.model_validate({**configured.model_dump(), "lr": lr, "decay": decay})
        nats = reader.read(f"lr {lr:g}, decay {decay:g}", settings)[0]
        trial = _make_trial(EvalProtocol(dynamic=settings), nats)
        reader.reporter.note(f"lr {lr:g}, decay {decay:g}: ppl {trial.ppl:.2f}")
        yield trial


def _try_caches(
    reader: SequentialReader, dynamic: DynamicConfig | None, caches: Sequence[Sequence[CacheConfig]]
) -> list[ChosenTrialRecord]:
    """Score the text once and return the trial without a cache, followed by the trials with each cache.

    `dynamic` holds the settings of dynamic evaluation, or `None` for none. `caches` has one list for each theta (the
    factor of similarity), with one cache for each mixing weight. The mixing weight only combines the cache's
    probability with the network's, so one pass per theta serves the whole list.
    """
    nats, *log_probs = reader.read(f"{reader.run.name} on valid", dynamic, [by_weight[0] for by_weight in caches])
    trials = [_make_trial(EvalProtocol(dynamic=dynamic), nats)]
    for by_weight, cached in zip(caches, log_probs, strict=True):
        for cache in by_weight:
            mixed = mix(nats, cached, cache.weight)
            trials.append(_make_trial(EvalProtocol(dynamic=dynamic, cache=cache), mixed))
    return trials


def _edge_notes(chosen: Mapping[str, ChosenTrialRecord], grid: Grid) -> Iterator[str]:
    """Yield a note for each chosen value that is the least or greatest of the grid: a better one may lie outside.

    `chosen` holds the best trial of each protocol, by its name.
    """
    for name, trial in chosen.items():
        for protocol, key in _TUNED_SETTINGS.values():
            value, tried = getattr(getattr(trial, protocol), key, None), getattr(grid, key)
            if value and len(tried) > 1 and value in (min(tried), max(tried)):  # no setting can be below 0
                listed = ", ".join(f"{each:g}" for each in tried)
                yield f"{name}: the best {key}, {value:g}, is at the edge of the values tried ({listed}); widen --{key}"


def _describe_weights(run: EvalRun) -> dict[str, Any]:
    """Return the architecture, the training step of the weights, `tgt_len` and the memory lengths of a run, by name."""
    arch = str(run.loaded.architecture.canonical())
    return {"arch": arch, "step": run.loaded.step, "tgt_len": run.shape.tgt_len, **run.shape.reach._asdict()}


def read_tuned_protocols(run: EvalRun) -> tuple[list[EvalProtocol], list[str]]:
    """Read the tuned protocols of a run from `tuned_eval.json`; return them and a list of notes.

    The list has a note if the weights or the lengths have changed since the tuning; otherwise it is empty.

    Raises:
        ParnasError: the run has no such file, or the file is invalid.
    """
    record, current = run.source.tuned_eval(), _describe_weights(run)
    protocols = [EvalProtocol(dynamic=trial.dynamic, cache=trial.cache) for trial in record.chosen.values()]
    if any(protocol.name == PLAIN for protocol in protocols):
        raise ParnasError(
            f"{run.source.folder / TUNED_EVAL} has a chosen trial without settings; run parnas tune-eval again."
        )
    earlier = {key: getattr(record, key) for key in current}
    changed = [f"{key} {earlier[key]} then, {value} now" for key, value in current.items() if earlier[key] != value]
    return protocols, [f"{TUNED_EVAL} was tuned with other values ({'; '.join(changed)})"] if changed else []
