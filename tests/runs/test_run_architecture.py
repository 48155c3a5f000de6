"""The architecture of a run is the same for every command and function."""

import json
import re
from pathlib import Path

import pytest
from conftest import small_config
from helpers.command_helpers import refusal, run_command

import parnas
from parnas.architecture import Architecture
from parnas.errors import ParnasError
from parnas.evaluation.layer_swaps import LayerSwaps
from parnas.export import export_run
from parnas.nas.derive import Constraints, derive
from parnas.runs.files import write_text
from parnas.runs.resolve import resolve_arch
from parnas.runs.run import PI, Run
from parnas.training.loaded_run import load


def other_than(arch: str) -> str:
    """An architecture of the small search that differs from `arch`."""
    return next(string for string in ("fsf", "sfs") if string != arch)


def test_the_architecture_of_a_search_is_its_arch_file_or_else_the_last_pi(searched: Run) -> None:
    by_pi = searched.summary().arch
    assert str(searched.architecture()) == by_pi == str(load(searched.folder).architecture)
    assert resolve_arch(str(searched.folder)) == by_pi
    other = other_than(by_pi)
    write_text(searched.folder / "arch.yaml", f"arch: {other}\n")
    assert str(searched.architecture()) == resolve_arch(str(searched.folder)) == other
    assert str(searched.architecture(by_pi=True)) == by_pi


def test_every_function_reads_the_same_architecture_of_a_search(searched: Run, corpus: Path, tmp_path: Path) -> None:
    trained = parnas.TrainedRun.read(searched)
    other = other_than(trained.arch)
    write_text(searched.folder / "arch.yaml", f"arch: {other}\n")
    assert export_run(searched, "safetensors", tmp_path / "out").architecture == other
    assert parnas.evaluate(searched.folder).table["arch"].tolist() == [other]
    assert str(parnas.load(trained).architecture) == parnas.TrainedRun.read(searched).arch == other
    assert "".join(LayerSwaps(searched, tokens=50).loaded.architecture) == other
    small = small_config(corpus, train__steps=1)
    for number, given in enumerate((trained, searched, str(searched.folder))):
        assert parnas.retrain(small, given, run=tmp_path / str(number)).arch == other


def test_derive_does_not_read_what_it_wrote_before(searched: Run) -> None:
    first = derive(searched, Constraints(rerank_top_k=2, top_k=2))
    for text in ("arch: sfsf\n", "arch: [\n", f"arch: {other_than(str(first.architecture))}\n"):
        write_text(searched.folder / "arch.yaml", text)
        assert derive(searched, Constraints(rerank_top_k=2, top_k=2)).ranking == first.ranking


@pytest.mark.parametrize(
    ("string", "reason"),
    [("sf", r"of 2 block\(s\), but the SuperNet has 3"), ("scf", "block 2 of the SuperNet has s, f, i, not c")],
)
def test_an_arch_file_of_another_network_is_refused_with_a_hint(
    string: str, reason: str, searched: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(searched.folder / "arch.yaml", f"arch: {string}\n")
    message = refusal(capsys, "export", searched.folder, "--to", "safetensors")
    assert re.search(rf"arch.yaml says {string}, .*{reason}", message)
    assert f"parnas derive {searched.folder}" in message
    for ask in (parnas.load, parnas.evaluate, parnas.TrainedRun.read, lambda folder: resolve_arch(str(folder))):
        with pytest.raises(ParnasError, match=reason):
            ask(searched.folder)
    assert run_command("derive", searched.folder, "--rerank-top-k", 2) == 0  # the hint works
    assert len(load(searched.folder).architecture) == 3


def test_a_last_pi_of_another_network_is_refused(searched: Run) -> None:
    searched.append(PI, {"step": 99, "tau": 1.0, "pi": [[0.2, 0.3, 0.5]] * 4, "arch": "sfsf"})
    with pytest.raises(ParnasError, match=r"pi.jsonl .*sfsf.* 4 block"):
        load(searched.folder)


def test_the_architecture_of_a_retraining_is_the_trained_one(trained: Run) -> None:
    write_text(trained.folder / "arch.yaml", "arch: fff\n")
    assert resolve_arch(str(trained.folder)) == "sfs"
    assert trained.architecture() == load(trained.folder).architecture == Architecture.parse("sfs")


def test_an_export_is_of_the_derived_network(searched: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("derive", searched.folder, "--max", "s=0", "--rerank-top-k", 0) == 0
    derived = searched.derivation().arch
    assert "s" not in derived
    capsys.readouterr()
    assert run_command("export", searched.folder, "--to", "safetensors", "--json") == 0
    assert json.loads(capsys.readouterr().out)["arch"] == str(Architecture.parse(derived).canonical())
