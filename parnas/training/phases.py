"""Beginning, resuming and ending a training phase, and loading what it made."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from parnas.architecture import IDENTITY, Architecture
from parnas.config import Config, dump_config, walk_fields
from parnas.data.cache import Note
from parnas.data.corpora import NAMES
from parnas.data.streams import StreamHeader, TokenStreams, prepare
from parnas.data.tokenizers import Tokenizer, load_tokenizer
from parnas.errors import ParnasError
from parnas.files import expand_user, folder_in_one_piece, write_json, write_text
from parnas.model.cutoffs import optimal_cutoffs
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.run import OF_THE_OTHER_PHASE, STREAMS, Kind, Run
from parnas.sections import AUTO_CLUSTERS, EvaluationConfig
from parnas.training.checkpoint import (
    best_checkpoint,
    list_checkpoints,
    load_weights,
    newest_checkpoint,
    refuse_larger,
    step_of,
)
from parnas.training.device import Device, choose_device
from parnas.training.model_summary import summarise
from parnas.training.randomness import seed_process
from parnas.training.reporter import Reporter, Silent
from parnas.training.trainer import Session, Trainer

MAY_CHANGE = {
    *("train.steps", "train.log_every", "train.eval_every", "train.save_every", "train.skip_bad_steps"),
    *("train.accumulate", "runtime.checkpoint_activations"),
    *(key for key, _ in walk_fields(EvaluationConfig, "evaluation.")),
}
"""Settings with which a run may be gone on with, whatever they were when it was begun. `train.steps` may grow, which
changes the learning rates of the steps that are left."""


@dataclass(frozen=True)
class LoadedRun:
    """A network and its tokenizer, rebuilt from a run folder alone."""

    model: TransformerXL  # in evaluation mode, on the CPU; a SuperNet for a search
    tokenizer: Tokenizer
    config: Config
    architecture: Architecture  # that the run stands for: see `Run.architecture`
    header: StreamHeader
    checkpoint: Path

    @property
    def step(self) -> int:
        """Steps that the weights were trained for."""
        return step_of(self.checkpoint)

    def discrete(self) -> TransformerXL:
        """The network in evaluation mode; of a search the one that it stands for, with the SuperNet's weights."""
        network = self.model
        return (network.extract(self.architecture) if isinstance(network, SuperNet) else network).eval()

    def generate(self, prompt: str, tokens: int = 100, temperature: float = 1.0, top_k: int | None = None) -> str:
        """Continue a text by so many sampled tokens."""
        return continue_text(self.model, self.tokenizer, prompt, tokens, temperature, top_k)


def continue_text(
    model: TransformerXL, tokenizer: Tokenizer, prompt: str, tokens: int, temperature: float, top_k: int | None
) -> str:
    """Continue a text by so many sampled tokens; see `TransformerXL.generate`."""
    device = next(model.parameters()).device
    start = torch.tensor([tokenizer.encode(prompt) or [tokenizer.eos_id]], device=device)
    return str(tokenizer.decode(model.generate(start, tokens, temperature, top_k)[0].tolist()))


@contextmanager
def open_session(config: Config, kind: Kind, folder: Path, resume: bool, reporter: Reporter) -> Iterator[Session]:
    """Prepare text, device and run folder, and keep others from writing there while it is entered.

    Goes on with a run that was begun there. Raises `ParnasError` for one of another configuration or that is finished,
    a folder in use, and with `resume` where none was begun.
    """
    run, device = Run(folder), choose_device(config.runtime)
    ranks = device.ranks
    reporter = reporter if ranks.leads else Silent()
    with ExitStack() as stack:
        begun = False
        with ranks.led():
            if ranks.leads:
                stack.enter_context(run.locked())
                begun = run.begun() and bool(list_checkpoints(run.checkpoints))
                if begun:
                    refuse_unfit(run, kind, device, config)
                elif resume:
                    run.environment()  # which tells what is missing
                else:
                    run.refuse_used()
        begun = ranks.any(begun)
        config = resolve_corpus(config)
        streams = prepare(config.data, reporter.note)
        config = resolve_cutoffs(config, streams)
        with ranks.led():
            if begun and ranks.leads:
                refuse_other_text(streams.header, StreamHeader.read(run.folder / STREAMS), str(folder))
                refuse_foreign_changes(run, config, reporter.note)
            elif ranks.leads:
                create_run(run, kind, config, device, streams)
        seed_process(config.runtime.seed, ranks.rank)
        yield Session(config, streams, device, run, reporter, begun)


