"""The commands that made what a report shows, as far as the files tell; what they do not is said in comments."""

import os
import shlex
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from parnas.figures.report_fronts import number
from parnas.figures.report_runs import Comparison, Material, Member, analyses_of
from parnas.figures.report_secrets import hide, hide_command
from parnas.files import to_json

SCRIPTS = ("search.py", "derive.py", "retrain.py", "evaluate.py")
OPTIONS = {"tgt_len": "--tgt-len", "mem_len": "--mem-len", "cmem_len": "--cmem-len", "clamp_len": "--clamp-len"}
FLAGS = {"best": "--best", "adapted": "--adapted"}
WHOLE = ("demo", "pipeline")  # commands that do all of it
LIMITS = {"within": "--within", "metric": "--metric", "top_k": "--top-k", "rescore": "--rescore"}


def commands_of(material: Material) -> list[str]:
    """What was typed for each run, derive and evaluate included, each command once; comments begin with `#`."""
    lines = []
    for member in material.members:
        lines += [_made(member), *_derived(member)]
    lines += [_evaluated(comparison) for comparison in material.comparisons if not _of_the_whole(comparison)]
    return list(dict.fromkeys(line for line in lines if line))


def command_of(member: Member) -> list[str]:
    """The command line of a run, without the place of the program; empty where none of parnas's own made it."""
    line = member.environment.get("command_line")
    if not isinstance(line, list) or not line or not all(isinstance(word, str) for word in line):
        return []
    program = PurePosixPath(PureWindowsPath(line[0]).as_posix())
    if (program.parent.name, program.name) == ("parnas", "__main__.py"):
        return ["python", "-m", "parnas", *line[1:]]
    if program.name in SCRIPTS:
        return ["python", program.name, *line[1:]]
    return ["parnas", *line[1:]] if program.name.removesuffix(".exe") == "parnas" else []


def _verb(member: Member) -> str:
    """The command of `parnas` that made a run; empty where it was another program."""
    words = command_of(member)
    after = words[words.index("parnas") + 1 :] if "parnas" in words[:3] else []
    return next((word for word in after if not word.startswith("-")), "")


def _made(member: Member) -> str:
    if words := command_of(member):
        return hide_command(words)
    if member.environment.get("command_line"):
        folder = hide(shlex.quote(" ".join(str(member.run.folder).split())))  # in one line
        return f"# {folder} was made from Python: parnas.{member.kind}(…) with its configuration above"
    return ""


def _derived(member: Member) -> list[str]:
    """The command behind an `arch.yaml`; those of older versions, or written by hand, do not say what was demanded."""
    if not member.derivation:
        return []
    demands = member.derivation.get("demands")
    told = isinstance(demands, Mapping)
    if _verb(member) in WHOLE and (not demands or "finalists" in member.derivation):
        return []
    words = ["parnas", "derive", str(member.run.folder)]
    if isinstance(demands, Mapping):
        words += [word for key, option in LIMITS.items() if key in demands for word in (option, _plain(demands[key]))]
        limits = demands.get("max")
        if isinstance(limits, Mapping):
            words += [word for name, most in limits.items() for word in ("--max", f"{name}={_plain(most)}")]
    return [hide_command(words) + ("" if told else "  # whether with --within, --max or --rescore is not known")]


def _of_the_whole(comparison: Comparison) -> bool:
    """Whether one of `WHOLE` itself has written a comparison, beside its runs."""
    members = [row.member for row in comparison.rows if row.member]
    beside = {os.path.realpath(member.run.folder.parent) for member in members} == {os.path.realpath(comparison.folder)}
    return beside and not comparison.conditions and all(_verb(member) in WHOLE for member in members)


def _evaluated(comparison: Comparison) -> str:
    """The command that measures a comparison again; empty where its runs are not known."""
    members = [row.member for row in comparison.rows if row.member]
    if len(members) < len(comparison.rows):
        return ""
    words = ["parnas", "evaluate", *(str(member.run.folder) for member in members)]
    words += ["--split", comparison.split] if comparison.split else []
    given = comparison.conditions
    for key, option in OPTIONS.items():
        length = number((_lengths(comparison, members) if given is None else given).get(key))
        words += [] if length is None else [option, f"{length:.0f}"]
    if given and isinstance(given.get("same_length"), bool):
        words.append("--same-length" if given["same_length"] else "--any-length")
    words += [flag for key, flag in FLAGS.items() if given and given.get(key) is True]
    changes = given.get("changes") if given else None
    words += _changes(changes) if isinstance(changes, Mapping) else []
    if names := analyses_of(comparison):
        words += ["--analyse", ",".join(names)]
    line = hide_command([*words, "--out", str(comparison.folder)])
    return line if given is not None else f"{line}  # whether with --best or other lengths is not known"


def _changes(changes: Mapping[str, Any]) -> list[str]:
    """Settings of evaluation, as they were given."""
    plain = {key: each for key, each in changes.items() if key.startswith("evaluation.")}
    return [f"{key}={each if isinstance(each, str) else to_json(each)}" for key, each in plain.items()]


def _lengths(comparison: Comparison, members: list[Member]) -> dict[str, float]:
    """Of files that do not hold what was asked for: the lengths that are not those of the configurations."""
    found: dict[str, float] = {}
    for key in ("tgt_len", "mem_len"):
        lengths = {row.figures.get(key) for row in comparison.rows}
        if len(lengths) == 1 and (length := lengths.pop()) is not None:
            found |= {} if {_length(member, key) for member in members} == {length} else {key: length}
    return found


def _length(member: Member, key: str) -> int:
    """What evaluate takes where nothing else is asked for."""
    trained = member.config.data.tgt_len if key == "tgt_len" else member.config.model.mem_len
    given: int | None = getattr(member.config.evaluation, key)
    return trained if given is None else given


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
