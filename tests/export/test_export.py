"""Exported networks give the outputs of the network; layers that cannot be exported are refused."""

import importlib.util
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.command_helpers import refusal, run_command
from helpers.model_helpers import make_network, model_config, random_ids
from torch import nn

from parnas import export as package
from parnas.architecture import LETTERS, Architecture
from parnas.errors import ParnasError
from parnas.export import build_decoder, export_run, load_exported
from parnas.export.decoder import decoder_arguments
from parnas.export.export import ExportResult
from parnas.export.program import load_onnx, load_pt2, trace, write_onnx, write_pt2
from parnas.export.segment import SegmentNetwork, SegmentState, largest_difference
from parnas.model.layers import MAKERS, ResidualLayer, register_layer
from parnas.runs.files import write_text
from parnas.runs.run import Run
from parnas.training.loaded_run import load
from parnas.training.progress import Silent
from parnas.training.retrain import retrain

VARIANTS = {
    "sfsf": {},
    "s:heads=1,d_head=3 f:d_inner=5 s": {"share_biases": False},
    "sfs": {"norm": "pre", "cutoffs": (5, 9), "div_val": 2},
    "fss": {"same_length": True, "clamp_len": 4, "tie_weights": False, "cutoffs": (5, 9), "proj_factor": 2},
    "s:kv_heads=1 f": {},
    "sf": {"mem_len": 0},
    "ff": {},
}
missing = [
    name for name in ("onnx", "onnxscript", "onnxruntime", "x_transformers") if not importlib.util.find_spec(name)
]
needs_extra = pytest.mark.skipif(bool(missing), reason=f"the extra export is not installed: {missing}")
TARGETS = ["safetensors", "pt2", pytest.param("onnx", marks=[needs_extra, pytest.mark.slow])]


@pytest.fixture(scope="module")
def exported(retrain_run: Run, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], ExportResult]:
    """A function that exports the retraining to a target; each target is written once."""
    folder = tmp_path_factory.mktemp("exports")
    return cache(lambda target: export_run(retrain_run, target, folder / target))


@pytest.mark.parametrize("arch", VARIANTS)
def test_the_segment_network_equals_the_network(arch: str) -> None:
    network = make_network(arch, **VARIANTS[arch])
    segment = SegmentNetwork(network, Architecture.parse(arch)).eval()

    def step(tokens: torch.Tensor, state: SegmentState) -> tuple[torch.Tensor, SegmentState]:
        log_probs, *rest = segment(tokens, *state)
        return log_probs, SegmentState(*rest)

    assert largest_difference(network, step, segment.empty, tgt_len=5) < 1e-5


def test_a_row_with_length_zero_starts_a_new_text() -> None:
    network = make_network("sfs")
    segment = SegmentNetwork(network, Architecture.parse("sfs")).eval()
    first, second = random_ids(2, 5), random_ids(2, 4, seed=1)
    with torch.no_grad():
        _, lengths, memory = segment(first, *segment.empty(2))
        assert lengths.tolist() == [5, 5]
        lengths[0] = 0
        log_probs, lengths, _ = segment(second, lengths, memory)
        alone, *_ = segment(second[:1], *segment.empty(1))
        continued = network(second, network(first).memory).hidden
    assert lengths.tolist() == [4, 6]
    torch.testing.assert_close(log_probs[:1], alone)
    torch.testing.assert_close(log_probs[1], network.head.log_probs(continued[1]))


