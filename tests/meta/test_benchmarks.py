"""The benchmarks run, in shapes too small to say anything about speed, and their results hold what they must."""

import dataclasses
import json
import math
import os
from importlib.util import find_spec

import choices
import cutoffs
import harness
import inference
import networks
import probe
import pytest
import scaling
import torch
import train_step

from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.files import read_json

CPU = harness.choose("cpu", "fp32")


@pytest.fixture(scope="module")
def _libraries():
    """In CI the absence of what is compared with is a failure, elsewhere a skip."""
    missing = [name for name in ("transformers", "x_transformers") if find_spec(name) is None]
    if missing and os.environ.get("CI"):
        pytest.fail(f"CI has to run this test; {missing} missing: pip install -e '.[bench]'")
    if missing:
        pytest.skip(f"pip install -e '.[bench]' brings {missing}")


def run_tiny(benchmark, name, folder, *options):
    """The result that a benchmark writes."""
    benchmark.main(["--tiny", "--device", "cpu", "--out", str(folder), *options])
    return json.loads((folder / f"{name}-cpu.json").read_text())


def test_candidates_take_turns_and_warm_up_is_not_counted():
    calls = []
    candidates = {name: lambda name=name: calls.append(name) for name in "ab"}
    seconds = harness.take_turns(candidates, rounds=3, warm_up=2)
    assert calls == ["a", "b"] * 5
    assert {name: len(of) for name, of in seconds.items()} == {"a": 3, "b": 3}
    assert all(second >= 0 for of in seconds.values() for second in of)


def test_no_round_is_an_error():
    with pytest.raises(ParnasError, match="1 or more"):
        harness.take_turns({"a": lambda: None}, rounds=0, warm_up=1)


@pytest.mark.parametrize("precision", harness.DTYPES.values(), ids=harness.DTYPES)
def test_matrix_rate_counts_two_operations_per_multiply_add(monkeypatch, precision):
    monkeypatch.setattr(harness, "take_turns", lambda *_, **__: {"product": [0.5, 0.25]})
    assert harness.matrix_rate(precision, torch.device("cpu"), size=8) == 2 * 8**3 / 0.25


def test_result_names_machine_and_size(tmp_path):
    arguments = harness.make_parser("Title.").parse_args(["--short", "--out", str(tmp_path)])
    path = harness.write_result("speed", CPU, {"precisions": ["fp32"]}, arguments)
    assert path == tmp_path / "speed-cpu.json"
    result = json.loads(path.read_text())
    assert (result["benchmark"], result["size"], result["precisions"]) == ("speed", "short", ["fp32"])
    assert result["machine"]["versions"]["torch"] == torch.__version__
    assert {"device_name", "cores", "threads", "python", "platform"} <= set(result["machine"])
    assert str(tmp_path) not in json.dumps(result["machine"])  # no paths of one machine among the measured


def test_tiny_result_is_not_kept_among_the_measured(monkeypatch, tmp_path):
    monkeypatch.setattr(harness, "RESULTS", tmp_path)
    assert harness.write_result("speed", CPU, {}, harness.make_parser("Title.").parse_args(["--tiny"])) is None
    assert not list(tmp_path.iterdir())


def test_slug_of_a_gpu(monkeypatch):
    gpu = harness.Device(torch.device("cuda"), "bf16")
    monkeypatch.setattr(harness.Device, "describe", lambda self: {"device_name": "NVIDIA A100-SXM4-40GB"})
    assert harness.device_slug(gpu) == "a100-sxm4-40gb"


def test_table_has_all_columns_and_readable_numbers(capsys):
    harness.print_table("Speed", [{"name": "a", "tok/s": 12345.6}, {"name": "b", "share": 0.41234}])
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines()[5:]]
    assert lines[:2] == [["a", "12,346", "–"], ["b", "–", "0.412"]]


def tiny_size():
    (size,) = train_step.sizes("tiny", torch.device("cpu"))
    return size


