"""Memory, time and price of both phases before they are trained."""

import dataclasses
import json
import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import plan as benchmark
import pytest
from conftest import small_config
from helpers.command_helpers import run_command

from parnas.architecture import Architecture
from parnas.config.loader import Config, load_config
from parnas.data.token_frequencies import estimate_token_counts
from parnas.errors import ParnasError
from parnas.model.estimators import arch_batch_size
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.search import search
from parnas.runs.run import Run
from parnas.training.distributed import DistributedContext
from parnas.training.planning.memory_estimate import MemoryEstimate
from parnas.training.planning.resource_plan import (
    CONTEXT_BYTES,
    Machine,
    Rate,
    advise_rows,
    arch_step_passes,
    choose_rate,
    flops_of,
    make_machine,
    memory_by_use,
    plan,
    plan_phase,
    read_rate,
    required_bytes,
    rows_that_fit,
    throughput,
)
from parnas.training.progress import Silent

SHALLOW = ["model.arch=sf", "search.blocks=2"]  # counting takes time in proportion to the blocks
CONFIG = Config().replace(model__d_model=16, model__n_heads=2, model__d_inner=40, search__blocks=3)
COUNTS = list(range(50, 0, -1))
ESTIMATE = MemoryEstimate(
    parameters=400, memory=30, saved_activations=500, softmax=50, gradients=400, peak=700, moments=800
)


def test_memory_adds_up() -> None:
    assert memory_by_use(ESTIMATE, 1) == {
        "parameters": 400,
        "moments of the optimizer": 800,
        "memory of segments": 30,
        "a step at its peak": 700,
    }
    assert sum(memory_by_use(ESTIMATE, 2).values()) == 400 + 800 + 400 + 30 + 700  # buckets of all gradients besides
    averaged = memory_by_use(dataclasses.replace(ESTIMATE, average=400), 1)
    assert averaged == {**memory_by_use(ESTIMATE, 1), "average of the weights": 400}
    assert required_bytes({"parameters": 1000}) == 1100 + CONTEXT_BYTES


def test_averaging_gradients_costs_time_only_beyond_the_backward_pass() -> None:
    # One GPU: 1000 tokens of a step at 100 per second are 10 s. Four: 2.5 s, of which 5/3 s are backward.
    assert throughput(100, 1, 1000, 10**9, 1.0) == 100
    assert throughput(100, 4, 1000, 100, 150.0) == 400  # 2 · 3/4 · 100 / 150 = 1 s, beside the backward pass
    assert throughput(100, 4, 1000, 100, 50.0) == pytest.approx(1000 / (2.5 + 3 - 5 / 3))


def test_the_default_bandwidth_is_that_of_nvlink_up_to_eight_gpus() -> None:
    assert Machine(8).bandwidth == 8 * Machine(9).bandwidth
    assert Machine(8, bandwidth_gb_per_s=3).bandwidth == 3e9


def test_time_and_price_match_a_calculation_by_hand(corpus: Path) -> None:
    config = small_config(corpus, train__steps=900, data__batch_size=4, data__tgt_len=8)
    retraining = plan(config, Machine(2, price_per_hour=3.0), Rate(50.0, None, "hand")).phases[1]
    assert retraining.tokens == 900 * 4 * 8
    assert retraining.tokens_per_s == pytest.approx(100)
    assert retraining.hours == pytest.approx(900 * 4 * 8 / 100 / 3600)
    assert retraining.price == pytest.approx(2 * 3.0 * 900 * 4 * 8 / 100 / 3600)
    assert retraining.rows == 2


def test_a_speed_is_scaled_by_the_flops_of_the_phase(corpus: Path) -> None:
    config = small_config(corpus)
    searching, retraining = plan(config, Machine(), Rate(50.0, None, "hand")).phases
    ratio = retraining.flops_per_token / searching.flops_per_token
    assert searching.tokens_per_s == pytest.approx(50 * ratio)
    assert searching.scaled_by == pytest.approx(ratio)
    assert retraining.scaled_by == 1


def test_flops_are_six_for_each_multiply_add_of_the_network() -> None:
    config = CONFIG.replace(model__arch="sff")
    network = TransformerXL.build(config.model, Architecture("sff"), 50)
    expected = 6 * network.multiply_adds(config.data.tgt_len, config.model.reach, COUNTS)
    assert flops_of(config, "retrain", COUNTS) == pytest.approx(expected)


