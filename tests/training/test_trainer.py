"""The loop in both phases: what it writes, and what it computes."""

import json
import math
import shutil
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import needs_compiler, small_config
from helpers.training_helpers import assert_same_weights, final_weights

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.data.batching import Batch, TrainingBatches
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.model.gates import DetachedGates, backward_to_alpha
from parnas.model.summary import parts_of
from parnas.model.supernet import SuperNet
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.search import SearchTask, search
from parnas.runs.run import METRICS, Run
from parnas.training.checkpoints import list_checkpoints
from parnas.training.loaded_run import generate_text, load
from parnas.training.optimizers import gradient_norm, make_adamw, step_clipped
from parnas.training.progress import Silent
from parnas.training.retrain import RetrainTask, retrain
from parnas.training.trainer import RecentSteps, StepResult


def test_same_seed_same_result_and_another_seed_another(corpus: Path, tmp_path: Path) -> None:
    runs = [
        search(small_config(corpus, runtime__seed=seed), tmp_path / name, Silent())
        for name, seed in [("a", 3), ("b", 3), ("c", 4)]
    ]
    a, b, c = (run.pi_records()[-1].pi for run in runs)
    assert a == b != c


def test_search_writes_what_the_run_folder_promises(search_run: Run, corpus: Path) -> None:
    names = {"config.yaml", "environment.json", "metrics.jsonl", "pi.jsonl", "summary.json", "checkpoints", "tokenizer"}
    assert names <= {path.name for path in search_run.folder.iterdir()}
    assert search_run.config() == small_config(corpus)
    records = search_run.pi_records()
    assert [record.step for record in records] == [4, 8, 12, 16, 20, 24]
    for record in records:
        assert len(record.pi) == 3
        assert all(sum(block) == pytest.approx(1, abs=1e-6) for block in record.pi)
    metrics = search_run.metrics()
    assert [line.tau for line in metrics if line.split == "train"][-1] == 0.1
    assert [line.step for line in metrics if line.split == "valid"] == [12, 24]
    assert {"loss", "ppl", "word_ppl", "bits_per_byte", "argmax_ppl"} <= metrics[-1].to_dict().keys()


def test_alpha_is_constant_before_its_first_step_and_changes_after(search_run: Run) -> None:
    third = 1 / 3
    pis = {record.step: torch.tensor(record.pi) for record in search_run.pi_records()}
    assert torch.allclose(pis[4], torch.full((3, 3), third))
    assert not torch.allclose(pis[8], torch.full((3, 3), third))


