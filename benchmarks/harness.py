"""Timing, matrix speed of the machine, command line, result files and tables of all benchmarks.

Every benchmark is a script with `main(arguments)`; it prints a table and writes `benchmarks/results/NAME-DEVICE.json`.
Ratios count, not seconds: candidates take turns in one process, on the same inputs, and every repetition is kept.
"""

import argparse
import math
import multiprocessing
import re
import resource
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from tabulate import tabulate

from parnas.config.schema import RuntimeConfig
from parnas.errors import ParnasError
from parnas.runs.files import write_json
from parnas.runs.run import describe_machine, package_version
from parnas.training.device import Device, choose_device
from parnas.training.latency import time_in_turns

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
PAR_CONFIG = ROOT / "configs" / "wikitext2-par.yaml"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Name = TypeVar("Name", bound=Hashable)  # of a candidate
SIZES = {
    "short": "end within three minutes on two CPU cores",
    "tiny": "seconds, with shapes that say nothing about speed: for tests",
}
PRODUCT_SIZE = {"cpu": 2048, "cuda": 8192}
VOCABULARY, INTERLEAVED = 12_000, "sfsfsf"  # of that configuration
RSS_UNIT = 1 if sys.platform == "darwin" else 1024  # of getrusage's ru_maxrss: bytes there, KiB elsewhere
PRINTED: list[str] = []  # tables since the last result


def take_turns(
    candidates: Mapping[Name, Callable[[], object]],
    rounds: int,
    warm_up: int,
    device: torch.device | None = None,
) -> dict[Name, list[float]]:
    """Return the seconds of `rounds` calls of each candidate; the candidates alternate (A B A B ...).

    The first `warm_up` calls of each candidate are not timed. On a CUDA `device` a call ends when its kernels have
    finished. Raises `ParnasError` for fewer than one round.
    """
    if rounds < 1:
        raise ParnasError(f"{rounds} rounds measure nothing; give 1 or more.")
    times = time_in_turns(candidates, Device(device or torch.device("cpu"), "fp32"), rounds, warm_up)
    return {name: (ms / 1000).tolist() for name, ms in times.items()}


def matrix_rate(precision: torch.dtype, device: torch.device, size: int | None = None, rounds: int = 5) -> float:
    """Return the FLOP/s of a product of square matrices, best of `rounds`: the machine's limit in that precision.

    A product of n × n matrices counts 2 n³. Float32 is computed without TF32. `size` defaults to 2048 on a CPU and 8192
    on CUDA.
    """
    size = size or PRODUCT_SIZE[device.type]
    left, right = (torch.randn(size, size, device=device, dtype=precision) for _ in range(2))
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        with torch.no_grad():
            seconds = take_turns({"product": lambda: left @ right}, rounds, warm_up=2, device=device)["product"]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = tf32
    return 2 * size**3 / min(seconds)


