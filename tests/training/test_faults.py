"""What may go wrong while a network is trained: interruptions, full disks, two at once, leftovers."""

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_config
from helpers.training_helpers import Notes, Phase, Stop, StopAfter, assert_same_weights, without_times

from parnas.architecture import Architecture
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.search import search
from parnas.runs.run import LOCK, Run
from parnas.training import checkpoints
from parnas.training.checkpoints import Best, CheckpointWriter, Snapshot, list_checkpoints, load_state, save_checkpoint
from parnas.training.loaded_run import load
from parnas.training.progress import Silent
from parnas.training.retrain import retrain
from parnas.training.trainer import TrainingTask

# The same command again.


@pytest.mark.parametrize("phase", [search, retrain])
def test_the_same_command_resumes_a_killed_run(phase: Phase, corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", model__dropout=0.2)
    whole = phase(config, tmp_path / "whole", Silent())
    with pytest.raises(Stop):
        phase(config, tmp_path / "run", StopAfter(11))
    reporter = Notes()
    again = phase(config, tmp_path / "run", reporter)
    assert "resuming after step 8 of 24" in reporter.notes
    assert_same_weights(whole, again)
    assert without_times(whole.metrics()) == without_times(again.metrics())


def test_a_run_starts_in_a_folder_that_an_incomplete_start_left(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", train__steps=8)
    run = retrain(config, tmp_path / "run", Silent())
    for kept in ({"environment.json"}, {"environment.json", "config.yaml", "tokenizer"}, set[str]()):
        for path in run.folder.iterdir():
            if path.name not in kept:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        (run.folder / ".config.123.tmp.yaml").write_text("cut short")
        assert retrain(config, run.folder, Silent()).finished()


def test_files_of_others_are_never_overwritten(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text("mine")
    with pytest.raises(ParnasError, match=str(tmp_path / "run")):
        retrain(small_config(corpus, model__arch="sf"), tmp_path / "run", Silent())
    assert (tmp_path / "run" / "config.yaml").read_text() == "mine"


def test_resume_starts_no_new_run(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match=r"has no environment\.json"):
        retrain(small_config(corpus, model__arch="sf"), tmp_path / "run", Silent(), resume=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__log_every": 6, "train__eval_every": 24, "train__save_every": 5},
        {"train__max_skipped_steps": 3, "evaluation__batch_size": 7, "runtime__checkpoint_activations": True},
    ],
)
def test_settings_that_change_no_weight_may_change(changes: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf")
    whole = retrain(config, tmp_path / "whole", Silent())
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(11))
    reporter, changed = Notes(), config.replace(**changes)
    run = retrain(changed, tmp_path / "run", reporter)
    assert_same_weights(whole, run)
    assert run.config() == changed
    key = next(iter(changes)).replace("__", ".")
    assert any(note.startswith(f"resuming with a changed setting: {key}: ") for note in reporter.notes)


def test_threads_may_change_and_the_run_names_those_it_was_resumed_with(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", runtime__threads=1)
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(11))
    assert Run(tmp_path / "run").environment().threads == 1
    run = retrain(config.replace(runtime__threads=2), tmp_path / "run", Silent())
    assert (run.environment().threads, run.config().runtime.threads) == (2, 2)


def test_a_run_that_moved_to_another_machine_names_its_threads(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf")
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(11))
    Run(tmp_path / "run").set_threads(7)
    assert retrain(config, tmp_path / "run", Silent()).environment().threads == torch.get_num_threads()


def test_steps_may_grow_and_not_shrink(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf")
    run = retrain(config, tmp_path / "run", Silent())
    with pytest.raises(ParnasError, match=r"train\.steps"):
        retrain(config, run.folder, Silent())
    grown = retrain(config.replace(train__steps=32), run.folder, Silent())
    assert grown.summary().steps == 32
    assert [line.step for line in run.metrics() if line.split == "train"] == list(range(4, 33, 4))
    (run.folder / "summary.json").unlink()
    with pytest.raises(ParnasError, match=r"train\.steps 32"):
        retrain(config.replace(train__steps=24), run.folder, Silent())


def test_two_runs_on_one_folder_are_one_too_many(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", train__steps=8)
    folder = tmp_path / "run"
    trouble: list[str] = []

    class Rival(Silent):
        """Begins the same run from within it."""

        def advance(self, step: int) -> None:
            if step == 6:
                with pytest.raises(ParnasError, match=str(folder)) as refusal:
                    retrain(config, folder, Silent())
                trouble.append(str(refusal.value))

    assert retrain(config, folder, Rival()).finished()
    assert len(trouble) == 1


def test_the_lock_of_a_killed_process_is_gone(corpus: Path, tmp_path: Path) -> None:
    code = f"import sys, os; from parnas.runs.run import Run\nwith Run({str(tmp_path / 'run')!r}).locked(): os.abort()"
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True)
    assert (tmp_path / "run" / LOCK).exists()
    config = small_config(corpus, model__arch="sf", train__steps=2)
    assert retrain(config, tmp_path / "run", Silent()).finished()


# Checkpoints.


def test_the_best_checkpoint_is_kept_beside_the_last_five(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0])
    original = TrainingTask.validate

    def scripted(self: TrainingTask) -> object:
        found = original(self)["valid"]
        return {"valid": type(found)(next(losses) * found.tokens, found.tokens)}

    monkeypatch.setattr(TrainingTask, "validate", scripted)
    config = small_config(corpus, model__arch="f", train__save_every=3, train__eval_every=3)
    run = retrain(config, tmp_path / "run", Silent())
    kept = [int(path.name.removeprefix("step-")) for path in list_checkpoints(run.checkpoints)]
    assert kept == [6, 12, 15, 18, 21, 24]
    assert run.summary().best.to_dict() == {"step": 6, "loss": pytest.approx(2.0)}
    assert load(run.folder).step == 24
    assert load(run.folder, best=True).step == 6
    shutil.rmtree(run.checkpoints / "step-00000006")
    with pytest.raises(ParnasError, match="step-00000006"):
        load(run.folder, best=True)


def test_a_new_best_is_saved_whatever_save_every_says(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="f", train__save_every=1000, train__eval_every=10)
    run = retrain(config, tmp_path / "run", Silent())
    assert [path.name for path in list_checkpoints(run.checkpoints)] == [f"step-{step:08d}" for step in (10, 20, 24)]


def test_the_best_so_far_outlives_an_interruption(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", train__eval_every=6)
    whole = retrain(config, tmp_path / "whole", Silent())
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(17))
    assert retrain(config, tmp_path / "run", Silent()).summary().best == whole.summary().best


def test_a_snapshot_does_not_change_with_the_network() -> None:
    network = TransformerXL.build(Config().model, Architecture("sf"), 40)
    state = {"memory": (torch.zeros(2), None), "list": [torch.ones(1)]}
    snapshot = Snapshot.copy(3, network, state)
    before = {name: tensor.clone() for name, tensor in snapshot.weights.items()}
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(1)
    state["memory"][0].add_(1)
    assert all(torch.equal(before[name], snapshot.weights[name]) for name in before)
    assert snapshot.state["memory"][0].sum() == 0


def test_trouble_in_the_background_is_raised_by_the_next_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoints, "save_checkpoint", full)
    writer = CheckpointWriter(tmp_path)
    writer.write(Snapshot(1, {}, {}))
    with pytest.raises(OSError, match="No space left"):
        writer.wait()
    writer.wait()


def test_a_checkpoint_holds_the_state_of_every_generator(corpus: Path, tmp_path: Path) -> None:
    class Draws(Silent):
        """Draws from the libraries' generators, as a user's own layer might."""

        def __init__(self, end: int | None = None) -> None:
            self.end, self.drawn = end, dict[int, tuple[float, float]]()

        def advance(self, step: int) -> None:
            self.drawn[step] = random.random(), float(np.random.rand())
            if step == self.end:
                raise Stop

    config = small_config(corpus, model__arch="sf")
    random.seed(5), np.random.seed(5)
    whole = Draws()
    retrain(config, tmp_path / "whole", whole)
    random.seed(5), np.random.seed(5)
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", Draws(13))
    random.seed(6), np.random.seed(6)
    again = Draws()
    retrain(config, tmp_path / "run", again)
    assert again.drawn == {step: drawn for step, drawn in whole.drawn.items() if step > 12}


def test_a_save_leaves_other_folders_than_checkpoints_alone(tmp_path: Path) -> None:
    (tmp_path / "step-notes").mkdir(parents=True)
    for step in range(1, 9):
        save_checkpoint(tmp_path, Snapshot(step, {"w": torch.zeros(1)}, {}, Best(1, 2.0)))
    assert (tmp_path / "step-notes").is_dir()
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [1, 4, 5, 6, 7, 8]
    assert load_state(tmp_path / "step-00000001") == {}


def test_evaluate_takes_the_best_weights_where_asked(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from parnas.evaluation.comparison import compare
    from parnas.evaluation.loading import EvalOptions

    config = small_config(corpus, model__arch="f", train__eval_every=6)
    run = retrain(config, tmp_path / "run", Silent())
    newest = list_checkpoints(run.checkpoints)[-1] / "manifest.json"
    newest.write_text(json.dumps({**json.loads(newest.read_text()), "best": {"step": 12, "loss": 1.0}}))
    last, best = (compare([run.folder], EvalOptions(best=best), Silent()).table["ppl"][0] for best in (False, True))
    by_step = {line.step: line.ppl for line in run.metrics() if line.split == "valid"}
    assert last == pytest.approx(by_step[24], rel=1e-5)
    assert best == pytest.approx(by_step[12], rel=1e-5)


# Refusals and leftovers.


def test_a_refusal_leaves_a_finished_run_as_it_was(corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus, tmp_path / "corpus")
    config = small_config(tmp_path / "corpus", model__arch="sf")
    run = retrain(config, tmp_path / "run", Silent())
    before = {path: path.read_bytes() for path in run.folder.glob("*.*") if path.is_file()}
    with (tmp_path / "corpus" / "train.txt").open("a") as file:
        file.write("one more line .\n")
    for changes in ({"train__steps": 40}, {"train__steps": 40, "train__lr": 1.0}):
        with pytest.raises(ParnasError):
            retrain(config.replace(**changes), run.folder, Silent())
    for path in list_checkpoints(run.checkpoints):
        (path / "state.pt").write_bytes(b"damaged")
    shutil.copytree(corpus, tmp_path / "corpus", dirs_exist_ok=True)
    with pytest.raises(ParnasError, match="intact"):
        retrain(config.replace(train__steps=40), run.folder, Silent())
    assert before == {path: path.read_bytes() for path in run.folder.glob("*.*") if path.is_file()}


def test_a_run_without_a_checkpoint_may_start_with_other_settings(corpus: Path, tmp_path: Path) -> None:
    """As after a mistake that shows only when the run is made, such as a batch that the text does not fill."""
    config = small_config(corpus, model__arch="sf")
    with pytest.raises(ParnasError, match="batch_size"):
        retrain(config.replace(data__batch_size=5000), tmp_path / "run", Silent())
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(5))
    run = retrain(config.replace(train__lr=1e-3), tmp_path / "run", Silent())
    assert [line.step for line in run.metrics() if line.split == "train"] == [4, 8, 12, 16, 20, 24]


def test_a_run_whose_checkpoints_were_removed_does_not_start_again(retrain_run: Run, tmp_path: Path) -> None:
    shutil.copytree(retrain_run.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ParnasError, match="already has files"):
        retrain(retrain_run.config(), tmp_path / "run", Silent())


def test_what_killed_writers_left_is_removed(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", train__steps=4, train__save_every=3)
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(2))
    (tmp_path / "run" / "checkpoints" / ".step-00000123.77.tmp").mkdir(parents=True)
    run = retrain(config, tmp_path / "run", Silent())
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000003", "step-00000004"]