def test_weights_never_see_the_share_kept_for_alpha(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each update of the weights reads the first share of the text, each one of alpha the rest."""
    read: dict[int, set[tuple[int, ...]]] = {}
    original = TrainingBatches.batch

    def spy(self: TrainingBatches, step: int) -> Batch:
        batch = original(self, step)
        read[id(self)] = read.get(id(self), set()) | {tuple(row) for row in batch.inputs.tolist()}
        return batch

    monkeypatch.setattr(TrainingBatches, "batch", spy)
    config = small_config(corpus, search__alpha_split=0.4)
    search(config, tmp_path / "run", Silent())

    tokens = prepare(config.data).tokens("train")
    cut = len(tokens) - round(len(tokens) * 0.4)
    alpha_text = {tuple(tokens[at : at + 8].tolist()) for at in range(cut, len(tokens) - 8)}
    of_weights, of_alpha = read.values()
    assert of_alpha <= alpha_text
    weights_text = {tuple(tokens[at : at + 8].tolist()) for at in range(cut - 7)}
    assert of_weights <= weights_text


def test_training_learns(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", train__steps=150, train__lr=1e-2, train__eval_every=75)
    run = retrain(config, tmp_path / "run", Silent())
    first, last = (line.ppl for line in run.metrics() if line.split == "valid")
    assert last < first < 37  # the vocabulary has 37 words and <eos>
    assert last < 6


def test_load_rebuilds_the_network_from_the_run_folder_alone(
    retrain_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(retrain_run.folder, moved)
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path / "empty"))
    loaded = load(moved)
    assert str(loaded.architecture) == "sfs"
    assert not loaded.model.training
    expected = final_weights(retrain_run)
    assert all(torch.equal(loaded.model.state_dict()[name], expected[name]) for name in expected)
    assert loaded.generate("the old lobster", tokens=5, temperature=0).startswith("the old lobster")


def test_search_run_loads_as_supernet(search_run: Run) -> None:
    loaded = load(search_run.folder)
    assert str(loaded.architecture) == search_run.summary().arch
    assert torch.allclose(loaded.model.pi(), torch.tensor(search_run.pi_records()[-1].pi))  # type: ignore[operator]
    texts = [
        generate_text(network, loaded.tokenizer, "the old", 8, 0.0, None)
        for network in (loaded.discrete(), loaded.model)
    ]
    assert loaded.generate("the old", tokens=8, temperature=0) == texts[0], "of the derived network, not of the mixture"


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_non_finite_training_stops_with_the_step_and_keeps_the_checkpoint(
    where: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = TransformerXL.score

    def poisoned(self: TransformerXL, *arguments: Any) -> torch.Tensor:
        nll = original(self, *arguments)
        if self.training:
            self.calls = getattr(self, "calls", 0) + 1
            if self.calls == 11:
                nll = nll * torch.nan if where == "loss" else torch.sqrt(nll * 0)
        return nll

    monkeypatch.setattr(TransformerXL, "score", poisoned)
    with pytest.raises(ParnasError, match=rf"{where} .*step 11.*step-00000008"):
        retrain(small_config(corpus, model__arch="sf"), tmp_path / "run", Silent())
    weights = final_weights(Run(tmp_path / "run"))
    assert all(tensor.isfinite().all() for tensor in weights.values())


def test_only_the_last_five_checkpoints_are_kept(corpus: Path, tmp_path: Path) -> None:
    run = retrain(small_config(corpus, model__arch="f", train__save_every=3), tmp_path / "run", Silent())
    steps = [int(path.name.removeprefix("step-")) for path in list_checkpoints(run.checkpoints)]
    assert steps == [12, 15, 18, 21, 24]


def test_summary_says_what_each_figure_divides_by(retrain_run: Run) -> None:
    valid = retrain_run.summary().valid
    text = (Path(retrain_run.config().data.corpus) / "valid.txt").read_text()
    assert valid.bytes == len(text.encode())
    assert valid.words == len(text.split()) + text.count("\n")
    assert valid.tokens == valid.words  # a word tokenizer predicts words and line ends
    assert valid.ppl == pytest.approx(valid.word_ppl)
    assert valid.nats == pytest.approx(valid.loss * valid.tokens)


def test_metrics_are_json_without_nan(search_run: Run) -> None:
    for line in (search_run.folder / METRICS).read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} in metrics"))


def test_auto_cutoffs_are_resolved_in_the_run(corpus: Path, tmp_path: Path) -> None:
    resolved = {}
    for name in ("auto", "min_macs"):
        config: Config = small_config(corpus, model__arch="f", model__cutoffs=name, train__steps=2)
        run = retrain(config, tmp_path / name, Silent())
        resolved[name] = run.config().model.cutoffs
        assert len(resolved[name]) == 2
        assert 0 < resolved[name][0] < resolved[name][1]
        assert str(load(run.folder).architecture) == str(Architecture("f"))
    counts = prepare(config.data).train_counts()
    head, frequent = (counts[:cut].sum() / counts.sum() for cut in resolved["auto"])
    assert head >= 0.75
    assert frequent >= 1 - 0.0625
    assert resolved["min_macs"][0] < resolved["auto"][0]


def test_validating_more_often_does_not_change_the_training(corpus: Path, tmp_path: Path) -> None:
    runs = [search(small_config(corpus, train__eval_every=every), tmp_path / str(every), Silent()) for every in (3, 24)]
    assert_same_weights(*runs)


def test_a_search_that_collapses_to_identity_continues(corpus: Path, tmp_path: Path) -> None:
    """At the first validation all pi are equal, and identity stands first in the space."""
    config = small_config(corpus, search__space=("i", "s", "f"), search__alpha_start_step=13)
    run = search(config, tmp_path / "run", Silent())
    first = next(line for line in run.metrics() if line.split == "valid")
    assert first.argmax_ppl > 1


def test_learnable_tau_comes_back_from_its_bound(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tau that has reached its lower bound still gets a gradient."""
    tasks: list[SearchTask] = []
    original = SearchTask.train_step

    def spy(self: SearchTask, step: int) -> StepResult:
        tasks.append(self)
        return original(self, step)

    monkeypatch.setattr(SearchTask, "train_step", spy)
    tau = {"search__tau_schedule": "learnable", "search__tau_start": 0.5, "search__tau_end": 0.5}
    config = small_config(corpus, search__estimator="single_path", search__alpha_lr=0.1, **tau)
    run = search(config, tmp_path / "run", Silent())
    taus = [line.tau for line in run.metrics() if line.split == "train"]
    assert min(taus) >= 0.5 - 1e-6
    assert max(taus) <= 0.5 + 1e-6
    task, log_tau = tasks[-1], tasks[-1].arch_optimizer.log_tau
    log_tau.data.fill_(math.log(0.5))
    task.arch_optimizer.zero_grad()
    samples = [DetachedGates(gates) for gates in task.gates(10)]  # a step that trains alpha
    task.update_weights(task.batches.batch(10), [sample.gates for sample in samples])
    backward_to_alpha(samples)
    assert log_tau.grad is not None
    assert log_tau.grad != 0


@pytest.mark.parametrize("clip", [0.01, 1e6])
def test_clipping_in_the_optimizer_is_clipping_before_it(clip: float) -> None:
    """And a parameter without gradient, as of a candidate that did not run, stays as it is."""

    def parameters() -> list[torch.nn.Parameter]:
        draw = torch.Generator().manual_seed(0)
        return [torch.nn.Parameter(torch.randn(shape, generator=draw)) for shape in ((3, 4), (5,), (2, 2))]

    def weights(of: list[torch.nn.Parameter]) -> dict[str, torch.nn.Parameter]:
        return {str(number): parameter for number, parameter in enumerate(of)}

    ours, theirs, untouched = parameters(), parameters(), parameters()[2]
    one, other = (make_adamw(weights(of), 0.1, 0.01) for of in (ours, theirs))
    for step in range(3):
        norms = []
        for of in (ours, theirs):
            draw = torch.Generator().manual_seed(step + 1)
            for parameter in of[:2]:
                parameter.grad = torch.randn(parameter.shape, generator=draw)
        norms.append(gradient_norm(ours))
        step_clipped(one, norms[0], clip)
        norms.append(torch.nn.utils.clip_grad_norm_(theirs, clip))
        other.step()
        torch.testing.assert_close(norms[0], norms[1])
        assert all(parameter.grad is None for parameter in ours)
    for mine, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, expected)
    assert torch.equal(ours[2], untouched)


