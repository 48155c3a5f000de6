"""The configuration: one frozen tree of the sections in `sections.py`, read from YAML and overridden by dotted keys."""

import difflib
import re
import reprlib
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import Field, ValidationError

from parnas.errors import ParnasError
from parnas.files import read_text
from parnas.section import Mistake, Mistaken
from parnas.sections import (
    DataConfig,
    EvaluationConfig,
    ModelConfig,
    Reach,
    RuntimeConfig,
    SearchConfig,
    Section,
    TrainConfig,
)
from parnas.yaml_text import MAX_BYTES, read_yaml, to_yaml

MOST_TOLD = 100  # mistakes
LONGEST_TOLD = 500  # characters of one

Override: TypeAlias = str | tuple[str, Any]
"""`section.key=value` with a value in YAML, or a dotted key and its value."""


class Config(Section):
    """The whole configuration of a run."""

    # Defaults by keyword, which type checkers without pydantic's plugin need to see.

    data: DataConfig = Field(default=DataConfig(), description="Text, tokens and batches.")
    model: ModelConfig = Field(default=ModelConfig(), description="The network, in both phases.")
    search: SearchConfig = Field(default=SearchConfig(), description="The SuperNet and its schedule.")
    train: TrainConfig = Field(default=TrainConfig(), description="Training of the discrete network.")
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="How perplexity is measured.")
    runtime: RuntimeConfig = Field(default=RuntimeConfig(), description="Device, precision and seed.")

    @property
    def evaluated_lengths(self) -> tuple[int, Reach]:
        """Segment length and reach of an evaluation: its own, else those of training."""
        trained = {"tgt_len": self.data.tgt_len, **self.model.reach._asdict()}
        told = {key: getattr(self.evaluation, key) for key in trained}
        trained |= {key: value for key, value in told.items() if value is not None}
        return trained.pop("tgt_len"), Reach(**trained)

    def mistakes(self) -> Iterator[Mistake]:
        stride, (tgt_len, reach) = self.evaluation.stride, self.evaluated_lengths
        if stride and tgt_len % stride:
            told = f"is {stride}, which does not divide segments of {tgt_len} tokens (tgt_len); give one that does"
            yield Mistake("evaluation.stride", told)
        if reach.same_length and not reach.mem_len:
            yield Mistake(
                "evaluation.same_length", "is true, but without memory nothing would be seen; give mem_len, or false"
            )

    def replace(self, **changes: Any) -> "Config":
        """A copy with dotted keys changed, the dots written as `__`: `replace(model__d_model=64)`."""
        tree = self.model_dump()
        for key, value in changes.items():
            _put(tree, key.split("__"), value)
        return check_config(tree, "The changed configuration")


PACKAGED = Path(__file__).parent / "configs"


def find_config(name: str | Path) -> Path:
    """A path as it is, or what `NAME`, `NAME.yaml` or `configs/NAME.yaml` means of the package's own."""
    path = Path(name)
    if path.is_file():
        return path
    shipped = PACKAGED / f"{path.name.removesuffix('.yaml')}.yaml"
    if path.parent in (Path(), Path("configs")) and shipped.is_file():
        return shipped
    names = ", ".join(sorted(each.stem for each in PACKAGED.glob("*.yaml")))
    raise ParnasError(f"There is no configuration {name}; give the path of a YAML file, or one of {names}.")


