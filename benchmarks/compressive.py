"""Compare compressive memory, by function, loss and ratio, with plain memory.

    python benchmarks/compressive.py [--workers N] [--runs DIR] [--report]

Each network has three attention and three feed-forward layers and is trained from scratch with the settings of
compressive.yaml, once for each seed. A finished training appends a row to compressive.csv, and a later start trains
only what is missing: first all networks with seed 1, then with seed 2. Run folders are kept, for `parnas evaluate
--analyse`. Networks with plain memory have the same span (number of positions that attention sees), the same reach in
tokens, or the same span and as much training time as compressive memory needs.
"""

from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import mean, stdev
from typing import Any, NamedTuple

import harness
from compressive_step import FUNCTIONS, LOSSES, TRAINED
from trainings import read_rows, read_study, require_corpus, train_missing

from parnas.config.loader import Config
from parnas.evaluation.frequency import BUCKETS, perplexity_by_frequency
from parnas.evaluation.loading import EvalOptions, open_runs
from parnas.studies.train_or_load import train_once
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

CONFIG = Path(__file__).with_suffix(".yaml")
SAME_SPAN, SAME_REACH, LONGER = "plain, same span", "plain, same reach", "plain, same span, longer training"
WITHOUT = "plain, no compressed memory"
LONGER_BY = 1.24  # what compressive_step.py measures for these shapes, `conv, attention, slots` in bf16
DESIGN_RATIO = 3
TINY = {
    "data": {"tokenizer": {"kind": "word"}, "batch_size": 2, "tgt_len": 4},
    "model": {"d_model": 16, "n_heads": 2, "d_inner": 32, "mem_len": 4, "memory": {"cmem_len": 4, "ratio": 3}},
    "train": {"steps": 8, "warmup_steps": 2, "log_every": 4, "eval_every": 8, "save_every": 8},
    "runtime": {"precision": "fp32"},
}


class Network(NamedTuple):
    """An architecture, and its changes of the configuration."""

    name: str
    arch: str
    changes: dict[str, Any]

    def changed(self, config: Config) -> Config:
        """Return the configuration of its training."""
        return config.replace(model__arch=self.arch, **self.changes)

    def steps(self, config: Config) -> int:
        """Return the training steps."""
        return self.changed(config).train.steps


class Row(NamedTuple):
    """A trained network; perplexities on the validation split, the last four per word, by frequency of the word."""

    name: str
    seed: int
    steps: int
    ppl: float  # per token
    bits_per_byte: float
    ppl_10000: float
    ppl_1000: float
    ppl_100: float
    ppl_rare: float


def design(config: Config, ratios: Sequence[int]) -> list[Network]:
    """Return the networks: those of one ratio first, then the variations."""
    model, steps = config.model, config.train.steps
    span = model.mem_len + model.memory.cmem_len
    reach = model.mem_len + DESIGN_RATIO * model.memory.cmem_len
    networks = [
        Network(SAME_SPAN, "(sf)*3", {"model__mem_len": span}),
        Network(SAME_REACH, "(sf)*3", {"model__mem_len": reach}),
        Network(LONGER, "(sf)*3", {"model__mem_len": span, "train__steps": round(LONGER_BY * steps)}),
        Network(WITHOUT, "(sf)*3", {}),
    ]
    for ratio in sorted(ratios, key=lambda each: each != DESIGN_RATIO):
        for function in FUNCTIONS:
            # A sparse design: the losses of dilated convolutions are compared at one ratio.
            several = function == "conv" or (function == "dilated_conv" and ratio == DESIGN_RATIO)
            for loss in LOSSES if several else LOSSES[:1]:
                networks.append(compressive(ratio, function, loss))
    for function in ("mean_pool", "conv"):
        other = compressive(DESIGN_RATIO, function, LOSSES[0])
        far = {**other.changes, "model__memory__distance": "tokens"}
        networks.append(Network(f"{other.name}, tokens", other.arch, far))
    return networks


