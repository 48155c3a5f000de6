"""The search: weights and alpha of a SuperNet, trained by the one loop."""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from parnas.architecture import Architecture
from parnas.config import Config
from parnas.data.batching import Batch, Order, TrainingBatches, split_share
from parnas.data.streams import Tokens
from parnas.errors import ParnasError
from parnas.model.estimators import ESTIMATORS, Gates, LooseGates, drop_candidates, lesson_rows
from parnas.model.memory import Memory, map_memory
from parnas.model.supernet import SuperNet
from parnas.nas.cost import Costs, costs_of_run, penalty, write_costs
from parnas.nas.derive import choose
from parnas.nas.inherited import held_out, measure_inherited, rank_again, write_second_look
from parnas.nas.knapsack import Choice
from parnas.nas.monitor import Monitor, describe_collapse, entropies
from parnas.nas.temperature import temperature
from parnas.run import PI, Run
from parnas.training.checkpoint import Snapshot, save_checkpoint
from parnas.training.optimizers import gradient_norm, refuse_misshapen
from parnas.training.passes import join_parts
from parnas.training.perplexity import TotalLoss
from parnas.training.phases import open_session, run_training
from parnas.training.ranks import ALONE, Ranks
from parnas.training.reporter import Reporter
from parnas.training.schedules import Schedule
from parnas.training.trainer import Session, Trainer


