"""Every command and snippet that the README and the pages show is run, with small settings, or listed with a reason."""

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from conftest import small_config
from helpers.command_helpers import run_command
from helpers.data_helpers import english, write_corpus
from helpers.page_helpers import PAGES, ROOT, Block, blocks, commands, parnas_words, spoken_commands, words
from torch.distributed.run import get_args_parser

from parnas.cli.main import app
from parnas.config.loader import check_config, dump_config, load_config
from parnas.config.yaml_file import read_yaml
from parnas.data.datasets import DATASETS, DatasetFile

NOT_RUN = {
    "make demo": "installs; tests/cli/test_demo.py runs the demo",
    "make test": "this is it",
    "make lint": "is beside the tests",
    "make format": "changes the project",
    "make docs": "tests/meta/test_docs.py builds the site",
    "make soak": "takes long; tests/soak has a shorter one",
    "python -m pytest": "this is it",
    "pre-commit install": "changes the clone",
    ". .venv/bin/activate": "is of a shell",
    "python3 -m venv .venv": "installs",
    ".venv/bin/pip install torch": "installs",
    "pip install": "installs",
    "python benchmarks/update_readme.py": "writes into the project",
    "python benchmarks/tuning_pruners.py": "wants a long study; tests/meta/test_benchmark_pruners.py replays one",
    "python benchmarks/word_level.py": "writes into the project; tests/meta/test_benchmark_word_level.py runs it",
    "python docs/make_results.py": "writes into the project; tests/meta/test_docs.py compares what it makes",
    "parnas demo": "takes minutes; tests/cli/test_demo.py runs it",
    "parnas pipeline": "takes minutes; tests/studies/test_pipeline.py runs it",
    "tensorboard --logdir": "does not end; tests/training/test_tensorboard.py reads what it would show",
    "torchrun": "wants GPUs, and minutes; tests/training/test_distributed.py runs several processes",
    "srun": "is of a cluster",
    "#SBATCH": "is of a cluster",
    "apt-get install": "changes the machine",
    "su postgres": "changes the machine",
    "echo": "changes the machine",
    "pg_ctlcluster": "changes the machine",
    "chmod 600 ~/.pgpass": "changes the machine",
    "parnas blackbox CONFIG search.cost.metric=macs": "wants a server; tests/studies/test_shared_study.py has one",
}
"""How commands begin that are not run, and why not. They must parse all the same."""

NO_CODE = ("theta ← theta", "text ──▶", "runs/NAME/", "RUN/baselines/", "cross-entropy ", "mean ±", "loss with shared")
"""How blocks begin that are neither commands nor code."""

GIVEN = {
    "runs/par/search": ("search", "configs/wikitext2-par.yaml"),
    "runs/par/derived": ("retrain", "configs/wikitext2-par.yaml", "--arch", "sfsfff"),
    "runs/par/interleaved": ("retrain", "configs/wikitext2-par.yaml", "--arch", "interleaved-6"),
    "runs/search": ("search", "configs/wikitext2-par.yaml"),
    "runs/derived": ("retrain", "configs/wikitext2-par.yaml", "--arch", "sfsfff"),
    "runs/short": ("retrain", "configs/wikitext2-par.yaml", "--arch", "interleaved-6"),
    "RUN": ("search", "CONFIG"),
}
"""What a page may have without making it: runs, by the commands that make them."""

SMALL = {
    **{"data.batch_size": 2, "data.tgt_len": 8, "model.d_model": 16, "model.n_heads": 2, "model.d_head": "null"},
    **{
        "model.d_inner": 32,
        "model.mem_len": 4,
        "model.memory.cmem_len": 4,
        "model.cutoffs": "[]",
        "model.proj_factor": "null",
    },
    **{
        "search.steps": 4,
        "search.alpha_start_step": 1,
        "search.alpha_every": 1,
        "search.warmup_steps": 1,
        "search.rerank_top_k": 2,
    },
    **{"train.steps": 4, "train.warmup_steps": 1, "train.log_every": 2, "train.eval_every": 4, "train.save_every": 4},
    **{"search.cost.metric": "macs", "runtime.threads": 1, "runtime.device": "cpu"},
}
FEW = {
    "tune-eval": ("--lr", "1e-3", "--decay", "0", "--tokens", "100"),
    "stability": ("--seeds", "2"),
    "baselines": ("--random", "1", "--seeds", "2"),
    "blackbox": ("--trials", "2"),
    "tune": ("--trials", "2"),
}
TRAINING = ("search", "retrain", "stability", "blackbox", "tune", "profile", "plan", "data")
"""Commands that take settings."""
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


