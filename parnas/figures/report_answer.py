"""What a report says on top: the string, and how its network stands against the interleaved one, in sentences.

Only figures that were measured are told, the worse ones like the better ones, and what is missing with its command.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from parnas.architecture import ATTENTION, COMPRESSIVE, Architecture, describe_layer, drop_identity
from parnas.figures.report_runs import (
    Comparison,
    Material,
    Member,
    Row,
    ended_elsewhere,
    read,
    same_network,
    summary_row,
)

PERPLEXITIES = {"ppl": "perplexity per token", "word_ppl": "perplexity per word", "bits_per_byte": "bits per byte"}
EQUAL = 0.05  # per cent, below which two figures are told as equal
FEW = 8  # blocks that are named one by one


class Card(NamedTuple):
    """A figure of the derived network beside the interleaved one's."""

    title: str
    value: str
    against: str
    verdict: str  # better, worse or equal
    difference: str  # such as 0.4 % lower


@dataclass(frozen=True)
class Answer:
    """What one search found."""

    name: str
    architecture: Architecture
    headline: str
    sentences: list[str]
    cards: list[Card] = field(default_factory=list)
    cautions: list[str] = field(default_factory=list)


class Measured(NamedTuple):
    """A key of figures, what it is called, how it is written."""

    key: str
    name: str
    unit: str
    form: str


COSTS = (
    Measured("latency_ms", "latency per segment", " ms", ",.2f"),
    Measured("multiply_adds_per_token", "multiply-adds per token", "", ",.0f"),
    Measured("parameters", "parameters", "", ",.0f"),
)


def answer_of(search: Member, material: Material) -> Answer | None:
    """The answer of a search; none where it logged no pi and nothing was derived."""
    row = summary_row(search)
    if not row.arch:
        return None
    architecture = Architecture.parse(row.arch)
    answer = Answer(search.name, architecture, headline(architecture), [tell_blocks(architecture)])
    folder = shlex.quote(str(search.run.folder))
    if not search.derivation:
        answer.cautions.append(
            f"Nothing was derived yet: this is what derive would take now; parnas derive {folder} writes it down."
        )
    if not search.summary:
        answer.cautions.append("The search has not ended: pi may change until then.")
    told = search.derivation.get("warnings")
    warnings = told if isinstance(told, list | tuple) else ()
    answer.cautions.extend(f"Derive warned: {text}." for text in warnings if isinstance(text, str))
    compare(answer, search, material)
    return answer


def headline(architecture: Architecture) -> str:
    """In how many blocks there is attention."""
    attention, count = sum(layer[0] in (ATTENTION, COMPRESSIVE) for layer in architecture), len(architecture)
    if count == 1:
        return "In its only block." if attention else "Not in its only block."
    share = {0: "none", count: "every one"}.get(attention, str(attention))
    return f"In {share} of its {count} blocks."


def tell_blocks(architecture: Architecture) -> str:
    """Which blocks have which layer."""
    told = []
    for name in dict.fromkeys(architecture):
        blocks = [number for number, layer in enumerate(architecture, 1) if layer == name]
        one = "block" if len(blocks) == 1 else "blocks"
        told.append(
            f"{describe_layer(name)} in " + (f"{one} {_and(blocks)}" if len(blocks) <= FEW else f"{len(blocks)} {one}")
        )
    return f"{'; '.join(told)}.".capitalize()


def compare(answer: Answer, search: Member, material: Material) -> None:
    """Add how the derived network stands against the interleaved one of as many blocks, or else of another depth."""
    blocks = len(answer.architecture)
    ours = rows_like(answer.architecture, search, material)
    if same_network(answer.architecture, interleave(blocks)):
        answer.sentences.append("It is the interleaved network itself, so there is nothing to compare it with.")
        answer.sentences.extend(_reached(next(filter(None, ours), None)))
        return
    depth = find_depth(answer.architecture, search, material)
    theirs = rows_like(interleave(depth), search, material)
    called = "the interleaved network" if depth == blocks else f"the interleaved network {interleave(depth)}"
    for derived, other in zip(ours, theirs, strict=True):
        if derived and other:
            _stand(answer, derived, other, called)
            break
    else:
        _alone(answer, search, next(filter(None, ours), None), any(theirs), blocks)
        return
    both = (derived.figures.get("steps"), other.figures.get("steps"))
    if None not in both and both[0] != both[1]:
        answer.cautions.append(f"They were trained for {both[0]:,.0f} and {both[1]:,.0f} steps.")
    if "latency_ms" not in derived.figures or "latency_ms" not in other.figures:
        answer.sentences.append("Latency was not measured.")
        folders = [shlex.quote(str(row.member.run.folder)) for row in (derived, other) if row.member]
        answer.cautions.append(f"To measure latency: parnas evaluate {' '.join(folders) or 'RUN…'}.")
    folder = shlex.quote(str(search.run.folder))
    answer.cautions.append(
        f"One training each: a small difference may be chance. parnas baselines {folder} trains several seeds."
    )


def rows_like(architecture: Architecture, search: Member, material: Material) -> list[Row | None]:
    """A trained network of that architecture in each comparison, and last among the runs themselves; or none."""
    found: list[Row | None] = []
    for rows in _trained(search, material):
        alike = [row for row in rows if same_network(read(row.arch), architecture)]
        found.append(alike[0] if alike else None)
    return found


