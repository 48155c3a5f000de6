"""The top of a report: the derived architecture of a search, and how its network compares with the interleaved one.

All values are measured, and shown whether the derived network is better or worse. For a missing value the page names
the command that measures it.
"""

import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from parnas.architecture import ATTENTION, COMPRESSIVE, Architecture, describe_layer, drop_identity
from parnas.figures.report.data import (
    NetworkRow,
    ReportData,
    RunData,
    parse_architecture,
    run_row,
    same_network,
    validated_architecture,
)
from parnas.figures.style import shorten

__all__ = ["describe_child"]

PERPLEXITIES = {"ppl": "perplexity per token", "word_ppl": "perplexity per word", "bits_per_byte": "bits per byte"}
# Key, name, unit and format of the other measures.
_COSTS = (
    ("latency_ms", "latency per segment", " ms", ",.2f"),
    ("multiply_adds_per_token", "multiply-adds per token", "", ",.0f"),
    ("parameters", "parameters", "", ",.0f"),
)
_EQUAL = 0.05  # per cent of difference below which two figures count as equal
_LONGEST_ARCHITECTURE = 60  # characters in a sentence
_MOST_LISTED = 8  # blocks of a layer that a sentence lists one by one


class _MeasureCard(NamedTuple):
    """A measure, such as latency, of the derived network and of the one that it is compared with, as texts."""

    title: str
    value: str
    other: str
    against: str  # which network the other is: interleaved, or parent
    verdict: str  # better, worse or equal
    difference: str  # such as 0.4 % lower


@dataclass(frozen=True)
class _SearchResult:
    """The outcome of one search: sentences, and a card per measure."""

    name: str
    architecture: Architecture
    headline: str
    sentences: list[str]
    cards: list[_MeasureCard] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)  # limits, warnings, and commands for missing measures


def search_result(search: RunData, data: ReportData) -> _SearchResult | None:
    """Return the result of a search; `None` if it has logged no pi and no network was derived from it."""
    architecture = search.architecture
    if not architecture:
        return None
    family = _find_family(search, architecture, data)
    first = describe_child(architecture, family.child.figures, family.parent.figures) if family else ""
    result = _SearchResult(search.name, architecture, first or headline(architecture), [describe_blocks(architecture)])
    if search.derivation:
        result.cautions.extend(f"Derive warned: {text}." for text in search.derivation.warnings)
    else:
        command = f"parnas derive {_quote(search)}"
        result.cautions.append(f"No network was derived yet; derive would select this one now: {command}.")
    if search.summary is None:
        result.cautions.append("The search has not ended: pi may change until then.")
    if family:
        _compare_with_parent(result, family)
    else:
        _compare(result, search, data)
    return result


def describe_child(architecture: Architecture, child: Mapping[str, float], parent: Mapping[str, float]) -> str:
    """Return how a compressed network compares with its parent, as a sentence; empty if nothing was measured.

    `child` and `parent` hold finite values by the keys of `ComparisonRow`, measured on the same machine and text.
    """
    parts = []
    if "latency_ms" in child and parent.get("latency_ms"):
        parts.append(f"takes {child['latency_ms'] / parent['latency_ms']:.2f} of the parent's time")
    if key := shared_perplexity([child, parent]):
        percent = 100 * (child[key] / parent[key] - 1) if parent[key] else 0.0
        change = "equal" if abs(percent) < _EQUAL else f"{abs(percent):.1f} % {'higher' if percent > 0 else 'lower'}"
        measure = PERPLEXITIES[key].removesuffix(" per token")
        parts.append(f"{'at' if parts else 'has'} {change} {measure}" + ("" if parts else " compared with the parent"))
    if not parts:
        return ""
    healed = f", after a healing of {describe_seconds(child['train_seconds'])}" if "train_seconds" in child else ""
    return f"The child {shorten(str(architecture), _LONGEST_ARCHITECTURE)} {' '.join(parts)}{healed}."


def describe_seconds(seconds: float) -> str:
    """Return a duration in seconds, minutes or hours."""
    if seconds < 100:
        return f"{seconds:.0f} second{'s' * (round(seconds) != 1)}"
    return f"{seconds / 60:.1f} minutes" if seconds < 6000 else f"{seconds / 3600:.1f} hours"


def headline(architecture: Architecture) -> str:
    """Return in how many blocks an architecture has attention, as a sentence such as `In 4 of its 12 blocks.`."""
    # A new layer that is a kind of attention is added here by its letter; `describe_blocks` names all layers anyway.
    attention, count = sum(layer[0] in (ATTENTION, COMPRESSIVE) for layer in architecture), len(architecture)
    if count == 1:
        return "In its only block." if attention else "Not in its only block."
    share = {0: "none", count: "every one"}.get(attention, str(attention))
    return f"In {share} of its {count} blocks."


