"""Small searches and trainings, and the figures of each that are committed and compared exactly.

Record them again, after a change that alters numbers on purpose, with: python tests/golden/recording.py [NAME ...]
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from conftest import make_corpus, small_config
from helpers.training_helpers import Stop, StopAfter

import parnas
from parnas.nas.search import search
from parnas.runs.run import Run
from parnas.training import device
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

FILE = Path(__file__).with_name("golden.json")
TARGET = {"search__cost__target": 0.65, "search__cost__metric": "macs"}
COMPRESSIVE = {"model__memory__cmem_len": 4, "model__memory__ratio": 2}
EVALUATIONS = {
    "evaluation.stride": 4,
    "evaluation.dynamic.lr": 1e-3,
    "evaluation.cache.size": 50,
}

Case = Callable[[Path, Path], dict[str, Any]]


def environment() -> dict[str, str]:
    """Return the version of torch and the kind of CPU, which change the last digits of a training."""
    return {
        "torch": torch.__version__.partition("+")[0],
        "cpu": torch.backends.cpu.get_cpu_capability(),
        "name": device._processor(),
    }


def describe_run(run: Run) -> dict[str, Any]:
    """Return the losses of all steps, pi, the SHA-256 of the final weights, and the derivation."""
    lines = run.metrics()
    model = parnas.load(run).model
    weights = hashlib.sha256()
    for parameter in model.parameters():  # in the order of the modules, so that a name may change
        weights.update(parameter.detach().contiguous().numpy().tobytes())
    golden: dict[str, Any] = {
        "train_loss": [line.loss for line in lines if line.split == "train"],
        "gradient_norm": [line.gradient_norm for line in lines if line.split == "train"],
        "valid_loss": [line.loss for line in lines if line.split == "valid"],
        "weights_sha256": weights.hexdigest(),
    }
    if run.kind() == "search":
        pi = [line.pi for line in run.pi_records()]
        golden |= {
            "pi": pi[-1],
            "tau": [line.tau for line in run.pi_records()],
            "pi_sha256": hashlib.sha256(json.dumps(pi).encode()).hexdigest(),
            "argmax": [line.arch for line in run.pi_records()],
            "derived": str(parnas.derive(run).architecture),
        }
    return golden


def trained(phase: Callable[..., Run], killed_after: int | None = None, **changes: object) -> Case:
    """A case: a search or retraining of the small configuration, stopped and resumed once where asked."""

    def record(corpus: Path, folder: Path) -> dict[str, Any]:
        config = small_config(corpus, train__log_every=1, **{"search__evolution_steps": None, **changes})
        if killed_after is None:
            return describe_run(phase(config, folder / "run", Silent()))
        try:
            phase(config, folder / "run", StopAfter(killed_after))
        except Stop:
            return describe_run(phase(config, folder / "run", Silent(), resume=True))
        raise AssertionError("the run was not stopped")

    return record


def evaluated(corpus: Path, folder: Path) -> dict[str, Any]:
    """Return the losses of one network by each evaluation protocol."""
    run = retrain(small_config(corpus, model__arch="scf", **COMPRESSIVE), folder / "run", Silent())
    table = parnas.evaluate(run, split="test", overrides=EVALUATIONS).table
    longer = parnas.evaluate(run, split="test", mem_len=24, cmem_len=6).table
    columns = ["ppl", "word_ppl", "bits_per_byte", "parameters", "multiply_adds_per_token"]
    rows = {column: [None if pd.isna(value) else float(value) for value in table[column]] for column in columns}
    return {"table": rows, "longer": longer["ppl"].tolist()}


CASES: dict[str, Case] = {
    "search-soft": trained(search, search__estimator="soft", **TARGET),
    "search-straight_through": trained(
        search, search__estimator="straight_through", search__alpha_split=0.3, search__alpha_every=2
    ),
    "search-gdas": trained(search, search__estimator="gdas", search__candidate_dropout=0.2, **TARGET),
    "search-single_path": trained(search, search__estimator="single_path", search__tau_schedule="learnable", **TARGET),
    "search-uniform": trained(search, search__estimator="uniform", search__alpha_every=2, **TARGET),
    "search-uniform-resumed": trained(
        search, 17, search__estimator="uniform", search__alpha_every=2, train__accumulate=2, **TARGET
    ),
    "search-compressive": trained(
        search, search__estimator="uniform", search__space=("s", "c", "f", "i"), search__alpha_every=1, **COMPRESSIVE
    ),
    "search-hybrid": trained(search, 11, search__space=("s", "s:window=5", "k", "r", "g", "i"), **TARGET),
    "retrain": trained(retrain, model__arch="sfs"),
    "retrain-hybrid": trained(retrain, model__arch="k g r s:window=5", train__optimizer="muon"),
    "retrain-recipe": trained(
        retrain,
        model__arch="ssff",
        model__cutoffs=(5, 12),
        model__norm="pre",
        data__shuffle="partial",
        train__optimizer="muon",
        train__average=0.5,
        train__label_smoothing=0.1,
        train__accumulate=2,
    ),
    "retrain-resumed": trained(retrain, 13, model__arch="s:heads=1 f:d_inner=8 f", train__optimizer="muon"),
    "retrain-compressive": trained(retrain, model__arch="scf", **COMPRESSIVE),
    "evaluate": evaluated,
}


def record(name: str) -> dict[str, Any]:
    """Run one case, in folders that are removed afterwards."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        corpus = make_corpus(Path(folder) / "corpus")
        return CASES[name](corpus, Path(folder))


def main(names: list[str]) -> None:
    """Write the figures of these cases, or of all."""
    golden = json.loads(FILE.read_text()) if names else {"cases": {}}
    golden["environment"] = environment()
    for name in names or CASES:
        golden["cases"][name] = json.loads(json.dumps(record(name)))
    FILE.write_text(json.dumps(golden, indent=1) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
