"""The comparison of a derived network with guesses and chance, in its tiny form."""

from argparse import Namespace
from pathlib import Path

import comparison
import pytest
from trainings import read_rows

from parnas.runs.files import read_json


@pytest.mark.slow
def test_all_stages_and_only_missing_trainings(corpus: Path, tmp_path: Path) -> None:
    common = ["--tiny", "--corpus", str(corpus), "--out", str(tmp_path), "--workers", "1"]
    for stage in (["--profile"], ["--search"], ["--train"]):
        comparison.main([*stage, *common])
    path = tmp_path / "comparison.csv"
    rows = read_rows(path, comparison.Row)
    first = rows[0]
    path.write_text("\n".join(path.read_text().splitlines()[:1] + path.read_text().splitlines()[2:]) + "\n")
    comparison.main(["--train", *common])
    again = read_rows(path, comparison.Row)
    assert len(again) == len(rows), "the row that was taken out was trained again, and no other"
    assert again[-1][:6] == first[:6], "from the same seed it reaches the same"

    names = {row.name for row in rows}
    assert {"derived", "interleaved", "shallower", "random-1", comparison.LONGER} <= names
    assert {row.seed for row in rows if row.name == "random-1"} == {1}
    assert {row.seed for row in rows if row.name == "derived"} == {1, 2}
    longer = [row for row in rows if row.name == comparison.LONGER]
    assert all(row.arch == "sfsf" and row.steps > first.steps for row in longer)

    comparison.main(["--latency", *common])
    comparison.main(common)
    result = read_json(tmp_path / "comparison-cpu.json")
    share = {row["network"]: row["stack, share of interleaved"] for row in result["networks"]}
    assert share["interleaved"] == 1
    assert list(share)[:2] == ["derived", "interleaved"], "whatever was finished first"
    assert result["answers"][0].startswith("derived against interleaved")
    assert result["answers"][-1].startswith(f"derived against {comparison.LONGER}")
    assert (tmp_path / "comparison.png").read_bytes().startswith(b"\x89PNG")


def test_configuration_keeps_to_what_the_comparison_promises() -> None:
    study = comparison.make_study(Namespace(size="full", out=None, corpus=None, device="cpu"))
    model, data = study.config.model, study.config.data
    assert study.config.search.blocks >= 12
    assert model.d_model >= 256
    assert model.d_inner == 4 * model.d_model
    assert 128 <= data.tgt_len == model.mem_len <= 256
    assert len(study.seeds) >= 3
    assert study.random >= 8
