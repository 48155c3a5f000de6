"""Trainings of equal time: one run, search included, beside networks that are known: `python benchmarks/equal_time.py`.

    python benchmarks/equal_time.py --profile            # the time of a training step of each layer, and of searches
    python benchmarks/equal_time.py                      # train what is missing; call it twice: see below
    python benchmarks/equal_time.py --latency            # measure the latency of all networks in turns
    python benchmarks/equal_time.py --report             # print and write the table of the finished trainings
    python benchmarks/equal_time.py --plan one_run …     # the same for benchmarks/one_run.yaml: variants of the search

A plan is a configuration with a section of its name:

    seeds: [1, 2]
    minutes: 4              # of predicted time of each training, on an idle core
    target: 0.5             # of the searches
    networks: {lfm2: lfm2-10}
    first_seed: {alternating: alternating-7}    # optional: networks trained from the first seed only
    one_runs:               # variants of the one run; by default one of that name
      - {name: one run}
      - {name: sandwich, changes: {search.gate_samples: 4}, tried: [sandwich], seeds: [1]}
    front: {targets: [0.3, 0.5], spend: 0.9, training: 0.25, seeds: [1]}     # training: share of the time; optional
    twice: [lfm2]           # optional: also trained for twice the time, from the first seed
    test: true              # optional: measure the perplexity on the test split too, but not of a front
    text: 0.125             # optional: share of the training text

A network is trained from scratch for as many steps as fit into the time, by the profile. `one run` searches in the
share `search.share` of the time (re-ranking included) and trains the derived network in the rest, from its weights in
the SuperNet. `halving: {networks: N, steps: S}` selects the network among N by successive halving: N networks are
trained for S steps from their weights in the SuperNet, the better half for twice as many, and so on.

`front TARGET` is a network within a target: that of the highest is the result of a one run, each other one a part of
the one before. These networks, and that of the one run, are also trained from scratch for the whole time, by a later
call, since this needs their rows; `scratch: false` leaves that out.

`tried` are names in benchmarks/tried_search.py. Each finished training appends a row to results/PLAN.csv.
"""

import math
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any, NamedTuple

import comparison
import harness
from trainings import append_rows, cut_corpus, measure_test, read_rows, read_study, require_corpus, work_off
from tried_search import TRIED
from variants import compare

from parnas.architecture import Architecture, drop_identity
from parnas.config.loader import Config
from parnas.data.streams import prepare
from parnas.errors import OverBudget
from parnas.nas.derive import derive
from parnas.nas.latency_table import profile as measure_layers
from parnas.nas.one_run import healing, inheriting, split_training
from parnas.nas.search import search
from parnas.nas.shrink import shrink
from parnas.runs.files import read_json, write_json
from parnas.runs.resolve import read_config, read_overrides
from parnas.runs.run import Run
from parnas.training.device import choose_device
from parnas.training.loaded_run import load
from parnas.training.perplexity import measure_loss
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

ONE_RUN, FRONT, SCRATCH, TWICE = "one run", "front", ", from scratch", ", twice the time"
LAYERS = ("s", "k", "f", "i", "r", "g", "s:window=64")  # that the networks have
PROBE = 120  # steps of a training or a search that is timed
PROBED = "sfsfs"
LEAST_STEPS = 8  # of a search or a training, if the time is too short for more
WARM_UP = 8  # steps of a search before one that is timed
HELD_OUT = 16384  # tokens on which successive halving compares networks
LEAST_TIMED = 3  # trainings of which the median of the measured times is reported: machines do other work at times
TINY: dict[str, Any] = {  # replaces keys of the plan
    "seeds": [1],
    "minutes": 0.02,
    "networks": {"interleaved": "interleaved-2"},
    "twice": ["interleaved"],
    "test": True,
    "text": 0.5,
    "one_runs": [
        {"name": ONE_RUN},
        {"name": "distilled", "changes": {"search.gate_samples": 3}, "tried": ["distilled_in_place"]},
        {"name": "successive halving", "halving": {"networks": 2, "steps": 4}},
    ],
}


