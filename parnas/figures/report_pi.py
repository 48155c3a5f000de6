"""What the report page shows of pi: the animated heatmap, lines of each block, and the figures that watch a search."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from parnas.architecture import describe_layer
from parnas.figures.colours import mix
from parnas.figures.heatmap import thin
from parnas.figures.history import PiHistory
from parnas.figures.report_charts import DASHES, Chart, Line, line_chart
from parnas.figures.report_colours import LIGHT, candidate_shades, ink_on, run_shade
from parnas.figures.report_fronts import number
from parnas.figures.report_runs import Member

MOST_CELLS = 20_000  # of a heatmap
MOST_VALUES = 400_000  # of all frames of an animation, about three bytes each
MOST_LINE_POINTS = 60_000  # of all small pictures of pi
ROW, TOP, BOTTOM = 34, 4, 20  # units of the heatmap
WIDE, NARROW, AREA = 58.0, 16.0, 760.0  # columns, and what they share where there are many
VALUE_WIDTH, NUMBER_WIDTH = 30.0, 22.0  # least column that holds a value; least distance between two numbers
CHARACTER = 7.5


class Cell(NamedTuple):
    """A cell of the heatmap as it is printed: its place, its colour and its text."""

    x: float
    y: float
    fill: str
    ink: str
    text: str
    chosen: bool


class Player(NamedTuple):
    """The animated heatmap: what it is drawn with, and the last frame, which stands before any script runs."""

    width: float
    height: float
    left: float
    column: float
    labels: list[tuple[float, str]]
    numbers: list[tuple[float, int]]
    cells: list[Cell]
    frames: int
    logged: int
    step: str
    tau: str
    string: str
    label: str
    data: dict[str, Any]


class Choice(NamedTuple):
    """A block: its layer, the probabilities, and how sure that is."""

    block: int
    layer: str
    pi: list[str]
    entropy: str
    margin: str


def player_of(history: PiHistory, most_frames: int) -> Player | None:
    """The animation, with at most so many frames; none where a heatmap would have too many cells to be drawn."""
    blocks, candidates = history.blocks, len(history.space)
    if blocks * candidates > MOST_CELLS:
        return None
    frames = thin(len(history), max(2, min(most_frames, MOST_VALUES // (blocks * candidates))))
    column = min(WIDE, max(NARROW, AREA / blocks))
    left = 12 + CHARACTER * max(map(len, history.space))
    every = next(n for n in (1, 2, 5, 10, 20, 50, 100) if n * column >= NUMBER_WIDTH)
    shades = candidate_shades(history.space)
    shown = history.pi[-1]  # [B, C]
    cells = []
    for block in range(blocks):
        for candidate, name in enumerate(history.space):
            percent = round(100 * min(1.0, float(shown[block, candidate])))
            fill = mix(LIGHT, shades[name].light, percent / 100)
            text = f"{percent / 100:.2f}" if column >= VALUE_WIDTH else ""
            chosen = history.derived[-1][block] == name
            place = round(left + block * column, 1), float(TOP + candidate * ROW)
            cells.append(Cell(*place, fill, ink_on(fill), text, chosen))
    index = {name: number for number, name in enumerate(history.space)}
    data = {
        "shades": [list(shades[name]) for name in history.space],
        "steps": [int(history.steps[frame]) for frame in frames],
        "taus": [round(float(history.taus[frame]), 4) for frame in frames],
        "pi": [(100 * history.pi[frame].clip(0, 1)).round().astype(int).ravel().tolist() for frame in frames],
        "derived": [[index[name] for name in history.derived[frame]] for frame in frames],
        "strings": [history.string(frame) for frame in frames],
        "values": column >= VALUE_WIDTH,
    }
    step, tau, string = f"{history.steps[-1]:,}", f"{history.taus[-1]:.3f}", history.string(-1)
    return Player(
        round(left + blocks * column + 6, 1),
        TOP + candidates * ROW + BOTTOM,
        left,
        round(column, 2),
        [(TOP + (row + 0.5) * ROW, name) for row, name in enumerate(history.space)],
        [(round(left + (n - 0.5) * column, 1), n) for n in range(1, blocks + 1) if n % every == 0 or n == 1],
        cells,
        len(frames),
        len(history),
        step,
        tau,
        string,
        f"Heatmap of pi: {candidates} candidates in rows, {blocks} blocks in columns. Its step and the string that "
        "derive takes there are told above it.",
        data,
    )


def pi_charts(history: PiHistory) -> list[Chart]:
    """A small chart for each block, a line for each candidate."""
    shades = candidate_shades(history.space)
    most = max(2, MOST_LINE_POINTS // (history.blocks * len(history.space)))
    kept = thin(len(history), most)
    charts = []
    for block in range(history.blocks):
        lines = [
            Line(
                describe_layer(name),
                [(int(history.steps[frame]), float(history.pi[frame, block, candidate])) for frame in kept],
                shades[name],
                DASHES[candidate % len(DASHES)],
            )
            for candidate, name in enumerate(history.space)
        ]
        title = f"block {block + 1}: {history.derived[-1][block]}"
        charts.append(line_chart(title, lines, "step", "pi", within=(0, 1), ticks=2))
    return charts


def choices(member: Member) -> list[Choice]:
    """Block by block what `arch.yaml` says of the choice; nothing where it does not."""
    blocks = member.derivation.get("blocks")
    if not isinstance(blocks, list | tuple) or member.history is None:
        return []
    found = []
    for block, told in enumerate(blocks, 1):
        pi = told.get("pi") if isinstance(told, dict) else None
        if not isinstance(pi, dict):
            return []
        values = [number(pi.get(name)) for name in member.history.space]
        entropy, margin = number(told.get("entropy")), number(told.get("margin"))
        found.append(
            Choice(
                block,
                str(told.get("layer", "")),
                ["–" if value is None else f"{value:.3f}" for value in values],
                "–" if entropy is None else f"{entropy:.3f}",
                "–" if margin is None else f"{margin:+.3f}",
            )
        )
    return found


WATCHED = {
    "entropy": ("Entropy of pi", "nats, mean over blocks"),
    "identity_share": ("Share of identity", "pi of identity, mean over blocks"),
    "argmax_changes": ("Changes of the string", "times the derived network changed"),
    "expected_cost": ("Expected cost", "interleaved = 1"),
    "gap": ("Mixture behind the derived network", "nats of validation loss"),
    "tau": ("Temperature", "tau"),
}


def monitor_charts(member: Member) -> list[Chart]:
    """A chart for each figure that the metrics of a search hold."""
    charts = []
    for place, (key, (title, unit)) in enumerate(WATCHED.items()):
        values = _logged(member.metrics, key)
        if values:
            line = Line(title, values, run_shade(place % 3), dots=key == "gap")
            charts.append(line_chart(title, [line], "step", unit, ticks=3))
    return charts


def _logged(records: Sequence[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    """Step and value, once for each step."""
    found = {line["step"]: value for line in records if (value := number(line.get(key))) is not None}
    return list(found.items())
