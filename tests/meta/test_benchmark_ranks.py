"""The benchmarks of several processes and of saving: what they count, and that they run."""

import json
from pathlib import Path

import pytest
import ranks
import saving

from parnas.architecture import Architecture
from parnas.config.loader import load_config
from parnas.model.transformer_xl import TransformerXL


@pytest.mark.slow
def test_two_processes_are_measured_beside_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "PHASES", ("retrain",))
    ranks.main(["--tiny", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "ranks-cpu.json").read_text())
    (row,) = result["rows"]
    one, two = (speeds[0] for speeds in result["tokens_per_s"]["retrain"].values())
    assert row["two over one"] == pytest.approx(two / one)
    assert row["gradients, MB"] > 0


def test_the_gradients_of_all_weights_are_counted() -> None:
    config = load_config(ranks.harness.PAR_CONFIG).replace(model__d_model=16, model__d_inner=32)
    network = TransformerXL.build(config.model, Architecture.parse(ranks.ARCH), ranks.harness.VOCABULARY)
    sent = ranks.sent_bytes(config)
    assert sent["retrain"] == sum(weight.numel() * weight.element_size() for weight in network.parameters())
    assert sent["search"] > sent["retrain"]


def test_a_checkpoint_is_measured_beside_none(tmp_path: Path) -> None:
    saving.main(["--tiny", "--out", str(tmp_path)])
    (row,) = json.loads((tmp_path / "saving-cpu.json").read_text())["rows"]
    without, with_one = (seconds[0] for seconds in row["seconds"].values())
    assert row["checkpoint, ms"] == pytest.approx(1e3 * (with_one - without))
    step = without / saving.PLANS["tiny"].group
    assert row["share at every 500 steps"] == pytest.approx((with_one - without) / (500 * step))
