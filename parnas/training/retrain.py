"""Retraining: train the discrete network of an architecture, from scratch or from the weights of another run."""

from pathlib import Path

from parnas.config.loader import Config
from parnas.data.batching import Shuffle, TrainingBatches
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.run import Run
from parnas.training.inheritance import inherit, load_teachers
from parnas.training.loaded_run import run_architecture
from parnas.training.optimizers import Schedule
from parnas.training.progress import Reporter
from parnas.training.session import open_session, run_task
from parnas.training.trainer import StepResult, TrainingTask

__all__ = ["RetrainTask", "retrain"]


class RetrainTask(TrainingTask):
    """Trains the weights of a discrete network."""

    title = "retrain"

    def train_step(self, step: int) -> StepResult:
        """Train the weights on the batch of `step`, counted from 0."""
        return self.update_weights(self.batches.batch(step), self.gates(step))


def retrain(config: Config, folder: Path, reporter: Reporter, resume: bool = False) -> Run:
    """Train the network of `config.model.arch`, from the beginning or from an unfinished retraining in `folder`.

    Args:
        config: the configuration, with an architecture in `model.arch`.
        folder: the run folder. With torchrun, every process passes the same folder.
        reporter: receives the progress.
        resume: raise an error if `folder` holds no retraining to resume, instead of beginning a new one.

    Raises:
        ParnasError: the folder holds a finished run or a run of another kind or configuration, the text cannot be read,
            the architecture is not valid, or the weights of `train.inherit` do not fit (see `inherit`).
    """
    architecture = run_architecture(config)
    with open_session(config, "retrain", folder, resume, reporter) as session:
        config, data = session.config, session.config.data
        model = TransformerXL.build(config.model, architecture, session.streams.tokenizer.vocab_size)
        if config.train.inherit and not session.resuming:
            found = inherit(model, architecture, Path(config.train.inherit), session.streams.header)
            with session.device.distributed.main_process_first():  # so that every process can read it
                if session.device.distributed.is_main:
                    session.run.write_inherited(found)
        if config.train.freeze_embedding:
            model.freeze_embedding()
        # Continue with the batch after those of the run whose weights are inherited. If that is a search that held out
        # text for alpha, its rows were shorter: the text of the first row continues, that of the others is ahead.
        inherited = session.run.inherited()
        first = 0 if inherited is None else inherited.steps
        rows = session.device.distributed.local_slice(data.batch_size)
        tokens, shuffle = session.streams.tokens("train"), Shuffle.from_config(config)
        batches = TrainingBatches(tokens, data.batch_size, data.tgt_len, rows, shuffle, first=first)
        header, device = session.streams.header, session.device.device
        teachers = load_teachers(config.train.teachers, config.train.distill, header, model.head.bounds, device)
        return run_task(RetrainTask(session, model, batches, Schedule.of(config.train), teachers), lambda: architecture)
