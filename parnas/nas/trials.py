"""What a black-box search asks of a network, and what it makes of the answers; knows nothing of the optimiser."""

import csv
import io
import math
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from parnas.architecture import Architecture, drop_identity
from parnas.config import Config
from parnas.data.streams import TokenStreams, prepare
from parnas.errors import ParnasError
from parnas.files import read_json, write_text
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.cost import Costs, costs_of_run, find_costs
from parnas.nas.inherited import measure_inherited
from parnas.run import Run
from parnas.training.checkpoint import MANIFEST
from parnas.training.device import choose_device
from parnas.training.phases import flatten, load, refuse_other_text, resolve_corpus, resolve_cutoffs
from parnas.training.repeated import reached_perplexity
from parnas.training.reporter import Reporter, Silent
from parnas.training.retrain import retrain
from parnas.yaml_text import to_yaml

# Settings that may differ between the workers of a study, since no value of a trial depends on them.
FREE = {"data.corpus", "model.arch", "runtime.device", "runtime.threads", "runtime.compile"}
FREE |= {"train.log_every", "train.eval_every", "train.save_every"}
FREE_SECTIONS = ("search.", "evaluation.")
BOUND = ("search.space", "search.blocks")  # all the same


class Finding(NamedTuple):
    """A network that a study has evaluated."""

    network: str  # its layers without identity
    valid_ppl: float  # per token of the validation split
    cost: float  # of the blocks, in the unit of search.cost.metric
    trial: int
    source: str  # trained, or inherited from a SuperNet


@dataclass(frozen=True)
class Task:
    """What every trial of a study has in common: the space, the two objectives and all that their values depend on."""

    candidates: tuple[tuple[str, ...], ...]  # of each block
    costs: Costs
    perplexity: Callable[[int, Architecture], float]  # of a trial's number and its string
    source: str
    terms: Mapping[str, Any]  # equal for all workers of a study
    config: Config
    vocab_size: int


def name_network(layers: Sequence[str]) -> str:
    """The layers without identity, equal for strings of one network; empty where all are identity."""
    kept = drop_identity(layers)
    return str(Architecture(kept)) if kept else ""


# The two kinds of trial.


def training_task(config: Config, steps: int, keep: Path | None, reporter: Reporter) -> Task:
    """Trials train from scratch for `steps` steps; run folders are thrown away, or kept as `keep/trial-NUMBER`."""
    config, streams = resolve(config, reporter)
    config = config.replace(train__steps=steps)
    costs = find_costs(config, config.search.cost.metric, reporter)
    return make_task(config, streams, "trained", {}, partial(train_briefly, config, keep, reporter), costs)


def train_briefly(
    config: Config, keep: Path | None, reporter: Reporter, number: int, architecture: Architecture
) -> float:
    """Validation perplexity of a network after its training; infinite, with a note, where that diverges."""
    with trial_folder(keep, number) as folder:
        changed = config.replace(model__arch=str(architecture.canonical()))
        return reached_perplexity(partial(retrain, changed, folder, Silent()), reporter)


@contextmanager
def trial_folder(keep: Path | None, number: int) -> Iterator[Path]:
    """Where a trial trains."""
    if keep is not None:
        yield keep / f"trial-{number}"
        return
    with tempfile.TemporaryDirectory(prefix="parnas-trial-") as folder:
        yield Path(folder) / "run"


def inheriting_task(config: Config, supernet: Path, reporter: Reporter) -> Task:
    """Trials take the weights of a search for their layers, evenly trained where it kept such.

    Raises `ParnasError` where the run is no search, or another text, network or space than the configuration's.
    """
    run, loaded = Run(supernet), load(supernet, even=True, by_pi=True)
    if not isinstance(loaded.model, SuperNet):
        raise ParnasError(f"{supernet} is a {run.kind()} and has no SuperNet; give the folder of a search.")
    config, streams = resolve(config, reporter)
    refuse_other_supernet(run, config)
    refuse_other_text(streams.header, loaded.header, str(supernet))
    loss_of = measure_inherited(loaded.model, config, streams, streams.tokens("valid"))

    def perplexity(_: int, architecture: Architecture) -> float:
        return loss_of(architecture).perplexity

    weights = read_json(loaded.checkpoint / MANIFEST)["sha256"]
    metric, table = config.search.cost.metric, config.search.cost.table
    own = table == run.config().search.cost.table
    costs = costs_of_run(run.folder, config, metric, reporter) if own else find_costs(config, metric, reporter)
    return make_task(config, streams, "inherited", {"supernet's weights": weights}, perplexity, costs)


