"""Which network a search stands for: one, whoever asks."""

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
    """A network of the small search besides the one that pi speaks for."""
    return next(string for string in ("fsf", "sfs") if string != arch)


def test_a_search_stands_for_its_arch_file_and_without_one_for_the_last_pi(searched: Run) -> None:
    by_pi = searched.summary().arch
    assert str(searched.architecture()) == by_pi == str(load(searched.folder).architecture)
    assert resolve_arch(str(searched.folder)) == by_pi
    other = other_than(by_pi)
    write_text(searched.folder / "arch.yaml", f"arch: {other}\n")
    assert str(searched.architecture()) == resolve_arch(str(searched.folder)) == other
    assert str(searched.architecture(by_pi=True)) == by_pi


def test_everyone_who_asks_a_search_for_its_network_gets_the_same(searched: Run, corpus: Path, tmp_path: Path) -> None:
    found = parnas.TrainedRun.read(searched)
    other = other_than(found.arch)
    write_text(searched.folder / "arch.yaml", f"arch: {other}\n")
    assert export_run(searched, "safetensors", tmp_path / "out").architecture == other
    assert parnas.evaluate(searched.folder).table["arch"].tolist() == [other]
    assert str(parnas.load(found).architecture) == parnas.TrainedRun.read(searched).arch == other
    assert "".join(LayerSwaps(searched, tokens=50).loaded.architecture) == other
    small = small_config(corpus, train__steps=1)
    for number, given in enumerate((found, searched, str(searched.folder))):
        assert parnas.retrain(small, given, run=tmp_path / str(number)).arch == other


def test_derive_does_not_read_what_it_wrote_before(searched: Run) -> None:
    first = derive(searched, Constraints(rerank_top_k=2, top_k=2))
    for text in ("arch: sfsf\n", "arch: [\n", f"arch: {other_than(str(first.architecture))}\n"):
        write_text(searched.folder / "arch.yaml", text)
        assert derive(searched, Constraints(rerank_top_k=2, top_k=2)).ranking == first.ranking


@pytest.mark.parametrize(
    ("string", "told"),
    [("sf", r"of 2 block\(s\), but the SuperNet has 3"), ("scf", "block 2 of the SuperNet has s, f, i, not c")],
)
def test_an_arch_file_of_another_network_is_refused_with_the_cure(
    string: str, told: str, searched: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_text(searched.folder / "arch.yaml", f"arch: {string}\n")
    message = refusal(capsys, "export", searched.folder, "--to", "safetensors")
    assert re.search(rf"arch.yaml says {string}, .*{told}", message)
    assert f"parnas derive {searched.folder}" in message
    for ask in (parnas.load, parnas.evaluate, parnas.TrainedRun.read, lambda folder: resolve_arch(str(folder))):
        with pytest.raises(ParnasError, match=told):
            ask(searched.folder)
    assert run_command("derive", searched.folder, "--rerank-top-k", 2) == 0  # the cure works
    assert len(load(searched.folder).architecture) == 3


def test_a_last_pi_that_speaks_for_another_network_is_refused(searched: Run) -> None:
    searched.append(PI, {"step": 99, "tau": 1.0, "pi": [[0.2, 0.3, 0.5]] * 4, "arch": "sfsf"})
    with pytest.raises(ParnasError, match=r"pi.jsonl says sfsf, of 4 block\(s\).*; restore it"):
        load(searched.folder)


def test_a_retraining_stands_for_what_it_trains(trained: Run) -> None:
    write_text(trained.folder / "arch.yaml", "arch: fff\n")
    assert resolve_arch(str(trained.folder)) == "sfs"
    assert trained.architecture() == load(trained.folder).architecture == Architecture.parse("sfs")


def test_an_export_tells_of_the_network_that_was_derived(
    searched: Run, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("derive", searched.folder, "--max", "s=0", "--rerank-top-k", 0) == 0
    derived = searched.derivation().arch
    assert "s" not in derived
    capsys.readouterr()
    assert run_command("export", searched.folder, "--to", "safetensors", "--json") == 0
    assert json.loads(capsys.readouterr().out)["arch"] == str(Architecture.parse(derived).canonical())