@pytest.mark.parametrize("estimator", ["soft", "gdas", "uniform"])
def test_flops_of_a_search_are_the_mean_over_the_drawn_paths(estimator: str) -> None:
    config = CONFIG.replace(search__estimator=estimator, search__space=("s", "i"), search__blocks=2)
    lengths = config.data.tgt_len, config.model.reach
    if estimator == "soft":
        network = SuperNet(config.model, config.search.space, 2, 50)
        assert flops_of(config, "search", COUNTS) == pytest.approx(6 * network.multiply_adds(*lengths, COUNTS))
        return
    probability = 2 / 3 if estimator == "uniform" else 1 / 2  # of s; identity is drawn half as often
    mean = 0.0
    for layers in (["s", "s"], ["s"], ["s"], []):
        network = (
            TransformerXL.build(config.model, Architecture(layers), 50)
            if layers
            else TransformerXL(config.model, [], 50)
        )
        mean += (
            probability ** len(layers)
            * (1 - probability) ** (2 - len(layers))
            * network.multiply_adds(*lengths, COUNTS)
        )
    arch_passes = 2 * arch_step_passes(config.search)
    assert flops_of(config, "search", COUNTS) == pytest.approx((6 + arch_passes) * mean)
    assert (arch_passes > 0) == (estimator == "uniform")


def test_passes_of_architecture_steps_match_a_count_of_the_steps() -> None:
    """Steps 200 to 1200 of 2000; each fourth reads a quarter of a batch twice."""
    settings = Config().search
    architecture_steps = range(settings.alpha_start_step, settings.alpha_end_step, settings.alpha_every)
    assert arch_step_passes(settings) == pytest.approx(len(architecture_steps) * 2 * (1 / 4) / settings.steps)


def test_rows_that_fit_are_on_the_line() -> None:
    assert rows_that_fit(8, 180, 4, 100, limit=125) == 5  # 20 + 20 for each row
    assert rows_that_fit(8, 180, 4, 100, limit=180) == 8
    assert rows_that_fit(8, 180, 4, 100, limit=99) == 0


def test_a_plan_that_does_not_fit_advises_settings() -> None:
    machine = Machine(memory_gb=4.7)
    config = load_config("configs/wikitext103-base.yaml", [*SHALLOW, "search.estimator=soft"])
    counts = estimate_token_counts(config.data).counts.tolist()
    assert all(phase.fits and not phase.advice for phase in plan(config, Machine(memory_gb=80.0)).phases)
    searching, retraining = plan(config, machine).phases
    assert not searching.fits
    assert "search.estimator=uniform" in searching.advice[0]
    assert not any("estimator" in line for line in retraining.advice)
    parts = int(searching.advice[1].partition("accumulate=")[2].split()[0])
    assert (
        plan_phase(config.replace(train__accumulate=parts), "search", counts, machine, None).needed_bytes
        <= 1.01 * 4.7e9
    )
    twice = float(searching.advice[2].rpartition(": ")[2].split()[0])
    again = plan_phase(config.replace(runtime__checkpoint_activations=True), "search", counts, Machine(), None)
    assert again.needed_bytes / 1e9 == pytest.approx(twice, abs=0.06)
    assert again.flops_per_token == pytest.approx(searching.flops_per_token * 4 / 3)
    nothing = plan_phase(config, "search", counts, Machine(memory_gb=1.5), None)
    assert "even with one row at a time" in nothing.advice[1]


def test_gpus_that_do_not_divide_the_batch_are_refused() -> None:
    with pytest.raises(ParnasError, match=r"data\.batch_size .*60.* 64"):
        plan(load_config("configs/wikitext103-base.yaml"), Machine(8))


def test_a_search_whose_gpus_cannot_share_the_architecture_batch_is_advised() -> None:
    """An architecture step reads a quarter of the rows of a batch; retraining has no such steps and needs no advice."""
    searching, retraining = plan(load_config("configs/wikitext103-base.yaml", SHALLOW), Machine(4)).phases
    (advice,) = searching.advice
    assert "15 of the 60 rows" in advice
    assert "such as 64" in advice
    assert not retraining.advice
    with pytest.raises(ParnasError, match="15"):
        DistributedContext(0, 4).local_slice(arch_batch_size("uniform", 60))


