"""The Python API: the commands as functions.

>>> searched = parnas.search("demo", small, run="runs/searched")
>>> searched.kind, len(searched.arch)
('search', 3)
>>> derivation = parnas.derive(searched)
>>> trained = parnas.retrain("demo", derivation, small, run="runs/trained")
>>> parnas.evaluate([searched, trained]).table["run"].tolist()
['searched', 'trained']
>>> len(parnas.load(trained).generate("The old lobster", tokens=5)) > len("The old lobster")
True

`small` holds settings with which a training takes less than a second; docs/python.md lists them.
"""

import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, TypeAlias

from parnas.architecture import Architecture
from parnas.config.loader import Config, Override
from parnas.errors import ParnasError
from parnas.evaluation.comparison import Comparison, compare
from parnas.evaluation.loading import EvalOptions
from parnas.evaluation.tune_eval import Grid
from parnas.evaluation.tune_eval import tune_eval as tune_evaluation
from parnas.figures.diagram import draw_network
from parnas.figures.draw import draw_run
from parnas.figures.heatmap import FRAME_MS, AnimationOptions
from parnas.figures.tuning import draw_tuning
from parnas.nas import derive as derivations
from parnas.nas import front as fronts
from parnas.nas.cost import Metric
from parnas.nas.derive import Derivation
from parnas.nas.front import Front
from parnas.nas.one_run import second_part, split_training
from parnas.pretrained.findings import Findings, check_folder, write_findings
from parnas.pretrained.import_transfo_xl import import_settings, import_transfo_xl
from parnas.pretrained.local_distillation import run_search
from parnas.pretrained.probe_model import PROBE_PAIRS, PROBE_TOKENS, ROUNDS, probe_model, read_runtime
from parnas.pretrained.settings import heal_settings_or_none, search_settings
from parnas.pretrained.transfo_xl import read_transfo_xl
from parnas.runs import resolve
from parnas.runs.records import Kind, TunedEvalRecord
from parnas.runs.resolve import Settings, read_overrides
from parnas.runs.run import ARCH_FILE, Run
from parnas.runs.trained_run import RunLike, TrainedRun, open_run
from parnas.studies import tuning
from parnas.studies.baselines import ALTERNATING, EQUAL_COST, read_baselines
from parnas.studies.compress import CompressResult
from parnas.studies.compress import compress as compress_run
from parnas.studies.pipeline import PipelineResult, run_pipeline
from parnas.studies.tuning import TuningResult
from parnas.studies.tuning_space import SpaceLike, resolve_space
from parnas.training import loaded_run
from parnas.training import retrain as retrainings
from parnas.training.interruptions import Stopped
from parnas.training.loaded_run import LoadedRun
from parnas.training.progress import Reporter, TensorBoard, make_reporter

__all__ = [
    "compress",
    "derive",
    "derive_front",
    "draw",
    "evaluate",
    "import_model",
    "load",
    "pipeline",
    "probe",
    "retrain",
    "search",
    "tune",
    "tune_eval",
]

Progress: TypeAlias = bool | Reporter
"""`True` shows progress like the command line, `False` shows nothing; both write TensorBoard files into the run folder.
A `Reporter` (`parnas.training.progress`) receives the progress instead."""
ArchLike: TypeAlias = str | Path | Architecture | Derivation | Run | TrainedRun


