"""The benchmark of token mixers, in its tiny form."""

from pathlib import Path

import mixers
import pytest
from conftest import make_corpus
from trainings import read_rows

from parnas.runs.files import read_json


def test_layers_are_timed_and_networks_trained_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mixers, "LAYERS", ("s", "s:window=64", "k", "r", "f", "g"))
    monkeypatch.setattr(mixers, "NETWORKS", {"base": "kfsf", "windows": "k f s:window=64 f", "whole": "sfsf"})
    monkeypatch.setattr(mixers, "BASE", "base")
    monkeypatch.setattr(mixers, "WHOLE", "whole")
    common = ["--tiny", "--device", "cpu", "--out", str(tmp_path), "--corpus", str(make_corpus(tmp_path / "corpus"))]
    mixers.main(common)
    layers = read_json(tmp_path / "mixers_speed-cpu.json")["layers"]
    assert [(each["precision"], each["mode"]) for each in layers] == [
        (precision, mode) for precision in ("bf16", "fp32") for mode in ("inference", "training step")
    ]
    for _ in range(2):
        mixers.main(["--train", "--workers", "1", *common])
    rows = read_rows(tmp_path / "mixers.csv", mixers.Row)
    assert [row.name for row in rows] == ["base", "windows", "whole"]
    mixers.main(["--report", *common])
    base, windows, whole = read_json(tmp_path / "mixers-cpu.json")["networks"]
    assert base["ppl"] == pytest.approx(rows[0].ppl, abs=0.01)
    assert windows["layers"] == "kfwf"
    assert whole["share of the interleaved latency"] == 1
    assert float(whole["against the first"].removesuffix(" %")) == pytest.approx(
        100 * (rows[2].ppl / rows[0].ppl - 1), abs=0.06
    )
