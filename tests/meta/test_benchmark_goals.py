"""Goals are judged from result files, and the file of goals is that of the present results."""

from pathlib import Path

import goals
import harness
import pytest

from parnas.runs.files import read_json, write_json

RATIOS = {"s:window=64": 0.4, "k": 0.2, "r": 0.3, "f": 0.2, "g": 0.21}


def test_the_file_of_goals_is_made_from_the_present_results() -> None:
    made = [goal._asdict() for goal in goals.judge_all(harness.RESULTS)]
    assert read_json(harness.RESULTS / goals.NAME) == made, "run benchmarks/goals.py"


def test_costs_are_judged_by_precision_mode_and_memory(tmp_path: Path) -> None:
    rows = [
        {"precision": precision, "memory": memory, "mode": mode, "s, ms": float(memory), **RATIOS}
        for precision, memory in (("bf16", 256), ("fp32", 256), ("bf16", 4096))
        for mode in ("inference", "training step")
    ]
    rows[0]["k"] = 0.21  # bf16 inference: too slow
    rows[4] |= {"k": 0.21 / 16, "r": 0.3 / 16, "s:window=64": 0.4 / 8}  # at 16 times the memory only the window doubles
    kept = [{"layer": name, "1,024 tokens": 8, "16,384 tokens": 8 + 8 * (name == "r")} for name in goals.LATENCY]
    write_json(tmp_path / "mixers-cpu.json", {"latency": rows, "generation_bytes": kept})
    goals.main(["--out", str(tmp_path)])
    missed = {goal["goal"]: goal["value"] for goal in read_json(tmp_path / goals.NAME) if not goal["reached"]}
    assert missed == {
        "inference of k in bf16: at most 0.2 of s": "0.21",
        "latency of s:window=64 at mem_len 4,096 is that at 256": "2.00 times",
        "bytes of r in generation do not grow to 16,384 tokens": "8 to 16",
    }


@pytest.mark.parametrize(
    ("percent", "p", "latency", "reached"),
    [(-5.5, 0.001, 0.44, True), (-4.9, 0.001, 0.44, False), (-6.0, 0.02, 0.44, False), (-6.0, 0.001, 0.46, False)],
)
def test_a_search_is_judged_by_difference_significance_and_latency(
    percent: float, p: float, latency: float, reached: bool
) -> None:
    record = {"variant": "derived within 0.45", "steps": 9, "seeds": 5, "percent": percent, "p": p, "latency": latency}
    (goal,) = goals.judge_search({"variants": [{"variant": "derived within 0.35", "steps": 9}, record]})
    assert goal.reached == reached
    assert goal.value.startswith(f"{percent:+.1f} %")


@pytest.mark.parametrize(("longer", "reached"), [(86.0, True), (84.0, False)])
def test_the_length_of_trainings_is_judged_by_what_twice_the_steps_gain(longer: float, reached: bool) -> None:
    record = {"variant": "base", "arch": "sf", "steps": 9, "ppl_by_seed": {"1": 100.0, "2": 90.0}}
    twice = {**record, "variant": "twice", "steps": 18, "ppl_by_seed": {"1": longer}}
    (goal,) = goals.judge_search({"variants": [record, {**record, "arch": "fs"}, twice]})
    assert goal.reached == reached
    assert goal.value == f"{100 - longer:.1f} % (*base*)", "paired by seed"


def test_shakespeare_is_judged_by_plain_evaluation_and_the_time_of_each_phase() -> None:
    def row(run: str, evaluation: str, bits: float) -> dict[str, object]:
        return {"run": run, "evaluation": evaluation, "bits_per_byte": bits}

    rows = [row("derived", "plain", 2.06), row("derived", "dynamic", 1.9), row("equal-cost", "plain", 2.2)]
    result = {
        "comparison": {"valid": rows},
        "search": {"seconds": 241.0},
        "runs": {"derived": {"seconds": 239.0}},
    }
    bits, search, training, better = goals.judge_shakespeare(result)
    assert (bits.value, bits.reached) == ("2.060", False), "dynamic evaluation does not count"
    assert (search.reached, training.reached, better.reached) == (False, True, True)
    rows[0]["bits_per_byte"] = 2.05
    rows[2]["bits_per_byte"] = 2.04
    bits, *_, better = goals.judge_shakespeare(result)
    assert (bits.reached, better.reached) == (True, False)


