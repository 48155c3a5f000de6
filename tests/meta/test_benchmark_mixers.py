"""The benchmark of what layers cost, in its tiny form."""

from pathlib import Path

import mixers
import pytest
from conftest import make_corpus

from parnas.runs.files import read_json


def test_layers_are_timed_and_the_memory_of_attention_alone_grows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mixers, "LAYERS", ("s", "s:window=8", "k", "r", "f", "g"))
    common = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--corpus", str(make_corpus(tmp_path / "corpus"))]
    mixers.main(common)
    result = read_json(tmp_path / "mixers-cpu.json")
    assert [(each["precision"], each["mode"]) for each in result["latency"]] == [
        (precision, mode) for precision in ("bf16", "fp32") for mode in ("inference", "training step")
    ]
    after = {each["layer"]: (each["16 tokens"], each["32 tokens"]) for each in result["generation_bytes"]}
    assert after["s"][1] == 2 * after["s"][0]
    assert all(first == second for name, (first, second) in after.items() if name != "s")
    assert after["f"] == after["g"] == (0, 0)
    assert after["s:window=8"][0] == after["s"][0] / 2  # keys and values of 8 positions instead of 16
