"""The benchmarks run, in shapes too small to say anything about speed, and their results hold what they must."""

import json

import harness
import pytest
import torch

from parnas.errors import ParnasError

CPU = harness.choose("cpu", "fp32")


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