def search(
    config: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    one_run: bool = False,
    parent: RunLike | None = None,
    run: str | Path | None = None,
    resume: bool = False,
    progress: Progress = False,
) -> TrainedRun:
    """Train a SuperNet and its architecture probabilities pi (`parnas search`).

    Args:
        config: a YAML file, the name of a shipped configuration such as "demo" (the default), nested sections as a
            dictionary, or a `Config`.
        overrides: settings by dotted key (docs/configuration.md).
        one_run: search in the share `search.share` of `train.steps`, as the first part of a one-run training;
            `retrain(inherit=…, one_run=True)` is the second part, and `pipeline(one_run=True)` does both.
        parent: a finished retraining: search for cheaper layers of its network, with its settings by default.
        run: the run folder; an unfinished search with the same configuration in it is resumed. By default a new
            folder `runs/search-CONFIG`, with a number appended if it exists.
        resume: require that `run` holds a search to resume; without `config`, its configuration is used.
        progress: whether to show progress; see `Progress`.

    Raises:
        ParnasError: settings are not valid (the message lists all), the folder has other files, or the text is missing.
        KeyboardInterrupt: the search was interrupted; a checkpoint has been saved.

    >>> searched = parnas.search("demo", {**small, "search.steps": 30})
    >>> searched.folder.name, searched.summary.steps
    ('search-demo', 30)
    >>> list(searched.pi.columns)
    ['step', 'tau', 'block', 'layer', 'pi']
    >>> last = searched.pi[searched.pi["step"] == searched.pi["step"].max()]
    >>> last.groupby("block")["pi"].sum().round(3).tolist()
    [1.0, 1.0, 1.0]
    """
    if parent is not None:
        if one_run or config is not None:
            raise ParnasError("A search in a trained network has its settings; leave out config and one_run.")
        config = search_settings(open_run(parent))
    resolved, folder = _resolve(config, overrides, run, "search", resume=resume)
    with _resumable(folder, run is None, " and resume=True"):
        if one_run:
            resolved, _ = split_training(resolved, folder)
        return TrainedRun.read(run_search(resolved, folder, _reporter(progress), resume))


def retrain(
    config: Settings | None = None,
    arch: ArchLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    inherit: RunLike | None = None,
    one_run: bool = False,
    teachers: Sequence[RunLike] = (),
    run: str | Path | None = None,
    resume: bool = False,
    progress: Progress = False,
) -> TrainedRun:
    """Train a discrete architecture, from scratch or from the weights of another run (`parnas retrain`).

    Args:
        config: the configuration, given as for `search`.
        arch: an architecture such as "sfsff" or "(sf)*8", a preset such as "interleaved-6", the result of `derive`, an
            `arch.yaml`, or a run (for a search its `arch.yaml`, or the argmax of its last pi). By default that of
            `inherit`, else `model.arch` of the configuration.
        overrides: settings by dotted key (docs/configuration.md).
        inherit: the run of a search, or of a retraining, whose weights the training starts from; its configuration and
            its architecture are the default.
        one_run: with `inherit`, train the second part of a one-run training; see `search`.
        teachers: finished runs whose predictions the network also learns (`train.distill`). For a search in a trained
            network that is `inherit`, this network is the default.
        run: the run folder, by default a new `runs/retrain-CONFIG`; an unfinished retraining in it is resumed.
        resume: require that `run` holds a retraining to resume; without `config`, its configuration is used.
        progress: whether to show progress; see `Progress`.

    Raises:
        ParnasError: the architecture or settings are not valid, the folder has other files, or the text is missing.

    >>> trained = parnas.retrain("demo", "sfs", small)
    >>> trained.arch, trained.kind
    ('sfs', 'retrain')
    >>> round(trained.summary.valid.loss) < 6
    True
    >>> trained.metrics["split"].unique().tolist()
    ['train', 'valid']
    >>> continued = parnas.retrain(inherit=searched)
    >>> continued.summary.inherited.steps == searched.summary.steps
    True
    """
    if one_run and inherit is None:
        raise ParnasError("one_run continues a search; give it by inherit, or leave out one_run to resume.")
    if config is None and inherit is not None and not resume:
        config = heal_settings_or_none(open_run(inherit))
    if teachers:
        overrides = {**(overrides or {}), "train.teachers": [str(open_run(each).folder) for each in teachers]}
    resolved, folder = _resolve(config, overrides, run, "retrain", arch, resume, inherit)
    with _resumable(folder, run is None, " and resume=True"):
        # With resume alone, the configuration is that of the run, which is the second part already.
        if one_run and inherit is not None and not (resume and config is None):
            resolved = second_part(resolved, open_run(inherit).folder)
        return TrainedRun.read(retrainings.retrain(resolved, folder, _reporter(progress), resume))


