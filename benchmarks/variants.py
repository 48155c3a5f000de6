"""Train variants of a network from several seeds and compare each with the first: `python benchmarks/variants.py PLAN`.

    python benchmarks/variants.py hybrid --search       # searches that are missing, derived within each target;
                                                        # first the latency of each layer, unless it was measured before
    python benchmarks/variants.py hybrid                # train what is missing of benchmarks/hybrid.yaml
    python benchmarks/variants.py hybrid --latency      # measure the latency of all networks of the plan in turns
    python benchmarks/variants.py hybrid --report       # print and write the table of the finished trainings

A plan is a configuration with a section of its name:

    seeds: [1, 2, 3]        # of every variant
    steps: [1000, 4000]     # trainings of each length
    variants:
      - {name: base}        # all others are compared with the first
      - {name: zero output, source: "arXiv …", changes: {model.norm: pre}, tried: [zero_output], seeds: [1]}
    targets: [0.45, 0.65]   # optional: what a search derives within these shares of latency is a variant too
    search_seeds: [1, 2]    # of searches; networks derived by further searches are trained from the first seed only

`changes` are settings by dotted key, `tried` are names in benchmarks/tried.py and tried_layers.py. Each finished
training appends a row to results/PLAN.csv; a later start trains what is missing.
"""

import tempfile
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import comparison
import harness
from trainings import read_rows, read_study, require_corpus, train_missing
from tried import TRIED
from tried_layers import CHANGED_NETWORKS

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.nas.derive import Constraints, derive, read_pi
from parnas.nas.latency_table import profile as measure_layers
from parnas.nas.search import search
from parnas.runs.files import read_json, write_json
from parnas.runs.resolve import read_config, read_overrides
from parnas.studies.baseline_comparison import paired_difference
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

DERIVED = "derived within"  # name of a derived variant, without its target
ALL_TRIED = TRIED | CHANGED_NETWORKS


class Variant(NamedTuple):
    """A change of the plan's configuration."""

    name: str
    source: str = ""  # the paper
    changes: Mapping[str, Any] = {}  # by dotted key
    tried: Sequence[str] = ()  # of `ALL_TRIED`
    seeds: Sequence[int] = ()  # none: those of the plan
    steps: Sequence[int] = ()  # none: those of the plan


class Row(NamedTuple):
    """A finished training; perplexity per token on the validation split."""

    name: str
    steps: int
    seed: int
    ppl: float
    seconds: float
    parameters: int


class Job(NamedTuple):
    """A training to be done."""

    variant: Variant
    steps: int
    seed: int

    @property
    def key(self) -> tuple[str, int, int]:
        """The first fields of its row."""
        return self.variant.name, self.steps, self.seed


def read_variants(plan: Mapping[str, Any]) -> list[Variant]:
    """Return the variants of a plan, each with its seeds and steps."""
    variants = [Variant(**each) for each in plan["variants"]]
    return [
        variant._replace(seeds=variant.seeds or plan["seeds"], steps=variant.steps or plan["steps"])
        for variant in variants
    ]


def list_jobs(variants: Sequence[Variant]) -> list[Job]:
    """Return all trainings: short ones first, and all variants from one seed before the next seed."""
    jobs = [Job(variant, steps, seed) for variant in variants for steps in variant.steps for seed in variant.seeds]
    return sorted(jobs, key=lambda job: (job.steps, job.seed))


def changed_config(config: Config, job: Job) -> Config:
    """Return the configuration of a training."""
    settings = [("runtime.seed", job.seed), ("train.steps", job.steps), ("train.eval_every", job.steps)]
    return read_config(config, [*settings, ("train.save_every", job.steps), *read_overrides(job.variant.changes)])


def train(config: Config, job: Job) -> Row:
    """Train one network and return its row."""
    with ExitStack() as stack:
        for name in job.variant.tried:
            stack.enter_context(ALL_TRIED[name]())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="parnas-variants-"))
        summary = retrain(changed_config(config, job), Path(folder) / "run", Silent()).summary()
    return Row(*job.key, summary.valid.ppl, summary.seconds, summary.parameters)


def compare(ours: Mapping[int, float], theirs: Mapping[int, float]) -> dict[str, Any]:
    """Return the paired difference of perplexities by seed: its mean in per cent, 95 % interval, p value and pairs."""
    difference = paired_difference(ours, theirs)._asdict()
    return {"percent": difference.pop("mean"), **difference}


