"""The one training loop. Retraining uses it as it is; the search adds gates, a temperature and alpha's optimizer."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parnas.config import Config
from parnas.data.batching import Batch, TrainingBatches
from parnas.data.streams import TokenStreams
from parnas.errors import Diverged, ParnasError
from parnas.model.estimators import Gates
from parnas.model.memory import Memory, map_memory
from parnas.model.transformer_xl import TransformerXL
from parnas.run import METRICS, Run
from parnas.training.averaging import WeightAverage
from parnas.training.checkpoint import (
    Best,
    Snapshot,
    Writer,
    checkpoint_path,
    describe_other_versions,
    load_state,
    load_weights,
    newest_checkpoint,
    restoring,
    step_of,
    verify_checkpoint,
)
from parnas.training.device import Device
from parnas.training.diagnosis import describe_kept, explained, first_wrong, place_of_gradient, place_of_loss
from parnas.training.optimizers import Muon, gradient_norm, make_adamw, refuse_misshapen, step_clipped, suits_muon
from parnas.training.passes import Passes, join_parts
from parnas.training.perplexity import TotalLoss, measure_loss
from parnas.training.randomness import random_states, restore_random_states
from parnas.training.reporter import Loop, Reporter, describe_metrics
from parnas.training.schedules import Schedule, fit_warmup, learning_rate
from parnas.training.stopping import Stopped, StopSignals


@dataclass(frozen=True)
class Session:
    """What a training phase works with, whichever phase it is."""

    config: Config
    streams: TokenStreams
    device: Device
    run: Run
    reporter: Reporter
    begun: bool = False  # whether the run is to be gone on with


class Trainer:
    """Trains the weights of a network on one stream: `fit` is the loop, `train_step` one step of it."""

    title = "retrain"

    def __init__(self, session: Session, model: TransformerXL, batches: TrainingBatches, schedule: Schedule) -> None:
        self.session, self.batches, self.ranks = session, batches, session.device.ranks
        config = session.config
        self.model = model.to(session.device.device)
        self.model.checkpoint_activations = config.runtime.checkpoint_activations
        self.model.head.label_smoothing = config.train.label_smoothing
        if config.runtime.compile:
            self.model.compile()
        self.passes = Passes(self.model, self.weights().values(), session.device, config.train.accumulate)
        rows = config.data.batch_size // self.ranks.count
        if (parts := self.passes.divide(rows)) < config.train.accumulate:
            told = f"train.accumulate is {config.train.accumulate}, which does not divide the {rows} rows of a batch"
            session.reporter.note(f"warning: {told}; they are read in {parts} part(s)")
        self.schedule = fit_warmup(schedule, session.reporter.note)
        compressing, decay = model.compression_names(), config.train.weight_decay
        weights = {name: weight for name, weight in self.weights().items() if name not in compressing}
        self.parameters = list(weights.values())
        # By itself, since clipping both together would let the size of an auxiliary loss reach the other weights.
        compression = {name: weight for name, weight in self.weights().items() if name in compressing}
        self.compression_parameters = list(compression.values())
        matrices = {name: weight for name, weight in weights.items() if suits_muon(name, weight)}
        if config.train.optimizer == "adamw":
            matrices = {}
        others = {name: weight for name, weight in weights.items() if name not in matrices}
        self.optimizers: dict[str, torch.optim.Optimizer] = {"optimizer": make_adamw(others, schedule.lr, decay)}
        if matrices:
            dtype = torch.bfloat16 if session.device.precision == "bf16" else torch.float32
            self.optimizers["muon"] = Muon(matrices.values(), schedule.lr, decay, dtype)
        if compression:
            self.optimizers["compression_optimizer"] = make_adamw(compression, schedule.lr, decay)
        self.average = WeightAverage(self.model.parameters(), schedule.steps - schedule.averaged + 1)
        self.step = 0
        self.memory: Memory | None = None
        self.seconds = 0.0
        self.recent: list[tuple[Tensor, Tensor]] = []  # loss and gradient norm of the steps since the last line
        self.skipped = 0  # steps without an update, since their gradients were not finite
        self.compression_loss: Tensor | None = None  # of the last step
        self.logged_at, self.logged_step = time.perf_counter(), 0
        self.validation: dict[str, TotalLoss] = {}  # of the last validation
        self.best: Best | None = None
        self.writer: Writer | None = None  # of checkpoints, from the first one on

    # What a phase may do otherwise.

    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters that the weights' optimizer trains, by name."""
        return dict(self.model.named_parameters())

    def trained(self) -> Sequence[Tensor]:
        """All that any optimizer trains."""
        return list(self.model.parameters())

    def gates(self) -> Gates | None:
        """Gates of the next forward pass; a discrete network has none."""
        return None

    def train_step(self) -> bool:
        """One batch forward and backward, one update; whether there was one, and not a step to be skipped."""
        return self.update_weights(self.backward(self.batches.batch(self.step), self.gates()))

    def settings(self) -> dict[str, float]:
        """The scheduled values of the current step, as they go into the metrics."""
        return {"lr": learning_rate(self.step, self.schedule)}

    def validate(self) -> dict[str, TotalLoss]:
        """Losses on the validation split: `valid` is the network's own, others say what they are of."""
        return {"valid": self.validation_loss(self.model)}

    def validate_average(self) -> None:
        """Validate with the mean of the weights, once there is one."""
        with self.average.in_place():
            self.validation = self.validate()

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights, as tensors and plain values, of all processes together."""
        self._settle_recent()
        return {
            "step": self.step,  # with which the position in the text is given, see `TrainingBatches.batch`
            "seconds": self.seconds,
            **{name: optimizer.state_dict() for name, optimizer in self.optimizers.items()},
            "memory": map_memory(self.ranks.gather, self.memory),  # of all rows, in the first process
            "recent": self.recent,
            "skipped": self.skipped,
            "best": self.best and tuple(self.best),
            "rng": random_states(self.session.device),
            "average": self.average.state(),
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint, whichever number of processes wrote it."""
        device = self.session.device.device
        self.step, self.seconds, self.skipped = state["step"], state["seconds"], state["skipped"]
        self.best = state["best"] and Best(*state["best"])
        self.recent = [(loss.to(device), norm.to(device)) for loss, norm in state["recent"]]
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(state[name])
        self.average.restore(state["average"])
        self.memory = self.own_rows(state["memory"], self.session.config.data.batch_size)
        restore_random_states(state["rng"], self.session.device, self.session.config.runtime.seed + self.step)

    def refuse_unfit_state(self) -> None:
        """Raise `ValueError` where what was restored cannot be trained on; see `restoring`."""
        if type(self.step) is not int or not 0 <= self.step <= self.schedule.steps:
            raise ValueError(f"its step is {self.step!r:.40}")
        self.seconds = float(self.seconds)
        if any(value.dim() for pair in self.recent for value in pair):
            raise ValueError("its losses are no single numbers")
        if self.memory is not None and len(self.memory) != len(self.model.blocks):
            raise ValueError(f"its memory is of {len(self.memory)} blocks")
        for optimizer in self.optimizers.values():
            refuse_misshapen(optimizer)

    def log(self, record: dict[str, Any]) -> None:
        """Write and show the metrics of the last steps."""
        self.session.run.append(METRICS, record)
        self.session.run.write_log(describe_metrics(record))
        self.session.reporter.metrics(record)

    # The loop.

    def fit(self) -> None:
        """Train to the last step, logging, validating and saving on the way.

        Raises `Stopped` where a signal asked for an end: then the checkpoint of the last step is written.
        """
        train, reporter = self.session.config.train, self.session.reporter
        self.model.train()
        started, before = time.perf_counter(), self.seconds
        self.logged_at, self.logged_step = started, self.step
        try:
            reporter.start(Loop(self.title, self.step, self.schedule.steps, folder=self.session.run.folder))
            with StopSignals() as signals, explained(lambda: self.step + 1, self.last_good):
                while self.step < self.schedule.steps:
                    last = self.step + 1 == self.schedule.steps
                    settings = self._apply_settings()
                    self.train_step()
                    self.step += 1
                    self.average.add(self.step)
                    if last or self.step % train.log_every == 0:
                        self._log_training(settings)
                    reporter.advance(self.step)
                    if last or self.step % train.eval_every == 0:
                        self._log_validation(settings)
                    self.seconds = before + time.perf_counter() - started
                    stopped_by = self.ranks.most(signals.received or 0)
                    is_best = self.best is not None and self.best.step == self.step
                    if last or stopped_by or is_best or self.step % train.save_every == 0:
                        self.save()
                    if stopped_by and not last:
                        self.finish_saving()
                        raise Stopped(stopped_by, self.step)
                self.finish_saving()
        finally:
            reporter.stop()
            if self.writer is not None:
                self.writer.close()

    def resume(self) -> None:
        """Go on from the newest checkpoint that verifies, which is the first process's to choose."""
        folder, note = self.session.run.checkpoints, self.session.reporter.note
        newest = newest_checkpoint(folder, note) if self.ranks.leads else None
        path = checkpoint_path(folder, self.ranks.most(-1 if newest is None else step_of(newest)))
        if not verify_checkpoint(path):
            raise ParnasError(f"No checkpoint in {folder} is whole; remove that folder to begin anew.")
        if other := describe_other_versions(path):
            note(f"warning: {other}")
        with explained(lambda: step_of(path), lambda: path):
            load_weights(path, self.model)
            state = load_state(path)
            with restoring(path):
                self.restore(state)
                self.refuse_unfit_state()
        note(f"resuming after step {self.step} of {self.schedule.steps}")

    def save(self) -> None:
        """Begin to write a checkpoint, unless the steps behind it went wrong."""
        began = time.perf_counter()
        self._settle_recent()
        self._refuse_non_finite()
        if not all(bool(parameter.isfinite().all()) for parameter in self.trained()):
            raise self._not_finite("network's weights or alpha", self.step)
        self.finish_saving()  # before the copies are made, so that there is never a third
        state = self.state()
        if self.ranks.leads:
            self.session.run.flush()  # a checkpoint is never on the disk before the lines of its steps
            self.writer = self.writer or Writer(self.session.run.checkpoints)
            with self.average.in_place():
                snapshot = Snapshot.of(self.step, self.model, state, self.best)
            self.writer.write(snapshot)
        self.logged_at += time.perf_counter() - began  # tokens per second counts training alone

    def finish_saving(self) -> None:
        """Until the last checkpoint is on the disk."""
        if self.writer is not None:
            self.writer.wait()

    def last_good(self) -> Path | None:
        """The newest checkpoint that verifies."""
        self.finish_saving()
        return newest_checkpoint(self.session.run.checkpoints, self.session.reporter.note)

    def backward(self, batch: Batch, gates: Gates | None) -> Tensor:
        """Gradients of a batch, of all processes; its mean loss in this one. Memory goes on."""
        loss, self.memory, self.compression_loss = self.passes.backward(batch, self.memory, gates)
        return loss

    def update_weights(self, loss: Tensor) -> bool:
        """Clip the gradients and take a step; or skip it, where they are not finite and the configuration allows."""
        clip, norm = self.session.config.train.clip, gradient_norm(self.parameters).detach()
        norms = [norm]
        if self.compression_parameters:
            norms.append(gradient_norm(self.compression_parameters).detach())
        if self.looks and not all(math.isfinite(each.item()) for each in norms):
            self.skip_step("loss" if self.ranks.any(not bool(loss.isfinite())) else "gradient")
            return False
        for name, optimizer in self.optimizers.items():
            own = norms[1] if name == "compression_optimizer" else norm
            step_clipped(optimizer, own, clip, guarded=not self.looks)
        if self.compression_parameters:
            norm = norm + 0 * norms[1]  # not finite where either is not
        self.recent.append((loss, norm))
        return True

    def validation_loss(self, model: TransformerXL) -> TotalLoss:
        """Loss of `model` on the whole validation split, with the lengths of training."""
        config, streams = self.session.config, self.session.streams
        return measure_loss(
            model,
            streams.tokens("valid"),
            streams.tokenizer.eos_id,
            self.session.device,
            batch_size=config.evaluation.batch_size,
            tgt_len=config.data.tgt_len,
            reach=config.model.reach,
        )

    def own_rows(self, memory: Memory | None, rows: int) -> Memory | None:
        """Of the memory of so many rows in a checkpoint, what this process goes on with, on its device."""
        own, device = self.ranks.share(rows), self.session.device.device
        moved: Memory | None = map_memory(lambda kept: kept[own].to(device), memory)
        return moved

    def _apply_settings(self) -> dict[str, float]:
        settings = self.settings()
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = settings["lr"]
        return settings

    def _settle_recent(self) -> None:
        """Make the losses since the last line those of all processes."""
        self.ranks.average([loss for loss, _ in self.recent])

    def _log_training(self, settings: Mapping[str, float]) -> None:
        self._settle_recent()
        self._refuse_non_finite()
        self.ranks.average([] if self.compression_loss is None else [self.compression_loss])
        now, data, recent = time.perf_counter(), self.session.config.data, self.recent
        steps, seconds = self.step - self.logged_step, now - self.logged_at
        rate = steps * data.batch_size * data.tgt_len / seconds
        self.recent, self.logged_at, self.logged_step = [], now, self.step
        if not recent or not self.ranks.leads:  # all steps since the last line were skipped; or another writes
            return
        loss = float(torch.stack([loss for loss, _ in recent]).double().mean())
        norm = float(torch.stack([norm for _, norm in recent]).max())
        record = {"step": self.step, "split": "train", "loss": loss, "ppl": math.exp(min(loss, 700.0))}
        if self.compression_loss is not None:
            record["compression_loss"] = float(self.compression_loss)
        record |= {**settings, "gradient_norm": norm}
        record |= {"tokens_per_s": round(rate, 1), "step_ms": round(1000 * seconds / steps, 3)}
        self.log(record if self.ranks.count == 1 else {**record, "processes": self.ranks.count})

    def _log_validation(self, settings: Mapping[str, float]) -> None:
        began = time.perf_counter()
        self._settle_recent()
        self._refuse_non_finite()
        self.validate_average()
        counts = self.session.streams.header.splits["valid"]
        loss = self.validation["valid"]
        if not all(math.isfinite(each.nats) for each in self.validation.values()):
            raise self._not_finite("validation loss", self.step)
        if self.best is None or loss.per_token < self.best.loss:
            self.best = Best(self.step, loss.per_token)
        record = {"step": self.step, "split": "valid", "loss": loss.per_token, "ppl": loss.perplexity}
        record |= {"word_ppl": loss.word_perplexity(counts), "bits_per_byte": loss.bits_per_byte(counts)}
        for name, other in self.validation.items():
            if name != "valid":
                record |= {f"{name}_loss": other.per_token, f"{name}_ppl": other.perplexity}
        if self.ranks.leads:
            self.log({**record, **settings})
        self.logged_at += time.perf_counter() - began  # tokens per second counts training alone

    # Numbers that go wrong.

    @property
    def looks(self) -> bool:
        """Whether each step is looked at before it counts: on the CPU, where it costs nothing; else it is to wait."""
        return self.session.device.device.type == "cpu" or self.session.config.train.skip_bad_steps > 0

    def skip_step(self, what: str) -> None:
        """Leave the weights as they are and begin with empty memory; raises where that was allowed too rarely."""
        limit = self.session.config.train.skip_bad_steps
        if self.skipped >= limit:
            raise self._not_finite(what, self.step + 1, f", first in {self._place(what, self.step)}")
        self.skipped += 1
        self.session.reporter.note(
            f"warning: step {self.step + 1} is skipped, its {what} is not finite ({self.skipped} of {limit} allowed)"
        )
        self.memory = None
        for parameter in self.trained():
            parameter.grad = None

    def _place(self, what: str, step: int) -> str:
        """Where the loss of a step goes wrong, or a gradient that there is now did."""
        if what != "loss":
            return place_of_gradient(self.model)

        def read_again() -> Tensor:
            return join_parts(list(self.passes.forward(self.batches.batch(step), None, self.gates()))).loss

        return place_of_loss(self.model, self.ranks, read_again)

    def _refuse_non_finite(self) -> None:
        """Raise where a loss or gradient since the last line was not finite, naming the first such step."""
        wrong = first_wrong(self.recent)
        if wrong is not None:
            step = self.step - wrong.steps_ago
            place = f", first in {self._place(wrong.what, step - 1)}" if wrong.what == "loss" else ""
            raise self._not_finite(wrong.what, step, place)

    def _not_finite(self, what: str, step: int, place: str = "") -> Diverged:
        return Diverged(
            f"The {what} is not finite at step {step}{place}. {describe_kept(self.last_good())} "
            "Lower the learning rate or train.clip, lengthen the warm-up, set runtime.precision: fp32, or let some "
            "such steps be skipped by train.skip_bad_steps."
        )
