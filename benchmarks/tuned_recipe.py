"""Measure what `parnas tune` gains on the recipe of results by words: `python benchmarks/tuned_recipe.py`.

    python benchmarks/tuned_recipe.py [--workers N] [--runs DIR] [--report]

benchmarks/tuned_recipe.yaml names the recipe, at small size, the settings to tune and the number of trials. The study
has the recipe's seed; its result is kept in tuned_recipe_trials.json, and while this file is there no study is run. The
best of many trials has a low loss partly by chance, so the recipe and the best settings are then trained from further
seeds. A finished training appends a row to tuned_recipe.csv, and a later start trains only what is missing.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from math import exp
from pathlib import Path
from typing import Any, NamedTuple

import harness
from trainings import cut_corpus, read_rows, read_study, require_corpus, train_missing, work_off

from parnas.config.loader import Config
from parnas.runs.files import read_json, to_json, write_json
from parnas.runs.run import TUNING
from parnas.studies.baseline_comparison import paired_difference
from parnas.studies.train_or_load import train_once
from parnas.studies.tuning import TuneOptions, tune
from parnas.studies.tuning_space import read_space
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

RECIPE, TUNED = "the recipe", "tuned"
NAME = Path(__file__).stem
TINY = {
    "data": {"batch_size": 2, "tgt_len": 4},
    "model": {
        "arch": "sf",
        "d_model": 16,
        "n_heads": 2,
        "d_inner": 32,
        "mem_len": 4,
        "pointer_len": 8,
        "cutoffs": [12],
    },
    "train": {"steps": 8, "warmup_steps": 2, "log_every": 4, "eval_every": 4, "save_every": 8},
    "runtime": {"precision": "fp32"},
}
TINY_PLAN: dict[str, Any] = {"share": 1.0, "trials": 3, "seeds": [2, 3]}


class Row(NamedTuple):
    """A finished training; perplexity per word on the validation split."""

    name: str
    seed: int
    ppl: float
    seconds: float
    settings: str  # the values of the tuned settings, as JSON
    device: str  # the processor's name


class Job(NamedTuple):
    """A training to be done."""

    name: str
    seed: int
    settings: Mapping[str, Any]  # by dotted key


@dataclass(frozen=True)
class Confirmation:
    """Trainings of the recipe, some with other settings, in subfolders of `runs`."""

    config: Config
    runs: Path

    def train(self, job: Job) -> Row:
        """Train one network and return its row."""
        changes = {key.replace(".", "__"): value for key, value in job.settings.items()}
        config = self.config.replace(runtime__seed=job.seed, **changes)
        run = train_once(retrain, config, self.runs / f"{job.name.replace(' ', '-')}-seed-{job.seed}", Silent())
        summary, device = run.summary(), str(run.environment().device_name)
        return Row(job.name, job.seed, summary.valid.ppl, summary.seconds, to_json(job.settings), device)


def run_trials(config: Config, plan: Mapping[str, Any], folder: Path) -> None:
    """Run trials of the study until all workers together have finished them, and write its results to `folder`."""
    options = TuneOptions("retrain", read_space(plan["space"], config, "retrain"), plan["trials"])
    tune(config, options, folder, Silent()).write(folder)


def run_study(config: Config, plan: Mapping[str, Any], runs: Path, workers: int) -> dict[str, Any]:
    """Run or resume the study in `workers` processes; return the content of its `tuning.json`."""
    for _ in work_off(partial(run_trials, config, plan), [runs / "study"] * workers, workers):
        pass
    return read_json(runs / "study" / TUNING)


def rows_of(path: Path, settings: Mapping[str, Any]) -> list[Row]:
    """Return the rows of a table whose settings are those of their names."""
    return [row for row in read_rows(path, Row) if row.settings == to_json(settings[row.name])]


def compare(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the perplexities by settings and seed, and the difference of the tuned ones, if any, paired by seed."""
    ppl = {name: {row.seed: row.ppl for row in rows if row.name == name} for name in (RECIPE, TUNED)}
    pairs = ppl[RECIPE].keys() & ppl[TUNED].keys()
    return {"ppl": ppl, "difference": paired_difference(ppl[TUNED], ppl[RECIPE])._asdict() if pairs else None}


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"], [*harness.OF_TRAININGS], runs=Path("runs/tuned-recipe"))
    parsed = parser.parse_args(arguments)
    config, plan = read_study(Path(__file__).with_suffix(".yaml"), parsed, TINY, TINY_PLAN)
    results = harness.results_folder(parsed)
    kept, path = results / f"{NAME}_trials.json", results / f"{NAME}.csv"
    if not parsed.report:
        require_corpus(config)
        corpus = cut_corpus(config.data.corpus, plan["share"], parsed.runs / f"corpus-{plan['share']:g}")
        config = config.replace(data__corpus=str(corpus.resolve()))
        if not kept.is_file():
            write_json(kept, run_study(config, plan, parsed.runs, parsed.workers))
    study = read_json(kept)
    trials = {RECIPE: study["configured"], TUNED: study["best"]}
    settings = {name: trial["settings"] for name, trial in trials.items()}
    jobs = [Job(name, seed, settings[name]) for seed, name in product(plan["seeds"], settings)]
    if not parsed.report:
        done = {(row.name, row.seed) for row in rows_of(path, settings)}
        missing = [job for job in jobs if (job.name, job.seed) not in done]
        train_missing(path, config, Confirmation(config, parsed.runs).train, missing, parsed.workers)
    found = compare(rows_of(path, settings))
    table = [
        {
            "settings": name,
            **settings[name],
            "ppl in the study": f"{exp(trial['loss']):.2f}",
            **{f"ppl, seed {seed}": f"{ppl:.2f}" for seed, ppl in found["ppl"][name].items()},
        }
        for name, trial in trials.items()
    ]
    harness.print_table(f"{len(study['trials'])} trials of {config.train.steps} steps", table)
    payload = {
        "precisions": [config.runtime.precision],
        **{"steps": config.train.steps, "arch": config.model.arch, "counts": study["counts"], "space": study["space"]},
        **{"settings": settings, "study": {name: exp(trial["loss"]) for name, trial in trials.items()}, **found},
    }
    harness.write_result(NAME, harness.choose(parsed.device, config.runtime.precision), payload, parsed)


if __name__ == "__main__":
    harness.run(main)
