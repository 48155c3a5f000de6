"""Latencies of layers: how they are made of timings, what they predict, and the file that holds them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import small_config
from helpers.model_helpers import model_config

from parnas.architecture import Architecture
from parnas.config.schema import Reach, Shape
from parnas.errors import ParnasError
from parnas.model import layers
from parnas.model.heads import SoftmaxHead
from parnas.model.layers import MAKERS, FeedForward, SelfAttention
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.latency_table import (
    ModeTable,
    Profile,
    Timing,
    check_sum,
    draw_architectures,
    layer_names,
    profile,
    read_profile,
    share_layers,
    tabulate,
    timed_code,
)
from parnas.training import latency
from parnas.training.device import Device
from parnas.training.progress import Silent

CPU = Device(torch.device("cpu"), "fp32")


@pytest.fixture(scope="module")
def measured(corpus: Path) -> Profile:
    """A small profile, really measured."""
    return profile(small_config(corpus), Silent(), rounds=3, check=4)


def test_measuring_uses_up_no_random_number(corpus: Path) -> None:
    """Else a search that finds its costs in the cache would differ from the one that measured them."""
    before = torch.get_rng_state()
    profile(small_config(corpus, model__dropout=0.5), Silent(), rounds=1, check=1)
    assert torch.equal(torch.get_rng_state(), before)


def made_profile() -> Profile:
    """Figures chosen by hand."""
    inference = ModeTable(Timing(7.0, 6.0, 8.0), {"s": Timing(5.0, 4.0, 6.0), "f": Timing(2.0, 1.5, 2.5)})
    training = ModeTable(Timing(20.0, 19.0, 21.0), {"s": Timing(16.0, 15.0, 17.0), "f": Timing(8.0, 7.0, 9.0)})
    shapes = {"batch_size": 4, "tgt_len": 8, "mem_len": 8}
    return Profile({"device_name": "abacus"}, "fp32", shapes, 3, 9, inference, training)


def test_a_prediction_is_the_fixed_part_and_the_sum() -> None:
    found = made_profile()
    assert found.predict(Architecture.parse("sfsf")) == 7 + 5 + 2 + 5 + 2
    assert (found.latency("s"), found.latency("f")) == (5, 2)


def test_identity_is_free() -> None:
    found = made_profile()
    assert found.latency("i") == 0
    assert found.predict("siif") == found.predict("sf")
    assert found.predict("ii") == 7


def test_a_layer_that_was_not_measured_is_refused() -> None:
    with pytest.raises(ParnasError, match=r"layers s, f, but not 'c';.*search\.space"):
        made_profile().predict("sc")


def test_timings_are_subtracted_in_each_round_and_divided_by_the_depth() -> None:
    """The machine's speed changes from round to round by more than a layer takes: the difference stays."""
    empty = np.array([10.0, 50.0, 11.0, 90.0, 30.0])
    times = {(): empty, ("s",) * 4: empty + 4 * np.array([2.0, 1.0, 5.0, 3.0, 4.0]), ("f",) * 4: empty + 6}
    table = tabulate(times, ["s", "f"], 4)
    assert table.fixed.median_ms == 30
    assert table.layers["f"] == Timing(1.5, 1.5, 1.5)
    assert table.layers["s"] == Timing(3.0, pytest.approx(1.4), pytest.approx(4.6))
    assert table.layers["i"] == Timing(0, 0, 0)


