"""Write docs/commands.md from the command line itself: `python docs/make_commands.py`."""

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args, get_origin

import typer
from typer.models import ArgumentInfo, OptionInfo

from parnas.cli import app
from parnas.evaluation.adapt import CACHE_SIZE, Grid
from parnas.files import write_text

PAGE = Path(__file__).with_name("commands.md")

INTRODUCTION = """# Commands

Made by `python docs/make_commands.py` from the program. `parnas --help` lists the commands, `parnas COMMAND --help`
tells of one, `parnas --version` which version it is. `search`, `derive`, `retrain` and `evaluate` are scripts too:
`python search.py …` is `parnas search …`.

* `CONFIG` is a YAML file such as those in `configs/`, or the name of one of these, such as `wikitext2-word-cpu`; without
  one the demo's is taken. Every setting of [configuration.md](configuration.md) can be given as `section.key=value`
  after it.
* `ARCH` is a string such as `sfsff` or `(sf)*8`, an `arch.yaml`, a run folder, or a preset: `interleaved-N`,
  `compressive-N`, `sandwich-N-K`, `all-f-N`, `random-N-SEED`. A search stands for what its `arch.yaml` says, which
  `derive` writes, and where there is none for what pi spoke for last.
* `RUN` is a run folder; what lies in it is told in [architecture.md](architecture.md#the-run-folder).
"""

ENDING = """## Exit codes

| code | meaning | what to do |
| --- | --- | --- |
| 0 | done | |
| 2 | a mistake in what was given, a file that cannot be used, a full disk, memory that ended, numbers that are not finite | the message says |
| 130 | interrupted by Ctrl-C (SIGINT); a training is saved | the command that the message names goes on |
| 138 | stopped by SIGUSR1 (on Linux; elsewhere 128 + its number), as clusters send it before they preempt a job; saved | the same |
| 143 | stopped by SIGTERM; saved | the same |
| 1 | a bug: a traceback was printed | report it with the traceback |

A command that ends by 2, 130, 138 or 143 prints one message on standard error and no traceback. Where torchrun has
started several processes, each but the first puts its number before its message. What is kept, and how a run goes on:
[reliability.md](reliability.md).

## Environment

| variable | meaning |
| --- | --- |
| `PARNAS_DATA` | a folder that holds corpora, such as `wikitext-2/`; nothing of what it has is downloaded |
| `PARNAS_CACHE` | where encoded texts, downloads and measured latencies are kept; default: the user's cache folder |
| `PARNAS_LAYERS` | Python files or modules with layers of your own, with commas between ([layers.md](layers.md)) |
"""

GRID = ", ".join(
    f"{name} {', '.join(f'{value:g}' for value in getattr(Grid(), name))}"
    for name in ("lr", "decay", "theta", "weight")
)
# More than the program's own help says, and a command to begin with: for those that need it.
MORE = {
    "search": (
        "Reads the text, writes `pi.jsonl`, checkpoints and `figures/pi.gif` into the run folder. The same command with "
        "the same `--run` goes on with a run that has not ended. What is minimised: [search.md](search.md).",
        "parnas search configs/demo.yaml search.steps=600 --run runs/search",
    ),
    "derive": (
        "Pi, entropy and margin of each block and what came next are kept beside the string. How it chooses: "
        "[search.md](search.md#from-pi-to-a-string).",
        "parnas derive runs/search --within 0.8 --metric macs",
    ),
    "retrain": (
        "Writes checkpoints and metrics. The same command with the same `--run` goes on with a run that has not ended.",
        "parnas retrain configs/demo.yaml --arch runs/search/arch.yaml --run runs/derived",
    ),
    "evaluate": (
        "Writes one table as CSV, Markdown and JSON, and learning curves. The derived network of a search is what its "
        "`arch.yaml` says, and where there is none what pi spoke for last. Which of its perplexities to compare: "
        "[faq.md](faq.md#which-perplexity-is-the-right-one). What `--analyse` shows: "
        "[compressive.md](compressive.md#what---analyse-shows).",
        "parnas evaluate runs/search runs/derived --split test --out runs/comparison",
    ),
    "plot": ("", "parnas plot runs/search runs/derived"),
    "pipeline": (
        "The same command with the same `--run` goes on where it was stopped, whatever phase that was. The folder gets "
        "`search/`, `finalists/`, `derived/`, a run for each baseline, the comparison on the validation split and "
        "`report.html`. What `--finalists` settles: [search.md](search.md#how-much-attention).",
        "parnas pipeline configs/demo.yaml --finalists 2 --baselines equal-cost,all-f --run runs/pipeline",
    ),
    "adapt": (
        f"Tries {GRID}, for a cache of {CACHE_SIZE:,} positions; `adapted.json` in the run folder keeps what all of them "
        "reached. What the settings mean: [evaluation.md](evaluation.md).",
        "parnas adapt runs/derived",
    ),
    "demo": (
        "The whole journey on Python's own documentation, into `runs/`; `make demo` installs first.",
        "parnas demo",
    ),
    "watch": ("", "parnas watch runs/search --once"),
    "report": ("", "parnas report runs/search runs/derived"),
    "export": (
        "What each target is, and what is checked: [export.md](export.md).",
        "parnas export runs/derived --to safetensors",
    ),
    "doctor": ("", "parnas doctor"),
    "profile": (
        "Writes `profile.json`: milliseconds of each layer on this machine, and how well their sum predicts networks. "
        "`search.cost.table` reads it.",
        "parnas profile configs/demo.yaml --batch-size 1 --rounds 3 --check 2 --out runs/profile",
    ),
    "plan": (
        "How memory is counted, and what is not: [planning.md](planning.md).",
        "parnas plan configs/wikitext103-par.yaml --gpus 8 --memory 16",
    ),
    "cutoffs": ("For `model.cutoffs`; `auto` there finds them by itself.", "parnas cutoffs runs/search --clusters 3"),
    "data": ("", "parnas data wikitext-2 data.tokenizer.kind=word"),
    "stability": (
        "Writes a search for each seed, `stability.json`, `stability.csv` and `figures/votes.png`: votes, distances "
        "between the strings, a consensus.",
        "parnas stability configs/demo.yaml --seeds 2 --run runs/stability",
    ),
    "baselines": (
        "Writes trainings, `baselines.json`, `baselines.csv` and `figures/pareto.png`. Which networks, and how the answer "
        "is reckoned: [search.md](search.md#better-than-chance).",
        "parnas baselines runs/search --random 1 --seeds 2",
    ),
    "blackbox": (
        "Writes `pareto.csv` and `arch.yaml`. Many machines can share a study: "
        "[scaling.md](scaling.md#many-machines-one-study).",
        "parnas blackbox --supernet runs/search --trials 5 --storage sqlite:///study.db --study first",
    ),
    "tune": (
        "Writes `best.yaml`, tables and pictures, with a training in a subfolder for each trial. What can be tuned, and "
        "which trials end early: [tuning.md](tuning.md).",
        "parnas tune configs/demo.yaml --arch sfsfff --trials 4 --set train.lr=log:1e-3..1e-2 --run runs/tuned",
    ),
}

