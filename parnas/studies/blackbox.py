"""Black-box search, a baseline for gradient-based search: Optuna proposes networks and minimises perplexity and cost.

A trial draws a layer for each block. The perplexity of this network on the validation split comes either from a short
training from scratch or from the shared weights of a finished SuperNet; its cost is the predicted cost of its blocks.
"""

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import optuna
import pandas as pd
import torch
from optuna.exceptions import TrialPruned
from optuna.trial import Trial, TrialState

from parnas.architecture import Architecture, drop_identity
from parnas.config.loader import Config
from parnas.config.yaml_file import to_yaml
from parnas.data.streams import TokenStreams, prepare
from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.cost import Costs, costs_of_run, find_costs
from parnas.nas.knapsack import with_tolerance
from parnas.nas.rerank import shared_weight_losses
from parnas.runs.files import read_json, write_text
from parnas.runs.run import ARCH_FILE, BLACKBOX_FRONT, Run
from parnas.studies.optuna_study import (
    FREE_SETTINGS,
    NAME,
    REUSED,
    SamplerName,
    StudySettings,
    binding_settings,
    evaluate_once,
    open_shared_study,
    run_trials,
)
from parnas.studies.train_or_load import reached_perplexity
from parnas.training.checkpoints import MANIFEST
from parnas.training.device import choose_device
from parnas.training.loaded_run import load_supernet
from parnas.training.progress import Reporter, Silent
from parnas.training.retrain import retrain
from parnas.training.session import check_same_text, resolve_cutoffs, resolve_paths

__all__ = [
    "EvaluatedNetwork",
    "blackbox",
    "evaluated_networks",
    "inheriting_task",
    "open_study",
    "training_task",
    "write_results",
]


class EvaluatedNetwork(NamedTuple):
    """A network that a trial of a study has evaluated, with its perplexity and cost."""

    network: str  # its layers without identity
    valid_ppl: float  # per token of the validation split
    cost: float  # of the blocks, in the unit of search.cost.metric
    trial: int
    source: str  # of the weights that were evaluated: "trained" from scratch, or "inherited" from a SuperNet


@dataclass(frozen=True)
class BlackboxTask:
    """The search space of a black-box study, its two objectives (perplexity and cost), and their settings."""

    candidates: tuple[tuple[str, ...], ...]  # layer names for each block
    costs: Costs
    perplexity: Callable[[int, Architecture], float]  # of a network, given the number of the trial and the network
    source: str  # as in `EvaluatedNetwork`
    fingerprint: Mapping[str, Any]  # all that the values of a trial depend on; equal for all workers of a study
    config: Config
    vocab_size: int


def training_task(config: Config, steps: int, folder: Path | None, reporter: Reporter) -> BlackboxTask:
    """Return a task whose trials train their network from scratch for `steps` steps.

    Each trial has the run folder `folder/trial-NUMBER`, or a temporary folder if `folder` is `None`.
    """
    config, streams = _resolve(config, reporter)
    config = config.from_scratch(train__steps=steps)
    costs = find_costs(config, config.search.cost.metric, reporter)

    def perplexity(number: int, architecture: Architecture) -> float:
        changed = config.replace(model__arch=str(architecture.canonical()))
        with TemporaryDirectory(prefix="parnas-trial-") as temporary:
            run_folder = (folder or Path(temporary)) / f"trial-{number}"
            return reached_perplexity(partial(retrain, changed, run_folder, Silent()), reporter)

    return _make_task(config, streams, "trained", {}, perplexity, costs)


def inheriting_task(config: Config, supernet: Path, reporter: Reporter) -> BlackboxTask:
    """Return a task whose trials evaluate their network with the shared weights of a search, without training.

    `supernet` is the run folder of the search. The weights are those from before the selected path was fine-tuned, or
    the last ones if the run did not store these. Raises `ParnasError` if the run is not a search, or if its text,
    network or search space differs from `config`.
    """
    run, (loaded, model) = Run(supernet), load_supernet(supernet, by_pi=True)
    config, streams = _resolve(config, reporter)
    _refuse_other_supernet(run, config)
    check_same_text(streams.header, loaded.header, str(supernet))
    loss_of = shared_weight_losses(model, config, streams, streams.tokens("valid"))

    def perplexity(_: int, architecture: Architecture) -> float:
        return loss_of(architecture).perplexity

    weights = read_json(loaded.checkpoint / MANIFEST)["sha256"]
    metric, table = config.search.cost.metric, config.search.cost.table
    same_table = table == run.config().search.cost.table
    costs = costs_of_run(run.folder, config, metric, reporter) if same_table else find_costs(config, metric, reporter)
    return _make_task(config, streams, "inherited", {"supernet's weights": weights}, perplexity, costs)


