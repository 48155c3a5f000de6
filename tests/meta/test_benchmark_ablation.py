"""The ablation of the recipe in tiny form, and what it tries besides the options."""

import math
import re
import shutil
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import ablation
import pytest
import torch
import tried
from conftest import small_config
from helpers.data_helpers import distinct_tokens, read_rows
from helpers.model_helpers import VOCABULARY, make_network, model_config, random_ids, randomise
from helpers.training_helpers import Recorded
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from parnas.architecture import Architecture
from parnas.config.loader import load_config
from parnas.config.yaml_file import read_yaml
from parnas.data.batching import Shuffle
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.model import fused
from parnas.model.heads import Embedding
from parnas.nas.cost import find_costs
from parnas.runs.files import read_json
from parnas.runs.resolve import read_config
from parnas.runs.run import METRICS, Run
from parnas.training.optimizers import Schedule, orthogonalise
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results"


def read_settings(plan: str) -> dict:
    return read_yaml((ROOT / "benchmarks" / f"{plan}.yaml").read_text(encoding="utf-8"), f"{plan}.yaml")


def planned(plan: str, runs: Path = Path("runs")) -> ablation.Ablation:
    read = read_settings(plan)
    content = read.pop(plan)
    return ablation.Ablation(read_config(read, []), content["share"], runs, ablation.read_plan(content))


@pytest.mark.parametrize("plan", ablation.PLANS)
def test_every_change_names_settings_that_there_are_and_differs_from_the_recipe(plan: str) -> None:
    of_plan = planned(plan)
    hashes = {job.variant.name: of_plan.hash_settings(job) for job in of_plan.jobs}
    assert len(hashes) == len(set(hashes.values())) > 10
    for job in of_plan.jobs:
        changed = ablation.changed_config(of_plan.config, job).replace(runtime__seed=of_plan.config.runtime.seed)
        variant, recipe = job.variant, of_plan.jobs[0].variant
        same = changed == of_plan.config and variant == recipe._replace(name=variant.name, source=variant.source)
        assert same == (variant.name == ablation.RECIPE)
        assert {each.variant.name for each in of_plan.needed(job)} <= {variant.base, variant.network_of}
        assert job.seed not in variant.teachers
        if variant.network_of:
            assert of_plan.find(variant.network_of, job.seed).variant.one_run


def test_the_networks_have_about_the_multiply_adds_of_the_recipe_but_for_those_with_more_context() -> None:
    of_plan = planned("ablation_hybrid")
    reference = find_costs(of_plan.config, "macs", Silent())
    shares, longer = {}, set()
    for job in of_plan.jobs:
        config = ablation.changed_config(of_plan.config, job)
        costs = find_costs(config, "macs", Silent())
        share = costs.cost(Architecture.parse(config.model.arch)) / reference.reference
        shares[config.model.arch] = min(share, shares.get(config.model.arch, share))
        longer |= {job.variant.name} if share > of_plan.config.search.cost.target + 1e-9 else set()
    assert longer == {"memory of 256"}
    assert max(shares.values()) == shares[of_plan.config.model.arch] == pytest.approx(of_plan.config.search.cost.target)
    assert min(shares.values()) > 0.95 * of_plan.config.search.cost.target


def test_another_recipe_makes_trainings_with_teachers_other_ones() -> None:
    of_plan = planned("ablation_hybrid")
    taught = ablation.Variant("taught", "", {"model.dropout": 0.1}, [], teachers=[3])
    job = ablation.Job(taught, 1)
    other = replace(of_plan, config=of_plan.config.replace(model__dropout=0.25))
    assert ablation.changed_config(of_plan.config, job) == ablation.changed_config(other.config, job)
    assert of_plan.hash_settings(job) != other.hash_settings(job)


def test_the_recipe_is_that_of_the_configuration() -> None:
    config, plan = load_config(ROOT / "configs" / "wikitext2-word-cpu.yaml"), planned("ablation_hybrid")
    by_name = {job.variant.name: job for job in plan.jobs}
    recipe = plan.config
    taken = "initial values by the number of inputs", "pointer over 2048 positions", "dropout 0.1"
    for name in (*taken, "average of the last quarter"):
        recipe = ablation.changed_config(recipe, by_name[name])
    of_size = {
        "model": ("arch", "d_model", "d_inner"),
        "train": ("steps", "lr", "warmup_steps", "log_every", "eval_every", "save_every"),
        "data": ("batch_size",),
    }
    for section, names in of_size.items():
        ours, theirs = (getattr(each, section).model_copy(update=dict.fromkeys(names)) for each in (recipe, config))
        assert ours == theirs