def describe_blocks(architecture: Architecture) -> str:
    """Return a sentence that names each layer of an architecture with the numbers of its blocks."""
    parts = []
    for name in dict.fromkeys(architecture):
        *blocks, last = [str(number) for number, layer in enumerate(architecture, 1) if layer == name]
        if not blocks:
            where = f"block {last}"
        elif len(blocks) < _MOST_LISTED:
            where = f"blocks {', '.join(blocks)} and {last}"
        else:
            where = f"{len(blocks) + 1} blocks"
        parts.append(f"{describe_layer(name)} in {where}")
    text = f"{'; '.join(parts)}."
    return text[0].upper() + text[1:]


def shared_perplexity(rows: Sequence[Mapping[str, float]], runs: Sequence[RunData] = ()) -> str | None:
    """Return the first of `PERPLEXITIES` that all rows have and that is comparable between all runs, else `None`."""
    keys = list(PERPLEXITIES)
    if len({run.tokens for run in runs}) > 1:
        keys.remove("ppl")
    return next((key for key in keys if rows and all(key in row for row in rows)), None)


class _Family(NamedTuple):
    """The trained networks of a comparison that belong to a search in a trained network."""

    parent: NetworkRow
    child: NetworkRow  # the derived network, trained from the weights of the search
    others: list[NetworkRow]


def _find_family(search: RunData, architecture: Architecture, data: ReportData) -> _Family | None:
    """Return the first comparison with parent and child of a search; `None` without one."""
    place = search.config.search.parent
    if place is None:
        return None
    for rows in _trained_networks(search, data):
        known = [row for row in rows if row.run]
        same = [row for row in known if row.run and os.path.realpath(row.run.run.folder) == os.path.realpath(place)]
        # Folders may have been moved together.
        named = [row for row in known if row.run and row.run.run.folder.name == Path(place).name]
        parent = next(iter(same or named), None)
        children = [row for row in rows if row is not parent and row.weights.startswith("inherited")]
        child = _find(children, architecture)
        if parent and child:
            return _Family(parent, child, [row for row in rows if row not in (parent, child)])
    return None


def _compare_with_parent(result: _SearchResult, family: _Family) -> None:
    """Add to `result` how the child compares with the parent, and the perplexities of the other networks."""
    parent, child, others = family
    _add_measures(result, child, parent, "the parent", "parent")
    for row in others:
        key = shared_perplexity([child.figures, row.figures], [each.run for each in (child, row) if each.run])
        if key is None:
            continue
        value = f"{row.figures[key]:,.2f} {PERPLEXITIES[key]}"
        steps = f" in {row.figures['steps']:,.0f} steps" if "steps" in row.figures else ""
        same = ", the same network," if same_network(parse_architecture(row.arch), result.architecture) else ""
        result.sentences.append(f"{_describe_start(row)}{steps}, {row.name}{same} reaches {value}.")
    _ask_for_latency(result, (child, parent))
    result.cautions.append("Each network was trained once, so a small difference may be chance.")


def _ask_for_latency(result: _SearchResult, pair: Sequence[NetworkRow]) -> None:
    """Add to `result` the command that measures latency, if one of two networks has none."""
    if any("latency_ms" not in row.figures for row in pair):
        result.sentences.append("Latency was not measured.")
        folders = " ".join(_quote(row.run) for row in pair if row.run)
        result.cautions.append(f"To measure latency: parnas evaluate {folders or 'RUN…'}.")


def _compare(result: _SearchResult, search: RunData, data: ReportData) -> None:
    """Add to `result` how the derived network differs from the interleaved network, if possible of the same depth."""
    blocks = len(result.architecture)
    tables = _trained_networks(search, data)
    derived = [_find(rows, result.architecture) for rows in tables]
    own = next(filter(None, derived), None)
    if same_network(result.architecture, _interleaved(blocks)):
        result.sentences.append("It is the interleaved network itself, so there is nothing to compare it with.")
        result.sentences.extend([_describe_perplexity(own)] if own else [])
        return
    depth = _interleaved_depth(result.architecture, tables)
    interleaved = [_find(rows, _interleaved(depth)) for rows in tables]
    pair = next(((ours, theirs) for ours, theirs in zip(derived, interleaved, strict=True) if ours and theirs), None)
    if pair is None:
        _describe_alone(result, search, own, any(interleaved))
        return
    name = "the interleaved network" + ("" if depth == blocks else f" {_interleaved(depth)}")
    _add_measures(result, *pair, name, "interleaved")
    steps = [row.figures.get("steps") for row in pair]
    searched = [row.figures.get("inherited_steps", 0.0) for row in pair]
    if None not in steps and (steps[0] != steps[1] or any(searched)):
        counts = [
            f"{of:,.0f}" + (f" after {inherited:,.0f} inherited" if inherited else "")
            for of, inherited in zip(steps, searched, strict=True)
        ]
        result.cautions.append(f"Steps of training: derived network {counts[0]}, interleaved {counts[1]}.")
    _ask_for_latency(result, pair)
    command = f"parnas baselines {_quote(search)}"
    result.cautions.append(
        f"Each network was trained once, so a small difference may be chance; {command} trains several seeds."
    )


