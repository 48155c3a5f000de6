"""The benchmark of Muon against torch's: both make the same update."""

import json
from pathlib import Path

import muon


def test_both_optimizers_make_the_same_update(tmp_path: Path) -> None:
    muon.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "muon-cpu.json").read_text())["rows"]
    assert row["least cosine"] > 0.99
    assert all(row[key] > 0 for key in row if key.endswith(", ms"))