def compressive(ratio: int, function: str, loss: str) -> Network:
    """Return a network of compressive attention, named after its loss where it has one."""
    name = ", ".join([function, *([loss] if function in TRAINED else []), f"{ratio}:1"])
    settings = {"ratio": ratio, "function": function, "loss": loss}
    return Network(name, "(cf)*3", {f"model__memory__{key}": value for key, value in settings.items()})


def train(config: Config, runs: Path, job: tuple[Network, int]) -> Row:
    """Train a network and measure it by word frequency."""
    network, seed = job
    folder = runs / f"{network.name.replace(', ', '-').replace(' ', '-').replace(':', '-')}-seed-{seed}"
    changed = network.changed(config).replace(runtime__seed=seed)
    run = train_once(retrain, changed, folder, Silent())
    summary = run.summary()
    eval_runs = open_runs([folder], EvalOptions())
    buckets = perplexity_by_frequency(eval_runs, "valid").set_index("occurrences")["ppl"]
    valid = summary.valid
    by_frequency = [float(buckets[name]) for name in BUCKETS]
    reached = valid.ppl, valid.bits_per_byte, *by_frequency
    return Row(network.name, seed, summary.steps, *reached)


def run_trainings(config: Config, plan: dict[str, Any], path: Path, runs: Path, workers: int) -> None:
    """Train the networks without a row of as many steps, `workers` of them at the same time."""
    done = {(row.name, row.seed, row.steps) for row in read_rows(path, Row)}
    wanted = [(network, seed) for seed in plan["seeds"] for network in design(config, plan["ratios"])]
    left = [(of, seed) for of, seed in wanted if (of.name, seed, of.steps(config)) not in done]
    train_missing(path, config, partial(train, config, runs), left, workers)


def tabulate(config: Config, plan: dict[str, Any], path: Path) -> list[dict[str, Any]]:
    """Return a row per network: means over seeds, and the gain over plain memory of the same span, paired by seed."""
    rows = read_rows(path, Row)
    of = {
        network.name: [row for row in rows if (row.name, row.steps) == (network.name, network.steps(config))]
        for network in design(config, plan["ratios"])
    }
    base = {row.seed: row.ppl for row in of[SAME_SPAN]}
    table = []
    for name, found in of.items():
        if not found:
            continue
        ppl = [row.ppl for row in found]
        line = {"memory": name, "steps": found[0].steps, "seeds": len(found), "ppl": f"{mean(ppl):.2f}"}
        line["± sd"] = f"{stdev(ppl):.2f}" if len(ppl) > 1 else "–"
        line["bits/byte"] = f"{mean(row.bits_per_byte for row in found):.4f}"
        gain = mean(100 * (1 - row.ppl / base[row.seed]) for row in found)
        line["better than plain, same span"] = f"{gain:+.2f} %"
        for key, bucket in zip(("ppl_10000", "ppl_1000", "ppl_100", "ppl_rare"), BUCKETS, strict=True):
            line[f"words {bucket}"] = f"{mean(getattr(row, key) for row in found):,.4g}"
        table.append(line)
    return table


def report(config: Config, plan: dict[str, Any], path: Path, parsed: Namespace) -> None:
    """Print and write the table."""
    table = tabulate(config, plan, path)
    harness.print_table("Validation perplexity per piece, and per word by its occurrences in the training text", table)
    device = harness.choose(parsed.device, config.runtime.precision)
    harness.write_result("compressive", device, {"precisions": [device.precision], "networks": table}, parsed)


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"], [*harness.OF_TRAININGS], runs=Path("runs/compressive"))
    parsed = parser.parse_args(arguments)
    config, plan = read_study(CONFIG, parsed, TINY, {"seeds": [1], "ratios": [DESIGN_RATIO]})
    require_corpus(config)
    path = harness.results_folder(parsed) / "compressive.csv"
    path.parent.mkdir(parents=True, exist_ok=True)
    if not parsed.report:
        run_trainings(config, plan, path, parsed.runs, parsed.workers)
    report(config, plan, path, parsed)


if __name__ == "__main__":
    harness.run(main)
