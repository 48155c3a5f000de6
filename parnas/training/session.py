"""Start, resume and finish a training phase in a run folder."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from parnas.architecture import IDENTITY, Architecture
from parnas.config.loader import Config, dump_config, walk_fields
from parnas.config.schema import AUTO_CLUSTERS, EvaluationConfig
from parnas.data.cache import Note
from parnas.data.corpora import NAMES
from parnas.data.streams import StreamHeader, TokenStreams, prepare
from parnas.errors import ParnasError
from parnas.model.cutoffs import HEAD_SHARE, optimal_cutoffs
from parnas.model.summary import summarise
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.files import atomic_folder, expand_user, write_json, write_text
from parnas.runs.records import BestValidation, Kind, RunSummary
from parnas.runs.run import OTHER_PHASE_SETTINGS, STREAMS, Run
from parnas.training.checkpoints import list_checkpoints
from parnas.training.device import Device, choose_device, seed_process
from parnas.training.progress import Reporter, Silent
from parnas.training.trainer import Session, Trainer, TrainingTask

__all__ = [
    "check_same_results",
    "check_same_text",
    "find_cutoffs",
    "flatten",
    "open_session",
    "refuse_changes",
    "resolve_corpus",
    "resolve_cutoffs",
    "run_task",
]

MAY_CHANGE = {
    *("train.steps", "train.log_every", "train.eval_every", "train.save_every", "train.max_skipped_steps"),
    *("train.accumulate", "runtime.checkpoint_activations"),
    *(key for key, _ in walk_fields(EvaluationConfig, "evaluation.")),
}
"""Settings that may change when resuming. `train.steps` may grow, which changes the learning rates of later steps."""


@contextmanager
def open_session(config: Config, kind: Kind, folder: Path, resume: bool, reporter: Reporter) -> Iterator[Session]:
    """Prepare text, device and run folder for a training phase; the folder is locked inside the context.

    If the folder holds an unfinished run with a checkpoint, the session resumes it.

    Raises:
        ParnasError: the folder is in use, or holds a finished run or one of another kind or configuration; or `resume`
            is set and there is no run.
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
                    run.environment()  # raises, naming what is missing
                else:
                    run.refuse_used()
        resuming = distributed.any(resuming)
        config = resolve_corpus(config)
        streams = prepare(config.data, reporter.note)
        config = resolve_cutoffs(config, streams)
        with distributed.main_process_first():
            if resuming and distributed.is_main:
                check_same_text(streams.header, StreamHeader.read(run.folder / STREAMS), str(folder))
                _check_changes(run, config, reporter.note)
            elif distributed.is_main:
                _create_run(run, kind, config, device, streams)
        seed_process(config.runtime.seed, distributed.rank)
        yield Session(config, streams, device, run, reporter, resuming)


def _create_run(run: Run, kind: Kind, config: Config, device: Device, streams: TokenStreams) -> None:
    """Write the first files of a run folder; `streams.json` comes last, since it marks the run as started."""
    run.create(kind, config, device.describe())
    with atomic_folder(run.tokenizer) as beside:
        streams.tokenizer.save(beside)
    write_json(run.folder / STREAMS, streams.header.to_dict())


def resolve_cutoffs(config: Config, streams: TokenStreams) -> Config:
    """Return the configuration with `model.cutoffs: auto` or `min_macs` replaced by cutoffs for the training text."""
    return find_cutoffs(config, streams.train_counts()) if isinstance(config.model.cutoffs, str) else config


def find_cutoffs(config: Config, counts: NDArray[np.int64]) -> Config:
    """Return the configuration with the softmax cutoffs that are optimal for tokens that occur `counts` [V] times.

    `model.cutoffs` must be `auto`, or `min_macs` to minimise multiply-adds alone.
    """
    head_share = 0.0 if config.model.cutoffs == "min_macs" else HEAD_SHARE
    dims = config.replace(model__cutoffs=tuple(range(1, AUTO_CLUSTERS))).model.softmax_dims()
    optimum = optimal_cutoffs(counts, AUTO_CLUSTERS, config.model.d_model, dims, head_share)
    return config.replace(model__cutoffs=optimum.cutoffs)


def resolve_corpus(config: Config) -> Config:
    """Return the configuration with an absolute path if `data.corpus` is one, so that a run resumes from any folder."""
    path = expand_user(config.data.corpus)
    named = config.data.corpus in NAMES or not path.exists()
    return config if named else config.replace(data__corpus=str(path.resolve()))