def refuse_other_supernet(run: Run, config: Config) -> None:
    """Raise where the SuperNet is not the one that the configuration describes."""
    theirs, ours = bound_settings(run.config()), bound_settings(config)
    keys = [key for key in ours if key.startswith(("data.", "model.", "search."))]
    if changed := [f"  - {key}: {theirs[key]} there, {ours[key]} here" for key in keys if theirs[key] != ours[key]]:
        raise ParnasError(
            f"The SuperNet of {run.folder} has another configuration; leave CONFIG out to take its own:\n"
            + "\n".join(changed)
        )


def resolve(config: Config, reporter: Reporter) -> tuple[Config, TokenStreams]:
    """The configuration as a training would keep it, and the text."""
    config = resolve_corpus(config)
    streams = prepare(config.data, reporter.note)
    return resolve_cutoffs(config, streams), streams


def make_task(
    config: Config,
    streams: TokenStreams,
    source: str,
    more: Mapping[str, Any],
    perplexity: Callable[..., float],
    costs: Costs,
) -> Task:
    """A task with its terms: the settings that values depend on, the text, the costs, and `more`."""
    terms = {"trials": source, "text": streams.header.fingerprint, **bound_settings(config), **more}
    terms |= {"metric": costs.metric, "costs": dict(costs.of)}  # latencies of another machine are other costs
    terms["runtime.precision"] = choose_device(config.runtime).precision  # `auto` may differ between machines
    if source == "inherited":
        terms = {key: value for key, value in terms.items() if not key.startswith("train.")}
    vocab_size = streams.tokenizer.vocab_size
    return Task(config.search.block_spaces, costs, perplexity, source, terms, config, vocab_size)


def bound_settings(config: Config) -> dict[str, Any]:
    """The settings that a trial's values depend on, by dotted key."""
    flat = flatten(config.model_dump(mode="json"))
    return {
        key: value
        for key, value in flat.items()
        if key in BOUND or (key not in FREE and not key.startswith(FREE_SECTIONS))
    }


# What came out.


def pareto_front(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that no other beats in one of perplexity and cost without losing in the other, cheapest first."""
    front: list[Finding] = []
    for finding in sorted(findings, key=lambda each: (each.cost, each.valid_ppl, each.trial)):
        last = front[-1] if front else None
        if last is None or finding.valid_ppl < last.valid_ppl or same_values(finding, last):
            front.append(finding)
    return front


def same_values(one: Finding, other: Finding) -> bool:
    """Whether both objectives are equal, so that neither beats the other."""
    return (one.valid_ppl, one.cost) == (other.valid_ppl, other.cost)


def best_within(findings: Sequence[Finding], bound: float | None) -> Finding | None:
    """The least perplexity among findings that cost at most `bound`, the cheaper of equal ones; none if none does."""
    affordable = [finding for finding in findings if bound is None or finding.cost <= bound]
    return min(affordable, key=lambda each: (each.valid_ppl, each.cost, each.trial), default=None)


def write_results(
    findings: Sequence[Finding], task: Task, study: str, within: float | None, folder: Path
) -> tuple[list[Finding], Finding | None]:
    """Write `pareto.csv`, and `arch.yaml` of the best that costs at most `within` of the interleaved network.

    Returns the front, and the best; none, and no `arch.yaml`, where all cost more. What diverged is neither.
    """
    findings = [finding for finding in findings if math.isfinite(finding.valid_ppl)]
    front = pareto_front(findings)
    best = best_within(findings, None if within is None else within * task.costs.interleaved)
    write_front(front, folder / "pareto.csv")
    (folder / "arch.yaml").unlink(missing_ok=True)  # of an earlier call, which may have allowed more
    if best is not None:
        write_choice(best, task, study, within, folder / "arch.yaml")
    return front, best


def write_front(front: Sequence[Finding], path: Path) -> None:
    """Write the front as CSV."""
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(Finding._fields)
    rows.writerows(front)
    write_text(path, text.getvalue())


def write_choice(best: Finding, task: Task, study: str, within: float | None, path: Path) -> None:
    """Write an `arch.yaml` of the chosen network, which retraining reads."""
    architecture = Architecture.parse(best.network)
    with torch.device("meta"):
        network = TransformerXL.build(task.config.model, architecture, task.vocab_size)
    bound = "" if within is None else f" within {within:g} of the interleaved network's cost"
    content = {
        "arch": best.network,
        "method": f"least validation perplexity of a black-box search{bound}",
        "study": study,
        "trial": best.trial,
        "source": best.source,
        "valid_ppl": best.valid_ppl,
        "cost": best.cost,
        "cost_share": best.cost / task.costs.interleaved,
        "counts": architecture.counts(),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
    }
    write_text(path, to_yaml(content))
