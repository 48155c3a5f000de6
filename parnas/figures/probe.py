"""Pictures of a probe: what each replacement of a layer loses, and networks with less and less attention."""

import math
from pathlib import Path

from parnas.architecture import ATTENTION, IDENTITY, Architecture, LayerName
from parnas.errors import ParnasError
from parnas.figures.heatmap import draw_losses
from parnas.figures.pareto import ParetoPoint, draw_pareto
from parnas.figures.style import drawable
from parnas.runs.files import read_json
from parnas.runs.records import FoundNetworkRecord, ProbeRecord
from parnas.runs.run import PROBE

__all__ = ["draw_probe"]

LOSSES = "KL divergence from the unchanged model, nats per token"
LATENCY = "latency of the layers, unchanged = 1"  # axis labels
PERPLEXITY = "perplexity per token, without training"
_MOST_NATS = 30.0
_MOST_SHOWN = 4.0  # perplexity in the picture, as a multiple of the unchanged model's


def read_probe(path: Path) -> ProbeRecord:
    """Read a `probe.json`; raise `ParnasError` for other content."""
    hint = "run parnas probe again"
    record = ProbeRecord.parse(read_json(path), str(path), hint)
    names = {name for changes in record.changes for name in changes}
    try:
        for name in names | set(record.layers):
            LayerName.parse(name)
        networks = [each.layers for each in (*record.attention, *record.front)]
        lengths = {len(Architecture.parse(layers)) for layers in (record.network, *networks)}
    except ParnasError as error:
        raise ParnasError(f"{path} has a layer that is not known here; {hint}. {error}") from error
    if not record.layers or {len(record.changes), *lengths} != {len(record.layers)}:
        raise ParnasError(f"{path} does not have a value for each layer; {hint}.")
    return record


def replacements(record: ProbeRecord) -> list[str]:
    """Return the names of all replacements, identity last."""
    names = dict.fromkeys(name for changes in record.changes for name in changes)
    return sorted(names, key=lambda name: name == IDENTITY)


def losses(record: ProbeRecord) -> list[dict[str, float]]:
    """Return for each layer the divergence of each replacement, without values that are not finite."""
    return [
        {name: max(0.0, kl) for name, change in changes.items() if (kl := drawable(change.kl)) is not None}
        for changes in record.changes
    ]


def perplexity(record: ProbeRecord, rise: float = 0.0) -> float:
    """Return the perplexity of a network whose loss is `rise` nats above that of the model."""
    return math.exp(min(record.loss + rise, _MOST_NATS))


def count_attention(network: FoundNetworkRecord) -> int:
    """Return the number of attention layers of a network."""
    return sum(LayerName.parse(name).letter == ATTENTION for name in Architecture.parse(network.layers))


def attention_points(record: ProbeRecord) -> list[ParetoPoint]:
    """Return latency and perplexity of the model and of networks with less attention, without the worst."""
    base = perplexity(record)
    points = [ParetoPoint("unchanged", 1.0, base)]
    for each in record.attention:
        count = count_attention(each)
        name = f"{count} attention layer{'s' * (count != 1)}"
        points.append(ParetoPoint(name, each.latency, perplexity(record, each.rise)))
    values = [(point, (point.cost, point.ppl)) for point in points]
    return [point for point, each in values if all(map(math.isfinite, each)) and point.ppl < _MOST_SHOWN * base]


def draw_probe(folder: Path) -> list[Path]:
    """Draw the `probe.json` of a folder as a heat map, `probe.png`, and as `attention.png`; return the paths."""
    record = read_probe(folder / PROBE)
    layers = str(Architecture(record.layers))
    return [
        draw_losses(losses(record), replacements(record), folder / "probe.png", LOSSES, layers),
        draw_pareto(attention_points(record), folder / "attention.png", LATENCY, PERPLEXITY),
    ]