def test_a_wrong_result_is_refused_and_leaves_nothing(
    retrain_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("parnas.export.export._MAX_DIFFERENCE", -1.0)
    with pytest.raises(ParnasError, match="by 0 nats"):
        export_run(retrain_run, "safetensors", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("target", TARGETS)
def test_an_export_equals_the_network(target: str, exported: Callable[[str], ExportResult], retrain_run: Run) -> None:
    check_export(exported(target), retrain_run)


def test_the_derived_network_of_a_search_is_exported(search_run: Run, tmp_path: Path) -> None:
    check_export(export_run(search_run, "safetensors", tmp_path / "out"), search_run)


def check_export(written: ExportResult, run: Run) -> None:
    assert written.difference is not None
    assert written.difference < 1e-5
    assert str(Architecture.parse(run.summary().arch).canonical()) == written.architecture
    content = json.loads((written.folder / "config.json").read_text(encoding="utf-8"))
    assert content["arch"] == content["model"]["arch"] == written.architecture
    assert str(written.folder.parent) not in str(content)
    assert {"README.md", "config.json", "tokenizer/tokenizer.json"} < set(written.files)
    assert all((written.folder / name).stat().st_mode & 0o444 == 0o444 for name in written.files)


WITHOUT_PARNAS = """
import sys

sys.modules["parnas"] = None
import torch

program = torch.export.load("network.pt2").module()
lengths, memory = torch.zeros(7, dtype=torch.int64), tuple(torch.zeros(7, 8, 32) for _ in range(2))
log_probs, lengths, memory = program(torch.zeros(7, 31, dtype=torch.int64), lengths, memory)
torch.testing.assert_close(log_probs.exp().sum(-1), torch.ones(7, 31))
log_probs, lengths, memory = program(torch.zeros(7, 1, dtype=torch.int64), lengths, memory)
assert lengths.tolist() == [8] * 7
"""


def test_a_program_runs_without_parnas_for_any_shape(exported: Callable[[str], ExportResult], retrain_run: Run) -> None:
    folder, network = exported("pt2").folder, load(retrain_run.folder).model
    empty = SegmentNetwork(network, Architecture.parse("sfs")).empty
    assert largest_difference(network, load_pt2(folder / "network.pt2"), empty, tgt_len=23) < 1e-5
    subprocess.run([sys.executable, "-W", "ignore", "-c", WITHOUT_PARNAS], cwd=folder, check=True)


@needs_extra
@pytest.mark.slow
@pytest.mark.parametrize(
    ("arch", "changes"),
    [
        ("sf", {"norm": "pre", "cutoffs": (5, 9), "div_val": 2}),
        ("s", {"mem_len": 0}),
        ("sf", {"cutoffs": (5, 9), "subword_features": 9}),
    ],
)
def test_every_kind_of_head_and_memory_is_traced(arch: str, changes: dict[str, object], tmp_path: Path) -> None:
    network = make_network(arch, **changes)
    segment = SegmentNetwork(network, Architecture.parse(arch))
    program = trace(segment)
    write_pt2(program, tmp_path / "network.pt2")
    write_onnx(program, tmp_path / "network.onnx", len(segment.widths()))
    for step in (load_pt2(tmp_path / "network.pt2"), load_onnx(tmp_path / "network.onnx")):
        assert largest_difference(network, step, segment.empty, tgt_len=5) < 2e-5


@needs_extra
@pytest.mark.slow
def test_onnx_names_its_inputs_and_leaves_two_axes_open(exported: Callable[[str], ExportResult]) -> None:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(exported("onnx").folder / "network.onnx"))
    shapes = {each.name: each.shape for each in session.get_inputs()}
    (batch, segment), memory = shapes["tokens"], [shapes["tokens"][0], 8, 32]  # older exporters name them otherwise
    assert isinstance(batch, str)
    assert isinstance(segment, str)
    assert batch != segment
    assert shapes == {"tokens": [batch, segment], "lengths": [batch], "memory_1": memory, "memory_2": memory}
    names = [each.name for each in session.get_outputs()]
    assert names == ["log_probs", "next_lengths", "next_memory_1", "next_memory_2"]


def test_weights_come_back_without_the_run(corpus: Path, tmp_path: Path) -> None:
    config = small_config(
        corpus, model__arch="s:heads=1 f:d_inner=8", model__tie_weights=True, train__steps=4, runtime__precision="bf16"
    )
    run = retrain(config, tmp_path / "run", Silent())
    loaded = load(run.folder)
    export_run(run, "safetensors", tmp_path / "out")
    shutil.rmtree(run.folder)
    exported = load_exported(tmp_path / "out")
    assert exported.architecture == loaded.architecture
    ids = random_ids(2, 9, vocab_size=loaded.tokenizer.vocab_size)
    assert torch.equal(exported.model(ids).hidden, loaded.model(ids).hidden)
    torch.manual_seed(0)
    text = exported.generate("Ada finds", tokens=5)
    torch.manual_seed(0)
    assert text == loaded.generate("Ada finds", tokens=5)
    readme = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "| `embedding.tables.0`, `head.tables.0` |" in readme
    assert "| `blocks.1.inner.weight` | [8, 16] |" in readme


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "no config.json"),
        (lambda folder: write_text(folder / "config.json", "{}"), "config.json is .*KeyError: 'model'"),
        (lambda folder: write_text(folder / "model.safetensors", "x"), "weights"),
        (lambda folder: change_arch(folder, "sfsf"), "weights"),
        (lambda folder: change_arch(folder, "sq"), "letter 'q'"),
    ],
)
def test_a_damaged_folder_is_refused(
    exported: Callable[[str], ExportResult], tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = shutil.copytree(exported("safetensors").folder, tmp_path / "out")
    damage(folder)
    with pytest.raises(ParnasError, match=message):
        load_exported(folder)


def change_arch(folder: Path, arch: str) -> None:
    content = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    write_text(folder / "config.json", json.dumps({**content, "arch": arch}))


@needs_extra
@pytest.mark.parametrize("arch", ["sfiisff", "(sf)*4", "f:d_inner=7 s f", "s:heads=1 i s:heads=1", "ff"])
def test_a_decoder_has_our_layers_in_our_order(arch: str) -> None:
    config = model_config(n_heads=2, d_head=3, norm="pre")
    decoder = build_decoder(arch, config)
    network = make_network(arch, n_heads=2, d_head=3, norm="pre")
    assert "".join(decoder.layer_types) == arch_letters(arch)
    for ours, (_, theirs, _) in zip(network.blocks, decoder.layers, strict=True):
        if hasattr(ours, "inner"):
            assert theirs.ff[-1].in_features == ours.inner.out_features
        else:
            assert theirs.to_q.out_features == ours.query.out_features
            assert theirs.heads == ours.n_heads
    assert decoder(torch.zeros(1, 4, config.d_model)).shape == (1, 4, config.d_model)


def arch_letters(arch: str) -> str:
    names = Architecture.parse(arch).canonical()
    return "".join({"s": "a", "f": "f"}[name[0]] for name in names)


@needs_extra
def test_the_written_program_builds_the_same_decoder(search_run: Run, tmp_path: Path) -> None:
    written = export_run(search_run, "x-transformers", tmp_path / "out")
    assert written.difference is None
    names: dict[str, object] = {}
    exec((written.folder / "decoder.py").read_text(encoding="utf-8"), names)  # our own, just written
    network = names["network"]
    assert isinstance(network, nn.Module)
    assert "".join(network.attn_layers.layer_types) == arch_letters(search_run.summary().arch)
    assert network(random_ids(1, 6)).shape[:2] == (1, 6)
    shape = json.loads((written.folder / "decoder.json").read_text(encoding="utf-8"))
    assert len(shape["custom_layers"]) == shape["depth"] == len(network.attn_layers.layer_types)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: write_text(folder / "config.json", "{}"), "nor an earlier export"),
        (
            lambda folder: write_text(folder / "config.json", '{"target": "safetensors", "model": {}}'),
            "nor an earlier export",
        ),
        (lambda folder: write_text(folder / "config.json", "no JSON"), "nor an earlier export"),
        (lambda folder: (folder / "config.json").unlink(), "nor an earlier export"),
        (lambda folder: write_text(folder / "precious.bin", "x"), "precious.bin"),
        (lambda folder: write_text(folder / "tokenizer" / "notes.txt", "x"), "tokenizer/notes.txt"),
        (lambda folder: write_text(folder / "network.pt2", "x"), "network.pt2"),
    ],
)
def test_a_folder_with_other_files_is_left_alone(
    exported: Callable[[str], ExportResult],
    retrain_run: Run,
    tmp_path: Path,
    change: Callable[[Path], None],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = shutil.copytree(exported("safetensors").folder, tmp_path / "out")
    change(folder)
    before = sorted(path.name for path in folder.rglob("*"))
    monkeypatch.setattr("parnas.export.export.load", None)  # refused before any work
    with pytest.raises(ParnasError, match=message):
        export_run(retrain_run, "pt2", folder)
    assert sorted(path.name for path in folder.rglob("*")) == before


@pytest.mark.parametrize("earlier", [*TARGETS, pytest.param("x-transformers", marks=needs_extra)])
def test_an_export_replaces_one_of_any_target(
    earlier: str, exported: Callable[[str], ExportResult], retrain_run: Run, tmp_path: Path
) -> None:
    shutil.copytree(exported(earlier).folder, tmp_path / "out")
    written = export_run(retrain_run, "safetensors", tmp_path / "out")
    assert written.folder == tmp_path / "out"
    assert load_exported(written.folder).config["target"] == "safetensors"
    assert set(written.files) == set(exported("safetensors").files)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_current_folder_is_not_replaced(retrain_run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / "empty")
    for folder in (".", "..", tmp_path):
        with pytest.raises(ParnasError, match="contains the current folder"):
            export_run(retrain_run, "safetensors", folder)
    export_run(retrain_run, "safetensors", "./new")
    monkeypatch.chdir("new")
    with pytest.raises(ParnasError, match="contains the current folder"):
        export_run(retrain_run, "safetensors", ".")
    assert load_exported(".").architecture == Architecture.parse("sfs")


def test_a_link_to_a_folder_stays_and_its_target_is_written(retrain_run: Run, tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "real")
    for _ in range(2):  # first it leads nowhere
        written = export_run(retrain_run, "safetensors", link)
        assert link.is_symlink()
        assert (written.folder, written.folder / "README.md") == (link, link / "README.md")
        assert load_exported(tmp_path / "real").architecture == Architecture.parse("sfs")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "real"]


