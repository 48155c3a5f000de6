"""Write benchmarks/results/goals.json, each goal with its result, from the result files: `python benchmarks/goals.py`.

A goal is a record of `area`, `goal`, `value`, `reached` and the `command` that measures it. Goals whose result file is
missing are left out.
"""

from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import harness

from parnas.config.schema import SearchConfig
from parnas.runs.files import read_json, write_json
from parnas.runs.run import PLAIN
from parnas.studies.baseline_comparison import paired_difference

NAME = "goals.json"
LATENCY = {"k": (0.20, 0.25), "s:window=64": (0.45, 0.5), "r": (0.45, 0.6)}
"""Largest latency relative to attention: inference, training step."""
SWIGLU = 1.1  # largest latency of g relative to f
GROWTH = 1.1  # largest ratio of latencies at the longest and the shortest memory, for layers that should not grow
BETTER = -5.0  # per cent: perplexity of a derived network relative to the interleaved network
TARGETS = ("0.45", "0.65")
SIGNIFICANT = 0.01
CONVERGED = 15  # per cent by which twice the steps may lower the perplexity
RELIABLE = 0.85  # share of the reliability of the reference table
SPEED, SEARCH, ONE_RUN_AREA = "speed", "search among s, f and i", "search within the training"  # areas
COMPRESSION = "trained models"
RISE = {0.65: 1.0, 0.5: 3.0}  # by target, per cent of perplexity by which a child may be above its parent
HEALING, SCORING, DISTILLATION = 0.2, 0.05, 0.1  # largest shares of the parent's training time
RANKING = 0.8  # least share of the reliability
PROBE_SECONDS = 600
GAIN = 10.0  # per cent that twice the steps of the parent may gain
HALF, SIMILAR_LATENCY = 0.5, 0.25  # of the interleaved network's latency; relative difference of similar latencies
DEMO_SECONDS, DEMO_BETTER = 90, 0.9
SHALLOW, TWICE = 0.4, ", twice the time"
CEILING_SHARE = 0.9  # of the tau between two seeds: goal of a search in the space of s, f and i
MOST_LATENCY = 0.65
SUBSETS = {
    "tau, all": "all networks",
    "tau, with attention": "networks with attention",
    "tau, attention alone": "networks of attention layers only",
    "tau, equal latency": "networks of equal latency",
}
PERPLEXITIES: dict[str, dict[str, tuple[float, float]]] = {
    "wikitext2-word-cpu": {PLAIN: (76.0, 73.0), "dynamic + cache": (52.0, 49.5)},
    "wikitext2-word": {PLAIN: (70.0, 67.0), "dynamic + cache": (52.0, 49.5)},
    "wikitext2-word-gpu": {PLAIN: (68.6, 65.8)},
}
"""Goals of the derived network's validation and test perplexity by protocol, set before any training."""
STRETCH = {"wikitext2-word-cpu": (72.0, 69.0)}
WORD_HOURS = {"wikitext2-word-cpu": 2.5, "wikitext2-word": 5.0}  # of search and training
WORD_PARAMETERS = 15e6
INTERLEAVED_BY = -3.0  # per cent: the one run relative to the interleaved network of equal latency, by words
EQUAL_WORDS = "equal_time_words", "equal_time_epochs"  # plans of benchmarks/equal_time.py
SHAKESPEARE_BITS, SHAKESPEARE_SECONDS = 2.05, 240  # bits per byte in validation; of the search, and of a training
WORD_LEVEL = ("wikitext2-word-cpu", "wikitext2-word", "wikitext2-word-gpu", "wikitext2-pieces-cpu")


class Goal(NamedTuple):
    """A goal and what was measured."""

    area: str
    goal: str
    value: str
    reached: bool
    command: str


