"""One page that shows what runs found: `report.html`, whole in itself, which neither loads nor runs anything else.

The page's policy (CSP) allows its own script alone, by hash, and no request at all. Every text of a run folder goes
through Jinja's escaping, JSON included.
"""

import base64
import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from parnas.architecture import Architecture, describe_layer
from parnas.errors import ParnasError
from parnas.figures.analyses import file_name
from parnas.figures.pareto import Marker
from parnas.figures.report_answer import PERPLEXITIES, Answer, answer_of, shared_perplexity
from parnas.figures.report_charts import DASHES, Chart, Line, line_chart, scatter_chart
from parnas.figures.report_colours import candidate_shades, ink_on, run_shade
from parnas.figures.report_commands import commands_of
from parnas.figures.report_fronts import Front, number
from parnas.figures.report_pi import Player, choices, monitor_charts, pi_charts, player_of
from parnas.figures.report_runs import Comparison, Material, Member, analyses_of, gather, read
from parnas.figures.report_secrets import hide
from parnas.figures.report_tables import (
    analysis_table,
    config_text,
    describe_run,
    tables_of,
    tell_rows,
)
from parnas.figures.style import PNG_DPI
from parnas.files import write_text
from parnas.run import package_version

REPORT = "report.html"
MAX_BYTES = 5_000_000
"""Of the page; it is thinned until it is smaller."""
PICTURE_BYTES = 2_000_000  # of all pictures, before they are embedded
DETAIL = (200, 60, 15, 2)  # frames of an animation, tried one after the other
CUT_ABOVE = 2.0  # times the worst validation
PNG = b"\x89PNG\r\n\x1a\n"


class Picture(NamedTuple):
    """A PNG for the page, and how wide it is meant to be; without data where there was no room."""

    name: str
    alt: str
    data: str
    width: int  # CSS pixels


class Analysis(NamedTuple):
    """What `evaluate --analyse` found: its table and its pictures."""

    title: str
    heads: list[str]
    rows: list[list[str]]
    pictures: list[Picture]


TITLES = {
    "attention": "How old the positions are that each block attends to",
    "frequency": "Perplexity per word, by its occurrences in the training text",
    "memory": "Perplexity per token, by the length of memory",
}


def write_report(paths: Sequence[Path], out: Path | None = None) -> Path:
    """Write `report.html` of runs and comparisons into `out`, by default into the only folder given, else runs/report.

    Raises `ParnasError` for folders that hold nothing to report or something broken, and where no page is small enough.
    """
    material = gather(paths)
    folder = out or (paths[0] if len(paths) == 1 else Path("runs") / "report")
    for frames in DETAIL:
        page = render(material, frames)
        if len(page.encode()) < MAX_BYTES:
            write_text(folder / REPORT, page)
            return folder / REPORT
    raise ParnasError(f"The page would be larger than {MAX_BYTES:,} bytes; give fewer runs.")