def run_task(task: TrainingTask, architecture: Callable[[], Architecture]) -> Run:
    """Train a task to its last step, from the newest checkpoint when resuming; write `summary.json` and return the run.

    `architecture` returns the present architecture, which the log and the summary name.
    """
    session, trainer = task.session, Trainer(task)
    if session.resuming:
        _resume(trainer)
    elif session.device.distributed.is_main:
        _log_model(session, task.model, architecture())
    trainer.fit()
    if not trainer.validation:  # the run was cut off after its last step
        trainer.validate()
    counts = session.streams.header.splits["valid"]
    total = sum(parameter.numel() for parameter in task.model.parameters())
    summary = RunSummary(
        kind=session.run.kind(),
        arch=str(architecture()),
        steps=trainer.step,
        seconds=round(trainer.seconds, 1),
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
    """Restore the newest checkpoint; then drop later entries from the run folder and write the new configuration.

    The folder changes only after the checkpoint was restored successfully.
    """
    trainer.resume()
    session, run = trainer.session, trainer.session.run
    with session.device.distributed.main_process_first():
        if session.device.distributed.is_main:
            run.truncate_after(trainer.step)
            (run.folder / "summary.json").unlink(missing_ok=True)  # of a finished run that trains for more steps
            if run.config() != session.config:
                write_text(run.folder / "config.yaml", dump_config(session.config))


def _log_model(session: Session, model: TransformerXL, architecture: Architecture) -> None:
    """Write a table of the network's parts, with shapes, parameters and multiply-adds, to `run.log`."""
    data, counts = session.config.data, session.streams.train_counts().tolist()
    names = [name for name in architecture if name != IDENTITY]
    table = summarise(model, names, data.tgt_len, session.config.model.reach, counts)
    title = f"the network, for segments of {data.tgt_len} tokens and the configured memory"
    session.run.write_log(f"{title}:\n{table}")


def _check_resumable(run: Run, kind: Kind, device: Device, config: Config) -> None:
    """Raise `ParnasError` where a run is finished, of another kind, or used another type of device or precision."""
    environment = run.environment()
    if environment.kind != kind:
        raise ParnasError(f"{run.folder} is a {environment.kind} run, not a {kind} run; choose another folder (--run).")
    if run.finished() and not (kind == "retrain" and config.train.steps > run.config().train.steps):
        raise ParnasError(
            f"{run.folder} is finished and stays as it is; choose another folder (--run) for a new training"
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
    """Report settings that differ from those of a run to resume; raise `ParnasError` for one that must not change."""
    before = run.config()
    refuse_changes(run, config, MAY_CHANGE)
    if config.train.steps < before.train.steps:
        raise ParnasError(
            f"{run.folder} was started with train.steps {before.train.steps}, which may be raised, but not lowered to "
            f"{config.train.steps}."
        )
    for line in _changed_settings(before, config):
        note(f"resuming with another {line}")


def check_same_results(run: Run, config: Config) -> None:
    """Raise `ParnasError` if `config` differs from that of a finished run in a setting that the run's phase uses."""
    config = resolve_corpus(config)  # as the run's configuration was when it started
    if isinstance(config.model.cutoffs, str):
        config = resolve_cutoffs(config, prepare(config.data))
    unread = OTHER_PHASE_SETTINGS[run.kind()]
    keys = flatten(config.model_dump())
    refuse_changes(run, config, [key for key in keys if any(f"{key}.".startswith(f"{prefix}.") for prefix in unread)])


def check_same_text(header: StreamHeader, before: StreamHeader, run: str) -> None:
    """Raise `ParnasError` if text or tokenizer differ from those that `run` was trained with (`before`).

    The same text may have another corpus name.
    """
    if header.model_copy(update={"corpus": before.corpus}) != before:
        raise ParnasError(
            f"The text or tokenizer on this machine is not the one that {run} was trained with; restore it."
        )


def refuse_changes(run: Run, config: Config, allowed: Collection[str] = ()) -> None:
    """Raise `ParnasError` if `config` differs from the configuration of `run` in other keys than the `allowed` ones."""
    if changed := _changed_settings(run.config(), config, allowed):
        message = "\n  - ".join([f"{run.folder} was started with another configuration:", *changed])
        only_evaluation = all(line.startswith("evaluation.") for line in changed)
        hint = "pass them to parnas evaluate" if only_evaluation else "choose another folder (--run)"
        raise ParnasError(f"{message}\nRestore these settings, or {hint}.")


def _changed_settings(before: Config, now: Config, ignored: Collection[str] = ()) -> list[str]:
    """Return a line for each setting that differs, with its dotted key and both values, except the `ignored` keys."""
    old, new = flatten(before.model_dump()), flatten(now.model_dump())
    return [f"{key}: {old[key]} before, {new[key]} now" for key in old if old[key] != new[key] and key not in ignored]


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one dictionary with dotted keys such as `train.lr`."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat
