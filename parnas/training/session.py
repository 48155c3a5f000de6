"""Start, resume and finish a training phase in a run folder; compare configurations of runs."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from parnas.architecture import IDENTITY, Architecture
from parnas.config.loader import Config, dump_config, walk_fields
from parnas.config.schema import AUTO_CLUSTERS, EvaluationConfig
from parnas.data.cache import Note
from parnas.data.corpora import NAMES
from parnas.data.streams import StreamHeader, TokenStreams, prepare
from parnas.data.subwords import subword_features
from parnas.data.vocabulary import describe_tokenizer
from parnas.errors import ParnasError
from parnas.model.cutoffs import HEAD_SHARE, optimal_cutoffs
from parnas.model.summary import summarise
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.files import atomic_folder, expand_user, write_json, write_text
from parnas.runs.records import BestValidation, Kind, RunSummary
from parnas.runs.run import OTHER_PHASE_SETTINGS, STREAMS, SUMMARY, Run
from parnas.training.checkpoints import hash_of_weights, list_checkpoints
from parnas.training.device import Device, choose_device, seed_process
from parnas.training.progress import Reporter, Silent
from parnas.training.trainer import Session, Trainer, TrainingTask

__all__ = [
    "MAY_CHANGE",
    "MAY_DIFFER",
    "check_same_results",
    "check_same_text",
    "flatten",
    "open_session",
    "refuse_changes",
    "resolve_cutoffs",
    "resolve_paths",
    "run_task",
]

MAY_CHANGE = {
    *("train.steps", "train.log_every", "train.eval_every", "train.save_every", "train.max_skipped_steps"),
    *("train.accumulate", "train.inherit", "runtime.checkpoint_activations", "runtime.threads"),
    "data.tokenizer.vocabulary",
    *(key for key, _ in walk_fields(EvaluationConfig, "evaluation.")),
}
"""Settings that may change when a run is resumed; `train.steps` may only grow, which changes later learning rates.

