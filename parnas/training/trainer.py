"""The training loop: repeat the steps of a task, log, validate and save checkpoints.

A `TrainingTask` defines what a step does. Retraining and search are tasks; both train the weights by `update_weights`.
`Trainer` runs the loop of any task.
"""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from parnas.config.loader import Config
from parnas.data.batching import Batch, TrainingBatches
from parnas.data.streams import TokenStreams
from parnas.errors import Diverged, ParnasError
from parnas.model.gates import Gates
from parnas.model.memory import Memory, map_memory
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.records import MetricsRecord
from parnas.runs.run import METRICS, Run
from parnas.training.checkpoints import (
    Best,
    CheckpointWriter,
    Snapshot,
    checkpoint_path,
    load_state,
    load_weights,
    newest_checkpoint,
    restoring,
    step_of,
    verify_checkpoint,
)
from parnas.training.device import Device, random_states, restore_random_states
from parnas.training.distillation import Teachers
from parnas.training.interruptions import (
    NonFinite,
    Stopped,
    StopSignals,
    describe_last_checkpoint,
    explain_failures,
    first_non_finite,
    locate_gradient,
    locate_loss,
)
from parnas.training.optimizers import Schedule, WeightAverage, learning_rate
from parnas.training.perplexity import TotalLoss, exp_or_infinity, measure_loss
from parnas.training.progress import Loop, Reporter, describe_metrics
from parnas.training.weight_optimizer import WeightOptimizer, join_micro_batches

__all__ = ["Session", "StepResult", "TrainingTask"]


@dataclass(frozen=True)
class Session:
    """The configuration, text, device, run folder and reporter of one training phase."""

    config: Config
    streams: TokenStreams
    device: Device
    run: Run
    reporter: Reporter
    resuming: bool = False  # whether training continues from the newest checkpoint in the run folder

    @property
    def checks_each_step(self) -> bool:
        """Whether loss and gradient are checked to be finite in each step, before the weights are updated.

        True on the CPU, or if `train.max_skipped_steps` is above 0. Otherwise losses and gradients are checked for all
        steps since the last line of metrics together, so that the CPU does not wait for the GPU in each step.
        """
        return self.device.device.type == "cpu" or self.config.train.max_skipped_steps > 0


class StepResult(NamedTuple):
    """Losses and gradient norm of one training step, as scalars on the device."""

    loss: Tensor  # mean of this process's rows, nats per token
    gradient_norm: Tensor  # before clipping
    compression_loss: Tensor | None = None  # auxiliary loss of compressive memory; None without compressive memory


class RecentSteps:
    """Loss and gradient norm of each step since the last line of metrics, on the device.

    They are stored as rows of one tensor. A separate small tensor for each step would outlive the large tensors of the
    step and fragment the heap, so that the used memory would grow.
    """

    def __init__(self, device: torch.device) -> None:
        self._rows, self._count = torch.zeros(64, 2, device=device), 0

    @property
    def values(self) -> Tensor:
        """Loss and gradient norm of each step, [steps, 2]; a view, which later calls of `add` may overwrite."""
        return self._rows[: self._count]

    def add(self, loss: Tensor, gradient_norm: Tensor) -> None:
        """Add the loss and gradient norm of a step."""
        if self._count == len(self._rows):
            self._rows = torch.cat([self._rows, self._rows.new_zeros(64 + self._count, 2)])
        self._rows[self._count, 0], self._rows[self._count, 1] = loss, gradient_norm
        self._count += 1

    def clear(self) -> None:
        """Remove all steps."""
        self._count = 0

    def restore(self, values: Tensor) -> None:
        """Replace all steps by `values` from a checkpoint; raise `ValueError` if their shape is not [steps, 2]."""
        if values.dim() != 2 or values.shape[1] != 2:
            raise ValueError(f"the stored recent losses have the shape {tuple(values.shape)}, not [steps, 2]")
        self._rows, self._count = values.to(self._rows.device), len(values)