def test_layers_that_a_decoder_cannot_have_are_refused() -> None:
    with pytest.raises(ParnasError, match="1 and 2 heads"):
        decoder_arguments(Architecture.parse("s:heads=1 s"), model_config())
    with pytest.raises(ParnasError, match="c cannot become"):
        decoder_arguments(Architecture.parse("sc"), model_config())


def test_compressive_layers_are_exported_as_weights_only(corpus: Path, tmp_path: Path) -> None:
    run = retrain(small_config(corpus, model__arch="cf", train__steps=2), tmp_path / "run", Silent())
    assert export_run(run, "safetensors").difference == 0
    with pytest.raises(ParnasError, match=r"Layer c .*--to safetensors"):
        export_run(run, "pt2")
    assert not (run.folder / "exports" / "pt2").exists()


class Gate(ResidualLayer):
    """A layer of a user's own that can be traced."""

    def __init__(self, config: object) -> None:
        super().__init__(config)  # type: ignore[arg-type]
        self.gate = nn.Linear(config.d_model, config.d_model)  # type: ignore[attr-defined]

    def transform(self, x, memory, context):  # type: ignore[no-untyped-def]
        return self.gate(x).sigmoid() * x


class Picky(Gate):
    """One whose result depends on values in Python."""

    def transform(self, x, memory, context):  # type: ignore[no-untyped-def]
        return x if x.sum() > 0 else -x


