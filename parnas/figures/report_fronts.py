"""The fronts of networks that a report draws: what `baselines` and `blackbox` wrote, read and checked."""

import csv
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from parnas.errors import ParnasError
from parnas.figures.pareto import Marker
from parnas.files import read_json_object, read_text

BASELINES, FRONT = "baselines.json", "pareto.csv"
MAX_TABLE_BYTES = 4 << 20
LARGEST, SMALLEST = 1e15, 1e-15  # of a figure; what is beyond has diverged, and would overflow on the axis of a chart


@dataclass(frozen=True)
class Front:
    """Networks with their costs and perplexities: of baselines, or of a black-box search."""

    folder: Path
    title: str
    cost: str  # what it is, in words
    markers: tuple[Marker, ...]
    diverged: tuple[str, ...] = ()
    answers: tuple[str, ...] = ()


def read_front(path: Path) -> Front:
    """Read a `baselines.json` or a `pareto.csv`; raises `ParnasError` for what is none."""
    return _baselines(path) if path.name == BASELINES else _blackbox(path)


def number(value: Any) -> float | None:
    """A finite number that can be drawn, or none; zero where it is next to nothing."""
    if type(value) not in (int, float) or not abs(value) <= LARGEST:
        return None
    return value if abs(value) >= SMALLEST else 0


def read_table(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; raises `ParnasError` for what is no table."""
    try:
        rows = list(csv.DictReader(io.StringIO(read_text(path, MAX_TABLE_BYTES), newline="")))
    except csv.Error as error:
        raise ParnasError(f"{path} is not the table that was written there ({error}); make it anew.") from error
    return [{key: value or "" for key, value in row.items() if isinstance(key, str)} for row in rows]


def _baselines(path: Path) -> Front:
    content = read_json_object(path)
    try:
        markers, diverged = [], []
        for each in content["networks"]:
            name, share, mean = str(each["name"]), number(each["cost_share"]), number(each["valid_ppl_mean"])
            if share is None or mean is None:
                diverged.append(name)
            else:
                markers.append(Marker(name, share, mean, number(each["valid_ppl_sd"]), each["random"] is True))
        answers = tuple(str(each["text"]) for each in content["answers"])
        cost = f"{content['metric']} of the blocks, interleaved = 1"
    except (KeyError, TypeError) as error:
        raise ParnasError(f"{path} is not what parnas baselines wrote; give it again.") from error
    return Front(path.parent, "The derived network and its baselines", cost, tuple(markers), tuple(diverged), answers)


def _blackbox(path: Path) -> Front:
    try:
        markers = tuple(
            Marker(row["network"], _finite(row["cost"]), _finite(row["valid_ppl"])) for row in read_table(path)
        )
    except (KeyError, ValueError) as error:
        raise ParnasError(f"{path} is not what parnas blackbox wrote; give it again.") from error
    return Front(path.parent, "Front of the black-box search", "cost of the blocks, in the unit of its study", markers)


def _finite(text: str) -> float:
    if (value := number(float(text))) is None:
        raise ValueError(text)
    return value
