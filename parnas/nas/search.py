"""The search: train the shared weights and alpha of a SuperNet in one loop.

The search is bilevel (DARTS, Liu et al. 2019, arXiv 1806.09055): find the alpha of least held-out loss, where the
weights w minimise the training loss for this alpha,

    min over alpha of  L_held-out(w*(alpha), alpha),      w*(alpha) = argmin over w of  L_train(w, alpha).

To solve the inner problem for every alpha would take too long, so gradient steps of w and of alpha alternate (the
first-order approximation). `SearchTask.train_step` is the algorithm, from top to bottom. The training of alpha, the
temperature, the noise and their schedules are in `architecture_optimizer.py`, the gradient estimators in
`parnas/model/estimators.py`.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.data.batching import Shuffle, TrainingBatches, split_share
from parnas.data.streams import Tokens
from parnas.errors import ParnasError
from parnas.model.estimators import arch_batch_size
from parnas.model.gates import DetachedGates, Gates, backward_to_alpha
from parnas.model.memory import Memory, map_memory
from parnas.model.supernet import SuperNet
from parnas.nas.architecture_optimizer import ArchitectureOptimizer
from parnas.nas.cost import Costs, costs_of_run, write_costs
from parnas.nas.supernet_task import SuperNetTask
from parnas.runs.run import Run
from parnas.training.checkpoints import Snapshot, save_checkpoint
from parnas.training.distributed import SINGLE_PROCESS, DistributedContext
from parnas.training.interruptions import NonFinite
from parnas.training.optimizers import Schedule
from parnas.training.perplexity import TotalLoss
from parnas.training.progress import Reporter
from parnas.training.session import open_session, run_task
from parnas.training.trainer import Session, StepResult

__all__ = ["check_feasible", "make_arch_batches", "prepare_costs", "search"]


class SearchTask(SuperNetTask):
    """The training of a SuperNet: shared weights with sampled gates, alpha on the same text or on a held-out split.

    Args:
        session: files, device and configuration of the training.
        model: the SuperNet.
        batches: the text on which the weights are trained.
        arch_batches: the held-out split on which alpha is trained; with `None` alpha is trained on `batches`.
        costs: costs of the layers; `None` without a cost target.
    """

    def __init__(
        self,
        session: Session,
        model: SuperNet,
        batches: TrainingBatches,
        arch_batches: TrainingBatches | None = None,
        costs: Costs | None = None,
    ) -> None:
        search = session.config.search
        self.arch_batches = arch_batches
        if (count := search.samples_of_batch(rows := session.config.data.batch_size)) < (search.gate_samples or 1):
            session.reporter.note(
                f"warning: search.gate_samples is {search.gate_samples}, which does not divide the {rows} rows of a "
                f"batch; {count} sample(s) are used"
            )
        schedule = Schedule(search.steps, search.lr, search.warmup_steps, decays=search.lr_decay)
        super().__init__(session, model, batches, schedule, costs)
        relative_costs = None if costs is None else costs.relative(search.candidates).to(session.device.device)
        self.arch_optimizer = ArchitectureOptimizer(model, search, session.config.runtime.seed, relative_costs)
        self.arch_memory: Memory | None = None  # the SuperNet's memory of the held-out split

    def train_step(self, step: int) -> StepResult:
        """Train the shared weights on one batch and, if this is an architecture step, alpha on one batch."""
        trains_alpha = self.arch_optimizer.trains_at(step)
        self.arch_optimizer.zero_grad()

        # 1. Sample gates [N, C], one sample for each part of the batch. They are detached from alpha, so that
        #    micro-batches and processes can accumulate the gradient of the gates before it goes on to alpha, in step 3.
        samples = [DetachedGates(gates) for gates in self.gates(step)]

        # 2. Weight step: update the shared weights on the networks, or mixtures, that the gates select. The backward
        #    pass also leaves a gradient in the gates if they need one.
        result = self.update_weights(self.batches.batch(step), [sample.gates for sample in samples])
        if not trains_alpha:
            return result

        # 3. Architecture gradient. With a held-out split it comes from a second batch, by the weights just updated: a
        #    layer must not be preferred for fitting its own training text. Without one, the gates' gradient is reused.
        if self.arch_batches is None:
            backward_to_alpha(samples, self.distributed.all_reduce_mean)
        else:
            self._backward_held_out(step, self.arch_batches)

        # 4. Regularisation: add the gradients of the cost penalty and of the entropy of pi.
        self.arch_optimizer.add_regularisation(step)

        # 5. Architecture step: update alpha and, if it is learnable, tau. On a GPU the trainer checks norms later, for
        #    many steps at once; if that of alpha's gradient is not finite, the norm returned here is not a number.
        norm = self.arch_optimizer.gradient_norm()
        if self.session.checks_each_step and not math.isfinite(norm.item()):
            raise NonFinite("gradient of alpha")
        self.arch_optimizer.update(step)
        return result._replace(gradient_norm=result.gradient_norm + 0 * norm)

    def _backward_held_out(self, step: int, batches: TrainingBatches) -> None:
        """Compute the gradient of alpha on the next batch of `batches`, the held-out split."""
        # An estimator may evaluate several paths on the batch: all start from the same memory, the last one's is kept.
        batch, memory = batches.batch(self.arch_optimizer.updates_before(step)), self.arch_memory

        def loss_of_gates(gates: Gates) -> Tensor:
            loss, self.arch_memory = self.weight_optimizer.accumulator.loss_of_gates(batch, memory, gates)
            return loss

        self.arch_optimizer.backward(step, loss_of_gates)

    def end_step(self, step: int) -> None:
        """Freeze alpha if `step` is `search.alpha_end_step`, the end of alpha's training."""
        if step == self.search.alpha_end_step:
            self._freeze_alpha(step)

    def _freeze_alpha(self, step: int) -> None:
        """Store the shared weights, then select an architecture, whose path is fine-tuned from now on."""
        if step < self.search.steps and self.distributed.is_main:
            # Fine-tuning fits the weights to one path. Keep those before it, which are fair to all paths, so that a
            # later `derive` can re-rank other networks with them.
            save_checkpoint(self.session.run.supernet, Snapshot.copy(step, self.supernet, {}))
        self._select(self.rerank(step) if self.search.rerank_count else self.architecture())

    def _select(self, architecture: Architecture) -> None:
        """Set the selected architecture, and make the estimator sample its path from now on."""
        self.selected = architecture
        chosen = torch.tensor([self.search.candidates.index(name) for name in architecture])
        self.arch_optimizer.estimator.select(functional.one_hot(chosen, len(self.search.candidates)))

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters that the weight step trains, by name: all but alpha."""
        return self.supernet.weights()

    def trained(self) -> list[Tensor]:
        """Return all tensors that training changes: the weights, alpha and the temperature."""
        return [*super().trained(), self.arch_optimizer.log_tau]

    def gates(self, step: int) -> list[Gates]:
        """Sample the gates of a weight step; differentiable if the step trains alpha on the same batch."""
        differentiable = self.arch_batches is None and self.arch_optimizer.trains_at(step)
        return self.arch_optimizer.sample_gates(step, self.sample_count(), differentiable)

    def sample_count(self) -> int:
        """Return the number of samples of gates in a step, before a path is fine-tuned."""
        return self.search.samples_of_batch(self.session.config.data.batch_size)

    def scheduled(self, step: int) -> dict[str, float]:
        """Return the learning rate and the temperature tau of a step, for the log."""
        tau = self.arch_optimizer.tau(step)
        return {**super().scheduled(step), "tau": float(tau.detach() if isinstance(tau, Tensor) else tau)}

    def validate(self) -> dict[str, TotalLoss]:
        """Return the validation loss of the derived network (`argmax`), and of the SuperNet with gates pi (`mixture`).

        `valid` is `mixture`. If the estimator's gates are one-hot, candidates are not trained to be mixed: the mixture
        is not evaluated, since that takes longer than anything else here, and `valid` is `argmax`.
        """
        argmax = self.validation_loss(self.supernet.extract(self.architecture()))
        if self.arch_optimizer.estimator.one_hot:
            return {"valid": argmax, "argmax": argmax}
        mixture = self.validation_loss(self.supernet)
        return {"valid": mixture, "mixture": mixture, "argmax": argmax}

    def discard_step(self) -> None:
        """Discard gradients and memory of a skipped step, including the memory of the held-out split."""
        super().discard_step()
        self.arch_memory = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state to store in a checkpoint: of weight training, architecture training and diagnostics."""
        return {
            **super().state_dict(),
            "arch_optimizer": self.arch_optimizer.state_dict(),
            "arch_memory": map_memory(self.distributed.gather_rows, self.arch_memory),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned; raise `ValueError` if `state` does not fit this search."""
        super().load_state_dict(state)
        self.arch_optimizer.load_state_dict(state["arch_optimizer"])
        rows = arch_batch_size(self.search.estimator, self.session.config.data.batch_size)
        self.arch_memory = self.local_memory(state["arch_memory"], rows)
        if state["selected"] is not None:
            self._select(Architecture.parse(state["selected"]))


def search(config: Config, folder: Path, reporter: Reporter, resume: bool = False) -> Run:
    """Train a SuperNet on the configured text, and return the run; an unfinished search in `folder` is resumed.

    Args:
        config: the configuration.
        folder: the run folder; with torchrun, the same for every process.
        reporter: receives the progress.
        resume: raise an error if `folder` holds no search to resume, instead of starting a new one.

    Raises:
        ParnasError: the folder holds a different run, the text cannot be read, or no network meets the cost target.
    """
    if config.search.parent is not None:
        raise ParnasError(
            "search.parent is set; search in a trained network by parnas search --from or parnas compress."
        )
    with open_session(config, "search", folder, resume, reporter) as session:
        config, data, streams = session.config, session.config.data, session.streams
        distributed = session.device.distributed
        model = SuperNet.from_config(config.model, config.search, streams.tokenizer.vocab_size)
        # 1. The SuperNet and its text: one share for the weights, one held out for alpha (empty: one text for both).
        weight_tokens, arch_tokens = split_share(streams.tokens("train"), config.search.alpha_share)
        rows, shuffle = distributed.local_slice(data.batch_size), Shuffle.from_config(config)
        batches = TrainingBatches(weight_tokens, data.batch_size, data.tgt_len, rows, shuffle)
        arch_batches = make_arch_batches(config, arch_tokens, distributed) if len(arch_tokens) else None
        # 2. Costs, if there is a target, and a check that a network within it exists.
        costs = prepare_costs(session) if config.search.cost.target is not None else None
        task = SearchTask(session, model, batches, arch_batches, costs)
        check_feasible(task)
        # 3. The training loop, which calls `train_step`, `end_step`, `validate` and `log`.
        return run_task(task, task.architecture)


def make_arch_batches(
    config: Config, tokens: Tokens, distributed: DistributedContext = SINGLE_PROCESS
) -> TrainingBatches:
    """Return this process's share of the batches of `tokens`, the held-out split on which alpha is trained."""
    rows = arch_batch_size(config.search.estimator, config.data.batch_size)
    own = distributed.local_slice(rows, f"data.batch_size with estimator {config.search.estimator}")
    source = f"text held out for alpha, a share of {config.search.alpha_share:g} (search.alpha_split),"
    return TrainingBatches(tokens, rows, config.data.tgt_len, own, Shuffle.from_config(config), source)


def check_feasible(task: SuperNetTask) -> None:
    """Raise `ParnasError` if no network meets the cost target; called before the first step."""
    try:
        task.budget.most_probable(task.pi())
    except ParnasError as error:
        folder = task.session.run.folder
        raise ParnasError(f"{error} Nothing was trained; you can use the folder {folder} again.") from error


def prepare_costs(session: Session) -> Costs:
    """Return the costs of layers, and store them in the run folder for later commands."""
    distributed, config = session.device.distributed, session.config
    folder, metric = session.run.folder, config.search.cost.metric
    # The main process finds the costs (latencies may have to be measured) and stores them. Then every process reads
    # the stored costs, so that all processes have the same.
    with distributed.main_process_first():
        if distributed.is_main:
            write_costs(costs_of_run(folder, config, metric, session.reporter), folder)
    return costs_of_run(folder, config, metric, session.reporter)