NAMES = {int: "N", float: "X", str: "TEXT", Path: "PATH"}


class Parameter(NamedTuple):
    """An argument or option of a command."""

    is_option: bool
    names: str  # as typed
    metavar: str
    required: bool
    help: str


def render() -> str:
    """The page: what all commands have in common, then a section for each, in the order of `parnas --help`."""
    commands = {name: list(parameters(callback)) for name, callback in find_commands(app)}
    shared = [each for each in next(iter(commands.values())) if all(each in own for own in commands.values())]
    page = [INTRODUCTION]
    if shared:
        page += ["Every command has these:\n", *table(shared)]
    for name, callback in find_commands(app):
        page += section(name, callback, [each for each in commands[name] if each not in shared])
    return "\n".join([*page, ENDING])


def section(name: str, callback: Any, own: list[Parameter]) -> list[str]:
    """The lines about a command."""
    usage = " ".join([f"parnas {name}", *(each.metavar for each in own if not each.is_option), "[OPTIONS]"])
    required = [f"{each.names} {each.metavar}" for each in own if each.is_option and each.required]
    more, example = MORE.get(name, ("", ""))
    lines = [f"## {name}\n", f"{inspect.getdoc(callback)} {more}".strip() + "\n", f"`{' '.join([usage, *required])}`\n"]
    if example:
        lines.append(f"    {example}\n")
    return lines + (table(own) if own else [])


def table(found: list[Parameter]) -> list[str]:
    """A table of arguments and options, with an empty line after it."""
    rows = [
        f"| `{f'{each.names} {each.metavar}'.strip() if each.is_option else each.metavar}` | {each.help} |".replace(
            r"|COUNTS", r"\|COUNTS"
        )
        for each in found
    ]
    return ["| argument or option | meaning |", "| --- | --- |", *rows, ""]


def find_commands(group: typer.Typer) -> Iterator[tuple[str, Any]]:
    """Name and function of each command, those of groups without a name included."""
    for command in group.registered_commands:
        yield command.name or command.callback.__name__.replace("_", "-"), command.callback
    for inner in group.registered_groups:
        yield from find_commands(inner.typer_instance)


def parameters(callback: Any) -> Iterator[Parameter]:
    """What a command's signature declares."""
    for name, parameter in inspect.signature(callback).parameters.items():
        annotation, *extras = get_args(parameter.annotation)
        info = next(extra for extra in extras if isinstance(extra, ArgumentInfo | OptionInfo))
        required = parameter.default is inspect.Parameter.empty
        kind = base_type(annotation)
        is_option = isinstance(info, OptionInfo)
        metavar = info.metavar or ("" if kind is bool else NAMES.get(kind, kind.__name__.upper()))
        declared = [each for each in (info.default, *(info.param_decls or ())) if isinstance(each, str)]
        names = ", ".join(declared or [f"--{name.replace('_', '-')}"]).replace("/", " / ")
        yield Parameter(is_option, names, metavar, required, describe(info, parameter.default, required))


def base_type(annotation: Any) -> type:
    """`int` of `int | None`, `Path` of `list[Path]`, `str` of a Literal."""
    if get_origin(annotation) is Literal:
        return str
    inner = [each for each in get_args(annotation) if each is not type(None)]
    return base_type(inner[0]) if inner else annotation


def describe(info: Any, default: Any, required: bool) -> str:
    """The help, with bound and default where it does not tell them itself."""
    text = (info.help or "").removesuffix(".")
    notes = [f"at least {info.min}"] if (info.min or 0) > 1 else []
    if not required and default not in (None, False) and "default" not in text:
        notes.append(f"default: {default}")
    if required and isinstance(info, OptionInfo):
        notes.append("required")
    return "; ".join([*([text] if text else []), *notes]) + ("." if text or notes else "")


if __name__ == "__main__":
    write_text(PAGE, render())