def test_the_last_recipe_is_that_of_the_longer_configuration_before_dropout_and_average_were_tuned() -> None:
    read = read_settings("ablation")
    last = ablation.read_plan(read.pop("ablation"))[-1]
    assert not last.variant.tried
    recipe = ablation.changed_config(read_config(read, []), last)
    config = load_config(ROOT / "configs" / "wikitext2-word.yaml")
    before = read_json(ROOT / "benchmarks" / "results" / "word_level-wikitext2-word.json")["earlier"][-1]
    settings = before["runs"]["derived"]["settings"]
    assert recipe.model.dropout == settings["model"]["dropout"] != config.model.dropout
    assert recipe.train.average == settings["train"]["average"] != config.train.average
    for section, names in {
        "model": ("norm", "attention_dropout", "cutoffs", "mem_len", "div_val"),
        "train": ("optimizer", "weight_decay", "clip", "label_smoothing"),
        "data": ("tgt_len", "shuffle"),
    }.items():
        for name in names:
            assert getattr(getattr(recipe, section), name) == getattr(getattr(config, section), name), name


def test_an_unknown_change_is_refused_and_a_table_without_the_recipe_made(corpus, tmp_path):
    with pytest.raises(ParnasError, match=r"dropout 0\.51"):
        ablation.main(["--tiny", "--corpus", str(corpus), "--out", str(tmp_path), "--only", "dropout 0.51"])
    with pytest.raises(ParnasError, match="--out"):
        ablation.main(["--tiny", "--corpus", str(corpus)])
    job = ablation.Job(ablation.Variant("wider", "", {}, []), 1)
    (line,) = ablation.tabulate([job], [ablation.Row("wider", 1, 8, 50.0, 1.0, 9, "0123abcd", "CPU", "f", "fp32")])
    assert (line["ppl"], line["against the recipe"]) == ("50.00", "–")


def test_trainings_too_short_to_be_timed_have_no_relative_time() -> None:
    jobs = [ablation.Job(ablation.Variant(name, "", {}, []), 1) for name in (ablation.RECIPE, "wider")]
    for seconds, times in ((0.0, ["–", "–"]), (0.5, ["1.00", "1.00"])):
        rows = [ablation.Row(job.variant.name, 1, 8, 50.0, seconds, 9, "0123abcd", "CPU", "f", "fp32") for job in jobs]
        assert [line["time"] for line in ablation.tabulate(jobs, rows)] == times


@pytest.mark.slow
def test_tiny_trainings_fill_the_table_once(corpus, tmp_path, capsys):
    arguments = ["--tiny", "--corpus", corpus, "--runs", tmp_path / "runs", "--out", tmp_path, "--workers", 1]
    chosen = [word for name in (ablation.RECIPE, "AdamW alone, lr 2e-3", "cosine to zero") for word in ("--only", name)]
    ablation.main(list(map(str, [*arguments, *chosen])))
    rows = ablation.read_rows(tmp_path / "ablation.csv", ablation.Row)
    assert [row.seed for row in rows if row.name == ablation.RECIPE] == [1, 2, 3]
    assert [row.seed for row in rows] == [1, 1, 1, 2, 3]
    assert len({row.ppl for row in rows}) == 5
    path = tmp_path / "ablation.csv"
    path.write_text(path.read_text() + '"schedule-free AdamW, lr 2e-3",1,8,1.0,1.0,9,0123abcd,CPU,f,fp32\n')
    ablation.main(list(map(str, [*arguments, "--report"])))
    out = capsys.readouterr().out
    assert "against the recipe" in out
    assert "schedule-free" not in out


def test_a_report_needs_no_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARNAS_DATA", raising=False)
    ablation.main(["--plan", "ablation_hybrid", "--report", "--out", str(tmp_path)])
    assert (tmp_path / "ablation_hybrid-cpu.json").is_file()


