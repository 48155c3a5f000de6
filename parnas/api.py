"""The commands in Python: `search`, `derive`, `retrain`, `pipeline`, `tune`, `adapt`, `evaluate`, `load`.

>>> found = parnas.search("demo", small, run="runs/found")
>>> found.kind, len(found.arch)
('search', 3)
>>> derivation = parnas.derive(found)
>>> trained = parnas.retrain("demo", derivation, small, run="runs/trained")
>>> parnas.evaluate([found, trained]).table["run"].tolist()
['found', 'trained']
>>> len(parnas.load(trained).generate("The old lobster", tokens=5)) > len("The old lobster")
True

`small` are settings that train within a second; docs/python.md has them.
"""

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from parnas import inputs, pipelines
from parnas.architecture import Architecture
from parnas.config import Config, Override
from parnas.evaluation import adapt as adaptations
from parnas.evaluation.adapt import Adaptation, Grid
from parnas.evaluation.comparison import Comparison, compare
from parnas.evaluation.entries import Conditions
from parnas.figures.tuning import draw_tuning
from parnas.inputs import Settings, read_overrides
from parnas.nas import derive as derivations
from parnas.nas import search as searches
from parnas.nas import tuning, tuning_trials
from parnas.nas.cost import Metric
from parnas.nas.derive import Demands, Derivation
from parnas.nas.tuned import Tuned
from parnas.nas.tuning_space import Phase, SpaceLike
from parnas.run import Run
from parnas.tensorboard import TensorBoard
from parnas.trained import RunLike, TrainedRun, open_run
from parnas.training import phases
from parnas.training import retrain as retrainings
from parnas.training.phases import LoadedRun
from parnas.training.reporter import Reporter
from parnas.training.stopping import Stopped

__all__ = ["adapt", "derive", "evaluate", "load", "pipeline", "retrain", "search", "tune"]

Progress: TypeAlias = bool | Reporter
"""True shows what the command line shows, False nothing, and both write TensorBoard's files into the run folder; or an
object that is told (`parnas.training.reporter`)."""
ArchLike: TypeAlias = str | Path | Architecture | Derivation | Run | TrainedRun


def search(
    config: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    run: str | Path | None = None,
    resume: bool = False,
    progress: Progress = False,
) -> TrainedRun:
    """Train a SuperNet and learn pi (`parnas search`).

    config: a YAML file, the name of a shipped configuration such as "demo" (the default), nested sections as a
    dictionary, or a `Config`. overrides: settings by dotted key (docs/configuration.md). run: the folder to write, or
    with an unfinished search of the same configuration, to go on with; by default `runs/search-CONFIG`, with a number
    behind where that is taken. resume: refuse to begin anew; without config, the run's own holds.

    Raises `ParnasError` for settings that are wrong, all told at once, for a folder that holds something else, and for
    a text that is not there; `KeyboardInterrupt` once an interrupt is saved.

    >>> found = parnas.search("demo", {**small, "search.steps": 30})
    >>> found.folder.name, found.summary["steps"]
    ('search-demo', 30)
    >>> list(found.pi.columns)
    ['step', 'tau', 'block', 'layer', 'pi']
    >>> last = found.pi[found.pi["step"] == found.pi["step"].max()]
    >>> last.groupby("block")["pi"].sum().round(3).tolist()
    [1.0, 1.0, 1.0]
    """
    return _train(searches.search, "search", config, overrides, None, run, resume, progress)


def retrain(
    config: Settings | None = None,
    arch: ArchLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    run: str | Path | None = None,
    resume: bool = False,
    progress: Progress = False,
) -> TrainedRun:
    """Train a discrete architecture from scratch (`parnas retrain`).

    arch: a string such as "sfsff" or "(sf)*8", a preset such as "interleaved-6", what `derive` returned, an
    `arch.yaml`, or a run: of a search what its `arch.yaml` says, else what pi spoke for last. By default it is
    `model.arch` of the configuration. The rest, and what is raised, as for `search`.

    >>> trained = parnas.retrain("demo", "sfs", small)
    >>> trained.arch, trained.kind
    ('sfs', 'retrain')
    >>> sorted(trained.summary["valid"])[:3]
    ['bits_per_byte', 'bytes', 'loss']
    >>> trained.metrics["split"].unique().tolist()
    ['train', 'valid']
    """
    given = None if arch is None else _arch_text(arch)
    return _train(retrainings.retrain, "retrain", config, overrides, given, run, resume, progress)