`train.inherit` may change, since its weights are in the checkpoint: the other run may have been moved or removed. The
path of the word list `data.tokenizer.vocabulary` may change, since its words are compared.
"""
MAY_DIFFER = MAY_CHANGE - {"train.steps"}
"""Settings in which a configuration may differ from that of a finished run whose results it reuses."""


@contextmanager
def open_session(config: Config, kind: Kind, folder: Path, resume: bool, reporter: Reporter) -> Iterator[Session]:
    """Prepare text, device and run folder for a training phase; other processes cannot train in the folder meanwhile.

    If the folder holds an unfinished run with a checkpoint, the session resumes that run.

    Raises:
        ParnasError: another process uses the folder; the folder holds a finished run, or a run of another kind or
            configuration; or `resume` is set and the folder holds no run.
    """
    run, device = Run(folder), choose_device(config.runtime)
    distributed = device.distributed
    reporter = reporter if distributed.is_main else Silent()
    with ExitStack() as stack:
        resuming = False
        with distributed.main_process_first():
            if distributed.is_main:
                stack.enter_context(run.locked())
                resuming = run.started() and bool(list_checkpoints(run.checkpoints))
                if resuming:
                    _check_resumable(run, kind, device, config)
                elif resume:
                    run.environment()  # raises an error that names the missing file
                else:
                    run.refuse_used()
        resuming = distributed.any(resuming)
        config = resolve_paths(config)
        streams = prepare(config.data, reporter.note)
        config = resolve_cutoffs(config, streams)
        with distributed.main_process_first():
            if resuming and distributed.is_main:
                check_same_text(streams.header, StreamHeader.read(run.folder / STREAMS), str(folder))
                _check_changes(run, config, reporter.note)
            elif distributed.is_main:
                _create_run(run, kind, config, device, streams)
        seed_process(config.runtime.seed, distributed.rank)
        try:
            yield Session(config, streams, device, run, reporter, resuming)
        except ParnasError:
            if distributed.is_main and not resuming:
                run.discard_unstarted()  # so that a mistake leaves no run behind
            raise


def _create_run(run: Run, kind: Kind, config: Config, device: Device, streams: TokenStreams) -> None:
    """Write the first files of a run folder; `streams.json` is the last, since it marks the run as started."""
    run.create(kind, config, device.describe())
    with atomic_folder(run.tokenizer) as beside:
        streams.tokenizer.save(beside)
    write_json(run.folder / STREAMS, streams.header.to_dict())


def resolve_cutoffs(config: Config, streams: TokenStreams) -> Config:
    """Return the configuration with cutoffs computed for the text if `model.cutoffs` is `auto` or `min_macs`."""
    return find_cutoffs(config, streams.train_counts()) if isinstance(config.model.cutoffs, str) else config


def find_cutoffs(config: Config, counts: NDArray[np.int64]) -> Config:
    """Return the configuration with the softmax cutoffs of the fewest multiply-adds for token frequencies `counts` [V].

    `model.cutoffs` must be `min_macs` or `auto`. With `auto`, the head and then each tail cluster except the last must
    hold at least the share `HEAD_SHARE` of the tokens that are not in earlier clusters.
    """
    head_share = 0.0 if config.model.cutoffs == "min_macs" else HEAD_SHARE
    dims = config.replace(model__cutoffs=tuple(range(1, AUTO_CLUSTERS))).model.softmax_dims()
    optimum = optimal_cutoffs(counts, AUTO_CLUSTERS, config.model.d_model, dims, head_share)
    return config.replace(model__cutoffs=optimum.cutoffs)


def resolve_paths(config: Config) -> Config:
    """Return the configuration with absolute paths of the corpus, if that is a path, of a word list, and of other runs.

    With absolute paths, a run can be resumed from any working directory.
    """
    path, changes = expand_user(config.data.corpus), dict[str, str]()
    if config.data.corpus not in NAMES and path.exists():
        changes["data__corpus"] = str(path.resolve())
    paths = {
        "train__inherit": config.train.inherit,
        "search__parent": config.search.parent,
        "data__tokenizer__vocabulary": config.data.tokenizer.vocabulary,
    }
    changes |= {key: str(expand_user(given).resolve()) for key, given in paths.items() if given is not None}
    teachers = tuple(str(expand_user(run).resolve()) for run in config.train.teachers)
    return config.replace(**changes, train__teachers=teachers)


def run_task(task: TrainingTask, architecture: Callable[[], Architecture], trained: bool = False) -> Run:
    """Train a task to its last step, write `summary.json`, and return the run.

    A resumed session continues from the newest checkpoint. `architecture` is called to name the present architecture in
    the log and in the summary. If the network is `trained` already, it is only validated and saved.
    """
    session, trainer = task.session, Trainer(task)
    if rows := session.config.model.subword_features:
        features = subword_features(session.streams.tokenizer.spellings(), rows)
        task.model.embedding.set_features(torch.from_numpy(features))
    if session.resuming:
        _resume(trainer)
    elif session.device.distributed.is_main:
        _log_model(session, task.model, architecture())
    if trained and not session.resuming:
        trainer.record()
    trainer.fit()
    if not trainer.validation:  # the resumed run had been cut off after its last step
        trainer.validate()
    counts = session.streams.header.splits["valid"]
    total = sum(parameter.numel() for parameter in task.model.parameters())
    summary = RunSummary(
        kind=session.run.kind(),
        arch=str(architecture()),
        steps=trainer.step,
        seconds=round(trainer.seconds, 1),
        inherited=session.run.inherited(),
        parameters=total,
        parameters_without_embeddings=total - task.model.embedding_parameters(),
        best=trainer.best and BestValidation(step=trainer.best.step, loss=trainer.best.loss),
        skipped_steps=trainer.skipped,
        **{name: loss.describe(counts) for name, loss in trainer.validation.items()},
    )
    with session.device.distributed.main_process_first():  # so that every process can read it
        if session.device.distributed.is_main:
            session.run.write_summary(summary)
    return session.run


def _resume(trainer: Trainer) -> None:
    """Restore the newest checkpoint; then remove later metrics from the run folder and write the new configuration.

    If the checkpoint cannot be restored, the folder stays unchanged.
    """
    trainer.resume()
    session, run = trainer.session, trainer.session.run
    with session.device.distributed.main_process_first():
        if session.device.distributed.is_main:
            run.truncate_after(trainer.step)
            (run.folder / SUMMARY).unlink(missing_ok=True)  # of a finished run that trains for more steps
            if run.config() != session.config:
                write_text(run.folder / "config.yaml", dump_config(session.config))
            run.set_threads(session.device.describe()["threads"])


def _log_model(session: Session, model: TransformerXL, architecture: Architecture) -> None:
    """Write a table of the network's parts to `run.log`, with the shapes, parameters and multiply-adds of each part."""
    data, counts = session.config.data, session.streams.train_counts().tolist()
    names = [name for name in architecture if name != IDENTITY]
    table = summarise(model, names, data.tgt_len, session.config.model.reach, counts)
    title = f"the network, for segments of {data.tgt_len} tokens and the configured memory"
    session.run.write_log(f"{title}:\n{table}")


def _check_resumable(run: Run, kind: Kind, device: Device, config: Config) -> None:
    """Raise `ParnasError` if `run` is finished, is of another `kind`, or used another type of device or precision."""
    environment = run.environment()
    if environment.kind != kind:
        raise ParnasError(f"{run.folder} is a {environment.kind} run, not a {kind} run; choose another folder (--run).")
    if run.finished() and not (kind == "retrain" and config.train.steps > run.config().train.steps):
        raise ParnasError(
            f"The run in {run.folder} is finished; choose another folder (--run) for a new training"
            + (", or raise train.steps to train for longer." if kind == "retrain" else ".")
        )
    now = {"device": device.device.type, "precision": device.precision}
    before = {"device": str(environment.device).partition(":")[0], "precision": environment.precision}
    for key, value in now.items():
        if before[key] != value:
            raise ParnasError(
                f"{run.folder} was started with {key} {before[key]}, not {value}; set runtime.{key}: {before[key]} to "
                "resume it, or choose another folder (--run)."
            )


