"""Measure the effect of each setting of a training recipe, changed one at a time: `python benchmarks/ablation.py`.

    python benchmarks/ablation.py [--workers N] [--runs DIR] [--report] [--only NAME]

ablation.yaml names the recipe, the budget and the changes. All trainings have the same number of steps on the same
share of the training text, on one thread each. A finished training appends a row to ablation.csv, and a later start
trains only what is missing; rows of another budget or recipe are ignored. The recipe is trained with several seeds,
which shows the random variation.
"""

import hashlib
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import islice
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import harness
from trainings import read_rows, read_study, require_corpus, train_missing
from tried import TRIED

from parnas.config.loader import Config
from parnas.data.corpora import find_corpus
from parnas.errors import ParnasError
from parnas.runs.files import to_json, write_text
from parnas.runs.resolve import read_config, read_overrides
from parnas.runs.run import Run
from parnas.studies.train_or_load import train_once
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

CONFIG = Path(__file__).with_suffix(".yaml")
RECIPE = "the recipe"
TINY = {
    "data": {"batch_size": 2, "tgt_len": 4},
    "model": {"d_model": 16, "n_heads": 2, "d_inner": 32, "mem_len": 4, "cutoffs": [5, 12]},
    "train": {"steps": 8, "warmup_steps": 2, "log_every": 4, "eval_every": 8, "save_every": 8},
    "runtime": {"precision": "fp32"},
}


class Variant(NamedTuple):
    """A change of the recipe."""

    name: str
    source: str  # the paper
    changes: dict[str, Any]  # by dotted key
    tried: Sequence[str]  # of benchmarks/tried.py
    seeds: Sequence[int] = ()  # none: those of all changes


class Row(NamedTuple):
    """A finished training; perplexity per word on the validation split."""

    name: str
    seed: int
    steps: int
    ppl: float
    seconds: float
    parameters: int
    settings: str  # a hash of them
    device: str  # the processor's name


class Job(NamedTuple):
    """A training to be done."""

    variant: Variant
    seed: int


def read_plan(plan: dict[str, Any]) -> list[Job]:
    """Return the recipe with its seeds, then each change with its own."""
    unchanged = Variant(RECIPE, "", {}, plan["tried"])
    variants = [Variant(**{**unchanged._asdict(), **each}) for each in plan["variants"]]
    recipe = [Job(unchanged, seed) for seed in plan["recipe_seeds"]]
    return recipe + [Job(variant, seed) for variant in variants for seed in variant.seeds or plan["seeds"]]


