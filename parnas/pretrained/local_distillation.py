"""Search in a trained network: local distillation of cheaper layers, then scores of each in place of the parent's.

The SuperNet has the parent's layer in each block as one candidate, beside cheaper ones. Those of the parent's kind
begin with its most important heads and features (`cut.py`); the others are new. All but the parent's are trained by
**local distillation** (Puzzle, arXiv 2411.19146, section 3): each is to compute what the parent's layer computes, from
the input that this has in the parent,

    loss of block b = mean (candidate_b(x_b) - parent_b(x_b))² / mean (parent_b(x_b) - x_b)².

One forward pass of the frozen parent serves all blocks. A step trains one candidate of each block, in turn.

Then each candidate is scored in place of the parent's layer, with all other layers of the parent (`probe.py`), and pi
of a block is the softmax of -KL / e, e = search.entropy_end: the distribution to which alpha converges in a search by
uniform paths (`parnas/nas/rerank.py`). So everything that reads a search reads this one too.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor, nn

from parnas.architecture import IDENTITY, Architecture, drop_identity
from parnas.config.loader import Config
from parnas.data.batching import Shuffle, TrainingBatches
from parnas.data.streams import TokenStreams
from parnas.errors import ParnasError
from parnas.model.layers import Block, ResidualLayer
from parnas.model.memory import collect_memories
from parnas.model.supernet import StochasticBlock, SuperNet
from parnas.model.transfer import to_device
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.cost import Costs
from parnas.nas.knapsack import log_weights
from parnas.nas.rerank import held_out
from parnas.nas.search import check_feasible, prepare_costs, search
from parnas.nas.supernet_task import SuperNetTask
from parnas.pretrained.cut import copy_cut
from parnas.pretrained.parent import ParnasParent
from parnas.pretrained.probe import Change, probe, rows_of
from parnas.pretrained.settings import refuse_unfinished
from parnas.runs.records import MetricsRecord
from parnas.runs.run import Run
from parnas.training.device import Device
from parnas.training.inheritance import inherited_from
from parnas.training.interruptions import NonFinite
from parnas.training.loaded_run import load, run_architecture
from parnas.training.optimizers import Schedule
from parnas.training.perplexity import TotalLoss
from parnas.training.progress import Reporter
from parnas.training.session import check_same_text, open_session, run_task
from parnas.training.trainer import Session, StepResult

__all__ = ["run_search", "search_parent"]

_LEAST_CHANGE = 1e-6  # of the parent's layer: mean square
_IMPORTANCE_TOKENS = 16_384  # of training text


class LocalDistillation(SuperNetTask):
    """The training of all candidates but those of the parent.

    Args:
        session: files, device and configuration of the training.
        model: the SuperNet, with the weights of the parent.
        parent_layers: the name of the parent's layer in each block.
        batches: the text.
        costs: costs of the layers; `None` without a cost target.
    """

    def __init__(
        self,
        session: Session,
        model: SuperNet,
        parent_layers: Sequence[str],
        batches: TrainingBatches,
        costs: Costs | None = None,
    ) -> None:
        self.parent_layers = tuple(parent_layers)
        search = session.config.search
        super().__init__(session, model, batches, Schedule(search.steps, search.lr, search.warmup_steps), costs)

    def weights(self) -> dict[str, nn.Parameter]:
        """Return the parameters of the candidates that are trained, by name."""
        kept = tuple(f"blocks.{number}.candidates.{name}." for number, name in enumerate(self.parent_layers))
        own = {name: each for name, each in self.supernet.weights().items() if name.startswith("blocks.")}
        return {name: each for name, each in own.items() if not name.startswith(kept)}

    def train_step(self, step: int) -> StepResult:
        """Train one candidate of each block to compute what the parent's layer computes."""
        batch, device = self.batches.batch(step), self.session.device
        # 1. Forward pass of the parent, and of a candidate of each block from the same input.
        self.supernet.eval()  # no dropout: the outputs are compared
        with device.autocast():
            loss = self._distil(to_device(torch.from_numpy(batch.inputs), device.device), batch.starts_epoch, step)
        # 2. Gradients of the trained candidates, averaged over all processes.
        loss.backward()
        gradients = [each.grad for each in self.weight_optimizer.parameters if each.grad is not None]
        self.distributed.all_reduce_mean(gradients)
        # 3. Check, clip and update, as in any training.
        norms, check = self.weight_optimizer.gradient_norms(), self.session.checks_each_step
        if check and not all(math.isfinite(norm.item()) for norm in norms):
            raise NonFinite("loss" if self.distributed.any(not bool(loss.isfinite())) else "gradient")
        norm = self.weight_optimizer.step(norms, skip_non_finite=not check)
        return StepResult(loss.detach(), norm)

    def _distil(self, ids: Tensor, starts_epoch: bool, step: int) -> Tensor:
        """Return the mean loss of the blocks for a segment of ids [B, T], and carry the memory on."""
        supernet, reach = self.supernet, self.supernet.config.reach
        blocks = cast(list[StochasticBlock], list(supernet.blocks))
        memory = (None,) * len(blocks) if starts_epoch or self.memory is None else self.memory
        with torch.no_grad():
            x = supernet.embed(ids)
            memory = tuple(block.prepare(own, reach) for block, own in zip(blocks, memory, strict=True))
            context = supernet.context(x, memory, reach, blocks)
        errors, changes, new_memory = [], [], []
        for block, own, name in zip(blocks, memory, self.parent_layers, strict=True):
            candidates = {key: cast(Block, layer) for key, layer in block.candidates.items()}
            memories = dict(zip(candidates, own or (None,) * len(candidates), strict=True))
            with torch.no_grad():
                output = candidates[name](x, memories[name], context)
                new_memory.append(
                    collect_memories(
                        output.memory if key == name else layer.skip(x, memories[key], context)
                        for key, layer in candidates.items()
                    )
                )
            others = [key for key, layer in candidates.items() if key != name and any(True for _ in layer.parameters())]
            if others:
                chosen = others[step % len(others)]
                candidate = candidates[chosen](x, memories[chosen], context).hidden
                changes.append((output.hidden - x).float().square().mean())
                errors.append((candidate - output.hidden).float().square().mean())
            x = output.hidden
        self.memory = tuple(new_memory)
        change = torch.stack(changes)  # of the rows of all processes, since a mean of ratios is another loss
        self.distributed.all_reduce_mean([change])
        return (torch.stack(errors) / change.clamp(min=_LEAST_CHANGE)).mean()

    def scheduled(self, step: int) -> dict[str, float]:
        """Return the learning rate of a step, and a temperature that plays no part, for the log."""
        return {**super().scheduled(step), "tau": self.search.tau_end}

    def log(self, record: MetricsRecord) -> None:
        """Log a line of metrics; the loss of a training step is no loss of a language model."""
        if record.split == "train":
            changes = {"local_loss": record.loss, "loss": math.nan, "ppl": math.nan}
            record = record.model_copy(update=changes)
        super().log(record)

    def end_step(self, step: int) -> None:
        """After the last step, score the candidates, set alpha, and select an architecture."""
        if step == self.search.steps:
            self.set_alpha(self.score())
            self.selected = self.rerank(step) if self.search.rerank_count else super().architecture()

    def architecture(self) -> Architecture:
        """Return the selected architecture; until the candidates are scored, that of the parent."""
        return self.selected or Architecture(self.parent_layers)

    def score(self) -> tuple[dict[str, Change], ...]:
        """Return what each candidate costs in place of the parent's layer, on held-out text."""
        session, note = self.session, self.session.reporter.note
        note("scoring each candidate in place of the parent's layer")
        return score_candidates(
            self.supernet, self.parent_layers, session.config, session.streams, session.device, note
        )

    def set_alpha(self, changes: Sequence[Mapping[str, Change]]) -> None:
        """Set alpha of each block so that pi is the softmax of -KL / e."""
        for alpha, of_block, name in zip(self.supernet.alphas(), changes, self.parent_layers, strict=True):
            scores = {name: 0.0} | {key: change.kl for key, change in of_block.items()}
            weights = log_weights(scores, self.search.entropy_end)
            with torch.no_grad():
                for index, key in enumerate(self.supernet.space):
                    alpha[index] = weights.get(key, 0.0)

    def validate(self) -> dict[str, TotalLoss]:
        """Return the validation loss of the selected network; until there is one, that of the parent."""
        return {"valid": self.validation_loss(self.supernet.extract(self.architecture()))}


