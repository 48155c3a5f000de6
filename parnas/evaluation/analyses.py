"""The analyses of `parnas evaluate --analyse`, each a table: attention by age, word frequency, memory length."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from parnas.config.schema import Reach
from parnas.errors import ParnasError
from parnas.evaluation.attention import attention_by_age
from parnas.evaluation.frequency import perplexity_by_frequency
from parnas.evaluation.loading import EvalOptions, EvalRun, open_runs
from parnas.training.perplexity import TotalLoss
from parnas.training.progress import Reporter

__all__ = ["Analysis", "analyse", "read_names"]

_FACTORS = 0.0, 0.25, 0.5, 1.0, 2.0, 4.0
"""Memory lengths to try, as multiples of the run's own."""
_TOLERANCE = 0.01
"""The effective length is the shortest whose perplexity is within this share of the best."""


class Analysis(NamedTuple):
    """A table with its title and notes."""

    name: str
    title: str
    table: pd.DataFrame
    notes: tuple[str, ...] = ()


def _analyse_attention(runs: Sequence[EvalRun], split: str, reporter: Reporter) -> Analysis:
    """Tabulate the attention to older and newer positions."""
    reporter.note(f"reading {split} for the weights of attention")
    table = attention_by_age(runs, split)
    if table.empty:
        raise ParnasError("None of the networks has attention: leave attention out of --analyse.")
    return Analysis("attention", "attention by age", table, ("shares of all attention; ages are in the picture",))


def _analyse_frequency(runs: Sequence[EvalRun], split: str, reporter: Reporter) -> Analysis:
    """Tabulate the perplexity of words by their frequency in the training text."""
    reporter.note(f"scoring {split} by word frequency")
    return Analysis("frequency", "perplexity per word by occurrences in training", perplexity_by_frequency(runs, split))


def _analyse_memory(runs: Sequence[EvalRun], split: str, reporter: Reporter) -> Analysis:
    """Tabulate the perplexity by memory length."""
    table = perplexity_by_memory(runs, split, reporter)
    return Analysis("memory", "perplexity per token by memory", table, tuple(effective_lengths(table)))


_ANALYSES: dict[str, Callable[[Sequence[EvalRun], str, Reporter], Analysis]] = {
    "attention": _analyse_attention,
    "frequency": _analyse_frequency,
    "memory": _analyse_memory,
}


def read_names(listed: str) -> list[str]:
    """Return the analyses of a comma-separated list, each once; raises `ParnasError` for unknown ones."""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    allowed = f"give some of {', '.join(_ANALYSES)}, with commas between"
    if unknown := [name for name in names if name not in _ANALYSES]:
        raise ParnasError(f"--analyse names {unknown[0]!r}; {allowed}.")
    if not names:
        raise ParnasError(f"--analyse is empty; {allowed}.")
    return list(dict.fromkeys(names))


def analyse(
    folders: Sequence[Path], options: EvalOptions, names: Sequence[str], reporter: Reporter
) -> Iterator[Analysis]:
    """Yield the named analyses of the runs."""
    runs = open_runs(folders, options)
    for name in names:
        yield _ANALYSES[name](runs, runs[0].loaded.config.evaluation.split, reporter)


def perplexity_by_memory(runs: Sequence[EvalRun], split: str, reporter: Reporter) -> pd.DataFrame:
    """Return the perplexity of each run with memory of several lengths, shorter and longer than its own.

    A row holds `run`, `varied` (`mem_len`, or `cmem_len` for networks with compressed memory), its `length`, the
    perplexity per token `ppl`, the number of positions `sees` of both memories, and the number of `tokens` that these
    represent in one block. `gain` is the fraction by which `ppl` is lower than with the next shorter length,
    `gain_per_position` the same per added position; both are nan for the shortest length.
    """
    rows = []
    for run in runs:
        compresses, ratio = run.network.compresses(), run.loaded.config.model.memory.ratio
        for varied in ("mem_len", "cmem_len") if compresses else ("mem_len",):
            for length in _memory_lengths(run, varied):
                reporter.note(f"scoring {run.name} on {split} with {varied} {length}")
                reach = Reach(**(run.reach._asdict() | {varied: length}))
                compressed = reach.cmem_len if compresses else 0
                rows.append(
                    {
                        "run": run.name,
                        "varied": varied,
                        "length": length,
                        "sees": reach.mem_len + compressed,
                        "tokens": reach.mem_len + ratio * compressed,
                        "ppl": TotalLoss.of(run.score(split, reach)).perplexity,
                    }
                )
    table = pd.DataFrame(rows)
    groups = table.groupby(["run", "varied"], sort=False)
    table["gain"] = -groups["ppl"].pct_change()
    table["gain_per_position"] = table["gain"] / groups["sees"].diff()
    return table


def _memory_lengths(run: EvalRun, varied: str) -> list[int]:
    """Return the lengths of one kind of memory to try, the shortest first."""
    own = getattr(run.reach, varied) or run.tgt_len
    shortest = 1 if varied == "mem_len" and run.reach.same_length else 0
    return sorted({max(shortest, round(factor * own)) for factor in _FACTORS})


def effective_lengths(table: pd.DataFrame) -> list[str]:
    """Return a sentence for each run and kind of memory: the length beyond which perplexity hardly improves."""
    notes = []
    for _, rows in table.groupby(["run", "varied"], sort=False):
        best = rows.sort_values("ppl").iloc[0]
        enough = rows[rows["ppl"] <= best["ppl"] / (1 - _TOLERANCE)].iloc[0]
        notes.append(
            f"{best['run']}: {best['varied']} {enough['length']:.0f} is enough to be within {_TOLERANCE:.0%} of the "
            f"best perplexity, {best['ppl']:.2f} with {best['length']:.0f}"
        )
    return notes
