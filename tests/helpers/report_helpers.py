"""Run folders and comparisons for the tests of the report, written without training."""

import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np

from parnas.config.loader import Config
from parnas.config.yaml_file import to_yaml
from parnas.figures.report.page import write_report
from parnas.runs.run import METRICS, PI, Run

DIVISORS = {"tokens": 272204, "words": 217646, "bytes": 1121681}
EVIL = "<img src=x onerror=alert(1)>"


def write_lines(path: Path, lines: list[dict]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def pi_lines(count: int, blocks: int, candidates: int = 3) -> list[dict]:
    """Return pi that changes from uniform to certain, with another candidate in each block."""
    lines = []
    for n in range(1, count + 1):
        logits = np.zeros((blocks, candidates))
        logits[range(blocks), np.arange(blocks) % candidates] = 3 * (n - 1) / max(1, count - 1)
        pi = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
        lines.append({"step": 10 * n, "tau": 1 / n, "pi": pi.round(4).tolist()})
    return lines


def metric_lines(ppl: float, steps: int = 5, **more: object) -> list[dict]:
    train = [
        {"step": 10 * n, "split": "train", "loss": math.log(ppl * 4 / n), "ppl": ppl * 4 / n, **more}
        for n in range(1, steps + 1)
    ]
    valid = {"step": 10 * steps, "split": "valid", "loss": math.log(ppl), "ppl": ppl, "bits_per_byte": 1.5}
    return [*train, valid]


def make_search(
    folder: Path, blocks: int = 3, lines: int = 5, derived: str | None = "sfi", finished: bool = True, **config: object
) -> Run:
    run = Run(folder)
    run.create("search", Config().replace(search__blocks=blocks, **config), {"device_name": "a machine"})
    write_lines(folder / PI, pi_lines(lines, blocks, len(run.config().search.candidates)))
    write_lines(folder / METRICS, metric_lines(70.0, entropy=0.9))
    if derived:
        content = {"arch": derived, "warnings": ["block 2 is undecided: f leads by 0.010 only"]}
        (folder / "arch.yaml").write_text(to_yaml(content))
    if finished:
        write_summary(run, "search", derived or "sfi", 70.0)
    return run


def make_retraining(folder: Path, arch: str, ppl: float = 64.2, finished: bool = True, **config: object) -> Run:
    run = Run(folder)
    run.create("retrain", Config().replace(model__arch=arch, **config), {})
    write_lines(folder / METRICS, metric_lines(ppl))
    if finished:
        write_summary(run, "retrain", arch, ppl)
    return run


def write_summary(run: Run, kind: str, arch: str, ppl: float | None) -> None:
    valid = {"loss": 4.2, "ppl": ppl, "word_ppl": 180.5, "bits_per_byte": 1.4567, **DIVISORS}
    summary = {"kind": kind, "arch": arch, "steps": 5000, "seconds": 90.0, "parameters": 1234567, "valid": valid}
    if kind == "search":
        summary |= {"mixture": {**valid, "ppl": 99.9}, "argmax": valid}
    (run.folder / "summary.json").write_text(json.dumps(summary))


def row(name: str, arch: str, network: str = "discrete", **figures: object) -> dict:
    usual = {"ppl": 64.2, "word_ppl": 180.0, "bits_per_byte": 1.45, "latency_ms": 4.5, "parameters": 1000, **DIVISORS}
    return {"run": name, "network": network, "arch": arch, "tgt_len": 32, "mem_len": 16, **usual, **figures}


def write_comparison(folder: Path, rows: list[dict]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "comparison.json").write_text(json.dumps(rows))
    return folder


def make_all(place: Path, **config: object) -> Path:
    """Write a search, its derived network, the interleaved one and their comparison; return the comparison."""
    make_search(place / "search", **config)
    make_retraining(place / "derived", "sfi", 64.2)
    make_retraining(place / "interleaved", "sfs", 64.5)
    rows = [
        row("search", "sfi", "derived, in SuperNet", ppl=70.0, latency_ms=4.1, folder="../search", split="test"),
        row("derived", "sfi", ppl=64.2, latency_ms=4.1, folder="../derived", split="test"),
        row("interleaved", "sfs", ppl=64.5, latency_ms=4.0, folder="../interleaved", split="test"),
    ]
    return write_comparison(place / "comparison", rows)


class Page(HTMLParser):
    """A parsed page: its tags with their attributes, and its text."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.scripts: list[str] = []
        self.within = ""
        self.feed(self.source)
        self.text = re.sub(r"\s+", " ", " ".join(self.texts))

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self.within = tag

    def handle_endtag(self, tag: str) -> None:
        self.within = ""

    def handle_data(self, data: str) -> None:
        if self.within == "script":
            self.scripts.append(data)
        elif self.within != "style":
            self.texts.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        """Return the attributes of all tags of a name."""
        return [attributes for name, attributes in self.tags if name == tag]

    def data(self) -> list[dict]:
        """Return the data of the animations."""
        return [json.loads(script) for script in self.scripts[:-1]]


def page_of(*paths: Path) -> Page:
    """Write and parse the page of run folders and comparisons."""
    return Page(write_report(list(paths), paths[0].parent / "page"))
