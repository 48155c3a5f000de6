"""The search: weights and alpha of a SuperNet, trained by the one loop."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from parnas.config import Config
from parnas.data.batching import TrainingBatches, split_share
from parnas.model.estimators import Estimator, Gates, runs_single_path
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import Memory
from parnas.nas.temperature import temperature
from parnas.run import PI, Run
from parnas.training.perplexity import TotalLoss
from parnas.training.phases import open_session, run_training
from parnas.training.reporter import Reporter
from parnas.training.trainer import Plan, Session, Trainer


class SearchTrainer(Trainer):
    """Adds gates, a temperature and a second optimizer for alpha to the training of the weights."""

    title = "search"

    def __init__(
        self, session: Session, model: SuperNet, batches: TrainingBatches, alpha_batches: TrainingBatches | None
    ) -> None:
        self.supernet, self.search = model, session.config.search
        super().__init__(session, model, batches, Plan(self.search.steps, self.search.lr, self.search.warmup_steps))
        self.alpha_batches = alpha_batches
        self.alpha_memory: Memory | None = None
        self.estimator = Estimator(self.search.estimator, self.search.blocks, self.search.space)
        device = session.device.device
        self.noise = torch.Generator(device).manual_seed(session.config.runtime.seed)
        learnable = self.search.tau_schedule == "learnable"
        self.log_tau = nn.Parameter(torch.tensor(math.log(self.search.tau_start), device=device), learnable)
        self.architecture_parameters = [*model.alphas(), *([self.log_tau] if learnable else [])]
        self.alpha_optimizer = torch.optim.Adam(self.architecture_parameters, lr=self.search.alpha_lr, fused=True)

    def weights(self) -> dict[str, nn.Parameter]:
        """All but alpha."""
        return self.supernet.weights()

    def gates(self) -> Gates:
        """Gates drawn at the current temperature."""
        return self._draw(self.alpha_batches is None and self._trains_alpha())

    def tau(self) -> Tensor | float:
        """The temperature of the current step."""
        if self.log_tau.requires_grad:
            return self.log_tau.exp()
        return temperature(
            self.search.tau_schedule, self.step, self.search.steps, self.search.tau_start, self.search.tau_end
        )

    def train_step(self) -> None:
        """One update of the weights and, once its time has come, one of alpha: by the same batch or its own."""
        super().train_step()
        if self._trains_alpha():
            if self.alpha_batches is not None:
                self._alpha_gradients(self.alpha_batches)
            self.alpha_optimizer.step()
            # Bounded here and not in tau(), where the bound would cut off the gradient that leads back from it.
            self.log_tau.data.clamp_(math.log(self.search.tau_end), math.log(self.search.tau_start))
        self.alpha_optimizer.zero_grad(set_to_none=True)

    def _alpha_gradients(self, batches: TrainingBatches) -> None:
        """Gradients of alpha alone, on text that the weights never see."""
        loss, self.alpha_memory = self.forward(batches, self.alpha_memory, self._draw(for_alpha=True))
        gradients = torch.autograd.grad(loss, self.architecture_parameters)
        for parameter, gradient in zip(self.architecture_parameters, gradients, strict=True):
            parameter.grad = gradient

    def _trains_alpha(self) -> bool:
        return self.step >= self.search.alpha_start_step

    def _draw(self, for_alpha: bool) -> Gates:
        """Gates at the current temperature, with a gradient where alpha is to learn from them."""
        with torch.set_grad_enabled(for_alpha):
            return self.estimator.draw(self.supernet.alpha(), self.tau(), self.noise)

    def settings(self) -> dict[str, float]:
        """Learning rate and temperature."""
        tau = self.tau()
        return {**super().settings(), "tau": float(tau.detach() if isinstance(tau, Tensor) else tau)}

    def validate(self) -> dict[str, TotalLoss]:
        """The SuperNet weighing by pi, and the network of the argmax, each with its own memory.

        `valid`, the SuperNet's own figure, is the former, or the latter where each step trains a single path.
        """
        by_pi = self.validation_loss(self.supernet)
        argmax = self.validation_loss(self.supernet.extract(self.supernet.architecture()))
        own = argmax if runs_single_path(self.search.estimator) else by_pi
        return {"valid": own, "mixture": by_pi, "argmax": argmax}

    def log(self, record: dict[str, Any]) -> None:
        """Metrics, and with each line of training one of pi."""
        super().log(record)
        if record["split"] == "train":
            pi = self.supernet.pi().tolist()
            self.session.run.append(PI, {"step": record["step"], "tau": record["tau"], "pi": pi})
            self.session.reporter.pi(self.supernet.space, pi)

    def state(self) -> dict[str, Any]:
        """Adds alpha's optimizer, the temperature, the noise and the memory of alpha's own text."""
        return {
            **super().state(),
            "alpha_optimizer": self.alpha_optimizer.state_dict(),
            "alpha_memory": self.alpha_memory,
            "log_tau": self.log_tau.detach(),
            "noise": self.noise.get_state(),
            "probe_means": self.estimator.means,
        }

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint."""
        super().restore(state)
        self.alpha_optimizer.load_state_dict(state["alpha_optimizer"])
        self.alpha_memory = self._to_device(state["alpha_memory"])
        self.log_tau.data.copy_(state["log_tau"])
        self.noise.set_state(state["noise"])
        self.estimator.means = state["probe_means"].to(self.log_tau.device)


def search(config: Config, folder: Path, reporter: Reporter, resume: bool = False) -> Run:
    """Train a SuperNet on the configured text into a run folder, or go on with one."""
    session = open_session(config, "search", folder, resume, reporter)
    config, data, streams = session.config, session.config.data, session.streams
    model = SuperNet(config.model, config.search.space, config.search.blocks, streams.tokenizer.vocab_size)
    for_weights, for_alpha = split_share(streams.tokens("train"), config.search.alpha_split)
    batches = TrainingBatches(for_weights, data.batch_size, data.tgt_len)
    alpha_batches = TrainingBatches(for_alpha, data.batch_size, data.tgt_len) if config.search.alpha_split else None
    trainer = SearchTrainer(session, model, batches, alpha_batches)
    return run_training(trainer, resume, model.architecture)
