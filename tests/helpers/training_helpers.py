"""Interrupted trainings, and comparisons of run folders."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from parnas.config.loader import Config
from parnas.data.batching import Batch
from parnas.model.gates import Gates
from parnas.model.transformer_xl import TransformerXL
from parnas.runs.records import MetricsRecord
from parnas.runs.run import SPEED_KEYS, Run
from parnas.training.checkpoints import list_checkpoints
from parnas.training.perplexity import TotalLoss
from parnas.training.progress import Silent
from parnas.training.trainer import StepResult, TrainingTask

Phase = Callable[..., Run]


class Stop(Exception):
    """Stands for the death of the process."""


class StopAfter(Silent):
    """A reporter that raises `Stop` after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def advance(self, step: int) -> None:
        if step == self.step:
            raise Stop


class Recorded:
    """Flat weights of a training before and after each step, and the weights that are validated, by step."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.before, self.after, self.validated = list[Tensor](), list[Tensor](), dict[int, Tensor]()
        update, measure = TrainingTask.update_weights, TrainingTask.validation_loss

        def update_weights(task: TrainingTask, batch: Batch, gates: Gates | None) -> StepResult:
            self.before.append(weights_of(task))
            result = update(task, batch, gates)
            self.after.append(weights_of(task))
            return result

        def validation_loss(task: TrainingTask, model: TransformerXL) -> TotalLoss:
            self.validated[len(self.after)] = weights_of(task)
            return measure(task, model)

        monkeypatch.setattr(TrainingTask, "update_weights", update_weights)
        monkeypatch.setattr(TrainingTask, "validation_loss", validation_loss)

    def assert_untouched(self) -> None:
        """Assert that each step starts from the weights that the previous one left."""
        for old, new in zip(self.after[:-1], self.before[1:], strict=True):
            assert torch.equal(new, old)


def weights_of(task: TrainingTask) -> Tensor:
    return nn.utils.parameters_to_vector(task.model.parameters()).detach().clone()


class Notes(Silent):
    """A reporter that records the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def final_weights(run: Run) -> dict[str, torch.Tensor]:
    return load_file(list_checkpoints(run.checkpoints)[-1] / "model.safetensors")


def assert_same_weights(one: Run, other: Run) -> None:
    """Assert that final weights are equal bit for bit; the order of names in a safetensors file is arbitrary."""
    expected, found = final_weights(one), final_weights(other)
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def without_times(records: list[MetricsRecord]) -> list[dict[str, object]]:
    return [{key: value for key, value in record.to_dict().items() if key not in SPEED_KEYS} for record in records]


def assert_resumes(phase: Phase, config: Config, folder: Path, killed_after: int) -> Run:
    """Assert that a resumed run equals an uninterrupted one bit for bit; return the uninterrupted one."""
    whole = phase(config, folder / "whole", Silent())
    with pytest.raises(Stop):
        phase(config, folder / "killed", StopAfter(killed_after))
    resumed = phase(config, folder / "killed", Silent(), resume=True)
    assert_same_weights(whole, resumed)
    assert without_times(whole.metrics()) == without_times(resumed.metrics())
    if whole.kind() == "search":
        assert whole.pi_records() == resumed.pi_records()
    return whole
