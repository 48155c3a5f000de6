"""Compressive attention in training, resuming, evaluating, searching and costing."""

from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_config
from helpers.model_helpers import make_network, make_supernet, random_ids, reach
from helpers.slow_compressive import settings
from helpers.training_helpers import Phase, assert_resumes

from parnas.architecture import Architecture
from parnas.config.schema import RuntimeConfig, Shape
from parnas.data.batching import evaluation_batches
from parnas.errors import ParnasError
from parnas.model.compressive import COMPRESSORS
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.cost import count_costs
from parnas.nas.derive import derive
from parnas.nas.latency_table import profile, read_profile
from parnas.nas.search import search
from parnas.runs.run import Run
from parnas.training.device import choose_device
from parnas.training.latency import TimedNetwork, prepare_training, read_memory
from parnas.training.loaded_run import load
from parnas.training.perplexity import measure_loss
from parnas.training.progress import Silent
from parnas.training.retrain import retrain
from parnas.training.weight_optimizer import NetworkWithLoss

CPU = choose_device(RuntimeConfig(device="cpu", precision="fp32", threads=1))
MEMORY = {"model__mem_len": 8, "model__memory__cmem_len": 5, "model__memory__ratio": 3}


def kind(function: str, loss: str) -> dict[str, object]:
    return {"model__memory__function": function, "model__memory__loss": loss}


# Training


