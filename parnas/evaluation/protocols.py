"""Evaluation protocols: different ways to score a text with the same trained weights.

Plain (segment by segment, with memory), sliding window, dynamic evaluation, cache, and dynamic evaluation with cache.
"""

from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
from torch import Tensor

from parnas.config.schema import CacheConfig, DynamicConfig, EvaluationConfig
from parnas.errors import ParnasError
from parnas.evaluation.continuous_cache import ContinuousCache, mix
from parnas.evaluation.dynamic import dynamic_evaluation, gradient_rms
from parnas.evaluation.loading import EvalRun
from parnas.evaluation.scoring import score_sequentially, score_sliding
from parnas.runs.run import PLAIN
from parnas.training.progress import Loop, Reporter

_RMS_ONLY = ("evaluation.dynamic.epsilon", "evaluation.dynamic.batches")
"""Settings that have no effect unless `evaluation.dynamic.update` is `rms`."""


@dataclass(frozen=True)
class EvalProtocol:
    """An evaluation protocol and its settings; the plain protocol if all are `None`.

    Results of different protocols are not comparable.
    """

    stride: int | None = None
    dynamic: DynamicConfig | None = None
    cache: CacheConfig | None = None

    @property
    def name(self) -> str:
        """The name of the protocol: `plain`, `sliding`, `dynamic`, `cache` or `dynamic + cache`."""
        parts = {"sliding": self.stride, "dynamic": self.dynamic, "cache": self.cache}
        return " + ".join(part for part, settings in parts.items() if settings) or PLAIN

    @property
    def settings(self) -> str:
        """The settings as text, such as `lr 0.001, decay 0`."""
        settings: dict[str, object] = {"stride": self.stride} if self.stride else {}
        if self.dynamic:
            settings |= {"lr": self.dynamic.lr, "decay": self.dynamic.decay, "update": self.dynamic.update}
            settings |= {"epsilon": self.dynamic.epsilon} if self.dynamic.update == "rms" else {}
        if self.cache:
            settings |= {"size": self.cache.size, "theta": self.cache.theta, "weight": self.cache.weight}
        return ", ".join(
            f"{key} {f'{value:g}' if isinstance(value, float) else value}" for key, value in settings.items()
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the settings of dynamic evaluation and the cache under `dynamic` and `cache`, without unused ones."""
        sections = {"dynamic": self.dynamic, "cache": self.cache}
        return {key: section.model_dump() for key, section in sections.items() if section}


def configured_protocols(evaluation: EvaluationConfig) -> list[EvalProtocol]:
    """Return the protocols that the section `evaluation` enables besides the plain one, which is always used."""
    dynamic = evaluation.dynamic if evaluation.dynamic.lr is not None else None
    cache = evaluation.cache if evaluation.cache.size is not None else None
    protocols = [EvalProtocol(evaluation.stride), EvalProtocol(dynamic=dynamic), EvalProtocol(cache=cache)]
    if dynamic and cache:
        protocols.append(EvalProtocol(dynamic=dynamic, cache=cache))
    return [protocol for protocol in protocols if protocol.name != PLAIN]


def refuse_unused_rms_settings(dynamic: DynamicConfig, changed_keys: Iterable[str]) -> None:
    """Raise `ParnasError` if `changed_keys` has a setting of the update `rms`, but dynamic evaluation uses `sgd`."""
    if dynamic.update == "sgd" and (unused := [key for key in changed_keys if key in _RMS_ONLY]):
        raise ParnasError(
            f"{unused[0]} has no effect with evaluation.dynamic.update=sgd; leave it out, or give "
            "evaluation.dynamic.update=rms."
        )


def score_protocols(
    run: EvalRun, split: str, protocols: Sequence[EvalProtocol], reporter: Reporter
) -> Iterator[tuple[EvalProtocol, Tensor]]:
    """Score a split by each protocol; yield the protocol and the loss of each token in nats, [N].

    Sliding protocols come first. All other protocols read the text from the first to the last token; those with equal
    settings of dynamic evaluation share one pass over the text. The trained weights are restored after each pass.
    """
    tokens = run.streams.tokens(split)
    for protocol in protocols:
        if protocol.stride:
            reporter.note(f"scoring {run.name} on {split}, {protocol.name}")
            eos_id = run.streams.tokenizer.eos_id
            yield protocol, score_sliding(run.network, tokens, eos_id, run.device, run.shape, protocol.stride)
    sequential = sorted((each for each in protocols if not each.stride), key=lambda each: each.dynamic is not None)
    for dynamic, group in groupby(sequential, lambda protocol: protocol.dynamic):
        members = list(group)
        caches = [protocol.cache for protocol in members if protocol.cache]
        nats, *cached = SequentialReader(run, tokens, reporter).read(f"{run.name} on {split}", dynamic, caches)
        for protocol in members:
            yield protocol, mix(nats, cached.pop(0), protocol.cache.weight) if protocol.cache else nats


class SequentialReader:
    """Scores a text of one run from first to last token, once per call of `read`, with the settings of the call.

    The root mean squares of the training gradients, which dynamic evaluation needs, are computed once and kept.
    """

    def __init__(self, run: EvalRun, tokens: np.ndarray, reporter: Reporter) -> None:
        self.run, self.tokens, self.reporter = run, tokens, reporter
        self._rms: dict[int, list[Tensor]] = {}  # by number of training batches

    def read(self, title: str, dynamic: DynamicConfig | None, caches: Sequence[CacheConfig] = ()) -> Tensor:
        """Score the text once, with dynamic evaluation unless `dynamic` is `None`.

        Return [1 + caches, N]: in the first row the network's loss of each token in nats, in each further row the
        log-probability of each token in one cache; see `score_sequentially`. `title` is shown with the progress.
        """
        run, rms = self.run, self._gradient_rms(dynamic)
        kind = "dynamic evaluation" if dynamic else "sequential evaluation"
        self.reporter.start(Loop(f"{kind} of {title}", 0, -(-len(self.tokens) // run.shape.tgt_len), "segments"))
        try:
            with nullcontext() if dynamic is None else dynamic_evaluation(run.network, dynamic, rms) as update:
                return score_sequentially(
                    run.network,
                    self.tokens,
                    run.streams.tokenizer.eos_id,
                    run.device,
                    tgt_len=run.shape.tgt_len,
                    reach=run.shape.reach,
                    update=update,
                    caches=[ContinuousCache(cache.size or 1, cache.theta) for cache in caches],
                    advance=self.reporter.advance,
                )
        finally:
            self.reporter.stop()

    def _gradient_rms(self, dynamic: DynamicConfig | None) -> list[Tensor]:
        """Return the run's `gradient_rms`, computed at the first call; empty if `dynamic` is `None` or uses `sgd`."""
        if dynamic is None or dynamic.update == "sgd":
            return []
        if dynamic.batches not in self._rms:
            self.reporter.note(f"measuring gradients of {self.run.name} on {dynamic.batches} training batches")
            self._rms[dynamic.batches] = gradient_rms(
                self.run.network,
                self.run.streams.tokens("train"),
                self.run.device,
                self.run.shape._replace(batch_size=self.run.loaded.config.data.batch_size),
                dynamic.batches,
            )
        return self._rms[dynamic.batches]
