"""What `parnas tune` shows on the terminal."""

import math

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from parnas.nas.tuned import TrialResult, Tuned

MOST_SHOWN = 5  # trials


def show_tuned(tuned: Tuned) -> None:
    """The best trials of different settings and the one as configured, how all ended, and what mattered."""
    table = Table(box=None, header_style="bold")
    for title in ("trial", "loss", "ppl/token", *(escape(key.rpartition(".")[2]) for key in tuned.space)):
        table.add_column(title, justify="right", overflow="fold")
    first = tuned.configured
    complete = sorted((each for each in tuned.trials if each.state == "complete"), key=lambda each: each.loss or 0.0)
    settings = [each.settings for each in complete]
    if first not in complete:
        told = "" if first is None else f"; as configured: {first.state}"
        first = None
    else:
        told = "; *: as configured"
    distinct = [each for place, each in enumerate(complete) if each.settings not in settings[:place]]
    for each in [*distinct[:MOST_SHOWN], *([first] if first in distinct[MOST_SHOWN:] else [])]:
        table.add_row(*trial_cells(each, first))
    Console().print(table)
    counts = ", ".join(f"{count} {state}" for state, count in tuned.counts().items() if count)
    print(f"{len(tuned.trials)} trials: {counts}{told}")
    if tuned.importance is not None:
        shares = ", ".join(f"{key} {share:.0%}" for key, share in tuned.importance.items())
        print(f"what the best ones have in common: {shares}")
    if tuned.best is None or tuned.best.loss is None:
        return
    gain = 0.0 if first is None or first.loss is None else first.loss - tuned.best.loss
    less = f", {gain:.4f} less than as configured" if gain > 0 else ""
    print(f"best: trial {tuned.best.number}, validation loss {tuned.best.loss:.4f} nats per token{less}")


def trial_cells(each: TrialResult, configured: TrialResult | None) -> list[str]:
    """A row of the table: number, loss, perplexity and settings."""
    loss = each.loss or 0.0
    values = [f"{value:.4g}" if isinstance(value, float) else escape(str(value)) for value in each.settings.values()]
    return [f"{'*' * (each == configured)}{each.number}", f"{loss:.4f}", f"{math.exp(min(loss, 700)):.2f}", *values]
