"""Train the networks of a search space from scratch, all of them or a sample: `python benchmarks/ground_truth.py`.

    python benchmarks/ground_truth.py [--workers N] [--seeds 3] [--config FILE.yaml]

Architectures that differ only by identity layers are the same network and are trained once; the network without blocks
is `i` in the table. Each finished training appends a row to the CSV, and a later start, here or on another machine,
trains only what is missing: first all networks with seed 1, then with seed 2, and so on. `valid_ppl` is the perplexity
per token of the validation split after the last step.

A configuration may have a section `sample`: only that number of `networks` is trained, drawn evenly from `strata` of
predicted latency, and only the first `repeated` of them from more than one seed.
"""

import itertools
import tempfile
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import harness
import numpy as np
from trainings import read_rows, require_corpus, train_missing

from parnas.architecture import IDENTITY, Architecture, drop_identity
from parnas.config.loader import Config
from parnas.config.yaml_file import read_yaml
from parnas.data.batching import Shuffle, TrainingBatches
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.cost import find_costs
from parnas.runs.resolve import read_config
from parnas.training.optimizers import Schedule
from parnas.training.progress import Silent
from parnas.training.retrain import RetrainTask
from parnas.training.session import open_session, run_task

CONFIG = Path(__file__).with_suffix(".yaml")
SEEDS = 3


class Row(NamedTuple):
    """A trained network; `arch` has no identity layers, except `i` for the network without blocks."""

    arch: str
    seed: int
    steps: int
    valid_ppl: float


class Study(NamedTuple):
    """The networks of a table, in the order of training."""

    config: Config
    networks: tuple[str, ...]
    repeated: int  # number of first networks that are trained from every seed; the others from seed 1
    is_sample: bool = False  # whether the table lacks networks of the search space

    def seeds_of(self, seeds: int) -> Iterator[tuple[str, int]]:
        """Yield each network and seed of a table with `seeds` seeds: seed 1 for all networks first."""
        for seed in range(1, seeds + 1):
            for arch in self.networks if seed == 1 else self.networks[: self.repeated]:
                yield arch, seed


def read_table_study(path: Path, device: str, results: Path = harness.RESULTS) -> Study:
    """Return the study of a configuration file, with the costs of its profile if the folder of results has one."""
    settings, sample = read_settings(path)
    config = read_config(settings, [("runtime.device", device)])
    if (profile := results / f"{path.stem}_profile.json").is_file():
        config = config.replace(search__cost__table=str(profile))
    known = networks(config.search.blocks, config.search.space)
    if sample is None:
        return Study(config, tuple(known), len(known))
    per_layer = find_costs(config, config.search.cost.metric, Silent()).per_layer
    drawn = draw_stratified(known, per_layer, sample["networks"], sample["strata"])
    return Study(config, drawn, sample["repeated"], is_sample=True)


def read_settings(path: Path) -> tuple[dict[str, Any], dict[str, int] | None]:
    """Return the settings of a configuration file and its section `sample`; `None` if it has none."""
    settings = read_yaml(path.read_text(encoding="utf-8"), path.name)
    sample = settings.pop("sample", None)
    return settings, sample


def draw_stratified(known: Sequence[str], costs: Mapping[str, float], count: int, strata: int) -> tuple[str, ...]:
    """Return `count` networks, the same number from each of `strata` intervals of cost of equal width, in turns.

    An interval with too few networks gives all of them, and the others give more.
    """
    cost = np.array([sum(costs[layer] for layer in Architecture.parse(network)) for network in known])
    stratum = np.minimum(cost / (cost.max() * (1 + 1e-9)) * strata, strata - 1).astype(int)
    order = np.random.default_rng(1).permutation(len(known))
    drawn = [[known[index] for index in order if stratum[index] == number] for number in range(strata)]
    turns = itertools.zip_longest(*drawn)
    return tuple(itertools.islice((network for turn in turns for network in turn if network is not None), count))


def networks(blocks: int, space: Sequence[str]) -> list[str]:
    """Return the different networks of a space, smallest first: all architectures without identity layers."""
    layers = [layer for layer in space if layer != IDENTITY]
    lengths = range(0, blocks + 1) if IDENTITY in space else [blocks]
    return [table_name(chosen) for length in lengths for chosen in itertools.product(layers, repeat=length)]


def table_name(layers: Iterable[str]) -> str:
    """Return the string without identity, as written in the table."""
    return str(Architecture(drop_identity(layers) or (IDENTITY,)))


def train(config: Config, job: tuple[str, int]) -> Row:
    """Train one network in a temporary run folder."""
    arch, seed = job
    with tempfile.TemporaryDirectory(prefix="parnas-ground-truth-") as folder:
        config = config.replace(model__arch=None, runtime__seed=seed)
        with open_session(config, "retrain", Path(folder) / "run", False, Silent()) as session:
            config, data = session.config, session.config.data
            # Not by `retrain`, which refuses the network without blocks.
            model = TransformerXL.build(config.model, Architecture.parse(arch), session.streams.tokenizer.vocab_size)
            tokens = session.streams.tokens("train")
            batches = TrainingBatches(
                tokens, data.batch_size, data.tgt_len, shuffle=Shuffle.from_config(session.config)
            )
            task = RetrainTask(session, model, batches, Schedule.of(config.train))
            run = run_task(task, lambda: Architecture.parse(arch))
        return Row(arch, seed, config.train.steps, run.summary().valid.ppl)


def missing(study: Study, rows: Sequence[Row], seeds: int) -> list[tuple[str, int]]:
    """Return the networks and seeds without a row of the configured number of steps."""
    done = {(row.arch, row.seed) for row in rows if row.steps == study.config.train.steps}
    return [job for job in study.seeds_of(seeds) if job not in done]


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, [], ["workers"])
    parser.add_argument("--config", type=Path, default=CONFIG)
    parser.add_argument("--seeds", type=int, default=SEEDS, help="networks are trained from seeds 1 to this")
    parsed: Namespace = parser.parse_args(arguments)
    folder = harness.results_folder(parsed)
    study = read_table_study(parsed.config, parsed.device, folder)
    require_corpus(study.config)
    table = folder / f"{parsed.config.stem}.csv"
    left = missing(study, read_rows(table, Row), parsed.seeds)
    train_missing(table, study.config, partial(train, study.config), left, parsed.workers)


if __name__ == "__main__":
    harness.run(main)
