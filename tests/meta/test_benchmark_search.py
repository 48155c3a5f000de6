"""The benchmark of search steps times what it says: whole steps that train alpha, with a pi that stays."""

import json

import harness
import plain
import pytest
import search_overhead
import search_step
import torch

from parnas.config.loader import load_config
from parnas.errors import ParnasError
from parnas.nas.search import SearchTask

CPU = harness.choose("cpu", "fp32")
PLAN = search_step.PLANS["tiny"]
relative_shift = plain.relative_shift


@pytest.fixture(scope="module")
def steps():
    """All candidates in float32, after two steps each."""
    steps = search_step.make_steps(0.1, {"fp32": CPU}, PLAN)
    for step in steps.values():
        step()
        step()
    return steps


def test_every_step_is_measured_and_compared(tmp_path):
    search_step.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "search_step-cpu.json").read_text())
    searches = {(name, pi) for name in search_step.ESTIMATORS for pi in search_step.SITUATIONS}
    for dropout in search_step.DROPOUTS:
        records = [r for r in result["records"] if r["dropout"] == dropout]
        assert len(records) == 1 + len(harness.DTYPES) * (1 + len(searches))
        means = {(r["name"], r["situation"], r["precision"]): r["mean_seconds"] for r in records}
        for r in records:
            assert len(r["seconds"]) == PLAN.rounds
            assert r["mean_seconds"] == pytest.approx(sum(r["seconds"]) / PLAN.rounds)
            assert r["tokens_per_second"] == pytest.approx(3 * 6 / r["mean_seconds"])
            assert r["times_baseline"] == pytest.approx(means["baseline", "uniform", "fp32"] / r["mean_seconds"])
            trained = means["training", None, r["precision"]]
            assert r["times_training"] == pytest.approx(r["mean_seconds"] / trained)
    assert len(result["goals"]) == len(search_step.DROPOUTS) * len(harness.DTYPES) * len(search_step.SITUATIONS)
    assert set(result["baseline"]["above_floor"]) == {"0.1", "0.0"}


def test_the_plain_mixture_is_measured_without_the_others(tmp_path, capsys):
    search_step.main(["--tiny", "--baseline", "--device", "cpu", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "search_step-baseline-cpu.json").read_text())
    assert {r["name"] for r in result["records"]} == {"baseline"}
    assert "floor" in capsys.readouterr().out


def test_the_shapes_are_those_of_the_forerunner():
    config = search_step.make_config(0.1, "soft")
    assert (config.data.batch_size, config.data.tgt_len, config.model.mem_len) == (32, 32, 16)
    assert (config.model.d_model, config.model.n_heads, config.model.d_inner) == (128, 4, 512)
    assert (config.model.cutoffs, config.model.proj_factor, config.model.tie_weights) == ((250, 2500), 4, False)
    assert (config.search.blocks, config.search.space) == (6, ("s", "f", "i"))
    assert (config.model.dropout, config.search.tau_start, config.search.tau_end) == (0.1, 1.0, 1.0)


def test_alpha_is_trained_and_pi_stays(steps):
    for key, step in steps.items():
        task = step.task
        if isinstance(task, SearchTask):
            adam = task.arch_optimizer.adam
            updates = {int(adam.state[alpha]["step"]) for alpha in task.supernet.alphas()}
            assert updates == ({1} if key.name == "uniform" else {2}), "alpha trains in every fourth step, or in each"
            if key.situation == "interleaved":
                assert str(task.supernet.argmax_architecture()) == harness.INTERLEAVED
                (drawn, *_) = task.gates(step.trainer.step)
                chosen = drawn.argmax(-1).tolist() if isinstance(drawn, torch.Tensor) else [g.chosen for g in drawn]
                assert key.name == "soft" or "".join("sfi"[index] for index in chosen) == harness.INTERLEAVED
            else:
                torch.testing.assert_close(task.supernet.pi(), torch.full((6, 3), 1 / 3))
            moments = [adam.state[alpha]["exp_avg"] for alpha in task.supernet.alphas()]
            learnt = any(moment.abs().sum() > 0 for moment in moments)
            # Where the path is certain, the softmax has no gradient left.
            assert learnt or key.situation == "interleaved"
            probed = task.arch_optimizer.estimator.state_dict().get("means")
            assert (probed is not None and bool(probed.any())) == (key.name == "single_path")


def test_all_candidates_train_the_weights_on_the_same_text(steps):
    texts = {step.task.batches.batch(1).inputs.tobytes() for step in steps.values()}
    assert len(texts) == 1
    for step in steps.values():
        assert step.trainer.step == 2
        first, second = step.losses()
        assert second < first


def test_the_baseline_alone_runs_in_the_textbook_forms(monkeypatch):
    used = []
    monkeypatch.setattr(plain, "relative_shift", lambda scores: used.append(True) or relative_shift(scores))
    for key, step in search_step.make_steps(0.0, {"fp32": CPU}, PLAN).items():
        used.clear()
        step()
        assert bool(used) == (key.name == "baseline")


def test_losses_that_are_not_finite_are_an_error(steps):
    step = next(iter(steps.values()))
    losses = step.trainer.recent.values.clone()
    step.trainer.recent.add(torch.tensor(float("nan")), torch.tensor(1.0))
    with pytest.raises(ParnasError, match="not finite"):
        step.losses()
    step.trainer.recent.restore(losses)


def test_floor_is_in_proportion_to_the_machine():
    records = [{"dropout": 0.1, "name": "baseline", "steps_per_second": 9.0}]
    assert search_step.check_baseline(records, 155e9)["above_floor"] == {"0.1": False}
    assert search_step.check_baseline(records, 100e9)["above_floor"] == {"0.1": True}


def test_a_step_of_a_search_is_measured_beside_networks_of_its_space(tmp_path):
    search_overhead.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "search_overhead-cpu.json").read_text())
    mean = sum(result["networks_ms"].values()) / len(result["networks_ms"])
    assert result["time_over_networks"] == pytest.approx(result["search_ms"] / mean)
    assert result["one_path_over_networks"] == pytest.approx(result["one_path_ms"] / mean)
    assert set(result["largest"]) == {"s"}
    search, largest = (result["peak_bytes"][name] for name in (search_overhead.SEARCH, result["largest"]))
    assert result["memory_over_largest"] == pytest.approx(search / largest)


def test_sampled_networks_have_the_layers_of_the_space_in_their_shares():
    config = load_config("demo").replace(search__space=("s", "k", "f", "i"), search__blocks=50)
    layers = "".join(search_overhead.sample_networks(config, 40))
    assert layers.count("s") / len(layers) == pytest.approx(1 / 3.5, abs=0.04)
    assert layers.count("i") / len(layers) == pytest.approx(0.5 / 3.5, abs=0.04)
