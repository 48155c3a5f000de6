"""One table for any number of runs: what they reach, and what they cost."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from parnas.errors import NotCounted, ParnasError
from parnas.evaluation.adapt import adapted_ways
from parnas.evaluation.entries import Conditions, Entry, open_entries, several_tokenizers
from parnas.evaluation.ways import Way, configured_ways, refuse_idle, score_ways
from parnas.files import to_json, write_text
from parnas.model.supernet import SuperNet
from parnas.run import METRICS, PLAIN, Run
from parnas.sections import EvaluationConfig
from parnas.training.latency import Candidate, Latency, Shape, measure_latencies
from parnas.training.perplexity import TotalLoss
from parnas.training.reporter import Reporter


@dataclass(frozen=True)
class Comparison:
    """The table, one row per run and way of scoring it, and what must be known to read it."""

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
    split = entries[0].loaded.config.evaluation.split
    notes, ways = [], {}
    for entry in entries:  # before anything is measured
        ways[entry.name], told = ways_of(entry, conditions)
        notes += told + [f"{entry.name}: {each}" for each in cautions(entry, split, ways[entry.name], conditions)]
    notes = [
        f"split {split}; words include the line ends, since they are predicted",
        "latency: scoring one segment of one row with full memory, networks taking turns, median and 95 %",
        *notes,
    ]
    rows = []
    for entry in entries:
        rows += rows_of(entry, split, ways[entry.name], reporter)
    latencies = measure_in_turns(entries)
    for row in rows:
        if row["evaluation"] == PLAIN:
            row |= {"latency_ms": latencies[row["run"]].median, "latency_p95_ms": latencies[row["run"]].p95}
    notes += [
        f"{row['run']}: {row['evaluation']} gives no finite loss" for row in rows if not math.isfinite(row["ppl"])
    ]
    table = pd.DataFrame(rows).astype({"multiply_adds_per_token": "Int64"})  # whole, though some rows have none
    if any(ways.values()):
        notes.append("each way of evaluation is a measure of its own: compare rows of one way alone")
    else:
        table = table.drop(columns=["settings"])
    if several_tokenizers(entries):
        table = table.drop(columns=["ppl", "tokens"])
        notes.append("the runs have different tokenizers, so perplexities per token are left out")
    places = {entry.name: entry.run.folder for entry in entries}
    return Comparison(table, tuple(notes), split, tuple(places[row["run"]] for row in rows), conditions)


def ways_of(entry: Entry, conditions: Conditions) -> tuple[list[Way], list[str]]:
    """In which ways a run is scored besides the plain one, and notes on them.

    Raises `ParnasError` for settings that were given for the comparison and that none of its ways reads.
    """
    configured = configured_ways(entry.loaded.config.evaluation)
    refuse_unread(entry.loaded.config.evaluation, conditions)
    if not conditions.adapted:
        return configured, []
    chosen, notes = adapted_ways(entry)
    return [way for way in configured if way.stride] + chosen, notes


def refuse_unread(evaluation: EvaluationConfig, conditions: Conditions) -> None:
    """Raise where a setting was given of a way that is not asked for, or that `adapt` has chosen."""
    refuse_idle(evaluation.dynamic, conditions.changes)
    asked = {"lr": evaluation.dynamic.lr is not None, "size": evaluation.cache.size is not None}
    for key in conditions.changes:
        for switch, way in (("lr", "evaluation.dynamic"), ("size", "evaluation.cache")):
            if not f"{key}.".startswith(f"{way}."):
                continue
            if conditions.adapted:
                raise ParnasError(f"{key} is not read with adapted (--adapted), where adapt chose it; leave out one.")
            if not asked[switch] and key != f"{way}.{switch}":
                raise ParnasError(f"{key} has no effect without {way}.{switch}; give that too.")


def cautions(entry: Entry, split: str, ways: Sequence[Way], conditions: Conditions) -> Iterator[str]:
    """What is told of lengths that training did not have, and of settings that may have been chosen on a test text."""
    trained = entry.loaded.config.data.tgt_len, entry.loaded.config.model.reach
    before, now = ({"tgt_len": of[0], **of[1]._asdict()} for of in (trained, (entry.tgt_len, entry.reach)))
    if other := [f"{key} {now[key]} (trained with {before[key]})" for key in now if now[key] != before[key]]:
        yield f"read with {', '.join(other)}"
    if split == "test" and not conditions.adapted and any(way.dynamic or way.cache for way in ways):
        yield (
            "the settings were given by hand; parnas adapt chooses them on the validation split, and --adapted takes "
            "them, so that the test split is read once"
        )


def rows_of(entry: Entry, split: str, ways: Sequence[Way], reporter: Reporter) -> list[dict[str, Any]]:
    """The row of a run's plain evaluation, and one for each other way, without the costs, which are of the plain."""
    reporter.note(f"scoring {entry.name} on {split}")
    network, training = describe_network(entry), training_figures(entry)
    rows = [{**network, **figures_of(entry, entry.score(split), split), **training}]
    for way, nats in score_ways(entry, split, ways, reporter):
        own = {"evaluation": way.name, "settings": way.settings, "multiply_adds_per_token": None}
        rows.append({**network, **own, **figures_of(entry, nats, split), **training})
    return rows


def describe_kind(entry: Entry) -> str:
    """SuperNet, the network that a search derived with the SuperNet's weights, or one trained by itself."""
    if isinstance(entry.network, SuperNet):
        return "SuperNet"
    return "derived, in SuperNet" if isinstance(entry.loaded.model, SuperNet) else "discrete"


def describe_network(entry: Entry) -> dict[str, Any]:
    """What a run's network is, and what it costs by count."""
    network = entry.network
    total = sum(parameter.numel() for parameter in network.parameters())
    counts, multiply_adds = entry.streams.train_counts().tolist(), None
    with suppress(NotCounted):
        multiply_adds = round(network.multiply_adds(entry.tgt_len, entry.reach, counts))
    return {
        "run": entry.name,
        "network": describe_kind(entry),
        "arch": str(entry.loaded.architecture),
        "evaluation": PLAIN,
        "settings": "",
        "parameters": total,
        "without_embeddings": total - network.embedding_parameters(),
        "multiply_adds_per_token": multiply_adds,
        "tgt_len": entry.tgt_len,
        "mem_len": entry.reach.mem_len,
        "cmem_len": entry.reach.cmem_len if network.compresses() else 0,
        "precision": entry.device.precision,
    }


def figures_of(entry: Entry, nats: Tensor, split: str) -> dict[str, Any]:
    """Perplexities of a run by the nats of each token of a split [N], with what they divide by."""
    figures = TotalLoss.of(nats).describe(entry.streams.header.splits[split])
    return {key: figures[key] for key in ("ppl", "word_ppl", "bits_per_byte", "tokens", "words", "bytes")}


def training_figures(entry: Entry) -> dict[str, Any]:
    """Steps, epochs and seconds of a run's training, and its median rate in tokens per second.

    Raises `ParnasError` where the run's files do not tell.
    """
    try:
        figures = {"train_tokens_per_s": median_rate(entry.run)}
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


def median_rate(run: Run) -> float:
    """Tokens per second of a run's training, the median of its lines; nan where there are none."""
    rates = [float(line["tokens_per_s"]) for line in run.records(METRICS) if line["split"] == "train"]
    return float(np.median(rates)) if rates else math.nan


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
