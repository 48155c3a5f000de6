"""Every command and snippet that the README and the pages show is run, with small settings, or listed with a reason."""

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from conftest import small_config
from helpers.command_helpers import run_command, run_in_process
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
    "make coverage": "runs these tests again",
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
    "python docs/make/results.py": "writes into the project; tests/meta/test_docs.py compares what it makes",
    "parnas demo": "takes minutes; tests/cli/test_demo.py runs it",
    "parnas pipeline": "takes minutes; tests/studies/test_pipeline.py runs it",
    "parnas compress": "takes minutes; tests/cli/test_pretrained_commands.py runs it",
    "parnas probe path/to/gpt2": "wants a model; tests/pretrained/test_transformers_parent.py makes some",
    "parnas import": "wants a model; tests/pretrained/test_import_transfo_xl.py makes some",
    "tensorboard --logdir": "does not end; tests/training/test_tensorboard.py reads what it would show",
    "torchrun": "wants GPUs, and minutes; tests/training/test_distributed.py runs several processes",
    "srun": "is of a cluster",
    "#SBATCH": "is of a cluster",
    "apt-get install": "changes the machine",
    "su postgres": "changes the machine",
    "echo": "changes the machine",
    "pg_ctlcluster": "changes the machine",
    "chmod 600 ~/.pgpass": "changes the machine",
    "parnas blackbox CONFIG search.cost.metric=macs": "wants a server; tests/studies/test_optuna_study.py has one",
}
"""How commands begin that are not run, and why not. They must parse all the same."""

NO_CODE = ("theta ← theta", "text ──▶", "runs/NAME/", "RUN/baselines/", "cross-entropy ", "mean ±", "loss with shared")
"""How blocks begin that are neither commands nor code."""

GIVEN = {
    "runs/par/search": ("search", "configs/wikitext2-par.yaml"),
    "runs/par/derived": ("retrain", "configs/wikitext2-par.yaml", "--arch", "sf"),
    "runs/par/interleaved": ("retrain", "configs/wikitext2-par.yaml", "--arch", "interleaved-2"),
    "runs/demo/interleaved": ("retrain", "configs/wikitext2-par.yaml", "--arch", "interleaved-2"),
    "runs/search": ("search", "configs/wikitext2-par.yaml"),
    "runs/derived": ("retrain", "configs/wikitext2-par.yaml", "--arch", "sf"),
    "runs/short": ("retrain", "configs/wikitext2-par.yaml", "--arch", "interleaved-2"),
    "RUN": ("search", "CONFIG"),
}
"""Runs that a page may use without showing how they are made, with the commands that make them."""

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
        "search.blocks": 3,
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
SNIPPETS_RUN: set[str] = set()
"""Python snippets that have run already: the same one on several pages runs once."""
every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)


class TrainedOnce:
    """Runs of `search` and `retrain`, so that a command which several pages show trains once."""

    def __init__(self, store: Path) -> None:
        self.store = store
        self.folders: dict[tuple[str, ...], Path] = {}

    def run(self, arguments: list[str]) -> int:
        """Run a command of parnas, or copy the run folder that the same command has left; return the exit code."""
        if arguments[0] not in ("search", "retrain"):
            return run_command(*arguments)
        option = arguments.index("--run")
        others, run = arguments[:option] + arguments[option + 2 :], Path(arguments[option + 1])
        key = tuple(Path(word).read_text(encoding="utf-8") if Path(word).is_file() else word for word in others)
        if key in self.folders:
            shutil.copytree(self.folders[key], run)
            return 0
        if code := run_command(*arguments):
            return code
        self.folders[key] = Path(shutil.copytree(run, self.store / str(len(self.folders))))
        return 0