def interleave(depth: int) -> Architecture:
    """The interleaved network of so many blocks."""
    return Architecture.parse(f"interleaved-{depth}")


def find_depth(derived: Architecture, search: Member, material: Material) -> int:
    """Of the interleaved network to compare with: as deep as the search where that is here, else the deepest one."""
    networks = {drop_identity(read(row.arch) or ()) for rows in _trained(search, material) for row in rows}
    others = networks - {(), drop_identity(derived)}
    depths = {len(layers) for layers in others if same_network(layers, interleave(len(layers)))}
    return len(derived) if not depths or len(derived) in depths else max(depths)


def _trained(search: Member, material: Material) -> list[list[Row]]:
    """The rows of discrete networks in each comparison, and last those of the runs themselves."""
    alone = [summary_row(each) for each in material.members if each.text == search.text and each.summary]
    tables = [*(_rows_with(search, each) for each in material.comparisons), alone]
    return [[row for row in rows if row.network == "discrete"] for rows in tables]


def _rows_with(search: Member, comparison: Comparison) -> Sequence[Row]:
    """The rows of a comparison that is of the search's text, as far as it can be told."""
    known = [row.member for row in comparison.rows if row.member]
    return comparison.rows if all(member.text == search.text for member in known) else ()


def shared_perplexity(rows: Sequence[Mapping[str, float]], members: Sequence[Member] = ()) -> str | None:
    """The perplexity that all figures have and that compares between their runs; none where there is none."""
    keys = list(PERPLEXITIES)
    if len({member.tokens for member in members}) > 1:
        keys.remove("ppl")
    return next((key for key in keys if rows and all(key in row for row in rows)), None)


def change(ours: float, theirs: float) -> float:
    """By how many per cent the one is above the other."""
    return 100 * (ours / theirs - 1) if theirs else 0.0


def _stand(answer: Answer, derived: Row, other: Row, called: str) -> None:
    members = [row.member for row in (derived, other) if row.member]
    figures = derived.figures, other.figures
    key = shared_perplexity(figures, members)
    if key is None:
        answer.sentences.append("No finite perplexity of both the derived and the interleaved network is here.")
    else:
        digits = 4 if key == "bits_per_byte" else 2
        one, two = (each[key] for each in figures)
        card = _card(PERPLEXITIES[key], f"{one:,.{digits}f}", f"{two:,.{digits}f}", change(one, two))
        answer.cards.append(card)
        answer.sentences.append(
            f"Trained from scratch, the derived network reaches {card.value} {PERPLEXITIES[key]}{_than(card, called)}."
        )
    for cost in COSTS:
        if all(cost.key in each for each in figures):
            one, two = (each[cost.key] for each in figures)
            written = [f"{value:{cost.form}}{cost.unit}" for value in (one, two)]
            card = _card(cost.name, written[0], written[1], change(one, two))
            answer.cards.append(card)
            if cost.key == "latency_ms":
                answer.sentences.append(f"It takes {card.value} per segment{_than(card, called)}.")


def _card(title: str, value: str, against: str, percent: float) -> Card:
    if abs(percent) < EQUAL:
        return Card(title, value, against, "equal", "equal")
    way = "lower" if percent < 0 else "higher"
    return Card(title, value, against, "better" if percent < 0 else "worse", f"{abs(percent):.1f} % {way}")


def _than(card: Card, other: str) -> str:
    if card.verdict == "equal":
        return f", as {other} does ({card.against})"
    return f", {card.difference} ({card.verdict}) than {other}'s {card.against}"


def _alone(answer: Answer, search: Member, derived: Row | None, interleaved: bool, blocks: int) -> None:
    """What can be said where the two do not stand in one table."""
    folder = shlex.quote(str(search.run.folder))
    config = shlex.quote(str(search.run.folder / "config.yaml"))
    if derived is None:
        inherited = summary_row(search).figures.get("ppl")
        if inherited is not None and search.summary:
            answer.sentences.append(f"With the SuperNet's weights it reaches {inherited:,.2f} perplexity per token.")
        elif ended := ended_elsewhere(search):
            answer.sentences.append(f"The search ended with another network, {ended}, and validated only that one.")
        answer.sentences.append("The derived network has not been trained from scratch in the runs given here.")
        answer.cautions.append(
            f"To train the derived one: parnas retrain {config} --arch {folder}/arch.yaml --run runs/derived."
        )
    else:
        answer.sentences.extend(_reached(derived))
    if not interleaved:
        answer.sentences.append("No interleaved network stands beside it here, so nothing says what the search gained.")
        answer.cautions.append(
            f"To train the interleaved one: parnas retrain {config} --arch interleaved-{blocks} --run runs/interleaved,"
            " then parnas evaluate with all runs."
        )
    elif derived is not None:
        answer.sentences.append("It and the interleaved network do not stand in one comparison.")
        answer.cautions.append("To compare them: parnas evaluate with the folders of both.")


def _reached(derived: Row | None) -> list[str]:
    """What the derived network reaches, by itself."""
    if derived is None:
        return []
    if (ppl := derived.figures.get("ppl")) is None:
        return ["Its training from scratch has no finite perplexity per token."]
    return [f"Trained from scratch, it reaches {ppl:,.2f} perplexity per token."]


def _and(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last
