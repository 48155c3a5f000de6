"""The commands that made the runs of a report, as far as the run folders record them; comments name what is unknown."""

import os
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from parnas.figures.report.data import ComparisonData, ProbeData, ReportData, RunData
from parnas.figures.report.secrets import hide, hide_command
from parnas.runs.files import to_json

_SCRIPTS = ("search.py", "derive.py", "retrain.py", "evaluate.py")
_DERIVE_OPTIONS = {
    "cost_target": "--cost-target",
    "metric": "--metric",
    "top_k": "--top-k",
    "rerank_top_k": "--rerank-top-k",
}
_EVALUATE_OPTIONS = {
    "tgt_len": "--tgt-len",
    "mem_len": "--mem-len",
    "cmem_len": "--cmem-len",
    "clamp_len": "--clamp-len",
    "same_length": "--same-length",
    "any_length": "--any-length",
    "pointer_len": "--pointer-len",
    "best": "--best",
    "tuned": "--tuned",
}
_PIPELINES = ("demo", "pipeline")  # commands that also run derive and evaluate


def reproduction_commands(data: ReportData) -> list[str]:
    """Return the commands that made the runs, their `arch.yaml` files and the comparisons, without duplicates.

    A comment after `#` names what the run folders do not record.
    """
    lines = [line for run in data.runs for line in (_training(run), _derivation(run))]
    lines += [_evaluation(comparison) for comparison in data.comparisons if not _from_pipeline(comparison)]
    lines += [_probe(probe) for probe in data.probes]
    return list(dict.fromkeys(line for line in lines if line))


def _command_line(run: RunData) -> list[str]:
    """Return the words of the command line that made a run; empty if it was not a command or script of parnas.

    The program is written without its folder.
    """
    line = run.environment.command_line
    if not line:
        return []
    program = PurePosixPath(PureWindowsPath(line[0]).as_posix())
    if (program.parent.name, program.name) == ("parnas", "__main__.py"):
        return ["python", "-m", "parnas", *line[1:]]
    if program.name in _SCRIPTS:
        return ["python", program.name, *line[1:]]
    return ["parnas", *line[1:]] if program.name.removesuffix(".exe") == "parnas" else []


def _subcommand(run: RunData) -> str:
    """Return which command of `parnas` made a run, such as `search`; empty if another program made it."""
    words = _command_line(run)
    after = words[words.index("parnas") + 1 :] if "parnas" in words[:3] else []
    return next((word for word in after if not word.startswith("-")), "")


def _training(run: RunData) -> str:
    if words := _command_line(run):
        return hide_command(words)
    if run.environment.command_line:
        folder = hide(" ".join(str(run.run.folder).split()))  # in one line
        return f"# {folder} was made from Python: parnas.{run.kind}(…) with the configuration shown above"
    return ""


def _derivation(run: RunData) -> str:
    """Return the `parnas derive` command that wrote the `arch.yaml` of a run.

    The text is empty if there is no `arch.yaml` or a pipeline wrote it. A comment follows the command if `arch.yaml`
    does not record the options of derive, for example because a person wrote the file.
    """
    derivation = run.derivation
    if derivation is None:
        return ""
    constraints = derivation.constraints
    if _subcommand(run) in _PIPELINES and (not constraints or derivation.finalists):
        return ""
    words = ["parnas", "derive", str(run.run.folder)]
    if constraints is None:
        unknown = "arch.yaml does not record whether --cost-target, --max or --rerank-top-k was given"
        return f"{hide_command(words)}  # {unknown}"
    if isinstance(targets := constraints.get("within"), Mapping):
        words += ["--within", ",".join(f"{metric}={share}" for metric, share in targets.items())]
    words += _options(constraints, _DERIVE_OPTIONS)
    limits = constraints.get("max")
    for name, most in limits.items() if isinstance(limits, Mapping) else ():
        words += ["--max", f"{name}={most}"]
    return hide_command(words)


def _from_pipeline(comparison: ComparisonData) -> bool:
    """Check whether `demo` or `pipeline` wrote a comparison, which then lies in the parent folder of its runs."""
    beside = {os.path.realpath(run.run.folder.parent) for run in comparison.runs}
    written = beside == {os.path.realpath(comparison.folder)} and not comparison.conditions
    return written and all(_subcommand(run) in _PIPELINES for run in comparison.runs)


def _evaluation(comparison: ComparisonData) -> str:
    """Return the `parnas evaluate` command that repeats a comparison; empty if a run's folder is not known."""
    if len(comparison.runs) < len(comparison.rows):
        return ""
    words = ["parnas", "evaluate", *(str(run.run.folder) for run in comparison.runs)]
    words += ["--split", comparison.split] if comparison.split else []
    conditions = comparison.conditions or {}
    any_length = conditions.get("same_length") is False
    words += _options({**conditions, "any_length": any_length}, _EVALUATE_OPTIONS)
    changes = conditions.get("changes")
    for key, value in changes.items() if isinstance(changes, Mapping) else ():
        if key.startswith("evaluation."):
            words.append(f"{key}={value if isinstance(value, str) else to_json(value)}")
    words += ["--analyse", ",".join(comparison.analyses)] if comparison.analyses else []
    return hide_command([*words, "--out", str(comparison.folder)])


def _probe(probe: ProbeData) -> str:
    """Return the `parnas probe` command that repeats a probe; empty if `probe.json` does not record the model."""
    where = probe.record.conditions
    if where is None:
        return ""
    words = ["parnas", "probe", where.model, *([] if where.text is None else ["--text", where.text])]
    words += ["--tokens", str(where.requested_tokens), "--pairs", str(len(probe.record.pairs))]
    return hide_command([*words, "--out", str(probe.folder)])


def _options(values: Mapping[str, Any], names: Mapping[str, str]) -> list[str]:
    """Return each number, text or `True` in `values` as command-line words; `names` maps the keys to options."""
    words = []
    for key, option in names.items():
        value = values.get(key)
        if value is True:
            words.append(option)
        elif isinstance(value, str | float | int) and value is not False:
            words += [option, str(value)]
    return words