def derive(
    run: RunLike,
    *,
    cost_target: float | None = None,
    metric: Metric | None = None,
    within: Mapping[Metric, float] | None = None,
    limits: Mapping[str, int] | None = None,
    top_k: int | None = None,
    rerank_top_k: int | None = None,
    out: str | Path | None = None,
    progress: Progress = False,
) -> Derivation:
    """Return the most probable architecture of a search within a cost target (`parnas derive`).

    Args:
        run: the run folder of a search, finished or not.
        cost_target: largest cost as a share of the reference's, the interleaved network or, after a search in a trained
            network, this network; by default that of the search.
        metric: the measure of cost: "latency", "macs", "parameters" or "cache"; by default that of the search.
        within: several cost targets by metric, such as {"latency": 0.5, "cache": 0.25}, in place of these two.
        limits: largest number of blocks by layer, such as {"s": 4}.
        top_k: number of most probable networks to list.
        rerank_top_k: number of networks that are compared with the shared weights; 0 selects by pi alone.
        out: a folder to write `arch.yaml` and `figures/network.png` to, such as the run folder; by default nothing is
            written.
        progress: whether to show progress; see `Progress`.

    Raises:
        ParnasError: the run is not a search, or no architecture meets the constraints.

    >>> derivation = parnas.derive(searched, limits={"s": 1}, rerank_top_k=0)
    >>> list(derivation.architecture).count("s") <= 1
    True
    >>> [block.layer for block in derivation.blocks] == list(derivation.architecture)
    True
    """
    targets = None if within is None else {str(name): share for name, share in within.items()}
    constraints = derivations.read_constraints(cost_target, metric, limits, top_k, rerank_top_k, targets)
    folder = open_run(run)
    derivation = derivations.derive(folder, constraints, _reporter(progress))
    if out is not None:
        derivations.write_derivation(derivation, folder, Path(out) / ARCH_FILE)
        draw_network(derivation.to_record(folder), Path(out))
    return derivation


def derive_front(
    run: RunLike,
    targets: Sequence[float],
    *,
    metric: Metric | None = None,
    limits: Mapping[str, int] | None = None,
    rerank_top_k: int | None = None,
    out: str | Path | None = None,
    progress: Progress = False,
) -> Front:
    """Return the best architecture of a search within each of several cost targets (`parnas derive --front`).

    Args:
        run: the run folder of a search, finished or not.
        targets: largest costs, as shares of the reference's cost; see `derive`.
        metric: the measure of cost, as for `derive`, like the arguments below.
        limits: largest number of blocks by layer.
        rerank_top_k: number of networks that are compared with the shared weights, for each target.
        out: a folder to write `front/` to, such as the run folder; by default nothing is written.
        progress: whether to show progress; see `Progress`.

    Raises:
        ParnasError: the run is not a search, or no architecture is within the highest target.

    >>> front = parnas.derive_front(searched, [0.5, 1.0], metric="macs", rerank_top_k=0)
    >>> [row["cost"] <= row["target"] for row in front.to_rows()]
    [True, True]
    """
    constraints = derivations.read_constraints(None, metric, limits, None, rerank_top_k)
    folder = open_run(run)
    front = fronts.derive_front(folder, targets, constraints, _reporter(progress))
    if out is not None:
        front.write(folder, Path(out))
    return front


