"""Beginning, resuming and ending a training phase, and loading what it made."""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from parnas.architecture import Architecture
from parnas.config import Config
from parnas.data.corpora import NAMES, expand_user
from parnas.data.streams import StreamHeader, TokenStreams, prepare
from parnas.data.tokenizers import Tokenizer, load_tokenizer
from parnas.errors import ParnasError
from parnas.files import folder_in_one_piece, write_json
from parnas.model.cutoffs import optimal_cutoffs
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.run import PI, Kind, Run
from parnas.sections import AUTO_CLUSTERS
from parnas.training.checkpoint import load_weights, newest_checkpoint, refuse_larger
from parnas.training.device import Device, choose_device
from parnas.training.reporter import Reporter
from parnas.training.trainer import Session, Trainer

STREAMS = "streams.json"


@dataclass(frozen=True)
class LoadedRun:
    """A network and its tokenizer, rebuilt from a run folder alone."""

    model: TransformerXL  # in evaluation mode, on the CPU; a SuperNet for a search
    tokenizer: Tokenizer
    config: Config
    architecture: Architecture  # of a search: what derive would take
    header: StreamHeader
    checkpoint: Path

    @property
    def step(self) -> int:
        """Steps that the weights were trained for."""
        return int(self.checkpoint.name.removeprefix("step-"))

    def generate(self, prompt: str, tokens: int = 100, temperature: float = 1.0, top_k: int | None = None) -> str:
        """Continue a text by so many sampled tokens."""
        device = next(self.model.parameters()).device
        start = torch.tensor([self.tokenizer.encode(prompt) or [self.tokenizer.eos_id]], device=device)
        ids = self.model.generate(start, tokens, temperature, top_k)[0]
        return str(self.tokenizer.decode(ids.tolist()))


def open_session(config: Config, kind: Kind, folder: Path, resume: bool, reporter: Reporter) -> Session:
    """Prepare text, device and run folder; raises `ParnasError` for a resumed run of another configuration."""
    run, device = Run(folder), choose_device(config.runtime)
    if resume:
        refuse_unfit(run, kind, device)
    else:
        run.refuse_used()
    config = resolve_corpus(config)
    streams = prepare(config.data, reporter.note)
    config = resolve_cutoffs(config, streams)
    if resume:
        refuse_changes(run, config)
        refuse_other_text(streams.header, StreamHeader.read(run.folder / STREAMS), str(folder))
    else:
        run = Run.create(folder, kind, config, device.describe())
        write_json(run.folder / STREAMS, asdict(streams.header))
    if not run.tokenizer.is_dir():
        with folder_in_one_piece(run.tokenizer) as beside:
            streams.tokenizer.save(beside)
    torch.manual_seed(config.runtime.seed)
    return Session(config, streams, device, run, reporter)


def resolve_cutoffs(config: Config, streams: TokenStreams) -> Config:
    """Replace `model.cutoffs: auto` by the optimal ones for the training text."""
    model = config.model
    if model.cutoffs != "auto":
        return config
    sized = config.replace(model__cutoffs=tuple(range(1, AUTO_CLUSTERS)))
    found = optimal_cutoffs(streams.train_counts(), AUTO_CLUSTERS, model.d_model, sized.model.softmax_dims())
    return config.replace(model__cutoffs=found.cutoffs)


def resolve_corpus(config: Config) -> Config:
    """Make the path of a corpus absolute, so that the run can be gone on with from any folder."""
    path = expand_user(config.data.corpus)
    named = config.data.corpus in NAMES or not path.exists()
    return config if named else config.replace(data__corpus=str(path.resolve()))


def refuse_unfit(run: Run, kind: Kind, device: Device) -> None:
    """Raise where a run to be resumed has ended, is of another kind or computed elsewhere or otherwise."""
    before = run.environment()
    if run.finished():
        raise ParnasError(f"{run.folder} is finished; choose another --run to train anew.")
    if before.get("kind") != kind:
        raise ParnasError(f"{run.folder} is a {before.get('kind')}, not a {kind}.")
    for key, now in (("device", str(device.device)), ("precision", device.precision)):
        if before.get(key) != now:
            raise ParnasError(f"{run.folder} was begun with {key} {before.get(key)}, not {now}; set runtime.{key}.")


