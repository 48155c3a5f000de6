"""A short soak; `make soak` is the long one."""

import json
import shutil
from pathlib import Path

import pytest
import soak
from soak_faults import damaged_files, kills
from soak_runs import Difference, Row, compare, make_config, prepare, write_corpus


@pytest.mark.slow
def test_killed_and_damaged_runs_come_to_the_same_end(tmp_path: Path) -> None:
    write_corpus(tmp_path / "corpus")
    phases = prepare(tmp_path, make_config(tmp_path / "corpus", 120, 10))
    retrain_first = phases[::-1]  # one try of each fault damages the first phase alone, and a search takes longer
    for row in [*kills(phases, tmp_path, 2), *damaged_files(retrain_first, tmp_path, 1)]:
        assert row.bit_identical == row.tries > 0, row
        assert row.told == row.tries, row
        assert row.lost_lines == 0, row
    whole = phases[0].whole
    shutil.copytree(whole, tmp_path / "other")
    assert not compare(whole, tmp_path / "other")
    lines = (whole / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other" / "metrics.jsonl").write_text("".join([*lines[1:], lines[-1]]))
    assert compare(whole, tmp_path / "other") == Difference(lost_lines=1, more_lines=1)
    shutil.rmtree(max((tmp_path / "other" / "checkpoints").iterdir()))
    assert compare(whole, tmp_path / "other").weights > 0


def test_the_result_says_what_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = Row("SIGKILL of a search", "x", 3, 3, 0, 3, {"while saving": 2, "while starting": 0, "runs": 1})
    bad = Row("a fault", "y", 2, 1, 4, 2)
    for rows, code in (([good], 0), ([good, bad], 1)):
        monkeypatch.setattr(soak, "soak", lambda *_, rows=rows: rows)
        assert soak.main(["--out", str(tmp_path)]) == code
        result = json.loads((tmp_path / "reliability.json").read_text())
        assert result["kills"] == 3
        assert result["kills_while_saving"] == 2
        assert result["bit_identical"] == (code == 0)
        assert result["lost_lines"] == (0 if code == 0 else 4)
