"""The learning rate of dynamic evaluation and the sharpness of a cache, chosen on the validation split for one run."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from torch import Tensor

from parnas.errors import ParnasError
from parnas.evaluation.cache import mix
from parnas.evaluation.entries import Conditions, Entry, open_entries
from parnas.evaluation.ways import OrderedReader, Way, as_section, read_way, refuse_idle
from parnas.files import write_json
from parnas.run import ADAPTED, PLAIN, Run
from parnas.sections import CacheConfig, DynamicConfig
from parnas.training.perplexity import TotalLoss
from parnas.training.reporter import Reporter

CACHE_SIZE = 2000  # positions, where the configuration has no cache; as in the paper on WikiText-2
WAYS = ("dynamic", "cache")
SOUGHT = {
    "evaluation.dynamic.lr": ("dynamic", "lr"),
    "evaluation.dynamic.decay": ("dynamic", "decay"),
    "evaluation.cache.theta": ("cache", "theta"),
    "evaluation.cache.weight": ("cache", "weight"),
}
"""Settings that are looked for: the way that reads each, and the list of the grid that says where."""
UNREAD = {
    "evaluation.split": "adapt chooses on the validation split alone",
    "evaluation.stride": "sliding evaluation has nothing that adapt could choose; give it to evaluate",
}
"""Settings that have no effect here, and why."""


@dataclass(frozen=True)
class Grid:
    """What is tried; see `DynamicConfig` and `CacheConfig`. Raises `ParnasError` where a list is empty or wrong."""

    lr: Sequence[float] = (1e-4, 2e-4, 4e-4, 8e-4)
    decay: Sequence[float] = (0.0, 3e-3, 1e-2, 3e-2)
    theta: Sequence[float] = (0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 1.0)
    weight: Sequence[float] = (0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.4)
    ways: Sequence[str] = WAYS
    tokens: int | None = 30_000  # of the beginning of the validation split; none: all

    def __post_init__(self) -> None:
        most = {"lr": math.inf, "decay": 1.0, "theta": math.inf, "weight": math.nextafter(1, 0)}
        for name, limit in most.items():
            values = getattr(self, name)
            if not values or not all(0 <= value <= limit and math.isfinite(value) for value in values):
                told = {math.inf: "of 0 or more, and finite", 1.0: "from 0 to 1"}.get(limit, "from 0 to below 1")
                raise ParnasError(f"{name} (--{name}) is {list(values)}; give numbers {told}.")
        if not self.ways or not set(self.ways) <= set(WAYS):
            raise ParnasError(f"ways (--ways) is {list(self.ways)}; give some of {', '.join(WAYS)}.")
        if self.tokens is not None and self.tokens < 1:
            raise ParnasError(f"tokens (--tokens) is {self.tokens}; give 1 or more, or None for all.")


def read_grid(lists: Mapping[str, str], tokens: int) -> Grid:
    """A grid of lists with commas; the others are the usual ones. No tokens are all of the split."""
    given: dict[str, Any] = {"tokens": tokens or None}
    for name, text in lists.items():
        parts = [part.strip() for part in text.split(",") if part.strip()]
        try:
            given[name] = parts if name == "ways" else [float(part) for part in parts]
        except ValueError as error:
            raise ParnasError(f"--{name} is {text!r}; give numbers, commas between.") from error
    grid = Grid(**given)
    if idle := [name for way, name in SOUGHT.values() if name in lists and way not in grid.ways]:
        raise ParnasError(f"--{idle[0]} has no effect on what --ways asks for ({', '.join(grid.ways)}); leave it out.")
    return grid


@dataclass(frozen=True)
class Trial:
    """A way that was tried, and the loss that it gives."""

    way: Way
    total: TotalLoss

    @classmethod
    def of(cls, way: Way, nats: Tensor) -> "Trial":
        """By the nats of each token [N]."""
        return cls(way, TotalLoss.of(nats))

    @property
    def loss(self) -> float:
        """Nats per token; infinite where it diverged."""
        return self.total.per_token if math.isfinite(self.total.per_token) else math.inf

    def to_dict(self) -> dict[str, Any]:
        """Name, settings and figures."""
        figures = {"loss": self.loss, "ppl": self.total.perplexity}
        return {"evaluation": self.way.name, "settings": self.way.settings, **figures}


@dataclass(frozen=True)
class Adaptation:
    """What was tried for a run, and the best of each way."""

    run: Run
    measured: Mapping[str, Any]  # on which weights and text, with which lengths
    plain: Trial
    trials: tuple[Trial, ...]
    notes: tuple[str, ...] = ()

    @property
    def chosen(self) -> dict[str, Trial]:
        """The trial of the least loss, by the name of the way."""
        best: dict[str, Trial] = {}
        for trial in self.trials:
            if trial.way.name not in best or trial.loss < best[trial.way.name].loss:
                best[trial.way.name] = trial
        return best

    def to_dict(self) -> dict[str, Any]:
        """As it is written."""
        return {
            **self.measured,
            PLAIN: self.plain.to_dict(),
            "chosen": {name: {**as_section(of.way), **of.to_dict()} for name, of in self.chosen.items()},
            "trials": [trial.to_dict() for trial in self.trials],
            "notes": list(self.notes),
        }

    def write(self) -> Path:
        """Write `adapted.json` into the run's folder.

        What is there of the other way stays, if it was measured alike; both together only where both were asked for.
        """
        path, content = self.run.folder / ADAPTED, self.to_dict()
        before = self.run.adapted() if path.is_file() else {}
        if all(before.get(key) == value for key, value in self.measured.items()):
            with suppress(KeyError, TypeError, AttributeError):  # of what is not written here
                content |= self._beside(before, content)
        write_json(path, content)
        return path

    def _beside(self, before: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
        """What is written of all ways: `now`, and `before` of those that were not asked for now."""
        kept = [way for way in WAYS if way in before["chosen"] and way not in self.chosen]
        return {
            "chosen": {**{way: before["chosen"][way] for way in kept}, **now["chosen"]},
            "trials": [*(trial for trial in before["trials"] if trial["evaluation"] in kept), *now["trials"]],
            "notes": [*(note for note in before["notes"] if note.partition(":")[0] in kept), *now["notes"]],
        }


def adapt(run: Run, grid: Grid, conditions: Conditions, reporter: Reporter) -> Adaptation:
    """Try a grid of settings on the validation split, whatever split the conditions name.

    The cache beside a dynamic evaluation is chosen for itself, at the dynamic settings that are best alone. Raises
    `ParnasError` for changes that it does not read, and where no trial of a way gives a finite loss.
    """
    for key in conditions.changes:
        if key in SOUGHT:
            name = SOUGHT[key][1]
            raise ParnasError(f"{key} is what adapt looks for; give what it is to try as {name} (--{name}).")
        if key in UNREAD:
            raise ParnasError(f"{key} has no effect: {UNREAD[key]}.")
        if any(key.startswith(f"evaluation.{way}.") for way in set(WAYS) - set(grid.ways)):
            raise ParnasError(f"{key} has no effect on what is asked for (--ways {','.join(grid.ways)}); leave it out.")
    entry = open_entries([run.folder], conditions)[0]
    refuse_idle(entry.loaded.config.evaluation.dynamic, conditions.changes)
    reader = OrderedReader(entry, entry.streams.tokens("valid")[: grid.tokens], reporter)
    cached = cache_trials(entry, grid) if "cache" in grid.ways else []
    plain, *trials = try_caches(reader, None, cached)
    if "dynamic" in grid.ways:
        found = list(try_dynamic(reader, grid))
        best = min(found, key=lambda trial: trial.loss)
        if not math.isfinite(best.loss):
            raise ParnasError("Dynamic evaluation diverged with every setting; give lower learning rates (--lr).")
        trials += found
        if cached:
            trials += try_caches(reader, best.way.dynamic, cached)[1:]
    measured = {**conditions_of(entry), "split": "valid", "tokens": len(reader.tokens)}
    adaptation = Adaptation(run, measured, plain, tuple(trials))
    if not all(math.isfinite(trial.loss) for trial in adaptation.chosen.values()):
        raise ParnasError("No cache gives a finite loss; give lower sharpnesses (--theta).")
    return Adaptation(run, measured, plain, tuple(trials), tuple(at_the_edge(adaptation.chosen, grid)))


def try_dynamic(reader: OrderedReader, grid: Grid) -> Iterator[Trial]:
    """Each learning rate with each decay; a note tells what each reaches."""
    usual = reader.entry.loaded.config.evaluation.dynamic
    for lr, decay in itertools.product(grid.lr, grid.decay):
        settings = DynamicConfig.model_validate({**usual.model_dump(), "lr": lr, "decay": decay})
        trial = Trial.of(Way(dynamic=settings), reader.read(f"lr {lr:g}, decay {decay:g}", settings)[0])
        reader.reporter.note(f"lr {lr:g}, decay {decay:g}: ppl {trial.total.perplexity:.2f}")
        yield trial


def cache_trials(entry: Entry, grid: Grid) -> list[list[CacheConfig]]:
    """For each theta the caches of each weight, which one reading serves."""
    size = entry.loaded.config.evaluation.cache.size or CACHE_SIZE
    return [[CacheConfig(size=size, theta=theta, weight=weight) for weight in grid.weight] for theta in grid.theta]


def try_caches(
    reader: OrderedReader, dynamic: DynamicConfig | None, caches: Sequence[Sequence[CacheConfig]]
) -> list[Trial]:
    """One reading without cache, and what each of the caches makes of it."""
    title = f"{reader.entry.name} on valid"
    scores = reader.read(title, dynamic, [of_theta[0] for of_theta in caches])
    trials = [Trial.of(Way(dynamic=dynamic), scores[0])]
    for of_theta, cached in zip(caches, scores[1:], strict=True):
        trials += [Trial.of(Way(dynamic=dynamic, cache=each), mix(scores[0], cached, each.weight)) for each in of_theta]
    return trials


def at_the_edge(chosen: Mapping[str, Trial], grid: Grid) -> Iterator[str]:
    """Which of the best settings have nothing tried beyond them."""
    for name, trial in chosen.items():
        values: dict[str, float | None] = {}
        if trial.way.dynamic:
            values |= {"lr": trial.way.dynamic.lr, "decay": trial.way.dynamic.decay}
        if trial.way.cache:
            values |= {"theta": trial.way.cache.theta, "weight": trial.way.cache.weight}
        for key, value in values.items():
            tried = getattr(grid, key)
            if value and len(tried) > 1 and value in (min(tried), max(tried)):  # nothing is below 0
                listed = ", ".join(f"{each:g}" for each in tried)
                yield f"{name}: the best {key}, {value:g}, is at the edge of what was tried ({listed}); widen --{key}"


def conditions_of(entry: Entry) -> dict[str, Any]:
    """On what the choice depends: the network, its weights and the lengths."""
    arch = str(entry.loaded.architecture.canonical())
    return {"arch": arch, "step": entry.loaded.step, "tgt_len": entry.tgt_len, **entry.reach._asdict()}


def adapted_ways(entry: Entry) -> tuple[list[Way], list[str]]:
    """The ways that `adapt` chose for a run, and what has changed since; raises `ParnasError` where it chose none."""
    content = entry.run.adapted()
    try:
        ways = [read_way(each) for each in content["chosen"].values()]
        now = conditions_of(entry)
        changed = [f"{key} {content[key]} then, {value} now" for key, value in now.items() if content[key] != value]
    except (KeyError, TypeError, AttributeError, ValidationError) as error:
        told = f"{' '.join(repr(error).split()):.80}"
        raise ParnasError(
            f"{entry.run.folder / ADAPTED} is not what parnas adapt wrote ({told}); give it again."
        ) from error
    if not ways or any(way.name == PLAIN for way in ways):
        raise ParnasError(f"{entry.run.folder / ADAPTED} names no way; give parnas adapt again.")
    notes = [f"{entry.name}: {ADAPTED} was chosen otherwise ({'; '.join(changed)})"] if changed else []
    return ways, notes
