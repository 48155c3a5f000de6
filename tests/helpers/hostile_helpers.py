"""Manipulated run folders, as an attacker may send them, and the commands that read run folders."""

import hashlib
import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path

from parnas.runs.run import Run
from parnas.training.checkpoints import list_checkpoints


def copy_run(run: Run, folder: Path, unfinished: bool = False) -> Run:
    """Copy a run; an unfinished copy lacks the summary and the last checkpoint, so that it can be resumed."""
    shutil.copytree(run.folder, folder)
    copy = Run(folder)
    if unfinished:
        (folder / "summary.json").unlink()
        shutil.rmtree(list_checkpoints(copy.checkpoints)[-1])
    return copy


def put_into_checkpoints(run: Run, name: str, content: bytes) -> None:
    """Replace a file of every checkpoint, with the right hash in the manifest."""
    for folder in (run.checkpoints, run.supernet):
        for checkpoint in list_checkpoints(folder):
            (checkpoint / name).write_bytes(content)
            manifest = json.loads((checkpoint / "manifest.json").read_text())
            manifest["sha256"][name] = hashlib.sha256(content).hexdigest()
            (checkpoint / "manifest.json").write_text(json.dumps(manifest))


# Every command that reads run folders, given a search; `given.yaml` is its configuration.
COMMANDS: dict[str, Callable[[Path], list[object]]] = {
    "derive": lambda run: ["derive", run],
    "rerank_top_k": lambda run: ["derive", run, "--rerank-top-k", 20],
    "evaluate": lambda run: ["evaluate", run, "--out", "comparison"],
    "plot": lambda run: ["plot", run],
    "report": lambda run: ["report", run],
    "cutoffs": lambda run: ["cutoffs", run],
    "resume": lambda run: ["search", "--resume", "--run", run],
    "resume by a file": lambda run: ["search", "given.yaml", "--resume", "--run", run],
    "retrain": lambda run: ["retrain", "given.yaml", "--arch", run, "--run", "new"],
    "baselines": lambda run: ["baselines", run, "--list"],
    "blackbox": lambda run: [
        *("blackbox", "--supernet", run, "--trials", 1, "--storage", "journal:study", "--study", "x", "--run", "found")
    ],
}


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[object, tuple[Path]]:
        return Path.touch, (self.target,)


def bomb(target: Path) -> bytes:
    """Return a pickle that creates a file if it is loaded without restrictions."""
    return pickle.dumps(Bomb(target))