def evaluate(
    runs: RunLike | Iterable[RunLike],
    *,
    split: Literal["train", "valid", "test"] | None = None,
    tgt_len: int | None = None,
    mem_len: int | None = None,
    cmem_len: int | None = None,
    clamp_len: int | None = None,
    same_length: bool | None = None,
    pointer_len: int | None = None,
    best: bool = False,
    overrides: Mapping[str, Any] | None = None,
    tuned: bool = False,
    out: str | Path | None = None,
    progress: Progress = False,
) -> Comparison:
    """Measure perplexities and costs of runs under equal conditions (`parnas evaluate`).

    Args:
        runs: one or several run folders.
        split: the split to evaluate; by default `evaluation.split` of the first run.
        tgt_len: tokens of a segment; by default as in training, like the five arguments below.
        mem_len: positions of memory.
        cmem_len: positions of compressed memory.
        clamp_len: largest distance that attention distinguishes.
        same_length: let every token attend to equally many positions.
        pointer_len: positions from which a pointer may copy.
        best: use the weights with the lowest validation loss instead of the last ones.
        overrides: settings of section `evaluation` by dotted key, or `runtime.device`, `runtime.precision` or
            `runtime.threads`.
        tuned: also evaluate with the settings that `tune_eval` chose for each run.
        out: a folder to write the table to, as CSV, Markdown and JSON; by default nothing is written.
        progress: whether to show progress; see `Progress`.

    Returns:
        A comparison whose `table` has a row for each run and evaluation protocol: always `plain`, and `sliding`,
        `dynamic`, `cache` or `dynamic + cache` where the settings ask for them. Compare rows of one protocol only.
        Columns are those of the command: `ppl` and `word_ppl` per token and word, `bits_per_byte`, `parameters`,
        `multiply_adds_per_token`, `latency_ms` (of one segment with batch size 1) and others.

    Raises:
        ParnasError: the runs cannot be compared.

    >>> comparison = parnas.evaluate([searched, trained], split="test", mem_len=4)
    >>> comparison.table[["run", "mem_len"]].values.tolist()
    [['searched', 4], ['trained', 4]]
    >>> protocols = parnas.evaluate(trained, overrides={"evaluation.stride": 2, "evaluation.cache.size": 50})
    >>> protocols.table[["evaluation", "settings"]].values.tolist()
    [['plain', ''], ['sliding', 'stride 2'], ['cache', 'size 50, theta 0.1, weight 0.1']]
    """
    run_list = [runs] if isinstance(runs, str | Path | Run | TrainedRun) else list(runs)
    changes = dict(read_overrides(overrides or {}))
    lengths = mem_len, cmem_len, clamp_len, same_length, pointer_len
    options = EvalOptions(split, tgt_len, *lengths, best, changes, tuned)
    comparison = compare([open_run(run).folder for run in run_list], options, _reporter(progress))
    if out is not None:
        comparison.write(Path(out))
    return comparison


def tune_eval(
    run: RunLike,
    grid: Grid | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    best: bool = False,
    progress: Progress = False,
) -> TunedEvalRecord:
    """Choose the settings of dynamic evaluation and of the cache on the validation split (`parnas tune-eval`).

    Writes `tuned_eval.json` into the run folder, which `evaluate(..., tuned=True)` reads.

    Args:
        run: the run folder of a search or retraining.
        grid: the values to try; by default those of `parnas.Grid()`.
        overrides: other settings of section `evaluation`, such as `evaluation.cache.size` (positions), or
            `runtime.device`, `runtime.precision` or `runtime.threads`.
        best: use the weights with the lowest validation loss instead of the last ones.
        progress: whether to show progress; see `Progress`.

    >>> tuning = parnas.tune_eval(trained, parnas.Grid(lr=[1e-4], decay=[0.0], theta=[0.1], tokens=500))
    >>> sorted(tuning.chosen)
    ['cache', 'dynamic', 'dynamic + cache']
    >>> parnas.evaluate(trained, split="test", tuned=True).table["evaluation"].tolist()
    ['plain', 'cache', 'dynamic', 'dynamic + cache']
    """
    options = EvalOptions(best=best, changes=dict(read_overrides(overrides or {})))
    return tune_evaluation(open_run(run), grid or Grid(), options, _reporter(progress))