@pytest.mark.slow
def test_trainings_that_others_need_are_done_again_once_where_their_folders_are_lost(
    corpus: Path, tmp_path: Path
) -> None:
    given = ["--tiny", "--plan", "ablation_hybrid", "--corpus", str(corpus), "--out", str(tmp_path)]
    given += ["--runs", str(tmp_path / "runs"), "--workers", "2"]
    names = "no pointer, one teacher", "no pointer, three teachers", "the network of the one run from scratch"
    ablation.main([*given, *(word for name in names for word in ("--only", name))])
    rows = ablation.read_rows(tmp_path / "ablation_hybrid.csv", ablation.Row)
    assert sorted(row.name for row in rows) == sorted(names)
    made = {path.name.partition("-seed-")[0] for path in (tmp_path / "runs").iterdir() if "-seed-" in path.name}
    assert made == {"no-pointer", "one-run", *(re.sub("[ ,]+", "-", name) for name in names)}


def test_a_training_is_kept_where_finished_and_one_with_averages_begun_anew_where_cut_off(
    corpus: Path, tmp_path: Path
) -> None:
    config = small_config(corpus, model__arch="f", train__steps=4)
    job = ablation.Job(ablation.Variant("averages", "", {}, ["ema"]), 1)
    study = ablation.Ablation(config, 1.0, tmp_path / "whole", [job])
    whole = study.train(job)
    assert study.train(job) == whole
    (made,) = (tmp_path / "whole").iterdir()
    left = tmp_path / "parts" / made.name
    shutil.copytree(made, left)
    (left / "summary.json").unlink()
    (left / METRICS).write_text("")
    assert replace(study, runs=tmp_path / "parts").train(job).ppl == whole.ppl
    assert [line.step for line in Run(left).metrics() if line.split == "valid"] == [4]


@pytest.mark.slow
def test_a_search_is_part_of_the_steps_and_its_network_and_the_recipe_serve_other_trainings(
    corpus: Path, tmp_path: Path
) -> None:
    searching = {"search__space": ("s", "f", "i"), "search__blocks": 3, "search__cost__metric": "macs"}
    config = small_config(corpus, model__arch="sf", train__steps=20, train__warmup_steps=2, **searching)
    recipe, one_run, network, taught = jobs = [
        ablation.Job(variant, 1)
        for variant in (
            ablation.Variant(ablation.RECIPE, "", {}, []),
            ablation.Variant("one run", "", {}, [], one_run=True),
            ablation.Variant("network", "", {}, [], network_of="one run"),
            ablation.Variant("taught", "", {}, [], teachers=[1]),
        )
    ]
    study = ablation.Ablation(config, 1.0, tmp_path, jobs)
    rows = [study.train(job) for job in (taught, network, one_run, recipe)]
    assert {row.steps for row in rows} == {20}
    assert len({row.ppl for row in rows}) == 4
    assert (rows[0].arch, rows[1].arch) == (rows[3].arch, rows[2].arch)
    parts = [Run(study.folder(one_run) / part).summary() for part in ("search", "run")]
    assert [part.steps for part in parts] == [4, 16]
    assert rows[2].seconds == pytest.approx(sum(part.seconds for part in parts))
    assert Run(study.folder(taught)).config().train.teachers == (str(study.folder(recipe).resolve()),)
    with pytest.raises(ParnasError, match="seed 2"):
        study.train_run(ablation.Job(ablation.Variant("taught more", "", {}, [], teachers=[1, 2]), 1))


def test_keys_and_values_apart_are_two_matrices_of_the_same_size_of_step() -> None:
    stacked, square = torch.randn(2, 8, 4), torch.randn(2, 4, 4)
    halves = [orthogonalise(half.contiguous()) for half in stacked.split(4, dim=1)]
    found = tried.orthogonalise_apart(stacked)
    torch.testing.assert_close(found * 2**0.5, torch.cat(halves, dim=1))
    torch.testing.assert_close(tried.orthogonalise_apart(square), orthogonalise(square))


def test_a_tenth_of_the_weights_is_dropped_in_training_alone() -> None:
    layer, x = nn.Linear(300, 200, bias=False), torch.eye(300)
    with tried.TRIED["locked_dropout"](), tried.weight_dropout():  # which is not of the rows of a text
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


