"""The part of a page that shows a probe: the answer, the heat map of losses, and tables of networks and pairs."""

import math
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas as pd

from parnas.architecture import Architecture
from parnas.figures.colours import candidate_colours
from parnas.figures.probe import (
    LATENCY,
    PERPLEXITY,
    attention_points,
    count_attention,
    losses,
    perplexity,
    replacements,
)
from parnas.figures.report.charts import Chart, pareto_chart
from parnas.figures.report.data import NetworkRow, ProbeData, finite_values
from parnas.figures.report.result import describe_seconds
from parnas.figures.report.secrets import hide
from parnas.figures.report.tables import NetworkTable, TableColumn
from parnas.runs.records import FoundNetworkRecord, ProbeRecord

_LEAST_NATS = 1e-3  # smaller losses have no colour
_FEW_NATS = 0.1  # smaller losses are written with three decimals
_MOST_COLUMNS_WITH_VALUES = 24  # layers up to which the cells are wide enough for their values
_COLUMNS = (
    TableColumn("latency", "latency of the layers", "{:.2f}"),
    TableColumn("speed", "speed of the model", "{:.2f}"),
    TableColumn("predicted_ppl", "predicted perplexity", "{:,.2f}"),
    TableColumn("ppl", "measured perplexity", "{:,.2f}"),
    TableColumn("change", "measured change", "{:+,.1%}"),
    TableColumn("predicted_kl", "predicted nats", "{:.3f}", minor=True),
    TableColumn("kl", "measured nats", "{:.3f}", minor=True),
)


class _Cell(NamedTuple):
    """A cell of the heat map."""

    share: int  # of the full colour, in per cent
    text: str  # empty where there is no such replacement


@dataclass(frozen=True)
class ProbePart:
    """What the page shows of one probe."""

    name: str
    answer: str
    network: Architecture  # of the answer
    measured: str  # where and on which text, in a sentence
    heat: dict[str, Any]
    chart: Chart
    networks: NetworkTable
    replaced: pd.DataFrame
    pairs: pd.DataFrame
    pair_note: str
    facts: dict[str, str]


def probe_part(probe: ProbeData, number: int) -> ProbePart:
    """Return what the page shows of a probe, the `number`th of the page."""
    record = probe.record
    table, note = pair_table(record)
    return ProbePart(
        hide(probe.name),
        record.answer,
        Architecture.parse(record.network),
        describe_measurement(record),
        heat_map(record),
        attention_chart(record, f"attention-{number}"),
        network_table(record),
        replacement_table(record),
        table,
        note,
        describe_conditions(record),
    )


def describe_measurement(record: ProbeRecord) -> str:
    """Return on which text and machine a probe was made, as a sentence."""
    text = f"Measured on {record.tokens:,} tokens"
    if where := record.conditions:
        text += f" of {hide(where.source)}, on {hide(where.device_name)} in {where.precision}"
        if math.isfinite(where.seconds):
            text += f", in {describe_seconds(where.seconds)}"
    return f"{text}, without any training."


def heat_map(record: ProbeRecord) -> dict[str, Any]:
    """Return the template values of the heat map, replacements in rows and layers in columns.

    The colour is the logarithm of the loss, from a thousandth of a nat to the largest loss.
    """
    names, found = replacements(record), losses(record)
    largest = max([10 * _LEAST_NATS, *(value for layer in found for value in layer.values())])
    cells = [[_cell(layer.get(name), largest) for name in names] for layer in found]
    return {
        "rows": [(name, colour[1:]) for name, colour in candidate_colours(names).items()],
        "columns": list(zip(record.layers, cells, strict=True)),
        "dense": len(record.layers) > _MOST_COLUMNS_WITH_VALUES,
        "largest": format_nats(largest),
        "names": names,
    }


def _cell(value: float | None, largest: float) -> _Cell:
    if value is None:
        return _Cell(0, "")
    share = math.log(max(value, _LEAST_NATS) / _LEAST_NATS) / math.log(largest / _LEAST_NATS)
    return _Cell(round(100 * share), format_nats(value))


def format_nats(value: float) -> str:
    """Return a loss with three decimals if it is small, else two; none from ten on."""
    return f"{value:,.{3 if value < _FEW_NATS else 2 if value < 10 else 0}f}".removeprefix("0")


