"""The value of inherited weights, by the length of the training: `python benchmarks/inheritance.py`.

    python benchmarks/inheritance.py             # train what is missing of benchmarks/inheritance.yaml
    python benchmarks/inheritance.py --report    # print and write the table of the finished trainings

A network is trained for several numbers of steps from the weights that it has in the SuperNet of a search, and from
scratch for as many steps in all, those of the search included. Perplexities are compared by seed. Each finished
training appends a row to results/inheritance.csv.
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
    jobs = [
        (start, plan["search_steps"] + steps, seed)
        for steps in plan["steps"]
        for seed in plan["seeds"]
        for start in (INHERITED, SCRATCH)
    ]
    done = {row[:3] for row in rows}
    return [job for job in jobs if job not in done]


def summarise(plan: Mapping[str, Any], rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return a record for each number of steps: mean perplexities and times, and the difference, paired by seed."""
    records = []
    for steps in plan["steps"]:
        total = plan["search_steps"] + steps
        of = {start: {row.seed: row for row in rows if row[:2] == (start, total)} for start in (INHERITED, SCRATCH)}
        ppl = {start: {seed: row.ppl for seed, row in by_seed.items()} for start, by_seed in of.items()}
        if not (seeds := ppl[INHERITED].keys() & ppl[SCRATCH].keys()):
            continue
        records.append(
            {"search_steps": plan["search_steps"], "steps": steps, "seeds": len(seeds)}
            | {start: {"ppl": fmean(values[seed] for seed in seeds)} for start, values in ppl.items()}
            | compare(ppl[INHERITED], ppl[SCRATCH])
        )
        for start, by_seed in of.items():
            records[-1][start]["seconds"] = fmean(by_seed[seed].seconds for seed in seeds)
    return records


def format_record(record: Mapping[str, Any]) -> dict[str, str]:
    """Return a row of the printed table."""
    interval = "" if record["p"] is None else f" ({record['low']:+.2f} to {record['high']:+.2f} %)"
    return {
        "steps after the search": f"{record['steps']:,}",
        "steps in all": f"{record['steps'] + record['search_steps']:,}",
        "seeds": str(record["seeds"]),
        **{f"ppl {start}": f"{record[start]['ppl']:.2f}" for start in (INHERITED, SCRATCH)},
        **{f"seconds {start}": f"{record[start]['seconds']:.0f}" for start in (INHERITED, SCRATCH)},
        "inherited relative to scratch": f"{record['percent']:+.2f} %{interval}",
    }


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
    harness.print_table(
        "Inherited weights and weights from scratch, for equally many steps", map(format_record, records)
    )
    device = harness.choose(parsed.device, config.runtime.precision)
    payload = {"precisions": [device.precision], "arch": str(Architecture.parse(plan["arch"])), "budgets": records}
    harness.write_result("inheritance", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