def _refuse_other_supernet(run: Run, config: Config) -> None:
    """Raise `ParnasError` if `run` and `config` have different settings of text, network or search space."""
    theirs, ours = (_search_settings(each, {"train", "runtime"}) for each in (run.config(), config))
    if changed := [f"  - {key}: {theirs[key]} in the run, not {ours[key]}" for key in ours if theirs[key] != ours[key]]:
        raise ParnasError(
            f"The SuperNet in {run.folder} was trained with other settings; leave CONFIG out to use the SuperNet's:\n"
            + "\n".join(changed)
        )


def _resolve(config: Config, reporter: Reporter) -> tuple[Config, TokenStreams]:
    """Return the configuration with the corpus and the softmax cutoffs filled in, and the tokens of the text."""
    config = resolve_paths(config)
    streams = prepare(config.data, reporter.note)
    return resolve_cutoffs(config, streams), streams


def _make_task(
    config: Config,
    streams: TokenStreams,
    source: str,
    more: Mapping[str, Any],
    perplexity: Callable[[int, Architecture], float],
    costs: Costs,
) -> BlackboxTask:
    """Return a task; its fingerprint holds the configuration, the text, the costs and the entries of `more`."""
    free = {"train"} if source == "inherited" else set[str]()
    fingerprint = {"trials": source, "text": streams.header.fingerprint, **_search_settings(config, free), **more}
    fingerprint |= {"metric": costs.metric, "costs": dict(costs.per_layer)}  # each machine has its own latencies
    fingerprint["runtime.precision"] = choose_device(config.runtime).precision  # `auto` may differ between machines
    vocab_size = streams.tokenizer.vocab_size
    return BlackboxTask(config.search.block_spaces, costs, perplexity, source, fingerprint, config, vocab_size)


def _search_settings(config: Config, free: Collection[str]) -> dict[str, Any]:
    """Return the settings that the perplexity and the cost of a trial depend on, by dotted key.

    The sections in `free` are left out, too.
    """
    settings = binding_settings(config, {*FREE_SETTINGS, "model.arch", "search", "evaluation", *free})
    return settings | {f"search.{key}": config.model_dump(mode="json")["search"][key] for key in ("space", "blocks")}


def open_study(
    storage: str, name: str, sampler: SamplerName, task: BlackboxTask, reporter: Reporter | None = None
) -> optuna.Study:
    """Open the study `name` in a storage, or start it; its trials minimise perplexity and cost.

    Raises `ParnasError` if the storage cannot be opened, or if the study was started with another configuration.
    """
    seed = task.config.runtime.seed
    settings = StudySettings("blackbox", task.fingerprint, "choose another --study", seed, 2, sampler)
    return open_shared_study(storage, name, settings, (reporter or Silent()).note)


def blackbox(study: optuna.Study, task: BlackboxTask, trials: int, reporter: Reporter) -> None:
    """Run trials until all workers of the study together have finished `trials` trials; see `run_trials`."""

    def objective(trial: Trial) -> Sequence[float]:
        layers = [trial.suggest_categorical(f"block {n}", names) for n, names in enumerate(task.candidates, 1)]
        name = _network_name(layers)
        if not name:  # a network needs at least one layer that is not identity
            trial.set_user_attr(NAME, name)
            raise TrialPruned("skipped, since all layers are identity")

        def evaluate() -> Sequence[float]:
            return task.perplexity(trial.number, Architecture(layers)), task.costs.cost(layers)

        perplexity, cost = evaluate_once(trial, name, evaluate)
        share = cost / task.costs.reference
        reporter.note(
            f"trial {trial.number}: {name}  ppl {perplexity:.2f}  cost {share:.2f} of {task.costs.reference_name}"
        )
        return perplexity, cost

    run_trials(study, objective, trials, reporter, title="blackbox")