def refuse_changes(run: Run, config: Config) -> None:
    """Raise where a run to be resumed was begun with another configuration."""
    before, now = flatten(run.config().model_dump()), flatten(config.model_dump())
    if changed := [f"  - {key}: {before[key]} before, {now[key]} now" for key in before if before[key] != now[key]]:
        raise ParnasError(f"{run.folder} was begun with another configuration:\n" + "\n".join(changed))


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one dictionary of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def refuse_other_text(now: StreamHeader, then: StreamHeader, run: str) -> None:
    """Raise where two headers differ in more than the name that the text was called by."""
    if replace(now, corpus=then.corpus) != then:
        raise ParnasError(f"The text or tokenizer on this machine is not what {run} was trained with; restore it.")


def run_training(trainer: Trainer, resume: bool, architecture: Callable[[], Architecture]) -> Run:
    """Train to the end and write `summary.json`."""
    session = trainer.session
    if resume:
        trainer.resume()
    trainer.fit()
    counts = session.streams.header.splits["valid"]
    losses = trainer.validation or trainer.validate()
    total = sum(parameter.numel() for parameter in trainer.model.parameters())
    summary = {
        "kind": session.run.kind(),
        "arch": str(architecture()),
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "parameters": total,
        "parameters_without_embeddings": total - trainer.model.embedding_parameters(),
        **{name: loss.describe(counts) for name, loss in losses.items()},
    }
    write_json(session.run.folder / "summary.json", summary)
    return session.run


def load(folder: str | Path, even: bool = False) -> LoadedRun:
    """Rebuild the network of a run from its newest checkpoint, with its tokenizer and configuration.

    `even`: with a search's weights from before they settled on one network, where there are such. Raises `ParnasError`
    where the folder has no whole checkpoint or lacks what the network needs.
    """
    run = Run(folder)
    config = run.config()
    if not (run.folder / STREAMS).is_file() or not run.tokenizer.is_dir():
        raise ParnasError(f"{folder} has no {STREAMS} or no tokenizer/; it is not whole.")
    tokenizer = load_tokenizer(run.tokenizer)
    skipped: list[str] = []
    before = newest_checkpoint(run.even, skipped.append) if even else None
    if even and before is None and skipped:
        raise ParnasError("\n".join([f"{run.even} has no whole checkpoint; restore it.", *skipped]))
    checkpoint = before or newest_checkpoint(run.checkpoints, skipped.append)
    if checkpoint is None:
        raise ParnasError(
            "\n".join([f"{folder} has no whole checkpoint; train first, or go on with --resume.", *skipped])
        )
    searched = run.kind() == "search"

    def build() -> TransformerXL:
        if searched:
            return SuperNet(config.model, config.search.space, config.search.blocks, tokenizer.vocab_size)
        return TransformerXL.build(config.model, run_architecture(config), tokenizer.vocab_size)

    refuse_larger(build, checkpoint)
    model = build()
    load_weights(checkpoint, model)
    if isinstance(model, SuperNet):
        told = [record["arch"] for record in run.records(PI) if "arch" in record]
        architecture = Architecture.parse(told[-1]) if told else model.architecture()
    else:
        architecture = run_architecture(config)
    header = StreamHeader.read(run.folder / STREAMS)
    return LoadedRun(model.eval(), tokenizer, config, architecture, header, checkpoint)


def run_architecture(config: Config) -> Architecture:
    """The architecture that a retraining was configured with."""
    if config.model.arch is None:
        raise ParnasError("No architecture was given; add --arch STRING, an arch.yaml or a preset, or set model.arch.")
    architecture = Architecture.parse(config.model.arch)
    architecture.canonical()  # refuses identity alone
    return architecture
