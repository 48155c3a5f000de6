"""What a training step takes, counted without data, against steps on real tensors."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small_config
from helpers.model_helpers import model_config
from helpers.supernet_helpers import one_hot
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from parnas.architecture import Architecture
from parnas.config.loader import Config, load_config
from parnas.data.batching import Batch
from parnas.data.token_frequencies import PUBLISHED, estimate_token_counts, zipf
from parnas.errors import ParnasError
from parnas.model import fused
from parnas.model.estimators import ESTIMATORS, make_path
from parnas.model.gates import DetachedGates
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.training.checkpoints import list_checkpoints, load_state
from parnas.training.device import Device
from parnas.training.planning.memory_estimate import (
    MIXED,
    MemoryEstimate,
    MemoryTracker,
    Step,
    count_retraining,
    count_search,
    path_gates,
    storage_bytes,
    without_data,
)
from parnas.training.progress import Silent
from parnas.training.retrain import retrain
from parnas.training.weight_optimizer import GradientAccumulator

ROWS, TGT_LEN, VOCABULARY = 3, 5, 20
IDS = range(4, 4 + ROWS * TGT_LEN)  # in all clusters
NETWORKS: dict[str, dict[str, Any]] = {
    "plain": {},
    "dropout": {"dropout": 0.1, "attention_dropout": 0.1},
    "pre": {"norm": "pre", "dropout": 0.1},
    "adaptive": {"cutoffs": (6, 12), "proj_factor": 2, "tie_weights": False, "dropout": 0.1},
    "narrowing": {"cutoffs": (6, 12), "div_val": 2},
    "subword features": {"cutoffs": (6, 12), "subword_features": 12},
    "pointer": {"pointer_len": 7, "dropout": 0.1},
    "compressive": {"memory": {"cmem_len": 4, "ratio": 2}, "same_length": True},
    "mixers": {"dropout": 0.1},
}
LAYERS = {"compressive": ("s", "c", "f"), "mixers": ("k", "r", "s:window=2", "s:window=9", "g")}  # "s", "f" in others
STEPS = [
    *((name, None, precision) for name in NETWORKS for precision in ("fp32", "bf16")),
    *(("dropout", estimator, "bf16") for estimator in ESTIMATORS),
    *(("compressive", estimator, "fp32") for estimator in ESTIMATORS),
    *(("mixers", estimator, "bf16") for estimator in ("uniform", "soft")),
]


def make_step(precision: str, estimator: str | None, name: str, real: bool) -> Step:
    """A step on ids in all clusters, or on none, told how many are in each tail."""
    model, letters = model_config(**NETWORKS[name]), LAYERS.get(name, ("s", "f"))
    gates: Any = None
    if estimator is None:
        network = TransformerXL.build(model, Architecture(letters), VOCABULARY)
    else:
        space = (*letters, "i")
        search = Config().replace(search__estimator=estimator, search__blocks=3, search__space=space).search
        network = supernet = SuperNet(model, search.space, search.blocks, VOCABULARY)
        kept = {name: -index for index, name in enumerate(space)}
        mixed = supernet.alpha().softmax(dim=-1)
        gates = DetachedGates(mixed if estimator in MIXED else path_gates(supernet, search, kept)).gates
    bounds = network.head.bounds[1:]
    shares = [sum(start <= each < stop for each in IDS) / len(IDS) for start, stop in pairwise(bounds)]
    step = Step(network.train(), ROWS, TGT_LEN, precision, gates, None if real else shares)
    if real:
        step.tokens = torch.tensor(IDS).view(ROWS, TGT_LEN)
    return step


@pytest.mark.parametrize("name, estimator, precision", STEPS)
def test_the_count_without_data_is_that_of_real_tensors(name: str, estimator: str | None, precision: str) -> None:
    """And its activations are those that autograd saves, besides ids, gates and the loss itself."""
    with without_data():
        counted = make_step(precision, estimator, name, real=False).count()
    step = make_step(precision, estimator, name, real=True)
    assert counted == step.count()
    assert counted.parameters == sum(parameter.nbytes for parameter in step.network.parameters())
    assert counted.buffers == sum(buffer.nbytes for buffer in step.network.buffers())
    memory, saved = step.full_memory(), list[Tensor]()
    with saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor), step.autocast():
        output = step.network(step.tokens, memory, step.gates)
        loss = step.network.score(output, step.tokens).mean()
        loss = loss if output.loss is None else loss + output.loss
    tracker = MemoryTracker()
    tracker.hold([list(step.network.parameters()), list(step.network.buffers()), memory, output.memory])
    assert counted.saved_activations == tracker.hold([saved, step.tokens, step.gates, loss])


@pytest.mark.parametrize(
    "estimator, precision", [(None, "fp32"), (None, "bf16"), ("single_path", "bf16"), ("soft", "fp32")]
)
@pytest.mark.parametrize("parts, twice", [(3, False), (1, True), (3, True)])
def test_the_step_is_the_one_of_training(parts: int, twice: bool, estimator: str | None, precision: str) -> None:
    """`GradientAccumulator` on real tensors, whose storages are counted, with ids, targets and scalars."""
    with without_data():
        step = make_step(precision, estimator, "dropout", real=False)
        step.micro_batches, step.network.checkpoint_activations = parts, twice
        counted = step.count()
    step = make_step(precision, estimator, "dropout", real=True)
    step.network.checkpoint_activations = twice
    memory = step.full_memory()
    accumulator = GradientAccumulator(step.network, [], Device(torch.device("cpu"), precision), parts)
    batch = Batch(step.tokens.numpy(), step.tokens.numpy(), starts_epoch=False)
    tracker = MemoryTracker()
    fixed = tracker.hold(list(step.network.parameters()))
    tracker.hold([memory, step.tokens, step.gates])
    with tracker:
        result = accumulator.backward(batch, memory, [step.gates])
    assert (
        abs(tracker.peak - fixed - storage_bytes(result.memory) - counted.peak) <= 2 * storage_bytes(step.tokens) + 16
    )
    assert storage_bytes([weight.grad for weight in step.network.parameters()]) == counted.gradients


def test_micro_batches_and_activation_checkpointing_take_less() -> None:
    config, counts = Config().replace(model__arch="sf"), zipf(50).tolist()

    def count(**changes: Any) -> MemoryEstimate:
        return count_retraining(config.replace(**changes), Architecture.parse("sf"), counts, 12, "bf16")

    whole = count()
    assert (
        whole.saved_activations / 4 < count(train__accumulate=4).saved_activations < whole.saved_activations / 2
    )  # the rest is weights in bf16
    assert count(train__accumulate=3).peak < whole.peak
    assert count(runtime__checkpoint_activations=True).saved_activations < whole.saved_activations / 4
    assert count(train__accumulate=5) == whole  # which does not divide the rows


def test_all_candidates_keep_more_than_one_path_and_longer_batches_more_than_short_ones() -> None:
    config = Config().replace(search__blocks=2, search__space=("s", "f"))
    counts = zipf(50).tolist()

    def count(estimator: str, rows: int = 8) -> MemoryEstimate:
        return count_search(config.replace(search__estimator=estimator), counts, rows, "bf16")

    assert (
        count("soft").saved_activations > 1.4 * count("gdas").saved_activations
    )  # the layer that keeps less is about half of it
    assert count("soft").parameters == count("uniform").parameters
    assert count("soft", 16).saved_activations > 1.8 * count("soft", 8).saved_activations


def test_the_path_is_the_one_that_keeps_most() -> None:
    """With long memory that of attention, which keeps weights for each pair of positions."""
    config = Config().replace(model__mem_len=512, search__blocks=2, search__space=(("f", "s", "i"), ("i", "f")))
    counts, rows = zipf(50).tolist(), 8
    searched = count_search(config.replace(search__estimator="uniform"), counts, rows, "fp32")
    network = count_retraining(config, Architecture("sf"), counts, rows, "fp32")
    assert 0 <= searched.saved_activations - network.saved_activations < 200  # gates
    assert (
        network.saved_activations > count_retraining(config, Architecture("ff"), counts, rows, "fp32").saved_activations
    )


def test_gradients_of_all_paths_of_a_step_are_counted() -> None:
    config = Config().replace(data__batch_size=8, search__blocks=2, search__space=("s", "f"), search__gate_samples=2)
    counts = zipf(50).tolist()
    found = count_search(config, counts, 8, "fp32")
    supernet = SuperNet.from_config(config.model, config.search, len(counts))
    accumulator = GradientAccumulator(supernet, [], Device(torch.device("cpu"), "fp32"), 1)
    ids = np.random.default_rng(0).integers(len(counts), size=(2, 8, config.data.tgt_len))
    accumulator.backward(
        Batch(*ids, starts_epoch=True), None, [make_path(one_hot(path, "sf")) for path in ("sf", "fs")]
    )
    measured = storage_bytes([weight.grad for weight in supernet.parameters()])
    assert measured == pytest.approx(found.gradients, rel=1e-3)  # but for the biases that attention layers share
    single = count_search(config.replace(search__gate_samples=1), counts, 8, "fp32")
    assert found.gradients > single.gradients
    assert found.saved_activations < 0.6 * single.saved_activations


def test_alphas_own_text_has_a_memory_of_its_own() -> None:
    config = Config().replace(search__blocks=2, search__estimator="gdas")
    counts = zipf(50).tolist()
    without = count_search(config, counts, 8, "fp32").memory
    assert count_search(config.replace(search__alpha_split=0.1), counts, 8, "fp32").memory == 2 * without
    assert count_search(config.replace(search__estimator="uniform"), counts, 8, "fp32").memory == without * 5 // 4


def test_the_parameters_are_those_of_the_published_network() -> None:
    config = load_config("configs/wikitext103-base.yaml")
    counts = zipf(PUBLISHED["wikitext-103", "word"]).tolist()
    found = count_retraining(config, Architecture.parse(config.model.arch or ""), counts, 1, "bf16")
    assert found.parameters == 4 * 151_107_538
    # Of each block the segments' 150 positions are remembered, float32 of width 410; feed-forward ones remember none.
    assert found.memory == 16 * 150 * 410 * 4


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_moments_and_average_are_those_that_a_training_keeps(optimizer: str, corpus: Path, tmp_path: Path) -> None:
    arch = "csf"
    config = small_config(corpus, train__optimizer=optimizer, train__steps=2, train__average=0.5, model__arch=arch)
    run = retrain(config, tmp_path / "run", Silent())
    state = load_state(list_checkpoints(run.checkpoints)[-1])
    optimizers = state["task"]["weight_optimizer"].values()
    states = [moments for optimizer in optimizers for moments in optimizer["state"].values()]
    counts = estimate_token_counts(config.data).counts.tolist()
    found = count_retraining(config, Architecture.parse(arch), counts, config.data.batch_size, "fp32")
    assert found.moments == sum(
        moment.nbytes for moments in states for name, moment in moments.items() if name != "step"
    )
    assert found.average == sum(weight.nbytes for weight in state["average"]["weights"])
    frozen = config.replace(train__inherit=str(run.folder), train__freeze_embedding=True, train__average=0.0)
    few = count_retraining(frozen, Architecture.parse(arch), counts, config.data.batch_size, "fp32")
    assert few.moments < found.moments
    assert few.peak < found.peak
    plain = config.replace(train__average=0.0)
    assert not count_retraining(plain, Architecture.parse(arch), counts, config.data.batch_size, "fp32").average


def test_nothing_of_a_count_is_left_for_later_networks() -> None:
    """What attention makes once for each shape must not be a tensor without data."""
    with without_data():
        make_step("fp32", None, "plain", real=False).count()
    network = make_step("fp32", None, "plain", real=True).network
    assert network(torch.zeros(1, TGT_LEN, dtype=torch.int64)).hidden.isfinite().all()


def test_a_layer_that_looks_at_its_input_is_refused() -> None:
    with pytest.raises(ParnasError, match="nonzero"), without_data():
        torch.zeros(3).nonzero()


def test_masks_of_dropout_are_freed_as_the_backward_pass_goes_on() -> None:
    """Kept as attributes of the graph they lived as long as the loss."""
    x, tracker = torch.ones(1000, requires_grad=True), MemoryTracker()
    with tracker:
        loss = fused.dropout(x, 0.5).sum()
        assert tracker.live >= storage_bytes(x)  # the mask, since the sum keeps nothing
        loss.backward()
    assert tracker.live == storage_bytes([x.grad, loss])


def test_a_text_that_is_here_is_counted_and_another_is_estimated(
    corpus: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    here = load_config("demo", [f"data.corpus={corpus}", "data.tokenizer={kind: word}"]).data
    assert estimate_token_counts(here).source == "counted in the text"
    monkeypatch.delenv("PARNAS_DATA", raising=False)
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path))
    elsewhere = load_config("configs/wikitext103-base.yaml").data
    assert len(estimate_token_counts(elsewhere).counts) == 267_735
    folded = elsewhere.model_copy(update={"tokenizer": elsewhere.tokenizer.model_copy(update={"lowercase": True})})
    with pytest.raises(ParnasError, match=r"set data\.tokenizer\.vocab_size"):
        estimate_token_counts(folded)
    assert len(estimate_token_counts(load_config("configs/wikitext2-par.yaml").data).counts) == 12_000


def test_estimated_frequencies_fall_and_end_where_wikitext_103_does() -> None:
    counts = zipf(267_735)
    assert (np.diff(counts) <= 0).all()
    share = counts / counts.sum()
    assert 103_227_021 * share[-1] == pytest.approx(3, rel=0.3)  # words that occur less often are <unk>
    assert share[20_000:].sum() == pytest.approx(0.06, abs=0.02)
