"""What the benchmarks that train networks share: configurations, a table with a row for each training, processes.

A finished training appends a row to a CSV file, and a later start of the benchmark trains only what is missing there.
"""

import csv
import os
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import as_completed
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import harness
from data import SMALL, generate

from parnas.config.loader import Config, dump_config, load_config
from parnas.config.yaml_file import read_yaml
from parnas.data.corpora import find_corpus
from parnas.data.datasets import DATASETS, SPLITS
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.runs.files import write_text
from parnas.runs.resolve import read_config
from parnas.runs.run import Run
from parnas.training.device import choose_device
from parnas.training.loaded_run import load
from parnas.training.perplexity import measure_loss

Job = TypeVar("Job")
Result = TypeVar("Result")
TINY = [
    *SMALL,
    *("model.cutoffs=[50]", "data.tokenizer.vocab_size=400", "runtime.threads=1"),
    *("search.blocks=2", "search.steps=8", "search.alpha_start_step=2", "search.warmup_steps=2"),
    *("train.steps=8", "train.warmup_steps=2", "train.log_every=4", "train.eval_every=4", "train.save_every=8"),
]


def read_study(
    path: Path, parsed: Namespace, tiny: Mapping[str, Mapping[str, Any]], tiny_plan: Mapping[str, Any]
) -> tuple[Config, dict[str, Any]]:
    """Return the configuration in a YAML file and the plan, a section named after the file, of a benchmark.

    With `--tiny`, the settings `tiny`, by section, and the values `tiny_plan` replace those of the file; `--corpus` and
    `--device` do so in any case.
    """
    settings = read_yaml(path.read_text(encoding="utf-8"), path.name)
    plan = settings.pop(path.stem)
    if parsed.size == "tiny":
        settings |= {section: settings.get(section, {}) | changes for section, changes in tiny.items()}
        plan |= tiny_plan
    if parsed.corpus is not None:
        settings["data"]["corpus"] = str(parsed.corpus)
    return read_config(settings, [("runtime.device", parsed.device)]), plan


def require_corpus(config: Config) -> None:
    """Raise `ParnasError` if the corpus would have to be downloaded, since a download must not be timed."""
    name, given = config.data.corpus, os.environ.get("PARNAS_DATA")
    if name in DATASETS and not (given and (Path(given).expanduser() / name).is_dir()):
        raise ParnasError(
            f"The corpus {name} is not downloaded by benchmarks. Put it into DIR/{name}/ and set PARNAS_DATA=DIR."
        )


def cut_corpus(name: str, share: float, folder: Path) -> Path:
    """Write a corpus with the first `share` of the training lines of another; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, text in find_corpus(name).splits.items():
        lines = b"".join(text.blocks()).decode("utf-8").splitlines(keepends=True)
        kept = round(share * len(lines)) if split == "train" else len(lines)
        write_text(folder / f"{split}.txt", "".join(islice(lines, kept)))
    return folder


def make_tiny(folder: Path) -> Path:
    """Write a generated text and a configuration that trains on it within a second; return the configuration's path."""
    corpus = folder / "corpus"
    corpus.mkdir(parents=True)
    for seed, split in enumerate(SPLITS):
        generate(corpus / f"{split}.txt", 20_000 if split == "train" else 2_000, seed)
    config = load_config(harness.PAR_CONFIG, [*TINY, f"data.corpus={corpus}"])
    write_text(folder / "tiny.yaml", dump_config(config))
    return folder / "tiny.yaml"


def read_rows(path: Path, kind: Callable[..., Any]) -> list[Any]:
    """Return the rows of a CSV file as named tuples of a kind, with its types; none if there is no file."""
    if not path.is_file():
        return []
    types = kind.__annotations__
    with path.open(newline="", encoding="utf-8") as file:
        return [kind(**{key: types[key](value) for key, value in line.items()}) for line in csv.DictReader(file)]


def append_rows(path: Path, rows: Sequence[Any]) -> None:
    """Append named tuples to a CSV file, after a header if it is new, and flush them to the disk."""
    with path.open("a", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        if file.tell() == 0:
            writer.writerow(rows[0]._fields)
        writer.writerows([f"{value:.6g}" if isinstance(value, float) else value for value in row] for row in rows)
        file.flush()
        os.fsync(file.fileno())


def measure_test(run: Run) -> float:
    """Return the perplexity per token of a finished training on the test split."""
    config, device = run.config(), choose_device(run.config().runtime)
    model, streams = load(run.folder).model.to(device.device), prepare(config.data)
    tokens, eos_id = streams.tokens("test"), streams.tokenizer.eos_id
    return measure_loss(model, tokens, eos_id, device, config.validation_shape).perplexity


def measure_missing(
    path: Path, kind: Callable[..., Any], cases: Sequence[tuple[Any, ...]], measure: Callable[..., Any] | None
) -> dict[tuple[Any, ...], Any]:
    """Return the rows of a table by case; a case is the values of a row's first fields.

    `measure(*case)` returns the row of a case that has none yet; `None` leaves such cases out.
    """
    rows = {row[: len(cases[0])]: row for row in read_rows(path, kind)}
    for case in cases if measure is not None else ():
        if case not in rows:
            rows[case] = measure(*case)
            append_rows(path, [rows[case]])
    return {case: rows[case] for case in cases if case in rows}


def train_missing(path: Path, config: Config, train: Callable[[Job], Any], jobs: Sequence[Job], workers: int) -> None:
    """Train networks in several processes; append the row that each training returns to a table, and print it."""
    prepare(config.data)  # once, not in every process
    for number, row in enumerate(work_off(train, jobs, workers), 1):
        append_rows(path, [row])
        values = (f"{value:.6g}" if isinstance(value, float) else str(value) for value in row)
        print(f"{number}/{len(jobs)}", ", ".join(values), flush=True)


def work_off(work: Callable[[Job], Result], jobs: Iterable[Job], workers: int) -> Iterator[Result]:
    """Yield the results of jobs as they finish, from `workers` processes; `work` and the jobs must be picklable.

    If a job fails, the others are finished before the first error is raised.
    """
    errors: list[BaseException] = []
    with harness.processes(workers) as pool:
        for future in as_completed([pool.submit(work, job) for job in jobs]):
            if error := future.exception():
                errors.append(error)
            else:
                yield future.result()
    if errors:
        raise errors[0]
