"""Measure the seconds until search and retraining reach a quality: `python benchmarks/time_to_quality.py`.

    python benchmarks/time_to_quality.py [--config configs/wikitext2-par.yaml] [--target 1.488] [--repeat N]

    python benchmarks/time_to_quality.py --one-run [--config configs/wikitext2-hybrid.yaml] [--target 1.44]

`search.py`, `derive.py` and `retrain.py` (of the string derived) run as processes of their own. Search and retraining
each begin with an empty cache, so that learning the tokenizer and encoding the text count. A time is the wall clock
from the start of a process until a validation at or below the target, in bits per byte, stands in its metrics.jsonl.

A search counts where its estimator is the default one, its temperature has reached `search.tau_end` and the training
of alpha spans at least half of its steps (every `alpha_every`-th is an architecture step, where alpha has a held-out
split): its quality is then that of the network that it ends with, and stands beside.

With `--one-run` the whole of `parnas pipeline --one-run` is timed, from an empty cache to the last picture.
"""

import math
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import harness
from data import failed, start
from trainings import make_tiny, require_corpus
from update_readme import TARGET

from parnas.config.loader import load_config
from parnas.config.schema import SearchConfig
from parnas.runs.run import METRICS, Run

POLL = 0.1  # seconds between two looks at metrics.jsonl
GOAL = 240.0  # seconds of each phase on two CPU cores
ONE_RUN_GOAL, ONE_RUN_TARGET = 300.0, 1.44  # seconds and bits per byte of a pipeline in one run
ONE_RUN_CONFIG = harness.ROOT / "configs" / "wikitext2-hybrid.yaml"
LEAST_ALPHA_SPAN = 0.5
TINY_TARGET = 100.0


class Watch:
    """Observer of a run folder: lines of metrics with the seconds since the process started at which they appeared."""

    def __init__(self, run: Run) -> None:
        self.run, self.started = run, time.perf_counter()
        self.data_seconds: float | None = None
        self.lines: list[dict[str, Any]] = []

    def passed(self) -> float:
        """Seconds since the start."""
        return time.perf_counter() - self.started

    def look(self) -> None:
        """Read the new lines of metrics."""
        now = self.passed()
        if self.data_seconds is None and (self.run.folder / "streams.json").is_file():
            self.data_seconds = now
        if (self.run.folder / METRICS).is_file():
            new = self.run.metrics()[len(self.lines) :]
            self.lines += [{"seconds": now, **line.to_dict()} for line in new]

    def of_split(self, split: str) -> list[dict[str, Any]]:
        """Return the lines of a split."""
        return [line for line in self.lines if line["split"] == split]


def time_phase(command: Sequence[str], run: Run, cache: Path, target: float, limit: float = math.inf) -> dict[str, Any]:
    """Run a command that trains into `run` to its end, or for `limit` seconds; raises `ParnasError` where it fails.

    `reached` is the first validation at or below the target, none where there is none. `data_seconds` are those until
    the text was prepared, `first_line_seconds` those until the first line of training, compilation included.
    """
    with tempfile.TemporaryFile() as output:
        watch = Watch(run)
        process = start([*command, "--run", str(run.folder)], cache, output.fileno())
        try:
            while process.poll() is None and watch.passed() < limit:
                time.sleep(POLL)
                watch.look()
            ended = process.poll() is not None
        finally:
            process.kill()
            process.wait()
        seconds = watch.passed()
        if ended and process.returncode:
            raise failed(list(command), output.seek(0) or output.read())
    watch.look()
    keys = ("step", "seconds", "bits_per_byte")
    validations = [{key: line[key] for key in keys} for line in watch.of_split("valid")]
    training = watch.of_split("train")
    return {
        "ended": ended,
        "command_seconds": seconds,
        "data_seconds": watch.data_seconds,
        "first_line_seconds": training[0]["seconds"] if training else None,
        "training_seconds": run.summary().seconds if ended else None,
        "tokens_per_second": training[-1]["tokens_per_s"] if training else None,
        "reached": next((each for each in validations if each["bits_per_byte"] <= target), None),
        "end": validations[-1] if validations else None,
        "validations": validations,
    }