def processes(workers: int = 1, calls: int | None = None) -> ProcessPoolExecutor:
    """Return an executor of `workers` processes; each is replaced by a new one after so many calls, never by default.

    They are forked from a process that has imported torch and parnas and has computed nothing.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "parnas.training.trainer"])
    return ProcessPoolExecutor(workers, mp_context=context, max_tasks_per_child=calls)


def peak_memory() -> int:
    """Return the peak resident memory of this process so far, in bytes.

    On Linux it is read from /proc, since the peak of getrusage includes that of the parent process.
    """
    status = Path("/proc/self/status")
    if status.is_file():
        (line,) = (line for line in status.read_text().splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * RSS_UNIT


def draw_ids(vocab_size: int, shape: int | tuple[int, ...], seed: int = 1) -> NDArray[np.int64]:
    """Return random token ids of a shape, with frequencies proportional to 1 / (id + 1) (Zipf's law)."""
    frequencies = 1 / np.arange(1, vocab_size + 1)
    return np.random.default_rng(seed).choice(vocab_size, size=shape, p=frequencies / frequencies.sum())


def choose(device: str, precision: str) -> Device:
    """Return the device of a name (auto, cpu, cuda, cuda:N) in a precision, fp32 or bf16."""
    return choose_device(RuntimeConfig.model_validate({"device": device, "precision": precision}))


def machine(device: Device, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return device, cores, threads, commit and versions of the usual packages and of `packages`."""
    described = {key: value for key, value in describe_machine().items() if key != "command_line"}  # it holds paths
    versions = {**described["versions"], **{name: package_version(name) for name in packages}}
    hardware = {key: value for key, value in device.describe().items() if key != "precision"}
    return {**described, **hardware, "versions": versions}


def device_slug(device: Device) -> str:
    """Return the name of a device for file names: `cpu`, or that of the GPU, such as `h200`."""
    if device.device.type == "cpu":
        return "cpu"
    name = str(device.describe()["device_name"]).lower().removeprefix("nvidia ")
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


OF_TRAININGS: dict[str, dict[str, Any]] = {
    "corpus": {"type": Path, "help": "a folder of text files in place of WikiText-2"},
    "workers": {"type": int, "default": 2, "help": "networks that are trained at the same time"},
    "runs": {"type": Path, "help": "folder of the run folders"},
    "report": {"action": "store_true", "help": "train nothing; print the table of the finished trainings"},
}
"""Options of benchmarks that train many networks."""


def make_parser(
    description: str | None, sizes: Sequence[str] = tuple(SIZES), options: Sequence[str] = (), **defaults: object
) -> argparse.ArgumentParser:
    """Return a parser with the arguments of all benchmarks and the named ones of `OF_TRAININGS`, with their defaults.

    `description` is a module's docstring, whose first line is shown.
    """
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    size = parser.add_mutually_exclusive_group()
    for name in sizes:
        size.add_argument(f"--{name}", dest="size", action="store_const", const=name, help=SIZES[name])
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or cuda:N")
    parser.add_argument("--out", type=Path, help="folder of the result file (default: benchmarks/results)")
    for name in options:
        parser.add_argument(f"--{name}", **OF_TRAININGS[name])
    parser.set_defaults(size="full", **defaults)
    return parser


def run(main: Callable[[], object]) -> None:
    """Call the `main` of a benchmark; a `ParnasError` ends the process with its message instead of a traceback."""
    try:
        main()
    except ParnasError as error:
        sys.exit(f"error: {error}")


def write_result(name: str, device: Device, payload: Mapping[str, Any], arguments: argparse.Namespace) -> Path | None:
    """Write `NAME-DEVICE.json` with the machine, the size of the benchmark and `payload`; return its path.

    `payload` names the precisions and holds every repetition. The tables printed since the last result are added, for
    docs/performance.md. A result of `--tiny` is no measurement and is written only if `--out` names a folder; otherwise
    `None` is returned.
    """
    if arguments.size == "tiny" and arguments.out is None:
        return None
    path = Path(arguments.out or RESULTS) / f"{name}-{device_slug(device)}.json"
    tables = [*PRINTED]
    PRINTED.clear()
    head = {"benchmark": name, "size": arguments.size, "machine": machine(device)}
    write_json(path, {**head, "tables": tables, **payload})
    print(f"Written to {path}")
    return path


def results_folder(parsed: argparse.Namespace) -> Path:
    """Return the folder of the files of a benchmark; raises `ParnasError` for `--tiny` without `--out`."""
    if parsed.size == "tiny" and parsed.out is None:
        raise ParnasError("--tiny needs --out, so that its figures do not overwrite measured ones.")
    return Path(parsed.out or RESULTS)


def print_table(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows as a Markdown table under a title; columns are the keys of all rows, in their first order."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column)) for column in columns] for row in rows]
    text = f"{title}\n\n{tabulate(cells, headers=columns, tablefmt='github', disable_numparse=True)}"
    print(f"\n{text}\n", flush=True)
    PRINTED.append(text)


def _cell(value: object) -> str:
    """Return a number with three significant digits, or as an integer from 1,000 on; a missing one is a dash."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def describe_seconds(seconds: Sequence[float]) -> dict[str, Any]:
    """Return all repetitions and their median, for a result."""
    return {"seconds": list(seconds), "median_seconds": median(seconds)}
