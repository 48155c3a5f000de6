"""The analyses that `parnas evaluate --analyse` makes, each a table."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd

from parnas.errors import ParnasError
from parnas.evaluation.ages import attention_by_age
from parnas.evaluation.context import effective_lengths, perplexity_by_memory
from parnas.evaluation.entries import Conditions, Entry, open_entries
from parnas.evaluation.frequency import perplexity_by_frequency
from parnas.training.reporter import Reporter


class Analysis(NamedTuple):
    """A table, and what must be known to read it."""

    name: str
    title: str
    table: pd.DataFrame
    notes: tuple[str, ...] = ()


def analyse_attention(entries: Sequence[Entry], split: str, reporter: Reporter) -> Analysis:
    """Attention by age."""
    reporter.note(f"reading {split} for the weights of attention")
    table = attention_by_age(entries, split)
    if table.empty:
        raise ParnasError("None of the networks has attention: leave attention out of --analyse.")
    return Analysis("attention", "attention by age", table, ("shares of all attention; ages are in the picture",))


def analyse_frequency(entries: Sequence[Entry], split: str, reporter: Reporter) -> Analysis:
    """Perplexity per word by how often the word occurs in the training text."""
    reporter.note(f"scoring {split} by word frequency")
    return Analysis(
        "frequency", "perplexity per word by occurrences in training", perplexity_by_frequency(entries, split)
    )


def analyse_memory(entries: Sequence[Entry], split: str, reporter: Reporter) -> Analysis:
    """Perplexity by the length of memory."""
    table = perplexity_by_memory(entries, split, reporter)
    return Analysis("memory", "perplexity per token by memory", table, tuple(effective_lengths(table)))


ANALYSES: dict[str, Callable[[Sequence[Entry], str, Reporter], Analysis]] = {
    "attention": analyse_attention,
    "frequency": analyse_frequency,
    "memory": analyse_memory,
}


def read_names(listed: str) -> list[str]:
    """The analyses that a list with commas names; raises `ParnasError` for others."""
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if wrong := [name for name in names if name not in ANALYSES]:
        raise ParnasError(f"--analyse names {wrong[0]!r}; give some of {', '.join(ANALYSES)}, with commas between.")
    if not names:
        raise ParnasError(f"--analyse is empty; give some of {', '.join(ANALYSES)}, with commas between.")
    return list(dict.fromkeys(names))


def analyse(
    folders: Sequence[Path], conditions: Conditions, names: Sequence[str], reporter: Reporter
) -> Iterator[Analysis]:
    """The analyses of runs by name, one after the other."""
    entries = open_entries(folders, conditions)
    for name in names:
        yield ANALYSES[name](entries, entries[0].loaded.config.evaluation.split, reporter)
