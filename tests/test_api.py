"""The commands in Python: their examples run, what one returns the next one takes, and types are told to checkers."""

import doctest
import importlib
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
import torch
from conftest import small_config

import parnas
from parnas.config.loader import Config
from parnas.errors import ParnasError
from parnas.runs.files import write_text
from parnas.runs.run import Run
from parnas.training.progress import Silent

ROOT = Path(__file__).resolve().parents[1]
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def changes(corpus: Path) -> dict[str, object]:
    """The small settings of the tests, as Python gives them."""
    tree, default = small_config(corpus).model_dump(), Config().model_dump()
    return {name: section for name, section in tree.items() if section != default[name]} | {"model": tree["model"]}


@pytest.fixture
def example_names(corpus: Path, search_run: Run, retrain_run: Run, elsewhere: None) -> dict[str, object]:
    """What the examples of docstrings speak of, in a folder of their own."""
    for name, run in {"searched": search_run, "trained": retrain_run}.items():
        shutil.copytree(run.folder, name)
    runs = {name: parnas.TrainedRun.read(name) for name in ("searched", "trained")}
    return {"parnas": parnas, "torch": torch, "small": changes(corpus), **runs}


def test_the_examples_of_the_docstrings_run(example_names: dict[str, object]) -> None:
    failed, run = doctest.testmod(importlib.import_module("parnas.api"), extraglobs=example_names, optionflags=OPTIONS)
    assert run > 15
    assert not failed


def test_the_examples_of_the_page_run(elsewhere: None) -> None:
    page = ROOT / "docs" / "python.md"
    text = page.read_text(encoding="utf-8").replace("```", "")
    test = doctest.DocTestParser().get_doctest(text, {}, page.name, str(page), 0)
    assert len(test.examples) > 20
    assert not doctest.DocTestRunner(optionflags=OPTIONS).run(test).failed


def test_importing_the_package_imports_no_torch() -> None:
    code = "import sys, parnas; dir(parnas); parnas.Config; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert all(getattr(parnas, name) is not None for name in parnas.__all__)
    assert not hasattr(parnas, "no_such_name")


def test_what_a_derivation_says_is_what_is_trained(
    search_run: Run, corpus: Path, tmp_path: Path, elsewhere: None
) -> None:
    derivation = parnas.derive(search_run.folder, limits={"s": 1}, rerank_top_k=0, out=tmp_path / "derived")
    small = {**changes(corpus), "train.steps": 2, "search.blocks": 3}
    runs = [parnas.retrain(None, arch, small) for arch in (derivation, tmp_path / "derived", derivation.architecture)]
    assert {run.arch for run in runs} == {str(derivation.architecture)}
    assert [run.folder for run in runs] == [Path("runs") / name for name in ("retrain-demo", *default_names(2))]
    assert parnas.retrain(small_config(corpus, train__steps=2), Run(runs[0].folder)).arch == runs[0].arch
    assert (Path("runs") / "retrain").is_dir()  # a configuration without a name


def default_names(count: int) -> list[str]:
    return [f"retrain-demo-{number}" for number in range(2, 2 + count)]


def test_a_search_itself_stands_for_what_was_derived_from_it(search_run: Run, corpus: Path, tmp_path: Path) -> None:
    searched = parnas.TrainedRun.read(search_run)
    run = parnas.retrain(small_config(corpus, train__steps=2), searched, run=tmp_path / "run")
    assert run.arch == searched.arch == search_run.summary().arch


def test_pi_has_the_candidates_of_each_block_alone(corpus: Path, tmp_path: Path) -> None:
    space = [["s", "f"], ["f"], ["s", "i"]]
    searched = parnas.search(small_config(corpus), {"search.space": space, "search.steps": 12}, run=tmp_path / "run")
    assert searched.pi is not None
    last = searched.pi[searched.pi["step"] == 12]
    assert last.groupby("block")["layer"].agg(list).tolist() == space
    assert last.groupby("block")["pi"].sum().tolist() == pytest.approx([1, 1, 1])
    assert searched.pi["tau"].is_monotonic_decreasing


def test_nested_settings_change_what_they_name_and_nothing_beside_it(corpus: Path, tmp_path: Path) -> None:
    config = small_config(corpus, train__steps=2, train__lr=0.5)
    run = parnas.retrain(config, "sf", {"train": {"steps": 3}, "data.corpus": corpus}, run=tmp_path / "run")
    assert (Run(run.folder).config().train.steps, Run(run.folder).config().train.lr) == (3, 0.5)


