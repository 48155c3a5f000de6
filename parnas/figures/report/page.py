"""The report of runs: `report.html`, a single file that contains its script and pictures and loads no other file.

Its Content-Security-Policy allows no request and no script but its own, identified by a hash. Every text from a run
folder is escaped, by Jinja (JSON included) or by the XML writer of the charts.
"""

import base64
import hashlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from parnas.architecture import Architecture, describe_layer
from parnas.errors import ParnasError
from parnas.figures.colours import candidate_colours
from parnas.figures.report.charts import (
    front_chart,
    latency_chart,
    learning_chart,
    make_player,
    monitor_chart,
    pi_chart,
)
from parnas.figures.report.commands import reproduction_commands
from parnas.figures.report.data import ReportData, RunData, parse_architecture, read_report_data
from parnas.figures.report.probe import probe_part
from parnas.figures.report.result import search_result
from parnas.figures.report.secrets import hide
from parnas.figures.report.tables import choice_table, config_text, describe_environment, network_tables, read_analyses
from parnas.figures.style import PNG_DPI, drawable
from parnas.figures.svg import colour_rules
from parnas.runs.files import write_text
from parnas.runs.run import package_version

__all__ = ["write_report"]

_REPORT = "report.html"
MAX_BYTES = 5_000_000
"""Upper limit of the size of a page; animations get fewer frames until the page is smaller."""
_FRAMES = (200, 60, 15, 2)  # of an animation, tried in this order
_UNKNOWN = "#e4e8ed"  # tile of a layer that is not known here


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write `report.html` on runs, comparisons, studies and probes.

    Args:
        paths: Folders of runs, or folders that `evaluate --out`, `baselines`, `blackbox` or `probe` wrote.
        out: Folder of the page; by default the only folder in `paths`, or `runs/report` if there are several.

    Returns:
        The path of the page.

    Raises:
        ParnasError: A folder holds nothing to report or a broken file, or the page would be too large even with the
            shortest animations.
    """
    data = read_report_data(paths)
    folder = out or (paths[0] if len(paths) == 1 else Path("runs") / "report")
    template, content = _template(data), _content(data)
    for frames in _FRAMES:
        share = frames // max(1, len(data.searches)) + 1
        players = [None if run.history is None else make_player(run.history, share) for run in data.searches]
        page = template.render(content, players=players)
        light, dark = colour_rules(page)
        page = page.replace("/*light*/", light, 1).replace("/*dark*/", dark, 1)
        if len(page.encode()) < MAX_BYTES:
            write_text(folder / _REPORT, page)
            return folder / _REPORT
    raise ParnasError(f"The page would be larger than {MAX_BYTES:,} bytes; give fewer runs.")


def _template(data: ReportData) -> Any:
    environment = Environment(
        loader=PackageLoader("parnas", "figures/report/templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    colours = candidate_colours(_layer_names(data))
    environment.filters["tiles"] = lambda arch, most=10**4: _tiles(arch, most, colours)
    environment.globals.update(describe=describe_layer, version=package_version("parnas"), png_density=PNG_DPI / 96)
    environment.globals["letters"] = [(name, describe_layer(name), colour) for name, colour in colours.items()]
    return environment.get_template("report.html.j2")


def _content(data: ReportData) -> dict[str, Any]:
    """Return the values that the page template needs, by name; only `players`, the animations, are added later."""
    script, style = (
        resources.files("parnas.figures.report").joinpath("templates", name).read_text(encoding="utf-8")
        for name in ("report.js", "report.css")
    )
    searches = [
        {
            "run": run,
            "result": search_result(run, data),
            "choices": choice_table(run),
            "charts": [chart for chart in (pi_chart(run, f"pi-{n}"), monitor_chart(run, f"monitor-{n}")) if chart],
        }
        for n, run in enumerate(data.searches)
    ]
    trade_offs = [latency_chart(comparison, f"latency-{n}") for n, comparison in enumerate(data.comparisons)]
    trade_offs += [front_chart(front, f"front-{n}") for n, front in enumerate(data.fronts)]
    return {
        "script": Markup(script),
        "style": Markup(style),
        "digest": base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        "searches": searches,
        "probes": [probe_part(probe, number) for number, probe in enumerate(data.probes)],
        "compared": bool(data.runs or data.comparisons or data.fronts),
        "results": [search["result"] for search in searches if search["result"]],
        "curves": learning_chart(data.runs),
        "curve_notes": _curve_notes(data.runs),
        "trade_offs": trade_offs,
        "tables": network_tables(data),
        "analyses": read_analyses(data.comparisons),
        "runs": [(run, describe_environment(run), config_text(run)) for run in data.runs],
        "commands": reproduction_commands(data),
        "text": _common_settings(data.runs) or " · ".join(hide(probe.name) for probe in data.probes),
        "absent": _explain_absence(data),
    }


def _layer_names(data: ReportData) -> list[str]:
    """Return the name of every layer on the page once, the layers of the search spaces first."""
    rows = (parse_architecture(row.arch) or () for comparison in data.comparisons for row in comparison.rows)
    spaces = (run.config.search.candidates for run in data.searches)
    architectures = (run.architecture or () for run in data.runs)
    probed = (names for probe in data.probes for names in (probe.record.layers, *probe.record.changes))
    return list(dict.fromkeys(name for names in (*spaces, *architectures, *rows, *probed) for name in names))


def _tiles(arch: Architecture | str, most: int, colours: dict[str, str]) -> list[tuple[str, str]]:
    """Return (layer name, colour) for each block; if there are more than `most` blocks, `…` replaces the middle ones.

    The list is empty for a text that is not an architecture.
    """
    known = arch if isinstance(arch, Architecture) else parse_architecture(arch)
    names = list(known or ())
    if len(names) > most:
        names = [*names[: most // 2], "…", *names[len(names) - most // 2 :]]
    return [(name, colours.get(name, _UNKNOWN)) for name in names]


def _common_settings(runs: Sequence[RunData]) -> str:
    """Return corpus, tokenizer, device and precision as one text, without values that differ between the runs."""
    values = (
        {Path(hide(run.config.data.corpus)).name for run in runs},
        {f"{run.config.data.tokenizer.kind} tokens" for run in runs},
        {hide(run.environment.device_name or "") for run in runs},
        {run.environment.precision or "" for run in runs},
    )
    return " · ".join(filter(None, (each.pop() for each in values if len(each) == 1)))


def _curve_notes(runs: Sequence[RunData]) -> list[str]:
    """Return notes on losses that were not finite and on runs whose perplexities are not comparable."""
    notes = []
    for run in runs:
        losses = [line.loss for line in run.metrics if "loss" in line.model_fields_set]
        if lost := sum(drawable(loss) is None for loss in losses):
            notes.append(f"{run.name} logged {lost} loss(es) that were not finite; they are left out.")
    if len({run.tokens for run in runs}) > 1:
        notes.append("Texts or tokenizers differ between the runs, so perplexities per token are not comparable.")
    return notes


def _explain_absence(data: ReportData) -> str:
    """Return a sentence for a section without runs: why there are none, and which folders to give."""
    if not data.comparisons:
        return "No run is among the folders given here; give run folders too."
    return "The run folders that the comparison names do not exist any more; give their new folders, too."