def load_config(name: str | Path, overrides: Sequence[Override] = ()) -> Config:
    """Read a YAML file, apply overrides such as `section.key=value`, and check everything at once.

    Raises `ParnasError` listing every mistake with its key, what was given, what is allowed and, for an unknown
    key, the nearest known one.
    """
    path = find_config(name)
    tree = read_yaml(read_text(path, MAX_BYTES), str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ParnasError(f"{path} holds no sections; it should begin like 'model:' with indented keys below.")
    return check_config(tree, str(path), overrides)


def check_config(tree: dict[Any, Any], source: str, overrides: Sequence[Override] = ()) -> Config:
    """Apply overrides to a nested dictionary and validate it; raises `ParnasError` naming `source` and all mistakes."""
    tree, found = _own_copy(tree), []
    for override in overrides:
        key, value = read_override(override) if isinstance(override, str) else override
        if not key:
            found.append(f"{override!r:.80} is not of the form section.key=value")
        elif problem := _put(tree, key.split("."), _own_copy(value)):
            found.append(f"{override!r:.80}: {problem}")
    left_out, defaulted = 0, set[str]()
    while True:
        try:
            config = Config.model_validate(tree)
            break
        except ValidationError as error:
            details = error.errors(include_url=False, include_context=True)
            told = details[: MOST_TOLD - len(found)] if len(found) < MOST_TOLD else []
            left_out += len(details) - len(told)
            lines = [line for detail in told for line in _describe(detail)]
            found += [line for line in lines if defaulted.isdisjoint(re.findall(r"\w+", line))]
            # Mistakes across fields show only once each field is right by itself: take the wrong ones out, look again.
            # Those that name one of these then speak of its default, which nobody gave.
            taken = [(detail["type"], _take_out(tree, detail["loc"])) for detail in details]
            if not any(names for _, names in taken):
                break
            defaulted.update(*(names for kind, names in taken if kind != "extra_forbidden"))
    if found:
        lines = [f"  - {line if len(line) <= LONGEST_TOLD else line[: LONGEST_TOLD - 3] + '...'}" for line in found]
        more = [f"  and {left_out} more"] if left_out else []
        told_of = f"{source} has {len(found) + left_out} mistake(s):\n"
        raise ParnasError(told_of + "\n".join(lines + more), mistakes=found)
    return config


def dump_config(config: Config) -> str:
    """The whole tree as YAML, as it is kept in a run folder."""
    return to_yaml(config.model_dump(mode="json"))


def walk_fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its pydantic `FieldInfo`, sections before their keys."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from walk_fields(field.annotation, f"{prefix}{name}.")


def read_override(text: str) -> tuple[str, Any]:
    """Key and value; an empty key where there are not both."""
    key, equals, value = text.partition("=")
    return (key, read_yaml(value, f"The value of {key}")) if equals and key else ("", None)


def _own_copy(tree: Any) -> Any:
    """Nested dictionaries anew, each place its own, so that what is set in one does not show where YAML repeats it.

    Lists become tuples, as the sections have them.
    """
    if isinstance(tree, list | tuple):
        return tuple(_own_copy(value) for value in tree)
    return {key: _own_copy(value) for key, value in tree.items()} if isinstance(tree, dict) else tree


def _put(tree: dict[Any, Any], keys: Sequence[str], value: Any) -> str | None:
    """Set a nested key; returns what is wrong when a key on the way holds no section."""
    for key in keys[:-1]:
        inner = tree.setdefault(key, {})
        if not isinstance(inner, dict):
            return f"{key} is no section"
        tree = inner
    tree[keys[-1]] = value
    return None


def _take_out(tree: Any, location: Sequence[int | str]) -> set[str]:
    """Remove the deepest key of a location that is still there; its name, and those in it where it is a section."""
    for key in location[:-1]:
        if not isinstance(tree, dict) or not isinstance(tree.get(key), dict):
            break
        tree = tree[key]
        location = location[1:]
    if not location or not isinstance(tree, dict) or location[0] not in tree:
        return set()
    removed = tree.pop(location[0])
    return {str(location[0]), *(map(str, removed) if isinstance(removed, dict) else ())}


def _describe(detail: Any) -> list[str]:
    """One line for each mistake in an entry of pydantic's `ValidationError.errors()`."""
    known = _known_keys()
    key = (
        _known_part(detail["loc"], known) if detail["type"] != "extra_forbidden" else ".".join(map(str, detail["loc"]))
    )
    if isinstance(mistaken := detail.get("ctx", {}).get("error"), Mistaken):
        return [f"{key}.{inner}".lstrip(".") + f" {problem}" for inner, problem in mistaken.found]
    if detail["type"] == "extra_forbidden":
        section, _, last = key.rpartition(".")
        by_name = [other for other in known if other.rpartition(".")[2] == last]
        beside = {other.rpartition(".")[2]: other for other in known if other.rpartition(".")[0] == section}
        near = by_name or [beside[name] for name in difflib.get_close_matches(last[:80], beside, 1, 0.6)]
        near = near or [k for k in known if difflib.get_close_matches(last[:80], [k.rpartition(".")[2]], 1, 0.75)]
        return [f"{key:.80} is no known key" + (f"; did you mean {near[0]}?" if near else "")]
    given = _REPR.repr(detail["input"])
    given = given if len(given) <= 60 else given[:57] + "..."
    allowed = detail["msg"].replace("Input should", "it should", 1)
    return [f"{key} is {given}; {allowed[0].lower()}{allowed[1:]}"]


@cache
def _known_keys() -> tuple[str, ...]:
    return tuple(key for key, _ in walk_fields())


_REPR = reprlib.Repr()  # shows the beginning of a value, however large the whole
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 57
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = 20


def _known_part(location: Sequence[int | str], known: Sequence[str]) -> str:
    """The dotted key of a location without what pydantic adds for members of unions and tuples."""
    parts = [str(part) for part in location]
    while parts and ".".join(parts) not in known:
        parts.pop()
    return ".".join(parts)
