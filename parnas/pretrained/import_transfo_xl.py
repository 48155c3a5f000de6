"""Import a trained Transformer-XL as a run, like that of a finished retraining, with the model's predictions."""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel

from parnas.config.loader import Config, Override, check_config, read_override, to_yaml_values
from parnas.data.batching import Shuffle, TrainingBatches
from parnas.data.vocabulary import read_vocabulary
from parnas.errors import ParnasError
from parnas.pretrained.transfo_xl import Shapes, TransfoXL, convert
from parnas.runs.resolve import Settings, read_config
from parnas.runs.run import Run
from parnas.training.loaded_run import run_architecture
from parnas.training.optimizers import Schedule
from parnas.training.progress import Reporter
from parnas.training.retrain import RetrainTask
from parnas.training.session import open_session, run_task

__all__ = ["import_settings", "import_transfo_xl"]

_NEEDED = {
    "data.corpus": "the text that the model was trained on",
    "data.tokenizer.vocabulary": "a text file with the words of the model, one per line in the order of the ids",
    "data.tgt_len": "tokens of a segment",
    "model.mem_len": "positions of memory",
    "model.same_length": "true if it was trained with --same_length, else false",
    "model.clamp_len": "the largest distance, or null",
    "model.cutoffs": "those of the adaptive softmax, such as [20000,40000,200000]",
    "model.dropout": "for further training",
    "model.norm": "post; a model that was trained with --pre_lnorm cannot be imported",
}
"""Settings that the weights do not determine, and what to give."""


def import_settings(model: TransfoXL, settings: Settings | None, overrides: Sequence[Override]) -> Config:
    """Return the configuration of a run with the network of a model.

    What the weights say is fixed. For the rest, `overrides` come first, then `config.json`, then `settings`.

    Args:
        model: the model.
        settings: a configuration, or a part of one; `None` for the defaults.
        overrides: further settings.

    Raises:
        ParnasError: a setting is not valid, contradicts the weights, or is missing; or the word list has another number
            of words than the model. The message lists all that is missing.
    """
    base = Config() if settings is None else read_config(settings, [])
    pairs = [read_override(each) if isinstance(each, str) else each for each in overrides]
    given = {key: to_yaml_values(value) for key, value in pairs}
    fixed, described = model.shapes.settings(), model.described()
    # 1. Nothing may contradict the weights.
    wrong = [f"{key} is {given[key]}, not {value}" for key, value in fixed.items() if given.get(key, value) != value]
    if wrong:
        raise ParnasError(f"{model.file} is another model: {'; '.join(wrong)}. Leave out these settings.")
    # 2. All that decides the predictions must be known.
    known = {*fixed, *described, *given, *_keys_set(base)}
    if missing := [f"  - {key}: {hint}" for key, hint in _NEEDED.items() if key not in known]:
        first = f"{model.file} does not say all settings; give these too, as SECTION.KEY=VALUE or in CONFIG:"
        raise ParnasError("\n".join([first, *missing]))
    # 3. All overrides are applied, valid or not, so that one message lists all errors.
    changes = [*described.items(), *overrides, *fixed.items()]
    config = check_config(base.model_dump(), "The configuration", changes)
    if config.model.norm != "post":
        raise ParnasError(
            "A Transformer-XL that was trained with --pre_lnorm cannot be reproduced exactly here, since it has no "
            "norm after its last layer; model.norm must be post."
        )
    _check_cutoffs(model.shapes, config)
    _check_words(model.shapes, config)
    return config


def _keys_set(section: BaseModel, prefix: str = "") -> Iterator[str]:
    """Yield the dotted keys of the settings that a configuration names, without those that have their defaults."""
    for name in section.model_fields_set:
        value = getattr(section, name)
        if isinstance(value, BaseModel):
            yield from _keys_set(value, f"{prefix}{name}.")
        else:
            yield prefix + name


def _check_cutoffs(shapes: Shapes, config: Config) -> None:
    """Raise `ParnasError` if the cutoffs do not make the clusters of the model."""
    cutoffs = config.model.cutoffs
    if isinstance(cutoffs, str) or len(cutoffs) != shapes.tails:
        raise ParnasError(f"model.cutoffs is {cutoffs}; give the {shapes.tails} of the model, as it was trained.")


def _check_words(shapes: Shapes, config: Config) -> None:
    """Raise `ParnasError` if there is no word list, or one with another number of words than the model."""
    words = config.data.tokenizer.vocabulary
    if words is None:
        raise ParnasError("data.tokenizer.vocabulary is null; give a file with the words of the model.")
    if (count := len(read_vocabulary(words))) != shapes.vocab_size:
        raise ParnasError(
            f"{words} has {count:,} words, but the model has {shapes.vocab_size:,}; give the words of the model, one "
            "per line in the order of its ids."
        )


def import_transfo_xl(model: TransfoXL, config: Config, folder: Path, reporter: Reporter) -> Run:
    """Write a run with the network of a model, as a finished retraining would leave it, and return it.

    The validation loss is measured, and the checkpoint is of step `train.steps`.

    Args:
        model: the model.
        config: the configuration, see `import_settings`.
        folder: the run folder.
        reporter: receives the progress.

    Raises:
        ParnasError: weights are missing, of other shapes or of unknown names; or the folder has files already.
    """
    network, architecture = convert(model, config), run_architecture(config)
    with open_session(config, "retrain", folder, False, reporter) as session:
        with model.file.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        session.run.write_log(f"imported from {model.file.resolve()}, SHA-256 {digest}")
        config, tokens = session.config, session.streams.tokens("train")
        data = config.data
        rows = session.device.distributed.local_slice(data.batch_size)
        batches = TrainingBatches(tokens, data.batch_size, data.tgt_len, rows, Shuffle.from_config(config))
        task = RetrainTask(session, network, batches, Schedule.of(config.train))
        return run_task(task, lambda: architecture, trained=True)