@pytest.mark.parametrize("gpus", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("per_gpu", [1, 2, 3, 5, 15])
def test_advised_batch_sizes_can_be_shared(gpus: int, per_gpu: int) -> None:
    for line in advise_rows(Config().replace(data__batch_size=gpus * per_gpu), gpus):
        advised = int(line.rpartition(" ")[2])
        assert advised > gpus * per_gpu
        assert not list(advise_rows(Config().replace(data__batch_size=advised), gpus))
        for rows in (advised, arch_batch_size("uniform", advised)):
            DistributedContext(0, gpus).local_slice(rows)


@pytest.mark.parametrize("given", [{"memory": -1.0}, {"bandwidth": 0.0}, {"memory": float("inf")}])
def test_sizes_must_be_positive(given: dict[str, float]) -> None:
    with pytest.raises(ParnasError, match=r"--memory|--bandwidth"):
        make_machine(1, given.get("memory"), given.get("bandwidth"), None)


def test_a_rate_comes_from_one_option(tmp_path: Path) -> None:
    assert choose_rate(None, None) is None
    with pytest.raises(ParnasError, match=r"--from.*--tokens-per-s"):
        choose_rate(tmp_path, 3.0)
    with pytest.raises(ParnasError, match="--tokens-per-s"):
        choose_rate(None, 0.0)
    with pytest.raises(ParnasError, match="none"):
        choose_rate(tmp_path / "none", None)


def test_the_speed_of_a_run_is_the_median_of_its_lines(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, train__log_every=6)
    run = search(config, tmp_path / "run", Silent())
    rates = sorted(line.tokens_per_s for line in run.metrics() if line.split == "train")
    assert len(rates) == 4
    rate = read_rate(run)
    assert rate.tokens_per_s == (rates[1] + rates[2]) / 2
    assert rate.flops_per_token == flops_of(run.config(), "search", estimate_token_counts(config.data).counts.tolist())
    planned = plan(config, Machine(), rate).phases[0]
    assert planned.scaled_by == 1
    assert planned.hours == pytest.approx(24 * 4 * 8 / rate.tokens_per_s / 3600)
    run.truncate_after(0)
    with pytest.raises(ParnasError, match=r"train\.log_every"):
        read_rate(Run(run.folder))


def test_the_command_shows_both_phases_and_writes_them(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = [
        "demo",
        f"data.corpus={corpus}",
        "data.tokenizer={kind: word}",
        "model.cutoffs=[]",
        "model.proj_factor=null",
    ]
    assert run_command("plan", *given, "--gpus", 2, "--memory", 24, "--arch", "sfi", "--out", "planned") == 0
    shown = capsys.readouterr().out
    assert "fits in 24 GB" in shown
    assert "no time without a measured speed" in shown
    written: dict[str, Any] = json.loads((tmp_path / "planned" / "plan.json").read_text())
    assert [phase["phase"] for phase in written["phases"]] == ["search", "retrain"]
    assert written["phases"][1]["network"] == "sfi"
    assert not (tmp_path / "runs").exists()
    assert (
        run_command("plan", *given, "search.blocks=2", "--arch", "sf", "--tokens-per-s", 1000, "--price-per-hour", 2)
        == 0
    )
    shown = capsys.readouterr().out
    assert "tokens/s, scaled by FLOPs" in shown
    assert "price" in shown


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", sorted((benchmark.harness.ROOT / "configs").glob("*.yaml")), ids=lambda path: path.stem
)
def test_every_shipped_configuration_has_a_plan(path: Path, corpus: Path) -> None:
    config = load_config(path, SHALLOW)
    if config.data.corpus == "pydoc":  # gathering Python's documentation takes many seconds
        config = config.replace(
            data__corpus=str(corpus), data__tokenizer__kind="word", data__tokenizer__vocab_size=None
        )
    for phase in plan(config, Machine(memory_gb=80)).phases:
        assert phase.needed_bytes > 4 * phase.parameters
        assert phase.estimate.saved_activations > phase.estimate.softmax > 0


@pytest.mark.slow
def test_the_benchmark_compares_estimated_with_measured_memory(tmp_path: Path) -> None:
    benchmark.main(["--tiny", "--device", "cpu", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "plan-cpu.json").read_text())
    for record in result["records"]:
        assert record["predicted_sum"] == sum(record["predicted_bytes"].values())
        assert record["measured_over_predicted"] == record["measured_bytes"] / record["predicted_sum"]
        assert record["kept_heap_bytes"] >= 0


def grown_by(megabytes: int) -> int:
    """Return the bytes by which the peak memory of this process grows when it fills a number of mebibytes."""
    before = benchmark.harness.peak_memory()
    bytearray(megabytes * 2**20)
    return benchmark.harness.peak_memory() - before


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a new process inherits the peak of its parent")
def test_the_peak_of_a_new_process_does_not_start_from_that_of_its_parent() -> None:
    taken = b"1" * (200 * 2**20)
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        grown = pool.submit(grown_by, 150).result()
    assert len(taken) > 0
    assert 140 * 2**20 < grown < 160 * 2**20


def test_the_shipped_measurement_is_within_its_goal() -> None:
    result = json.loads(Path("benchmarks/results/plan-cpu.json").read_text())
    assert result["worst"] <= result["goal"]