def test_a_clock_that_only_layers_move_is_read_exactly(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention layer takes 5 ms, a feed-forward layer 2, the softmax 7, and three times that while training."""
    now = 0.0

    def costing(milliseconds: float, original: Callable[..., object]) -> Callable[..., object]:
        def timed(module: torch.nn.Module, *arguments: object) -> object:
            nonlocal now
            now += milliseconds / 1000 * (3 if module.training else 1)
            return original(module, *arguments)

        return timed

    monkeypatch.setattr(latency, "time", SimpleNamespace(perf_counter=lambda: now))
    for owner, name, cost in ((SelfAttention, "attend", 5), (FeedForward, "transform", 2), (SoftmaxHead, "nll", 7)):
        monkeypatch.setattr(owner, name, costing(cost, getattr(owner, name)))
    found = profile(small_config(corpus), Silent(), rounds=2, check=5)
    for table, factor in ((found.inference, 1), (found.training, 3)):
        assert table.fixed.median_ms == pytest.approx(7 * factor)
        medians = {name: timing.median_ms for name, timing in table.layers.items()}
        assert medians == pytest.approx({"s": 5 * factor, "f": 2 * factor, "i": 0})
    assert found.check is not None
    assert len(found.check.networks) == 5
    for network in found.check.networks:
        expected = 7 + 5 * network.arch.count("s") + 2 * network.arch.count("f")
        assert (network.predicted_ms, network.measured_ms) == pytest.approx((expected, expected))


@pytest.mark.parametrize("mem_len", [6, 0])
def test_both_modes_read_a_full_memory_of_their_own_kind(mem_len: int, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[tuple[object, ...]] = []
    backwards: list[torch.Tensor] = []
    original, backward = TransformerXL.forward, torch.Tensor.backward

    def spy(
        self: TransformerXL,
        tokens: torch.Tensor,
        memory: object = None,
        gates: None = None,
        reach: Reach | None = None,
        inference: bool = False,
    ) -> object:
        shape = memory and tuple(None if kept is None else tuple(kept.shape) for kept in memory)  # type: ignore[attr-defined]
        given.append((tuple(tokens.shape), shape, inference, self.training, torch.is_grad_enabled()))
        return original(self, tokens, memory, gates, reach, inference)  # type: ignore[arg-type]

    def spy_backward(self: torch.Tensor) -> None:
        backwards.append(self)
        backward(self)
        assert all(parameter.grad is not None for parameter in network.blocks.parameters())

    monkeypatch.setattr(TransformerXL, "forward", spy)
    monkeypatch.setattr(torch.Tensor, "backward", spy_backward)
    config = model_config(mem_len=3)  # the caller's length counts, not the configured one
    network = share_layers([("s", "f")], config, 20, CPU)[("s", "f")]
    candidate, shape = latency.TimedNetwork(network, np.arange(40) % 20), Shape(2, 4, Reach(mem_len))
    latency.prepare_scoring(candidate, CPU, shape)()
    assert given.pop() == ((2, 4), ((2, 6, 16), None) if mem_len else None, True, False, False)
    assert not backwards
    latency.prepare_training(candidate, CPU, shape)()
    assert given.pop() == ((2, 4), ((2, 6, 8), None) if mem_len else None, False, True, True)
    assert len(backwards) == 1
    assert all(parameter.grad is None for parameter in network.parameters())


def test_the_network_without_layers_works_in_both_modes() -> None:
    for norm in ("pre", "post"):
        network = share_layers([()], model_config(norm=norm), 20, CPU)[()]
        candidate, shape = latency.TimedNetwork(network, np.arange(40) % 20), Shape(2, 4, Reach(6))
        for prepare in (latency.prepare_scoring, latency.prepare_training):
            prepare(candidate, CPU, shape)()


@pytest.mark.parametrize("inference", [True, False])
def test_networks_with_different_memories_are_timed_on_the_same_segment(inference: bool) -> None:
    # They were not: rare words in the segment of one network made its adaptive softmax a fifth slower.
    networks = share_layers([(), ("f",), ("s",), ("s:window=2", "f")], model_config(mem_len=6), 50, CPU)
    shape = Shape(2, 4, Reach(6))
    lengths = set[int]()
    for network in networks.values():
        segment, memory = latency.read_memory(latency.TimedNetwork(network, np.arange(50)), CPU, shape, inference)
        assert segment.tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
        lengths.add(0 if memory is None else max(part.shape[1] for part in memory if part is not None))
    assert len(lengths) == 3


def test_networks_share_the_nth_layer_of_a_name() -> None:
    networks = share_layers([(), ("s", "s"), ("f", "s", "s"), ("f",)], model_config(), 20, CPU)
    twice, mixed = networks["s", "s"], networks["f", "s", "s"]
    assert twice.blocks[0] is not twice.blocks[1]
    assert list(mixed.blocks) == [networks[("f",)].blocks[0], *twice.blocks]
    assert [type(block) for block in mixed.blocks] == [FeedForward, SelfAttention, SelfAttention]
    assert len({id(network.embedding) for network in networks.values()}) == 1
    assert len({id(network.head) for network in networks.values()}) == 1


def test_what_is_timed_has_the_configured_shape(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes: list[Shape] = []
    for name in ("prepare_scoring", "prepare_training"):
        original = getattr(latency, name)

        def spy(candidate: object, device: object, shape: Shape, original=original) -> object:  # type: ignore[no-untyped-def]
            shapes.append(shape)
            return original(candidate, device, shape)

        monkeypatch.setattr(f"parnas.nas.latency_table.{name}", spy)
    config = small_config(corpus, data__batch_size=2, data__tgt_len=5, model__mem_len=3)
    profile(config, Silent(), rounds=1, check=2)
    assert shapes == [(2, 5, config.model.reach)] * (3 + 2 + 3)


def test_attention_and_feed_forward_are_always_measured(corpus: Path) -> None:
    assert layer_names(small_config(corpus, search__space=("i", "f"))) == ["s", "f"]
    assert layer_names(small_config(corpus)) == ["s", "f"]


def test_networks_of_the_check_differ_and_follow_the_seed(corpus: Path) -> None:
    config = small_config(corpus, search__blocks=5)
    known = {("s",) * 5, ("f",) * 5}
    drawn = draw_architectures(config, 20, known)
    assert len(drawn) == 20
    assert not known & set(drawn)
    for names, architecture in drawn.items():
        assert len(architecture) == 5
        assert str(architecture.canonical()) == "".join(names)
    assert draw_architectures(config, 20, known) == drawn
    assert draw_architectures(small_config(corpus, search__blocks=5, runtime__seed=2), 20, known) != drawn
    assert draw_architectures(config, 0, known) == {}


def test_a_small_space_gives_what_it_has(corpus: Path) -> None:
    config = small_config(corpus, search__blocks=2)
    drawn = draw_architectures(config, 20, {("s", "s"), ("f", "f")})
    assert set(drawn) == {("s",), ("f",), ("s", "f"), ("f", "s")}
    only_f = small_config(corpus, search__blocks=2, search__space=("f",))
    assert draw_architectures(only_f, 20, {("f", "f")}) == {}


def test_errors_are_those_of_the_predictions() -> None:
    times = {Architecture("sf"): 16.0, Architecture("ss"): 17.0, Architecture("fi"): 6.0, Architecture("si"): 10.0}
    check = check_sum(made_profile(), times)
    assert check is not None
    assert [network.error for network in check.networks] == pytest.approx([14 / 16 - 1, 0, 9 / 6 - 1, 12 / 10 - 1])
    assert check.median_error == pytest.approx((0.125 + 0.2) / 2)
    assert check.largest_error == pytest.approx(0.5)
    assert check_sum(made_profile(), {}) is None


def test_a_real_check_agrees_with_its_own_numbers(measured: Profile) -> None:
    check = measured.check
    assert check is not None
    assert len(check.networks) == 4
    for network in check.networks:
        assert network.measured_ms > 0
        assert network.predicted_ms == pytest.approx(measured.predict(network.arch))
        assert network.error == pytest.approx(network.predicted_ms / network.measured_ms - 1)
    errors = [abs(network.error) for network in check.networks]
    assert (check.median_error, check.largest_error) == pytest.approx((median(errors), max(errors)))


def test_a_profile_says_what_it_holds_for(measured: Profile) -> None:
    shapes = {"batch_size": 4, "tgt_len": 8, "mem_len": 8, "d_model": 16, "n_heads": 2, "d_head": 8, "d_inner": 32}
    assert measured.shapes == {**shapes, "same_length": False}
    assert (measured.precision, measured.depth, measured.rounds) == ("fp32", 3, 3)
    assert measured.machine["threads"] == 1
    assert measured.machine["versions"]["torch"] == torch.__version__
    assert "command_line" not in measured.machine


def test_a_profile_of_another_precision_or_shape_is_refused(measured: Profile, corpus: Path) -> None:
    measured.refuse_other_shapes(small_config(corpus))
    measured.refuse_other_shapes(small_config(corpus, runtime__precision="auto"))
    older = {name: size for name, size in measured.shapes.items() if name != "same_length"}
    replace(measured, shapes=older).refuse_other_shapes(small_config(corpus))
    with pytest.raises(ParnasError, match="same_length False, not True"):
        measured.refuse_other_shapes(small_config(corpus, model__same_length=True))
    with pytest.raises(ParnasError, match="precision fp32, not bf16"):
        measured.refuse_other_shapes(small_config(corpus, runtime__precision="bf16"))
    with pytest.raises(ParnasError, match="d_inner 32, not 48"):
        measured.refuse_other_shapes(small_config(corpus, model__d_inner=48))


def test_code_of_layers_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the latency of a layer would be kept after it was rewritten."""
    found = []
    for text in ("def make(config): return 1", "def make(config): return 2"):
        path = tmp_path / f"own_{len(found)}.py"
        path.write_text(text)
        names: dict[str, Any] = {}
        exec(compile(text, str(path), "exec"), names)
        monkeypatch.setitem(MAKERS, "g", names["make"])
        found.append(timed_code(["s", "g"]))
    assert found[0] != found[1]
    monkeypatch.setitem(MAKERS, "g", partial(names["make"]))
    assert timed_code(["g"]) == timed_code([]), "no file is known"


def test_code_that_layers_are_made_of_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(Path(layers.__file__).parent, tmp_path / "model")
    monkeypatch.setattr(layers, "__file__", str(tmp_path / "model" / "layers.py"))
    before = timed_code(["s"])
    with (tmp_path / "model" / "attention.py").open("a") as file:
        file.write("# faster\n")
    assert timed_code(["s"]) != before


def test_the_file_round_trips(measured: Profile, tmp_path: Path) -> None:
    for found in (measured, made_profile()):
        found.write(tmp_path / "profile.json")
        assert read_profile(tmp_path / "profile.json") == read_profile(tmp_path) == found
    content = json.loads((tmp_path / "profile.json").read_text())
    assert content["inference"]["layers"]["s"] == {"median_ms": 5.0, "p10_ms": 4.0, "p90_ms": 6.0}
    assert content["training"]["fixed"]["median_ms"] == 20


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda tree: tree.pop("training"), "training"),
        (lambda tree: tree["inference"]["layers"]["s"].pop("p10_ms"), r"inference.layers.s.p10_ms"),
        (lambda tree: tree["inference"]["layers"].update(s="fast"), r"inference.layers.s"),
        (lambda tree: tree["training"]["fixed"].update(median_ms=None), r"training.fixed.median_ms"),
    ],
)
def test_a_file_that_lacks_something_is_refused(
    change: Callable[[dict[str, dict[str, dict[str, object]]]], object], place: str, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    made_profile().write(path)
    tree = json.loads(path.read_text())
    change(tree)
    path.write_text(json.dumps(tree))
    with pytest.raises(ParnasError, match=rf"\({place}"):
        read_profile(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    for content in ("[1]", "{", '{"runs": 3}'):
        path.write_text(content)
        with pytest.raises(ParnasError, match=r"profile\.json"):
            read_profile(path)
    with pytest.raises(ParnasError, match=r"other\.json"):
        read_profile(tmp_path / "other.json")


def test_a_time_that_is_no_number_is_not_read_back(tmp_path: Path) -> None:
    broken = replace(made_profile(), inference=ModeTable(Timing(float("nan"), 1.0, 1.0), {}))
    broken.write(tmp_path / "profile.json")
    with pytest.raises(ParnasError, match="median_ms"):
        read_profile(tmp_path)
