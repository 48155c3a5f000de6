"""What every training of a SuperNet has: pi, a budget, the choice of an architecture, and its log."""

from collections.abc import Mapping
from typing import Any

from parnas.architecture import Architecture
from parnas.data.batching import TrainingBatches
from parnas.model.supernet import SuperNet
from parnas.nas.budget import Budget
from parnas.nas.cost import Costs
from parnas.nas.diagnostics import Monitor, describe_collapse
from parnas.nas.rerank import held_out_losses, rank, write_rerank
from parnas.runs.records import MetricsRecord, PiRecord
from parnas.runs.run import PI
from parnas.training.optimizers import Schedule
from parnas.training.trainer import Session, TrainingTask

__all__ = ["SuperNetTask"]


class SuperNetTask(TrainingTask):
    """A training of a SuperNet that ends with the choice of an architecture.

    Args:
        session: files, device and configuration of the training.
        model: the SuperNet.
        batches: the text on which the weights are trained.
        schedule: of the learning rate of the weights.
        costs: costs of the layers; `None` without a cost target.
    """

    title = "search"

    def __init__(
        self,
        session: Session,
        model: SuperNet,
        batches: TrainingBatches,
        schedule: Schedule,
        costs: Costs | None = None,
    ) -> None:
        search = session.config.search
        self.supernet, self.search, self.costs = model, search, costs
        self.budget = Budget(costs, search.cost.target, least=search.least_layers).spend(search.cost.spend, self.pi())
        super().__init__(session, model, batches, schedule)
        self.selected: Architecture | None = None  # set when alpha is frozen
        self.monitor, self.warned = Monitor(search.candidates), False

    def rerank(self, step: int) -> Architecture:
        """Rank networks by the shared weights, store their losses in the run folder, and return the best network."""
        config, run = self.session.config, self.session.run
        # As `derive` does with a finished search, but with the weights at hand; `derive` reads the stored losses.
        self.session.reporter.note("evaluating networks with the shared weights")
        losses = held_out_losses(self.supernet, config, self.session.streams)
        ranking = rank(self.pi(), self.budget, config, losses)
        if self.distributed.is_main:
            write_rerank(run, step, ranking)
        return Architecture(ranking[0].choice.layers)

    def pi(self) -> list[dict[str, float]]:
        """Return the current pi of each block, by name of the candidate."""
        # By name, since blocks may have different candidates; an absent one has the probability 0.
        return [dict(zip(self.search.candidates, row, strict=True)) for row in self.supernet.pi().tolist()]

    def architecture(self) -> Architecture:
        """Return the selected architecture or, while alpha is trained, the most probable one within the cost target."""
        return self.selected or Architecture(self.budget.most_probable(self.pi())[0].layers)

    def log(self, record: MetricsRecord) -> None:
        """Log a line of metrics; to a line of training add diagnostics of pi, and write pi to `pi.jsonl`."""
        if record.split == "valid":
            mixture, argmax = record.mixture_loss, record.argmax_loss
            gap = {} if mixture is None or argmax is None else {"gap": mixture - argmax}
            super().log(record.model_copy(update=gap))
            return
        pi = self.supernet.pi()
        diagnostics = self.monitor.observe(pi, self.architecture())
        if self.costs is not None:
            diagnostics["expected_cost"] = (pi @ self.costs.relative(self.search.candidates).to(pi)).sum().item()
            if self.costs.metric == "latency":
                diagnostics["expected_latency_ms"] = diagnostics["expected_cost"] * self.costs.reference
        super().log(record.model_copy(update=diagnostics))
        assert record.tau is not None
        line = PiRecord(step=record.step, tau=record.tau, pi=pi.tolist(), arch=diagnostics["argmax"])
        self.session.run.append(PI, line)
        self.session.reporter.pi(self.supernet.space, line)
        warning = describe_collapse(diagnostics["identity_share"], self.search.estimator)
        if warning and not self.warned:
            self.session.reporter.note(f"warning: {warning}")
        self.warned = warning is not None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint: of weight training and diagnostics."""
        selected = None if self.selected is None else str(self.selected)
        return {**super().state_dict(), "monitor": (self.monitor.network, self.monitor.changes), "selected": selected}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; raise `ValueError` if `state` does not fit this SuperNet."""
        super().load_state_dict(state)
        self.monitor.network, self.monitor.changes = state["monitor"]
        self.selected = None if state["selected"] is None else Architecture.parse(state["selected"])
