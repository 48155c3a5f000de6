"""What benchmarks/ablation.py tries that is no option of parnas, as contexts in which `retrain` does otherwise.

Each is called with nothing and lasts for one training, which must not be resumed in the middle.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parnas.data.batching import Batch, Int64s, Shuffle, TrainingBatches
from parnas.data.streams import Tokens
from parnas.model import fused
from parnas.model.blocks import Block, BlockOutput, Context
from parnas.model.heads import Embedding
from parnas.model.memory import BlockMemory
from parnas.training import optimizers, retrain, trainer, weight_optimizer
from parnas.training.optimizers import Schedule, clone_weights, copy_weights, learning_rate, make_adamw, orthogonalise
from parnas.training.perplexity import TotalLoss
from parnas.training.retrain import RetrainTask
from parnas.training.trainer import StepResult, TrainingTask

EMA_DECAY = 0.999
BETA = 0.9  # of schedule-free
DROPPED = 0.1  # of weights, layers or words
PLAIN_DROPOUT = fused.dropout  # whatever else is tried
HALVED = 0.05  # share of the segments that are about half as long


def cosine(step: int, schedule: Schedule) -> float:
    """Linear warm-up, then a half cosine to zero (Loshchilov & Hutter 2017, arXiv 1608.03983)."""
    if step < schedule.warmup_steps:
        return learning_rate(step, schedule)
    passed = (step - schedule.warmup_steps) / (schedule.steps - schedule.warmup_steps)
    return schedule.lr * (1 + math.cos(math.pi * passed)) / 2


def constant(step: int, schedule: Schedule) -> float:
    """Linear warm-up, then the peak."""
    return learning_rate(step, schedule._replace(decays=False))


@contextmanager
def validating_with(weights_of: Callable[[TrainingTask], Sequence[Tensor]]) -> Iterator[None]:
    """Validate with other values of the parameters, in their order, than those that are trained."""
    validate = TrainingTask.validate

    def validate_otherwise(self: TrainingTask) -> dict[str, TotalLoss]:
        parameters = list(self.model.parameters())
        weights = clone_weights(parameters)
        copy_weights(weights_of(self), parameters)
        try:
            return validate(self)
        finally:
            copy_weights(weights, parameters)

    with patch.object(TrainingTask, "validate", validate_otherwise):
        yield


@contextmanager
def ema() -> Iterator[None]:
    """Validate with an exponential average of the weights, whose beginning is not the initial ones.

    Polyak & Juditsky 1992.
    """
    train_step, averages = RetrainTask.train_step, dict[int, list[Tensor]]()

    def average_of(self: TrainingTask) -> list[Tensor]:
        if id(self) not in averages:
            averages[id(self)] = clone_weights(list(self.model.parameters()))
        return averages[id(self)]

    def train_and_average(self: RetrainTask, step: int) -> StepResult:
        result = train_step(self, step)
        share = 1 - min(EMA_DECAY, (step + 1) / (step + 10))
        with torch.no_grad():
            torch._foreach_lerp_(average_of(self), list(self.model.parameters()), share)
        return result

    with patch.object(RetrainTask, "train_step", train_and_average), validating_with(average_of):
        yield


class ScheduleFree(torch.optim.Optimizer):
    """AdamW without a schedule: gradients at a mixture of the iterate z and its average x (Defazio et al. 2024).

    arXiv 2405.15682, algorithm 1, with weight decay at the mixture. Parameters hold the mixture.
    """

    grad_scale: Tensor
    found_inf: Tensor | None = None

    def __init__(self, groups: Sequence[dict[str, Any]], lr: float) -> None:
        super().__init__(groups, {"lr": lr})
        self.count, self.weights = 0, 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # noqa: ARG002
        """One update."""
        self.count += 1
        self.weights += self.param_groups[0]["lr"] ** 2  # of all groups
        for group in self.param_groups:
            for y in group["params"]:
                if y.grad is None:
                    continue
                state = self.state[y]
                if not state:
                    state |= {"z": y.detach().clone(), "exp_avg_sq": torch.zeros_like(y), "step": torch.zeros(())}
                    state["exp_avg"] = y.detach().clone()  # x, by the name that checkpoints look for
                gradient, z, x = y.grad / self.grad_scale, state["z"], state["exp_avg"]
                state["exp_avg_sq"].mul_(0.99).addcmul_(gradient, gradient, value=0.01)
                denominator = (state["exp_avg_sq"] / (1 - 0.99**self.count)).sqrt_().add_(1e-8)
                z.addcdiv_(gradient, denominator, value=-group["lr"]).sub_(y, alpha=group["lr"] * group["weight_decay"])
                x.lerp_(z, group["lr"] ** 2 / self.weights)
                y.copy_(z.lerp(x, BETA))


def make_schedule_free(parameters: Mapping[str, nn.Parameter], lr: float, weight_decay: float) -> ScheduleFree:
    """In place of `make_adamw`, with its weight decay."""
    groups = make_adamw(parameters, lr, weight_decay).param_groups
    return ScheduleFree([{key: group[key] for key in ("params", "weight_decay")} for group in groups], lr)


@contextmanager
def schedule_free() -> Iterator[None]:
    """Schedule-free AdamW for all weights, at a constant learning rate; validates with its averages."""

    def averages(self: TrainingTask) -> list[Tensor]:
        state = self.weight_optimizer.optimizers["optimizer"].state
        return [state[weight]["exp_avg"] if weight in state else weight.detach() for weight in self.model.parameters()]

    with (
        patch.object(weight_optimizer, "make_adamw", make_schedule_free),
        patch.object(trainer, "learning_rate", constant),
        validating_with(averages),
    ):
        yield


def orthogonalise_apart(matrices: Tensor) -> Tensor:
    """In place of `orthogonalise`: keys and values, which lie in one matrix twice as high as wide, each by itself."""
    rows, columns = matrices.shape[1:]
    if rows != 2 * columns:
        return orthogonalise(matrices)
    return orthogonalise(matrices.view(-1, columns, columns)).view(-1, rows, columns) / 2**0.5


@contextmanager
def weight_dropout() -> Iterator[None]:
    """Each step drops weights of the layers' matrices, one mask for all rows: DropConnect (Wan et al. 2013)."""
    multiply = nn.Linear.forward

    def multiply_by_some(self: nn.Linear, x: Tensor) -> Tensor:
        if not self.training:
            return multiply(self, x)
        return F.linear(x, PLAIN_DROPOUT(self.weight, DROPPED), self.bias)

    with patch.object(nn.Linear, "forward", multiply_by_some):
        yield


