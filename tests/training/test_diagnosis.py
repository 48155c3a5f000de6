"""Numbers that are not finite and memory that ends: what is told, skipped and kept."""

import resource
import subprocess
import sys
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_config
from helpers.training_helpers import Notes, Phase, Stop, StopAfter, final_weights

from parnas.config.loader import dump_config
from parnas.data.batching import Batch, TrainingBatches
from parnas.errors import Diverged, OutOfMemory, says_out_of_memory
from parnas.model.blocks import BlockOutput
from parnas.model.gates import Gates
from parnas.model.layers import FeedForward
from parnas.nas.architecture_optimizer import ArchitectureOptimizer
from parnas.nas.search import SearchTask, search
from parnas.training.optimizers import gradient_norm, make_adamw, step_clipped
from parnas.training.progress import Silent
from parnas.training.retrain import retrain
from parnas.training.trainer import Session
from parnas.training.weight_optimizer import GradientAccumulator

ROOT = Path(__file__).resolve().parents[2]


def poison(monkeypatch: pytest.MonkeyPatch, steps: set[int], where: str = "gradient") -> None:
    """Let the feed-forward layers of training give what is not finite in the calls of some steps, from 1 on."""
    original, calls = FeedForward.forward, [0]

    def forward(self: FeedForward, *given: object) -> BlockOutput:
        output = original(self, *given)  # type: ignore[arg-type]
        if not self.training:
            return output
        calls[0] += torch.is_grad_enabled()
        if calls[0] in steps:
            hidden = output.hidden
            bad = hidden * torch.nan if where == "loss" else hidden + torch.sqrt(hidden * 0)
            return output._replace(hidden=bad)
        return output

    monkeypatch.setattr(FeedForward, "forward", forward)


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_gpu_that_checks_many_steps_at_once_names_the_first_bad_one(
    where: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "checks_each_step", False)
    poison(monkeypatch, {11}, where)
    with pytest.raises(Diverged, match=rf"{where} .*step 11.*step-00000008"):
        retrain(small_config(corpus, model__arch="sfs"), tmp_path / "run", Silent())


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_the_diagnosis_names_step_block_and_checkpoint(
    where: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {11}, where)
    with pytest.raises(Diverged, match=rf"{where} .*step 11.*block 2\..*step-00000008.*train\.clip"):
        retrain(small_config(corpus, model__arch="sfs"), tmp_path / "run", Silent())