def attention_chart(record: ProbeRecord, name: str) -> Chart:
    """Draw perplexity against latency for networks with fewer and fewer attention layers."""
    points = attention_points(record)
    hidden = len(record.attention) + 1 - len(points)
    notes = [f"Not drawn, with four times the model's perplexity or more: {hidden}."] if hidden else []
    return pareto_chart("With fewer and fewer attention layers", points, LATENCY, PERPLEXITY, name, notes)


def network_table(record: ProbeRecord) -> NetworkTable:
    """Return the table of the networks that were measured as a whole: the model, less attention, the front."""
    unchanged = {"latency": 1.0, "speed": 1.0, "ppl": perplexity(record)}
    rows = [NetworkRow("unchanged", "", str(Architecture(record.layers)), unchanged, None)]
    for each in record.attention:
        rows.append(_network_row(record, each, f"{count_attention(each)} with attention"))
    for each in record.front:
        rows.append(_network_row(record, each, f"{each.latency:.2f} of the latency"))
    notes = [
        "Predicted: the sum over the replaced layers, each replaced alone. Measured: the whole network. "
        "Speed is that of the whole model with its softmax, unchanged = 1.",
        "With attention: the best networks of that number of attention layers, with all other layers. Of the latency: "
        "the networks of the least sum of divergences within 0.9, 0.8, … of the latency of the layers.",
    ]
    columns = [column for column in _COLUMNS if any(column.key in row.figures for row in rows)]
    heads = ("network", "layers")
    return NetworkTable("Networks with several layers replaced, without training", heads, columns, rows, {}, notes)


def _network_row(record: ProbeRecord, network: FoundNetworkRecord, name: str) -> NetworkRow:
    ppl = perplexity(record, network.rise)
    figures = {
        **{key: getattr(network, key) for key in ("latency", "speed", "predicted_kl", "kl")},
        "predicted_ppl": perplexity(record, network.predicted_rise),
        "ppl": ppl,
        "change": ppl / perplexity(record) - 1,
    }
    return NetworkRow(name, "", network.layers, finite_values(figures), None)


def replacement_table(record: ProbeRecord) -> pd.DataFrame:
    """Return a row for each replacement of each layer: divergence, rise of the loss, and milliseconds."""
    rows = []
    for number, (own, changes) in enumerate(zip(record.layers, record.changes, strict=True), 1):
        for name, change in changes.items():
            times = [record.milliseconds.get(each, math.nan) for each in (own, name)]
            rows.append(
                {
                    "layer": number,
                    "is": own,
                    "replaced by": name,
                    "KL divergence": f"{change.kl:.4f}",
                    "rise of the loss": f"{change.loss:+.4f}",
                    "milliseconds": " → ".join("–" if math.isnan(ms) else f"{ms:.2f}" for ms in times),
                }
            )
    return pd.DataFrame(rows)


def pair_table(record: ProbeRecord) -> tuple[pd.DataFrame, str]:
    """Return the pairs of layers that were left out together, beside the sums, and how close these are."""
    rows = [
        {
            "layers": "{} and {}".format(*pair.layers),
            "together": f"{pair.both.kl:.4f}",
            "sum of both alone": f"{pair.predicted.kl:.4f}",
        }
        for pair in record.pairs
    ]
    known = [pair.both.kl / pair.predicted.kl for pair in record.pairs if pair.predicted.kl > 0]
    ratios = sorted(ratio for ratio in known if math.isfinite(ratio))
    if not ratios:
        return pd.DataFrame(rows), ""
    middle, least, most = statistics.median(ratios), ratios[0], ratios[-1]
    return pd.DataFrame(rows), (
        f"Both together lose {middle:.2f} times the sum of each alone (median; {least:.2f} to {most:.2f}). "
        "The closer to 1, the better the predictions above."
    )


def describe_conditions(record: ProbeRecord) -> dict[str, str]:
    """Return what was measured as texts by name."""
    facts = {
        "layers": str(Architecture(record.layers)),
        "perplexity per token": f"{perplexity(record):,.2f}",
        "tokens": f"{record.tokens:,}",
    }
    if where := record.conditions:
        facts |= {
            "model": hide(where.model),
            "text": hide(where.text or where.source),
            "device": hide(where.device_name),
        }
        facts |= {"precision": where.precision, "time of the probe": describe_seconds(where.seconds)}
    return facts