@contextmanager
def layer_drop() -> Iterator[None]:
    """Each step leaves out layers; x passes unchanged, and memory goes on (Fan et al. 2020, arXiv 1909.11556)."""

    def run_or_skip(self: Block, x: Tensor, memory: BlockMemory, context: Context) -> BlockOutput:
        if self.training and torch.rand(()) < DROPPED:
            return BlockOutput(x, self.skip(x, memory, context))
        output: BlockOutput = nn.Module.__call__(self, x, memory, context)
        return output

    with patch.object(Block, "__call__", run_or_skip):
        yield


def drop_features(x: Tensor, p: float) -> Tensor:
    """In place of `fused.dropout`: the same features at all positions T of [..., T, D] (Gal & Ghahramani 2016).

    arXiv 1512.05287; Merity et al. 2017, arXiv 1708.02182, section 4.2.
    """
    return torch.addcmul(x.new_zeros(()), x, fused.keep_mask(x[..., :1, :], p), value=1 / (1 - p))


@contextmanager
def embedding_dropout() -> Iterator[None]:
    """Each step leaves out words of the vocabulary, wherever they are input (Merity et al. 2017, section 4.3)."""
    embed = Embedding.forward

    def embed_some(self: Embedding, tokens: Tensor) -> Tensor:
        vectors = embed(self, tokens)
        if not self.training:
            return vectors
        kept = fused.keep_mask(vectors.new_empty(self.bounds[-1]), DROPPED) / (1 - DROPPED)  # [V]
        dropped: Tensor = vectors * kept[tokens][..., None]
        return dropped

    with patch.object(Embedding, "forward", embed_some):
        yield


class RandomLengths(TrainingBatches):
    """Segments of lengths that are drawn for each epoch (Merity et al. 2017, arXiv 1708.02182, section 4.1).

    About `tgt_len`, or a share of `HALVED` half of it, and up to an eighth of `tgt_len` less. Never more, so that no
    step takes more memory; and ten lengths at most, since kernels are prepared for each.
    """

    def __init__(
        self, tokens: Tokens, batch_size: int, tgt_len: int, rows: slice | None, shuffle: Shuffle, first: int = 0
    ) -> None:
        super().__init__(tokens, batch_size, tgt_len, rows, shuffle, first=first)
        possible = [base - number * tgt_len // 32 for base in (tgt_len, tgt_len // 2) for number in range(5)]
        shares = np.repeat([1 - HALVED, HALVED], 5) / 5
        # Multiples of the golden ratio, which fall evenly: each length is as often as it should be, in any text.
        room = (len(tokens) - 1) // batch_size
        even = np.arange(room // min(possible)) * ((1 + math.sqrt(5)) / 2) % 1
        lengths = np.array(possible)[np.searchsorted(np.cumsum(shares)[:-1], even)]
        self._lengths: Int64s = lengths[: np.searchsorted(lengths.cumsum(), room, side="right")]
        self.segments, used = len(self._lengths), batch_size * int(self._lengths.sum())
        self._inputs = np.asarray(tokens[:used]).reshape(batch_size, -1)[self._own]
        self._targets = np.asarray(tokens[1 : used + 1]).reshape(batch_size, -1)[self._own]

    def batch(self, step: int) -> Batch:
        """As of `TrainingBatches`."""
        epoch, segment = divmod(self._first + step, self.segments)
        lengths = np.random.default_rng([self._shuffle.seed, epoch, 1]).permutation(self._lengths)
        start = int(lengths[:segment].sum())
        index = self._index(epoch, start, start + int(lengths[segment]))
        return Batch(self._inputs[index].astype(np.int64), self._targets[index].astype(np.int64), segment == 0)


TRIED: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "cosine": partial(patch.object, trainer, "learning_rate", cosine),
    "ema": ema,
    "embedding_dropout": embedding_dropout,
    "keys_apart": partial(patch.object, optimizers, "orthogonalise", orthogonalise_apart),
    "layer_drop": layer_drop,
    "locked_dropout": partial(patch.object, fused, "dropout", drop_features),
    "random_lengths": partial(patch.object, retrain, "TrainingBatches", RandomLengths),
    "schedule_free": schedule_free,
    "weight_dropout": weight_dropout,
}
"""By the name that the plans of benchmarks/ablation.py and benchmarks/variants.py give."""