def derive(
    run: RunLike,
    *,
    within: float | None = None,
    metric: Metric | None = None,
    limits: Mapping[str, int] | None = None,
    top_k: int | None = None,
    rescore: int | None = None,
    out: str | Path | None = None,
    progress: Progress = False,
) -> Derivation:
    """The architecture that the pi of a search speaks for, within a target of cost (`parnas derive`).

    within: largest cost, as a share of the interleaved network's; metric: "latency", "macs" or "parameters"; both as
    the search was configured by default. limits: most blocks with a layer, such as {"s": 4}. top_k: how many networks
    to rank; rescore: how many of the most probable are read with the SuperNet's weights. out: a folder, such as the
    run's own, that gets `arch.yaml`; by default nothing is written.

    Raises `ParnasError` where the run is no search, or no network meets the demands.

    >>> derivation = parnas.derive(found, limits={"s": 1}, rescore=0)
    >>> derivation.architecture.counts()["s"] <= 1
    True
    >>> [block.layer for block in derivation.blocks] == list(derivation.architecture)
    True
    """
    most = [f"{name}={count}" for name, count in (limits or {}).items()]
    demands: Demands = derivations.read_demands(within, metric, most, top_k, rescore)
    of = open_run(run)
    derivation = derivations.derive(of, demands, _reporter(progress))
    if out is not None:
        derivations.write_derivation(derivation, of, Path(out) / "arch.yaml")
    return derivation


def evaluate(
    runs: RunLike | Iterable[RunLike],
    *,
    split: Literal["train", "valid", "test"] | None = None,
    tgt_len: int | None = None,
    mem_len: int | None = None,
    cmem_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    best: bool = False,
    overrides: Mapping[str, Any] | None = None,
    adapted: bool = False,
    out: str | Path | None = None,
    progress: Progress = False,
) -> Comparison:
    """Perplexities and costs of runs, measured alike (`parnas evaluate`); `table` has a row for each.

    split: which text, by default `evaluation.split` of the first run. tgt_len, mem_len, cmem_len, clamp_len (tokens or
    positions) and same_length: how far is read at once and attention looks back, by default as trained. best: the
    weights of the least validation loss. overrides: settings of `evaluation` by dotted key. adapted: also in the ways
    that `adapt` chose for each run. out: a folder for the table as CSV, Markdown and JSON.

    A run has a row for each way of evaluation, which `evaluation` names: always `plain`, and `sliding`, `dynamic`,
    `cache`, `dynamic + cache` where the settings ask for them. Rows of different ways do not compare. The columns are
    those of the command: `ppl` and `word_ppl` per token and word, `bits_per_byte`, `parameters`,
    `multiply_adds_per_token`, `latency_ms` (scoring one segment of one row) and more. Raises `ParnasError` for runs
    that cannot be compared.

    >>> comparison = parnas.evaluate([found, trained], split="test", mem_len=4)
    >>> comparison.table[["run", "mem_len"]].values.tolist()
    [['found', 4], ['trained', 4]]
    >>> several = parnas.evaluate(trained, overrides={"evaluation.stride": 2, "evaluation.cache.size": 50})
    >>> several.table[["evaluation", "settings"]].values.tolist()
    [['plain', ''], ['sliding', 'stride 2'], ['cache', 'size 50, theta 0.1, weight 0.1']]
    """
    several = [runs] if isinstance(runs, str | Path | Run | TrainedRun) else list(runs)
    changes = dict(read_overrides(overrides or {}))
    conditions = Conditions(split, tgt_len, mem_len, cmem_len, clamp_len, same_length, best, changes, adapted)
    comparison = compare([open_run(run).folder for run in several], conditions, _reporter(progress))
    if out is not None:
        comparison.write(Path(out))
    return comparison


def adapt(
    run: RunLike,
    grid: Grid | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    best: bool = False,
    progress: Progress = False,
) -> Adaptation:
    """Choose the settings of dynamic evaluation and of a cache on the validation split (`parnas adapt`).

    grid: what is tried; overrides: other settings of `evaluation`, such as `evaluation.cache.size` (positions). Writes
    `adapted.json` into the run folder, which `evaluate(..., adapted=True)` reads.

    >>> adaptation = parnas.adapt(trained, parnas.Grid(lr=[1e-4], decay=[0.0], theta=[0.1], tokens=500))
    >>> sorted(adaptation.chosen)
    ['cache', 'dynamic', 'dynamic + cache']
    >>> parnas.evaluate(trained, split="test", adapted=True).table["evaluation"].tolist()
    ['plain', 'cache', 'dynamic', 'dynamic + cache']
    """
    conditions = Conditions(best=best, changes=dict(read_overrides(overrides or {})))
    adaptation = adaptations.adapt(open_run(run), grid or Grid(), conditions, _reporter(progress))
    adaptation.write()
    return adaptation


