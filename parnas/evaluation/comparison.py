"""One table for any number of runs: what they reach, and what they cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd

from parnas.config import Config
from parnas.data.streams import TokenStreams, prepare
from parnas.errors import ParnasError
from parnas.files import write_text
from parnas.model.estimators import runs_single_path
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.run import METRICS, Run, name_runs
from parnas.training.device import Device, choose_device
from parnas.training.latency import Candidate, measure_latencies
from parnas.training.perplexity import measure_loss
from parnas.training.phases import LoadedRun, load, same_text
from parnas.training.reporter import Reporter


@dataclass(frozen=True)
class Conditions:
    """How a comparison measures; none means as each run was trained."""

    split: str | None = None  # none: evaluation.split of the first run's configuration
    tgt_len: int | None = None
    mem_len: int | None = None


@dataclass(frozen=True)
class Comparison:
    """The table, one row per run, and what must be known to read it."""

    table: pd.DataFrame
    notes: tuple[str, ...]

    def write(self, folder: Path) -> list[Path]:
        """Write comparison.csv, .md and .json into `folder`."""
        folder.mkdir(parents=True, exist_ok=True)
        notes = "".join(f"\n* {note}" for note in self.notes)
        texts = {
            "csv": self.table.to_csv(index=False),
            "md": f"{self.table.round(4).to_markdown(index=False, floatfmt=',', intfmt=',')}\n{notes}\n",
            "json": self.table.to_json(orient="records", indent=2) + "\n",
        }
        paths = [folder / f"comparison.{ending}" for ending in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            write_text(path, text)
        return paths


def compare(folders: Sequence[Path], conditions: Conditions, reporter: Reporter) -> Comparison:
    """Measure all runs on one split and machine; raises `ParnasError` for runs that cannot be compared.

    Perplexities per token appear only where all runs share one tokenizer; runs of different tokenizers must lose the
    same information, since a text that lost more is easier to predict.
    """
    if len({folder.resolve() for folder in folders}) < len(folders):
        raise ParnasError("A run is given twice; name each one once.")
    runs = {str(folder): load(folder) for folder in folders}
    names = name_runs([Run(folder) for folder in folders])
    refuse_incomparable(runs)
    if conditions.split is None:
        conditions = replace(conditions, split=next(iter(runs.values())).config.evaluation.split)
    notes = [f"split {conditions.split}; words include the line ends, since they are predicted"]
    networks = {name: network_of(run) for name, run in runs.items()}
    threads = next(iter(runs.values())).config.runtime.threads  # one number for all: it holds for the whole process
    runtimes = {name: run.config.runtime.model_copy(update={"threads": threads}) for name, run in runs.items()}
    devices = {name: choose_device(runtime) for name, runtime in runtimes.items()}
    texts = {name: open_text(name, run) for name, run in runs.items()}
    rows = {}
    for name, run in runs.items():
        reporter.note(f"scoring {name} on {conditions.split}")
        rows[name] = measure_run(name, run, texts[name], networks[name], devices[name], conditions)
    add_latencies(rows, texts, networks, devices, notes)
    table = pd.DataFrame([{**row, "run": shown} for row, shown in zip(rows.values(), names, strict=True)])
    if len({tokenizer_identity(run) for run in runs.values()}) > 1:
        table = table.drop(columns=["ppl", "tokens"])
        notes.append("the runs have different tokenizers, so perplexities per token are left out")
    return Comparison(table, tuple(notes))


def refuse_incomparable(runs: dict[str, LoadedRun]) -> None:
    """Raise for different corpora, and for different tokenizers that do not lose the same information."""
    corpora = {run.header.fingerprint for run in runs.values()}
    if len(corpora) > 1:
        listed = "".join(f"\n  - {name}: {run.header.corpus}" for name, run in runs.items())
        raise ParnasError(f"The runs were trained on different texts and cannot be compared:{listed}")
    if len({tokenizer_identity(run) for run in runs.values()}) > 1 and len(set(map(lost, runs.values()))) > 1:
        listed = "".join(f"\n  - {name}: {lost(run) or 'nothing'}" for name, run in runs.items())
        raise ParnasError(
            "The runs' tokenizers lose different information, so neither words nor bytes are comparable; "
            f"compare those that lose the same by themselves:{listed}"
        )


def lost(run: LoadedRun) -> str:
    """What the tokenizer does not keep of the text, with the number of unknown tokens in each split."""
    unknown = ", ".join(f"{counts.unknown} in {split}" for split, counts in run.header.splits.items())
    return ", ".join({"unknown": f"unknown words ({unknown})"}.get(kind, kind) for kind in run.header.loses)


def tokenizer_identity(run: LoadedRun) -> str:
    """Equal for runs whose tokens are the same."""
    return repr((run.header.fingerprint, run.header.tokenizer, run.header.vocab_size))


def network_of(run: LoadedRun) -> TransformerXL:
    """What is scored: the network, or of a search the SuperNet by pi (its argmax where steps run a single path)."""
    if isinstance(run.model, SuperNet) and runs_single_path(run.config.search.estimator):
        return run.model.extract(run.architecture)
    return run.model


def measure_run(
    name: str,
    run: LoadedRun,
    streams: TokenStreams,
    network: TransformerXL,
    device: Device,
    conditions: Conditions,
) -> dict[str, str | float]:
    """A row of the table but for the latency."""
    assert conditions.split is not None
    tgt_len, mem_len = lengths(run.config, conditions)
    loss = measure_loss(
        network.to(device.device),
        streams.tokens(conditions.split),
        streams.tokenizer.eos_id,
        device,
        batch_size=run.config.evaluation.batch_size,
        tgt_len=tgt_len,
        mem_len=mem_len,
    )
    figures = loss.describe(streams.header.splits[conditions.split])
    total = sum(parameter.numel() for parameter in network.parameters())
    return {
        "run": name,
        "network": "SuperNet" if isinstance(network, SuperNet) else "discrete",
        "arch": str(run.architecture),
        **{key: figures[key] for key in ("ppl", "word_ppl", "bits_per_byte", "tokens", "words", "bytes")},
        "parameters": total,
        "without_embeddings": total - network.embedding_parameters(),
        "multiply_adds_per_token": round(network.multiply_adds(tgt_len, mem_len, streams.train_counts().tolist())),
        **training_figures(Run(name), streams),
        "tgt_len": tgt_len,
        "mem_len": mem_len,
        "precision": device.precision,
    }


def open_text(name: str, run: LoadedRun) -> TokenStreams:
    """The text that a run was trained on; raises `ParnasError` where this machine has another."""
    streams = prepare(run.config.data)
    if not same_text(streams.header, run.header):
        raise ParnasError(f"The text or tokenizer on this machine is not what {name} was trained with; restore it.")
    return streams


def lengths(config: Config, conditions: Conditions) -> tuple[int, int]:
    """Segment and memory length: the command's, else the configuration's for evaluation, else those of training."""
    given = [(conditions.tgt_len, config.evaluation.tgt_len, config.data.tgt_len)]
    given.append((conditions.mem_len, config.evaluation.mem_len, config.model.mem_len))
    tgt_len, mem_len = (next(value for value in choices if value is not None) for choices in given)
    return tgt_len, mem_len


def training_figures(run: Run, streams: TokenStreams) -> dict[str, float]:
    """Steps, epochs and seconds of a run's training, and its median rate in tokens per second."""
    rates = [line["tokens_per_s"] for line in run.records(METRICS) if line["split"] == "train"]
    figures = {"train_tokens_per_s": float(np.median(rates)) if rates else float("nan")}
    if run.finished():
        summary, data = run.summary(), run.config().data
        share = 1 - run.config().search.alpha_split if summary["kind"] == "search" else 1
        read = summary["steps"] * data.batch_size * data.tgt_len
        epochs = read / (share * streams.header.splits["train"].tokens)
        figures |= {"steps": summary["steps"], "epochs": round(epochs, 2), "train_seconds": summary["seconds"]}
    return figures


def add_latencies(
    rows: dict[str, dict[str, str | float]],
    texts: dict[str, TokenStreams],
    networks: dict[str, TransformerXL],
    devices: dict[str, Device],
    notes: list[str],
) -> None:
    """Add latency per segment; networks that read the same shapes in the same precision take turns."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, row in rows.items():
        groups.setdefault((row["tgt_len"], row["mem_len"], devices[name]), []).append(name)
    for names in groups.values():
        first = rows[names[0]]
        measured = measure_latencies(
            {name: Candidate(networks[name], texts[name].tokens("valid")) for name in names},
            devices[names[0]],
            tgt_len=int(first["tgt_len"]),
            mem_len=int(first["mem_len"]),
        )
        for name, latency in measured.items():
            rows[name] |= {"latency_ms": latency.median, "latency_p95_ms": latency.p95}
    notes.append("latency: scoring one segment of one row with full memory, networks taking turns, median and 95 %")
    if len(groups) > 1:
        notes.append("the runs read different shapes or precisions, so their latencies were measured one after another")