def is_run(command: str) -> bool:
    return not any(command.startswith(beginning) for beginning in NOT_RUN)


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder like the project's root, with a text of one's own, a small WikiText-2 and two small configurations."""
    folder = tmp_path_factory.mktemp("project")
    for name in ("configs", "Makefile"):
        (folder / name).symlink_to(ROOT / name)
    (folder / "novel.txt").write_text(english(500), encoding="utf-8")
    (folder / "shared").mkdir()
    corpus = write_corpus(folder / "data" / "wikitext-2", valid=english(40, 1), test=english(40, 2))
    for name in ("CONFIG", "demo"):  # a file has precedence over the shipped configuration of that name
        (folder / name).write_text(dump_config(small_config(corpus, search__blocks=3)), encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def trained_once(tmp_path_factory: pytest.TempPathFactory) -> TrainedOnce:
    """Run folders of the searches and retrainings of all pages."""
    return TrainedOnce(tmp_path_factory.mktemp("trained"))


@pytest.fixture
def project(materials: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of materials as the working directory; whatever a page writes there is removed after its test."""
    unchecked = tuple(DatasetFile(file.names) for file in DATASETS["wikitext-2"].files)
    monkeypatch.setitem(DATASETS, "wikitext-2", replace(DATASETS["wikitext-2"], files=unchecked))
    monkeypatch.setenv("PARNAS_DATA", str(materials / "data"))
    monkeypatch.chdir(materials)
    before = set(materials.iterdir())
    yield materials
    for path in {*materials.iterdir()} - before:
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def shrink(found: list[str]) -> list[str]:
    """Return the arguments of a command of parnas with small settings appended, which override the earlier ones."""
    name, *rest = found
    rest = [each.replace("/shared/", "shared/") for each in rest]
    if name not in TRAINING or "--supernet" in rest:
        return [name, *rest, *(("--tokens", "100") if "--protocols" in rest else FEW.get(name, ()))]
    wanted = {number + 1 for number, each in enumerate(rest) if each == "--set"}  # what is tuned is no override
    overrides = [
        each for number, each in enumerate(rest) if "=" in each and not each.startswith("--") and number not in wanted
    ]
    files = [each for each in rest if each == "CONFIG" or (each.endswith(".yaml") and "arch" not in each)]
    if name == "data" and not files:
        return found
    config = load_config(files[0] if files else "demo", [each for each in overrides if "space=" not in each])
    settings: dict[str, object] = {"plan": {"search.blocks": 2, "model.arch": "sf"}, "data": {}}.get(name, {**SMALL})
    if config.data.tokenizer.kind == "sentencepiece":
        settings["data.tokenizer.vocab_size"] = 380
    if config.data.corpus == "pydoc":
        settings["data.corpus"] = "data/wikitext-2"
    steps = ("--train-steps", "2") if "--train-steps" in rest else ()
    return [name, *rest, *(f"{key}={value}" for key, value in settings.items()), *FEW.get(name, ()), *steps]


def steps_of(page: Path, project: Path, trained_once: TrainedOnce) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield the name of each command and snippet of a page, in order, with a function that runs it.

    First come the runs of `GIVEN` that the page uses. On a page that sets PARNAS_LAYERS, the snippets together are that
    file of layers, and each command runs in a process of its own.
    """
    found = blocks(page)
    text = page.read_text(encoding="utf-8")
    for folder, command in GIVEN.items():
        named = re.search(rf"(?<![\w/]){folder}(?![\w/-])", "\n".join(b.text for b in found if b.kind in CODE))
        if named and f"--run {folder}\n" not in text and f"--run {folder}`" not in text:
            yield f"(given) {folder}", lambda c=command, f=folder: trained_once.run([*shrink([*c]), "--run", f])
    exported = re.search(r"export PARNAS_LAYERS=(\S+)", text)
    if exported:
        (project / exported[1]).write_text("\n\n".join(b.text for b in found if b.kind == "python"), encoding="utf-8")
    names: dict[str, object] = {"__name__": "snippet"}
    for block in found:
        if block.kind == "python" and not exported:
            text = re.sub(r"(steps\": )\d+", r"\g<1>12", block.text)
            if text in SNIPPETS_RUN:
                continue
            SNIPPETS_RUN.add(text)
            yield block.place, lambda t=text, b=block: exec(compile(t, b.place, "exec"), names)
        if block.kind == "shell":
            for command in filter(is_run, commands(block)):
                yield command, runner(command, trained_once, {"PARNAS_LAYERS": exported[1]} if exported else None)


CODE = ("shell", "python")


def runner(command: str, trained_once: TrainedOnce, environment: dict[str, str] | None = None) -> Callable[[], object]:
    """Return a function that runs a command in this process, or in a new one if it needs its own environment."""
    arguments = parnas_words(command)
    if words(command)[0] == "export":
        return lambda: 0
    if arguments is None:
        return lambda: pytest.fail(f"neither run nor listed: {command}")
    if environment is None:
        return lambda: trained_once.run(shrink(arguments))
    return lambda: run_in_process(shrink(arguments), environment)


@every_page
def test_commands_and_snippets_run_in_order(
    page: Path, project: Path, trained_once: TrainedOnce, capfd: pytest.CaptureFixture[str]
) -> None:
    for step, run in steps_of(page, project, trained_once):
        outcome = run()
        assert outcome in (None, 0), f"{page.name}: {step}\n{capfd.readouterr().err[-2000:]}"


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
    with pytest.raises(pytest.fail.Exception, match="docker run it"):
        runner("docker run it", TrainedOnce(tmp_path))()