def score_candidates(
    supernet: SuperNet,
    parent_layers: Sequence[str],
    config: Config,
    streams: TokenStreams,
    device: Device,
    note: Callable[[str], None],
) -> tuple[dict[str, Change], ...]:
    """Return for each block what each candidate costs in place of the parent's layer, on held-out text.

    Args:
        supernet: the SuperNet with the parent's layers; it is put in evaluation mode.
        parent_layers: the name of the parent's layer in each block.
        config: the configuration of the search.
        streams: the text.
        device: where the SuperNet is.
        note: receives a line for each block.
    """
    parent = ParnasParent.from_supernet(supernet.eval(), parent_layers, config.data.tgt_len)
    data, memory = config.data, config.model.mem_len
    text = rows_of(held_out(config, streams), data.batch_size, data.tgt_len, memory)
    with device.autocast():
        return probe(parent, text.to(device.device), note).changes


def search_parent(config: Config, folder: Path, reporter: Reporter, resume: bool = False) -> Run:
    """Search among cheaper layers for the network of a finished retraining, `search.parent`; return the run.

    The arguments are those of `parnas.nas.search.search`.

    Raises:
        ParnasError: as `search`; or the parent is not a finished retraining, has another text, other shapes, or layers
            that the space lacks.
    """
    parent = Run(Path(cast(str, config.search.parent)))
    with open_session(config, "search", folder, resume, reporter) as session:
        config, streams = session.config, session.streams
        layers = read_layers(parent, config)
        model = SuperNet.from_config(config.model, config.search, streams.tokenizer.vocab_size)
        if not session.resuming:
            loaded = load(parent.folder)
            check_same_text(streams.header, loaded.header, str(parent.folder))
            data, text = config.data, streams.tokens("train")[:_IMPORTANCE_TOKENS]
            ids = rows_of(text, data.batch_size, data.tgt_len, config.model.mem_len)
            inherit_layers(model, loaded.model, layers, ids[:, :-1], data.tgt_len)
            with session.device.distributed.main_process_first():  # so that every process can read it
                if session.device.distributed.is_main:
                    session.run.write_inherited(inherited_from(loaded, parent))
        rows, data = session.device.distributed.local_slice(config.data.batch_size), config.data
        tokens, shuffle = streams.tokens("train"), Shuffle.from_config(config)
        batches = TrainingBatches(tokens, data.batch_size, data.tgt_len, rows, shuffle)
        costs = prepare_costs(session) if config.search.cost.target is not None else None
        if all(set(block) <= {name, IDENTITY} for name, block in zip(layers, config.search.block_spaces, strict=True)):
            raise ParnasError("No block of search.space has a layer to train besides the parent's; add cheaper layers.")
        task = LocalDistillation(session, model, layers, batches, costs)
        check_feasible(task)
        return run_task(task, task.architecture)


