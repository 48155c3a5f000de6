"""The analyses of `parnas evaluate --analyse`: attention by age, perplexity by word frequency and by memory length."""

from collections.abc import Iterator, Sequence
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
"""Memory lengths to score with, as multiples of the memory length that the evaluation is configured with."""
_TOLERANCE = 0.01
"""The effective memory length is the shortest whose perplexity exceeds the lowest by at most about this fraction."""


_TITLES = {
    "attention": "attention by age",
    "frequency": "perplexity per word by occurrences in training",
    "memory": "perplexity per token by memory",
}
"""The analyses by name, with the title of each table."""


class Analysis(NamedTuple):
    """The result of one analysis: a table with rows for all analysed runs, its title, and notes on the table."""

    name: str
    title: str
    table: pd.DataFrame
    notes: tuple[str, ...] = ()


def read_names(listed: str) -> list[str]:
    """Return the names of analyses in a comma-separated list, without repetitions.

    Raises `ParnasError` for an unknown name or an empty list.
    """
    names = [name.strip() for name in listed.split(",") if name.strip()]
    allowed = f"give some of {', '.join(_TITLES)}, with commas between"
    if unknown := [name for name in names if name not in _TITLES]:
        raise ParnasError(f"There is no analysis {unknown[0]!r} (--analyse); {allowed}.")
    if not names:
        raise ParnasError(f"--analyse is empty; {allowed}.")
    return list(dict.fromkeys(names))


def analyse(
    folders: Sequence[Path], options: EvalOptions, names: Sequence[str], reporter: Reporter
) -> Iterator[Analysis]:
    """Load the runs in `folders` and yield the result of each analysis in `names`, with rows of all runs.

    Raises `ParnasError` if attention is to be analysed and no network has attention.
    """
    runs = open_runs(folders, options)
    split = runs[0].loaded.config.evaluation.split
    for name in names:
        reporter.note(f"measuring {_TITLES[name]} on {split}")
        notes: tuple[str, ...] = ()
        if name == "attention":
            table, notes = attention_by_age(runs, split), ("weights are shares of a block's attention",)
            if table.empty:
                raise ParnasError(
                    "None of the networks has attention layers without a window; leave attention out of --analyse."
                )
        elif name == "frequency":
            table = perplexity_by_frequency(runs, split)
        else:
            table = perplexity_by_memory(runs, split, reporter)
            notes = tuple(effective_lengths(table))
        yield Analysis(name, _TITLES[name], table, notes)


def perplexity_by_memory(runs: Sequence[EvalRun], split: str, reporter: Reporter) -> pd.DataFrame:
    """Return a table of the perplexity of each run with several memory lengths, shorter and longer than configured.

    `mem_len` is varied for each run, and `cmem_len` for networks with compressed memory. Each row is one run scored
    with one length. Columns:

    * `run`; `varied`: `mem_len` or `cmem_len`; `length`: the value of this length
    * `sees`: the number of positions of memory and compressed memory together; `tokens`: the number of tokens that
      these positions represent
    * `ppl`: the perplexity per token; `gain`: the fraction by which `ppl` is lower than with the next shorter length;
      `gain_per_position`: `gain` divided by the number of added positions. Both gains are nan for the shortest length.
    """
    rows = []
    for run in runs:
        compresses, ratio = run.network.compresses(), run.loaded.config.model.memory.ratio
        for varied in ("mem_len", "cmem_len") if compresses else ("mem_len",):
            for length in _memory_lengths(run, varied):
                reporter.note(f"scoring {run.name} on {split} with {varied} {length}")
                reach = Reach(**(run.shape.reach._asdict() | {varied: length}))
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
    """Return the values of `varied` (`mem_len` or `cmem_len`) with which a run is scored, in increasing order."""
    own = getattr(run.shape.reach, varied) or run.shape.tgt_len
    shortest = 1 if varied == "mem_len" and run.shape.reach.same_length else 0
    return sorted({max(shortest, round(factor * own)) for factor in _FACTORS})


def effective_lengths(table: pd.DataFrame) -> list[str]:
    """Return a sentence for each run and varied length: the shortest length within 1 % of the lowest perplexity.

    `table` comes from `perplexity_by_memory`; `_TOLERANCE` is the 1 %.
    """
    notes = []
    for _, rows in table[table["ppl"].notna()].groupby(["run", "varied"], sort=False):
        best = rows.sort_values("ppl").iloc[0]
        enough = rows[rows["ppl"] <= best["ppl"] / (1 - _TOLERANCE)].iloc[0]
        notes.append(
            f"{best['run']}: {best['varied']} {enough['length']:.0f} is enough to be within {_TOLERANCE:.0%} of the "
            f"best perplexity, {best['ppl']:.2f} with {best['length']:.0f}"
        )
    return notes
