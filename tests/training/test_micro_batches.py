"""Less memory, the same numbers: gradients in parts, and activations that are computed twice."""

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_config
from helpers.model_helpers import VOCABULARY, model_config, random_ids
from helpers.supernet_helpers import one_hot
from helpers.training_helpers import Notes, Phase, assert_same_weights, final_weights

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.config.schema import SearchConfig
from parnas.data.batching import Batch
from parnas.model import fused
from parnas.model.estimators import UniformPath, make_path
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.search import search
from parnas.training.device import Device
from parnas.training.distributed import DistributedContext
from parnas.training.progress import Silent
from parnas.training.retrain import retrain
from parnas.training.weight_optimizer import GradientAccumulator, rows_of_micro_batch, share_out


@pytest.mark.parametrize(
    "changes",
    [
        {"model__arch": "sfs"},
        {"model__arch": "scf", "model__memory__cmem_len": 4, "model__memory__ratio": 2},
        {"model__arch": "sf", "model__cutoffs": (5, 12)},
    ],
)
def test_accumulated_gradients_are_those_of_the_batch(changes: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__dropout=0.0, train__steps=12, **changes)
    whole = final_weights(retrain(config, tmp_path / "whole", Silent()))
    accumulated = final_weights(retrain(config.replace(train__accumulate=4), tmp_path / "accumulated", Silent()))
    for name, expected in whole.items():
        torch.testing.assert_close(accumulated[name], expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("accumulate", [1, 2, 4])
def test_each_sample_of_gates_trains_its_part_of_the_rows(accumulate: int) -> None:
    torch.manual_seed(0)
    config = Config().replace(model__dropout=0.0, search__blocks=2)
    supernet = SuperNet.from_config(config.model, config.search, 40).eval()
    ids = np.random.default_rng(0).integers(40, size=(2, 8, 6))
    device = Device(torch.device("cpu"), "fp32")
    accumulator = GradientAccumulator(supernet, supernet.weights().values(), device, accumulate)
    samples = [make_path(one_hot("sf")), make_path(one_hot("fi"))]
    memory = accumulator.backward(Batch(*ids, starts_epoch=True), None, samples).memory
    together = accumulator.backward(Batch(*ids[:, :, :4], starts_epoch=False), memory, samples)
    found = {name: weight.grad for name, weight in supernet.named_parameters() if weight.grad is not None}

    # The twin: each path by itself on its four rows, half of the loss each.
    supernet.zero_grad()
    losses = []
    for place, sample in enumerate(samples):
        first, second = (torch.from_numpy(ids[:, place * 4 : place * 4 + 4, :end]) for end in (6, 4))
        output = supernet(first[0], None, sample)
        (supernet.score(output, first[1]).mean() / 2).backward()
        nll = supernet.score(supernet(second[0], output.memory, sample), second[1]).mean()
        (nll / 2).backward()
        losses.append(nll)
    assert together.loss.item() == pytest.approx(sum(losses).item() / 2, rel=1e-5)
    assert found.keys() == {name for name, weight in supernet.named_parameters() if weight.grad is not None}
    for name, weight in supernet.named_parameters():
        if weight.grad is not None:
            torch.testing.assert_close(found[name], weight.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(("samples", "processes"), [(1, 3), (2, 1), (2, 2), (2, 4), (2, 3), (4, 2), (4, 6), (6, 4)])
def test_samples_are_shared_out_evenly_in_the_order_of_rows(samples: int, processes: int) -> None:
    gates = [torch.tensor(number) for number in range(samples)]
    own = [share_out(gates, DistributedContext(rank=rank, world_size=processes)) for rank in range(processes)]
    assert len({len(parts) for parts in own}) == 1, "so that micro-batches are of one size"
    numbers = [int(part) for parts in own for part in parts]
    assert numbers == sorted(numbers)
    assert {numbers.count(number) for number in range(samples)} == {len(numbers) // samples}


def test_micro_batches_divide_the_rows_of_each_sample() -> None:
    sizes = {
        case: rows_of_micro_batch(*case)
        for case in ((8, 1, 1), (8, 1, 2), (8, 4, 2), (12, 3, 2), (24, 3, 2), (6, 5, 1))
    }
    assert list(sizes.values()) == [8, 4, 2, 3, 6, 6]


def test_gate_samples_that_do_not_divide_the_rows_cause_a_warning(corpus: Path, tmp_path: Path) -> None:
    reporter = Notes()
    search(small_config(corpus, data__batch_size=4, search__gate_samples=3), tmp_path / "run", reporter)
    assert any("gate_samples is 3" in note and "1 sample(s)" in note for note in reporter.notes)
    counts = [
        SearchConfig(gate_samples=number).samples_of_batch(rows) for number, rows in ((4, 6), (None, 8), (None, 15))
    ]
    assert counts == [2, 2, 1]


def test_parts_that_do_not_divide_the_rows_are_told(corpus: Path, tmp_path: Path) -> None:
    reporter = Notes()
    retrain(small_config(corpus, model__arch="f", train__steps=1, train__accumulate=6), tmp_path / "run", reporter)
    (warning,) = (note for note in reporter.notes if "accumulate" in note)
    assert "2 micro-batch" in warning


@pytest.mark.parametrize(
    ("estimator", "alpha_split"),
    [
        *(("soft", 0.0), ("straight_through", 0.3), ("gdas", 0.0), ("gdas", 0.3)),
        *(("single_path", 0.0), ("single_path", 0.3), ("uniform", 0.3)),
    ],
)
def test_alpha_learns_from_the_batch_as_a_whole(
    estimator: str, alpha_split: float, corpus: Path, tmp_path: Path
) -> None:
    changes = {"search__steps": 12, "search__alpha_start_step": 2, "train__log_every": 1, "train__eval_every": 12}
    changes |= {"search__estimator": estimator, "search__alpha_split": alpha_split, "search__alpha_every": 1}
    config = small_config(corpus, model__dropout=0.0, data__batch_size=8, **changes)
    whole = search(config, tmp_path / "whole", Silent()).pi_records()
    parts = search(config.replace(train__accumulate=4), tmp_path / "parts", Silent()).pi_records()
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one.pi, other.pi, atol=1e-4)


@pytest.mark.parametrize(("phase", "estimator"), [(search, "soft"), (search, "single_path"), (retrain, "soft")])
def test_checkpointed_activations_give_the_same_bits(
    phase: Phase, estimator: str, corpus: Path, tmp_path: Path
) -> None:
    changes = {"search__estimator": estimator, "search__steps": 12, "train__steps": 12}
    config = small_config(corpus, model__arch="scf", model__dropout=0.2, **changes)
    kept = phase(config, tmp_path / "kept", Silent())
    twice = phase(config.replace(runtime__checkpoint_activations=True), tmp_path / "twice", Silent())
    assert_same_weights(kept, twice)


def test_checkpointed_activations_keep_less(corpus: Path) -> None:
    kept: list[int] = []
    tokens = torch.zeros(4, 16, dtype=torch.long)
    for twice in (False, True):
        network = TransformerXL.build(Config().model, Architecture("sf"), 40)
        network.checkpoint_activations = twice
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(tokens).hidden.sum()
        weights = {parameter.data_ptr() for parameter in network.parameters()}
        kept.append(sum(size for pointer, size in sizes.items() if pointer not in weights))
    assert kept[1] < kept[0] / 3


def test_a_step_reads_no_value_from_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors on the device `meta` have no values; on a GPU, reading one waits until the GPU has computed it."""
    monkeypatch.setattr(Device, "autocast", lambda _: nullcontext())  # which torch has not for `meta`
    monkeypatch.setattr(fused, "product_dtype", lambda x: x.dtype)
    space = ("s", "k", "r", "g", "f", "i")
    model = SuperNet(model_config(cutoffs=(5, 12)), space, blocks=6, vocab_size=VOCABULARY).to("meta")
    accumulator = GradientAccumulator(model, model.weights().values(), Device(torch.device("meta"), "fp32"), 1)
    estimator, noise, memory = UniformPath(6, space), torch.Generator().manual_seed(0), None
    for starts_epoch in (True, False):
        ids = random_ids(4, 9).numpy()
        paths = estimator.sample_several(2, model.alpha(), 0.0, noise)
        memory = accumulator.backward(Batch(ids[:, :-1], ids[:, 1:], starts_epoch), memory, paths).memory
    assert all(parameter.grad is None or parameter.grad.is_meta for parameter in model.parameters())
    assert model.head.tables[-1].grad is not None
