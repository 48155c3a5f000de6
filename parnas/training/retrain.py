"""Retraining: the discrete network of an architecture, from scratch."""

from pathlib import Path

from parnas.config import Config
from parnas.data.batching import Order, TrainingBatches
from parnas.model.transformer_xl import TransformerXL
from parnas.run import Run
from parnas.training.phases import open_session, run_architecture, run_training
from parnas.training.reporter import Reporter
from parnas.training.schedules import Schedule
from parnas.training.trainer import Trainer


def retrain(config: Config, folder: Path, reporter: Reporter, resume: bool = False) -> Run:
    """Train the network of `config.model.arch` from scratch into a run folder, or go on with an unfinished run there.

    resume: refuse to begin anew. With torchrun, every process calls it, with the same folder.
    """
    architecture = run_architecture(config)
    with open_session(config, "retrain", folder, resume, reporter) as session:
        config, data = session.config, session.config.data
        model = TransformerXL.build(config.model, architecture, session.streams.tokenizer.vocab_size)
        rows = session.device.ranks.share(data.batch_size)
        tokens, order = session.streams.tokens("train"), Order.of(config)
        batches = TrainingBatches(tokens, data.batch_size, data.tgt_len, rows, order)
        trainer = Trainer(session, model, batches, Schedule.of(config.train))
        return run_training(trainer, lambda: architecture)