def test_relative_biases_and_norms_are_not_decayed() -> None:
    network = TransformerXL.build(Config().model, Architecture("sf"), 40)
    decayed, spared = make_adamw(dict(network.named_parameters()), 0.1, 0.01).param_groups
    assert {id(network.u), id(network.v)} <= {id(parameter) for parameter in spared["params"]}
    assert sum(parameter.dim() > 1 for parameter in spared["params"]) == 2
    assert decayed["weight_decay"] == 0.01
    assert spared["weight_decay"] == 0
    assert len(decayed["params"]) + len(spared["params"]) == len(list(network.parameters()))


def test_weights_that_are_not_finite_are_not_saved(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = RetrainTask.train_step

    def poison(self: RetrainTask, step: int) -> StepResult:
        result = original(self, step)
        if step == 15:
            self.weight_optimizer.parameters[0].data.fill_(torch.inf)
        return result

    monkeypatch.setattr(RetrainTask, "train_step", poison)
    config = small_config(corpus, model__arch="f", train__log_every=16)
    with pytest.raises(ParnasError, match=r"step 16.*step-00000012"):
        retrain(config, tmp_path / "run", Silent())
    assert list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000012"


def test_a_warmup_longer_than_the_run_is_noted(corpus: Path, tmp_path: Path) -> None:
    notes: list[str] = []
    reporter = Silent()
    reporter.note = notes.append  # type: ignore[method-assign]
    retrain(small_config(corpus, model__arch="f", train__warmup_steps=4000), tmp_path / "run", reporter)
    assert any("warm-up of 4000 steps is shortened to 2;" in note for note in notes)


def test_log_file_has_the_network_as_a_table_and_the_metrics_in_words(search_run: Run, retrain_run: Run) -> None:
    for run in (search_run, retrain_run):
        lines = (run.folder / "run.log").read_text().splitlines()
        metrics = run.metrics()
        assert len([line for line in lines if " loss " in line]) == len(metrics)
        assert "train loss" in lines[-len(metrics)]
        total = next(line for line in lines if line.split()[:1] == ["total"])
        assert total.split()[1] == f"{run.summary().parameters:,}"


@pytest.mark.parametrize("settings", [{}, {"model__norm": "pre", "model__cutoffs": (10,), "model__tie_weights": False}])
def test_the_table_of_a_network_adds_up(corpus: Path, settings: dict[str, object]) -> None:
    config = small_config(corpus, **settings)
    counts = list(range(40, 0, -1))
    for model in (
        SuperNet(config.model, ("s", "f", "i"), 2, 40),
        TransformerXL.build(config.model, Architecture("sf"), 40),
    ):
        parts = list(parts_of(model, "sf", 8, config.model.reach, counts))
        assert sum(part.parameters for part in parts) == sum(weight.numel() for weight in model.parameters())
        expected = pytest.approx(model.multiply_adds(8, config.model.reach, counts))
        assert sum(part.multiply_adds for part in parts) == expected
        assert [part.block for part in parts if part.block] == ["1", "2"]
    attention = next(part for part in parts if part.block == "1")
    assert "query 16×16" in attention.shapes


def test_relative_path_of_the_corpus_is_kept_absolute(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(corpus.parent)
    config = small_config(Path(corpus.name), model__arch="f", train__steps=2)
    run = retrain(config, tmp_path / "run", Silent())
    assert Path(run.config().data.corpus) == corpus


@pytest.mark.slow
@needs_compiler
def test_compiled_network_trains_as_the_eager_one(corpus: Path, tmp_path: Path) -> None:
    changes = {"model__arch": "s", "train__steps": 2, "train__log_every": 1, "model__dropout": 0.0}
    eager = retrain(small_config(corpus, **changes), tmp_path / "eager", Silent())
    compiled = retrain(small_config(corpus, **changes, runtime__compile=True), tmp_path / "compiled", Silent())
    for one, other in zip(eager.metrics(), compiled.metrics(), strict=True):
        assert one.loss == pytest.approx(other.loss, rel=1e-4)


def test_a_restore_that_fails_is_an_error_not_a_warning(retrain_run: Run, tmp_path: Path) -> None:
    """The checkpoint is whole, but of a network of another width."""
    shutil.copytree(retrain_run.folder, tmp_path / "run")
    run = Run(tmp_path / "run")
    (run.folder / "summary.json").unlink()
    path = run.folder / "config.yaml"
    path.write_text(path.read_text().replace("d_inner: 32", "d_inner: 64"))
    with pytest.raises(ParnasError, match="step-00000024"):
        load(run.folder)
    with pytest.raises(ParnasError, match="step-00000024"):
        retrain(run.config(), run.folder, Silent(), resume=True)


def test_figures_of_recent_steps_hold_no_tensor_of_a_step() -> None:
    """Small tensors that outlive their step fragment the heap: memory grew from one line of metrics to the next."""
    recent, norm = RecentSteps(torch.device("cpu")), torch.tensor(2.0)
    for step in range(150):
        loss = torch.tensor(float(step))
        alive = weakref.ref(loss)
        recent.add(loss, norm)
        del loss
        assert alive() is None
    assert recent.values.tolist() == [[float(step), 2.0] for step in range(150)]
    restored = RecentSteps(torch.device("cpu"))
    restored.restore(recent.values.clone())
    assert torch.equal(restored.values, recent.values)
    recent.clear()
    assert not len(recent.values)