@pytest.mark.parametrize("phase", [search, retrain])
def test_bad_steps_are_skipped_up_to_a_limit(
    phase: Phase, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model__arch": "sf", "search__estimator": "soft", "search__blocks": 1, "train__max_skipped_steps": 2}
    config, reporter = small_config(corpus, **changes), Notes()
    poison(monkeypatch, {11, 14})
    run = phase(config, tmp_path / "run", reporter)
    assert [note for note in reporter.notes if "skipped" in note] == [
        "warning: step 11 is skipped: its gradient is not finite (skip 1 of at most 2, train.max_skipped_steps)",
        "warning: step 14 is skipped: its gradient is not finite (skip 2 of at most 2, train.max_skipped_steps)",
    ]
    assert run.summary().skipped_steps == 2
    assert all(tensor.isfinite().all() for tensor in final_weights(run).values())
    if phase is search:
        assert all(np.isfinite(record.pi).all() for record in run.pi_records())
    monkeypatch.undo()
    poison(monkeypatch, {11, 14, 17})
    with pytest.raises(Diverged, match="step 17"):
        phase(config, tmp_path / "another", Silent())


def test_the_diagnosis_of_a_search_reads_the_paths_of_the_step_that_failed(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sampled, read = list[object](), list[object]()
    gates, forward = SearchTask.gates, GradientAccumulator.forward

    def sample(self: SearchTask, step: int) -> list[Gates]:
        sampled.append(gates(self, step))
        return sampled[-1]  # type: ignore[return-value]

    def record(self: GradientAccumulator, batch: Batch, memory: object, samples: list[Gates], **more: bool) -> object:
        read.append(samples)
        return forward(self, batch, memory, samples, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(SearchTask, "gates", sample)
    monkeypatch.setattr(GradientAccumulator, "forward", record)
    poison(monkeypatch, set(range(5, 100)), "loss")
    with pytest.raises(Diverged):
        search(small_config(corpus, search__space=("s", "f")), tmp_path / "run", Silent())
    failed, again = read[-2:]
    assert again is failed


@pytest.mark.parametrize("estimator", ["uniform", "single_path"])
def test_a_non_finite_arch_step_is_skipped_and_forgotten(
    estimator: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what the estimator has learnt nor the memory of alpha's text keeps what is not finite."""
    original, bad = SearchTask._backward_held_out, [True]

    def backward(self: SearchTask, step: int, batches: TrainingBatches) -> None:
        if bad and bad.pop():
            with monkeypatch.context() as patch:
                patch.setattr(FeedForward, "forward", infinite)
                return original(self, step, batches)
        return original(self, step, batches)

    forward = FeedForward.forward

    def infinite(self: FeedForward, *given: object) -> BlockOutput:
        output = forward(self, *given)  # type: ignore[arg-type]
        return output._replace(hidden=output.hidden * torch.inf)

    monkeypatch.setattr(SearchTask, "_backward_held_out", backward)
    changes = {"search__estimator": estimator, "search__space": ("f",), "train__max_skipped_steps": 1}
    config, reporter = small_config(corpus, search__alpha_split=0.3, **changes), Notes()
    run = search(config, tmp_path / "run", reporter)
    assert [note for note in reporter.notes if "skipped" in note] == [
        "warning: step 7 is skipped: its gradient of alpha is not finite (skip 1 of at most 1, train.max_skipped_steps)"
    ]
    assert all(np.isfinite(record.pi).all() for record in run.pi_records())


def test_a_guarded_step_leaves_the_weights_where_the_norm_is_not_finite() -> None:
    """What a GPU does without waiting for the norm."""
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = make_adamw({"w": weight}, 0.1, 0.01)
    for gradient, changed in ((torch.inf, False), (1.0, True)):
        weight.grad = torch.full_like(weight, gradient)
        step_clipped(optimizer, gradient_norm([weight]), 1.0, skip_non_finite=True)
        assert bool((weight != 1).all()) == changed


def test_out_of_memory_names_the_block_and_what_to_lower(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, passes = FeedForward.forward, count(1)

    def hungry(self: FeedForward, *given: object) -> BlockOutput:
        if self.training and next(passes) == 8:
            torch.empty(1 << 60, dtype=torch.uint8)
        return original(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(FeedForward, "forward", hungry)
    config = small_config(corpus, model__arch="ssf", train__save_every=5)
    with pytest.raises(OutOfMemory, match=r"after step 7.*block 3\..*step-00000005.*data\.batch_size"):
        retrain(config, tmp_path / "run", Silent())


@pytest.mark.slow
def test_memory_that_the_system_refuses_ends_in_one_message(corpus: Path, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(small_config(corpus, model__arch="sf", model__d_model=2000, model__d_inner=999_999)))
    answer = subprocess.run(
        [sys.executable, str(ROOT / "retrain.py"), str(path), "--run", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30)),
    )
    assert answer.returncode == 2, answer.stderr
    assert "Traceback" not in answer.stderr
    assert "memory" in answer.stderr


def test_a_limit_that_was_lowered_still_holds(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(corpus, model__arch="sf", train__max_skipped_steps=5)
    poison(monkeypatch, {3, 4, 12})
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(9))
    with pytest.raises(Diverged, match="step 11"):  # the 12th call, since the ninth step was done twice
        retrain(config.replace(train__max_skipped_steps=1), tmp_path / "run", Silent())


def test_exhausted_memory_on_resuming_is_not_reported_as_damage(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    config = small_config(corpus, model__arch="sf")
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(9))
    for place in (
        "parnas.training.trainer.Trainer.load_state_dict",
        "torch.load",
        "parnas.training.checkpoints.load_model",
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, refuse)
            with pytest.raises(OutOfMemory, match="after step 8"):
                retrain(config, tmp_path / "run", Silent())


@pytest.fixture
def spoiled_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of alpha is not a number in the 13th step."""
    original = ArchitectureOptimizer.add_regularisation

    def spoil(self: ArchitectureOptimizer, step: int) -> None:
        original(self, step)
        if step == 12:
            self.parameters[0].grad = torch.full_like(self.parameters[0], torch.nan)

    monkeypatch.setattr(ArchitectureOptimizer, "add_regularisation", spoil)


@pytest.mark.usefixtures("spoiled_alpha")
@pytest.mark.parametrize("skips", [0, 1])
def test_alpha_learns_nothing_from_what_is_not_finite(skips: int, corpus: Path, tmp_path: Path) -> None:
    changes = {"search__estimator": "soft", "train__max_skipped_steps": skips}
    if not skips:
        with pytest.raises(Diverged, match=r"gradient of alpha .*step 13.*block 1"):
            search(small_config(corpus, **changes), tmp_path / "run", Silent())
        return
    run = search(small_config(corpus, **changes), tmp_path / "run", Silent())
    assert run.summary().skipped_steps == 1
    assert np.isfinite([record.pi for record in run.pi_records()]).all()


@pytest.mark.usefixtures("spoiled_alpha")
def test_a_gpu_that_checks_many_steps_at_once_reports_the_gradient_of_alpha(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Session, "checks_each_step", False)
    with pytest.raises(Diverged, match="step 13"):
        search(small_config(corpus, search__estimator="soft"), tmp_path / "run", Silent())


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("CUDA error: an illegal memory access was encountered", False),
        ("Unsupported memory format", False),
        ("CUDA out of memory. Tried to allocate 1 GiB", True),
        ("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling", True),
        ("[enforce fail at alloc_cpu.cpp] DefaultCPUAllocator: can't allocate memory: you tried", True),
    ],
)
def test_only_exhausted_memory_is_reported_as_such(text: str, told: bool) -> None:
    assert says_out_of_memory(RuntimeError(text)) == told
