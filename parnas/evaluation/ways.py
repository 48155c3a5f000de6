"""The ways of scoring a text that `evaluate` has: plain, sliding, dynamic, by a cache, and dynamic with a cache."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from torch import Tensor

from parnas.errors import ParnasError
from parnas.evaluation.cache import ContinuousCache, mix
from parnas.evaluation.dynamic import adapting, gradient_rms
from parnas.evaluation.entries import Entry
from parnas.evaluation.in_order import score_in_order
from parnas.evaluation.sliding import score_sliding
from parnas.run import PLAIN
from parnas.sections import CacheConfig, DynamicConfig, EvaluationConfig
from parnas.training.reporter import Loop, Reporter

OF_RMS = ("evaluation.dynamic.epsilon", "evaluation.dynamic.batches")
"""What the update `sgd` does not read."""


@dataclass(frozen=True)
class Way:
    """How a text is scored. Figures of different ways are not compared with each other."""

    stride: int | None = None
    dynamic: DynamicConfig | None = None
    cache: CacheConfig | None = None

    @property
    def name(self) -> str:
        """plain, sliding, dynamic, cache or dynamic + cache."""
        parts = {"sliding": self.stride, "dynamic": self.dynamic, "cache": self.cache}
        return " + ".join(part for part, given in parts.items() if given) or PLAIN

    @property
    def settings(self) -> str:
        """What the way was asked for, in words."""
        told: dict[str, object] = {"stride": self.stride} if self.stride else {}
        if self.dynamic:
            told |= {"lr": self.dynamic.lr, "decay": self.dynamic.decay, "update": self.dynamic.update}
            told |= {"epsilon": self.dynamic.epsilon} if self.dynamic.update == "rms" else {}
        if self.cache:
            told |= {"size": self.cache.size, "theta": self.cache.theta, "weight": self.cache.weight}
        return ", ".join(f"{key} {f'{value:g}' if isinstance(value, float) else value}" for key, value in told.items())


def configured_ways(evaluation: EvaluationConfig) -> list[Way]:
    """Those that a configuration asks for besides the plain one."""
    dynamic = evaluation.dynamic if evaluation.dynamic.lr is not None else None
    cache = evaluation.cache if evaluation.cache.size is not None else None
    ways = [Way(evaluation.stride), Way(dynamic=dynamic), Way(cache=cache)]
    if dynamic and cache:
        ways.append(Way(dynamic=dynamic, cache=cache))
    return [way for way in ways if way.name != PLAIN]


def refuse_idle(dynamic: DynamicConfig, changes: Iterable[str]) -> None:
    """Raise `ParnasError` where one of the changed settings has no effect on the update that is asked for."""
    if dynamic.update == "sgd" and (idle := [key for key in changes if key in OF_RMS]):
        raise ParnasError(f"{idle[0]} has no effect on evaluation.dynamic.update=sgd; leave out one.")


def score_ways(entry: Entry, split: str, ways: Sequence[Way], reporter: Reporter) -> Iterator[tuple[Way, Tensor]]:
    """Nats of each token of a split [N] in each way, sliding ones first; the network is left as it was."""
    tokens = entry.streams.tokens(split)
    for way in ways:
        if way.stride:
            reporter.note(f"scoring {entry.name} on {split}, {way.name}")
            nats = score_sliding(
                entry.network,
                tokens,
                entry.streams.tokenizer.eos_id,
                entry.device,
                batch_size=entry.loaded.config.evaluation.batch_size,
                tgt_len=entry.tgt_len,
                reach=entry.reach,
                stride=way.stride,
            )
            yield way, nats
    ordered = sorted((way for way in ways if not way.stride), key=lambda way: way.dynamic is not None)
    for dynamic, together in groupby(ordered, lambda way: way.dynamic):
        of = list(together)
        caches = [each.cache for each in of if each.cache]
        yield from mixed(of, OrderedReader(entry, tokens, reporter).read(f"{entry.name} on {split}", dynamic, caches))


def mixed(ways: Sequence[Way], scores: Tensor) -> Iterator[tuple[Way, Tensor]]:
    """Nats of each way, of the network's and below them each cache's scores [1 + caches, N]."""
    cached = iter(scores[1:])
    for way in ways:
        yield way, mix(scores[0], next(cached), way.cache.weight) if way.cache else scores[0]


class OrderedReader:
    """Reads a text in order, as often as is asked for; gradients of training are looked at once."""

    def __init__(self, entry: Entry, tokens: np.ndarray, reporter: Reporter) -> None:
        self.entry, self.tokens, self.reporter = entry, tokens, reporter
        self._rms: dict[int, list[Tensor]] = {}

    def read(self, title: str, dynamic: DynamicConfig | None, caches: Sequence[CacheConfig] = ()) -> Tensor:
        """Nats of each token and the log-probabilities of each cache, [1 + caches, N]; see `score_in_order`."""
        entry, made = self.entry, [ContinuousCache(each.size or 1, each.theta) for each in caches]
        rms = self._gradient_rms(dynamic)
        kind = "dynamic evaluation" if dynamic else "evaluation in order"
        self.reporter.start(Loop(f"{kind} of {title}", 0, -(-len(self.tokens) // entry.tgt_len), "segments"))
        try:
            with nullcontext() if dynamic is None else adapting(entry.network, dynamic, rms) as learn:
                return score_in_order(
                    entry.network,
                    self.tokens,
                    entry.streams.tokenizer.eos_id,
                    entry.device,
                    tgt_len=entry.tgt_len,
                    reach=entry.reach,
                    learn=learn,
                    caches=made,
                    advance=self.reporter.advance,
                )
        finally:
            self.reporter.stop()

    def _gradient_rms(self, dynamic: DynamicConfig | None) -> list[Tensor]:
        """What `adapting` needs besides the settings."""
        if dynamic is None or dynamic.update == "sgd":
            return []
        if dynamic.batches not in self._rms:
            self.reporter.note(f"gradients of {self.entry.name} on {dynamic.batches} training batches")
            self._rms[dynamic.batches] = gradient_rms(
                self.entry.network,
                self.entry.streams.tokens("train"),
                self.entry.device,
                batch_size=self.entry.loaded.config.data.batch_size,
                tgt_len=self.entry.tgt_len,
                reach=self.entry.reach,
                batches=dynamic.batches,
            )
        return self._rms[dynamic.batches]


def as_section(way: Way) -> Mapping[str, object]:
    """A way as it stands in a file; read again by `read_way`."""
    sections = {"dynamic": way.dynamic, "cache": way.cache}
    return {key: section.model_dump() for key, section in sections.items() if section}


def read_way(content: Mapping[str, object]) -> Way:
    """A way from a file; raises pydantic's `ValidationError` for what is none."""
    dynamic, cache = content.get("dynamic"), content.get("cache")
    return Way(
        dynamic=None if dynamic is None else DynamicConfig.model_validate(dynamic),
        cache=None if cache is None else CacheConfig.model_validate(cache),
    )