def describe_search(run: Run) -> dict[str, Any]:
    """Return the values that decide whether a search counts."""
    search, last = run.config().search, run.pi_records()[-1]
    found = {
        "estimator": search.estimator,
        "estimator_is_default": search.estimator == SearchConfig().estimator,
        "tau_at_end": last.tau,
        "tau_reached_end": last.step == search.steps and math.isclose(last.tau, search.tau_end, rel_tol=1e-6),
        "alpha_span": (search.alpha_end_step - search.alpha_start_step) / search.steps,
    }
    enough = found["alpha_span"] >= LEAST_ALPHA_SPAN
    return {**found, "counts": found["estimator_is_default"] and found["tau_reached_end"] and enough}


def search(
    config: Path, folder: Path, target: float, overrides: Sequence[str] = (), limit: float = math.inf
) -> dict[str, Any]:
    """Run a search with an empty cache in `folder`/search for at most `limit` seconds, and derive its network."""
    run = Run(folder / "search")
    command = [str(harness.ROOT / "search.py"), str(config), *overrides]
    phase = time_phase(command, run, folder / "cache-search", target, limit)
    derive = [str(harness.ROOT / "derive.py"), str(run.folder)]
    with tempfile.TemporaryFile() as output:
        if start(derive, folder / "cache-search", output.fileno()).wait():
            raise failed(derive, output.seek(0) or output.read())
    return {**phase, **describe_search(run), "derived": run.derivation().arch}


def retrain(
    config: Path, folder: Path, arch: str, target: float, overrides: Sequence[str] = (), limit: float = math.inf
) -> dict[str, Any]:
    """Retrain an architecture with an empty cache in `folder`/retrain for at most `limit` seconds."""
    command = [str(harness.ROOT / "retrain.py"), str(config), "--arch", arch, *overrides]
    phase = time_phase(command, Run(folder / "retrain"), folder / "cache-retrain", target, limit)
    return {**phase, "arch": arch}


