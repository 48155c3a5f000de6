"""Perplexity as a function of how far back attention looks, and from where on more does not help."""

from collections.abc import Iterator, Sequence

import pandas as pd

from parnas.evaluation.entries import Entry
from parnas.sections import Reach
from parnas.training.perplexity import TotalLoss
from parnas.training.reporter import Reporter

STEPS = 0.0, 0.25, 0.5, 1.0, 2.0, 4.0
"""Lengths that are tried, as multiples of the usual one."""
ENOUGH = 0.01
"""Effective is the least length from which on more lowers the perplexity by less than this share."""


def perplexity_by_memory(entries: Sequence[Entry], split: str, reporter: Reporter) -> pd.DataFrame:
    """For each run: the perplexity of the split with memory of several lengths, shorter and longer than usual.

    Networks with compressed memory are read once with plain memory varied, once with compressed memory. `sees` is the
    positions of both, `tokens` the tokens that they stand for in one block. `gain` is the share by which the perplexity
    is lower than with the length before, `gain_per_position` the same divided by the positions added.
    """
    rows = []
    for entry in entries:
        for varied, reaches in ladders(entry):
            before: dict[str, float] | None = None
            for reach in reaches:
                reporter.note(f"scoring {entry.name} on {split} with {varied} {getattr(reach, varied)}")
                row = {
                    "sees": reach.mem_len,
                    "tokens": reach.mem_len,
                    "ppl": TotalLoss.of(entry.score(split, reach)).perplexity,
                }
                if entry.network.compresses():
                    row["sees"] += reach.cmem_len
                    row["tokens"] += entry.loaded.config.model.memory.ratio * reach.cmem_len
                gain = None if before is None else 1 - row["ppl"] / before["ppl"]
                added = 1 if before is None else row["sees"] - before["sees"]
                told = {"run": entry.name, "varied": varied, "length": getattr(reach, varied)}
                per_position = None if gain is None else gain / added
                rows.append({**told, **row, "gain": gain, "gain_per_position": per_position})
                before = row
    return pd.DataFrame(rows)


def ladders(entry: Entry) -> Iterator[tuple[str, list[Reach]]]:
    """What is varied, and the reaches to be tried, the shortest first."""
    for varied in ("mem_len", "cmem_len") if entry.network.compresses() else ("mem_len",):
        usual = getattr(entry.reach, varied) or entry.tgt_len
        least = 1 if varied == "mem_len" and entry.reach.same_length else 0
        lengths = sorted({max(least, round(step * usual)) for step in STEPS})
        if varied == "mem_len":
            yield varied, [entry.reach._replace(mem_len=length) for length in lengths]
        else:
            yield varied, [entry.reach._replace(cmem_len=length) for length in lengths]


def effective_lengths(table: pd.DataFrame) -> list[str]:
    """In a sentence for each run: from which length on more does not help."""
    notes = []
    for _, of in table.groupby(["run", "varied"], sort=False):
        best = of.sort_values("ppl").iloc[0]
        enough = of[of["ppl"] <= best["ppl"] / (1 - ENOUGH)].iloc[0]
        notes.append(
            f"{best['run']}: {best['varied']} {enough['length']:.0f} is enough to be within {ENOUGH:.0%} of the best "
            f"perplexity, {best['ppl']:.2f} with {best['length']:.0f}"
        )
    return notes
