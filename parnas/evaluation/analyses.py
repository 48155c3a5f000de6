"""The analyses of `parnas evaluate --analyse`: attention by age, perplexity by word frequency and by memory length."""

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
"""Memory lengths to try, as multiples of the memory length that the run is evaluated with."""
_TOLERANCE = 0.01
"""The effective length is the shortest memory length whose perplexity is within 1 % of the best."""


class Analysis(NamedTuple):
    """The result of one analysis of the runs under comparison: a table with its title and notes."""

    name: str
    title: str
    table: pd.DataFrame
    notes: tuple[str, ...] = ()


def _analyse_attention(runs: Sequence[EvalRun], split: str, reporter: Reporter) -> Analysis:
    """Return the table of the attention weight that goes to older and to newer positions; see `attention_by_age`.

    Raises `ParnasError` if no network has attention.
    """
    reporter.note(f"reading {split} for the weights of attention")
    table = attention_by_age(runs, split)
    if table.empty:
        raise ParnasError("None of the networks has attention layers; leave attention out of --analyse.")
    return Analysis("attention", "attention by age", table, ("shares of all attention; ages are in the picture",))


def _analyse_frequency(runs: Sequence[EvalRun], split: str, reporter: Reporter) -> Analysis:
    """Return the table of perplexity by a word's frequency in the training text; see `perplexity_by_frequency`."""
    reporter.note(f"scoring {split} by word frequency")
    return Analysis("frequency", "perplexity per word by occurrences in training", perplexity_by_frequency(runs, split))


def _analyse_memory(runs: Sequence[EvalRun], split: str, reporter: Reporter) -> Analysis:
    """Return the table of perplexity by memory length, with the effective lengths as notes."""
    table = perplexity_by_memory(runs, split, reporter)
    return Analysis("memory", "perplexity per token by memory", table, tuple(effective_lengths(table)))


_ANALYSES: dict[str, Callable[[Sequence[EvalRun], str, Reporter], Analysis]] = {
    "attention": _analyse_attention,
    "frequency": _analyse_frequency,
    "memory": _analyse_memory,
}


def read_names(listed: str) -> list[str]:
    """Return the distinct names in a comma-separated list of analyses.

    Raises `ParnasError` for an unknown name or an empty list.
    """
    names = [name.strip() for name in listed.split(",") if name.strip()]
    allowed = f"give some of {', '.join(_ANALYSES)}, with commas between"
    if unknown := [name for name in names if name not in _ANALYSES]:
        raise ParnasError(f"--analyse names {unknown[0]!r}, which is no analysis; {allowed}.")
    if not names:
        raise ParnasError(f"--analyse is empty; {allowed}.")
    return list(dict.fromkeys(names))


def analyse(
    folders: Sequence[Path], options: EvalOptions, names: Sequence[str], reporter: Reporter
) -> Iterator[Analysis]:
    """Load the runs in `folders` and yield each of the named analyses, which has rows of all runs."""
    runs = open_runs(folders, options)
    for name in names:
        yield _ANALYSES[name](runs, runs[0].loaded.config.evaluation.split, reporter)


def perplexity_by_memory(runs: Sequence[EvalRun], split: str, reporter: Reporter) -> pd.DataFrame:
    """Return the perplexity of each run with several memory lengths, shorter and longer than the configured length.

    Each row is one run scored with one length. Columns:

    * `run`; `varied`: the length that varies, `mem_len`, or `cmem_len` too for networks with compressed memory;
      `length`: its value
    * `sees`: the positions of memory and compressed memory together; `tokens`: how many tokens these represent
    * `ppl`: the perplexity per token; `gain`: the fraction by which it is lower than with the next shorter length;
      `gain_per_position`: `gain` divided by the number of added positions. Both gains are nan for the shortest length.
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
    """Return the values to try for a length, the shortest first; `varied` is `mem_len` or `cmem_len`."""
    own = getattr(run.reach, varied) or run.tgt_len
    shortest = 1 if varied == "mem_len" and run.reach.same_length else 0
    return sorted({max(shortest, round(factor * own)) for factor in _FACTORS})


def effective_lengths(table: pd.DataFrame) -> list[str]:
    """Return a sentence for each run and kind of memory: the shortest length whose perplexity is almost the best.

    `table` comes from `perplexity_by_memory`. "Almost" means within 1 % (`_TOLERANCE`).
    """
    notes = []
    for _, rows in table.groupby(["run", "varied"], sort=False):
        best = rows.sort_values("ppl").iloc[0]
        enough = rows[rows["ppl"] <= best["ppl"] / (1 - _TOLERANCE)].iloc[0]
        notes.append(
            f"{best['run']}: {best['varied']} {enough['length']:.0f} is enough to be within {_TOLERANCE:.0%} of the "
            f"best perplexity, {best['ppl']:.2f} with {best['length']:.0f}"
        )
    return notes