def tune(
    config: Settings | None = None,
    arch: ArchLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    phase: Phase = "retrain",
    space: SpaceLike = None,
    trials: int = 30,
    prune: bool = True,
    storage: str | None = None,
    study: str | None = None,
    run: str | Path | None = None,
    progress: Progress = False,
) -> Tuned:
    """Find the best values of settings by Optuna, by validation loss (`parnas tune`).

    config, arch and overrides: as for `search` and `retrain`. phase: "retrain" or "search", which is tuned. space: what
    each setting may be, by dotted key, as a text such as "log:1e-4..1e-2" or "0..0.5", or a list; or a YAML file of
    such; by default that of the run folder, else the usual settings. trials: how many all workers of the study finish
    together. prune: whether trials behind the median of the others end early. storage and study: as of `parnas
    blackbox`, by default a file in the run folder. run: the folder to write, or to go on with.

    Raises `ParnasError` for settings that are wrong, and for a folder or study that was begun with others.

    >>> tuned = parnas.tune("demo", "sfs", small, space={"train.lr": "log:1e-3..1e-1"}, trials=2, run="runs/tuned")
    >>> tuned.table[["trial", "state"]].values.tolist()
    [[0, 'complete'], [1, 'complete']]
    >>> tuned.config.train.lr == tuned.best.settings["train.lr"]
    True
    """
    changes: list[Override] = [*read_overrides(overrides or {})]
    text = None if arch is None else _arch_text(arch)
    named = None if run is None else Path(run)
    settled, folder = inputs.settle_study(config, changes, named, phase, text, storage, study)
    with inputs.not_left_empty(None if run or study else folder), _interruptible(folder, ""):
        asked = tuning.ask_space(space, {}, settled, phase, folder)
        demands = tuning_trials.Demands(phase, asked, trials, storage, study, prune)
        found = tuning.tune(settled, demands, folder, _reporter(progress))
        found.write(folder)
        draw_tuning(folder)
    return found


def pipeline(
    config: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    run: str | Path | None = None,
    baselines: Iterable[str] = (pipelines.EQUAL_COST,),
    finalists: int = 1,
    adapt: bool = False,
    test: bool = False,
    progress: Progress = False,
) -> pipelines.Pipeline:
    """Search, derive, retrain beside baselines, compare and draw (`parnas pipeline`).

    baselines: some of "equal-cost", "interleaved" and "all-f". finalists: up to how many networks, of less and
    less attention, are trained for an eighth of the steps, the best of which counts as derived. adapt: evaluate
    dynamically and with a cache besides. test: read the test split at the end, once. run: the folder of all runs; given
    again, it goes on. The rest, and what is raised, as for `search`.

    >>> whole = parnas.pipeline("demo", {**small, "search.steps": 12}, baselines=["all-f"], run="runs/whole")
    >>> list(whole.runs), whole.runs["all-f"].arch
    (['derived', 'all-f'], 'fff')
    >>> whole.comparison.table["run"].tolist() == list(whole.runs)
    True
    """
    names, changes = pipelines.check_baselines(baselines), [*read_overrides(overrides or {})]
    settled, folder = inputs.settle(config, [*changes], None if run is None else Path(run), False, "pipeline")
    with inputs.not_left_empty(folder if run is None else None), _interruptible(folder, ""):
        return pipelines.run_pipeline(
            settled, names, folder, _reporter(progress), finalists=finalists, adapt=adapt, test=test
        )


def load(run: RunLike, even: bool = False, best: bool = False) -> LoadedRun:
    """The network of a run with its tokenizer, from its newest checkpoint, on the CPU and in evaluation mode.

    best: from the checkpoint of the least validation loss. even: with a search's weights from before they settled on
    one network, where there are such. Raises `ParnasError` where the folder has no whole checkpoint, or is not whole.

    >>> loaded = parnas.load(trained)
    >>> loaded.architecture.layers
    ('s', 'f', 's')
    >>> output = loaded.model(torch.tensor([loaded.tokenizer.encode("Ada mends the boat")]))
    >>> tuple(output.hidden.shape)[::2]  # [B, T, D]
    (1, 16)
    """
    return phases.load(open_run(run).folder, even, best)


def _train(
    train: Callable[[Config, Path, Reporter, bool], Run],
    command: str,
    config: Settings | None,
    overrides: Mapping[str, Any] | None,
    arch: str | None,
    run: str | Path | None,
    resume: bool,
    progress: Progress,
) -> TrainedRun:
    changes: list[Override] = [*read_overrides(overrides or {})]
    settled, folder = inputs.settle(config, changes, None if run is None else Path(run), resume, command, arch)
    with inputs.not_left_empty(folder if run is None else None), _interruptible(folder):
        return TrainedRun.read(train(settled, folder, _reporter(progress), resume))


def _arch_text(arch: ArchLike) -> str:
    if isinstance(arch, Derivation):
        return str(arch.architecture)
    return str(arch.folder if isinstance(arch, Run | TrainedRun) else arch)


def _reporter(progress: Progress) -> Reporter:
    if progress is True:
        from parnas.reporters import make_reporter

        return make_reporter()
    return TensorBoard() if progress is False else progress


@contextmanager
def _interruptible(folder: Path, more: str = " and resume=True") -> Iterator[None]:
    """Let an interrupt look as Python's own does, with the way to go on: run, and `more`."""
    try:
        yield
    except Stopped as stopped:
        if stopped.number != signal.SIGINT:
            raise
        raise KeyboardInterrupt(f"{stopped}; go on with run={str(folder)!r}{more}") from None
