"""A run folder from a stranger executes nothing, and nothing is read or written outside it."""

import json
import os
import pickle
import struct
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command_helpers import refusal, run_command
from helpers.hostile_helpers import COMMANDS, Bomb, bomb, copy_run, put_into_checkpoints

from parnas.config.loader import dump_config
from parnas.runs.run import Run
from parnas.training.checkpoints import list_checkpoints

Capture = pytest.CaptureFixture[str]
pytestmark = pytest.mark.usefixtures("elsewhere")


@pytest.fixture
def unfinished_retraining(retrain_run: Run, tmp_path: Path) -> Run:
    return copy_run(retrain_run, tmp_path / "unfinished_retraining", unfinished=True)


@pytest.fixture
def unfinished_search(search_run: Run, tmp_path: Path) -> Run:
    return copy_run(search_run, tmp_path / "unfinished-search", unfinished=True)


# Symbolic links, and other things that are no files


LINKS = (
    *("metrics.jsonl", "run.log", "arch.yaml", "figures", "checkpoints", "tensorboard", "tokenizer/new", ".lock"),
    "dangling",
)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        *(("metrics.jsonl", command) for command in COMMANDS),
        *((name, command) for name in LINKS[1:] for command in ("plot", "resume")),
    ],
)
def test_links_that_lead_out_of_the_folder_are_refused_by_every_command(
    name: str, command: str, searched: Run, tmp_path: Path, capsys: Capture
) -> None:
    Path("given.yaml").write_text(dump_config(searched.config()))
    outside = tmp_path / "outside"
    place = searched.folder / ("metrics.jsonl" if name == "dangling" else name)
    if place.exists():
        place.rename(outside)
    else:
        outside.mkdir()
    if name == "dangling":
        outside = tmp_path / "missing"
    place.symlink_to(outside)
    before = contents(outside)
    assert f"{place} is a link that leads out of" in refusal(capsys, *COMMANDS[command](searched.folder))
    assert contents(outside) == before


def contents(place: Path) -> object:
    """What is at a path, for comparison."""
    if place.is_dir():
        return {str(path): path.stat().st_mtime_ns for path in place.rglob("*")}
    return place.read_bytes() if place.exists() else None


def test_links_inside_the_folder_and_to_it_are_followed(searched: Run, tmp_path: Path) -> None:
    (searched.folder / "metrics.jsonl").rename(searched.folder / "other.jsonl")
    (searched.folder / "metrics.jsonl").symlink_to("other.jsonl")
    (searched.folder / "again").symlink_to(searched.checkpoints.resolve())
    (tmp_path / "link").symlink_to(searched.folder)
    assert run_command("derive", tmp_path / "link") == 0
    assert run_command("plot", tmp_path / "link") == 0


def test_a_link_to_itself_and_a_pipe_are_refused(trained: Run, tmp_path: Path, capsys: Capture) -> None:
    (trained.folder / "loop").symlink_to(trained.folder / "loop" / "x")
    assert run_command("plot", trained.folder) == 0, "nothing opens the link"
    os.mkfifo(trained.folder / "pipe")
    assert "pipe is neither a file nor a folder" in refusal(capsys, "plot", trained.folder)


# Checkpoints


def with_a_bomb_inside(state: object) -> bytes:
    file = BytesIO()
    torch.save(state, file)
    return file.getvalue()


@pytest.mark.parametrize("form", ["pickle", "torch", "nested", "legacy", "text", "empty", "torn"])
def test_a_state_that_would_run_code_is_refused_and_runs_none(
    form: str, unfinished_retraining: Run, tmp_path: Path, capsys: Capture
) -> None:
    target = tmp_path / "owned"
    legacy = BytesIO()
    torch.save(Bomb(target), legacy, _use_new_zipfile_serialization=False)
    states = {
        "pickle": bomb(target),
        "torch": with_a_bomb_inside(Bomb(target)),
        "nested": with_a_bomb_inside({"step": 8, "optimizer": [Bomb(target)]}),
        "legacy": legacy.getvalue(),
        "text": b"import os; os.system('touch owned')",
        "empty": b"",
        "torn": (list_checkpoints(unfinished_retraining.checkpoints)[-1] / "state.pt").read_bytes()[:5000],
    }
    put_into_checkpoints(unfinished_retraining, "state.pt", states[form])
    assert "was not executed" in refusal(capsys, "retrain", "--resume", "--run", unfinished_retraining.folder)
    run_command("evaluate", unfinished_retraining.folder, "--out", "comparison")
    assert not target.exists()
    pickle.loads(bomb(target))
    assert target.exists()  # it would have