class Row(NamedTuple):
    """A finished training: perplexities per token, with the steps and seconds that led to them.

    Those of a network of a front include the larger networks from which it was made.
    """

    name: str
    seed: int
    arch: str
    search_steps: int  # 0: no search
    steps: int
    ppl: float  # on the validation split
    seconds: float
    search_seconds: float
    parameters: int
    test: float = math.nan  # on the test split, where the plan says so
    precision: str = ""  # of the computation

    @property
    def network(self) -> str:
        """The layers without identity."""
        return canonical(self.arch)


def canonical(arch: str) -> str:
    """Return an architecture without identity, as text."""
    return str(Architecture.parse(arch).canonical())


class Times(NamedTuple):
    """Predicted times on an idle core, in milliseconds."""

    fixed: float  # of a training step without layers, with the update of the weights and the loop around it
    layers: Mapping[str, float]  # of a training step, by layer
    searches: Mapping[str, Mapping[str, float]]  # by name of the one run: `step`, and `rerank` (with the validation)

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Times":
        """Return the times in the content of a profile (see `measure`)."""
        table = content["training"]
        layers = {name: timing["median_ms"] for name, timing in table["layers"].items()}
        return cls(table["fixed"]["median_ms"] + content["trainer_ms"], layers, content["searches"])

    def step(self, arch: Architecture) -> float:
        """Return the time of a training step of a network."""
        return self.fixed + sum(self.layers[name] for name in drop_identity(arch))

    def steps(self, arch: Architecture, milliseconds: float) -> int:
        """Return the number of training steps of a network that fit into a time, at least `LEAST_STEPS`."""
        return max(LEAST_STEPS, round(milliseconds / self.step(arch)))

    def rerank(self, name: str) -> float:
        """Return the time of the end of a search: re-ranking and validation."""
        return self.searches[name]["rerank"]

    def search_steps(self, name: str, milliseconds: float) -> int:
        """Return the number of steps of a search that fit into a time with its end, at least `LEAST_STEPS`."""
        return max(LEAST_STEPS, round((milliseconds - self.rerank(name)) / self.searches[name]["step"]))


@dataclass(frozen=True)
class OneRun:
    """A variant of the one-run training."""

    name: str
    changes: dict[str, Any] = field(default_factory=dict)  # of the configuration, by dotted key
    tried: Sequence[str] = ()
    halving: Mapping[str, int] = field(default_factory=dict)  # `networks` and `steps`
    timed_as: str = ""  # the variant whose search takes the same time per step, if its own is not measured
    seeds: Sequence[int] = ()  # none: those of the plan

    def search(self, config: Config, folder: Path, steps: int) -> Run:
        """Search for `steps` steps as the first part of a one-run training, with what is tried."""
        config = config.replace(train__steps=round(steps / config.search.share))
        first, _ = split_training(config, folder)
        with ExitStack() as stack:
            for name in self.tried:
                stack.enter_context(TRIED[name]())
            return search(first, folder, Silent())

    def changed(self, config: Config) -> Config:
        """Return the configuration with the changes."""
        return read_config(config, list(read_overrides(self.changes)))


class Job(NamedTuple):
    """A training: a one run or a front by its name, or a network from scratch."""

    name: str
    seed: int
    arch: str = ""  # of a training from scratch


def one_runs_of(plan: Mapping[str, Any]) -> dict[str, OneRun]:
    """Return the variants of the one run, by name."""
    return {each["name"]: OneRun(**each) for each in plan.get("one_runs", [{"name": ONE_RUN}])}


