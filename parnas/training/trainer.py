"""The one training loop. Retraining uses it as it is; the search adds gates, a temperature and alpha's optimizer."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
from parnas.training.checkpoint import (
    list_checkpoints,
    load_state,
    load_weights,
    newest_checkpoint,
    refuse_misshapen,
    restoring,
    save_checkpoint,
)
from parnas.training.device import Device
from parnas.training.perplexity import TotalLoss, measure_loss
from parnas.training.reporter import Reporter, describe_metrics
from parnas.training.schedules import learning_rate, shorten_warmup

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class Forward(NamedTuple):
    """What a forward pass gives to training."""

    loss: Tensor  # mean of the batch, nats per token
    memory: Memory
    compression: Tensor | None  # auxiliary loss of the compression of memory, where there is one


class Plan(NamedTuple):
    """How long a phase trains its weights, and how fast."""

    steps: int
    lr: float
    warmup_steps: int


@dataclass(frozen=True)
class Session:
    """What a training phase works with, whichever phase it is."""

    config: Config
    streams: TokenStreams
    device: Device
    run: Run
    reporter: Reporter


class Trainer:
    """Trains the weights of a network on one stream: `fit` is the loop, `train_step` one step of it."""

    title = "retrain"

    def __init__(self, session: Session, model: TransformerXL, batches: TrainingBatches, plan: Plan) -> None:
        self.session, self.batches = session, batches
        self.model = model.to(session.device.device)
        if session.config.runtime.compile:
            self.model.compile()
        warmup = shorten_warmup(plan.warmup_steps, plan.steps)
        if warmup != plan.warmup_steps:
            session.reporter.note(f"the warm-up of {plan.warmup_steps} steps is shortened to {warmup} of {plan.steps}")
        self.plan = plan._replace(warmup_steps=warmup)
        compressing, decay = model.compression_names(), session.config.train.weight_decay
        weights = {name: weight for name, weight in self.weights().items() if name not in compressing}
        self.parameters = list(weights.values())
        self.optimizer = make_adamw(weights, plan.lr, decay)
        # By itself, since clipping both together would let the size of an auxiliary loss reach the other weights.
        compression = {name: weight for name, weight in self.weights().items() if name in compressing}
        self.compression_parameters = list(compression.values())
        self.compression_optimizer = make_adamw(compression, plan.lr, decay) if compression else None
        self.step = 0
        self.memory: Memory | None = None
        self.seconds = 0.0
        self.recent: list[tuple[Tensor, Tensor]] = []  # loss and gradient norm of the steps since the last line
        self.compression_loss: Tensor | None = None  # of the last step
        self.logged_at, self.logged_step = time.perf_counter(), 0
        self.validation: dict[str, TotalLoss] = {}  # of the last validation
        self.writer: SummaryWriter | None = None

    # What a phase may do otherwise.

    def weights(self) -> dict[str, nn.Parameter]:
        """The parameters that the weights' optimizer trains, by name."""
        return dict(self.model.named_parameters())

    def gates(self) -> Gates | None:
        """Gates of the next forward pass; a discrete network has none."""
        return None

    def train_step(self) -> None:
        """One batch forward and backward, one update."""
        loss, self.memory, self.compression_loss = self.forward(
            self.batches.batch(self.step), self.memory, self.gates()
        )
        (loss if self.compression_loss is None else loss + self.compression_loss).backward()
        self.update_weights(loss)

    def settings(self) -> dict[str, float]:
        """The scheduled values of the current step, as they go into the metrics."""
        return {"lr": learning_rate(self.step, *self.plan)}

    def validate(self) -> dict[str, TotalLoss]:
        """Losses on the validation split: `valid` is the network's own, others say what they are of."""
        return {"valid": self.validation_loss(self.model)}

    def state(self) -> dict[str, Any]:
        """What a resumed run needs besides the weights, as tensors and plain values."""
        device = self.session.device.device
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return {
            "step": self.step,
            "seconds": self.seconds,
            "optimizer": self.optimizer.state_dict(),
            "compression_optimizer": self.compression_optimizer and self.compression_optimizer.state_dict(),
            "memory": map_memory(Tensor.detach, self.memory),
            "recent": self.recent,
            "rng": {"cpu": torch.get_rng_state(), "cuda": cuda},
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint."""
        device = self.session.device.device
        self.step, self.seconds = state["step"], state["seconds"]
        self.recent = [(loss.to(device), norm.to(device)) for loss, norm in state["recent"]]
        self.optimizer.load_state_dict(state["optimizer"])
        if self.compression_optimizer is not None:
            self.compression_optimizer.load_state_dict(state["compression_optimizer"])
        self.memory = self.to_device(state["memory"])
        torch.set_rng_state(state["rng"]["cpu"])
        if state["rng"]["cuda"] is not None:
            torch.cuda.set_rng_state(state["rng"]["cuda"], device)

    def refuse_unfit_state(self) -> None:
        """Raise `ValueError` where what was restored cannot be trained on; see `restoring`."""
        if type(self.step) is not int or not 0 <= self.step <= self.plan.steps:
            raise ValueError(f"its step is {self.step!r:.40}")
        self.seconds = float(self.seconds)
        if any(value.dim() for pair in self.recent for value in pair):
            raise ValueError("its losses are no single numbers")
        if self.memory is not None and len(self.memory) != len(self.model.blocks):
            raise ValueError(f"its memory is of {len(self.memory)} blocks")
        for optimizer in vars(self).values():
            if isinstance(optimizer, torch.optim.Optimizer):
                refuse_misshapen(optimizer)

    def log(self, record: dict[str, Any]) -> None:
        """Write and show the metrics of the last steps."""
        self.session.run.append(METRICS, record)
        self.session.run.write_log(describe_metrics(record))
        self.session.reporter.metrics(record)
        if self.writer is not None:
            for name, value in record.items():
                if isinstance(value, (int, float)) and name != "step":
                    self.writer.add_scalar(f"{record['split']}/{name}", value, record["step"])

    # The loop.

    def fit(self) -> None:
        """Train to the last step, logging, validating and saving on the way."""
        train, reporter = self.session.config.train, self.session.reporter
        self.model.train()
        started, before = time.perf_counter(), self.seconds
        self.logged_at, self.logged_step = started, self.step
        try:
            reporter.start(self.title, self.step, self.plan.steps)
            self.writer = open_tensorboard(self.session.run.folder, self.step)
            while self.step < self.plan.steps:
                last = self.step + 1 == self.plan.steps
                settings = self._apply_settings()
                self.train_step()
                self.step += 1
                reporter.advance(self.step)
                if last or self.step % train.log_every == 0:
                    self._log_training(settings)
                if last or self.step % train.eval_every == 0:
                    self._log_validation(settings)
                self.seconds = before + time.perf_counter() - started
                if last or self.step % train.save_every == 0:
                    self.save()
        finally:
            reporter.stop()
            if self.writer is not None:
                self.writer.close()

    def resume(self) -> None:
        """Go on from the newest checkpoint that verifies; without one, from the start."""
        run = self.session.run
        path = newest_checkpoint(run.checkpoints, self.session.reporter.note)
        if path is None and list_checkpoints(run.checkpoints):
            raise ParnasError(f"No checkpoint in {run.checkpoints} is whole; remove that folder to begin anew.")
        if path is not None:
            load_weights(path, self.model)
            state = load_state(path)
            with restoring(path):
                self.restore(state)
                self.refuse_unfit_state()
            self.session.reporter.note(f"resuming after step {self.step} of {self.plan.steps}")
        run.cut_after(self.step)

    def save(self) -> None:
        """Write a checkpoint, unless the steps behind it went wrong."""
        began = time.perf_counter()
        self._refuse_non_finite()
        if not all(bool(parameter.isfinite().all()) for parameter in self.model.parameters()):
            raise self._not_finite("network's weights or alpha", self.step)
        save_checkpoint(self.session.run.checkpoints, self.step, self.model, self.state())
        self.logged_at += time.perf_counter() - began  # tokens per second counts training alone

    def forward(self, batch: Batch, memory: Memory | None, gates: Gates | None) -> Forward:
        """Loss of a batch, and the memory after it."""
        device = self.session.device
        inputs, targets = (torch.from_numpy(part).to(device.device) for part in (batch.inputs, batch.targets))
        with device.autocast():
            output = self.model(inputs, None if batch.starts_epoch else memory, gates)
            nll = self.model.score(output.hidden, targets)
        return Forward(nll.mean(), output.memory, output.loss)

    def update_weights(self, loss: Tensor) -> None:
        """Clip the gradients and take a step."""
        norm = update_clipped(self.optimizer, self.parameters, self.session.config.train.clip)
        if self.compression_optimizer is not None:
            update_clipped(self.compression_optimizer, self.compression_parameters, self.session.config.train.clip)
        self.recent.append((loss.detach(), norm))

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

    def to_device(self, memory: Memory | None) -> Memory | None:
        """Memory of a checkpoint where the network is."""
        moved: Memory | None = map_memory(lambda kept: kept.to(self.session.device.device), memory)
        return moved

    def _apply_settings(self) -> dict[str, float]:
        settings = self.settings()
        for optimizer in (self.optimizer, self.compression_optimizer):
            for group in [] if optimizer is None else optimizer.param_groups:
                group["lr"] = settings["lr"]
        return settings

    def _log_training(self, settings: Mapping[str, float]) -> None:
        self._refuse_non_finite()
        loss = float(torch.stack([loss for loss, _ in self.recent]).double().mean())
        norm = float(torch.stack([norm for _, norm in self.recent]).max())
        now = time.perf_counter()
        data = self.session.config.data
        tokens = (self.step - self.logged_step) * data.batch_size * data.tgt_len
        rate = tokens / (now - self.logged_at)
        self.recent, self.logged_at, self.logged_step = [], now, self.step
        record = {"step": self.step, "split": "train", "loss": loss, "ppl": math.exp(min(loss, 700.0))}
        if self.compression_loss is not None:
            record["compression_loss"] = float(self.compression_loss.detach())
        self.log({**record, **settings, "gradient_norm": norm, "tokens_per_s": round(rate, 1)})

    def _log_validation(self, settings: Mapping[str, float]) -> None:
        began = time.perf_counter()
        self._refuse_non_finite()
        self.validation = self.validate()
        counts = self.session.streams.header.splits["valid"]
        loss = self.validation["valid"]
        if not all(math.isfinite(each.nats) for each in self.validation.values()):
            raise self._not_finite("validation loss", self.step)
        record = {"step": self.step, "split": "valid", "loss": loss.per_token, "ppl": loss.perplexity}
        record |= {"word_ppl": loss.word_perplexity(counts), "bits_per_byte": loss.bits_per_byte(counts)}
        for name, other in self.validation.items():
            if name != "valid":
                record |= {f"{name}_loss": other.per_token, f"{name}_ppl": other.perplexity}
        self.log({**record, **settings})
        self.logged_at += time.perf_counter() - began  # tokens per second counts training alone

    def _refuse_non_finite(self) -> None:
        """Raise where a loss or gradient since the last line was not finite, naming the first such step."""
        if not self.recent:
            return
        values = torch.stack([torch.stack([loss.float(), norm.float()]) for loss, norm in self.recent])  # [steps, 2]
        wrong = (~values.isfinite().all(dim=1)).nonzero()
        if len(wrong) == 0:
            return
        index = int(wrong[0])
        name = "loss" if not values[index, 0].isfinite() else "gradient"
        raise self._not_finite(name, self.step - len(self.recent) + index + 1)

    def _not_finite(self, what: str, step: int) -> Diverged:
        kept = newest_checkpoint(self.session.run.checkpoints, self.session.reporter.note)
        return Diverged(
            f"The {what} is not finite at step {step}. "
            f"The last good checkpoint is {kept or 'none, as none was written yet'}. "
            "Lower the learning rate or train.clip, lengthen the warm-up, or set runtime.precision: fp32."
        )


def open_tensorboard(folder: Path, step: int) -> "SummaryWriter | None":
    """A writer of TensorBoard scalars into `folder/tensorboard`, from `step` on; none where it is not installed."""
    if find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1 if step else None)


def update_clipped(optimizer: torch.optim.AdamW, parameters: Sequence[nn.Parameter], clip: float) -> Tensor:
    """A step of an optimizer made by `make_adamw`, with gradients whose norm is at most `clip`; the norm before.

    Parameters without gradient stay as they are. All gradients are gone afterwards.
    """
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norm = nn.utils.get_total_norm(gradients)
    # The fused optimizer divides by this as it reads the gradients: scaling them before would be one more pass.
    optimizer.grad_scale = (norm / clip).clamp(min=1)  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return norm.detach()


def make_adamw(parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float) -> torch.optim.AdamW:
    """AdamW whose weight decay spares biases, the relative ones u and v too, and norms."""
    decayed = {name for name, p in parameters.items() if p.dim() > 1 and name.rpartition(".")[2] not in ("u", "v")}
    groups = [
        {"params": [p for name, p in parameters.items() if name in decayed], "weight_decay": weight_decay},
        {"params": [p for name, p in parameters.items() if name not in decayed], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.99), fused=True)