def create_run(run: Run, kind: Kind, config: Config, device: Device, streams: TokenStreams) -> None:
    """Write what a run folder begins with; `streams.json` last, since with it the run counts as begun."""
    run.create(kind, config, device.describe())
    with folder_in_one_piece(run.tokenizer) as beside:
        streams.tokenizer.save(beside)
    write_json(run.folder / STREAMS, asdict(streams.header))


def resolve_cutoffs(config: Config, streams: TokenStreams) -> Config:
    """Replace `model.cutoffs: auto` by the optimal ones for the training text."""
    return config if config.model.cutoffs != "auto" else find_cutoffs(config, streams.train_counts())


def find_cutoffs(config: Config, counts: NDArray[np.int64]) -> Config:
    """The configuration with the optimal cutoffs for tokens that occur `counts` [V] times."""
    sized = config.replace(model__cutoffs=tuple(range(1, AUTO_CLUSTERS)))
    found = optimal_cutoffs(counts, AUTO_CLUSTERS, config.model.d_model, sized.model.softmax_dims())
    return config.replace(model__cutoffs=found.cutoffs)


def resolve_corpus(config: Config) -> Config:
    """Make the path of a corpus absolute, so that the run can be gone on with from any folder."""
    path = expand_user(config.data.corpus)
    named = config.data.corpus in NAMES or not path.exists()
    return config if named else config.replace(data__corpus=str(path.resolve()))


def refuse_unfit(run: Run, kind: Kind, device: Device, config: Config) -> None:
    """Raise where a run to be resumed has ended, is of another kind or computed elsewhere or otherwise."""
    before = run.environment()
    if before.get("kind") != kind:
        raise ParnasError(f"{run.folder} is a {before.get('kind')}, not a {kind}.")
    if run.finished() and not (kind == "retrain" and config.train.steps > run.config().train.steps):
        raise ParnasError(
            f"{run.folder} is finished, and kept as it is; choose another folder (--run) to train anew"
            + (", or raise train.steps to train on." if kind == "retrain" else ".")
        )
    now = {"device": device.device.type, "precision": device.precision}
    was = {"device": str(before.get("device")).partition(":")[0], "precision": before.get("precision")}
    for key, value in now.items():
        if was[key] != value:
            raise ParnasError(f"{run.folder} was begun with {key} {was[key]}, not {value}; set runtime.{key}.")


def refuse_foreign_changes(run: Run, config: Config, note: Note) -> None:
    """Tell what differs from the configuration of a run to be resumed; raises where more does than `MAY_CHANGE`."""
    before = run.config()
    refuse_changes(run, config, MAY_CHANGE)
    if config.train.steps < before.train.steps:
        raise ParnasError(f"{run.folder} was begun with train.steps {before.train.steps}, which may grow, not shrink.")
    for line in changed_settings(before, config):
        note(f"going on with another {line}")


def take_up(trainer: Trainer) -> None:
    """Go on from the run's newest checkpoint, and only then change what is in its folder."""
    trainer.resume()
    session, run = trainer.session, trainer.session.run
    with session.device.ranks.led():
        if session.device.ranks.leads:
            run.cut_after(trainer.step)
            (run.folder / "summary.json").unlink(missing_ok=True)  # of a run that is to be trained on
            if run.config() != session.config:
                write_text(run.folder / "config.yaml", dump_config(session.config))


def refuse_changes(run: Run, config: Config, allowed: Collection[str] = ()) -> None:
    """Raise where a run was begun with another configuration, but for the `allowed` keys."""
    if changed := changed_settings(run.config(), config, allowed):
        told = "\n  - ".join([f"{run.folder} was begun with another configuration:", *changed])
        of_evaluation = all(line.startswith("evaluation.") for line in changed)
        cure = "give them to parnas evaluate" if of_evaluation else "choose another --run"
        raise ParnasError(f"{told}\nGive these as before, or {cure}.")