def test_a_network_by_words_is_judged_by_each_protocol_its_time_and_its_size() -> None:
    def rows(plain: float, both: float) -> list[dict]:
        found = {"plain": plain, "dynamic + cache": both, "cache": 1.0}
        return [{"run": "derived", "evaluation": protocol, "word_ppl": ppl} for protocol, ppl in found.items()]

    result = {
        "name": "wikitext2-word-cpu",
        "search": {"seconds": 3600.0},
        "runs": {"derived": {"seconds": 5400.0, "parameters": 15_000_001}},
        "comparison": {"valid": rows(72.0, 52.1), "test": rows(69.5, 49.5)},
    }
    found = list(goals.judge_words(result))
    assert [(goal.value, goal.reached) for goal in found] == [
        ("72.00", True),
        ("69.50", True),
        ("52.10", False),
        ("49.50", True),
        ("72.00", True),  # stretch
        ("69.50", False),
        ("2.50 h", True),
        ("15.0 million", False),
    ]
    result["runs"]["derived"]["seconds"] = 5401.0
    assert not list(goals.judge_words(result))[-2].reached
    result["search"]["of"] = "another result"
    assert len(list(goals.judge_words(result))) == 6, "its search took part in another result's time"


@pytest.mark.parametrize(
    ("percent", "high", "reached"), [(-3.0, -0.1, True), (-3.0, 0.1, False), (-2.9, -0.1, False), (-3.0, None, False)]
)
def test_the_interleaved_network_by_words_must_be_behind_with_certainty(
    percent: float, high: float | None, reached: bool
) -> None:
    def record(name: str, ppl: float, percent: float, high: float | None) -> dict:
        test = {"percent": percent, "low": -9.0, "high": high, "p": None if high is None else 0.01, "pairs": 3}
        return {"name": name, "ppl": ppl, "percent": 5.0, "test_difference": test}

    networks = [
        record("interleaved, 8 blocks", 90.0, percent, high),
        record("worse hybrid", 81.0, 1.0, 2.0),
        record("best hybrid", 80.0, 0.0, 2.0),
        {"name": "one run", "ppl": 80.0},
    ]
    by_hand = [network["name"] for network in networks[:3]]
    result = {"benchmark": "equal_time_epochs", "minutes": 7, "text": 0.125, "by_hand": by_hand, "networks": networks}
    interleaved, hybrid = goals.judge_equal_words(result)
    assert interleaved.goal.startswith("one run of 7 minutes on 0.125 of the text: ")
    assert interleaved.command.endswith("--plan equal_time_epochs")
    assert interleaved.reached == reached
    assert "*best hybrid*" in hybrid.goal
    assert hybrid.reached, "at least equal in the mean"


def test_a_ranking_is_judged_by_the_reliability_and_the_counts() -> None:
    ours = {"tau, one training": 0.7, "tau, equal latency": 0.4, "tau, all": 0.72}
    ranks = [{"ranked by": "uniform: estimate", "target": "none", **ours}]
    ranks += [{"ranked by": name, "target": "", "tau, all": 0.5} for name in ("parameters", "multiply-adds", "latency")]
    result = {"ceiling": {"all": 0.8, "equal latency": 0.5}, "ranks": ranks}
    assert [goal.reached for goal in goals.judge_ranking(result)] == [True, False, True]


