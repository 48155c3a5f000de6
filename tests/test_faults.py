"""What may go wrong while a network is trained: interruptions, full disks, numbers that are not finite, two at once."""

import json
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import small_config
from training_helpers import Phase, Stop, StopAfter, assert_same_weights, final_weights, without_times

from parnas.architecture import Architecture
from parnas.config import Config, dump_config
from parnas.errors import Diverged, OutOfMemory, ParnasError, says_out_of_memory
from parnas.model.blocks import BlockOutput
from parnas.model.layers import FeedForward
from parnas.model.transformer_xl import TransformerXL
from parnas.nas.search import search
from parnas.run import LOCK, METRICS, PI, Run
from parnas.training import checkpoint as checkpoints
from parnas.training.checkpoint import Best, Snapshot, Writer, list_checkpoints, load_state, save_checkpoint
from parnas.training.optimizers import gradient_norm, make_adamw, step_clipped
from parnas.training.phases import load
from parnas.training.reporter import Silent
from parnas.training.retrain import retrain
from parnas.training.stopping import Stopped
from parnas.training.trainer import Trainer

ROOT = Path(__file__).resolve().parent.parent


class Notes(Silent):
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


# The same command again.


@pytest.mark.parametrize("phase", [search, retrain])
def test_the_same_command_again_goes_on_where_it_was_killed(phase: Phase, corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", model__dropout=0.2)
    whole = phase(config, tmp_path / "whole", Silent())
    with pytest.raises(Stop):
        phase(config, tmp_path / "run", StopAfter(11))
    reporter = Notes()
    again = phase(config, tmp_path / "run", reporter)
    assert "resuming after step 8 of 24" in reporter.notes
    assert_same_weights(whole, again)
    assert without_times(whole.records(METRICS)) == without_times(again.records(METRICS))


def test_a_folder_left_before_its_run_was_begun_is_begun_anew(corpus: Path, tmp_path: Path) -> None:
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
    with pytest.raises(ParnasError, match="holds files that are no unfinished run"):
        retrain(small_config(corpus, model__arch="sf"), tmp_path / "run", Silent())
    assert (tmp_path / "run" / "config.yaml").read_text() == "mine"


def test_resume_never_begins_anew(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match=r"has no environment\.json"):
        retrain(small_config(corpus, model__arch="sf"), tmp_path / "run", Silent(), resume=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"train__log_every": 6, "train__eval_every": 24, "train__save_every": 5},
        {"train__skip_bad_steps": 3, "evaluation__batch_size": 7, "runtime__checkpoint_activations": True},
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
    assert any(note.startswith(f"going on with another {key}: ") for note in reporter.notes)


def test_steps_may_grow_and_not_shrink(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf")
    run = retrain(config, tmp_path / "run", Silent())
    with pytest.raises(ParnasError, match=r"is finished.*or raise train\.steps to train on"):
        retrain(config, run.folder, Silent())
    grown = retrain(config.replace(train__steps=32), run.folder, Silent())
    assert grown.summary()["steps"] == 32
    assert [line["step"] for line in run.records(METRICS) if line["split"] == "train"] == list(range(4, 33, 4))
    (run.folder / "summary.json").unlink()
    with pytest.raises(ParnasError, match=r"train\.steps 32, which may grow, not shrink"):
        retrain(config.replace(train__steps=24), run.folder, Silent())


def test_two_runs_on_one_folder_are_one_too_many(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", train__steps=8)
    folder = tmp_path / "run"
    trouble: list[str] = []

    class Rival(Silent):
        """Begins the same run from within it."""

        def advance(self, step: int) -> None:
            if step == 6:
                with pytest.raises(ParnasError, match="Another process is training into") as refusal:
                    retrain(config, folder, Silent())
                trouble.append(str(refusal.value))

    assert retrain(config, folder, Rival()).finished()
    assert len(trouble) == 1


def test_the_lock_of_a_killed_process_is_gone(corpus: Path, tmp_path: Path) -> None:
    code = f"import sys, os; from parnas.run import Run\nwith Run({str(tmp_path / 'run')!r}).locked(): os.abort()"
    subprocess.run([sys.executable, "-c", code], check=False, timeout=60, capture_output=True)
    assert (tmp_path / "run" / LOCK).exists()
    config = small_config(corpus, model__arch="sf", train__steps=2)
    assert retrain(config, tmp_path / "run", Silent()).finished()


# Checkpoints.


def test_the_best_checkpoint_is_kept_beside_the_last_five(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = iter([3.0, 2.0, 2.5, 2.6, 2.7, 2.8, 2.9, 3.0])
    original = Trainer.validate

    def told(self: Trainer) -> object:
        found = original(self)["valid"]
        return {"valid": type(found)(next(losses) * found.tokens, found.tokens)}

    monkeypatch.setattr(Trainer, "validate", told)
    config = small_config(corpus, model__arch="f", train__save_every=3, train__eval_every=3)
    run = retrain(config, tmp_path / "run", Silent())
    kept = [int(path.name.removeprefix("step-")) for path in list_checkpoints(run.checkpoints)]
    assert kept == [6, 12, 15, 18, 21, 24]
    assert run.summary()["best"] == {"step": 6, "loss": pytest.approx(2.0)}
    assert load(run.folder).step == 24
    assert load(run.folder, best=True).step == 6
    shutil.rmtree(run.checkpoints / "step-00000006")
    with pytest.raises(ParnasError, match=r"best checkpoint, .*step-00000006, is missing"):
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
    assert retrain(config, tmp_path / "run", Silent()).summary()["best"] == whole.summary()["best"]


def test_a_snapshot_does_not_change_with_the_network() -> None:
    network = TransformerXL.build(Config().model, Architecture("sf"), 40)
    state = {"memory": (torch.zeros(2), None), "list": [torch.ones(1)]}
    snapshot = Snapshot.of(3, network, state)
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
    writer = Writer(tmp_path)
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


def test_other_versions_of_libraries_are_told(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf")
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(9))
    manifest = list_checkpoints(tmp_path / "run" / "checkpoints")[-1] / "manifest.json"
    content = json.loads(manifest.read_text())
    assert content["versions"]["torch"] == torch.__version__
    manifest.write_text(json.dumps({**content, "versions": {"torch": "1.0"}}))
    reporter = Notes()
    retrain(config, tmp_path / "run", reporter)
    assert any("was written with torch 1.0, now" in note for note in reporter.notes)


def test_a_save_leaves_other_folders_than_checkpoints_alone(tmp_path: Path) -> None:
    (tmp_path / "step-notes").mkdir(parents=True)
    for step in range(1, 9):
        save_checkpoint(tmp_path, Snapshot(step, {"w": torch.zeros(1)}, {}, Best(1, 2.0)))
    assert (tmp_path / "step-notes").is_dir()
    assert [int(path.name[5:]) for path in list_checkpoints(tmp_path)] == [1, 4, 5, 6, 7, 8]
    assert load_state(tmp_path / "step-00000001") == {}


# Signals.


def start(config: Config, folder: Path, tmp_path: Path) -> subprocess.Popen[str]:
    """The command in a process of its own, once it has trained some steps."""
    path = tmp_path / "config.yaml"
    path.write_text(dump_config(config))
    command = [sys.executable, str(ROOT / "retrain.py"), str(path), "--run", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for(folder / METRICS, process)
    return process


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    for _ in range(1200):
        if (path.is_file() and path.stat().st_size) or process.poll() is not None:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path} does not come")


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(
    number: signal.Signals, corpus: Path, tmp_path: Path
) -> None:
    config = small_config(corpus, model__arch="sf", train__steps=1200, train__save_every=5000, train__eval_every=1200)
    folder = tmp_path / "run"
    process = start(config, folder, tmp_path)
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 128 + number, errors
    assert "Traceback" not in errors
    told = re.search(rf"stopped by {number.name} after step (\d+), which is saved; go on with: parnas retrain", errors)
    assert told, errors
    assert [path.name for path in list_checkpoints(folder / "checkpoints")] == [f"step-{int(told[1]):08d}"]
    again = retrain(config, folder, Silent())
    assert_same_weights(retrain(config, tmp_path / "whole", Silent()), again)


@pytest.mark.slow
def test_a_second_interrupt_leaves_at_once(corpus: Path, tmp_path: Path) -> None:
    """In the middle of a step that the first one waits for; what was saved before is whole."""
    changes = {"data__batch_size": 16, "data__tgt_len": 256, "model__d_model": 128, "model__d_inner": 4096}
    config = small_config(corpus, model__arch="(sf)*6", train__steps=10**6, train__log_every=1, **changes)
    process = start(config.replace(train__save_every=1), tmp_path / "run", tmp_path)
    try:
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "finishing this step" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "interrupted; go on with: parnas retrain" in errors


def test_signals_are_as_before_after_a_training(corpus: Path, tmp_path: Path) -> None:
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    class Signalled(Silent):
        def advance(self, step: int) -> None:
            if step == 7:
                signal.raise_signal(signal.SIGTERM)

    config = small_config(corpus, model__arch="sf")
    with pytest.raises(Stopped, match="after step 7"):
        retrain(config, tmp_path / "run", Signalled())
    assert handlers == [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    assert_same_weights(retrain(config, tmp_path / "whole", Silent()), retrain(config, tmp_path / "run", Silent()))


def test_a_training_in_a_thread_handles_no_signals(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", train__steps=4)
    thread = threading.Thread(target=retrain, args=(config, tmp_path / "run", Silent()))
    thread.start()
    thread.join()
    assert Run(tmp_path / "run").finished()


# Numbers that go wrong, and memory that ends.


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
def test_the_diagnosis_names_step_block_and_checkpoint(
    where: str, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    poison(monkeypatch, {11}, where)
    with pytest.raises(Diverged, match=rf"{where} is not finite at step 11, first in block 2\..*step-00000008.*clip"):
        retrain(small_config(corpus, model__arch="sfs"), tmp_path / "run", Silent())


@pytest.mark.parametrize("phase", [search, retrain])
def test_bad_steps_are_skipped_up_to_a_limit(
    phase: Phase, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"model__arch": "sf", "search__estimator": "soft", "search__blocks": 1, "train__skip_bad_steps": 2}
    config, reporter = small_config(corpus, **changes), Notes()
    poison(monkeypatch, {11, 14})
    run = phase(config, tmp_path / "run", reporter)
    assert [note for note in reporter.notes if "skipped" in note] == [
        "warning: step 11 is skipped, its gradient is not finite (1 of 2 allowed)",
        "warning: step 14 is skipped, its gradient is not finite (2 of 2 allowed)",
    ]
    assert run.summary()["skipped_steps"] == 2
    assert all(tensor.isfinite().all() for tensor in final_weights(run).values())
    if phase is search:
        assert all(np.isfinite(record["pi"]).all() for record in run.records(PI))
    monkeypatch.undo()
    poison(monkeypatch, {11, 14, 17})
    with pytest.raises(Diverged, match="at step 17"):
        phase(config, tmp_path / "another", Silent())


def test_a_guarded_step_leaves_the_weights_where_the_norm_is_not_finite() -> None:
    """What a GPU does without waiting for the norm."""
    weight = torch.nn.Parameter(torch.ones(3, 3))
    optimizer = make_adamw({"w": weight}, 0.1, 0.01)
    for gradient, changed in ((torch.inf, False), (1.0, True)):
        weight.grad = torch.full_like(weight, gradient)
        step_clipped(optimizer, gradient_norm([weight]), 1.0, guarded=True)
        assert bool((weight != 1).all()) == changed


def test_out_of_memory_names_the_block_and_what_to_lower(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = FeedForward.forward

    def hungry(self: FeedForward, *given: object) -> BlockOutput:
        if self.training and (tmp_path / "run" / "checkpoints").exists():
            torch.empty(1 << 60, dtype=torch.uint8)
        return original(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(FeedForward, "forward", hungry)
    config = small_config(corpus, model__arch="ssf", train__save_every=5)
    with pytest.raises(OutOfMemory, match=r"at step [67], in block 3\. .*step-00000005.*Lower data\.batch_size"):
        retrain(config, tmp_path / "run", Silent())


@pytest.mark.slow
def test_memory_that_the_system_refuses_is_told_in_one_message(corpus: Path, tmp_path: Path) -> None:
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


# Less memory, the same numbers.


@pytest.mark.parametrize(
    "changes",
    [
        {"model__arch": "sfs"},
        {"model__arch": "scf", "model__memory__cmem_len": 4, "model__memory__ratio": 2},
        {"model__arch": "sf", "model__cutoffs": (5, 12)},
    ],
)
def test_accumulated_gradients_are_those_of_the_batch(changes: dict[str, object], corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__dropout=0.0, **changes)
    whole = final_weights(retrain(config, tmp_path / "whole", Silent()))
    for parts in (2, 4):
        found = final_weights(retrain(config.replace(train__accumulate=parts), tmp_path / str(parts), Silent()))
        for name, expected in whole.items():
            torch.testing.assert_close(found[name], expected, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("estimator", ["soft", "straight_through", "gdas", "single_path", "uniform"])
@pytest.mark.parametrize("alpha_split", [0.0, 0.3])
def test_alpha_learns_from_the_batch_as_a_whole(
    estimator: str, alpha_split: float, corpus: Path, tmp_path: Path
) -> None:
    if estimator == "uniform" and not alpha_split:
        pytest.skip("uniform learns from text of its own")
    changes = {"search__estimator": estimator, "search__alpha_split": alpha_split, "search__alpha_every": 1}
    config = small_config(corpus, model__dropout=0.0, data__batch_size=8, **changes)
    whole = search(config, tmp_path / "whole", Silent()).records(PI)
    parts = search(config.replace(train__accumulate=4), tmp_path / "parts", Silent()).records(PI)
    for one, other in zip(whole, parts, strict=True):
        np.testing.assert_allclose(one["pi"], other["pi"], atol=1e-4)


@pytest.mark.parametrize("phase", [search, retrain])
@pytest.mark.parametrize("estimator", ["soft", "single_path"])
def test_checkpointed_activations_give_the_same_bits(
    phase: Phase, estimator: str, corpus: Path, tmp_path: Path
) -> None:
    config = small_config(corpus, model__arch="scf", model__dropout=0.2, search__estimator=estimator)
    kept = phase(config, tmp_path / "kept", Silent())
    twice = phase(config.replace(runtime__checkpoint_activations=True), tmp_path / "twice", Silent())
    assert_same_weights(kept, twice)


def test_checkpointed_activations_keep_less(corpus: Path) -> None:
    kept: list[int] = []
    tokens = torch.zeros(4, 16, dtype=torch.long)
    for twice in (False, True):
        network = TransformerXL.build(Config().model, Architecture("sf"), 40)
        network.checkpoint_activations = twice
        sizes: dict[int, int] = {}

        def pack(tensor: torch.Tensor, sizes: dict[int, int] = sizes) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            network(tokens).hidden.sum()
        weights = {parameter.data_ptr() for parameter in network.parameters()}
        kept.append(sum(size for pointer, size in sizes.items() if pointer not in weights))
    assert kept[1] < kept[0] / 3


def test_evaluate_takes_the_best_weights_where_asked(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from parnas.evaluation.comparison import compare
    from parnas.evaluation.entries import Conditions

    config = small_config(corpus, model__arch="f", train__eval_every=6)
    run = retrain(config, tmp_path / "run", Silent())
    newest = list_checkpoints(run.checkpoints)[-1] / "manifest.json"
    newest.write_text(json.dumps({**json.loads(newest.read_text()), "best": {"step": 12, "loss": 1.0}}))
    last, best = (compare([run.folder], Conditions(best=best), Silent()).table["ppl"][0] for best in (False, True))
    by_step = {line["step"]: line["ppl"] for line in run.records(METRICS) if line["split"] == "valid"}
    assert last == pytest.approx(by_step[24], rel=1e-5)
    assert best == pytest.approx(by_step[12], rel=1e-5)


# Limits, refusals and leftovers.


def test_a_limit_that_was_lowered_still_holds(corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = small_config(corpus, model__arch="sf", train__skip_bad_steps=5)
    poison(monkeypatch, {3, 4, 12})
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(9))
    with pytest.raises(Diverged, match="at step 11"):  # the 12th call, since the ninth step was done twice
        retrain(config.replace(train__skip_bad_steps=1), tmp_path / "run", Silent())


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
    with pytest.raises(ParnasError, match="is whole"):
        retrain(config.replace(train__steps=40), run.folder, Silent())
    assert before == {path: path.read_bytes() for path in run.folder.glob("*.*") if path.is_file()}


def test_a_run_without_a_checkpoint_may_be_begun_with_other_settings(corpus: Path, tmp_path: Path) -> None:
    """As after a mistake that shows only when the run is made, such as a batch that the text does not fill."""
    config = small_config(corpus, model__arch="sf")
    with pytest.raises(ParnasError, match="too few"):
        retrain(config.replace(data__batch_size=5000), tmp_path / "run", Silent())
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(5))
    run = retrain(config.replace(train__lr=1e-3), tmp_path / "run", Silent())
    assert [line["step"] for line in run.records(METRICS) if line["split"] == "train"] == [4, 8, 12, 16, 20, 24]


def test_a_run_whose_checkpoints_were_taken_away_is_not_begun_anew(retrain_run: Run, tmp_path: Path) -> None:
    shutil.copytree(retrain_run.folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(ParnasError, match="already holds files"):
        retrain(retrain_run.config(), tmp_path / "run", Silent())


def test_what_killed_writers_left_is_removed(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, model__arch="sf", train__steps=4, train__save_every=3)
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(2))
    (tmp_path / "run" / "checkpoints" / ".step-00000123.77.tmp").mkdir(parents=True)
    run = retrain(config, tmp_path / "run", Silent())
    assert sorted(path.name for path in run.checkpoints.iterdir()) == ["step-00000003", "step-00000004"]


def test_memory_that_ends_on_resuming_is_not_told_as_damage(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    config = small_config(corpus, model__arch="sf")
    with pytest.raises(Stop):
        retrain(config, tmp_path / "run", StopAfter(9))
    for place in ("parnas.training.trainer.Trainer.restore", "torch.load", "parnas.training.checkpoint.load_model"):
        with monkeypatch.context() as patch:
            patch.setattr(place, refuse)
            with pytest.raises(OutOfMemory, match="Out of memory at step 8"):
                retrain(config, tmp_path / "run", Silent())


@pytest.mark.parametrize("skips", [0, 1])
def test_alpha_learns_nothing_from_what_is_not_finite(
    skips: int, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from parnas.nas.search import SearchTrainer

    original = SearchTrainer._regularise

    def spoil(self: SearchTrainer) -> None:
        original(self)
        if self.step == 12:
            self.architecture_parameters[0].grad = torch.full_like(self.architecture_parameters[0], torch.nan)

    monkeypatch.setattr(SearchTrainer, "_regularise", spoil)
    changes = {"search__estimator": "soft", "train__skip_bad_steps": skips}
    if not skips:
        with pytest.raises(Diverged, match="gradient of alpha is not finite at step 13, first in block 1"):
            search(small_config(corpus, **changes), tmp_path / "run", Silent())
        return
    run = search(small_config(corpus, **changes), tmp_path / "run", Silent())
    assert run.summary()["skipped_steps"] == 1
    assert np.isfinite([record["pi"] for record in run.records(PI)]).all()


def test_an_interrupted_demo_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import parnas.demo
    from parnas.cli import main

    def stop(folder: Path, *_: object) -> None:
        raise Stopped(signal.SIGTERM, 7)

    monkeypatch.setattr(parnas.demo, "run_demo", stop)
    with pytest.raises(SystemExit) as leaving:
        main(["demo", "--run", str(tmp_path / "a demo")])
    assert leaving.value.code == 128 + signal.SIGTERM
    assert f"go on with: parnas demo --run '{tmp_path / 'a demo'}'" in capsys.readouterr().err


def test_before_a_run_is_begun_the_same_command_is_what_goes_on(tmp_path: Path, retrain_run: Run) -> None:
    from parnas.commands import way_on

    assert way_on("search", tmp_path / "run") == f"the same command again, with --run {tmp_path / 'run'}"
    assert way_on("retrain", retrain_run.folder) == f"parnas retrain --run {retrain_run.folder} --resume"


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
def test_only_refused_memory_is_told_as_such(text: str, told: bool) -> None:
    assert says_out_of_memory(RuntimeError(text)) == told
