"""Compare two processes of one thread each with one process of two threads: `python benchmarks/ranks.py`.

Both train on generated text with the shapes of configs/wikitext2-par.yaml and the same rows in each step: a search with
the default estimator, then the interleaved network. They alternate. The speed of a round is the median of the lines of
metrics.jsonl without the first. The efficiency is the speed of two processes divided by that of one. The gradients that
are averaged in each step are counted in MB: those of all weights, with zeros for candidates that did not run.
"""

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import harness
import numpy as np

from parnas.architecture import Architecture
from parnas.config.loader import Config, dump_config, load_config
from parnas.errors import ParnasError
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.run import Run

ARCH = "interleaved-6"


class Plan(NamedTuple):
    """Number of rounds and of steps, and settings."""

    rounds: int
    steps: int
    overrides: Mapping[str, Any]


PLANS = {
    "tiny": Plan(1, 6, {"model__d_model": 16, "model__n_heads": 2, "model__d_inner": 32, "train__log_every": 2}),
    "short": Plan(2, 60, {}),
    "full": Plan(3, 100, {}),
}
PHASES = ("search", "retrain")
WAYS = {"one process, two threads": (1, 2), "two processes, one thread each": (2, 1)}


def make_config(plan: Plan, folder: Path) -> Config:
    """Write a text with Zipf-distributed words; return a configuration that trains on it, without validation."""
    corpus = folder / "corpus"
    corpus.mkdir()
    for split, size in (("train", 400_000), ("valid", 2_000), ("test", 2_000)):
        ids = harness.draw_ids(harness.VOCABULARY, size).reshape(-1, 20)
        (corpus / f"{split}.txt").write_text("\n".join(" ".join(f"w{n}" for n in line) for line in np.asarray(ids)))
    settings = {
        **{"data__corpus": str(corpus), "data__tokenizer__kind": "word", "data__tokenizer__vocab_size": None},
        **{"data__tokenizer__lowercase": False, "data__tokenizer__user_symbols": (), "model__arch": ARCH},
        **{"search__cost__target": None, "search__steps": 2 * plan.steps, "train__steps": plan.steps},
        **{"search__alpha_start_step": 1, "search__uniform_fraction": 1.0, "search__rerank_top_k": 0},
        **{"train__log_every": 10, "train__eval_every": 10**6, "train__save_every": 10**6, "runtime__threads": None},
        **{"runtime__device": "cpu", "runtime__precision": "bf16"},
    }
    return load_config(harness.PAR_CONFIG).replace(**{**settings, **plan.overrides})


def train(phase: str, config: Path, folder: Path, processes: int, threads: int) -> float:
    """Run one training; return its tokens per second."""
    script = [str(harness.ROOT / f"{phase}.py"), str(config), f"runtime.threads={threads}", "--run", str(folder)]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "--"]
    command = [sys.executable, *(launcher if processes > 1 else []), *script]
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(command, env=environment, check=False, capture_output=True, text=True)
    if done.returncode:
        raise ParnasError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr[-2000:]}")
    lines = [line.tokens_per_s for line in Run(folder).metrics() if line.split == "train"]
    return median(lines[1:])


def sent_bytes(config: Config) -> dict[str, int]:
    """Return the bytes of gradients that are averaged in a step, 4 for each weight, by phase."""
    networks = {
        "search": SuperNet.from_config(config.model, config.search, harness.VOCABULARY),
        "retrain": TransformerXL.build(config.model, Architecture.parse(ARCH), harness.VOCABULARY),
    }
    return {phase: 4 * sum(weight.numel() for weight in network.parameters()) for phase, network in networks.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the table and write the result."""
    given = harness.make_parser(__doc__).parse_args(arguments)
    plan, device = PLANS[given.size], harness.choose("cpu", "bf16")
    with tempfile.TemporaryDirectory(prefix="parnas-ranks-") as name:
        folder = Path(name)
        config = make_config(plan, folder)
        path = folder / "config.yaml"
        path.write_text(dump_config(config))
        speeds: dict[str, dict[str, list[float]]] = {phase: {way: [] for way in WAYS} for phase in PHASES}
        for number in range(plan.rounds):
            for phase, by_way in speeds.items():
                for index, (way, (processes, threads)) in enumerate(WAYS.items()):
                    run = folder / f"{phase}-{number}-{index}"
                    by_way[way].append(train(phase, path, run, processes, threads))
    rows = []
    for phase, by_way in speeds.items():
        one, two = (median(by_way[way]) for way in WAYS)
        efficiency = median(b / a for a, b in zip(*by_way.values(), strict=True))
        sent = sent_bytes(config)[phase]
        rows.append(
            {"training": phase, "one process, tokens/s": one, "two processes, tokens/s": two}
            | {"two over one": efficiency, "gradients, MB": sent / 1e6}
        )
    harness.print_table("Two processes with a thread each beside one with two threads", rows)
    harness.write_result("ranks", device, {"precision": "bf16", "rows": rows, "tokens_per_s": speeds}, given)


if __name__ == "__main__":
    harness.run(main)