def render(material: Material, frames: int = DETAIL[0]) -> str:
    """The page as text, with at most so many frames in each animation."""
    environment = Environment(
        loader=PackageLoader("parnas", "figures/templates"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    shades = candidate_shades(_letters(material))
    environment.filters["tiles"] = lambda arch, most=10**4: _tiles(arch, most, shades)
    environment.globals.update(describe=describe_layer, ink_on=ink_on, version=package_version("parnas"))
    script, style = (_text(name) for name in ("report.js", "report.css"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    searches = [_search(member, material, frames) for member in material.searches]
    content = {
        "script": Markup(script),
        "style": Markup(style),
        "digest": digest,
        "legend": [(name, describe_layer(name), shade) for name, shade in shades.items()],
        "searches": searches,
        "answers": [search["answer"] for search in searches if search["answer"]],
        "members": material.members,
        "curves": learning_chart(material.members),
        "notes": curve_notes(material.members),
        "trade_offs": [*map(trade_off, material.comparisons), *map(_front, material.fronts)],
        "tables": tables_of(material),
        "analyses": _analyses(material.comparisons),
        "runs": [(member, describe_run(member), config_text(member)) for member in material.members],
        "commands": commands_of(material),
        "text": _describe_text(material.members),
        "absent": _tell_absent(material),
    }
    return environment.get_template("report.html.j2").render(content)


def _text(name: str) -> str:
    return resources.files("parnas.figures").joinpath("templates", name).read_text(encoding="utf-8")


def _letters(material: Material) -> list[str]:
    """Every layer name that the page shows, those of the search space first."""
    rows = (read(row.arch) or () for comparison in material.comparisons for row in comparison.rows)
    spaces = (member.config.search.candidates for member in material.searches)
    archs = (member.architecture or () for member in material.members)
    return list(dict.fromkeys(name for names in (*spaces, *archs, *rows) for name in names))


def _tiles(arch: Architecture | str, most: int, shades: Any) -> list[tuple[str, str, str]]:
    """Name, colour and ink of each block, the middle left out beyond `most`; nothing of what is unknown."""
    known = arch if isinstance(arch, Architecture) else read(arch)
    names = list(known or ())
    if len(names) > most:
        names = [*names[: most // 2], "…", *names[len(names) - most // 2 :]]
    colours = {name: shade.light for name, shade in shades.items()}
    return [(name, colours.get(name, "#ffffff"), ink_on(colours.get(name, "#ffffff"))) for name in names]


def _search(member: Member, material: Material, frames: int) -> dict[str, Any]:
    """All that the page shows of one search."""
    history = member.history
    answer: Answer | None = answer_of(member, material)
    player: Player | None = None if history is None else player_of(history, frames // len(material.searches) + 1)
    return {
        "member": member,
        "answer": answer,
        "player": player,
        "choices": choices(member),
        "lines": [] if history is None else pi_charts(history),
        "monitor": monitor_charts(member),
    }


def _describe_text(members: Sequence[Member]) -> str:
    """Text, tokens and machine, where all runs have the same."""
    said = []
    for told in (
        {Path(hide(member.config.data.corpus)).name for member in members},
        {f"{member.config.data.tokenizer.kind} tokens" for member in members},
        {str(member.environment.get("device_name") or "") for member in members},
        {str(member.environment.get("precision") or "") for member in members},
    ):
        if len(told) == 1:
            said.append(next(iter(told)))
    return " · ".join(filter(None, said))


def _tell_absent(material: Material) -> str:
    """Why there is no run, where there is none."""
    if not material.comparisons:
        return "No run is among the folders given here; give run folders too."
    if any(comparison.missing for comparison in material.comparisons):
        return "The run folders of the comparison are not where it names them; give them too, wherever they are."
    return (
        "No run folder of the comparison is known here, since it was written by an older version; give the run folders "
        "too."
    )


# Charts of several runs


def learning_chart(members: Sequence[Member]) -> Chart | None:
    """Validation of each run over its steps, thin the training where it is in the same unit; none without figures."""
    valid = [[line for line in member.metrics if line.get("split") == "valid"] for member in members]
    logged = [(member, lines) for member, lines in zip(members, valid, strict=True) if points(lines, "loss")]
    one = len({member.tokens for member in members}) == 1
    key = "ppl" if one or not logged else shared_perplexity([lines[-1] for _, lines in logged], [m for m, _ in logged])
    drawn: list[Line] = []
    for index, member in enumerate(members):
        shade, lines = run_shade(index), valid[index]
        found = points(lines, key or "bits_per_byte")
        last = f"{found[-1][1]:,.4g}" if found else ""
        if key == "ppl":
            train = [line for line in member.metrics if line.get("split") == "train"]
            drawn.append(Line(f"{member.name}, training", points(train, "ppl"), shade, weak=bool(found)))
        drawn.append(Line(member.name, found, shade, DASHES[index % len(DASHES)], dots=True, told=last))
    if not any(line.points for line in drawn):
        return None
    name = PERPLEXITIES[key or "bits_per_byte"]
    drawn, note = _cut_beginning(drawn)
    return line_chart(f"{name.capitalize()} over the steps{note}", drawn, "step", log=key == "ppl")


def _cut_beginning(lines: list[Line]) -> tuple[list[Line], str]:
    """Leave out training far above every validation, where there is some, since all else would be squeezed below it."""
    validated = [value for line in lines if not line.weak for _, value in line.points]
    limit = CUT_ABOVE * max(validated, default=math.inf)
    if not any(value > limit for line in lines for _, value in line.points):
        return lines, ""
    kept = [replace(line, points=[point for point in line.points if point[1] <= limit]) for line in lines]
    return kept, f", training above {limit:,.0f} cut off"


def points(lines: Iterable[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """Step and value of the lines where the value is a positive finite number."""
    found = ((line["step"], number(line.get(key))) for line in lines)
    return [(step, value) for step, value in found if value is not None and value > 0]


def curve_notes(members: Sequence[Member]) -> list[str]:
    """What the curves do not show."""
    notes = []
    lost = {m.name: sum("loss" in line and number(line["loss"]) is None for line in m.metrics) for m in members}
    notes += [
        f"{name} logged {count} loss(es) that were not finite; they are left out."
        for name, count in lost.items()
        if count
    ]
    if len({member.tokens for member in members}) > 1:
        notes.append("Texts or tokenizers differ between the runs, so perplexities per token do not compare.")
    return notes


def trade_off(comparison: Comparison) -> tuple[str, Chart | None, list[str]]:
    """Perplexity against latency of a comparison; a reason instead of a chart where one of them is missing."""
    title = "Perplexity against latency"
    known = [[key for key in PERPLEXITIES if {key, "latency_ms"} <= row.figures.keys()] for row in comparison.rows]
    key = next((key for key in PERPLEXITIES if any(key in keys for keys in known)), None)
    if key is None:
        return title, None, ["No network has both a finite perplexity and a latency."]
    drawn = [row for row, keys in zip(comparison.rows, known, strict=True) if key in keys]
    markers = [Marker(row.name, row.figures["latency_ms"], row.figures[key]) for row in drawn]
    lost = [row.name for row in comparison.rows if row not in drawn]
    notes = [f"Not drawn, without a finite perplexity or a latency: {', '.join(lost)}."] if lost else []
    return title, scatter_chart(title, markers, "milliseconds per segment", PERPLEXITIES[key]), notes


def _front(front: Front) -> tuple[str, Chart | None, list[str]]:
    notes = list(front.answers)
    if front.diverged:
        notes.append(f"Not finite, so not drawn: {', '.join(front.diverged)}.")
    if not front.markers:
        return front.title, None, [*notes, "No network of it has a finite perplexity."]
    name = "validation perplexity per token"
    return front.title, scatter_chart(front.title, front.markers, front.cost, name), notes


# Analyses


def _analyses(comparisons: Sequence[Comparison]) -> list[Analysis]:
    room = PICTURE_BYTES
    found = []
    for comparison in comparisons:
        for name in analyses_of(comparison):
            heads, rows = analysis_table(comparison.folder / f"{name}.csv", name)
            pictures = []
            for path in sorted([*comparison.folder.glob(f"{name}.png"), *comparison.folder.glob(f"{name}-*.png")]):
                own = [
                    row for row in rows if path.stem == f"{name}-{file_name(row[0])}"
                ]  # one run's, where there are many
                picture = _picture(path, f"{TITLES[name]}. {tell_rows(heads, own or rows)}", room)
                room -= len(picture.data)
                pictures.append(picture)
            found.append(Analysis(TITLES[name], heads, rows, pictures))
    return found


def _picture(path: Path, alt: str, room: int) -> Picture:
    """A PNG as data; left out where it is none or too large."""
    content = path.read_bytes() if path.stat().st_size <= room else b""
    if not content.startswith(PNG) or len(content) < 24:
        return Picture(path.name, alt, "", 0)
    width = int.from_bytes(content[16:20], "big") * 96 // PNG_DPI
    return Picture(path.name, alt, base64.b64encode(content).decode(), width)