class SearchTrainer(Trainer):
    """Adds gates, a temperature and a second optimizer for alpha to the training of the weights."""

    title = "search"

    def __init__(
        self,
        session: Session,
        model: SuperNet,
        batches: TrainingBatches,
        alpha_batches: TrainingBatches | None = None,
        costs: Costs | None = None,
    ) -> None:
        self.supernet, self.search = model, session.config.search
        super().__init__(session, model, batches, Schedule(self.search.steps, self.search.lr, self.search.warmup_steps))
        self.alpha_batches = alpha_batches
        self.alpha_memory: Memory | None = None
        self.estimator = ESTIMATORS[self.search.estimator](self.search.blocks, self.search.space)
        device = session.device.device
        self.costs = costs
        self.relative_costs = None if costs is None else costs.relative(self.search.candidates).to(device)
        self.loose: LooseGates  # of the last step
        self.monitor, self.warned = Monitor(self.search.candidates), False
        self.found: Architecture | None = None  # what the weights settle on, once alpha rests
        self.noise = torch.Generator(device).manual_seed(session.config.runtime.seed)
        learnable = self.search.tau_schedule == "learnable"
        self.log_tau = nn.Parameter(torch.tensor(math.log(self.search.tau_start), device=device), learnable)
        self.architecture_parameters = [*model.alphas(), *([self.log_tau] if learnable else [])]
        self.alpha_optimizer = torch.optim.Adam(self.architecture_parameters, lr=self.search.alpha_lr, fused=True)

    def weights(self) -> dict[str, nn.Parameter]:
        """All but alpha."""
        return self.supernet.weights()

    def trained(self) -> list[Tensor]:
        """Weights, alpha and the temperature."""
        return [*self.supernet.parameters(), self.log_tau]

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

    def backward(self, batch: Batch, gates: Gates | None) -> Tensor:
        """Gradients of the weights and of the gates."""
        assert gates is not None
        self.loose = LooseGates(gates)
        return super().backward(batch, self.loose.gates)

    def train_step(self) -> bool:
        """One update of the weights and, once its time has come, one of alpha: by the same batch or its own."""
        updated = super().train_step()
        if updated:
            self.loose.pass_on(self.ranks.average)
        if updated and self._trains_alpha():
            if self.alpha_batches is not None:
                self._learn_from(self.alpha_batches.batch(self._since_start() // self.search.alpha_every))
            self._regularise()
            if self.looks and not math.isfinite(gradient_norm(self.architecture_parameters).item()):
                self.skip_step("gradient of alpha")
                updated = False
        if updated and self._trains_alpha():
            for group in self.alpha_optimizer.param_groups:
                group["lr"] = self.search.alpha_lr * (1 - self.progress())
            self.alpha_optimizer.step()
            # Bounded here and not in tau(), where the bound would cut off the gradient that leads back from it.
            self.log_tau.data.clamp_(math.log(self.search.tau_end), math.log(self.search.tau_start))
        self.alpha_optimizer.zero_grad(set_to_none=True)
        if self.step + 1 == self.search.alpha_end_step:
            self._end_alpha(self.step + 1)
        return updated

    def skip_step(self, what: str) -> None:
        """As in any training; alpha's text begins with empty memory as well."""
        super().skip_step(what)
        self.alpha_memory = None

    def architecture(self) -> Architecture:
        """What derive would take now: the most probable network within the target, or what a second look found."""
        return self.found or Architecture(self._most_probable(1)[0].layers)

    def _end_alpha(self, step: int) -> None:
        """Find the answer, now that pi stays what it is after that step; the weights settle on it from here on."""
        began = time.perf_counter()
        self.finish_saving()
        if step < self.search.steps and self.ranks.leads:
            save_checkpoint(self.session.run.even, Snapshot.of(step, self.supernet, {}))
        self._settle(self._look_again(step) if self.search.looked_at else self.architecture())
        self.logged_at += time.perf_counter() - began  # tokens per second counts training alone

    def _settle(self, architecture: Architecture) -> None:
        self.found = architecture
        chosen = torch.tensor([self.search.candidates.index(name) for name in architecture])
        self.estimator.settled = functional.one_hot(chosen, len(self.search.candidates))

    def _most_probable(self, count: int) -> list[Choice]:
        pi = [dict(zip(self.search.candidates, row, strict=True)) for row in self.supernet.pi().tolist()]
        return choose(pi, self.costs, self.search.cost.target, count=count)

    def _look_again(self, step: int) -> Architecture:
        """The best of the most probable networks by reading held-out text; the run folder keeps the losses."""
        config, streams, run = self.session.config, self.session.streams, self.session.run
        loss_of = measure_inherited(self.supernet, config, streams, held_out(config, streams))
        chosen = self._most_probable(self.search.looked_at)
        losses = [loss_of(Architecture(choice.layers)).per_token for choice in chosen]
        if self.ranks.leads:
            write_second_look(run, step, chosen, losses)
        return Architecture(rank_again(chosen, losses, self.search.weight_of_pi)[0].choice.layers)

    def _learn_from(self, batch: Batch) -> None:
        """Gradients of alpha alone, on text that the weights never see."""
        memory: list[Memory] = []

        def loss_of(gates: Gates) -> Tensor:
            """The loss of all processes; or what has its gradient, since that is taken part by part."""
            loose, results = LooseGates(gates), []
            for result in self.passes.forward(batch, self.alpha_memory, loose.gates):
                if loose.leaf.requires_grad:
                    result.loss.backward(inputs=[loose.leaf])
                results.append(result._replace(loss=result.loss.detach()))
            whole = join_parts(results)
            memory.append(whole.memory)
            if loose.leaf.grad is None:
                self.ranks.average([whole.loss])
                return whole.loss
            loose.leaf.grad /= len(results)
            self.ranks.average([loose.leaf.grad])
            return (loose.drawn * loose.leaf.grad).sum()

        self.supernet.train(not self.estimator.forward_only)
        lesson = self.estimator.lesson(self.supernet.alpha(), self.tau(), loss_of, self.noise)
        self.supernet.train()
        self.alpha_memory = memory[-1]
        gradients = torch.autograd.grad(lesson, self.architecture_parameters, allow_unused=True)
        for parameter, gradient in zip(self.architecture_parameters, gradients, strict=True):
            parameter.grad = gradient

    def _regularise(self) -> None:
        """Add the gradients of what the objective has besides the loss: the cost above its target, and entropy."""
        pi = self.supernet.alpha().softmax(dim=-1)
        terms = pi.new_zeros(())
        if self.relative_costs is not None and self.search.cost.target is not None and self.search.cost_weight:
            terms = terms + self.cost_weight() * penalty(pi, self.relative_costs, self.search.cost.target)
        if self.search.entropy_start or self.search.entropy_end:
            terms = terms - self.entropy_weight() * entropies(pi).sum()
        if terms.requires_grad:
            terms.backward()

    def progress(self) -> float:
        """Of alpha's training: 0 at its first step, 1 once it has ended."""
        first, end = self.search.alpha_start_step, self.search.alpha_end_step
        return min(1.0, max(0.0, (self.step - first) / (end - first)))

    def cost_weight(self) -> float:
        """Weight of the cost at the current step: a line from 0, then constant."""
        cost = self.search.cost
        return self.search.cost_weight * (min(1.0, self.progress() / cost.ramp) if cost.ramp else 1.0)

    def entropy_weight(self) -> float:
        """Weight of the entropy of pi at the current step, on a line."""
        return self.search.entropy_start + (self.search.entropy_end - self.search.entropy_start) * self.progress()

    def _trains_alpha(self) -> bool:
        every = 1 if self.alpha_batches is None else self.search.alpha_every
        since = self._since_start()
        return since >= 0 and since % every == 0 and self.step < self.search.alpha_end_step

    def _since_start(self) -> int:
        return self.step - self.search.alpha_start_step

    def _draw(self, for_alpha: bool) -> Gates:
        """Gates at the current temperature, with a gradient where alpha is to learn from them."""
        with torch.set_grad_enabled(for_alpha):
            alpha = self.supernet.alpha()
            if self.search.candidate_dropout:
                alpha = drop_candidates(alpha, self.search.candidate_dropout, self.noise)
            return self.estimator.draw(alpha, self.tau(), self.noise)

    def settings(self) -> dict[str, float]:
        """Learning rate and temperature."""
        tau = self.tau()
        return {**super().settings(), "tau": float(tau.detach() if isinstance(tau, Tensor) else tau)}

    def validate(self) -> dict[str, TotalLoss]:
        """The SuperNet weighing by pi, and the network that derive would take, each with its own memory.

        `valid`, the SuperNet's own figure, is the former, or the latter where gates choose one candidate per block.
        """
        by_pi = self.validation_loss(self.supernet)
        argmax = self.validation_loss(self.supernet.extract(self.architecture()))
        own = argmax if self.estimator.one_hot else by_pi
        return {"valid": own, "mixture": by_pi, "argmax": argmax}

    def log(self, record: dict[str, Any]) -> None:
        """Metrics; with each line of training what the monitor sees, and a line of pi."""
        if record["split"] != "train":
            super().log({**record, "gap": record["mixture_loss"] - record["argmax_loss"]})
            return
        pi = self.supernet.pi()
        seen = self.monitor.look(pi, self.architecture())
        if self.costs is not None and self.relative_costs is not None:
            seen["expected_cost"] = (pi @ self.relative_costs).sum().item()
            if self.costs.metric == "latency":
                seen["expected_latency_ms"] = seen["expected_cost"] * self.costs.interleaved
        super().log({**record, **seen})
        line = {"step": record["step"], "tau": record["tau"], "pi": pi.tolist(), "arch": seen["argmax"]}
        self.session.run.append(PI, line)
        self.session.reporter.pi(self.supernet.space, line)
        warning = describe_collapse(seen["identity_share"], self.search.estimator)
        if warning and not self.warned:
            self.session.reporter.note(f"warning: {warning}")
        self.warned = warning is not None

    def state(self) -> dict[str, Any]:
        """Adds alpha's optimizer, the temperature, the noise and the memory of alpha's own text."""
        return {
            **super().state(),
            "alpha_optimizer": self.alpha_optimizer.state_dict(),
            "alpha_memory": map_memory(self.ranks.gather, self.alpha_memory),
            "log_tau": self.log_tau.detach(),
            "noise": self.noise.get_state(),
            "estimator": self.estimator.state(),
            "monitor": (self.monitor.network, self.monitor.changes),
            "found": None if self.found is None else str(self.found),
        }

    def refuse_unfit_state(self) -> None:
        """Looks at alpha's optimizer too."""
        super().refuse_unfit_state()
        refuse_misshapen(self.alpha_optimizer)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take up the state of a checkpoint."""
        super().restore(state)
        self.alpha_optimizer.load_state_dict(state["alpha_optimizer"])
        rows = lesson_rows(self.search.estimator, self.session.config.data.batch_size)
        self.alpha_memory = self.own_rows(state["alpha_memory"], rows)
        self.log_tau.data.copy_(state["log_tau"])
        self.noise.set_state(state["noise"])
        self.estimator.restore(state["estimator"], self.log_tau.device)
        self.monitor.network, self.monitor.changes = state["monitor"]
        if state["found"] is not None:
            self._settle(Architecture.parse(state["found"]))


def search(config: Config, folder: Path, reporter: Reporter, resume: bool = False) -> Run:
    """Train a SuperNet on the configured text into a run folder, or go on with the unfinished search that is there.

    resume: refuse to begin anew. With torchrun, every process calls it, with the same folder.
    """
    with open_session(config, "search", folder, resume, reporter) as session:
        config, data, streams, ranks = session.config, session.config.data, session.streams, session.device.ranks
        model = SuperNet(config.model, config.search.space, config.search.blocks, streams.tokenizer.vocab_size)
        for_weights, for_alpha = split_share(streams.tokens("train"), config.search.alpha_share)
        rows, order = ranks.share(data.batch_size), Order.of(config)
        batches = TrainingBatches(for_weights, data.batch_size, data.tgt_len, rows, order)
        alpha_batches = make_alpha_batches(config, for_alpha, ranks) if len(for_alpha) else None
        costs = settle_costs(session) if config.search.cost.target is not None else None
        trainer = SearchTrainer(session, model, batches, alpha_batches, costs)
        try:
            trainer.architecture()
        except ParnasError as error:  # no network meets the target
            raise ParnasError(f"{error} Nothing was trained; {session.run.folder} can be given again.") from error
        return run_training(trainer, trainer.architecture)


def settle_costs(session: Session) -> Costs:
    """The costs that the run keeps, to be resumed and derived from with the same: those of the leading process."""
    ranks, config = session.device.ranks, session.config
    folder, metric = session.run.folder, config.search.cost.metric
    with ranks.led():
        if ranks.leads:
            write_costs(costs_of_run(folder, config, metric, session.reporter), folder)
    return costs_of_run(folder, config, metric, session.reporter)


def make_alpha_batches(config: Config, tokens: Tokens, ranks: Ranks = ALONE) -> TrainingBatches:
    """Batches of the text that alpha has for itself."""
    rows = lesson_rows(config.search.estimator, config.data.batch_size)
    own = ranks.share(rows, f"data.batch_size with estimator {config.search.estimator}")
    return TrainingBatches(tokens, rows, config.data.tgt_len, own, Order.of(config))