def cut_corpus(name: str, share: float, folder: Path) -> Path:
    """Write a corpus with the first `share` of the training lines of another; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in find_corpus(name).splits.items():
        lines = b"".join(text.blocks()).decode("utf-8").splitlines(keepends=True)
        kept = round(share * len(lines)) if split == "train" else len(lines)
        write_text(folder / f"{split}.txt", "".join(islice(lines, kept)))
    return folder


def changed_config(config: Config, job: Job) -> Config:
    """Return the configuration of a training."""
    return read_config(config, [("runtime.seed", job.seed), *read_overrides(job.variant.changes)])


def hash_settings(config: Config, share: float, job: Job) -> str:
    """Return a hash of the settings that influence the result of a training and differ from the defaults.

    Thus a new setting, whose default is the earlier behaviour, leaves the hash as it was.
    """
    changed = changed_config(config, job)
    settings = changed.model_dump(mode="json", include={"data", "model", "train"}, exclude_defaults=True)
    settings["data"]["corpus"] = share
    return hashlib.sha256(to_json([settings, job.variant.tried]).encode()).hexdigest()[:8]


def train(config: Config, share: float, runs: Path, job: Job) -> Row:
    """Train one network and return its row."""
    variant, seed = job
    settings = hash_settings(config, share, job)
    folder = runs / f"{re.sub('[^a-z0-9.]+', '-', variant.name.lower())}-seed-{seed}-{settings}"
    if not Run(folder).finished():
        shutil.rmtree(folder, ignore_errors=True)  # what is tried, such as averages, is in no checkpoint
    with ExitStack() as stack:
        for name in variant.tried:
            stack.enter_context(TRIED[name]())
        run = train_once(retrain, changed_config(config, job), folder, Silent())
    summary, device = run.summary(), str(run.environment().device_name)
    figures = summary.steps, summary.valid.ppl, summary.seconds, summary.parameters
    return Row(variant.name, seed, *figures, settings, device)


def rows_of(path: Path, jobs: list[Job], config: Config, share: float) -> list[Row]:
    """Return the finished rows of the jobs."""
    wanted = {(job.variant.name, job.seed, hash_settings(config, share, job)) for job in jobs}
    return [row for row in read_rows(path, Row) if (row.name, row.seed, row.settings) in wanted]


def tabulate(jobs: list[Job], rows: list[Row]) -> list[dict[str, Any]]:
    """Return a row per change: its effect against the recipe, paired by seed, and the times of one device."""
    base = [row for row in rows if row.name == RECIPE]
    of_seed = {row.seed: row.ppl for row in base}
    usual = {device: mean(row.seconds for row in base if row.device == device) for device in {r.device for r in base}}
    variants = list(dict.fromkeys(job.variant.name for job in jobs))
    sources = {job.variant.name: job.variant.source for job in jobs}
    table = []
    for name in variants:
        found = [row for row in rows if row.name == name]
        if not found:
            continue
        ppl = mean(row.ppl for row in found)
        pairs = [(row.ppl, of_seed[row.seed]) for row in found if row.seed in of_seed]
        line = {"change": name, "source": sources[name] or "–", "seeds": len(found), "ppl": f"{ppl:.2f}"}
        line["± sd"] = f"{stdev(row.ppl for row in found):.2f}" if len(found) > 1 else "–"
        line |= {"against the recipe": "–", "time": "–"}
        if pairs and name != RECIPE:
            line["against the recipe"] = f"{mean(100 * (ours / theirs - 1) for ours, theirs in pairs):+.2f} %"
        if times := [row.seconds / usual[row.device] for row in found if row.device in usual]:
            line["time"] = f"{mean(times):.2f}"
        line["parameters"] = found[0].parameters
        table.append(line)
    return table


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"], [*harness.OF_TRAININGS], runs=Path("runs/ablation"))
    parser.add_argument("--only", action="append", help="train only the change of that name; may be repeated")
    parsed = parser.parse_args(arguments)
    config, plan = read_study(CONFIG, parsed, TINY, {"seeds": [1], "recipe_seeds": [1, 2], "share": 1.0})
    require_corpus(config)
    path = harness.results_folder(parsed) / "ablation.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    jobs = read_plan(plan)
    if unknown := set(parsed.only or ()) - {job.variant.name for job in jobs}:
        raise ParnasError(f"There is no change {min(unknown)!r} (--only) in {CONFIG.name}.")
    if not parsed.report:
        corpus = cut_corpus(config.data.corpus, plan["share"], parsed.runs / "corpus")
        config = config.replace(data__corpus=str(corpus.resolve()))
        done = {(row.name, row.seed) for row in rows_of(path, jobs, config, plan["share"])}
        left = [job for job in jobs if (job.variant.name, job.seed) not in done]
        left = [job for job in left if not parsed.only or job.variant.name in parsed.only]
        train_missing(path, config, partial(train, config, plan["share"], parsed.runs), left, parsed.workers)
    rows = rows_of(path, jobs, config, plan["share"])
    table = tabulate(jobs, rows)
    harness.print_table("Validation perplexity per word at the same budget, one change at a time", table)
    device = harness.choose(parsed.device, config.runtime.precision)
    payload = {"precisions": [device.precision], "devices": sorted({row.device for row in rows}), "changes": table}
    harness.write_result("ablation", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