def _network_name(layers: Sequence[str]) -> str:
    """Return the layer string of a network without identity layers, or "" if all layers are identity."""
    layers = drop_identity(layers)
    return str(Architecture(layers)) if layers else ""


def evaluated_networks(study: optuna.Study, source: str) -> list[EvaluatedNetwork]:
    """Return the networks that a study has evaluated, each one once, in the order of the trials.

    `source` says which weights the study evaluates: "trained" from scratch, or "inherited" from a SuperNet.
    """
    networks: dict[str, EvaluatedNetwork] = {}
    for trial in study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,)):
        if REUSED not in trial.user_attrs:
            name = trial.user_attrs[NAME]
            perplexity, cost = trial.values
            networks.setdefault(name, EvaluatedNetwork(name, perplexity, cost, trial.number, source))
    return [*networks.values()]


def pareto_front(networks: Sequence[EvaluatedNetwork]) -> list[EvaluatedNetwork]:
    """Return the Pareto front of perplexity and cost, the cheapest network first.

    A network is on the front if no other network is at least as good in perplexity and in cost, and better in one.
    """
    front: list[EvaluatedNetwork] = []
    for each in sorted(networks, key=lambda network: (network.cost, network.valid_ppl, network.trial)):
        if not front or each.valid_ppl < front[-1].valid_ppl or each[1:3] == front[-1][1:3]:  # perplexity and cost
            front.append(each)
    return front


def best_within(networks: Sequence[EvaluatedNetwork], max_cost: float | None) -> EvaluatedNetwork | None:
    """Return the network with the lowest perplexity that costs at most `max_cost`, or `None` if all cost more.

    Of networks with equal perplexity, return the cheapest. `max_cost` has the unit of the cost metric; `None` means no
    limit.
    """
    affordable = [network for network in networks if max_cost is None or network.cost <= with_tolerance(max_cost)]
    return min(affordable, key=lambda each: (each.valid_ppl, each.cost, each.trial), default=None)


def write_results(
    networks: Sequence[EvaluatedNetwork], task: BlackboxTask, study: str, cost_target: float | None, folder: Path
) -> tuple[list[EvaluatedNetwork], EvaluatedNetwork | None]:
    """Write the Pareto front to `pareto.csv` and the best network within the cost target to `arch.yaml`; return both.

    `study` is the name of the study. `cost_target` is a share of the reference's cost (`Costs`); `None` means no limit.
    If no network is within the limit, `None` is returned instead of the best network, and no `arch.yaml` is
    written. Networks that diverged in training are left out.
    """
    networks = [network for network in networks if math.isfinite(network.valid_ppl)]
    front = pareto_front(networks)
    best = best_within(networks, None if cost_target is None else cost_target * task.costs.reference)
    table = pd.DataFrame(front, columns=EvaluatedNetwork._fields)
    write_text(folder / BLACKBOX_FRONT, table.to_csv(index=False, lineterminator="\n"))
    (folder / ARCH_FILE).unlink(missing_ok=True)  # an earlier call may have had a higher cost target
    if best is not None:
        _write_arch(best, task, study, cost_target, folder / ARCH_FILE)
    return front, best


def _write_arch(best: EvaluatedNetwork, task: BlackboxTask, study: str, cost_target: float | None, path: Path) -> None:
    """Write the best network to an `arch.yaml` for `parnas retrain`, with its perplexity, its cost and its trial."""
    architecture = Architecture.parse(best.network)
    with torch.device("meta"):
        network = TransformerXL.build(task.config.model, architecture, task.vocab_size)
    limit = "" if cost_target is None else f" within {cost_target:g} of {task.costs.reference_name}"
    content = {
        "arch": best.network,
        "method": f"least validation perplexity of a black-box search{limit}",
        "study": study,
        "trial": best.trial,
        "source": best.source,
        "valid_ppl": best.valid_ppl,
        "cost": best.cost,
        "cost_share": best.cost / task.costs.reference,
        "counts": architecture.counts(),
        "parameters": sum(parameter.numel() for parameter in network.parameters()),
    }
    write_text(path, to_yaml(content))
