"""Measure tokenizing (speed against sentencepiece alone, memory) and the seconds until the first training step.

    python benchmarks/data.py [--short | --tiny]

The text is WikiText-2 if it is in `$PARNAS_DATA/wikitext-2` or in the cache, otherwise a generated one; the result says
which. Caches and runs are in a temporary folder.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import harness
import numpy as np
from sentencepiece import SentencePieceProcessor

from parnas.config.loader import load_config
from parnas.data.cache import RECENT_NS, cache_dir
from parnas.data.corpora import find_corpus
from parnas.data.datasets import SPLITS
from parnas.data.streams import encode_file
from parnas.data.text import TextSlice
from parnas.data.tokenizers import load_tokenizer, train_tokenizer
from parnas.errors import ParnasError
from parnas.runs.files import read_json

COMMANDS = ("search", "retrain", "derive", "evaluate")
WORK = {
    "parnas": "read the file, decode, encode on all cores, number by frequency, count words, lines, bytes and unknown "
    "tokens, write the ids",
    "sentencepiece, numpy": "SentencePieceProcessor.encode(lines, return_type='numpy', num_threads=cores), the fastest "
    "way to call it; lines are in memory, cut and decoded",
    "sentencepiece, lists": "the same with out_type=int, as it is mostly called",
}
# The peak of getrusage includes the memory of the parent when it forked, so a small process starts the command.
LAUNCHER = """
import json, resource, subprocess, sys, time
started = time.perf_counter()
code = subprocess.call(sys.argv[1:], stdout=sys.stderr)
seconds = time.perf_counter() - started
print(json.dumps([code, seconds, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss]))
"""
SMALL = ["data.batch_size=4", "data.tgt_len=8", "model.d_model=16", "model.n_heads=2", "model.d_inner=32"]


class Plan(NamedTuple):
    """Bytes of the texts and of a generated corpus, repetitions, vocabulary size, and settings of commands."""

    encoded_bytes: int
    memory_bytes: int
    generated_bytes: int
    rounds: int
    vocab_size: int
    overrides: list[str]


PLANS = {
    "full": Plan(40_000_000, 500_000_000, 13_000_000, 5, 12_000, []),
    "short": Plan(20_000_000, 100_000_000, 13_000_000, 3, 12_000, []),
    "tiny": Plan(300_000, 400_000, 200_000, 1, 500, [*SMALL, "model.cutoffs=[50]", "search.blocks=2"]),
}


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parsed = harness.make_parser(__doc__).parse_args(arguments)
    plan, device = PLANS[parsed.size], harness.choose(parsed.device, "fp32")
    with tempfile.TemporaryDirectory(prefix="parnas-data-") as name:
        folder = Path(name)
        corpus, source = make_corpus(folder / "corpus", plan, generated=parsed.size == "tiny")
        text = repeat(corpus / "train.txt", folder / "text.txt", plan.encoded_bytes)
        large = repeat(corpus / "train.txt", folder / "large.txt", plan.memory_bytes)
        payload = {
            "precisions": ["fp32"],
            "text": source,
            "work": WORK,
            "encoding": measure_encoding(text, folder, plan),
            "memory": measure_memory(large, folder / "memory", plan),
            "start": measure_start(corpus, folder / "start", plan, parsed.device),
        }
    print_tables(payload)
    harness.write_result("data", device, payload, parsed)


def make_corpus(folder: Path, plan: Plan, generated: bool) -> tuple[Path, str]:
    """Fill a folder with train.txt, valid.txt and test.txt; return it and a description of the text."""
    folder.mkdir(parents=True)
    given = Path(os.environ.get("PARNAS_DATA", folder)) / "wikitext-2"
    if not generated and (given.is_dir() or (cache_dir() / "corpora" / "wikitext-2").is_dir()):
        for split, text in find_corpus("wikitext-2").splits.items():
            (folder / f"{split}.txt").write_bytes(text.path.read_bytes())
        return folder, "wikitext-2"
    for seed, split in enumerate(SPLITS):
        generate(folder / f"{split}.txt", plan.generated_bytes // (1 if split == "train" else 10), seed)
    return folder, "generated: made-up words, frequencies as 1/rank"


def generate(path: Path, size: int, seed: int) -> None:
    """Write at least `size` bytes of lines of made-up words."""
    words_of, draw = np.random.default_rng(0), np.random.default_rng(seed)  # the same words, other texts
    letters = np.array(list("etaoinshrdlucmfwypvbgk"))
    words = np.array(["".join(words_of.choice(letters, length)) for length in words_of.integers(2, 10, 20_000)])
    shares = 1 / np.arange(1, len(words) + 1)
    written = 0
    with path.open("w", encoding="utf-8") as file:
        while written < size:
            line = " ".join(draw.choice(words, draw.integers(5, 80), p=shares / shares.sum()))
            written += file.write(f" {line} . \n")


def repeat(source: Path, target: Path, size: int) -> Path:
    """Write copies of a text to a file until it has `size` bytes; return the file."""
    content = source.read_bytes()
    with target.open("wb") as file:
        while file.tell() < size:
            file.write(content)
    return target


def measure_encoding(path: Path, folder: Path, plan: Plan) -> dict[str, Any]:
    """Return seconds and MB/s of parnas, from file to file, and of sentencepiece in memory, measured in turns."""
    text, saved, target = TextSlice.whole(path), folder / "tokenizer", folder / "text.bin"
    saved.mkdir()
    config = load_config(harness.PAR_CONFIG, [f"data.tokenizer.vocab_size={plan.vocab_size}"])
    train_tokenizer(config.data.tokenizer, text).save(saved)
    tokenizer = load_tokenizer(saved)
    processor = SentencePieceProcessor(model_file=str(saved / "sentencepiece.model"))
    lines = path.read_text(encoding="utf-8").split("\n")
    cores = os.cpu_count()
    candidates: dict[str, Callable[[], object]] = {
        "parnas": lambda: encode_file(text, tokenizer, target, "<u2"),
        "sentencepiece, numpy": lambda: processor.encode(lines, return_type="numpy", num_threads=cores),
        "sentencepiece, lists": lambda: processor.encode(lines, out_type=int, num_threads=cores),
    }
    seconds = harness.take_turns(candidates, plan.rounds, warm_up=1)
    pieces = np.array(read_json(saved / "tokenizer.json")["pieces"])
    ids = np.fromfile(target, "<u2")
    if not np.array_equal(
        pieces[ids[ids != tokenizer.eos_id]], np.concatenate(processor.encode(lines, return_type="numpy"))
    ):
        raise ParnasError("parnas and sentencepiece give other pieces for the same text: this is not the same work.")
    described = {name: harness.describe_seconds(of) for name, of in seconds.items()}
    rates = {name: {"MB_per_s": text.bytes / 1e6 / of["median_seconds"]} for name, of in described.items()}
    ratios = {
        f"share_of {name}": median(other / ours for ours, other in zip(seconds["parnas"], of, strict=True))
        for name, of in seconds.items()
        if name != "parnas"
    }
    return {
        "bytes": text.bytes,
        "tokens": len(ids),
        "candidates": {name: described[name] | rates[name] for name in described},
        **ratios,
    }


def measure_memory(path: Path, folder: Path, plan: Plan) -> dict[str, Any]:
    """Return seconds and peak memory of `parnas data` on a large text: without a cache, then twice with one."""
    settings = [f"data.corpus={path}", f"data.tokenizer.vocab_size={plan.vocab_size}"]
    command = ["-m", "parnas", "data", str(harness.PAR_CONFIG), *settings]
    # Facts about a file are cached only when it is older than this.
    time.sleep(max(0, path.stat().st_mtime + 1.1 * RECENT_NS / 1e9 - time.time()))
    names = ("cold", "cached", "cached again")
    return {"bytes": path.stat().st_size, **{name: run_whole(command, folder / "cache") for name in names}}


def run_whole(command: list[str], cache: Path) -> dict[str, float]:
    """Run a Python command; return its seconds and the peak memory of its largest process in MB."""
    with tempfile.TemporaryFile() as output:
        launcher = start(["-c", LAUNCHER, sys.executable, *command], cache, output.fileno(), subprocess.PIPE)
        report, _ = launcher.communicate()
        code, seconds, peak = json.loads(report)
        if code:
            raise failed(command, output.seek(0) or output.read())
    return {"seconds": seconds, "peak_MB": peak * harness.RSS_UNIT / 1e6}


def measure_start(corpus: Path, folder: Path, plan: Plan, device: str) -> dict[str, Any]:
    """Return the seconds of `--help` of each command, and until the first step of search and retrain."""
    helps = {
        f"{name} --help": lambda name=name: run_whole([str(harness.ROOT / f"{name}.py"), "--help"], folder / "help")
        for name in COMMANDS
    }
    settings = [str(harness.PAR_CONFIG), f"data.corpus={corpus}", f"data.tokenizer.vocab_size={plan.vocab_size}"]
    settings += ["train.log_every=1", *plan.overrides, f"runtime.device={device}"]
    commands = {
        "search": [str(harness.ROOT / "search.py"), *settings],
        "retrain": [str(harness.ROOT / "retrain.py"), *settings, "--arch", "sf"],
    }
    steps: dict[str, list[float]] = {f"{name}, {state}": [] for name in commands for state in ("cold", "cached")}
    for number in range(plan.rounds):
        for name, command in commands.items():
            for state in ("cold", "cached"):
                run = folder / f"{name}-{state}-{number}"
                steps[f"{name}, {state}"].append(first_step(command, run, folder / f"cache-{name}-{number}"))
    described = {name: harness.describe_seconds(of) for name, of in steps.items()}
    helped = {name: harness.describe_seconds(of) for name, of in harness.take_turns(helps, plan.rounds, 1).items()}
    return {"help": helped, "first_step": described}


def first_step(command: list[str], run: Path, cache: Path) -> float:
    """Return the seconds until the first line of metrics.jsonl, which follows the first step; then end the run."""
    metrics = run / "metrics.jsonl"
    started = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        process = start([*command, "--run", str(run)], cache, output.fileno())
        try:
            while not (metrics.is_file() and metrics.stat().st_size):
                if process.poll() is not None:
                    raise failed(command, output.seek(0) or output.read())
                time.sleep(0.005)
            return time.perf_counter() - started
        finally:
            process.kill()
            process.wait()


def start(command: list[str], cache: Path, output: int, stdout: int | None = None) -> "subprocess.Popen[bytes]":
    """Start a Python process with its own cache; `output` is the descriptor for stderr, and for stdout by default."""
    path = os.pathsep.join(filter(None, [str(harness.ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PARNAS_CACHE": str(cache), "PYTHONPATH": path}
    return subprocess.Popen([sys.executable, *command], env=environment, stdout=stdout or output, stderr=output)


def failed(command: list[str], output: bytes) -> ParnasError:
    """Return the error of a command that failed."""
    return ParnasError(f"{' '.join(command)} failed:\n{output.decode(errors='replace')[-2000:]}")


def print_tables(payload: Mapping[str, Any]) -> None:
    """Print the results as tables."""
    encoding, memory = payload["encoding"], payload["memory"]
    harness.print_table(
        f"{encoding['bytes']:,} bytes to {encoding['tokens']:,} ids ({payload['text']})",
        [
            {"": name, "MB/s": of["MB_per_s"], "parnas' speed is": encoding.get(f"share_of {name}")}
            for name, of in encoding["candidates"].items()
        ],
    )
    harness.print_table(
        f"parnas data, {memory['bytes']:,} bytes",
        [
            {"cache": name, "s": of["seconds"], "peak MB": of["peak_MB"]}
            for name, of in memory.items()
            if name != "bytes"
        ],
    )
    started = {**payload["start"]["help"], **payload["start"]["first_step"]}
    harness.print_table(
        "Time from the start of a command to the end of its --help or to its first training step",
        [{"command": name, "s": of["median_seconds"], "largest": max(of["seconds"])} for name, of in started.items()],
    )


if __name__ == "__main__":
    harness.run(main)
