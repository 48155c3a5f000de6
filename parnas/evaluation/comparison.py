"""One table for any number of runs: what they reach, and what they cost."""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from parnas.errors import ParnasError
from parnas.evaluation.entries import Conditions, Entry, open_entries, several_tokenizers, split_of
from parnas.files import to_json, write_text
from parnas.model.supernet import SuperNet
from parnas.run import METRICS
from parnas.training.latency import Candidate, Latency, Shape, measure_latencies
from parnas.training.perplexity import TotalLoss
from parnas.training.reporter import Reporter


@dataclass(frozen=True)
class Comparison:
    """The table, one row per run, and what must be known to read it."""

    table: pd.DataFrame
    notes: tuple[str, ...]
    split: str
    folders: tuple[Path, ...]  # of the runs, row by row
    conditions: Conditions  # as they were asked for

    def to_dict(self) -> dict[str, Any]:
        """Rows and notes, as plain values."""
        return {"rows": to_rows(self.table), "notes": list(self.notes)}

    def write(self, folder: Path) -> list[Path]:
        """Write comparison.csv, .md and .json into `folder`; the last one also tells the run folders and conditions."""
        notes = "".join(f"\n* {note}" for note in self.notes)
        texts = {
            "csv": self.table.to_csv(index=False),
            "md": f"{self.table.round(4).to_markdown(index=False, floatfmt=',', intfmt=',')}\n{notes}\n",
            "json": to_json(self._rows_seen_from(folder), indent=2) + "\n",
        }
        paths = [folder / f"comparison.{ending}" for ending in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            write_text(path, text)
        return paths

    def _rows_seen_from(self, folder: Path) -> list[dict[str, Any]]:
        """The rows with what a report needs: how they were measured, and paths that hold where both move together."""
        home = os.path.realpath(folder)
        return [
            {
                **row,
                "split": self.split,
                "folder": _relative(os.path.realpath(run), home),
                "conditions": self.conditions.given(),
            }
            for row, run in zip(to_rows(self.table), self.folders, strict=True)
        ]


def _relative(path: str, start: str) -> str:
    """A path as seen from a folder, or as it is where no way leads there: on another drive."""
    try:
        return Path(os.path.relpath(path, start)).as_posix()
    except ValueError:
        return path


def to_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a table as plain values; none where there is no number."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records"))
    return rows


def compare(folders: Sequence[Path], conditions: Conditions, reporter: Reporter) -> Comparison:
    """Measure all runs on one split and machine; raises `ParnasError` for runs that cannot be compared.

    Perplexities per token appear only where all runs share one tokenizer; runs of different tokenizers must lose the
    same information, since a text that lost more is easier to predict.
    """
    entries = open_entries(folders, conditions)
    split = split_of(entries, conditions)
    notes = [
        f"split {split}; words include the line ends, since they are predicted",
        "latency: scoring one segment of one row with full memory, networks taking turns, median and 95 %",
    ]
    rows = []
    for entry in entries:
        reporter.note(f"scoring {entry.name} on {split}")
        rows.append({**describe_network(entry), **score(entry, split), **training_figures(entry)})
    latencies = measure_in_turns(entries)
    for row, entry in zip(rows, entries, strict=True):
        row |= {"latency_ms": latencies[entry.name].median, "latency_p95_ms": latencies[entry.name].p95}
    table = pd.DataFrame(rows)
    if several_tokenizers(entries):
        table = table.drop(columns=["ppl", "tokens"])
        notes.append("the runs have different tokenizers, so perplexities per token are left out")
    return Comparison(table, tuple(notes), split, tuple(entry.run.folder for entry in entries), conditions)


def describe_kind(entry: Entry) -> str:
    """SuperNet, the network that a search derived with the SuperNet's weights, or one trained by itself."""
    if isinstance(entry.network, SuperNet):
        return "SuperNet"
    return "derived, in SuperNet" if isinstance(entry.loaded.model, SuperNet) else "discrete"


def describe_network(entry: Entry) -> dict[str, Any]:
    """What a run's network is, and what it costs by count."""
    network = entry.network
    total = sum(parameter.numel() for parameter in network.parameters())
    counts = entry.streams.train_counts().tolist()
    return {
        "run": entry.name,
        "network": describe_kind(entry),
        "arch": str(entry.loaded.architecture),
        "parameters": total,
        "without_embeddings": total - network.embedding_parameters(),
        "multiply_adds_per_token": round(network.multiply_adds(entry.tgt_len, entry.reach, counts)),
        "tgt_len": entry.tgt_len,
        "mem_len": entry.reach.mem_len,
        "cmem_len": entry.reach.cmem_len if network.compresses() else 0,
        "precision": entry.device.precision,
    }


def score(entry: Entry, split: str) -> dict[str, Any]:
    """Perplexities of a run on a split, with what they divide by."""
    loss = TotalLoss.of(entry.score(split))
    figures = loss.describe(entry.streams.header.splits[split])
    return {key: figures[key] for key in ("ppl", "word_ppl", "bits_per_byte", "tokens", "words", "bytes")}


def training_figures(entry: Entry) -> dict[str, Any]:
    """Steps, epochs and seconds of a run's training, and its median rate in tokens per second.

    Raises `ParnasError` where the run's files do not tell.
    """
    try:
        rates = [float(line["tokens_per_s"]) for line in entry.run.records(METRICS) if line["split"] == "train"]
        figures = {"train_tokens_per_s": float(np.median(rates)) if rates else float("nan")}
        if entry.run.finished():
            summary, config = entry.run.summary(), entry.loaded.config
            steps, seconds = int(summary["steps"]), float(summary["seconds"])
            share = 1 - config.search.alpha_share if summary["kind"] == "search" else 1
            read = steps * config.data.batch_size * config.data.tgt_len
            epochs = read / (share * entry.streams.header.splits["train"].tokens)
            figures |= {"steps": steps, "epochs": round(epochs, 2), "train_seconds": seconds}
    except (KeyError, TypeError, ValueError) as error:
        raise ParnasError(
            f"{entry.run.folder} has a {METRICS} or summary.json that no training wrote ({error!r:.80}); restore it."
        ) from error
    return figures


def measure_in_turns(entries: Sequence[Entry]) -> dict[str, Latency]:
    """Latency per segment of each run by name, each with its own lengths; those of a device take turns."""
    return measure_latencies(
        {
            entry.name: (
                Candidate(entry.network, entry.streams.tokens("valid")),
                Shape(1, entry.tgt_len, entry.reach),
                entry.device,
            )
            for entry in entries
        }
    )
