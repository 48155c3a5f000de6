"""The ablation of the recipe in tiny form, and what it tries besides the options."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import ablation
import pytest
import torch
import tried
from conftest import small_config
from model_helpers import make_network, random_ids
from rows import read_rows
from torch import Tensor, nn

from parnas.config import load_config
from parnas.data.streams import prepare
from parnas.inputs import read_config
from parnas.run import METRICS, Run
from parnas.training.optimizers import orthogonalise
from parnas.training.reporter import Silent
from parnas.training.retrain import retrain
from parnas.training.trainer import Trainer
from parnas.yaml_text import read_yaml

ROOT = Path(__file__).resolve().parent.parent


def settings() -> dict:
    return read_yaml(ablation.CONFIG.read_text(encoding="utf-8"), "ablation.yaml")


def test_every_change_names_settings_that_there_are_and_differs_from_the_recipe():
    read = settings()
    jobs = ablation.read_plan(read.pop("ablation"))
    recipe = read_config(read, [])
    assert len({job.variant.name for job in jobs}) > 10
    for job in jobs:
        changed = ablation.changed_config(recipe, job)
        assert (changed.replace(runtime__seed=1) != recipe) or job.variant.tried or job.variant.name == ablation.RECIPE


def test_the_recipe_is_that_of_the_configuration():
    recipe = read_config({section: given for section, given in settings().items() if section != "ablation"}, [])
    config = load_config(ROOT / "configs" / "wikitext2-word-cpu.yaml")
    for section, names in {
        "model": ("norm", "dropout", "attention_dropout", "locked_dropout", "cutoffs", "mem_len", "div_val"),
        "train": ("optimizer", "weight_decay", "clip"),
        "data": ("tgt_len",),
    }.items():
        for name in names:
            assert getattr(getattr(recipe, section), name) == getattr(getattr(config, section), name), name


@pytest.mark.slow
def test_tiny_trainings_fill_the_table_once(corpus, tmp_path, capsys):
    arguments = ["--tiny", "--corpus", corpus, "--runs", tmp_path / "runs", "--out", tmp_path, "--workers", 1]
    chosen = [word for name in (ablation.RECIPE, "AdamW alone, lr 2e-3", "cosine to zero") for word in ("--only", name)]
    ablation.main(list(map(str, [*arguments, *chosen])))
    rows = read_rows(tmp_path / "ablation.csv", ablation.Row)
    assert [(row.name, row.seed) for row in rows[:2]] == [(ablation.RECIPE, 1), (ablation.RECIPE, 2)]
    assert len(rows) == 4
    assert len({row.ppl for row in rows}) == 4
    path = tmp_path / "ablation.csv"
    path.write_text(path.read_text() + '"schedule-free AdamW, lr 2e-3",1,8,1.0,1.0,9,0123abcd\n')
    ablation.main(list(map(str, [*arguments, "--report"])))
    out = capsys.readouterr().out
    assert "against the recipe" in out
    assert "schedule-free" not in out


def test_a_training_is_kept_where_finished_and_one_with_averages_begun_anew_where_cut_off(
    corpus: Path, tmp_path: Path
) -> None:
    config = small_config(corpus, model__arch="f", train__steps=4)
    job = ablation.Job(ablation.Variant("averages", "", {}, "ema"), 1)
    whole = ablation.train(config, 1.0, tmp_path / "whole", job)
    assert ablation.train(config, 1.0, tmp_path / "whole", job) == whole
    (made,) = (tmp_path / "whole").iterdir()
    left = tmp_path / "parts" / made.name
    shutil.copytree(made, left)
    (left / "summary.json").unlink()
    (left / METRICS).write_text("")
    assert ablation.train(config, 1.0, tmp_path / "parts", job).ppl == whole.ppl
    assert [line["step"] for line in Run(left).records(METRICS) if line["split"] == "valid"] == [4]


def test_keys_and_values_apart_are_two_matrices_of_the_same_size_of_step() -> None:
    stacked, square = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    halves = [orthogonalise(half.contiguous()) for half in stacked.split(4, dim=1)]
    found = tried.orthogonalise_apart(stacked)
    torch.testing.assert_close(found * 2**0.5, torch.cat(halves, dim=1))
    torch.testing.assert_close(tried.orthogonalise_apart(square), orthogonalise(square))


def test_a_tenth_of_the_weights_is_dropped_in_training_alone() -> None:
    layer, x = nn.Linear(300, 200, bias=False), torch.eye(300)
    with tried.weight_dropout():
        shares = (layer(x).T / layer.weight).detach()
        assert torch.equal(layer.eval()(x).T, layer.weight)
    assert shares.round(decimals=3).unique().tolist() == pytest.approx([0, 1 / 0.9], abs=1e-3)
    assert float((shares == 0).float().mean()) == pytest.approx(0.1, abs=0.01)


def test_layers_left_out_pass_x_and_remember_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tried, "DROPPED", 1.0)
    network, ids = make_network("sf", dropout=0.0).train(), random_ids(2, 6)
    x = network.embedding(ids)
    with tried.layer_drop():
        output = network(ids)
        assert not torch.equal(network.eval()(ids).hidden, x)
    assert torch.equal(output.hidden, x)
    assert torch.equal(output.memory[0], x)


@pytest.mark.parametrize("name", tried.TRIED)
def test_what_is_tried_trains_and_validates(name: str, corpus: Path, tmp_path: Path) -> None:
    of_muon = {"model__arch": "s", "train__optimizer": "muon"} if name == "keys_apart" else {}
    config = small_config(corpus, **{"model__arch": "f", **of_muon})
    with tried.TRIED[name]():
        run = retrain(config, tmp_path / "run", Silent())
    plain = retrain(config, tmp_path / "plain", Silent())
    first = [line["loss"] for line in run.records(METRICS) if line["split"] == "valid"]
    assert first[-1] < prepare(config.data).tokenizer.vocab_size
    assert run.summary()["valid"]["ppl"] != plain.summary()["valid"]["ppl"]


def average_by_hand(name: str, after: Sequence[Tensor], step: int) -> Tensor:
    """What is validated after `step` of the 8 steps, from the weights [parameters] after each step so far."""
    if name == "late_averaging":
        return torch.stack(list(after[6:step])).mean(0) if step > 6 else after[step - 1]
    decays = [min(0.3, (number + 1) / (number + 10)) for number in range(step)]
    average = after[0]
    for decay, weights in zip(decays[1:], after[1:step], strict=True):
        average = decay * average + (1 - decay) * weights
    return average


@pytest.mark.parametrize("name", ["ema", "late_averaging"])
def test_averages_are_validated_and_the_weights_trained_on_untouched(
    name: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    update, measure = Trainer.update_weights, Trainer.validation_loss
    before, after, validated = list[Tensor](), list[Tensor](), dict[int, Tensor]()

    def weights_of(self: Trainer) -> Tensor:
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()

    def recording_update(self: Trainer, loss: Tensor) -> bool:
        before.append(weights_of(self))
        updated = update(self, loss)
        after.append(weights_of(self))
        return updated

    def recording_validation(self: Trainer, model: nn.Module) -> object:
        validated[self.step] = weights_of(self)
        return measure(self, model)

    monkeypatch.setattr(Trainer, "update_weights", recording_update)
    monkeypatch.setattr(Trainer, "validation_loss", recording_validation)
    monkeypatch.setattr(tried, "EMA_DECAY", 0.3)  # which eight steps reach
    with tried.TRIED[name]():
        retrain(small_config(corpus, model__arch="f", train__steps=8, train__eval_every=1), tmp_path / "run", Silent())
    assert list(validated) == list(range(1, 9))
    for step, weights in validated.items():
        torch.testing.assert_close(weights, average_by_hand(name, after, step))
    assert not torch.equal(validated[8], after[7])
    for old, new in zip(after[:-1], before[1:], strict=True):
        torch.testing.assert_close(new, old, rtol=0, atol=0)


def test_the_schedules_rise_to_the_peak_and_fall_as_a_cosine_or_stay() -> None:
    cosines = {0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 40: 1.5, 55: 1.0, 70: 0.5, 100: 0.0}
    assert {step: tried.cosine(step, 100, 2.0, 10) for step in cosines} == pytest.approx(cosines)
    constants = {0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 55: 2.0, 100: 2.0}
    assert {step: tried.constant(step, 100, 2.0, 10) for step in constants} == pytest.approx(constants)
    assert tried.constant(0, 100, 2.0, 0) == tried.cosine(0, 100, 2.0, 0) == 2.0


@pytest.mark.parametrize("name", ["cosine", "late_averaging", "schedule_free"])
def test_a_schedule_that_is_tried_is_the_one_that_trains(name: str, corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="f", train__steps=6, train__warmup_steps=2, train__log_every=1)
    with tried.TRIED[name]():
        run = retrain(config, tmp_path / "run", Silent())
    schedule = tried.cosine if name == "cosine" else tried.constant
    rates = [line["lr"] for line in run.records(METRICS) if line["split"] == "train"]
    assert rates == [schedule(step, 6, config.train.lr, 2) for step in range(6)]


def test_schedule_free_is_its_slow_twin() -> None:
    draw = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.randn(5, generator=draw))
    x = z = weight.detach().clone()
    optimizer, second, weights = (
        tried.ScheduleFree([{"params": [weight], "weight_decay": 0.0}], 0.1),
        torch.zeros(5),
        0.0,
    )
    optimizer.grad_scale = torch.ones(())
    for step in range(1, 6):
        optimizer.param_groups[0]["lr"] = lr = 0.1 * min(1, step / 3)
        y = 0.1 * z + 0.9 * x
        torch.testing.assert_close(weight.detach(), y)
        gradient = torch.randn(5, generator=draw)
        weight.grad = gradient.clone()
        optimizer.step()
        second = 0.99 * second + 0.01 * gradient**2
        z = z - lr * gradient / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
        weights += lr**2
        x = x + lr**2 / weights * (z - x)
    torch.testing.assert_close(optimizer.state[weight]["exp_avg"], x)
