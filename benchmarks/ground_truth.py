"""Every network of a small space, trained from scratch: `python benchmarks/ground_truth.py`.

    python benchmarks/ground_truth.py [--workers N] [--seeds 3] [--rows FILE.csv]

Strings that name the same network count once; the network without any block stands in the table as `i`. Each finished
network appends a row to the CSV, and a later start, here or on another machine, trains only what is missing: first all
networks from seed 1, then from seed 2, and so on. `valid_ppl` is per token of the validation split, at the last step.
"""

import itertools
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import harness
from rows import append_rows, read_rows, work_off
from time_to_quality import require_corpus

from parnas.architecture import IDENTITY, Architecture
from parnas.config.loader import Config, load_config
from parnas.data.batching import Shuffle, TrainingBatches
from parnas.data.streams import prepare
from parnas.model.transformer_xl import TransformerXL
from parnas.training.optimizers import Schedule
from parnas.training.progress import Silent
from parnas.training.retrain import RetrainTask
from parnas.training.session import open_session, run_task

CONFIG = Path(__file__).with_suffix(".yaml")
ROWS = harness.RESULTS / "ground_truth.csv"
SEEDS = 3


class Row(NamedTuple):
    """A trained network: its string without identity, or `i` for the one without blocks."""

    arch: str
    seed: int
    steps: int
    valid_ppl: float


def networks(blocks: int, space: Sequence[str]) -> list[str]:
    """Return the different networks of a space, smallest first: all strings without identity."""
    letters = [letter for letter in space if letter != IDENTITY]
    lengths = range(0, blocks + 1) if IDENTITY in space else [blocks]
    return ["".join(string) or IDENTITY for length in lengths for string in itertools.product(letters, repeat=length)]


def train(config: Config, job: tuple[str, int]) -> Row:
    """Train one network in a run folder that is thrown away."""
    arch, seed = job
    with tempfile.TemporaryDirectory(prefix="parnas-ground-truth-") as folder:
        config = config.replace(model__arch=None, runtime__seed=seed)
        with open_session(config, "retrain", Path(folder) / "run", False, Silent()) as session:
            config, data = session.config, session.config.data
            # Not by `retrain`, which refuses the network without blocks.
            model = TransformerXL.build(config.model, Architecture(arch), session.streams.tokenizer.vocab_size)
            tokens = session.streams.tokens("train")
            batches = TrainingBatches(
                tokens, data.batch_size, data.tgt_len, shuffle=Shuffle.from_config(session.config)
            )
            task = RetrainTask(session, model, batches, Schedule.of(config.train))
            run = run_task(task, lambda: Architecture(arch))
        return Row(arch, seed, config.train.steps, run.summary().valid.ppl)


def missing(config: Config, rows: Sequence[Row], seeds: int) -> Iterator[tuple[str, int]]:
    """Strings and seeds without a row of the configured number of steps."""
    done = {(row.arch, row.seed) for row in rows if row.steps == config.train.steps}
    for seed in range(1, seeds + 1):
        for arch in networks(config.search.blocks, config.search.space):
            if (arch, seed) not in done:
                yield arch, seed


def fill(config: Config, path: Path, seeds: int, workers: int) -> None:
    """Train what is missing, `workers` networks at a time, each in a process with the configured threads."""
    left = list(missing(config, read_rows(path, Row), seeds))
    prepare(config.data)  # once, not in every process
    started = time.perf_counter()
    for number, row in enumerate(work_off(partial(train, config), left, workers), 1):
        append_rows(path, [row])
        passed = time.perf_counter() - started
        print(f"{number}/{len(left)} {row.arch} seed {row.seed}: {row.valid_ppl:.2f} ({passed:.0f} s)", flush=True)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, [], ["workers"])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--rows", type=Path, default=ROWS, help="the table")
    parser.add_argument("--seeds", type=int, default=SEEDS, help="networks are trained from seeds 1 to this")
    parsed: Namespace = parser.parse_args(arguments)
    config = load_config(parsed.config).replace(runtime__device=parsed.device)
    require_corpus(config)
    fill(config, parsed.rows, parsed.seeds, parsed.workers)


if __name__ == "__main__":
    harness.run(main)