def summarise(variants: Sequence[Variant], rows: Sequence[Row], latencies: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a record for each variant and number of steps: mean perplexity, time, comparison with the first.

    Times are those of the trainings, relative to the first variant's. A variant is compared where the first one was
    trained for the same steps.

    Args:
        variants: those of the plan.
        rows: the finished trainings.
        latencies: latency of the blocks by name, as a share; empty if it was not measured.
    """
    ppl: dict[tuple[str, int], dict[int, float]] = defaultdict(dict)
    seconds: dict[tuple[str, int], list[float]] = defaultdict(list)
    for row in rows:
        ppl[row.name, row.steps][row.seed] = row.ppl
        seconds[row.name, row.steps].append(row.seconds)
    records = []
    base = variants[0].name
    for steps in sorted({steps for variant in variants for steps in variant.steps}):
        for variant in variants:
            name, found = variant.name, ppl.get((variant.name, steps))
            if not found:
                continue
            record = {"variant": name, "source": variant.source, "steps": steps, "seeds": len(found)}
            record |= {"arch": str(arch)} if (arch := variant.changes.get("model.arch")) else {}
            record |= {"latency": latencies[name]} if name in latencies else {}
            record |= {"ppl": fmean(found.values()), "ppl_by_seed": {str(seed): found[seed] for seed in sorted(found)}}
            if theirs := ppl.get((base, steps)):
                record["time"] = fmean(seconds[name, steps]) / (fmean(seconds[base, steps]) or 1.0)  # 0: a tiny run
                if name != base and found.keys() & theirs.keys():
                    record |= compare(found, theirs)
            records.append(record)
    return records


def derived_name(target: float | str, search_seed: int, first_seed: int) -> str:
    """Return the name of a derived variant."""
    return f"{DERIVED} {target}" + ("" if search_seed == first_seed else f", search from seed {search_seed}")


def add_derived(variants: Sequence[Variant], plan: Mapping[str, Any], path: Path) -> list[Variant]:
    """Return the variants, and those that the finished searches in `path` derived within each target."""
    search_seeds = plan.get("search_seeds", [1])
    searches = {each["seed"]: each["derived"] for each in read_searches(path)}
    return [
        *variants,
        *(
            Variant(
                derived_name(target, seed, search_seeds[0]),
                changes={"model.arch": arch},
                seeds=plan["seeds"] if seed == search_seeds[0] else plan["seeds"][:1],
                steps=plan["steps"],
            )
            for seed in search_seeds
            for target, arch in searches.get(seed, {}).items()
        ),
    ]


def read_searches(path: Path) -> list[dict[str, Any]]:
    """Return what the finished searches found."""
    return list(read_json(path)["searches"]) if path.is_file() else []


def run_search(config: Config, targets: Sequence[float]) -> dict[str, Any]:
    """Run one search, derive within each target, and return what it found and its seconds; delete the run folder."""
    with tempfile.TemporaryDirectory(prefix="parnas-variants-") as folder:
        run = search(config, Path(folder) / "run", Silent())
        derived, by_pi = (
            {str(target): str(derive(run, Constraints(target, rerank_top_k=n)).architecture) for target in targets}
            for n in (None, 0)
        )
        seconds, (_, pi) = run.summary().seconds, read_pi(run, config)
    print(", ".join(f"within {target}: {arch}" for target, arch in derived.items()))
    return {"seed": config.runtime.seed, "seconds": seconds, "derived": derived, "by_pi": by_pi, "pi": pi}


def run_searches(config: Config, plan: Mapping[str, Any], path: Path, rows: Sequence[Row]) -> None:
    """Run the searches of the plan that `path` lacks, and add what each found.

    Raises:
        ParnasError: `rows` has trainings of networks that a missing search would derive.
    """
    seeds = plan.get("search_seeds", [1])
    done = [each["seed"] for each in read_searches(path)]
    for seed in [seed for seed in seeds if seed not in done]:
        names = {derived_name(target, seed, seeds[0]) for target in plan["targets"]}
        if any(row.name in names for row in rows):
            raise ParnasError(f"There are trainings of {', '.join(sorted(names))}; delete their rows to search again.")
        found = run_search(config.replace(runtime__seed=seed), plan["targets"])
        write_json(path, {"searches": [*read_searches(path), found]})


def measured_shares(path: Path, architectures: Mapping[str, Architecture]) -> dict[str, float]:
    """Return the measured latency of each variant's blocks, as a share of the deepest interleaved network's.

    The result is empty if latencies were not measured.
    """
    if not path.is_file():
        return {}
    stack = {arch: times["stack_ms"] for arch, times in read_json(path)["of"].items()}
    interleaved = [arch for name, arch in architectures.items() if name.startswith("interleaved")]
    whole = stack[str(max(interleaved, key=len))]
    return {name: stack[str(arch)] / whole for name, arch in architectures.items() if str(arch) in stack}


def format_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the printed table."""
    row = {"variant": record["variant"]}
    if "arch" in record and not record["source"]:
        row["layers"] = record["arch"] if ":" in record["arch"] else record["arch"].replace(" ", "")
    else:
        row["source"] = record["source"] or "–"
    row["seeds"] = record["seeds"]
    row |= {"latency share": f"{record['latency']:.2f}"} if "latency" in record else {}
    row |= {"time": f"{record['time']:.2f}" if "time" in record else "–", "ppl": f"{record['ppl']:.2f}"}
    row |= {"against the first": "–", "95 % interval": "–", "p": "–"}
    if "percent" in record:
        row["against the first"] = f"{record['percent']:+.2f} %"
        if record["p"] is not None:
            row["95 % interval"] = f"{record['low']:+.2f} to {record['high']:+.2f} %"
            row["p"] = f"{record['p']:.2g}"
    return row


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = harness.make_parser(__doc__, ["tiny"], ["corpus", "workers"])
    parser.add_argument("plan", help="name of a plan, such as recipe, or a YAML file")
    stage = parser.add_mutually_exclusive_group()
    for name in ("search", "latency", "report"):
        stage.add_argument(f"--{name}", dest="stage", action="store_const", const=name, default="train")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed = make_parser().parse_args(arguments)
    path = Path(parsed.plan) if parsed.plan.endswith(".yaml") else Path(__file__).with_name(f"{parsed.plan}.yaml")
    tiny = parsed.size == "tiny"
    config, plan = read_study(path, parsed, comparison.TINY, {"seeds": [1, 2], "steps": [4]})
    if tiny:
        plan["variants"] = [{**each, "seeds": (), "steps": ()} for each in plan["variants"]]
    if parsed.stage != "report":
        require_corpus(config)
    device, folder = harness.choose(parsed.device, config.runtime.precision), harness.results_folder(parsed)
    profile, found, latency, table = (
        folder / f"{path.stem}{suffix}" for suffix in ("_profile.json", "_search.json", "_latency.json", ".csv")
    )
    if profile.is_file():
        config = config.replace(search__cost__table=str(profile))
    variants = add_derived(read_variants(plan), plan, found)
    architectures = {
        each.name: Architecture.parse(str(each.changes.get("model.arch", config.model.arch))) for each in variants
    }
    jobs = list_jobs(variants)
    if parsed.stage == "search":
        if config.search.cost.metric == "latency" and not profile.is_file():
            measure_layers(config, Silent(), rounds=50, check=20).write(profile)
            config = config.replace(search__cost__table=str(profile))
        run_searches(config, plan, found, read_rows(table, Row))
    elif parsed.stage == "train":
        done = {row[:3] for row in read_rows(table, Row)}
        left = [job for job in jobs if job.key not in done]
        train_missing(table, config, partial(train, config), left, parsed.workers)
    elif parsed.stage == "latency":
        write_json(latency, comparison.measure_latencies(config, architectures.values(), 2 if tiny else 50))
    else:
        wanted = {job.key for job in jobs}
        rows = [row for row in read_rows(table, Row) if row[:3] in wanted]
        records = summarise(variants, rows, measured_shares(latency, architectures))
        for steps in dict.fromkeys(record["steps"] for record in records):
            of_steps = [format_record(record) for record in records if record["steps"] == steps]
            harness.print_table(f"After {steps:,} steps", of_steps)
        harness.write_result(path.stem, device, {"precisions": [device.precision], "variants": records}, parsed)


if __name__ == "__main__":
    harness.run(main)