@pytest.fixture
def own_letters() -> Iterator[None]:
    register_layer("e", Gate, "gate")
    register_layer("q", Picky, "picky")
    yield
    for letter in "eq":
        del LETTERS[letter], MAKERS[letter]


def test_own_layers_are_exported_where_they_can_be_traced(own_letters: None, corpus: Path, tmp_path: Path) -> None:
    run = retrain(small_config(corpus, model__arch="e", train__steps=1), tmp_path / "gate", Silent())
    assert (export_run(run, "pt2").difference or 0) < 1e-5
    run = retrain(small_config(corpus, model__arch="q", train__steps=1), tmp_path / "picky", Silent())
    with pytest.raises(ParnasError, match=r"trace q .*--to safetensors"):
        export_run(run, "pt2")


@pytest.mark.parametrize("arch", ["k", "r", "s:window=4", "s:kv_heads=1,window=4"])
def test_memory_of_other_kinds_exports_weights_alone(arch: str, corpus: Path, tmp_path: Path) -> None:
    run = retrain(small_config(corpus, model__arch=arch, train__steps=1), tmp_path / "run", Silent())
    for target in ("pt2", "x-transformers"):
        with pytest.raises(ParnasError, match=rf"{arch} .*--to safetensors"):
            export_run(run, target)
    assert (export_run(run, "safetensors").difference or 0) < 1e-5


def test_a_missing_package_is_named_with_the_command_to_install_it(
    retrain_run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    find_spec = importlib.util.find_spec
    hidden = ("onnx", "x_transformers")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in hidden else find_spec(name))
    for target, name in {"onnx": "onnx", "x-transformers": "x-transformers"}.items():
        with pytest.raises(ParnasError, match=rf"{name}, .*pip install -e '\.\[export\]'"):
            export_run(retrain_run, target)


def test_the_command_exports_and_refuses(trained: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("export", trained.folder, "--to", "safetensors", "--best") == 0
    shown = capsys.readouterr().out
    assert "exported sfs as safetensors, log-probabilities differ by at most 0.0e+00 nats" in shown
    assert f"written: {trained.folder}/exports/safetensors/model.safetensors" in shown
    assert run_command("export", trained.folder, "--to", "safetensors", "--json") == 0  # replaces the one before
    result = json.loads(capsys.readouterr().out)
    assert (result["run"], result["arch"], result["difference"]) == (str(trained.folder), "sfs", 0)
    assert "give safetensors, x-transformers, pt2, onnx" in refusal(capsys, "export", trained.folder, "--to", "gguf")
    other = ("export", trained.folder, "--to", "safetensors", "--out", trained.folder)
    assert "neither empty nor an earlier export" in refusal(capsys, *other)
    assert "There is no run folder" in refusal(capsys, "export", tmp_path / "none", "--to", "pt2")
    assert set(package.TARGETS) == {"safetensors", "x-transformers", "pt2", "onnx"}