def one_run(config: Path, folder: Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Run a pipeline in one run with an empty cache in `folder`, without baselines; return its time and its result."""
    place = folder / "one-run"
    command = ["-m", "parnas", "pipeline", str(config), "--one-run", "--baselines", "", "--run", str(place), *overrides]
    began = time.perf_counter()
    with tempfile.TemporaryFile() as output:
        if start(command, folder / "cache", output.fileno()).wait():
            raise failed(command, output.seek(0) or output.read())
    seconds, found = time.perf_counter() - began, Run(place / "derived").summary()
    return {
        "command_seconds": seconds,
        "search_seconds": Run(place / "search").summary().seconds,
        "training_seconds": found.seconds,
        "arch": found.arch,
        "parameters": found.parameters,
        "bits_per_byte": found.valid.bits_per_byte,
    }


def main_of_one_run(parsed: Namespace, config: Path, target: float, overrides: Sequence[str], folder: Path) -> None:
    """Time pipelines in one run, and write the result."""
    settings, found = load_config(config, overrides), []
    require_corpus(settings)
    for number in range(parsed.repeat):
        place = folder / str(number)
        place.mkdir(parents=True)
        found.append(one_run(config, place, overrides))
    harness.print_table("A pipeline in one run, from an empty cache", found)
    device = harness.choose(parsed.device, settings.runtime.precision)
    payload = {"config": settings.model_dump(mode="json"), "target_bits_per_byte": target, "repetitions": found}
    result = {"precisions": [device.precision], "goal_seconds": ONE_RUN_GOAL, **payload}
    harness.write_result("time_to_quality_one_run", device, result, parsed)


def judge(repetition: Mapping[str, Mapping[str, Any]]) -> dict[str, bool]:
    """Whether each phase reached the target in time; a search that does not count did not."""
    in_time = {
        name: phase["reached"] is not None and phase["reached"]["seconds"] < GOAL for name, phase in repetition.items()
    }
    return {**in_time, "search": in_time["search"] and repetition["search"]["counts"]}


def print_repetitions(repetitions: Sequence[Mapping[str, Any]], target: float) -> None:
    """One row for each phase of each repetition."""
    rows = []
    for number, repetition in enumerate(repetitions, 1):
        met = judge(repetition)
        for name, phase in repetition.items():
            reached = phase["reached"] or {}
            rows.append(
                {
                    "": f"{name} {number}",
                    "s to target": reached.get("seconds"),
                    "step": reached.get("step"),
                    "bits/byte": _digits(reached.get("bits_per_byte")),
                    f"within {GOAL:.0f} s": met[name],
                    "s to last validation": phase["end"]["seconds"],
                    "bits/byte at end": _digits(phase["end"]["bits_per_byte"]),
                    "s of command": phase["command_seconds"],
                    "s until text is ready": phase["data_seconds"],
                    "network": phase.get("derived") or phase["arch"],
                }
            )
    harness.print_table(f"From an empty cache to {target} bits per byte", rows)
    for number, repetition in enumerate(repetitions, 1):
        of = repetition["search"]
        print(
            f"search {number} {'counts' if of['counts'] else 'does NOT count'}: estimator {of['estimator']} (default: "
            f"{of['estimator_is_default']}), tau {of['tau_at_end']:.4g} at the end (tau_end: {of['tau_reached_end']}), "
            f"alpha's training spans {of['alpha_span']:.0%} of the steps"
        )


def _digits(bits: float | None) -> str | None:
    return None if bits is None else f"{bits:.4f}"


def main(arguments: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = harness.make_parser(__doc__, ["tiny"])
    parser.add_argument("--config", type=Path, help="configuration of all phases")
    parser.add_argument("--one-run", action="store_true", help="time parnas pipeline --one-run")
    parser.add_argument("--target", type=float, help="bits per byte on the validation split")
    parser.add_argument("--runs", type=Path, help="folder in which the runs stay: N/search and N/retrain")
    parser.add_argument("--repeat", type=int, default=1, help="how often all of it is measured")
    parsed: Namespace = parser.parse_args(arguments)
    default = (ONE_RUN_CONFIG, ONE_RUN_TARGET) if parsed.one_run else (harness.PAR_CONFIG, TARGET)
    target = TINY_TARGET if parsed.size == "tiny" else parsed.target or default[1]
    overrides = [] if parsed.device == "auto" else [f"runtime.device={parsed.device}"]
    repetitions = []
    with tempfile.TemporaryDirectory(prefix="parnas-quality-") as name:
        config = make_tiny(Path(name)) if parsed.size == "tiny" else parsed.config or default[0]
        if parsed.one_run:
            main_of_one_run(parsed, config, target, overrides, parsed.runs or Path(name))
            return
        settings = load_config(config, overrides)
        require_corpus(settings)
        for number in range(parsed.repeat):
            folder = (parsed.runs or Path(name)) / str(number)
            folder.mkdir(parents=True)
            found = search(config, folder, target, overrides)
            retrained = retrain(config, folder, found["derived"], target, overrides)
            repetitions.append({"search": found, "retrain": retrained})
    print_repetitions(repetitions, target)
    device = harness.choose(parsed.device, settings.runtime.precision)
    payload = {
        "precisions": [device.precision],
        "config": settings.model_dump(mode="json"),
        "target_bits_per_byte": target,
        "goal_seconds": GOAL,
        "repetitions": [{**each, "within_goal": judge(each)} for each in repetitions],
    }
    harness.write_result("time_to_quality", device, payload, parsed)


if __name__ == "__main__":
    harness.run(main)