class TrainingTask:
    """One training phase: its network, its text, and the definition of a step."""

    title = ""

    def __init__(
        self,
        session: Session,
        model: TransformerXL,
        batches: TrainingBatches,
        schedule: Schedule,
        teachers: Teachers | None = None,
    ) -> None:
        config, self.session, self.batches = session.config, session, batches
        self.distributed = session.device.distributed
        self.model = model.to(session.device.device)
        self.model.checkpoint_activations = config.runtime.checkpoint_activations
        self.model.head.label_smoothing = config.train.label_smoothing
        if config.runtime.compile:
            self.model.compile()
        train, device = config.train, session.device
        self.weight_optimizer = WeightOptimizer(model, self.weights(), train, device, schedule.lr, teachers)
        self.memories = model.memory_parts + (0 if teachers is None else len(teachers.networks))
        rows = config.data.batch_size // self.distributed.world_size
        if (count := self.weight_optimizer.accumulator.divide(rows, self.sample_count())) < config.train.accumulate:
            session.reporter.note(
                f"warning: train.accumulate is {config.train.accumulate}, which does not divide the {rows} rows that "
                f"each process reads of a batch; {count} micro-batch(es) are used"
            )
        self.schedule = schedule.fit_warmup(session.reporter.note)
        self.memory: Memory | None = None
        self.last_samples: Sequence[Gates | None] = [None]  # of gates, in the last step

    # Implemented or extended by each task.

    def train_step(self, step: int) -> StepResult:
        """Train on the batch of `step`, counted from 0; raise `NonFinite` if loss or gradient is not finite."""
        raise NotImplementedError

    def end_step(self, step: int) -> None:
        """Do the task's own work after a step; `step` is the number of steps so far, skipped steps included."""

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the weight optimizer trains, by name: all but alpha and frozen ones."""
        return {name: each for name, each in self.model.named_parameters() if each.requires_grad}

    def trained(self) -> Sequence[Tensor]:
        """Return all tensors that the optimizers of the task train, alpha included."""
        return list(self.model.parameters())

    def scheduled(self, step: int) -> dict[str, float]:
        """Return the values that a schedule sets for `step`, such as the learning rate, by metric name (`lr`)."""
        return {"lr": learning_rate(step, self.schedule)}

    def sample_count(self) -> int:
        """Return the largest number of samples of gates in a step."""
        return 1

    def gates(self, step: int) -> Sequence[Gates | None]:  # noqa: ARG002
        """Return samples of gates for `step`, each for an equal part of the batch's rows; `[None]` if discrete."""
        return [None]

    def validate(self) -> dict[str, TotalLoss]:
        """Return the losses on the validation split, by name; the loss named `valid` decides which checkpoint is best.

        A search overrides this method: it validates the selected network and, if it mixes candidates, the mixture.
        """
        return {"valid": self.validation_loss(self.model)}

    def log(self, record: MetricsRecord) -> None:
        """Write a line of metrics to the run folder, and report it."""
        self.session.run.append(METRICS, record)
        self.session.run.write_log(describe_metrics(record))
        self.session.reporter.metrics(record)

    def discard_step(self) -> None:
        """Drop the gradients and the memory computed in a skipped step, which may contain NaN or infinity."""
        self.memory = None
        for parameter in self.trained():
            parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the task's state that a resumed run needs besides the weights.

        In the main process, which writes checkpoints, this includes the memory of all rows of the batch; in another
        process, the memory of the rows that this process reads.
        """
        return {
            "weight_optimizer": self.weight_optimizer.state_dict(),
            "memory": map_memory(self.distributed.gather_rows, self.memory),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned in a training with any number of processes.

        Raises:
            ValueError: the state does not fit the network.
        """
        self.weight_optimizer.load_state_dict(state["weight_optimizer"])
        self.memory = self.local_memory(state["memory"], self.session.config.data.batch_size)
        if self.memory is not None and len(self.memory) != self.memories:
            raise ValueError(f"the stored memory has {len(self.memory)} parts, not {self.memories}")

    # Shared by all tasks.

    def update_weights(self, batch: Batch, samples: Sequence[Gates | None]) -> StepResult:
        """Train the weights on one batch; if the `samples` of gates depend on alpha, also add to the gradient of alpha.

        Each sample is for an equal part of the batch's rows; `[None]` for a discrete network.

        Raises:
            NonFinite: loss or gradient is not finite, so that nothing was updated. If `Session.checks_each_step` is
                false, the device skips the update instead, without an error.
        """
        # 1. Forward and backward pass in micro-batches; keep the memory for the next segment.
        self.last_samples = samples
        forward = self.weight_optimizer.accumulator.backward(batch, self.memory, samples)
        self.memory = forward.memory
        # 2. Check loss and gradient, unless that would wait for a GPU.
        norms, check = self.weight_optimizer.gradient_norms(), self.session.checks_each_step
        if check and not all(math.isfinite(norm.item()) for norm in norms):
            raise NonFinite("loss" if self.distributed.any(not bool(forward.loss.isfinite())) else "gradient")
        # 3. Clip the gradients and update the weights.
        norm = self.weight_optimizer.step(norms, skip_non_finite=not check)
        return StepResult(forward.loss, norm, forward.compression)

    def read_again(self, step: int) -> Tensor:
        """Repeat the forward pass of the batch of `step`, without memory, and return its loss.

        `locate_loss` uses this to find the part of the network where values stop being finite. The gates are those of
        the last step, which is `step` where each step is checked.
        """
        batch = self.batches.batch(step)
        forward = self.weight_optimizer.accumulator.forward(batch, None, self.last_samples)
        return join_micro_batches(list(forward)).loss

    def validation_loss(self, model: TransformerXL) -> TotalLoss:
        """Return the loss of `model` on the whole validation split, with training's segment and memory lengths."""
        streams, shape = self.session.streams, self.session.config.validation_shape
        return measure_loss(model, streams.tokens("valid"), streams.tokenizer.eos_id, self.session.device, shape)

    def local_memory(self, memory: Memory | None, rows: int) -> Memory | None:
        """Return this process's rows of `memory`, which has `rows` rows in all, moved to the device of this process."""
        own, device = self.distributed.local_slice(rows), self.session.device.device
        local: Memory | None = map_memory(lambda tensor: tensor[own].to(device), memory)
        return local


