"""Comparison of runs: one table of perplexities and costs, measured on the same split and machine."""

import json
import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from parnas.config.schema import EvaluationConfig
from parnas.errors import ParnasError
from parnas.evaluation.loading import EvalOptions, EvalRun, open_runs, several_tokenizers
from parnas.evaluation.protocols import EvalProtocol, configured_protocols, refuse_unused_rms_settings, score_protocols
from parnas.evaluation.tune_eval import read_tuned_protocols
from parnas.model.supernet import SuperNet
from parnas.runs.files import to_json, write_text
from parnas.runs.records import ComparisonRow
from parnas.runs.run import PLAIN, Run, describe_weights
from parnas.training.latency import TimedNetwork, measure_latencies
from parnas.training.perplexity import TotalLoss
from parnas.training.progress import Reporter

__all__ = ["Comparison", "compare", "median_rate", "to_rows"]

_LOSS_METRICS = {"ppl", "word_ppl", "bits_per_byte", "tokens", "words", "bytes"}  # columns of the table


@dataclass(frozen=True)
class Comparison:
    """A table with one row per run and evaluation protocol, and notes on how the values were measured."""

    table: pd.DataFrame
    notes: tuple[str, ...]
    split: str
    folders: tuple[Path, ...]  # the run folder of each row
    options: EvalOptions  # from which the table was made

    def to_dict(self) -> dict[str, Any]:
        """Return the table's rows and the notes as plain values, under `rows` and `notes`."""
        return {"rows": to_rows(self.table), "notes": list(self.notes)}

    def write(self, folder: Path) -> list[Path]:
        """Write `comparison.csv`, `comparison.md` and `comparison.json` into `folder`, and return their paths.

        Each row of the JSON file also holds the split, the evaluation options and the run folder; see `_file_rows`.
        """
        notes = "".join(f"\n* {note}" for note in self.notes)
        texts = {
            "csv": self.table.to_csv(index=False),
            "md": f"{self.table.round(4).to_markdown(index=False, floatfmt=',', intfmt=',')}\n{notes}\n",
            "json": to_json(self._file_rows(folder), indent=2) + "\n",
        }
        paths = [folder / f"comparison.{ending}" for ending in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            write_text(path, text)
        return paths

    def _file_rows(self, folder: Path) -> list[dict[str, Any]]:
        """Return the rows of `comparison.json`: those of the table, with `folder`, `split` and `conditions` (options).

        `folder` is the path of the run folder relative to that of `comparison.json`, so that it stays valid if both
        folders are moved together.
        """
        shared = {"split": self.split, "conditions": self.options.to_dict()}
        relative = [os.path.relpath(run.resolve(), folder.resolve()).replace(os.sep, "/") for run in self.folders]
        return [{**row, "folder": run, **shared} for row, run in zip(to_rows(self.table), relative, strict=True)]


def to_rows(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Return the rows of a table as mappings of plain values by column; missing and infinite numbers become `None`."""
    rows: list[dict[str, Any]] = json.loads(table.to_json(orient="records"))
    return rows


def compare(folders: Sequence[Path], options: EvalOptions, reporter: Reporter) -> Comparison:
    """Measure the loss and the costs of all runs on one split, and return them as a table.

    The table has perplexities per token only if all runs have the same tokenizer. Tokenizers that differ must lose the
    same information (letter case, unknown words), since a text that has lost more is easier to predict.

    Raises:
        ParnasError: the runs cannot be compared (see `open_runs`), or one of the options has no effect.
    """
    runs = open_runs(folders, options)
    split = runs[0].loaded.config.evaluation.split
    if "evaluation.cmem_len" in dict(options.overrides()) and not any(run.network.compresses() for run in runs):
        raise ParnasError(
            "cmem_len (--cmem-len) has no effect, since no network has compressed memory (layers c); leave it out."
        )
    # 1. Choose the protocols of all runs, so that mistakes show before anything is measured.
    notes = [
        f"split {split}; words include the line ends, since they are predicted",
        "latency: median and 95th percentile of scoring one segment, batch size 1, full memory, networks alternating",
    ]
    protocols = {}
    for run in runs:
        protocols[run.name], changes = _choose_protocols(run, options)
        warnings = _list_warnings(run, split, protocols[run.name], options)
        notes += [f"{run.name}: {note}" for note in (*changes, *warnings)]
    # 2. Score each run by its protocols.
    rows = [row for run in runs for row in _make_rows(run, split, protocols[run.name], reporter)]
    # 3. Measure latency, alternating between the networks. Only rows of the plain protocol have costs.
    shapes = {run.name: run.shape._replace(batch_size=1) for run in runs}
    networks = {run.name: TimedNetwork(run.network, run.streams.tokens("valid")) for run in runs}
    latencies = measure_latencies({run.name: (networks[run.name], shapes[run.name], run.device) for run in runs})
    for number, row in enumerate(rows):
        if row.evaluation == PLAIN:
            median, p95 = latencies[row.run]
            rows[number] = row.model_copy(update={"latency_ms": median, "latency_p95_ms": p95})
    # 4. Make the table, without columns that have no values or are not comparable.
    diverged = (row for row in rows if not math.isfinite(row.ppl or math.nan))
    notes += [f"{row.run}: {row.evaluation} gives no finite loss" for row in diverged]
    table = pd.DataFrame([row.to_dict() for row in rows])
    # Columns of integers in which some are missing would otherwise be columns of floats.
    table = table.astype({name: "Int64" for name in ComparisonRow.integers() if name in table and table[name].hasnans})
    if any(protocols.values()):
        notes.append("results of different evaluation protocols are not comparable: compare rows of one protocol only")
    else:
        table = table.drop(columns=["settings"])
    if several_tokenizers(runs):
        table = table.drop(columns=["ppl", "tokens"])
        notes.append("the runs have different tokenizers, so perplexities per token are left out")
    run_folders = {run.name: run.source.folder for run in runs}
    return Comparison(table, tuple(notes), split, tuple(run_folders[row.run] for row in rows), options)


def _choose_protocols(run: EvalRun, options: EvalOptions) -> tuple[list[EvalProtocol], list[str]]:
    """Return the protocols, besides the plain one, that score a run, and notes on tuned settings that may be outdated.

    Raises `ParnasError` if an option has no effect.
    """
    evaluation = run.loaded.config.evaluation
    configured = configured_protocols(evaluation)
    _refuse_unread_settings(evaluation, options)
    if not options.tuned:
        return configured, []
    tuned, notes = read_tuned_protocols(run)
    return [protocol for protocol in configured if protocol.stride] + tuned, notes


def _refuse_unread_settings(evaluation: EvaluationConfig, options: EvalOptions) -> None:
    """Raise `ParnasError` if `options.changes` has a setting that no protocol of this evaluation reads.

    Such a setting belongs to a protocol that is not enabled, or `--tuned` replaces it by the value that tuning chose.
    """
    refuse_unused_rms_settings(evaluation.dynamic, options.changes)
    sections = {
        "evaluation.dynamic": ("lr", evaluation.dynamic.lr is not None),
        "evaluation.cache": ("size", evaluation.cache.size is not None),
    }
    for key in options.changes:
        section = key.rpartition(".")[0]
        switch, enabled = sections.get(section, ("", True))
        if section in sections and options.tuned:
            raise ParnasError(
                f"{key} has no effect with tuned (--tuned), which uses the settings of tune-eval; give one of them."
            )
        if not enabled and key != f"{section}.{switch}":
            raise ParnasError(f"{key} has no effect without {section}.{switch}, which enables the protocol; give both.")


def _list_warnings(run: EvalRun, split: str, protocols: Sequence[EvalProtocol], options: EvalOptions) -> Iterator[str]:
    """Yield a warning if segment or memory lengths differ from training, and one for untuned settings on `test`."""
    config = run.loaded.config
    trained = {"tgt_len": config.data.tgt_len, **config.model.reach._asdict()}
    lengths = {"tgt_len": run.shape.tgt_len, **run.shape.reach._asdict()}
    unused = set() if run.network.compresses() else {"cmem_len"}
    changed = [
        f"{key} {value} (trained with {trained[key]})"
        for key, value in lengths.items()
        if value != trained[key] and key not in unused
    ]
    if changed:
        yield f"evaluated with {', '.join(changed)}"
    if split == "test" and not options.tuned and any(protocol.dynamic or protocol.cache for protocol in protocols):
        yield (
            "the settings of the protocols were not tuned; run parnas tune-eval, which chooses them on the validation "
            "split, then evaluate with --tuned, so that the test split is read once"
        )


def _make_rows(run: EvalRun, split: str, protocols: Sequence[EvalProtocol], reporter: Reporter) -> list[ComparisonRow]:
    """Score a run by the plain protocol and by each of `protocols`, and return a table row for each.

    The row of the plain protocol alone has costs, to which `compare` adds the latency.
    """
    reporter.note(f"scoring {run.name} on {split}")
    counts = run.streams.header.splits[split]

    def row(nats: Tensor, **values: Any) -> ComparisonRow:
        loss = TotalLoss.of(nats).describe(counts).model_dump(include=_LOSS_METRICS)
        return described.model_copy(update={**loss, **values})

    described = _describe_run(run)
    rows = [row(run.score(split))]
    for protocol, nats in score_protocols(run, split, protocols, reporter):
        rows.append(row(nats, evaluation=protocol.name, settings=protocol.settings, multiply_adds_per_token=None))
    return rows


def _describe_run(run: EvalRun) -> ComparisonRow:
    """Return a table row with a run's network, parameters, multiply-adds and training, without losses and latency."""
    network, config = run.network, run.loaded.config
    searched = isinstance(run.loaded.model, SuperNet)
    kind = "SuperNet" if isinstance(network, SuperNet) else "derived, in SuperNet" if searched else "discrete"
    parameters = sum(parameter.numel() for parameter in network.parameters())
    counts = run.streams.train_counts().tolist()
    row = ComparisonRow(
        run=run.name,
        network=kind,
        arch=str(run.loaded.architecture),
        evaluation=PLAIN,
        settings="",
        parameters=parameters,
        without_embeddings=parameters - network.embedding_parameters(),
        multiply_adds_per_token=round(network.multiply_adds(run.shape.tgt_len, run.shape.reach, counts)),
        tgt_len=run.shape.tgt_len,
        mem_len=run.shape.reach.mem_len,
        cmem_len=run.shape.reach.cmem_len if network.compresses() else 0,
        precision=run.device.precision,
        train_tokens_per_s=median_rate(run.source),
        weights=describe_weights(run.source.kind(), config),
    )
    if network.pointer is not None:
        row = row.model_copy(update={"pointer_len": run.shape.reach.pointer_len})
    if not run.source.finished():
        return row
    summary = run.source.summary()
    share = 1 - config.search.alpha_share if summary.kind == "search" else 1
    tokens = summary.steps * config.data.batch_size * config.data.tgt_len
    epochs = round(tokens / (share * run.streams.header.splits["train"].tokens), 2)
    spent = {"steps": summary.steps, "epochs": epochs, "train_seconds": summary.seconds}
    if source := summary.inherited:
        spent |= {"inherited_steps": source.steps, "total_seconds": summary.seconds + source.seconds}
    return row.model_copy(update=spent)


def median_rate(run: Run) -> float:
    """Return the median training speed that a run logged, in tokens per second; nan if it logged none."""
    rates = [line.tokens_per_s for line in run.metrics() if line.split == "train" and line.tokens_per_s is not None]
    return float(np.median(rates)) if rates else math.nan