@pytest.mark.parametrize("loss", ["attention", "autoencode"])
def test_an_auxiliary_loss_of_any_size_leaves_all_other_weights_as_they_are(
    loss: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through clipping and both optimizers: until what is compressed otherwise is attended to."""
    original, found = NetworkWithLoss.forward, {}
    for factor in (1.0, 1e4):

        def scaled(self: NetworkWithLoss, *given: object, factor: float = factor) -> object:
            result = original(self, *given)  # type: ignore[arg-type]
            compression = result.compression
            return result._replace(compression=None if compression is None else factor * compression)

        monkeypatch.setattr(NetworkWithLoss, "forward", scaled)
        # The first 8 tokens fill the memory, the second step is the first to compress, the third attends to it.
        config = small_config(corpus, model__arch="cfc", train__steps=2, **{**MEMORY, **kind("conv", loss)})
        run = retrain(config, tmp_path / str(factor), Silent())
        found[factor] = load(run.folder).model.state_dict()
    differing = {name for name in found[1.0] if not torch.equal(found[1.0][name], found[1e4][name])}
    assert differing
    assert all(".compression." in name for name in differing)


def test_metrics_tell_the_auxiliary_loss_of_networks_that_have_one(
    corpus: Path, tmp_path: Path, retrain_run: Run
) -> None:
    run = retrain(small_config(corpus, model__arch="c", **MEMORY), tmp_path / "run", Silent())
    lines = [line for line in run.metrics() if line.split == "train"]
    assert all(line.compression_loss > 0 for line in lines)
    assert not any(line.compression_loss is not None for line in retrain_run.metrics())


@pytest.mark.parametrize(
    ("phase", "changes"),
    [
        (retrain, {"model__arch": "cfc", **kind("most_used", "attention")}),
        (retrain, {"model__arch": "cfc", **kind("dilated_conv", "bptt")}),
        (retrain, {"model__arch": "sc", "model__memory__distance": "tokens", "runtime__precision": "bf16"}),
        (search, {"search__estimator": "uniform", **kind("conv", "attention")}),
        (search, {"search__estimator": "single_path", **kind("conv", "bptt")}),
        (search, {"search__estimator": "soft", **kind("conv", "autoencode")}),
    ],
)
def test_resumed_run_is_bit_identical(phase: Phase, changes: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    steps = {"train__steps": 8, "search__steps": 8, "search__alpha_start_step": 2, "train__save_every": 3}
    config = small_config(corpus, search__space=("s", "c", "f"), **steps, **MEMORY, **changes)
    assert_resumes(phase, config, tmp_path, 5)


@pytest.mark.parametrize("loss", ["attention", "autoencode", "bptt"])
def test_the_compression_learns(loss: str, corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="c", train__steps=24, **{**MEMORY, **kind("conv", loss)})
    run = retrain(config, tmp_path / "run", Silent())
    compressor = load(run.folder).model.blocks[0].compression.compressor  # type: ignore[union-attr]
    mean = torch.eye(16).repeat(1, 3) / 3
    assert (compressor.mix.weight - mean).abs().max() > 0.003  # type: ignore[union-attr]


# Evaluation


@pytest.mark.parametrize("function", COMPRESSORS)
@pytest.mark.parametrize(("tgt_len", "mem_len"), [(6, 5), (13, 5), (8, 12)])
def test_perplexity_does_not_depend_on_the_batch_size(function: str, tgt_len: int, mem_len: int) -> None:
    """Nor on the rows' own phases: how many positions wait in memory, or leave it at once."""
    distance = "tokens" if mem_len > tgt_len or function == "conv" else "slots"
    network = make_network("cfsc", **settings(function, mem_len=mem_len, ratio=4, cmem_len=3, distance=distance))
    tokens = random_ids(1, 400)[0].numpy()
    shapes = [Shape(size, tgt_len, network.config.reach) for size in (1, 32)]
    alone, *others = (measure_loss(network, tokens, 3, CPU, shape).nats for shape in shapes)
    assert others == pytest.approx([alone], rel=1e-6)
    batches = list(evaluation_batches(tokens, 3, 32, tgt_len, network.burn_in(tgt_len, network.config.reach), 4))
    assert len(batches[0].inputs) > 2  # else nothing was tested
    memory, nats = None, 0.0
    sequence = torch.tensor([[3, *tokens.tolist()]])
    with torch.no_grad():
        for start in range(0, 400, tgt_len):
            inputs, targets = sequence[:, start : start + tgt_len], sequence[:, start + 1 : start + tgt_len + 1]
            nll, memory = network.nll(inputs[:, : targets.shape[1]], targets, memory)
            nats += float(nll.double().sum())
    assert alone == pytest.approx(nats, rel=1e-6)


@pytest.mark.parametrize("alignment", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("tgt_len", [4, 5])
def test_rows_of_an_evaluation_begin_at_multiples_of_the_alignment(alignment: int, tgt_len: int) -> None:
    batches = list(evaluation_batches(np.arange(1, 500, dtype=np.uint16), 0, 8, tgt_len, 3, alignment))
    starts = batches[0].positions[:, 0]
    assert len(starts) > 3
    assert (starts % alignment == 0).all()
    scored = np.concatenate([batch.positions[batch.scored] for batch in batches])
    assert sorted(scored.tolist()) == list(range(499))


@pytest.mark.parametrize("arch", ["s", "c", "fcs"])
def test_latency_is_measured_with_all_memory_full_and_nothing_waiting(arch: str) -> None:
    network = make_network(arch, **settings(mem_len=5, ratio=3, cmem_len=4))
    for inference in (True, False):
        _, memory = read_memory(TimedNetwork(network, np.arange(50) % 20), CPU, Shape(2, 4, reach(5, 4)), inference)
        lengths = [block.key_lengths(kept) for block, kept in zip(network.blocks, memory, strict=True)]  # type: ignore[operator, arg-type]
        assert lengths == [{"s": (5, 0), "c": (5, 4), "f": (0, 0)}[letter] for letter in arch]


@pytest.mark.parametrize("loss", ["attention", "autoencode", "bptt"])
def test_a_timed_step_of_training_trains_the_compression_too(loss: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network = make_network("c", **settings("conv", loss))
    reached: set[str] = set()
    original = type(network).zero_grad

    def spy(self: TransformerXL, set_to_none: bool = True) -> None:
        reached.update(name for name, parameter in self.named_parameters() if parameter.grad is not None)
        original(self, set_to_none)

    monkeypatch.setattr(type(network), "zero_grad", spy)
    prepare_training(TimedNetwork(network, np.arange(50) % 20), CPU, Shape(2, 4, network.config.reach))()
    assert network.compression_names() <= reached


@torch.no_grad()
def test_generation_reads_compressed_memory() -> None:
    network, prompt = make_network("cc", **settings()), random_ids(2, 9)
    found = network.generate(prompt, 12, temperature=0)
    output = network(prompt)
    for token in found[:, 9:].split(1, dim=1):
        assert torch.equal(network.head.log_probs(output.hidden[:, -1]).argmax(-1), token.squeeze(1))
        output = network(token, output.memory)


# Grammar, search, derive


def test_grammar_and_preset() -> None:
    assert str(Architecture.parse("compressive-5")) == "cfcfc"
    assert str(Architecture.parse("(c:heads=1 f)*2")) == "c:heads=1 f c:heads=1 f"
    assert Architecture.parse("cifs").counts() == {"s": 1, "c": 1, "f": 1, "i": 1}


def test_a_search_over_both_kinds_of_memory_derives_and_retrains(corpus: Path, tmp_path: Path) -> None:
    changes = {"search__space": ("s", "c", "f", "i"), "search__cost__target": 0.9, **MEMORY}
    run = search(small_config(corpus, **changes), tmp_path / "search", Silent())
    derivation = derive(run)
    assert set(derivation.blocks[0].pi) == {"s", "c", "f", "i"}
    assert derivation.costs is not None
    assert derivation.costs.per_layer["c"] > derivation.costs.per_layer["s"] > derivation.costs.per_layer["f"]
    loaded = load(run.folder)
    for arch in ("cfs", "sfi"):
        extracted = loaded.model.extract(Architecture(arch))  # type: ignore[operator]
        assert bool(extracted.compression_names()) == extracted.compresses() == ("c" in arch)


# Costs


@pytest.mark.parametrize("distance", ["slots", "tokens"])
@pytest.mark.parametrize("function", ["mean_pool", "conv", "dilated_conv"])
def test_multiply_adds_are_what_torch_counts(function: str, distance: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    network = make_network("c", **settings(function, mem_len=6, ratio=3, cmem_len=4, distance=distance))
    memory = None
    for ids in random_ids(1, 36).split(6, dim=1):
        memory = network(ids, memory, inference=True).memory
    ids = random_ids(1, 6) % 5
    with FlopCounterMode(display=False) as counter:
        network.nll(ids, ids, memory, inference=True)
    counted = counter.get_total_flops() / 2 / 6
    assert network.multiply_adds(6, network.config.reach, [1] * 20) == pytest.approx(counted)


def test_costs_by_count_follow_the_lengths(corpus: Path) -> None:
    config = small_config(corpus, search__space=("s", "c", "f"), **MEMORY)
    macs, parameters = count_costs(config, "macs"), count_costs(config, "parameters")
    longer = count_costs(config.replace(model__memory__cmem_len=20), "macs")
    assert longer.per_layer["c"] > macs.per_layer["c"] > macs.per_layer["s"] == longer.per_layer["s"]
    assert parameters.per_layer["c"] == parameters.per_layer["s"] + 3 * 16 * 16 + 16


def test_a_profile_holds_for_its_memory_alone(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, search__space=("s", "c", "f"), **MEMORY)
    found = profile(config, Silent(), rounds=1, check=2)
    assert set(found.inference.layers) == {"s", "c", "f", "i"}
    found.write(tmp_path / "profile.json")
    found = read_profile(tmp_path / "profile.json")
    found.refuse_other_shapes(config)
    for key, value in (("cmem_len", 9), ("function", "mean_pool"), ("distance", "tokens")):
        with pytest.raises(ParnasError, match=f"measured with {key} "):
            found.refuse_other_shapes(config.replace(**{f"model__memory__{key}": value}))
    plain = small_config(corpus, **MEMORY)
    profile(plain, Silent(), rounds=1, check=0).refuse_other_shapes(plain.replace(model__memory__cmem_len=9))


def test_a_stochastic_block_looks_back_as_far_as_any_candidate() -> None:
    network = make_supernet(2, ("s", "c", "f"), **settings(mem_len=4, ratio=2, cmem_len=3))
    assert network.burn_in(4, network.config.reach) == 2 * 3  # 4 + 2 · 3, and one that may wait
    whole = make_supernet(2, ("s", "c", "f"), **settings("most_used", mem_len=4, ratio=2, cmem_len=3))
    assert whole.burn_in(4, whole.config.reach) == 2 * 4
    assert network.alignment() == 2
    assert make_supernet(2).alignment() == 1


@pytest.mark.parametrize("arch", ["cfc", "scf"])
def test_perplexity_does_not_depend_on_the_segments_where_memory_spans_the_text(arch: str) -> None:
    network = make_network(arch, **settings(mem_len=90, cmem_len=3))
    tokens = random_ids(1, 90)[0].numpy()
    found = [
        measure_loss(network, tokens, 3, CPU, Shape(1, tgt_len, network.config.reach)).nats
        for tgt_len in (90, 1, 7, 32)
    ]
    assert found == pytest.approx([found[0]] * 4, rel=1e-6)