@pytest.mark.parametrize("p", [0.2, 0.5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_locked_dropout_zeroes_the_same_features_at_all_positions_of_a_row(p: float, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.ones(151, 7, 201, dtype=dtype, requires_grad=True)
    dropped = tried.drop_features(x, p)
    assert torch.equal(dropped, dropped[:, :1].expand_as(dropped))
    first = dropped[:, 0]
    assert float((first != 0).float().mean()) == pytest.approx(1 - p, abs=0.02)
    assert first.detach().unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=0.005)
    for neighbours in (first[1:] * first[:-1], first[:, 1:] * first[:, :-1]):
        assert float((neighbours != 0).float().mean()) == pytest.approx((1 - p) ** 2, abs=0.02)
    dropped.sum().backward()
    assert torch.equal(x.grad, dropped.detach())


def test_all_dropout_of_a_network_is_locked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of embeddings, distances, inner activations, outputs of layers and the last hidden states."""
    drop_features, shapes = tried.drop_features, []
    monkeypatch.setattr(fused, "dropout", lambda x, p: shapes.append(x.shape) or drop_features(x, p))
    make_network("sf", dropout=0.1).train()(random_ids(2, 5))
    assert shapes == [(2, 5, 8), (5, 8), (2, 5, 8), (2, 5, 12), *[(2, 5, 8)] * 2]


@pytest.mark.parametrize("changes", [{}, {"cutoffs": (5, 9), "div_val": 2}])
def test_a_tenth_of_the_words_is_left_out_everywhere_as_input_alone(changes: dict) -> None:
    ids, left_out = random_ids(6, 30), 0
    embedding = randomise(Embedding(model_config(**changes), VOCABULARY))
    plain = embedding(ids)
    torch.manual_seed(0)
    with tried.embedding_dropout():
        for _ in range(200):
            shares = (embedding(ids) / plain).detach()[..., 0]
            of_words = [shares[ids == word].unique().tolist() for word in range(VOCABULARY)]
            assert all(len(found) == 1 for found in of_words)
            assert {round(found[0], 4) for found in of_words} <= {0, round(1 / 0.9, 4)}
            left_out += sum(not found[0] for found in of_words)
        assert torch.equal(embedding.eval()(ids), plain)
    assert left_out / 200 / VOCABULARY == pytest.approx(0.1, abs=0.02)


@given(
    rows=st.integers(1, 4),
    tgt_len=st.integers(2, 70),
    length=st.integers(300, 900),
    seed=st.integers(0, 2**32 - 1),
    epoch=st.integers(0, 3),
    rotated=st.booleans(),
)
def test_with_random_lengths_every_token_of_an_epoch_is_a_target_once(
    rows: int, tgt_len: int, length: int, seed: int, epoch: int, rotated: bool
) -> None:
    batches = tried.RandomLengths(distinct_tokens(length), rows, tgt_len, None, Shuffle(seed, rotated))
    inputs, targets = read_rows(batches, epoch)
    assert (targets == inputs + 1).all()
    assert sorted(targets.flatten().tolist()) == list(range(101, 101 + targets.size))
    assert 0 <= length - 1 - targets.size < rows * tgt_len


def test_random_lengths_are_as_often_as_asked_and_in_another_order_in_each_epoch() -> None:
    batches = tried.RandomLengths(distinct_tokens(100_001), 2, 64, None, Shuffle(7))
    orders = [
        [batches.batch(epoch * batches.segments + segment).inputs.shape[1] for segment in range(batches.segments)]
        for epoch in range(2)
    ]
    assert orders[0] != orders[1]
    counts = Counter(orders[0])
    assert counts == Counter(orders[1])
    assert sorted(counts) == [24, 26, 28, 30, 32, 56, 58, 60, 62, 64]
    halved = sum(count for length, count in counts.items() if length <= 32)
    assert halved / batches.segments == pytest.approx(0.05, abs=0.002)


def test_the_recorded_trainings_are_those_of_the_plan() -> None:
    """A hash of settings that no longer fits would leave the table empty."""
    study = planned("ablation")
    assert len(study.rows(RESULTS / "ablation.csv")) == len(study.jobs) > 30


@pytest.fixture(scope="module")
def trained_plain(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Run]:
    """Trains a network without a change once, with or without Muon."""

    @cache
    def train(muon: bool) -> Run:
        of_muon = {"model__arch": "s", "train__optimizer": "muon"} if muon else {}
        config = small_config(corpus, model__dropout=0.1, **{"model__arch": "f", **of_muon})
        return retrain(config, tmp_path_factory.mktemp("plain") / "run", Silent())

    return train


@pytest.mark.parametrize("name", tried.TRIED)
def test_what_is_tried_trains_and_validates(
    name: str, trained_plain: Callable[[bool], Run], corpus: Path, tmp_path: Path
) -> None:
    plain = trained_plain(name == "keys_apart")
    config = plain.config()
    with tried.TRIED[name]():
        run = retrain(config, tmp_path / "run", Silent())
    losses = [line.loss for line in run.metrics() if line.split == "valid"]
    assert losses[-1] < 0.98 * math.log(prepare(config.data).tokenizer.vocab_size), "it learns"
    assert run.summary().valid.ppl != plain.summary().valid.ppl


def test_exponential_averages_are_validated_and_the_weights_trained_on_untouched(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded = Recorded(monkeypatch)
    monkeypatch.setattr(tried, "EMA_DECAY", 0.3)  # which eight steps reach
    with tried.TRIED["ema"]():
        retrain(small_config(corpus, model__arch="f", train__steps=8, train__eval_every=1), tmp_path / "run", Silent())
    average = recorded.after[0]
    for number, weights in enumerate(recorded.after):
        decay = min(0.3, (number + 1) / (number + 10))
        average = decay * average + (1 - decay) * weights
        torch.testing.assert_close(recorded.validated[number + 1], average)
    assert not torch.equal(recorded.validated[8], recorded.after[7])
    recorded.assert_untouched()


def test_the_schedules_rise_to_the_peak_and_fall_as_a_cosine_or_stay() -> None:
    rising = Schedule(100, 2.0, 10)
    cosines = {0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 40: 1.5, 55: 1.0, 70: 0.5, 100: 0.0}
    assert {step: tried.cosine(step, rising) for step in cosines} == pytest.approx(cosines)
    constants = {0: 0.2, 4: 1.0, 9: 2.0, 10: 2.0, 55: 2.0, 100: 2.0}
    assert {step: tried.constant(step, rising) for step in constants} == pytest.approx(constants)
    at_once = Schedule(100, 2.0, 0)
    assert tried.constant(0, at_once) == tried.cosine(0, at_once) == 2.0


@pytest.mark.parametrize("name", ["cosine", "schedule_free"])
def test_a_schedule_that_is_tried_is_the_one_that_trains(name: str, corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="f", train__steps=6, train__warmup_steps=2, train__log_every=1)
    with tried.TRIED[name]():
        run = retrain(config, tmp_path / "run", Silent())
    schedule = tried.cosine if name == "cosine" else tried.constant
    rates = [line.lr for line in run.metrics() if line.split == "train"]
    assert rates == [schedule(step, Schedule(6, config.train.lr, 2)) for step in range(6)]


def test_schedule_free_is_its_slow_twin() -> None:
    draw = torch.Generator().manual_seed(0)
    x = z = torch.randn(5, generator=draw)
    parts = [nn.Parameter(part.clone()) for part in x.split([2, 3])]
    optimizer = tried.ScheduleFree([{"params": [part], "weight_decay": 0.0} for part in parts], 0.1)
    optimizer.grad_scale = torch.ones(())
    second, weights = torch.zeros(5), 0.0
    for step in range(1, 6):
        lr = 0.1 * min(1, step / 3)
        y = 0.1 * z + 0.9 * x
        torch.testing.assert_close(torch.cat(parts).detach(), y)
        gradient = torch.randn(5, generator=draw)
        for part, group, of in zip(parts, optimizer.param_groups, gradient.split([2, 3]), strict=True):
            part.grad, group["lr"] = of.clone(), lr
        optimizer.step()
        second = 0.99 * second + 0.01 * gradient**2
        z = z - lr * gradient / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
        weights += lr**2
        x = x + lr**2 / weights * (z - x)
    torch.testing.assert_close(torch.cat([optimizer.state[part]["exp_avg"] for part in parts]), x)