def is_run(command: str) -> bool:
    return not any(command.startswith(beginning) for beginning in NOT_RUN)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like the project's root, with a text of one's own and a small WikiText-2."""
    for name in ("configs", "Makefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "novel.txt").write_text(english(1000), encoding="utf-8")
    (tmp_path / "shared").mkdir()
    corpus = write_corpus(tmp_path / "data" / "wikitext-2", valid=english(80, 1), test=english(80, 2))
    for name in ("CONFIG", "demo"):  # a file goes before what is shipped by that name
        (tmp_path / name).write_text(dump_config(small_config(corpus, search__blocks=6)), encoding="utf-8")
    unchecked = tuple(DatasetFile(file.names) for file in DATASETS["wikitext-2"].files)
    monkeypatch.setitem(DATASETS, "wikitext-2", replace(DATASETS["wikitext-2"], files=unchecked))
    monkeypatch.setenv("PARNAS_DATA", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def shrink(found: list[str]) -> list[str]:
    """A command of parnas with small settings at its end, which go before those that stand there."""
    name, *rest = found
    rest = [each.replace("/shared/", "shared/") for each in rest]
    if name not in TRAINING or "--supernet" in rest:
        return [name, *rest, *(() if "--protocols" in rest else FEW.get(name, ()))]
    wanted = {number + 1 for number, each in enumerate(rest) if each == "--set"}  # what is tuned is no override
    overrides = [
        each for number, each in enumerate(rest) if "=" in each and not each.startswith("--") and number not in wanted
    ]
    files = [each for each in rest if each == "CONFIG" or (each.endswith(".yaml") and "arch" not in each)]
    if name == "data" and not files:
        return found
    config = load_config(files[0] if files else "demo", [each for each in overrides if "space=" not in each])
    settings: dict[str, object] = {"plan": {"search.blocks": 4}, "data": {}}.get(name, {**SMALL})
    if config.data.tokenizer.kind == "sentencepiece":
        settings["data.tokenizer.vocab_size"] = 380
    if config.data.corpus == "pydoc":
        settings["data.corpus"] = "data/wikitext-2"
    steps = ("--train-steps", "2") if "--train-steps" in rest else ()
    return [name, *rest, *(f"{key}={value}" for key, value in settings.items()), *FEW.get(name, ()), *steps]


def steps_of(page: Path, project: Path) -> Iterator[tuple[str, Callable[[], object]]]:
    """Each command and snippet of a page with what runs it, in order, after the runs that the page takes for given.

    Where a page has a file of layers exported, its snippets are that file, and its commands get a process each.
    """
    found = blocks(page)
    text = page.read_text(encoding="utf-8")
    for folder, command in GIVEN.items():
        named = re.search(rf"(?<![\w/]){folder}(?![\w/-])", "\n".join(b.text for b in found if b.kind in CODE))
        if named and f"--run {folder}\n" not in text and f"--run {folder}`" not in text:
            yield f"(given) {folder}", lambda c=command, f=folder: run_command(*shrink([*c]), "--run", f)
    exported = re.search(r"export PARNAS_LAYERS=(\S+)", text)
    if exported:
        (project / exported[1]).write_text("\n\n".join(b.text for b in found if b.kind == "python"), encoding="utf-8")
    names: dict[str, object] = {"__name__": "snippet"}
    for block in found:
        if block.kind == "python" and not exported:
            text = re.sub(r"(steps\": )\d+", r"\g<1>12", block.text)
            yield block.place, lambda t=text, b=block: exec(compile(t, b.place, "exec"), names)
        if block.kind == "shell":
            for command in filter(is_run, commands(block)):
                yield command, runner(command, {"PARNAS_LAYERS": exported[1]} if exported else None)


CODE = ("shell", "python")


def runner(command: str, environment: dict[str, str] | None) -> Callable[[], object]:
    """What runs a command: the command line itself, or a process where it needs an environment of its own."""
    arguments = parnas_words(command)
    if words(command)[0] == "export":
        return lambda: 0
    if arguments is None:
        return lambda: pytest.fail(f"neither run nor listed: {command}")
    if environment is None:
        return lambda: run_command(*shrink(arguments))
    whole = {**os.environ, **environment}
    process = [sys.executable, "-m", "parnas", *shrink(arguments)]
    return lambda: subprocess.run(process, env=whole, check=False, timeout=120).returncode


@every_page
def test_commands_and_snippets_run_in_order(page: Path, project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for told, run in steps_of(page, project):
        outcome = run()
        assert outcome in (None, 0), f"{page.name}: {told}\n{capfd.readouterr().err[-2000:]}"


@every_page
def test_every_block_is_known(page: Path) -> None:
    """A block of another kind is named in NO_CODE, or by its fence."""
    for block in blocks(page):
        if block.kind == "configuration":
            check_config(read_yaml(block.text, block.place), block.place)
        elif block.kind == "session":  # run there, answers compared
            assert f'"{page.name}"' in all_tests(), f"no test runs the examples of {page.name}"
        elif block.kind is None:
            assert block.text.startswith(NO_CODE), f"{block.place} is neither commands nor code"


def all_tests() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in (ROOT / "tests").rglob("test_*.py"))


@every_page
def test_what_is_not_run_parses(page: Path) -> None:
    for block in blocks(page):
        for command in commands(block) if block.kind == "shell" else ():
            if not is_run(command):
                check(block, command)


def check(block: Block, command: str) -> None:
    """Assert of a command that is not run that what it names exists."""
    found = words(command)
    if (arguments := parnas_words(command)) is not None:
        parse(arguments)
    match found:
        case ["make", *targets]:
            known = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
            assert {target for target in targets if "=" not in target} <= set(known), block.place
        case ["torchrun", *rest]:
            script = get_args_parser().parse_args([each for each in rest if each != "--"][: rest.index("--") + 1])
            assert (ROOT / script.training_script).is_file(), block.place
        case ["python", script, *_] if "/" in script:
            assert (ROOT / script).is_file(), block.place
            assert Path(script).stem in all_tests(), f"no test names {script}"
        case ["pip", "install", package]:
            for extra in re.findall(r"\[(\w+)\]", package):
                assert f"\n{extra} = [" in (ROOT / "pyproject.toml").read_text(), block.place


def parse(arguments: list[str]) -> None:
    """Read a command line as the program does, without doing anything; fails where an option is unknown."""
    group = typer.main.get_command(app)
    command = group.commands[arguments[0]]
    command.make_context(arguments[0], list(arguments[1:]))
    for config in (each for each in arguments[1:] if each.startswith("configs/")):
        load_config(ROOT / config, [each for each in arguments[1:] if re.match(r"[a-z]+\.[\w.]+=", each)])


@every_page
def test_commands_in_running_text_have_their_options(page: Path) -> None:
    group = typer.main.get_command(app)
    for command in spoken_commands(page):
        name, *rest = parnas_words(command.replace("\\|", "OR")) or [""]
        if name in ("COMMAND", "--help", "--version"):
            continue
        options = {option for each in group.commands[name].params for option in (*each.opts, *each.secondary_opts)}
        given = {word.partition("=")[0] for word in rest if word.startswith("--")}
        assert given <= options | {"--help"}, f"{page.name}: {command}"


def test_the_list_of_commands_that_are_not_run_names_none_in_vain() -> None:
    shown = [
        command for page in PAGES for block in blocks(page) if block.kind == "shell" for command in commands(block)
    ]
    assert [beginning for beginning in NOT_RUN if not any(command.startswith(beginning) for command in shown)] == []


def test_an_unknown_command_is_neither_run_nor_passed_over(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Do:\n\n    parnas search \\\n        --run x  # so\n    docker run it\n\n```\nfrobnicate\n```\n")
    shell, odd = blocks(page)
    assert list(map(words, commands(shell))) == [["parnas", "search", "--run", "x"], ["docker", "run", "it"]]
    assert odd.kind is None
    with pytest.raises(pytest.fail.Exception, match="neither run nor listed: docker"):
        runner("docker run it", None)()