@pytest.mark.parametrize(
    "damage",
    [
        lambda state: [1, 2],
        lambda state: {},
        lambda state: {**state, "step": "eight"},
        lambda state: {**state, "step": True},
        lambda state: {**state, "step": -1},
        lambda state: {**state, "step": 10**6},
        lambda state: {**state, "seconds": None},
        lambda state: {**state, "task": 3},
        lambda state: change_task(state, weight_optimizer=3),
        lambda state: change_task(state, weight_optimizer={"optimizer": {"state": {}, "param_groups": []}}),
        lambda state: change_task(state, weight_optimizer=shrink_moments(state["task"]["weight_optimizer"])),
        lambda state: {**state, "rng": {"cpu": torch.zeros(3), "cuda": None}},
        lambda state: {**state, "recent": [1]},
        lambda state: {**state, "recent": torch.zeros(3)},
        lambda state: {**state, "average": None},
        lambda state: {**state, "average": {**state["average"], "count": -1}},
        lambda state: {**state, "average": {**state["average"], "count": 1}},
        lambda state: {**state, "average": {"first": 1, "count": 1, "weights": [torch.zeros(())] * 9}},
        lambda state: change_task(state, memory="x"),
        lambda state: change_task(state, memory=(torch.zeros(1),)),
    ],
)
def test_a_state_of_the_wrong_structure_is_refused(
    damage: Callable[..., object], unfinished_retraining: Run, capsys: Capture
) -> None:
    state = torch.load(list_checkpoints(unfinished_retraining.checkpoints)[-1] / "state.pt", weights_only=True)
    put_into_checkpoints(unfinished_retraining, "state.pt", with_a_bomb_inside(damage(state)))
    assert "step-00000016/state.pt" in refusal(capsys, "retrain", "--resume", "--run", unfinished_retraining.folder)


def change_task(state: dict[str, Any], **changes: object) -> dict[str, Any]:
    """Return the state of a checkpoint with another state of its task."""
    return {**state, "task": {**state["task"], **changes}}


def shrink_moments(optimizers: dict[str, Any]) -> dict[str, Any]:
    """Return optimizer states with moments of another shape than the weights, which a fused kernel reads past."""
    (name, optimizer), *_ = optimizers.items()
    state = {key: {**each, "exp_avg": torch.zeros(1)} for key, each in optimizer["state"].items()}
    return {**optimizers, name: {**optimizer, "state": state}}


@pytest.mark.parametrize(
    "missing", ["arch_optimizer", "arch_memory", "monitor", "selected", "adam", "noise", "estimator", "log_tau"]
)
def test_a_state_of_a_search_that_lacks_something_is_refused(
    missing: str, unfinished_search: Run, capsys: Capture
) -> None:
    state = torch.load(list_checkpoints(unfinished_search.checkpoints)[-1] / "state.pt", weights_only=True)
    task = state["task"]
    del (task if missing in task else task["arch_optimizer"])[missing]
    put_into_checkpoints(unfinished_search, "state.pt", with_a_bomb_inside(state))
    assert "step-00000016/state.pt" in refusal(capsys, "search", "--resume", "--run", unfinished_search.folder)


def lying_header(header: object) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.parametrize(
    "weights",
    [
        b"",
        b"not safetensors",
        bomb(Path("owned")),
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 10**9) + b"{}",
        lying_header({"embedding.weight": {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 4]}}),
        lying_header({"embedding.weight": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}) + b"\0" * 4,
        lying_header({"embedding.weight": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}) + b"\0" * 4,
        lying_header({}),
        lying_header([]),
        lying_header({"embedding.weight": "x"}),
    ],
)
@pytest.mark.parametrize("command", ["evaluate", "resume"])
def test_weights_that_are_none_or_lie_are_refused(weights: bytes, command: str, searched: Run, capsys: Capture) -> None:
    if command == "resume":
        (searched.folder / "summary.json").unlink()
    put_into_checkpoints(searched, "model.safetensors", weights)
    (searched.folder / "rerank.json").unlink()
    assert "The weights in" in refusal(capsys, *COMMANDS[command](searched.folder))
    assert not Path("owned").exists()


@pytest.mark.parametrize(
    "manifest",
    [
        {"step": 24, "sha256": {"../../x": "0"}},
        {"step": 24, "sha256": {"model.safetensors": 3, "state.pt": None}},
        {"step": 24, "sha256": []},
        [],
        None,
        {"sha256": {"model.safetensors": "0" * 64, "state.pt": "0" * 64, "../../x": "0"}},
    ],
)
def test_a_manifest_that_names_other_files_or_lies_is_that_of_a_damaged_checkpoint(
    manifest: object, trained: Run, capsys: Capture
) -> None:
    for checkpoint in list_checkpoints(trained.checkpoints):
        (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    assert "no intact checkpoint" in refusal(capsys, "evaluate", trained.folder)
    (trained.folder / "summary.json").unlink()
    assert "is intact" in refusal(capsys, "retrain", "--resume", "--run", trained.folder)
    assert not (trained.folder / "x").exists()


def test_folders_that_are_called_like_checkpoints_are_passed_over(trained: Run) -> None:
    for name in ("step-last", "step-", "step-0x000018", "step-00000099.old"):
        (trained.checkpoints / name).mkdir()
        (trained.checkpoints / name / "manifest.json").write_text("{}")
    assert run_command("evaluate", trained.folder, "--out", "comparison") == 0