def tune(
    config: Settings | None = None,
    arch: ArchLike | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    phase: Kind = "retrain",
    space: SpaceLike = None,
    trials: int = 30,
    prune: bool = True,
    storage: str | None = None,
    study: str | None = None,
    run: str | Path | None = None,
    progress: Progress = False,
) -> TuningResult:
    """Choose values of settings by validation loss, with Optuna (`parnas tune`).

    Args:
        config: the configuration, given as for `search`.
        arch: the architecture to train in phase "retrain", given as for `retrain`.
        overrides: settings by dotted key (docs/configuration.md).
        phase: the phase to tune, "retrain" or "search".
        space: values of each setting by dotted key, as a text such as "log:1e-4..1e-2" or "0..0.5", or a list; or a
            YAML file of these. By default the space of the study in `run`, else a space for the phase (docs/tuning.md).
        trials: number of trials, counted over all processes of the study.
        prune: end a trial early if its loss exceeds the median loss of the other trials at the same step.
        storage: Optuna's storage URL; by default a file in the run folder.
        study: name of the study in the storage.
        run: the folder to write; a study in it is resumed. By default a new folder `runs/tune-CONFIG`.
        progress: whether to show progress; see `Progress`.

    Raises:
        ParnasError: settings are not valid, or differ from those with which the folder or study was started.

    >>> tuned = parnas.tune("demo", "sfs", small, space={"train.lr": "log:1e-3..1e-1"}, trials=2, run="runs/tuned")
    >>> tuned.table[["trial", "state"]].values.tolist()
    [[0, 'complete'], [1, 'complete']]
    >>> tuned.config.train.lr == tuned.best.settings["train.lr"]
    True
    """
    changes: list[Override] = [*read_overrides(overrides or {})]
    resolved, folder = resolve.resolve_config_and_study(
        config, changes, _path(run), phase, _arch_text(arch), storage, study
    )
    with _resumable(folder, not (run or study)):
        searched_space = resolve_space(space, {}, resolved, phase, folder)
        options = tuning.TuneOptions(phase, searched_space, trials, storage, study, prune)
        result = tuning.tune(resolved, options, folder, _reporter(progress))
        result.write(folder)
        draw_tuning(folder)
    return result


def pipeline(
    config: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    run: str | Path | None = None,
    baselines: Iterable[str] = (EQUAL_COST, ALTERNATING),
    one_run: bool = False,
    front: Sequence[float] = (),
    finalists: int = 1,
    tune_eval: bool = False,
    test: bool = False,
    progress: Progress = False,
) -> PipelineResult:
    """Search, derive, retrain next to baselines, compare and draw (`parnas pipeline`).

    Args:
        config: the configuration, given as for `search`.
        overrides: settings by dotted key (docs/configuration.md).
        run: the folder of all runs, by default a new `runs/pipeline-CONFIG`; an unfinished pipeline in it is resumed.
        baselines: the networks to compare with: any of "equal-cost", "alternating" (if k is a candidate),
            "interleaved", "all-f", the presets of docs/layers.md, and layers such as "kkskk".
        one_run: search in the share `search.share` of `train.steps`, then train the derived network on, from its
            weights in the SuperNet.
        front: cost targets; train the network within the highest as with `one_run`; each cheaper network is made by
            removing layers from the one before, and trained for a quarter of `train.steps`.
        finalists: train up to this many networks, with fewer and fewer attention layers, for an eighth of the steps,
            and retrain the best.
        tune_eval: also evaluate with dynamic evaluation and the cache, at the best settings.
        test: also evaluate on the test split, once at the end.
        progress: whether to show progress; see `Progress`.

    Raises:
        ParnasError: settings are not valid (the message lists all), the folder has other files, or the text is missing.

    >>> whole = parnas.pipeline("demo", {**small, "search.steps": 12}, baselines=["all-f"], run="runs/whole")
    >>> list(whole.runs), whole.runs["all-f"].arch
    (['derived', 'all-f'], 'fff')
    >>> whole.comparison.table["run"].tolist() == list(whole.runs)
    True
    """
    names = read_baselines(baselines)
    resolved, folder = _resolve(config, overrides, run, "pipeline")
    with _resumable(folder, run is None):
        return run_pipeline(
            resolved,
            names,
            folder,
            _reporter(progress),
            one_run=one_run,
            front=front,
            finalists=finalists,
            tune_eval=tune_eval,
            test=test,
        )