@pytest.mark.usefixtures("_libraries")
def test_train_step_compares_the_same_work(tmp_path):
    result = run_tiny(train_step, "train_step", tmp_path)
    size, records = tiny_size(), result["records"]
    assert len(records) == 2 * len(networks.NETWORKS) * len(harness.DTYPES)
    assert {(r["work"], r["network"], r["precision"]) for r in records} == {
        (work, name, precision)
        for work in ("step", "blocks")
        for name in networks.NETWORKS
        for precision in harness.DTYPES
    }
    steps = [r for r in records if r["work"] == "step"]
    assert {r["targets"] for r in steps} == {size.batch_size * size.tgt_len}
    for r in records:
        assert len(r["seconds"]) == train_step.PLANS["tiny"].rounds
        if r["network"] in train_step.SAME_WEIGHTS:
            assert r["loss_difference"] <= train_step.TOLERANCE[r["precision"]]
        rate = r["tokens_per_second"] * r["flops_per_token"]
        assert math.isclose(r["share_of_peak"], rate / r["peak_flops"])
        assert math.isclose(r["tokens_per_second"], size.tokens / r["median_seconds"])
    # The same weights on the same segments: training gives the same losses too.
    losses = {r["network"]: r["losses"] for r in steps if r["precision"] == "fp32"}
    assert losses["parnas"] == pytest.approx(losses["transformers"], abs=1e-4)
    assert losses["parnas"][-1] != losses["parnas"][0]


@pytest.mark.usefixtures("_libraries")
def test_unlike_weights_are_refused():
    size = tiny_size()
    compared = networks.make_networks(size)
    with torch.no_grad():
        compared["parnas"].network.embedding.tables[0].add_(torch.randn(size.vocab_size, size.model.d_model))
    segments = train_step.draw_segments(size, 2, torch.device("cpu"))
    with pytest.raises(ParnasError, match="not the same work"):
        train_step.loss_difference(compared, segments, CPU)


@pytest.mark.usefixtures("_libraries")
@pytest.mark.parametrize("name", networks.NETWORKS)
def test_blocks_alone_read_memory_and_reach_hidden_states_and_weights(name):
    size = tiny_size()
    network = networks.make_networks(size)[name]
    segments = train_step.draw_segments(size, 2, torch.device("cpu"))
    memories = [network.nll(*segment, None)[1] for segment in segments]
    x = torch.randn(size.batch_size, size.tgt_len, size.model.d_model, requires_grad=True)
    hidden, other = (network.transform(x, memory) for memory in memories)
    assert hidden.shape == x.shape
    assert not torch.equal(hidden, other)
    (hidden * torch.randn_like(hidden)).sum().backward()
    assert x.grad.abs().sum() > 0
    shape = size.vocab_size, size.model.d_model
    tables = [parameter for parameter in network.parameters() if parameter.shape == shape]
    assert len(tables) == 1  # the embedding is tied and gets no gradient here
    assert all(table.grad is None for table in tables)
    assert sum(parameter.grad is not None for parameter in network.parameters()) >= 8


def test_segments_follow_each_other_and_are_the_same_each_time():
    size = tiny_size()
    first, second = train_step.draw_segments(size, 2, torch.device("cpu"))
    assert first.tokens.shape == (size.batch_size, size.tgt_len)
    assert torch.equal(first.tokens[:, 1:], first.targets[:, :-1])
    assert torch.equal(first.targets[:, -1], second.tokens[:, 0])
    again, _ = train_step.draw_segments(size, 2, torch.device("cpu"))
    assert torch.equal(first.tokens, again.tokens)


def test_multiply_adds_are_those_of_the_network_for_a_batch_of_one_row():
    size = dataclasses.replace(tiny_size(), batch_size=1, layers=2)
    network = TransformerXL.build(size.model, Architecture.parse("sfsf"), size.vocab_size)
    counts = list(range(size.vocab_size, 0, -1))
    shares = network.head.cluster_shares(counts)
    expected = network.multiply_adds(size.tgt_len, size.model.reach, counts)
    inner = size.model.n_heads * size.model.head_width
    anew = size.layers * 2 * size.model.d_model * inner * size.model.mem_len / size.tgt_len  # which inference keeps
    assert size.block_multiply_adds() + size.head_multiply_adds(shares) == pytest.approx(expected + anew)


def test_shares_of_clusters_are_counted():
    targets = torch.tensor([0, 19, 20, 59, 60, 199, 199, 1])  # the clusters of the tiny size begin at 20 and 60
    assert tiny_size().cluster_shares(targets) == [2 / 8, 3 / 8]