def measure(config: Config, plan: Mapping[str, Any], path: Path) -> None:
    """Measure what is missing in a profile, which holds three parts.

    1. The times of layers in a training step, forward and backward.
    2. `trainer_ms`: what a step of the trainer takes besides, measured for the network `PROBED`. It is 0 if the step
       took less time than its layers, which were measured while the machine was slower.
    3. `searches`: for each variant of the one run the time of a search step, and of re-ranking and validation. Since
       the speed of a machine changes, `PROBED` is trained again beside each search, and the times of the search are
       divided by how much slower that was than the parts before say.
    """
    space = config.search.space
    if not path.is_file():
        measure_layers(config.replace(search__space=LAYERS), Silent(), rounds=50, check=0).write(path)
    content = read_json(path)
    config = config.replace(search__cost__table=str(path), search__space=space, train__log_every=PROBE // 2)

    def measure_training_step() -> float:
        with tempfile.TemporaryDirectory(prefix="parnas-equal-time-") as folder:
            probed = config.replace(model__arch=PROBED, train__steps=PROBE)
            return step_times(retrain(probed, Path(folder) / "run", Silent()))[-1]

    if "trainer_ms" not in content:
        forward_backward = Times.of(content | {"trainer_ms": 0.0, "searches": {}}).step(Architecture(PROBED))
        write_json(path, content := content | {"trainer_ms": max(0.0, measure_training_step() - forward_backward)})
    for name, variant in one_runs_of(plan).items():
        if name not in content.get("searches", {}) and not variant.timed_as:
            slower = measure_training_step() / Times.of(content | {"searches": {}}).step(Architecture(PROBED))
            with tempfile.TemporaryDirectory(prefix="parnas-equal-time-") as folder:
                # A GPU makes and selects its kernels in the first steps of a process.
                variant.search(variant.changed(config), Path(folder) / "warm-up", WARM_UP)
                began = time.perf_counter()
                run = variant.search(variant.changed(config), Path(folder) / "run", PROBE)
                wall, step = 1000 * (time.perf_counter() - began), fmean(step_times(run))
            found = {name: {"step": step / slower, "rerank": (wall - PROBE * step) / slower}}
            write_json(path, content := content | {"searches": content.get("searches", {}) | found})


def step_times(run: Run) -> list[float]:
    """Return the time of a step in each line of training metrics; all lines are of equally many steps."""
    return [line.step_ms for line in run.metrics() if line.split == "train" and line.step_ms is not None]


def train(config: Config, plan: Mapping[str, Any], times: Times, job: Job) -> list[Row]:
    """Do a job; return its rows, one for each network that it trained to the end."""
    config, milliseconds = config.replace(runtime__seed=job.seed), 60_000 * plan["minutes"]
    with tempfile.TemporaryDirectory(prefix="parnas-equal-time-") as place:
        folder = Path(place)
        if job.arch:
            began = time.perf_counter()
            training = config.replace(model__arch=job.arch)
            milliseconds *= 2 if job.name.endswith(TWICE) else 1
            training = training.replace(train__steps=times.steps(Architecture.parse(job.arch), milliseconds))
            row = train_network(training, folder / "run", job, began)
        elif job.name == FRONT:
            return train_front(config, plan, times, milliseconds, folder, job)
        else:
            variant = one_runs_of(plan)[job.name]
            row = train_one_run(variant.changed(config), variant, times, milliseconds, folder, job)
        return [row._replace(test=measure_test(Run(folder / "run"))) if plan.get("test") else row]


def train_network(config: Config, folder: Path, job: Job, began: float, found: Run | None = None) -> Row:
    """Train a network and return its row, given the search from which it inherits weights, if any."""
    search_steps, search_seconds = 0, 0.0
    if found is not None:
        search_steps, search_seconds = found.summary().steps, time.perf_counter() - began
    summary = retrain(config, folder, Silent()).summary()
    arch, steps, seconds = str(config.model.arch), config.train.steps, time.perf_counter() - began
    row = job.name, job.seed, arch, search_steps, steps, summary.valid.ppl, seconds, search_seconds, summary.parameters
    return Row(*row, precision=choose_device(config.runtime).precision)


def train_one_run(config: Config, variant: OneRun, times: Times, milliseconds: float, folder: Path, job: Job) -> Row:
    """Search and derive in the first part of the time, train the network in the rest."""
    began, share = time.perf_counter(), config.search.share
    steps = times.search_steps(variant.timed_as or variant.name, share * milliseconds)
    found = variant.search(config, folder / "search", steps)
    derivation, rest = derive(found), (1 - share) * milliseconds
    arch = derivation.architecture
    if variant.halving:
        candidates = [each.architecture for each in derivation.ranking[: variant.halving["networks"]]]
        arch, taken = halve(config, candidates, variant.halving["steps"], times, folder)
        rest -= taken
    training = inheriting(config, folder / "search", times.steps(arch, rest)).replace(model__arch=str(arch))
    return train_network(training, folder / "run", job, began, found)


def halve(
    config: Config, candidates: Sequence[Architecture], steps: int, times: Times, folder: Path
) -> tuple[Architecture, float]:
    """Select a network by successive halving; return it and the predicted time of the short trainings."""
    taken = 0.0
    while len(candidates) > 1:
        losses = {}
        for number, arch in enumerate(candidates):
            training = inheriting(config, folder / "search", steps).replace(model__arch=str(arch))
            run = retrain(training, folder / f"halving-{steps}-{number}", Silent())
            losses[arch], taken = loss_on_training_text(run), taken + steps * times.step(arch)
        candidates, steps = sorted(losses, key=losses.__getitem__)[: len(losses) // 2], 2 * steps
    return candidates[0], taken


def loss_on_training_text(run: Run) -> float:
    """Return the loss of a retraining on the end of the training text, which few steps do not reach, in nats per token.

    The validation split serves to report results.
    """
    loaded = load(run.folder)
    streams, device = prepare(loaded.config.data), choose_device(loaded.config.runtime)
    text, shape = streams.tokens("train")[-HELD_OUT:], loaded.config.validation_shape
    return measure_loss(loaded.model, text, loaded.tokenizer.eos_id, device, shape).per_token


def train_front(
    config: Config, plan: Mapping[str, Any], times: Times, milliseconds: float, folder: Path, job: Job
) -> list[Row]:
    """Train the network within the highest target as in a one run, then shrink it to each other target and train that.

    Each of the others has a share `training` of the time of the first, for the choice of its layers, which counts as
    long as the end of a search, and for its training.
    """
    front, share, began = plan[FRONT], config.search.share, time.perf_counter()
    *lower, highest = sorted(front["targets"])
    config = config.replace(search__cost__target=highest, search__cost__spend=front["spend"])
    search_steps = times.search_steps(ONE_RUN, share * milliseconds)
    found = one_runs_of(plan)[ONE_RUN].search(config, folder / "search", search_steps)
    derivation, rows = derive(found), list[Row]()
    assert derivation.costs is not None
    # 1. The network within the highest target, as in a one run.
    arch, name = derivation.architecture, f"{FRONT} {highest:g}"
    training = inheriting(config, folder / "search", times.steps(arch, (1 - share) * milliseconds))
    training = training.replace(model__arch=str(arch))
    rows.append(train_network(training, folder / name, job._replace(name=name), began, found))
    # 2. Each other one is a part of the one before.
    least = found.config().search.least_attention or 0
    for target in reversed(lower):
        before = Run(folder / name)
        try:
            kept, name = shrink(before, derivation.costs, target, least, Silent()), f"{FRONT} {target:g}"
        except OverBudget:
            break
        steps = times.steps(kept, front["training"] * milliseconds - times.rerank(ONE_RUN))
        training = healing(config, before.folder, steps).replace(model__arch=str(kept))
        row = train_network(training, folder / name, job._replace(name=name), began, found)
        rows.append(row._replace(steps=rows[-1].steps + row.steps, search_seconds=rows[0].search_seconds))
    return rows


def list_jobs(plan: Mapping[str, Any], rows: Sequence[Row]) -> list[Job]:
    """Return the trainings that have no row, all of one seed before the next seed."""
    jobs = []
    for seed in plan["seeds"]:
        done = {row.name: row for row in rows if row.seed == seed}
        one_runs = {name: variant.seeds or plan["seeds"] for name, variant in one_runs_of(plan).items()}
        jobs += [Job(name, seed) for name, seeds in one_runs.items() if seed in seeds and name not in done]
        has_front = FRONT in plan and seed in plan[FRONT].get("seeds", plan["seeds"])
        if has_front and not any(name.startswith(FRONT) for name in done):
            jobs.append(Job(FRONT, seed))
        first = seed == plan["seeds"][0]
        networks = plan["networks"] | (plan.get("first_seed", {}) if first else {})
        scratch = {name: str(Architecture.parse(arch)) for name, arch in networks.items()}
        if first:
            scratch |= {name + TWICE: scratch[name] for name in plan.get("twice", ())}
        trained = {*map(canonical, scratch.values()), *(row.network for row in done.values() if not row.search_steps)}
        derived = {row.network: row.arch for row in done.values() if row.search_steps and row.network not in trained}
        if plan.get("scratch", True):
            scratch |= {arch + SCRATCH: arch for arch in derived.values()}
        jobs += [Job(name, seed, arch) for name, arch in scratch.items() if name not in done]
    return jobs


def minutes_of(plan: Mapping[str, Any], name: str) -> float:
    """Return the predicted time of a training: of a network of a front with those of the larger networks before it."""
    if name.startswith(FRONT) and not name.endswith(SCRATCH):
        larger = sum(target > float(name.split()[1]) for target in plan[FRONT]["targets"])
        return plan["minutes"] * (1 + larger * plan[FRONT]["training"])
    return plan["minutes"] * (2 if name.endswith(TWICE) else 1)


def predicted_shares(profile: Mapping[str, Any], archs: Iterable[str], interleaved: str) -> dict[str, float]:
    """Return the latency of networks relative to the interleaved network's, by the profile that the searches used."""
    layers = {name: timing["median_ms"] for name, timing in profile["inference"]["layers"].items()}

    def latency(arch: str) -> float:
        return sum(layers[name] for name in Architecture.parse(arch))

    return {arch: latency(arch) / latency(interleaved) for arch in archs}


def summarise(
    plan: Mapping[str, Any], rows: Sequence[Row], shares: Mapping[str, float], measured: Mapping[str, float]
) -> list[dict[str, Any]]:
    """Return a record for each name: mean perplexity, times, and the difference of the one run from it, paired.

    `minutes` is the predicted time, `seconds` the median of the measured times. `latency` and `measured_latency` are
    means of `shares`, by the profile of the searches, and of `measured`, which may be of another machine. Records of
    what was derived also have the difference from the same networks, trained from scratch: `to_scratch`.
    """
    scratch = {(row.seed, row.network): row for row in rows if not row.search_steps and not row.name.endswith(TWICE)}
    by_name: dict[str, dict[int, Row]] = defaultdict(dict)
    for row in rows:
        if not row.name.endswith(SCRATCH):
            by_name[row.name][row.seed] = row
        if row.search_steps and (same := scratch.get((row.seed, row.network))):
            by_name[f"{row.name}: its network{SCRATCH}"][row.seed] = same
    ppl = {name: {seed: row.ppl for seed, row in of_seed.items()} for name, of_seed in by_name.items()}
    tests = {name: {seed: row.test for seed, row in of_seed.items()} for name, of_seed in by_name.items()}
    tests = {name: values for name, values in tests.items() if not any(map(math.isnan, values.values()))}
    records = []
    for name, of_seed in by_name.items():
        archs = list(dict.fromkeys(row.arch for row in of_seed.values()))
        record = {"name": name, "archs": archs, "seeds": len(of_seed), "ppl": fmean(ppl[name].values())}
        record |= {"minutes": minutes_of(plan, name)}
        record |= {"ppl_by_seed": {str(seed): ppl[name][seed] for seed in sorted(of_seed)}}
        for key in ("search_steps", "steps"):
            record[key] = fmean(getattr(row, key) for row in of_seed.values())
        if len(of_seed) >= LEAST_TIMED:
            record["seconds"] = median(row.seconds for row in of_seed.values())
        record["latency"] = fmean(shares[row.arch] for row in of_seed.values())
        record["most_latency"] = max(shares[arch] for arch in archs)
        if all(arch in measured for arch in archs):
            record["measured_latency"] = fmean(measured[row.arch] for row in of_seed.values())
        if tested := tests.get(name):
            record["test"] = fmean(tested.values())
        if name != ONE_RUN and ppl.get(ONE_RUN, {}).keys() & of_seed.keys():
            record |= compare(ppl[ONE_RUN], ppl[name])
            if tested and ONE_RUN in tests:
                record["test_difference"] = compare(tests[ONE_RUN], tested)
        if theirs := ppl.get(f"{name}: its network{SCRATCH}"):
            record["to_scratch"] = compare(ppl[name], theirs)
        records.append(record)
    return records


def device_name(result: Mapping[str, Any]) -> str:
    """Return the processor on which a result was measured; empty without a result."""
    return str(result.get("machine", {}).get("device_name", ""))


def format_record(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the printed table."""
    return {
        "network": record["name"],
        "layers": ", ".join(record["archs"]),
        "seeds": str(record["seeds"]),
        "latency share": f"{record['latency']:.2f}",
        "measured": f"{record['measured_latency']:.2f}" if "measured_latency" in record else "–",
        "steps": f"{record['search_steps']:,.0f} + {record['steps']:,.0f}",
        "minutes": f"{record['minutes']:g}",
        "seconds": f"{record['seconds']:.0f}" if "seconds" in record else "–",
        "ppl": f"{record['ppl']:.2f}",
        **({"test": f"{record['test']:.2f}"} if "test" in record else {}),
        "one run relative to it": format_difference(record),
        **({"on the test split": format_difference(record.get("test_difference", {}))} if "test" in record else {}),
        "relative to scratch": format_difference(record.get("to_scratch", {})),
    }


def format_difference(record: Mapping[str, Any]) -> str:
    """Return a difference in words, with its interval."""
    if "percent" not in record:
        return "–"
    difference = f"{record['percent']:+.2f} %"
    if record["p"] is not None:
        difference += f" ({record['low']:+.2f} to {record['high']:+.2f} %, p = {record['p']:.2g})"
    return difference


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = harness.make_parser(__doc__, ["tiny"], ["corpus", "workers"])
    parser.add_argument("--plan", default="equal_time", help="name of a configuration in benchmarks/")
    stage = parser.add_mutually_exclusive_group()
    for name in ("profile", "latency", "report"):
        stage.add_argument(f"--{name}", dest="stage", action="store_const", const=name, default="train")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed: Namespace = make_parser().parse_args(arguments)
    config, plan = read_study(Path(__file__).with_name(f"{parsed.plan}.yaml"), parsed, comparison.TINY, TINY)
    config = config.replace(search__cost__target=plan["target"])
    folder = harness.results_folder(parsed)
    profile, latency, table = (folder / f"{parsed.plan}{end}" for end in ("_profile.json", "_latency.json", ".csv"))
    rows = read_rows(table, Row)
    interleaved = str(Architecture.parse(f"interleaved-{config.search.blocks}"))
    archs = {arch: Architecture.parse(arch) for arch in [interleaved, *(row.arch for row in rows)]}
    if parsed.stage != "report":
        require_corpus(config)
        with tempfile.TemporaryDirectory(prefix="parnas-equal-time-") as place:
            if "text" in plan:
                config = config.replace(data__corpus=str(cut_corpus(config.data.corpus, plan["text"], Path(place))))
            if parsed.stage == "profile":
                measure(config, plan, profile)
            elif parsed.stage == "train":
                train_missing(config, plan, profile, table, parsed.workers)
            else:
                rounds = 2 if parsed.size == "tiny" else 50
                write_json(latency, comparison.measure_latencies(config, archs.values(), rounds))
        return
    found = read_json(latency) if latency.is_file() else {"of": {}}
    stacks = {arch: each["stack_ms"] for arch, each in found["of"].items()}
    measured = {arch: ms / stacks[interleaved] for arch, ms in stacks.items()}
    timed = read_json(profile)
    records = summarise(plan, rows, predicted_shares(timed, archs, interleaved), measured)
    harness.print_table("Trainings of equal time", [format_record(record) for record in records])
    device = harness.choose(parsed.device, config.runtime.precision)
    by_hand = [*plan["networks"], *plan.get("first_seed", {})]
    precisions = sorted({row.precision for row in rows})
    payload = {"precisions": precisions, "minutes": plan["minutes"], "text": plan.get("text", 1.0)}
    payload |= {"by_hand": by_hand, "profiled_on": device_name(timed), "measured_on": device_name(found)}
    harness.write_result(parsed.plan, device, payload | {"networks": records}, parsed)


def train_missing(config: Config, plan: Mapping[str, Any], profile: Path, table: Path, workers: int) -> None:
    """Do the jobs that have no row in a table, with the times of a profile; append their rows."""
    config = config.replace(search__cost__table=str(profile))
    prepare(config.data)  # once, not in every process
    jobs, times = list_jobs(plan, read_rows(table, Row)), Times.of(read_json(profile))
    for found in work_off(partial(train, config, plan, times), jobs, workers):
        append_rows(table, found)
        print(*(", ".join(map(str, row)) for row in found), sep="\n", flush=True)


if __name__ == "__main__":
    harness.run(main)
