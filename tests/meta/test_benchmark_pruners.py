"""The replay of finished trials under pruners: benchmarks/tuning_pruners.py."""

import shutil
from pathlib import Path

import pytest
import tuning_pruners
from helpers.tuning_helpers import FakeTraining, fake_training, run_study
from optuna.pruners import HyperbandPruner, MedianPruner, NopPruner

from parnas.errors import ParnasError
from parnas.runs.files import read_json, write_json
from parnas.runs.run import TUNING

__all__ = ["fake_training"]
FLAT = [[(2, 5.0), (4, 5.0)] for _ in range(5)]


def test_what_is_ended_early_saves_its_steps_and_may_be_the_best() -> None:
    late = [(2, 9.0), (4, 1.0)]
    assert tuning_pruners.replay([*FLAT, late], NopPruner()) == (1.0, 0.0)
    assert tuning_pruners.replay([*FLAT, late], MedianPruner(5, 0)) == (22 / 24, 4.0)
    assert tuning_pruners.replay([*FLAT, late], MedianPruner(5, 3)) == (1.0, 0.0)


def test_the_place_of_the_best_at_its_first_validation() -> None:
    assert tuning_pruners.place_of_best([[(1, 3.0), (2, 2.0)], [(1, 4.0), (2, 1.0)], [(1, 5.0), (2, 3.0)]]) == 2


def test_brackets_of_hyperband_are_drawn_by_the_order_and_the_same_each_time() -> None:
    curves = [[(step, 9.0 - step * each / 10) for step in (1, 3, 9)] for each in range(9, 0, -1)]
    found = [
        [tuning_pruners.replay(curves, HyperbandPruner(1, 9, 3), f"order {order}") for order in range(8)]
        for _ in range(2)
    ]
    assert found[0] == found[1]
    assert len(set(found[0])) > 1


@pytest.mark.usefixtures("fake_training")
def test_what_is_kept_of_a_study_gives_the_same_table_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning_pruners, "ORDERS", 3)
    monkeypatch.setattr("harness.PRINTED", [])  # where other tests may have left a table
    out, again = tmp_path / "out", tmp_path / "again"
    tuning_pruners.main(["--tiny", "--train", "--out", str(out)])
    kept, result = read_json(out / tuning_pruners.KEPT), read_json(out / "tuning_pruners-cpu.json")
    assert [trial["trial"] for trial in kept["trials"]] == list(range(8))
    assert all(trial["settings"].keys() == tuning_pruners.SPACE.keys() for trial in kept["trials"])
    assert [step for step, _ in kept["trials"][0]["validations"]] == result["validated_at"] == [2, 5, 8]
    assert (result["trials"], result["orders"], len(result["records"])) == (8, 3, 5)
    assert result["config"]["model"]["arch"] == "sfs"
    again.mkdir()
    shutil.copy(out / tuning_pruners.KEPT, again)
    tuning_pruners.main(["--out", str(again)])
    tuning_pruners.main([str(out / "study"), "--out", str(tmp_path / "other")])
    for folder in (again, tmp_path / "other"):
        assert read_json(folder / "tuning_pruners-cpu.json")["tables"] == result["tables"]
    assert capsys.readouterr().out.count(result["tables"][0]) == 3


def test_the_table_of_another_study_is_printed_and_not_kept(
    corpus: Path, tmp_path: Path, fake_training: FakeTraining, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning_pruners, "ORDERS", 1)
    monkeypatch.setattr("harness.RESULTS", tmp_path / "results")
    run_study(corpus, tmp_path / "s", 6, prune=False).write(tmp_path / "s")
    tuning_pruners.main([str(tmp_path / "s")])
    assert not (tmp_path / "results").exists()


@pytest.mark.usefixtures("fake_training")
def test_a_study_whose_trials_were_ended_early_tells_nothing(corpus: Path, tmp_path: Path) -> None:
    run_study(corpus, tmp_path / "s", 2).write(tmp_path / "s")
    assert len(tuning_pruners.read_study(tmp_path / "s")["trials"]) == 2
    study = read_json(tmp_path / "s" / TUNING)
    for change, told in (
        ({"counts": {"pruned": 1}}, "1 trial.s. ended early.*--no-prune"),
        ({"trials": study["trials"][:1]}, "no two finished trials"),
    ):
        write_json(tmp_path / "s" / TUNING, {**study, **change})
        with pytest.raises(ParnasError, match=told):
            tuning_pruners.read_study(tmp_path / "s")
    (tmp_path / "s" / TUNING).unlink()
    with pytest.raises(ParnasError, match="is no study of retrainings"):
        tuning_pruners.read_study(tmp_path / "s")
