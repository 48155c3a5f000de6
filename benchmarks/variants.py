"""Train variants of a network from several seeds and compare each with the first: `python benchmarks/variants.py PLAN`.

    python benchmarks/variants.py recipe                # train what is missing of benchmarks/recipe.yaml
    python benchmarks/variants.py recipe --report       # print and write the table of the finished trainings

A plan is a configuration with a section of its name:

    seeds: [1, 2, 3]        # of every variant
    steps: [1000, 4000]     # trainings of each length
    relative_to: sfsfsf     # optional: report predicted latency as a share of this network's
    variants:
      - {name: base}        # all others are compared with the first
      - {name: zero output, source: "arXiv …", changes: {model.norm: pre}, tried: [zero_output], seeds: [1]}

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
from scipy import stats
from trainings import read_rows, read_study, require_corpus, train_missing
from tried import TRIED
from tried_layers import CHANGED_NETWORKS

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.runs.files import read_json
from parnas.runs.resolve import read_config, read_overrides
from parnas.studies.baseline_comparison import paired_difference
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

ALL_TRIED = TRIED | CHANGED_NETWORKS
CORPUS_OPTIONS = ("corpus", "workers", "report")


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
    """Return the mean difference of perplexities by seed in per cent, its 95 % interval and its two-sided p value."""
    difference = paired_difference(ours, theirs)
    shared = [seed for seed in ours if seed in theirs]
    result = {"percent": difference.mean, "low": difference.low, "high": difference.high, "p": None}
    if len(shared) > 1:
        percent = [100 * (ours[seed] / theirs[seed] - 1) for seed in shared]
        result["p"] = float(stats.ttest_1samp(percent, 0).pvalue)
    return result


def summarise(variants: Sequence[Variant], rows: Sequence[Row], latencies: Mapping[str, float]) -> list[dict[str, Any]]:
    """Return a record for each variant and number of steps: mean perplexity, and the comparison with the first.

    Args:
        variants: those of the plan.
        rows: the finished trainings.
        latencies: predicted latency by name, as a share; empty if the plan asks for none.
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
            if not found or (base, steps) not in ppl:
                continue
            record = {"variant": name, "source": variant.source, "steps": steps, "seeds": len(found)}
            record |= {"latency": latencies[name]} if name in latencies else {}
            record |= {"ppl": fmean(found.values()), "seconds": fmean(seconds[name, steps])}
            if name != base and (set(found) & set(ppl[base, steps])):
                record |= compare(found, ppl[base, steps])
            records.append(record)
    return records


def predict_latencies(config: Config, variants: Sequence[Variant], reference: str, folder: Path) -> dict[str, float]:
    """Return the predicted latency of each variant's blocks, as a share of the reference architecture's.

    The prediction adds the measured inference latencies of the layers (results of benchmarks/mixers.py).
    """
    measured = read_json(folder / "mixers-cpu.json")["latency"][0]
    relative = {"s": 1.0, "i": 0.0, **{name: value for name, value in measured.items() if isinstance(value, float)}}

    def latency(arch: str) -> float:
        return sum(relative[name] for name in Architecture.parse(arch))

    archs = {each.name: str(each.changes.get("model.arch", config.model.arch)) for each in variants}
    return {name: latency(arch) / latency(reference) for name, arch in archs.items()}


def format_record(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a row of the printed table."""
    row = {"variant": record["variant"], "source": record["source"] or "–", "seeds": record["seeds"]}
    row |= {"latency share": f"{record['latency']:.2f}"} if "latency" in record else {}
    row |= {"ppl": f"{record['ppl']:.2f}", "against the first": "–", "95 % interval": "–", "p": "–"}
    if "percent" in record:
        row["against the first"] = f"{record['percent']:+.2f} %"
        if record["p"] is not None:
            row["95 % interval"] = f"{record['low']:+.2f} to {record['high']:+.2f} %"
            row["p"] = f"{record['p']:.2g}"
    return row


def make_parser() -> ArgumentParser:
    """Return the parser of the arguments."""
    parser = harness.make_parser(__doc__, ["tiny"], CORPUS_OPTIONS)
    parser.add_argument("plan", help="name of a plan, such as recipe, or a YAML file")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed = make_parser().parse_args(arguments)
    path = Path(parsed.plan) if parsed.plan.endswith(".yaml") else Path(__file__).with_name(f"{parsed.plan}.yaml")
    tiny = parsed.size == "tiny"
    config, plan = read_study(path, parsed, comparison.TINY, {"seeds": [1, 2], "steps": [4]})
    if tiny:
        plan["variants"] = [{**each, "seeds": (), "steps": ()} for each in plan["variants"]]
    variants = read_variants(plan)
    device, folder = harness.choose(parsed.device, config.runtime.precision), harness.results_folder(parsed)
    table = folder / f"{path.stem}.csv"
    jobs = list_jobs(variants)
    if not parsed.report:
        require_corpus(config)
        done = {row[:3] for row in read_rows(table, Row)}
        left = [job for job in jobs if job.key not in done]
        train_missing(table, config, partial(train, config), left, parsed.workers)
        return
    wanted = {job.key for job in jobs}
    rows = [row for row in read_rows(table, Row) if row[:3] in wanted]
    reference = plan.get("relative_to")
    latencies = predict_latencies(config, variants, reference, folder) if reference else {}
    records = summarise(variants, rows, latencies)
    for steps in dict.fromkeys(record["steps"] for record in records):
        of_steps = [format_record(record) for record in records if record["steps"] == steps]
        harness.print_table(f"After {steps:,} steps", of_steps)
    harness.write_result(path.stem, device, {"precisions": [device.precision], "variants": records}, parsed)


if __name__ == "__main__":
    harness.run(main)