def probe(
    model: RunLike,
    text: str | Path | None = None,
    *,
    tokens: int = PROBE_TOKENS,
    pairs: int = PROBE_PAIRS,
    overrides: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    progress: Progress = False,
) -> Findings:
    """Measure what a trained model loses without each of its layers, and with cheaper ones (`parnas probe`).

    Args:
        model: a run, or a folder with a causal language model of `transformers`.
        text: a text file, or a corpus, whose validation split is read; by default that of the run's own text.
        tokens: number of tokens to read.
        pairs: number of pairs of layers to leave out together.
        overrides: settings of the section `runtime`, by dotted key.
        out: folder for `probe.json`, the pictures and the page `report.html`; by default nothing is written.
        progress: whether to show progress; see `Progress`.

    Raises:
        ParnasError: the folder holds no such model, there is no text, or too little, or `out` is a file.

    >>> findings = parnas.probe(trained, tokens=256, overrides={"runtime.threads": 1})
    >>> findings.probe.layers, sorted(findings.probe.changes[1])[:1]
    (('s', 'f', 's'), ['f:d_inner=16'])
    """
    folder = model.folder if isinstance(model, Run | TrainedRun) else Path(model)
    runtime = read_runtime([*read_overrides(overrides or {})])
    if out is not None:
        check_folder(Path(out))
    reporter = _reporter(progress)
    findings = probe_model(folder, None if text is None else str(text), tokens, pairs, ROUNDS, runtime, reporter.note)
    if out is not None:
        write_findings(findings, Path(out))
    return findings


def import_model(
    model: str | Path,
    config: Settings | None = None,
    overrides: Mapping[str, Any] | None = None,
    *,
    run: str | Path | None = None,
    progress: Progress = False,
) -> TrainedRun:
    """Make a run of a trained Transformer-XL of `transformers`, or of the original PyTorch code (`parnas import`).

    Args:
        model: a folder with the weights and perhaps `config.json`, or the file of weights. A pickled module is refused.
        config: settings that the model does not say, given as for `search`; by default none.
        overrides: such settings by dotted key, first of all `data.corpus` and `data.tokenizer.vocabulary`; also
            `train.steps` and `train.lr`, of which later trainings take a share.
        run: the run folder, by default a new `runs/import-MODEL`.
        progress: whether to show progress; see `Progress`.

    Raises:
        ParnasError: the weights cannot be read without running code, or not be reproduced exactly; settings are missing
            or wrong; the word list does not fit the model.
    """
    found = read_transfo_xl(model)
    resolved = import_settings(found, config, [*read_overrides(overrides or {})])
    folder = _path(run) or resolve.make_run_folder(f"import-{Path(model).resolve().stem}")
    with _resumable(folder, run is None):
        return TrainedRun.read(import_transfo_xl(found, resolved, folder, _reporter(progress)))


