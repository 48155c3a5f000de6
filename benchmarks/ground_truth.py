"""Train every network of a small search space from scratch: `python benchmarks/ground_truth.py`.

    python benchmarks/ground_truth.py [--workers N] [--seeds 3] [--rows FILE.csv]

Architectures that differ only by identity layers are the same network and are trained once; the network without blocks
is `i` in the table. Each finished training appends a row to the CSV, and a later start, here or on another machine,
trains only what is missing: first all networks with seed 1, then with seed 2, and so on. `valid_ppl` is the perplexity
per token of the validation split after the last step.
"""

import itertools
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import harness
from trainings import read_rows, require_corpus, train_missing

from parnas.architecture import IDENTITY, Architecture
from parnas.config.loader import Config, load_config
from parnas.data.batching import Shuffle, TrainingBatches
from parnas.model.transformer_xl import TransformerXL
from parnas.training.optimizers import Schedule
from parnas.training.progress import Silent
from parnas.training.retrain import RetrainTask
from parnas.training.session import open_session, run_task

CONFIG = Path(__file__).with_suffix(".yaml")
ROWS = harness.RESULTS / "ground_truth.csv"
SEEDS = 3


class Row(NamedTuple):
    """A trained network; `arch` has no identity layers, except `i` for the network without blocks."""

    arch: str
    seed: int
    steps: int
    valid_ppl: float


def networks(blocks: int, space: Sequence[str]) -> list[str]:
    """Return the different networks of a space, smallest first: all architectures without identity layers."""
    letters = [letter for letter in space if letter != IDENTITY]
    lengths = range(0, blocks + 1) if IDENTITY in space else [blocks]
    return ["".join(string) or IDENTITY for length in lengths for string in itertools.product(letters, repeat=length)]


def train(config: Config, job: tuple[str, int]) -> Row:
    """Train one network in a temporary run folder."""
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
    """Yield the architectures and seeds without a row of the configured number of steps."""
    done = {(row.arch, row.seed) for row in rows if row.steps == config.train.steps}
    for seed in range(1, seeds + 1):
        for arch in networks(config.search.blocks, config.search.space):
            if (arch, seed) not in done:
                yield arch, seed


def fill(config: Config, path: Path, seeds: int, workers: int) -> None:
    """Train the missing networks, `workers` of them at the same time, each with the configured number of threads."""
    left = list(missing(config, read_rows(path, Row), seeds))
    train_missing(path, config, partial(train, config), left, workers)


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