def changed_settings(before: Config, now: Config, but: Collection[str] = ()) -> list[str]:
    """What differs, by dotted key."""
    old, new = flatten(before.model_dump()), flatten(now.model_dump())
    return [f"{key}: {old[key]} before, {new[key]} now" for key in old if old[key] != new[key] and key not in but]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections as one dictionary of dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def refuse_other_results(run: Run, config: Config) -> None:
    """Raise where a finished run was made with another configuration, but for what its phase does not read."""
    config = resolve_corpus(config)  # as what the run keeps was resolved when it was begun
    if config.model.cutoffs == "auto":
        config = resolve_cutoffs(config, prepare(config.data))
    unread = OF_THE_OTHER_PHASE[run.kind()]
    keys = flatten(config.model_dump())
    refuse_changes(run, config, [key for key in keys if any(f"{key}.".startswith(f"{of}.") for of in unread)])


def refuse_other_text(now: StreamHeader, then: StreamHeader, run: str) -> None:
    """Raise where two headers differ in more than the name that the text was called by."""
    if replace(now, corpus=then.corpus) != then:
        raise ParnasError(f"The text or tokenizer on this machine is not what {run} was trained with; restore it.")


def run_training(trainer: Trainer, architecture: Callable[[], Architecture]) -> Run:
    """Train to the end, from where the run is, and write `summary.json`."""
    session = trainer.session
    if session.begun:
        take_up(trainer)
    elif session.device.ranks.leads:
        log_model(session, trainer.model, architecture())
    trainer.fit()
    counts = session.streams.header.splits["valid"]
    if not trainer.validation:  # it was cut off after its last step
        trainer.validate_average()
    total = sum(parameter.numel() for parameter in trainer.model.parameters())
    summary = {
        "kind": session.run.kind(),
        "arch": str(architecture()),
        "steps": trainer.step,
        "seconds": round(trainer.seconds, 1),
        "parameters": total,
        "parameters_without_embeddings": total - trainer.model.embedding_parameters(),
        "best": trainer.best and trainer.best._asdict(),
        "skipped_steps": trainer.skipped,
        **{name: loss.describe(counts) for name, loss in trainer.validation.items()},
    }
    with session.device.ranks.led():  # so that all processes find it
        if session.device.ranks.leads:
            write_json(session.run.folder / "summary.json", summary)
    return session.run


def log_model(session: Session, model: TransformerXL, architecture: Architecture) -> None:
    """Write the table of the network into `run.log`; of a SuperNet, whatever the architecture is."""
    data, counts = session.config.data, session.streams.train_counts().tolist()
    names = [name for name in architecture if name != IDENTITY]
    table = summarise(model, names, data.tgt_len, session.config.model.reach, counts)
    title = f"the network, for segments of {data.tgt_len} tokens and the configured memory"
    session.run.write_log(f"{title}:\n{table}")


def load(folder: str | Path, even: bool = False, best: bool = False, by_pi: bool = False) -> LoadedRun:
    """Rebuild the network of a run from its newest checkpoint, with its tokenizer and configuration.

    `even`: with a search's weights from before they settled on one network, where there are such. `best`: with those of
    the least validation loss. `by_pi`: a search's `arch.yaml` is not read, as where one is to be derived.

    Raises `ParnasError` where the folder has no whole checkpoint or lacks what the network needs.
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
    find = best_checkpoint if best else newest_checkpoint
    checkpoint = before or find(run.checkpoints, skipped.append)
    if checkpoint is None:
        raise ParnasError(
            "\n".join([f"{folder} has no whole checkpoint; train first, or go on with the run (--resume).", *skipped])
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
        architecture = run.architecture(by_pi) or model.architecture()
    else:
        architecture = run_architecture(config)
    header = StreamHeader.read(run.folder / STREAMS)
    return LoadedRun(model.eval(), tokenizer, config, architecture, header, checkpoint)


def run_architecture(config: Config) -> Architecture:
    """The architecture that a retraining was configured with."""
    if config.model.arch is None:
        raise ParnasError(
            "No architecture was given; give arch (--arch) a string, an arch.yaml or a preset, or set model.arch."
        )
    architecture = Architecture.parse(config.model.arch)
    architecture.canonical()  # refuses identity alone
    return architecture