def _check_changes(run: Run, config: Config, note: Note) -> None:
    """Report the changed settings of a run to resume; raise `ParnasError` if one of them must not change.

    `note` is called with a line of text for each setting in `config` that differs from the run's configuration.
    """
    before = run.config()
    refuse_changes(run, config, MAY_CHANGE)
    _refuse_other_start(run, config)
    if config.train.steps < before.train.steps:
        raise ParnasError(
            f"{run.folder} was started with train.steps {before.train.steps}, which cannot be lowered to "
            f"{config.train.steps}; set train.steps to {before.train.steps} or more."
        )
    for line in _changed_settings(before, config):
        note(f"resuming with a changed setting: {line}")


def check_same_results(run: Run, config: Config) -> None:
    """Raise `ParnasError` if `config` and the configuration of a finished run differ in a setting of its results.

    These are the settings of the run's phase without `MAY_DIFFER`.
    """
    config = resolve_paths(config)  # as the run's configuration was when it started
    if isinstance(config.model.cutoffs, str):
        config = resolve_cutoffs(config, prepare(config.data))
    _refuse_other_words(run, config)
    unread = (*OTHER_PHASE_SETTINGS[run.kind()], *MAY_DIFFER)
    _refuse_other_start(run, config)
    keys = flatten(config.model_dump())
    refuse_changes(run, config, [key for key in keys if any(f"{key}.".startswith(f"{prefix}.") for prefix in unread)])


def _refuse_other_words(run: Run, config: Config) -> None:
    """Raise `ParnasError` if a run has another word list than `config`; the path of the list may differ."""
    now = config.data.tokenizer
    if now.vocabulary is None and run.config().data.tokenizer.vocabulary is None:
        return
    before = StreamHeader.read(run.folder / STREAMS).tokenizer
    if describe_tokenizer(now).get("vocabulary") != before.get("vocabulary"):
        raise ParnasError(
            f"{run.folder} was trained with another word list; restore data.tokenizer.vocabulary, or choose another "
            "folder (--run)."
        )


def _refuse_other_start(run: Run, config: Config) -> None:
    """Raise `ParnasError` if a retraining began with other weights: from scratch, or from those of another run."""
    if run.kind() != "retrain":
        return
    inherits, inherited = config.train.inherit is not None, run.config().train.inherit is not None
    if inherits != inherited:
        way = "from the weights of another run" if inherited else "from scratch"
        raise ParnasError(f"{run.folder} was trained {way}; restore train.inherit, or choose another folder (--run).")
    source = run.inherited()
    if source is None or config.train.inherit is None or config.train.inherit == run.config().train.inherit:
        return
    # The other run may have been moved or removed, but must not be another one.
    moved = Run(Path(config.train.inherit))
    checkpoints = [*list_checkpoints(moved.supernet), *list_checkpoints(moved.checkpoints)]
    hashes = [hash_of_weights(path) for path in checkpoints]
    if hashes and source.sha256 not in hashes:
        raise ParnasError(
            f"{run.folder} was trained from the weights of {source.run}, and {moved.folder} is another run; restore "
            "train.inherit (--from), or choose another folder (--run)."
        )


def check_same_text(header: StreamHeader, before: StreamHeader, run: str) -> None:
    """Raise `ParnasError` if text or tokenizer of `header` differ from those of `before`, which `run` was trained with.

    The name of the corpus may differ if the text is the same.
    """
    if header.model_copy(update={"corpus": before.corpus}) != before:
        has_list = "vocabulary" in header.tokenizer | before.tokenizer
        raise ParnasError(
            f"The text or the tokenizer on this machine is not the one that {run} was trained with; restore the text "
            "of data.corpus" + (", or the word list of data.tokenizer.vocabulary." if has_list else ".")
        )


def refuse_changes(run: Run, config: Config, allowed: Collection[str] = ()) -> None:
    """Raise `ParnasError` if `config` and the configuration of `run` differ in a key outside `allowed`."""
    if changed := _changed_settings(run.config(), config, allowed):
        message = "\n  - ".join([f"{run.folder} was started with another configuration:", *changed])
        only_evaluation = all(line.startswith("evaluation.") for line in changed)
        hint = "pass them to parnas evaluate" if only_evaluation else "choose another folder (--run)"
        raise ParnasError(f"{message}\nRestore these settings, or {hint}.")


def _changed_settings(before: Config, now: Config, ignored: Collection[str] = ()) -> list[str]:
    """Return a line with dotted key, value `before` and value `now` for each setting that differs.

    Differences in the `ignored` keys are left out.
    """
    old, new = flatten(before.model_dump()), flatten(now.model_dump())
    return [f"{key}: {old[key]} before, {new[key]} now" for key in old if old[key] != new[key] and key not in ignored]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one dictionary with dotted keys such as `train.lr`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