def test_scaling_measures_every_point_in_a_process_of_its_own(tmp_path):
    result = run_tiny(scaling, "scaling", tmp_path)
    plan = scaling.PLANS["tiny"]
    assert [(r["blocks"], r["batch"]) for r in result["records"]] == [(2, 2), (4, 2)]
    for r in result["records"]:
        assert len(r["seconds"]) == plan.passes * plan.rounds
        assert r["tokens_per_second"] == pytest.approx(r["batch"] * r["segment"] / r["median_seconds"])
        assert r["peak_bytes"] >= 0
    assert [(fit["axis"], fit["from"], fit["to"]) for fit in result["fits"]] == [("blocks", 2, 4)]


@pytest.mark.parametrize("exponent", [0.5, 1, 2])
def test_exponent_of_a_power_law_is_found(exponent):
    shapes = [4, 8, 16, 32]
    assert scaling.fit_exponent(shapes, [3 * shape**exponent for shape in shapes]) == pytest.approx(exponent)
    assert scaling.fit_exponent(shapes, [0, 1, 2, 3]) is None


def test_sweep_changes_one_shape_at_a_time():
    base = scaling.BASES["cpu"]
    points = scaling.sweep(base, scaling.PLANS["short"])
    assert [point.blocks for point in points["blocks"]] == [4, 8, 16, 32]
    for axis, along in points.items():
        assert all(dataclasses.replace(point, **{axis: getattr(base, axis)}) == base for point in along)


def test_inference_compares_the_networks_in_both_batches(tmp_path):
    result = run_tiny(inference, "inference", tmp_path, "--arch", "ssfsff")
    assert {(r["arch"], r["precision"], r["batch_size"]) for r in result["records"]} == {
        (arch, precision, batch) for arch in ("sfsfsf", "ssfsff") for precision in harness.DTYPES for batch in (1, 32)
    }
    for r in result["records"]:
        assert len(r["p50_ms"]) == len(r["p95_ms"]) == inference.PLANS["tiny"].repetitions
        assert all(0 < middle <= high for middle, high in zip(r["p50_ms"], r["p95_ms"], strict=True))


def test_inference_takes_the_derived_architecture_by_default():
    assert len(Architecture.parse(inference.derived_architecture())) == len(harness.INTERLEAVED)


def test_cutoffs_are_those_of_the_search_that_was_timed(tmp_path):
    result = run_tiny(cutoffs, "cutoffs", tmp_path)
    assert [r["clusters"] for r in result["records"]] == [3, 4, 5, 3, 4, 5]
    for r in result["records"]:
        assert len(r["cutoffs"]) == r["clusters"] - 1
        assert sorted({0, *r["cutoffs"], result["words"]}) == [0, *r["cutoffs"], result["words"]]
        assert len(r["seconds"]) == cutoffs.ROUNDS["tiny"]


def test_tables_go_with_the_result_and_only_once(tmp_path):
    device, arguments = harness.choose("cpu", "fp32"), harness.make_parser("").parse_args(["--out", str(tmp_path)])
    harness.PRINTED.clear()
    harness.print_table("A title", [{"a": 1}])
    first, second = (read_json(harness.write_result(name, device, {}, arguments)) for name in ("one", "two"))
    assert first["tables"][0].startswith("A title\n\n|")
    assert second["tables"] == []


def test_choices_are_taken_back_one_at_a_time(tmp_path, monkeypatch):
    # Compiling takes long; `test_compiled_network_trains_as_the_eager_one` compiles the same network.
    monkeypatch.delitem(choices.IN_PROCESSES, choices.COMPILED)
    choices.main(["--tiny", "--out", str(tmp_path)])
    result = read_json(tmp_path / "choices-cpu.json")
    names = {(record["measured"], record["choice taken back"]) for record in result["records"]}
    assert names == {("in turns", name) for name in choices.TAKEN_BACK} | {
        ("in processes", name) for name in choices.IN_PROCESSES
    }
    assert all(record["seconds"] for record in result["records"])


def test_a_probe_of_gpt2_is_timed(tmp_path):
    pytest.importorskip("transformers", reason="the extra `transformers` is not installed")
    result = run_tiny(probe, "probe", tmp_path)["probe"]
    assert (result["layers"], result["tokens"]) == (4, 128)
    assert result["replacements"] == 14
    assert result["seconds"] > 0
