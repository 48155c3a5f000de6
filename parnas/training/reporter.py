"""What the training loop tells whoever watches it."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol


class Loop(NamedTuple):
    """What a reporter is told of a loop that begins."""

    title: str
    first_step: int
    steps: int
    unit: str = "steps"  # what these are called
    folder: Path | None = None  # the run folder of a training


class Reporter(Protocol):
    """Receives the progress of a command; the silent one below ignores it."""

    def start(self, loop: Loop) -> None:
        """A loop begins."""

    def advance(self, step: int) -> None:
        """So many steps are done, and what is logged of them is told."""

    def metrics(self, record: Mapping[str, Any]) -> None:
        """A line of `metrics.jsonl`."""

    def pi(self, space: Sequence[str], record: Mapping[str, Any]) -> None:
        """A line of `pi.jsonl`; its `pi` is [blocks][candidates of `space`]."""

    def note(self, text: str) -> None:
        """Something worth a line."""

    def stop(self) -> None:
        """The loop has ended, well or not."""


class Silent:
    """A reporter that says nothing."""

    def start(self, loop: Loop) -> None: ...

    def advance(self, step: int) -> None: ...

    def metrics(self, record: Mapping[str, Any]) -> None: ...

    def pi(self, space: Sequence[str], record: Mapping[str, Any]) -> None: ...

    def note(self, text: str) -> None: ...

    def stop(self) -> None: ...


FIGURES = {
    "argmax_ppl": "argmax ppl {:.2f}",
    "gap": "mixture behind argmax by {:.3f}",
    "bits_per_byte": "bits/byte {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
    "lr": "lr {:.1e}",
    "tau": "tau {:.3f}",
    "expected_cost": "cost {:.2f}",
    "entropy": "entropy {:.2f}",
    "identity_share": "identity {:.0%}",
    "argmax_changes": "argmax changed {} times",
}
"""What a line of metrics may have besides loss and perplexity, and how it is shown."""


def describe_metrics(record: Mapping[str, Any]) -> str:
    """A line of metrics in words."""
    parts = [f"{record['split']:<5} loss {record['loss']:.3f}  ppl {record['ppl']:.2f}"]
    return "  ".join(parts + [form.format(record[key]) for key, form in FIGURES.items() if key in record])