def run_search(config: Config, folder: Path, reporter: Reporter, resume: bool = False) -> Run:
    """Search in the network of `search.parent`, or train a SuperNet from scratch if there is none; return the run."""
    return (search if config.search.parent is None else search_parent)(config, folder, reporter, resume)


def read_layers(parent: Run, config: Config) -> tuple[str, ...]:
    """Return the layers of the parent, one for each block.

    Raises:
        ParnasError: the parent is not a finished retraining, its shapes differ, or a block lacks its layer.
    """
    refuse_unfinished(parent)
    layers = drop_identity(run_architecture(parent.config()))
    own = config.model.model_copy(update={"arch": None})
    if own != parent.config().model.model_copy(update={"arch": None}):
        raise ParnasError(f"The section model differs from that of {parent.folder}, the parent; use its settings.")
    missing = [
        f"block {number} lacks {name}"
        for number, (name, block) in enumerate(zip(layers, config.search.block_spaces, strict=False), 1)
        if name not in block
    ]
    if len(layers) != config.search.blocks or missing:
        raise ParnasError(
            f"The parent {parent.folder} is {Architecture(layers)}, and each block of search.space must have its layer"
            + (f": {', '.join(missing)}." if missing else f", in search.blocks: {len(layers)} blocks.")
        )
    return layers


@torch.no_grad()
def inherit_layers(
    supernet: SuperNet, network: TransformerXL, layers: Sequence[str], ids: Tensor, tgt_len: int
) -> None:
    """Copy a trained network into a SuperNet, and its most important heads and features into smaller candidates.

    Args:
        supernet: the SuperNet; each block has the parent's layer among its candidates.
        network: the parent.
        layers: the name of each of its layers.
        ids: text [R, L] by which the importance is measured.
        tgt_len: tokens of a segment.
    """
    own = supernet.state_dict()
    weights = {name: each for name, each in network.state_dict().items() if not name.startswith("blocks.")}
    for number, (name, block) in enumerate(zip(layers, network.blocks, strict=True)):
        weights |= {f"blocks.{number}.candidates.{name}.{key}": each for key, each in block.state_dict().items()}
    supernet.load_state_dict(own | weights)
    importance = ParnasParent(network, layers, tgt_len).importance(ids)
    for block, layer, name, scores in zip(supernet.blocks, network.blocks, layers, importance, strict=True):
        for key, candidate in cast(StochasticBlock, block).candidates.items():
            if key == name or copy_cut(cast(Block, layer), cast(Block, candidate), scores, network.u, network.v):
                continue
            if isinstance(candidate, ResidualLayer) and isinstance(layer, ResidualLayer):  # it reads the same inputs
                candidate.layer_norm.load_state_dict(layer.layer_norm.state_dict())