def compress(
    parent: RunLike,
    within: Mapping[Metric, float],
    overrides: Mapping[str, Any] | None = None,
    *,
    run: str | Path | None = None,
    baselines: bool = True,
    progress: Progress = False,
) -> CompressResult:
    """Search in a trained network, derive a network within a budget, and heal it (`parnas compress`).

    Args:
        parent: a finished retraining.
        within: cost targets by metric, as shares of the parent's cost, such as {"latency": 0.6}.
        overrides: settings by dotted key, in place of those of the parent.
        run: the folder of all runs, by default a new `runs/compress`; an unfinished compression in it is resumed.
        baselines: also train the same network, and a shallower one of its cost, from scratch.
        progress: whether to show progress; see `Progress`.

    Raises:
        ParnasError: the parent is not a finished retraining, no network is within the targets, or settings are wrong.

    >>> found = parnas.compress(trained, {"macs": 0.9}, {"search.steps": 8}, run="runs/smaller", baselines=False)
    >>> list(found.runs), len(found.comparison.table)
    (['child'], 2)
    """
    resolved, folder = _resolve(search_settings(open_run(parent)), overrides, run, "compress")
    with _resumable(folder, run is None):
        targets = {str(name): share for name, share in within.items()}
        return compress_run(resolved, targets, folder, _reporter(progress), baselines=baselines)


def draw(run: RunLike, *, frame_ms: int = FRAME_MS, width: int | None = None) -> dict[str, Path]:
    """Draw every picture of a run into its folder `figures` (`parnas plot`).

    Args:
        run: the run folder of a search or retraining.
        frame_ms: milliseconds per frame of the animation.
        width: width of the animation in pixels; by default it depends on the number of blocks.

    Returns:
        The path of each picture by file name, such as `pi.gif`.

    >>> sorted(parnas.draw(trained))
    ['curves.png']
    """
    options = AnimationOptions(frame_ms, width)
    return {path.name: path for path in draw_run(open_run(run), options)}


def load(run: RunLike, supernet_weights: bool = False, best: bool = False) -> LoadedRun:
    """Load a run's network from its newest checkpoint, with its tokenizer, on the CPU and in evaluation mode.

    Args:
        run: the run folder of a search or retraining.
        supernet_weights: load the shared weights that a search stored before it fine-tuned the selected path.
        best: load the checkpoint with the lowest validation loss instead of the newest.

    Raises:
        ParnasError: the folder has no intact checkpoint, or lacks another file.

    >>> loaded = parnas.load(trained)
    >>> loaded.architecture.layers
    ('s', 'f', 's')
    >>> output = loaded.model(torch.tensor([loaded.tokenizer.encode("Ada mends the boat")]))
    >>> tuple(output.hidden.shape)[::2]  # [B, T, D]
    (1, 16)
    """
    return loaded_run.load(open_run(run).folder, supernet_weights, best)


def _resolve(
    config: Settings | None,
    overrides: Mapping[str, Any] | None,
    run: str | Path | None,
    command: str,
    arch: ArchLike | None = None,
    resume: bool = False,
    inherit: RunLike | None = None,
) -> tuple[Config, Path]:
    """Return the configuration and the run folder of a training; see `resolve_config_and_run`."""
    changes: list[Override] = [*read_overrides(overrides or {})]
    source = None if inherit is None else open_run(inherit).folder
    return resolve.resolve_config_and_run(config, changes, _path(run), resume, command, _arch_text(arch), source)


def _path(folder: str | Path | None) -> Path | None:
    return None if folder is None else Path(folder)


def _arch_text(arch: ArchLike | None) -> str | None:
    if isinstance(arch, Derivation):
        return str(arch.architecture)
    if isinstance(arch, Run | TrainedRun):
        return str(arch.folder)
    return None if arch is None else str(arch)


def _reporter(progress: Progress) -> Reporter:
    if progress is True:
        return make_reporter()
    return TensorBoard() if progress is False else progress


@contextmanager
def _resumable(folder: Path, new: bool, more_arguments: str = "") -> Iterator[None]:
    """On Ctrl-C, raise `KeyboardInterrupt` with the arguments to resume; on any error, delete an empty `new` folder."""
    with resolve.remove_if_empty(folder if new else None):
        try:
            yield
        except Stopped as stopped:
            if stopped.number != signal.SIGINT:
                raise
            raise KeyboardInterrupt(f"{stopped}; resume with run={str(folder)!r}{more_arguments}") from None
