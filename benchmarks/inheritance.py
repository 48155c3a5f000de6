"""The value of inherited weights, by the length of the training: `python benchmarks/inheritance.py`.

    python benchmarks/inheritance.py             # train what is missing of benchmarks/inheritance.yaml
    python benchmarks/inheritance.py --report    # print and write the table of the finished trainings

A network is trained for several numbers of steps from the weights that it has in the SuperNet of a search, and from
scratch, once for as many steps in all, those of the search included, and once for as many steps as after the search.
Perplexities are compared by seed. Each finished training appends a row to results/inheritance.csv.
"""

import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import comparison
import harness
from trainings import read_rows, read_study, require_corpus, train_missing
from variants import compare

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.nas.one_run import split_training
from parnas.nas.search import search
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

INHERITED, SCRATCH = "inherited", "from scratch"
TINY = {"seeds": [1], "arch": "s f i i", "search_steps": 4, "steps": [4, 8]}


class Row(NamedTuple):
    """A finished training; perplexity per token on the validation split."""

    start: str
    steps: int  # with those of the search
    seed: int
    ppl: float
    seconds: float  # with those of the search


Job = tuple[str, int, int]
"""The first fields of a row."""


def train(config: Config, plan: Mapping[str, Any], job: Job) -> Row:
    """Train the network once and return the row; each training that inherits weights has its own search."""
    start, steps, seed = job
    config = config.replace(runtime__seed=seed, model__arch=plan["arch"])
    with tempfile.TemporaryDirectory(prefix="parnas-inheritance-") as place:
        folder, training, searched = Path(place), config.replace(train__steps=steps), 0.0
        if start == INHERITED:
            share = plan["search_steps"] / steps
            first, training = split_training(training.replace(search__share=share), folder / "search")
            # No network is selected: the same one is trained in any case.
            first = first.replace(model__arch=None, search__rerank_top_k=0)
            searched = search(first, folder / "search", Silent()).summary().seconds
        summary = retrain(training, folder / "run", Silent()).summary()
    return Row(start, steps, seed, summary.valid.ppl, searched + summary.seconds)


def list_jobs(plan: Mapping[str, Any], rows: Sequence[Row]) -> list[Job]:
    """Return the trainings that have no row, short ones first."""
    searched = plan["search_steps"]
    trainings = [(INHERITED, searched + steps) for steps in plan["steps"]]
    trainings += [(SCRATCH, steps + before) for steps in plan["steps"] for before in (0, searched)]
    jobs = [(start, steps, seed) for start, steps in dict.fromkeys(trainings) for seed in plan["seeds"]]
    done = {row[:3] for row in rows}
    return sorted((job for job in jobs if job not in done), key=lambda job: job[1:])


def summarise(plan: Mapping[str, Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a record for each number of steps: mean perplexities, and their differences, paired by seed.

    `equal_total` compares the inherited weights with a training from scratch that also has the steps of the search,
    `equal_training` with one that does not.
    """
    records = []
    for steps in plan["steps"]:
        total = plan["search_steps"] + steps
        ppl = {
            name: {row.seed: row.ppl for row in rows if row[:2] == training}
            for name, training in (
                (INHERITED, (INHERITED, total)),
                ("equal_total", (SCRATCH, total)),
                ("equal_training", (SCRATCH, steps)),
            )
        }
        if not ppl[INHERITED]:
            continue
        record = {"search_steps": plan["search_steps"], "steps": steps, "seeds": len(ppl[INHERITED])}
        record["ppl"] = {name: fmean(values.values()) for name, values in ppl.items() if values}
        record |= {name: compare(ppl[INHERITED], ppl[name]) for name in ppl if name != INHERITED and ppl[name]}
        records.append(record)
    return records


def format_record(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the printed table."""
    row = {
        "steps after the search": f"{record['steps']:,}",
        "steps in all": f"{record['steps'] + record['search_steps']:,}",
        "seeds": str(record["seeds"]),
        "ppl inherited": f"{record['ppl'][INHERITED]:.2f}",
    }
    for name, steps in (("equal_total", "the steps in all"), ("equal_training", "the steps after the search")):
        if found := record.get(name):
            interval = "" if found["p"] is None else f" ({found['low']:+.1f} to {found['high']:+.1f} %)"
            row[f"ppl from scratch, {steps}"] = f"{record['ppl'][name]:.2f}"
            row[f"inherited relative to it, {steps}"] = f"{found['percent']:+.1f} %{interval}"
    return row


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"], ["corpus", "workers"])
    parser.add_argument("--report", action="store_true", help="print and write the table of the finished trainings")
    parsed: Namespace = parser.parse_args(arguments)
    config, plan = read_study(Path(__file__).with_suffix(".yaml"), parsed, comparison.TINY, TINY)
    folder = harness.results_folder(parsed)
    table = folder / "inheritance.csv"
    rows = read_rows(table, Row)
    if not parsed.report:
        require_corpus(config)
        train_missing(table, config, partial(train, config, plan), list_jobs(plan, rows), parsed.workers)
        return
    records = summarise(plan, rows)
    harness.print_table("Inherited weights and weights from scratch", [*map(format_record, records)])
    device = harness.choose(parsed.device, config.runtime.precision)
    payload = {"precisions": [device.precision], "arch": str(Architecture.parse(plan["arch"])), "budgets": records}
    harness.write_result("inheritance", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