def test_a_training_in_one_run_is_judged_by_networks_of_its_time_and_latency() -> None:
    def record(name: str, latency: float, *ppl: float, arch: str = "ks", **more: object) -> dict[str, object]:
        by_seed = {str(seed): value for seed, value in enumerate(ppl, 1)}
        found = {"name": name, "archs": [arch], "latency": latency, "most_latency": latency, "ppl": sum(ppl) / len(ppl)}
        return found | {"ppl_by_seed": by_seed, "seeds": len(ppl)} | more

    networks = [
        record("one run", 0.45, 50.0, 51.0, to_scratch={"percent": 1.2, "pairs": 2}),
        record("interleaved, 12 blocks", 1.0, 55.0, 56.0, percent=-9.0, p=0.001, pairs=2),
        record("interleaved, 12 blocks, twice the time", 1.0, 46.0),
        record("interleaved, 5 blocks", 0.46, 52.0, 52.0, percent=-2.9, p=0.001, pairs=2),
        record("interleaved, 4 blocks", 0.36, 53.0, 54.0, arch="sfsf", percent=-5.6, p=0.001, pairs=2),
        record("convolutions alone", 0.4, 52.5, 53.5, arch="kfkf", percent=-4.7, p=0.02, pairs=2),
        record("lfm2", 0.5, 49.0, 50.0),
        record("too slow", 0.6, 40.0, 40.0),
        record("from one seed", 0.45, 40.0),
        record("front 0.4", 0.4, 52.0, to_scratch={"percent": 0.9, "pairs": 1}),
        record("front 0.5", 0.5, 51.0, 51.0, to_scratch={"percent": -0.9, "pairs": 2}),
    ]
    by_hand = ["interleaved, 4 blocks", "convolutions alone", "lfm2", "too slow", "from one seed"]
    found = list(goals.judge_equal_time({"by_hand": by_hand, "networks": networks}))
    reached = [(goal.goal.partition(":")[0].partition(",")[0], goal.reached) for goal in found]
    assert reached == [
        ("latency of the network derived in one run", True),
        ("one run", True),  # of 12 blocks
        ("one run", False),  # of 5 blocks
        ("one run", False),  # of convolutions alone, the best of one mixer: p is too high
        ("one run", True),  # the mean of the hybrids of its latency, 50.75 and 51.75
        ("one run", False),  # the best of them
        ("one run", False),  # from scratch
        ("front 0.4", True),
        ("front 0.5", True),
        ("front 0.4", False),  # of 4 blocks
        ("twice the time lowers perplexity by less than 15 %", False),
    ]
    assert [goal.value for goal in found if goal.goal.startswith("front 0.4")] == ["+0.9 %, 1 seed", "-1.9 %, 1 seed"]


def test_the_demo_and_a_cold_start_are_judged_by_time_and_quality() -> None:
    time, better = goals.judge_demo({"most_seconds": 91.0, "better": 9, "seeds": 10})
    assert (time.reached, better.reached) == (False, True)
    cold = {"bits_per_byte": 1.44, "command_seconds": 299.0}
    result = {
        "target_bits_per_byte": 1.44,
        "goal_seconds": 300.0,
        "repetitions": [cold, cold | {"bits_per_byte": 1.441}],
    }
    assert [goal.reached for goal in goals.judge_time_in_one_run(result)] == [True, False]


def test_a_compressed_network_is_judged_by_latency_perplexity_time_and_ranking() -> None:
    times = {"training": 0.05, "total": 0.06}
    networks = [
        {"name": "search", **times, "scores": 0.01},
        {"name": "child 0.65", **times, "latency": 0.64},
        {"name": "child 0.5", "training": 0.21, "total": 0.22, "latency": 0.51},
    ]
    figures = {"low": None, "high": None, "pairs": 1}
    shared = {**figures, "test": None}
    comparisons = [
        {"network": "parent, twice the steps", "relative_to": "parent", "percent": -9.0, **shared},
        {"network": "child 0.65", "relative_to": "parent", "percent": 7.0, "test": {"percent": 0.5, **figures}},
        {"network": "child 0.5", "relative_to": "parent", "percent": 3.5, **shared},
        {"network": "child 0.5", "relative_to": "shallower 0.5", "percent": 1.0, **shared},
        {"network": "taught 0.5", "relative_to": "scratch 0.5", "percent": -4.0, **shared},
    ]
    scores = [
        {"search": "search", "score": "inherited", "tau": 0.7},
        {"search": "SuperNet search", "score": "inherited", "tau": 0.75},
    ]
    result = {
        "networks": networks,
        "comparisons": comparisons,
        "ranking": {"networks": 60, "reliability": 0.8, "scores": scores},
        "blocks": 12,
        "alternatives": 48,
        "from_scratch": 0.5,
    }
    found = [*goals.judge_compression(result), *goals.judge_probe({"probe": {"parameters": 124e6, "seconds": 601.0}})]
    assert [goal.goal.partition(":")[0] for goal in found if not goal.reached] == [
        "child 0.5",
        "child 0.5",
        "child 0.5",
        "child 0.5",
        "the same tau is above that of a SuperNet search of the same time",
        "probe of GPT-2 with 124 million parameters",
    ]
    (scoring,) = (goal for goal in found if goal.goal.startswith("scores of all blocks"))
    assert scoring.value == "2.0% (1.0% for 48)"