def _trained_networks(search: RunData, data: ReportData) -> list[list[NetworkRow]]:
    """Return discrete networks trained on the search's text: a list per comparison, then one of the finished runs."""
    comparisons = [each.rows for each in data.comparisons if all(run.text == search.text for run in each.runs)]
    alone = [run_row(run) for run in data.runs if run.text == search.text and run.summary]
    return [[row for row in rows if row.network == "discrete"] for rows in (*comparisons, alone)]


def _find(rows: Sequence[NetworkRow], architecture: Architecture) -> NetworkRow | None:
    return next((row for row in rows if same_network(parse_architecture(row.arch), architecture)), None)


def _interleaved(depth: int) -> Architecture:
    return Architecture.parse(f"interleaved-{depth}")


def _interleaved_depth(derived: Architecture, tables: Sequence[Sequence[NetworkRow]]) -> int:
    """Return the number of blocks of the interleaved network with which the derived network is compared.

    This is the derived network's number of blocks if `tables` has an interleaved network of that depth, or none at
    all; else the largest depth of the interleaved networks in `tables`.
    """
    networks = {drop_identity(parse_architecture(row.arch) or ()) for rows in tables for row in rows}
    others = networks - {(), drop_identity(derived)}
    depths = {len(layers) for layers in others if same_network(layers, _interleaved(len(layers)))}
    return len(derived) if not depths or len(derived) in depths else max(depths)


def _add_measures(result: _SearchResult, derived: NetworkRow, other: NetworkRow, name: str, against: str) -> None:
    """Add to `result` a card for each measure of `derived` and `other`, and sentences on perplexity and latency."""
    key = shared_perplexity([derived.figures, other.figures], [row.run for row in (derived, other) if row.run])
    measures = list(_COSTS)
    if key is None:
        result.sentences.append(f"No perplexity is finite and comparable for the derived network and {name}.")
    else:
        measures.insert(0, (key, PERPLEXITIES[key], "", ",.4f" if key == "bits_per_byte" else ",.2f"))
    for measure, title, unit, form in measures:
        if measure not in derived.figures or measure not in other.figures:
            continue
        ours, theirs = derived.figures[measure], other.figures[measure]
        percent = 100 * (ours / theirs - 1) if theirs else 0.0
        value, its = (f"{each:{form}}{unit}" for each in (ours, theirs))
        verdict, direction = ("better", "lower") if percent < 0 else ("worse", "higher")
        difference = f"{abs(percent):.1f} % {direction}"
        relation = f"{difference} ({verdict}) than {name}'s {its}"
        if abs(percent) < _EQUAL:
            verdict = difference = "equal"
            relation = f"as {name} does ({its})"
        result.cards.append(_MeasureCard(title, value, its, against, verdict, difference))
        if measure == key:
            trained = _describe_start(derived)
            result.sentences.append(f"{trained}, the derived network reaches {value} {title}, {relation}.")
        elif measure == "latency_ms":
            result.sentences.append(f"It takes {value} per segment, {relation}.")


def _describe_alone(result: _SearchResult, search: RunData, derived: NetworkRow | None, interleaved: bool) -> None:
    """Add to `result` the derived network's perplexity, and the commands that would make a comparison possible."""
    config = shlex.quote(str(search.run.folder / "config.yaml"))
    if derived is None:
        inherited = run_row(search).figures.get("ppl")
        if inherited is not None and search.summary:
            result.sentences.append(f"With the SuperNet's weights it reaches {inherited:,.2f} perplexity per token.")
        elif validated := validated_architecture(search):
            result.sentences.append(f"The search ended with another network, {validated}, and validated that one.")
        result.sentences.append("The derived network has not been trained from scratch in the runs given here.")
        command = f"parnas retrain {config} --arch {_quote(search)}/arch.yaml --run runs/derived"
        result.cautions.append(f"To train the derived network: {command}.")
    else:
        result.sentences.append(_describe_perplexity(derived))
    if not interleaved:
        result.sentences.append("No interleaved network is among these runs, so the gain of the search is unknown.")
        command = f"parnas retrain {config} --arch interleaved-{len(result.architecture)} --run runs/interleaved"
        result.cautions.append(f"To train the interleaved network: {command}, then parnas evaluate with all runs.")
    elif derived is not None:
        result.sentences.append("The derived and the interleaved network are not in the same comparison.")
        result.cautions.append("To compare them: parnas evaluate with the folders of both.")


def _describe_perplexity(derived: NetworkRow) -> str:
    trained = _describe_start(derived)
    if (ppl := derived.figures.get("ppl")) is None:
        return f"{trained}, it has no finite perplexity per token."
    return f"{trained}, it reaches {ppl:,.2f} perplexity per token."


def _describe_start(network: NetworkRow) -> str:
    """Return from which weights a network was trained, as the beginning of a sentence."""
    steps = network.figures.get("inherited_steps")
    start = f"from inherited weights of {steps:,.0f} steps" if steps else "from scratch"
    return f"Trained {start}" + (" with teachers" if "distilled" in network.weights else "")


def _quote(run: RunData) -> str:
    return shlex.quote(str(run.run.folder))