def judge_mixers(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of latency and of memory in generation."""
    area, command = "cost of layers", "python benchmarks/mixers.py"
    shortest = min(row["memory"] for row in result["latency"])
    longest = max(row["memory"] for row in result["latency"])
    of = {(row["precision"], row["memory"], row["mode"]): row for row in result["latency"]}
    for number, mode in enumerate(("inference", "training step")):
        for precision in ("bf16", "fp32"):
            row = of[precision, shortest, mode]
            for layer, limits in LATENCY.items():
                goal = f"{mode} of {layer} in {precision}: at most {limits[number]} of s"
                yield Goal(area, goal, f"{row[layer]:.2f}", row[layer] <= limits[number], command)
            ratio = row["g"] / row["f"]
            goal = f"{mode} of g in {precision}: at most {SWIGLU} of f"
            yield Goal(area, goal, f"{ratio:.2f}", ratio <= SWIGLU, command)
    first, last = (of["bf16", memory, "inference"] for memory in (shortest, longest))
    for layer in LATENCY:
        growth = last[layer] * last["s, ms"] / (first[layer] * first["s, ms"])
        goal = f"latency of {layer} at mem_len {longest:,} is that at {shortest}"
        yield Goal(area, goal, f"{growth:.2f} times", growth <= GROWTH, command)
    kept = {row["layer"]: list(row.values())[1:] for row in result["generation_bytes"]}
    for layer in LATENCY:
        goal = f"bytes of {layer} in generation do not grow to 16,384 tokens"
        yield Goal(area, goal, f"{kept[layer][0]:,} to {kept[layer][-1]:,}", len(set(kept[layer])) == 1, command)


def judge_search(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of derived networks against the interleaved network, and of the length of the trainings."""
    area, command = "search in the space hybrid", "python benchmarks/variants.py hybrid"
    of = {record["variant"]: record for record in result["variants"]}
    for target in TARGETS:
        if found := of.get(f"derived within {target}"):
            value = (
                f"{found['percent']:+.1f} %, p = {found['p']:.1g}, {found['seeds']} seeds, share {found['latency']:.2f}"
            )
            reached = found["percent"] <= BETTER and found["p"] < SIGNIFICANT and found["latency"] <= float(target)
            goal = f"derived within {target}: perplexity 5 % below the interleaved network's, p < {SIGNIFICANT}"
            yield Goal(area, goal, value, reached, command)
    # Paired by seed, for each network that was trained for some steps and for twice as many.
    gains = [
        (once["variant"], 100 * (1 - ppl / once["ppl_by_seed"][seed]))
        for longer, once in product(result["variants"], repeat=2)
        if longer["steps"] == 2 * once["steps"] and longer.get("arch") == once.get("arch")
        for seed, ppl in longer["ppl_by_seed"].items()
    ]
    if gains:
        goal = f"twice the steps lower perplexity by less than {CONVERGED} %"
        yield judge_gains(area, goal, gains, command)


def judge_ranking(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of the default estimator's ranking."""
    area = "ranking in the space hybrid"
    command = "python benchmarks/search_quality.py --config benchmarks/hybrid_truth.yaml"
    ranks = {row["ranked by"]: row for row in result["ranks"] if row["target"] in ("", "none")}
    ours = ranks["uniform: estimate"]
    for title, column, ceiling in (
        # The reliability is a tau between two trainings, so that it is compared with the tau to one.
        ("all networks", "tau, one training", result["ceiling"]["all"]),
        ("networks of equal latency", "tau, equal latency", result["ceiling"]["equal latency"]),
    ):
        tau = ours[column]
        goal = f"Kendall's tau among {title}: at least {RELIABLE} of the reliability {ceiling:.2f}"
        yield Goal(area, goal, f"{tau:.2f}", tau >= RELIABLE * ceiling, command)
    most = max(ranks[name]["tau, all"] for name in ("parameters", "multiply-adds", "latency"))
    goal = f"Kendall's tau above that of every count, {most:.2f}"
    yield Goal(area, goal, f"{ours['tau, all']:.2f}", ours["tau, all"] > most, command)


def judge_search_step(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of the default estimator's step and of the baseline."""
    command, name = "python benchmarks/search_step.py", result["default_estimator"]
    for each in (goal for goal in result["goals"] if goal["precision"] == "bf16"):
        step = f"step of `{name}`, {each['situation']} pi, dropout {each['dropout']}, bf16"
        goal, ratio = f"{step}: at most {each['at most']} training steps", each["step over training"]
        yield Goal(SPEED, goal, f"{ratio:.2f}", each["near enough"], command)
        if each["situation"] == "uniform":
            goal = f"{step}: at least {each['at least']:.0f} times the tokens/s of the plain mixture"
            yield Goal(SPEED, goal, f"{each['tokens/s over baseline']:.1f}", each["fast enough"], command)
    baseline = result["baseline"]
    for dropout, speed in baseline["steps_per_second"].items():
        goal = f"plain mixture, dropout {dropout}: at least {baseline['floor']:.1f} steps/s"
        yield Goal(SPEED, goal, f"{speed:.1f}", baseline["above_floor"][dropout], command)


def judge_train_step(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals beside transformers, and relative to the peak."""
    command = "python benchmarks/train_step.py"
    records = {(r["size"], r["work"], r["network"], r["precision"]): r for r in result["records"]}
    for precision, least in (("bf16", 2.0), ("fp32", 1.4)):
        ours, theirs = (records["12 blocks", "step", name, precision] for name in ("parnas", "transformers"))
        ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
        goal = (
            f"training step of 12 blocks, {precision}: at least {least} times the tokens/s of Hugging Face transformers"
        )
        yield Goal(SPEED, goal, f"{ratio:.2f}", ratio >= least, command)
    share = records["WT103 base, 2 layers", "blocks", "parnas", "bf16"]["share_of_peak"]
    goal = "blocks of the WikiText-103 base network, bf16: at least 40% of the processor's measured peak FLOP/s"
    yield Goal(SPEED, goal, f"{share:.0%}", share >= 0.4, command)


def judge_gpu_round(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of a GPU: agreement with other computations, and the speed of training."""
    command, gpu = "python benchmarks/gpu_round.py", result["machine"]["device_name"]
    for name, found in result["parts"]["operations"].items():
        if isinstance(found, dict):
            goal = (
                f"{name}, {gpu}: losses and gradients differ by at most {found['tolerance']:g} from other computations"
            )
            worst = max(found["loss_difference"], found["gradient_difference"])
            yield Goal(SPEED, goal, f"{worst:.1g}", found["agree"], command)
    least = result["goals"]["share_of_rate"]
    for part, how in (("training", "eager"), ("training-compiled", "compiled")):
        for name, found in result["parts"].get(part, {}).items():
            if "share_of_rate" in (found if isinstance(found, dict) else {}):
                goal = (
                    f"training step of {name}, {how}, {gpu}, bf16: at least {least:.0%} of the rate of matrix products"
                )
                yield Goal(SPEED, goal, f"{found['share_of_rate']:.0%}", found["goal_met"], command)


def judge_time_to_quality(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of search and retraining from an empty cache."""
    target, most = result["target_bits_per_byte"], result["goal_seconds"]
    for repetition in result["repetitions"]:
        for name in ("search", "retrain"):
            reached = repetition[name]["reached"]
            goal = f"`{name}` from an empty cache to {target} bits per byte: at most {most:.0f} s"
            value = f"{reached['seconds']:.0f} s" if reached else "never"
            yield Goal(SPEED, goal, value, repetition["within_goal"][name], "python benchmarks/time_to_quality.py")


def judge_data(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goal of encoding."""
    share = min(value for key, value in result["encoding"].items() if key.startswith("share_of"))
    goal = "encoding of text: at least 90% of the speed of sentencepiece alone"
    yield Goal(SPEED, goal, f"{share:.0%}", share >= 0.9, "python benchmarks/data.py")


def judge_profile(profile: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goal of the sum of layer latencies as a prediction."""
    error = profile["check"]["median_error"]
    goal = "median error of a network's latency predicted from its layers: at most 10 %"
    yield Goal(SEARCH, goal, f"{error:.1%}", error <= 0.1, "python benchmarks/comparison.py --profile")


def judge_comparison(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of the derived network beside the others."""
    command, row = "python benchmarks/comparison.py", {row["network"]: row for row in result["networks"]}
    derived, share = row["derived"]["valid ppl"], row["derived"]["stack, share of interleaved"]
    interleaved, shallower = (row[name]["valid ppl"] for name in ("interleaved", "shallower"))
    goal = f"latency of the derived network's blocks: at most {MOST_LATENCY} of the interleaved network's"
    yield Goal(SEARCH, goal, f"{share:.3f}", share <= MOST_LATENCY, command)
    random = median(each["valid ppl"] for name, each in row.items() if name.startswith("random"))
    for name, ppl, reached in (
        ("not above the interleaved network's", interleaved, derived <= interleaved),
        ("below the shallower network's", shallower, derived < shallower),
        ("below the median of random networks of its cost", random, derived < random),
    ):
        yield Goal(SEARCH, f"perplexity of the derived network {name}, {ppl:.2f}", f"{derived:.2f}", reached, command)


def judge_table(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of rankings against the table of all networks of a small space."""
    command, ranks = "python benchmarks/search_quality.py", {(r["ranked by"], r["target"]): r for r in result["ranks"]}
    ceiling = result["ceiling"]["all"]
    goal = "Kendall's tau between two seeds of the reference table: at least 0.8"
    yield Goal(SEARCH, goal, f"{ceiling:.2f}", ceiling >= 0.8, "python benchmarks/ground_truth.py")
    counts = [ranks[count, ""] for count in ("parameters", "multiply-adds")]
    for (by, target), row in ranks.items():
        if by != f"{SearchConfig().estimator}: estimate":
            continue
        search = "without a target" if target == "none" else f"with target {target}"
        least = CEILING_SHARE * ceiling
        goal = f"tau of a search {search}: at least {CEILING_SHARE} of that between two seeds, {least:.2f}"
        tau = row["tau, one training"]  # as the tau between two seeds
        yield Goal(SEARCH, goal, f"{tau:.2f}", tau >= least, command)
        for column, among in SUBSETS.items():
            most = max(count[column] for count in counts)
            goal = f"tau of a search {search}, {among}: above parameters and multiply-adds, {most:.2f}"
            yield Goal(SEARCH, goal, f"{row[column]:.2f}", row[column] > most, command)
    for row in result["derived"]:
        if (row["estimator"], row["by"]) == (SearchConfig().estimator, "search and derive") and row["target"] != "none":
            behind = row["behind the best"]
            for key, what in (("seed deviation", "of all networks"), ("of the best", "of the best network")):
                goal = f"derived within {row['target']}: at most the seed deviation {what}, {row[key]}, above the best"
                reached = float(behind.removesuffix(" %")) <= float(row[key].removesuffix(" %"))
                yield Goal(SEARCH, goal, behind, reached, command)


def judge_compressive(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goal of a training step with compressed memory."""
    goal = f"training step with compressed memory: at most {result['goal']:g} of plain memory of the same span"
    reached = result["slowest"] <= result["goal"]
    yield Goal("compressive memory", goal, f"{result['slowest']:.2f}", reached, "python benchmarks/compressive_step.py")


def judge_words(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of the networks on WikiText-2."""
    name = result["name"]
    area, command = f"WikiText-2, {name}", f"python benchmarks/word_level.py {name}"
    reached: dict[tuple[str, str], dict[str, float]] = {}
    for split in ("valid", "test"):
        for row in result["comparison"][split]:
            reached.setdefault((row["run"], row["evaluation"]), {})[split] = row["word_ppl"]
    wanted = [(protocol, "", most) for protocol, most in PERPLEXITIES.get(name, {}).items()]
    wanted += [(PLAIN, ", stretch", STRETCH[name])] if name in STRETCH else []
    for protocol, kind, limits in wanted:
        found = reached.get(("derived", protocol), {})
        for split, most in zip(("valid", "test"), limits, strict=True):
            if split in found:
                goal = f"perplexity of the derived network, {protocol}, {split}{kind}: at most {most:g}"
                yield Goal(area, goal, f"{found[split]:.2f}", found[split] <= most, command)
    derived = reached.get(("derived", PLAIN), {})
    for other in (run for run, protocol in reached if protocol == PLAIN and run != "derived" and derived):
        shares = {
            split: 100 * (derived[split] / ppl - 1) for split, ppl in reached[other, PLAIN].items() if split in derived
        }
        value = ", ".join(f"{share:+.1f} % ({split})" for split, share in shares.items())
        goal = f"perplexity of the derived network below that of `{other}`"
        yield Goal(area, goal, value, max(shares.values()) < 0, command)
    if name in WORD_HOURS and "derived" in result["runs"] and not result["search"].get("of"):
        derived_run = result["runs"]["derived"]
        spent, most_hours = (result["search"]["seconds"] + derived_run["seconds"]) / 3600, WORD_HOURS[name]
        goal = f"search and training of two cores: at most {most_hours:g} hours"
        yield Goal(area, goal, f"{spent:.2f} h", spent <= most_hours, command)
        goal = f"parameters: at most {WORD_PARAMETERS / 1e6:g} million"
        parameters = derived_run["parameters"]
        yield Goal(area, goal, f"{parameters / 1e6:.1f} million", parameters <= WORD_PARAMETERS, command)


def judge_equal_words(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of the one run by words beside hand-designed networks of equal latency, trained as long.

    The best hybrid is the one of the lowest validation perplexity; differences are those on the test split, if it was
    read.
    """
    area, command = "WikiText-2, equal time", f"python benchmarks/equal_time.py --plan {result['benchmark']}"
    one_run = f"one run of {result['minutes']:g} minutes" + f" on {result['text']:g} of the text" * (result["text"] < 1)
    of = {record["name"]: record for record in result["networks"]}
    by_hand = [of[name] for name in result["by_hand"] if "percent" in of.get(name, {})]
    interleaved = [record for record in by_hand if record["name"].startswith("interleaved")]
    hybrids = [record for record in by_hand if record not in interleaved]

    def judge(record: dict[str, Any], goal: str, most: float, certain: bool) -> Goal:
        found = record.get("test_difference") or record
        interval = "" if found["p"] is None else f" ({found['low']:+.1f} to {found['high']:+.1f} %)"
        value = f"{found['percent']:+.1f} %{interval}, {describe_seeds(found['pairs'])}"
        below = not certain or (found["p"] is not None and found["high"] < 0)
        return Goal(area, goal, value, found["percent"] <= most and below, command)

    for record in interleaved:
        goal = f"{one_run}: perplexity {-INTERLEAVED_BY:g} % below that of *{record['name']}*, interval below 0"
        yield judge(record, goal, INTERLEAVED_BY, certain=True)
    for record in sorted(hybrids, key=lambda record: float(record["ppl"]))[:1]:
        goal = f"{one_run}: perplexity at most that of *{record['name']}*, the best hybrid by hand, in the mean"
        yield judge(record, goal, 0.0, certain=False)


def judge_shakespeare(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of the network derived on Tiny Shakespeare."""
    area, command = "Tiny Shakespeare", "python benchmarks/word_level.py runs/shakespeare"
    plain = {row["run"]: row for row in result["comparison"]["valid"] if row["evaluation"] == PLAIN}
    derived = plain["derived"]["bits_per_byte"]
    goal = f"{area}: bits per byte of the derived network at most {SHAKESPEARE_BITS}"
    yield Goal(area, goal, f"{derived:.3f}", derived <= SHAKESPEARE_BITS, command)
    for phase, seconds in (("search", result["search"]["seconds"]), ("training", result["runs"]["derived"]["seconds"])):
        goal = f"{area}: {phase} of two cores at most {SHAKESPEARE_SECONDS} s"
        yield Goal(area, goal, f"{seconds:.0f} s", seconds <= SHAKESPEARE_SECONDS, command)
    other = plain["equal-cost"]["bits_per_byte"]
    goal = f"{area}: bits per byte of the derived network below the interleaved network's of equal latency, {other:.3f}"
    yield Goal(area, goal, f"{derived:.3f}", derived < other, command)


def judge_equal_time(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of the one-run training beside networks that are known, and of the front of a search.

    Goals whose networks have not been trained are left out. Latencies are by the profile that the searches used.
    """
    area, command = ONE_RUN_AREA, "python benchmarks/equal_time.py"
    of = {record["name"]: record for record in result["networks"]}
    ours = of.get("one run")
    if ours is None:
        return
    goal = f"latency of the network derived in one run: at most {HALF} of the interleaved network's, from every seed"
    yield Goal(area, goal, f"{ours['most_latency']:.2f}", ours["most_latency"] <= HALF, command)
    for name, least in (("interleaved, 12 blocks", -5.0), ("interleaved, 5 blocks", -3.0)):
        if (other := of.get(name)) and other["p"] is not None:
            goal = f"one run: perplexity {-least:.0f} % below that of *{name}*, trained as long, p < {SIGNIFICANT}"
            value = f"{other['percent']:+.1f} %, p = {other['p']:.1g}, {describe_seeds(other['pairs'])}"
            yield Goal(area, goal, value, other["percent"] <= least and other["p"] < SIGNIFICANT, command)
    # Hand-designed networks that were trained from every seed of the one run.
    known = [of[name] for name in result["by_hand"] if name in of and of[name]["seeds"] >= ours["seeds"]]
    single = min(
        (each for each in known if is_single_mixer(each["archs"][0])), key=lambda each: each["ppl"], default=None
    )
    if single and single["p"] is not None:
        goal = (
            "one run: perplexity below that of the best network of one mixer and feed-forward layers, "
            f"*{single['name']}*, p < {SIGNIFICANT}"
        )
        value = f"{single['percent']:+.1f} %, p = {single['p']:.1g}, {describe_seeds(single['pairs'])}"
        yield Goal(area, goal, value, single["percent"] < 0 and single["p"] < SIGNIFICANT, command)
    by_hand = [each for each in known if not each["name"].startswith("interleaved")]
    near = [each for each in by_hand if abs(each["latency"] / ours["latency"] - 1) <= SIMILAR_LATENCY]
    if near:
        mean = {seed: fmean(each["ppl_by_seed"][seed] for each in near) for seed in ours["ppl_by_seed"]}
        best = min(near, key=lambda each: each["ppl"])
        for name, theirs, most in (
            (f"the mean of {len(near)} hand-designed networks of similar latency", mean, 0.0),
            (f"the best of them in hindsight, *{best['name']}*", best["ppl_by_seed"], 1.0),
        ):
            found = paired_difference(ours["ppl_by_seed"], theirs)
            interval = "" if found.low is None else f" ({found.low:+.1f} to {found.high:+.1f} %)"
            goal = f"one run: perplexity relative to {name}: at most {most:+.0f} %"
            yield Goal(area, goal, f"{found.mean:+.1f} %{interval}", found.mean <= most, command)
    fronts = [record for name, record in of.items() if name.startswith("front ") and "to_scratch" in record]
    for record in [ours, *fronts] if "to_scratch" in ours else fronts:
        goal = (
            f"{record['name']}: perplexity at most 1 % above that of the same network from scratch for the whole time"
        )
        found = record["to_scratch"]["percent"]
        value = f"{found:+.1f} %, {describe_seeds(record['to_scratch']['pairs'])}"
        yield Goal(area, goal, value, found <= 1, command)
    shallower = of.get("interleaved, 4 blocks")
    for record in fronts if shallower else ():
        if float(record["name"].split()[1]) <= SHALLOW:
            found = paired_difference(record["ppl_by_seed"], shallower["ppl_by_seed"])
            goal = f"{record['name']}: perplexity 3 % below that of *interleaved, 4 blocks*"
            value = f"{found.mean:+.1f} %, {describe_seeds(found.pairs)}"
            yield Goal(area, goal, value, found.mean <= -3, command)
    every = {record["name"]: record for record in result["networks"]}
    gains = [
        (once, 100 * (1 - ppl / every[once]["ppl_by_seed"][seed]))
        for once in every
        for seed, ppl in every.get(once + TWICE, {"ppl_by_seed": {}})["ppl_by_seed"].items()
    ]
    if gains:
        goal = f"twice the time lowers perplexity by less than {CONVERGED} %"
        yield judge_gains(area, goal, gains, command)


def judge_gains(area: str, goal: str, gains: list[tuple[str, float]], command: str) -> Goal:
    """Return the goal that no gain of a longer training, in per cent beside the network's name, is as large as 15 %."""
    value = ", ".join(f"{gain:.1f} % (*{name}*)" for name, gain in gains)
    return Goal(area, goal, value, max(gain for _, gain in gains) < CONVERGED, command)


def is_single_mixer(arch: str) -> bool:
    """Return whether a network has layers of one mixer, and feed-forward layers."""
    return len({*arch} - {"f"}) == 1


def describe_seeds(count: int) -> str:
    """Return a number of seeds in words."""
    return f"{count} seed{'s' * (count != 1)}"


def judge_overhead(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of a search step in the space `hybrid`."""
    command = "python benchmarks/search_overhead.py"
    for quantity, value, most in (
        (
            "step of a search in `hybrid` relative to the mean training step of its networks",
            "time_over_networks",
            "most_time",
        ),
        ("the same with one path in each step, as in a one-run training", "one_path_over_networks", "most_time"),
        (
            "peak memory of the search with two paths relative to training the largest network",
            "memory_over_largest",
            "most_memory",
        ),
    ):
        goal = f"{quantity}: at most {result[most]:g}"
        yield Goal(ONE_RUN_AREA, goal, f"{result[value]:.2f}", result[value] <= result[most], command)


def judge_demo(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of the demo."""
    command = "python benchmarks/demo.py"
    goal = f"`parnas demo` on two cores: at most {DEMO_SECONDS} s"
    yield Goal(ONE_RUN_AREA, goal, f"{result['most_seconds']:.0f} s", result["most_seconds"] <= DEMO_SECONDS, command)
    percent = round(100 * DEMO_BETTER)
    goal = f"the demo's derived network better and faster than the interleaved one: in {percent} % of the seeds"
    value, reached = f"{result['better']} of {result['seeds']}", result["better"] >= DEMO_BETTER * result["seeds"]
    yield Goal(ONE_RUN_AREA, goal, value, reached, command)


def judge_time_in_one_run(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goal of a pipeline in one run from an empty cache."""
    target, most = result["target_bits_per_byte"], result["goal_seconds"]
    command = "`parnas pipeline wikitext2-hybrid --one-run`"
    goal = f"{command} from an empty cache: {target:g} bits per byte within {most:.0f} s"
    for each in result["repetitions"]:
        value = f"{each['bits_per_byte']:.4f} in {each['command_seconds']:.0f} s"
        reached = each["bits_per_byte"] <= target and each["command_seconds"] <= most
        yield Goal(ONE_RUN_AREA, goal, value, reached, "python benchmarks/time_to_quality.py --one-run")


def judge_compression(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goals of networks that were compressed."""
    area, command = COMPRESSION, "python benchmarks/compress.py"
    of = {record["name"]: record for record in result["networks"]}
    differences = {(each["network"], each["relative_to"]): each for each in result["comparisons"]}

    def judge(ours: str, theirs: str, goal: str, most: float) -> Iterator[Goal]:
        if found := differences.get((ours, theirs)):
            found = found["test"] or found  # layers are selected on the validation split
            interval = "" if found["low"] is None else f" ({found['low']:+.1f} to {found['high']:+.1f} %)"
            value = f"{found['percent']:+.1f} %{interval}, {describe_seeds(found['pairs'])}"
            yield Goal(area, goal, value, found["percent"] <= most, command)

    if longer := differences.get(("parent, twice the steps", "parent")):
        goal = f"parent: twice the steps lower perplexity by less than {GAIN:g} %"
        yield Goal(area, goal, f"{-longer['percent']:.1f} %", -longer["percent"] < GAIN, command)
    for target, most in RISE.items():
        child = f"child {target:g}"
        if child not in of:
            continue
        if (latency := of[child].get("latency")) is not None:
            goal = f"{child}: latency of the blocks at most {target:g} of the parent's"
            yield Goal(area, goal, f"{latency:.2f}", latency <= target, command)
        yield from judge(child, "parent", f"{child}: perplexity at most {most:g} % above the parent's", most)
        goal = f"{child}: the steps of the healing take at most {HEALING:.0%} of the parent's training time"
        yield Goal(area, goal, f"{of[child]['training']:.1%}", of[child]["training"] <= HEALING, command)
    child, scratch, shallower, taught = (
        f"{kind} {result['from_scratch']:g}" for kind in ("child", "scratch", "shallower", "taught")
    )
    times = {scratch: "the parent's time", shallower: "the time of parent and compression"}
    for other, time in times.items():
        goal = f"{child}: perplexity below that of *{other}*, trained from scratch for {time}"
        yield from judge(child, other, goal, 0.0)
    if search := of.get("search"):
        if (scores := search.get("scores")) is not None:
            share = scores * 8 * result["blocks"] / result["alternatives"]
            goal = f"scores of all blocks x 8 alternatives: at most {SCORING:.0%} of the parent's training time"
            value = f"{share:.1%} ({scores:.1%} for {result['alternatives']})"
            yield Goal(area, goal, value, share <= SCORING, command)
        goal = f"local distillation: at most {DISTILLATION:.0%} of the parent's training time"
        yield Goal(area, goal, f"{search['training']:.1%}", search["training"] <= DISTILLATION, command)
    if ranking := result["ranking"]:
        tau = {(each["search"], each["score"]): each["tau"] for each in ranking["scores"]}
        ours, least = tau["search", "inherited"], RANKING * ranking["reliability"]
        goal = f"scores rank {ranking['networks']} random children: tau at least {RANKING:g} of the reliability"
        value = f"{ours:.2f}, reliability {ranking['reliability']:.2f}"
        yield Goal(area, goal, value, ours >= least, f"{command} --children")
        other = max(value for (search_name, _), value in tau.items() if search_name != "search")
        goal = "the same tau is above that of a SuperNet search of the same time"
        yield Goal(area, goal, f"{ours:.2f} and {other:.2f}", ours > other, f"{command} --children")
    pairs = {
        taught: (scratch, "of a whole training"),
        f"short-{taught}": (f"short {result['from_scratch']:g}", "of a healing"),
    }
    for ours, (theirs, steps) in pairs.items():
        goal = f"{ours}: perplexity at least 3 % below that without a teacher, both for the steps {steps}"
        yield from judge(ours, theirs, goal, -3.0)


def judge_probe(result: dict[str, Any]) -> Iterator[Goal]:
    """Yield the goal of the time of a probe."""
    found = result["probe"]
    goal = (
        f"probe of GPT-2 with {found['parameters'] / 1e6:.0f} million parameters: at most {PROBE_SECONDS / 60:.0f} min"
    )
    value, reached = f"{found['seconds'] / 60:.1f} min", found["seconds"] <= PROBE_SECONDS
    yield Goal(COMPRESSION, goal, value, reached, "python benchmarks/probe.py")


JUDGES: dict[str, Callable[[dict[str, Any]], Iterator[Goal]]] = {
    "mixers-cpu": judge_mixers,
    "hybrid-cpu": judge_search,
    "search_quality_hybrid_truth-cpu": judge_ranking,
    "comparison_profile": judge_profile,
    "comparison-cpu": judge_comparison,
    "search_quality-cpu": judge_table,
    **{f"word_level-{name}": judge_words for name in WORD_LEVEL},
    **{f"{plan}-cpu": judge_equal_words for plan in EQUAL_WORDS},
    "word_level-shakespeare": judge_shakespeare,
    "search_step-cpu": judge_search_step,
    "train_step-cpu": judge_train_step,
    "gpu_round-h100-80gb-hbm3": judge_gpu_round,
    "time_to_quality-cpu": judge_time_to_quality,
    "data-cpu": judge_data,
    "compressive_step-cpu": judge_compressive,
    "equal_time-cpu": judge_equal_time,
    "search_overhead-cpu": judge_overhead,
    "demo-cpu": judge_demo,
    "time_to_quality_one_run-cpu": judge_time_in_one_run,
    "compress-cpu": judge_compression,
    "probe-cpu": judge_probe,
}
"""By the name of the result file."""


def judge_all(folder: Path) -> list[Goal]:
    """Return all goals whose results are in a folder."""
    found = [(judge, folder / f"{name}.json") for name, judge in JUDGES.items()]
    return [goal for judge, path in found if path.is_file() for goal in judge(read_json(path))]


def main(arguments: list[str] | None = None) -> None:
    """Run the command."""
    parsed = harness.make_parser(__doc__, []).parse_args(arguments)
    folder = harness.results_folder(parsed)
    goals = judge_all(folder)
    harness.print_table("Goals", [goal._asdict() for goal in goals])
    write_json(folder / NAME, [goal._asdict() for goal in goals])


if __name__ == "__main__":
    harness.run(main)
