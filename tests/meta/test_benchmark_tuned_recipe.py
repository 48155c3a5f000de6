"""What tuning gains on the recipe, in tiny form, and the recipe that is tuned."""

import json
from pathlib import Path

import pytest
import tuned_recipe
from test_benchmark_ablation import read_settings

from parnas.runs.files import read_json, to_json, write_json
from parnas.runs.resolve import read_config


def test_the_recipe_is_that_of_the_ablation_today() -> None:
    ours, ablation = read_settings("tuned_recipe"), read_settings("ablation_hybrid")
    plan = ours.pop("tuned_recipe")
    variants = {each["name"]: each for each in ablation.pop("ablation_hybrid")["variants"]}
    added = ("initial values by the number of inputs", "pointer over 2048 positions")
    changes = [change for name in added for change in variants[name]["changes"].items()]
    config = read_config(ours, [])
    expected = read_config(ablation, [*changes, ("model.arch", config.model.arch)])
    assert (config.data, config.model) == (expected.data, expected.model)
    length = ("steps", "warmup_steps", "log_every", "eval_every", "save_every")
    assert config.train == expected.train.model_copy(update={key: getattr(config.train, key) for key in length})
    assert config.runtime.seed not in plan["seeds"]


@pytest.mark.slow
def test_the_recipe_and_the_best_settings_are_trained_from_further_seeds(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--tiny", "--corpus", str(corpus), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path)]
    tuned_recipe.main([*given, "--workers", "2"])
    study = read_json(tmp_path / "tuned_recipe_trials.json")
    assert len(study["trials"]) in (3, 4), "two workers may begin a third and a fourth at the same time"
    assert study["configured"]["settings"] == {
        "train.lr": 6e-3,
        "train.weight_decay": 0.05,
        "train.average": 0.5,
        "model.dropout": 0.2,
    }
    rows = tuned_recipe.read_rows(tmp_path / "tuned_recipe.csv", tuned_recipe.Row)
    assert {(row.name, row.seed) for row in rows} == {(n, s) for n in ("the recipe", "tuned") for s in (2, 3)}
    assert len({row.ppl for row in rows if row.name == "the recipe"}) == 2, "the seeds differ"
    (path,) = tmp_path.glob("tuned_recipe-*.json")
    result = read_json(path)
    for name, trial in (("the recipe", study["configured"]), ("tuned", study["best"])):
        assert result["settings"][name] == trial["settings"]
        assert result["ppl"][name] == {str(row.seed): row.ppl for row in rows if row.name == name}
    gains = [100 * (result["ppl"]["tuned"][seed] / result["ppl"]["the recipe"][seed] - 1) for seed in ("2", "3")]
    assert result["difference"]["mean"] == pytest.approx(sum(gains) / 2)
    # With another best trial, its rows are missing; the study is not run again.
    write_json(tmp_path / "tuned_recipe_trials.json", {**study, "best": study["configured"]})
    tuned_recipe.main([*given, "--report"])
    assert read_json(path)["ppl"]["tuned"] == {}
    assert read_json(path)["difference"] is None
    assert json.loads(to_json(result["space"])).keys() == read_settings("tuned_recipe")["tuned_recipe"]["space"].keys()
    assert f"{len(study['trials'])} trials of 8 steps" in capsys.readouterr().out