class Trainer:
    """Trains a task to the last step of its schedule; logs metrics, validates, saves checkpoints and resumes."""

    def __init__(self, task: TrainingTask) -> None:
        self.task, self.session, self.schedule = task, task.session, task.schedule
        self.distributed = self.session.device.distributed
        self.average = WeightAverage(task.model.parameters(), self.schedule.steps - self.schedule.averaged + 1)
        self.step = 0  # steps done
        self.seconds = 0.0
        self.skipped = 0  # steps without an update, because loss or gradient was not finite
        self.recent = RecentSteps(self.session.device.device)
        self.compression_loss: Tensor | None = None  # of the last step
        self.logged_at, self.logged_step = time.perf_counter(), 0  # time and step of the last line of training metrics
        self.validation: dict[str, TotalLoss] = {}  # losses of the last validation, by name
        self.best: Best | None = None
        self.writer: CheckpointWriter | None = None  # made with the first checkpoint

    # The loop.

    def fit(self) -> None:
        """Train to the last step.

        Raises:
            Stopped: the process received a signal to end; a checkpoint of the step just finished is written.
            Diverged: a loss, a gradient or a weight is not finite.
        """
        train, reporter, task = self.session.config.train, self.session.reporter, self.task
        task.model.train()
        started, before = time.perf_counter(), self.seconds
        self.logged_at, self.logged_step = started, self.step
        try:
            reporter.start(Loop(task.title, self.step, self.schedule.steps, folder=self.session.run.folder))
            with StopSignals() as signals, explain_failures(lambda: self.step, self.last_checkpoint):
                while self.step < self.schedule.steps:
                    # 1. Train on one batch with the scheduled learning rate.
                    scheduled = task.scheduled(self.step)
                    self.train_step(scheduled["lr"])
                    last = self.step == self.schedule.steps
                    # 2. Log the means since the last line of metrics.
                    if last or self.step % train.log_every == 0:
                        self._log_training(scheduled)
                    reporter.advance(self.step)
                    # 3. Validate.
                    if last or self.step % train.eval_every == 0:
                        self._log_validation(scheduled)
                    self.seconds = before + time.perf_counter() - started
                    # 4. Save at intervals, after the best validation so far, and before the loop ends.
                    stopped_by = self.distributed.max(signals.received or 0)
                    is_best = self.best is not None and self.best.step == self.step
                    if last or stopped_by or is_best or self.step % train.save_every == 0:
                        self.save()
                    # 5. End early where a process received a signal.
                    if stopped_by and not last:
                        self.finish_saving()
                        raise Stopped(stopped_by, self.step)
                self.finish_saving()
        finally:
            reporter.stop()
            if self.writer is not None:
                self.writer.close()

    def train_step(self, lr: float) -> None:
        """Do one step of the task at the learning rate `lr`; skip the update if loss or gradient is not finite."""
        self.task.weight_optimizer.set_learning_rate(lr)
        try:
            result = self.task.train_step(self.step)
        except NonFinite as error:
            self._skip_step(error.quantity)
        else:
            self.recent.add(result.loss, result.gradient_norm)
            self.compression_loss = result.compression_loss
        self.step += 1
        with self._off_the_clock():
            self.task.end_step(self.step)
        self.average.add(self.step)

    def validate(self) -> None:
        """Measure the losses on the validation split, with the averaged weights if there are any; set `validation`."""
        with self.average.in_place():
            self.validation = self.task.validate()

    def record(self) -> None:
        """Validate and save the network as it is after the last step, without training it."""
        self.step = self.schedule.steps
        self._log_validation(self.task.scheduled(self.step - 1))
        self.save()

    # Metrics.

    @contextmanager
    def _off_the_clock(self) -> Iterator[None]:
        """Exclude the time inside the context from the logged tokens per second, which measure training alone."""
        began = time.perf_counter()
        yield
        self.logged_at += time.perf_counter() - began

    def _log_training(self, scheduled: Mapping[str, float]) -> None:
        """Log the steps since the last line of metrics: their mean loss, largest gradient norm and speed."""
        self._check_recent()
        compression_loss = self._mean_compression_loss()
        now, data, recent = time.perf_counter(), self.session.config.data, self.recent.values.clone()
        steps, seconds = self.step - self.logged_step, now - self.logged_at
        self.recent.clear()
        self.logged_at, self.logged_step = now, self.step
        if not len(recent) or not self.distributed.is_main:  # all steps were skipped, or another process logs
            return
        loss = float(recent[:, 0].double().mean())
        optional: dict[str, Any] = {}
        if compression_loss is not None:
            optional["compression_loss"] = compression_loss
        if self.distributed.world_size > 1:
            optional["processes"] = self.distributed.world_size
        self.task.log(
            MetricsRecord(
                step=self.step,
                split="train",
                loss=loss,
                ppl=exp_or_infinity(loss),
                gradient_norm=float(recent[:, 1].max()),
                tokens_per_s=round(steps * data.batch_size * data.tgt_len / seconds, 1),
                step_ms=round(1000 * seconds / steps, 3),
                **scheduled,
                **optional,
            )
        )

    def _mean_compression_loss(self) -> float | None:
        """Return the mean auxiliary loss of the last step over the processes that have one; `None` if none has one.

        In a search, each process may train another path, with or without compressive memory.
        """
        if not self.task.model.compresses():
            return None
        own = self.compression_loss
        pair = self.recent.values.new_tensor([0.0 if own is None else float(own), float(own is not None)])
        self.distributed.all_reduce_mean([pair])
        loss, share = pair.tolist()
        return loss / share if share else None

    def _log_validation(self, scheduled: Mapping[str, float]) -> None:
        """Validate, set `best` if the loss is the lowest so far, and log the loss per token, word and byte."""
        with self._off_the_clock():
            self._check_recent()
            self.validate()
            if not all(math.isfinite(loss.nats) for loss in self.validation.values()):
                raise self._diverged("validation loss", self.step)
            counts, loss = self.session.streams.header.splits["valid"], self.validation["valid"]
            if self.best is None or loss.per_token < self.best.loss:
                self.best = Best(self.step, loss.per_token)
            others: dict[str, Any] = {}
            for name, other in self.validation.items():
                if name != "valid":
                    others |= {f"{name}_loss": other.per_token, f"{name}_ppl": other.perplexity}
            record = MetricsRecord(
                step=self.step,
                split="valid",
                loss=loss.per_token,
                ppl=loss.perplexity,
                word_ppl=loss.word_perplexity(counts),
                bits_per_byte=loss.bits_per_byte(counts),
                **others,
                **scheduled,
            )
            if self.distributed.is_main:
                self.task.log(record)

    # Checkpoints.

    def save(self) -> None:
        """Check that all weights are finite, then start to write a checkpoint in the background.

        Raises:
            Diverged: a loss or gradient norm since the last line of metrics, or a weight, is not finite.
        """
        with self._off_the_clock():
            # 1. Save only finite numbers, so that every checkpoint can be resumed from.
            self._check_recent()
            if not all(bool(parameter.isfinite().all()) for parameter in self.task.trained()):
                raise self._diverged("value of a weight or of alpha", self.step)
            # 2. Wait for the previous checkpoint, so that memory holds one copy at a time.
            self.finish_saving()
            # 3. Collect the state of all processes, and write a copy of it in the background.
            state = self.state_dict()
            if self.distributed.is_main:
                self.session.run.flush()  # a checkpoint must not reach the disk before the metrics of its steps
                self.writer = self.writer or CheckpointWriter(self.session.run.checkpoints)
                with self.average.in_place():
                    snapshot = Snapshot.copy(self.step, self.task.model, state, self.best)
                self.writer.write(snapshot)

    def finish_saving(self) -> None:
        """Wait until the last checkpoint is written; raise the error if writing it failed."""
        if self.writer is not None:
            self.writer.wait()

    def last_checkpoint(self) -> Path | None:
        """Wait if a checkpoint is being written, then return the newest intact checkpoint; `None` if there is none."""
        self.finish_saving()
        return newest_checkpoint(self.session.run.checkpoints, self.session.reporter.note)

    def resume(self) -> None:
        """Restore the newest intact checkpoint; the main process chooses it for all processes.

        Raises:
            ParnasError: no checkpoint is intact, or the state in the checkpoint does not fit this training.
        """
        folder, note = self.session.run.checkpoints, self.session.reporter.note
        newest = newest_checkpoint(folder, note) if self.distributed.is_main else None
        path = checkpoint_path(folder, self.distributed.max(-1 if newest is None else step_of(newest)))
        if newest is None and not verify_checkpoint(path):
            raise ParnasError(f"No checkpoint in {folder} is intact; remove this folder to train from the beginning.")
        with explain_failures(lambda: step_of(path), lambda: path):
            load_weights(path, self.task.model)
            state = load_state(path)
            with restoring(path):
                self.load_state_dict(state)
        note(f"resuming after step {self.step} of {self.schedule.steps}")

    def state_dict(self) -> dict[str, Any]:
        """Return the content of a checkpoint besides the weights, as tensors and plain values."""
        return {
            "step": self.step,  # determines the position in the text too, see `TrainingBatches.batch`
            "seconds": self.seconds,
            "recent": self.recent.values,
            "skipped": self.skipped,
            "best": self.best and tuple(self.best),
            "rng": random_states(self.session.device),
            "average": self.average.state_dict(),
            "task": self.task.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state that `state_dict` returned; raise `ValueError` if it does not fit this training."""
        self.step, self.seconds, self.skipped = state["step"], float(state["seconds"]), state["skipped"]
        if type(self.step) is not int or not 0 <= self.step <= self.schedule.steps:
            raise ValueError(f"the stored step is {self.step!r:.40}, but must be from 0 to {self.schedule.steps}")
        self.best = state["best"] and Best(*state["best"])
        self.recent.restore(state["recent"])
        self.average.load_state_dict(state["average"])
        self.task.load_state_dict(state["task"])
        restore_random_states(state["rng"], self.session.device, self.session.config.runtime.seed + self.step)

    # Numbers that are not finite.

    def _check_recent(self) -> None:
        """Average the losses since the last line of metrics over all processes, and check that all values are finite.

        Raises:
            Diverged: a loss or gradient norm is not finite; the message names the first step with such a value.
        """
        if len(losses := self.recent.values[:, 0]):
            self.distributed.all_reduce_mean([losses])
        if failure := first_non_finite(self.recent.values):
            steps_ago, quantity = failure
            step = self.step - steps_ago
            place = f", first in {self._locate('loss', step - 1)}" if quantity == "loss" else ""
            raise self._diverged(quantity, step, place)

    def _skip_step(self, quantity: str) -> None:
        """Discard a step whose `quantity`, "loss" or "gradient", is not finite.

        Raises:
            Diverged: `train.max_skipped_steps` steps were discarded before.
        """
        limit = self.session.config.train.max_skipped_steps
        if self.skipped >= limit:
            raise self._diverged(quantity, self.step + 1, f", first in {self._locate(quantity, self.step)}")
        self.skipped += 1
        self.session.reporter.note(
            f"warning: step {self.step + 1} is skipped: its {quantity} is not finite (skip {self.skipped} of at most "
            f"{limit}, train.max_skipped_steps)"
        )
        self.task.discard_step()

    def _locate(self, quantity: str, step: int) -> str:
        """Return the part of the network, such as "block 3", where a loss or gradient stops being finite.

        `quantity` is "loss", for the batch of `step`, or "gradient", for the gradients that the parameters hold now.
        """
        if quantity != "loss":
            return locate_gradient(self.task.model)
        return locate_loss(self.task.model, self.distributed, lambda: self.task.read_again(step))

    def _diverged(self, quantity: str, step: int, place: str = "") -> Diverged:
        return Diverged(
            f"The {quantity} is not finite at step {step}{place}. {describe_last_checkpoint(self.last_checkpoint())} "
            "Lower the learning rate or train.clip, lengthen the warm-up, set runtime.precision: fp32, or allow some "
            "such steps to be skipped by train.max_skipped_steps."
        )