def test_all_mistakes_are_told_at_once_with_those_of_the_overrides(tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match="2 error") as caught:
        parnas.search({"search": {"stepz": 3}}, {"train.lr": -1.0}, run=tmp_path)
    assert "search.steps" in str(caught.value)
    assert "train.lr is -1.0" in str(caught.value)
    with pytest.raises(ParnasError, match="--resume"):
        parnas.search(resume=True)
    with pytest.raises(ParnasError, match=r"--split.*'all'"):
        parnas.evaluate(tmp_path, split="all")  # type: ignore[arg-type]
    with pytest.raises(ParnasError, match=r"--phase.*'derive'"):
        parnas.tune(phase="derive")  # type: ignore[arg-type]
    with pytest.raises(ParnasError, match=r"--arch.*--phase"):
        parnas.tune(arch="sf", phase="search")
    with pytest.raises(ParnasError, match="--storage, --study"):
        parnas.tune(study="alone")


def test_a_failed_start_leaves_no_folder_behind(corpus: Path, elsewhere: None) -> None:
    for _ in range(2):
        with pytest.raises(ParnasError, match=r"nowhere\.txt"):
            parnas.search("demo", {**changes(corpus), "data.corpus": "nowhere.txt"})
        assert list(Path("runs").iterdir()) == []


def test_what_derive_is_asked_for_is_told_by_the_names_of_python_too(search_run: Run) -> None:
    for name, given, told in [
        ("cost_target", 0, r"cost_target \(--cost-target\) is 0"),
        ("metric", "x", r"metric \(--metric, --within\) is 'x'; give one of latency, macs, parameters, cache"),
        ("limits", {"s": -1}, r"limit of s \(--max\) is -1"),
        ("top_k", 0, r"top_k \(--top-k\) is 0; give 1 or more"),
        ("rerank_top_k", -1, r"rerank_top_k \(--rerank-top-k\) is -1; give 0 or more"),
    ]:
        with pytest.raises(ParnasError, match=told):
            parnas.derive(search_run, **{name: given})


def test_runs_to_evaluate_may_come_from_anything_that_gives_them(searched: Run, trained: Run) -> None:
    table = parnas.evaluate(run.folder for run in (searched, trained)).table
    assert table["run"].tolist() == ["searched", "trained"]
    assert len(parnas.evaluate(trained).table) == len(parnas.evaluate({str(trained.folder): 1}).table) == 1
    with pytest.raises(ParnasError):
        parnas.evaluate([])


def test_the_package_tells_the_version_that_is_installed() -> None:
    assert parnas.__version__ == metadata.version("parnas")


@pytest.fixture
def own_interrupt() -> Iterator[None]:
    """Python's handler of Ctrl-C, which is ignored where the tests run in the background of a shell."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_is_python_s_own_and_the_run_goes_on(corpus: Path, tmp_path: Path, own_interrupt: None) -> None:
    class Interrupting(Silent):
        def advance(self, step: int) -> None:
            if step == 5:
                os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt, match=r"step 5.*resume=True"):
        parnas.retrain(small_config(corpus), "sf", run=tmp_path / "run", progress=Interrupting())
    assert parnas.retrain(run=tmp_path / "run", resume=True).summary.steps == 24


def test_progress_is_told_only_where_it_is_asked_for(
    corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = small_config(corpus, train__steps=4)
    parnas.retrain(config, "sf", run=tmp_path / "silent")
    assert capfd.readouterr() == ("", "")
    parnas.retrain(config, "sf", run=tmp_path / "shown", progress=True)
    assert "retrain 4/4: valid loss" in capfd.readouterr().err


@pytest.mark.slow
def test_a_type_checker_knows_what_the_functions_take_and_give(tmp_path: Path) -> None:
    good = """
import parnas
searched: parnas.TrainedRun = parnas.search("demo", {"search.steps": 5}, run="runs/x")
derivation = parnas.derive(searched, cost_target=0.5, metric="macs")
trained = parnas.retrain(parnas.Config(), derivation)
rows: int = len(parnas.evaluate([searched, trained, "runs/y"], split="test").table)
text: str = parnas.load(searched).generate("a", tokens=3)
"""
    bad = """
import parnas
parnas.search(3)
parnas.derive("runs/x", metric="seconds")
parnas.no_such_name
"""
    for name, text in {"good": good, "bad": bad}.items():
        write_text(tmp_path / f"{name}.py", text)
    # Without the plugin of pydantic, which a user need not have, and without the packages that take most of the time.
    skipped = ",".join(f"mypy-{name}.*" for name in ("torch", "numpy", "pandas", "matplotlib", "rich", "sqlalchemy"))
    write_text(tmp_path / "mypy.ini", f"[mypy]\nstrict = True\n[{skipped}]\nfollow_imports = skip\n")
    command = [sys.executable, "-m", "mypy", "--cache-dir", os.devnull, "good.py", "bad.py"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    told = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False).stdout
    own = [line.partition(": ")[0] for line in told.splitlines() if line.startswith(("good.py", "bad.py"))]
    assert own == ["bad.py:3", "bad.py:4", "bad.py:5"], told
