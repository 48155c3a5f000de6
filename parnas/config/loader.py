"""The configuration: the sections of `schema.py`, read from YAML files and changed by overrides with dotted keys."""

import difflib
import re
import reprlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from pydantic import Field, ValidationError

from parnas.config.schema import (
    CrossFieldErrors,
    DataConfig,
    EvaluationConfig,
    FieldError,
    ModelConfig,
    Reach,
    RuntimeConfig,
    SearchConfig,
    Section,
    Shape,
    TrainConfig,
)
from parnas.config.yaml_file import MAX_BYTES, read_text, read_yaml, to_yaml
from parnas.errors import ParnasError

__all__ = [
    "PRESETS",
    "Config",
    "Override",
    "check_config",
    "dump_config",
    "load_config",
    "read_override",
    "to_yaml_values",
    "walk_fields",
]

_MAX_ERRORS = 100  # errors listed in one message
_MAX_ERROR_LENGTH = 500  # characters of one error

Override: TypeAlias = str | tuple[str, Any]
"""`section.key=value` with a value in YAML, or a dotted key and its value."""


class Config(Section):
    """The whole configuration of a run."""

    # `default` is a keyword because type checkers without pydantic's plugin do not find a positional default.

    data: DataConfig = Field(default=DataConfig(), description="Text, tokens and batches.")
    model: ModelConfig = Field(default=ModelConfig(), description="The network, in both phases.")
    search: SearchConfig = Field(default=SearchConfig(), description="The SuperNet and its schedule.")
    train: TrainConfig = Field(default=TrainConfig(), description="Training of the discrete network.")
    evaluation: EvaluationConfig = Field(default=EvaluationConfig(), description="How perplexity is measured.")
    runtime: RuntimeConfig = Field(default=RuntimeConfig(), description="Device, precision and seed.")

    @property
    def training_shape(self) -> Shape:
        """Batch size, segment length and memory lengths (`Reach`) of a training step."""
        return Shape(self.data.batch_size, self.data.tgt_len, self.model.reach)

    @property
    def validation_shape(self) -> Shape:
        """Batch size of section `evaluation`, with the segment length and memory lengths (`Reach`) of training."""
        return self.training_shape._replace(batch_size=self.evaluation.batch_size)

    @property
    def evaluation_shape(self) -> Shape:
        """Batch size, segment and memory lengths of an evaluation; null in section `evaluation`: as in training."""
        trained = {"tgt_len": self.data.tgt_len, **self.model.reach._asdict()}
        evaluated = {key: getattr(self.evaluation, key) for key in trained}
        lengths = {key: trained[key] if value is None else value for key, value in evaluated.items()}
        return Shape(self.evaluation.batch_size, lengths.pop("tgt_len"), Reach(**lengths))

    def cross_field_errors(self) -> Iterator[FieldError]:
        """Yield errors of `evaluation.stride` and `evaluation.same_length`, and of a pointer with distillation."""
        stride, (_, tgt_len, reach) = self.evaluation.stride, self.evaluation_shape
        if stride and tgt_len % stride:
            problem = f"is {stride}, which does not divide tgt_len, {tgt_len} tokens; give a divisor of {tgt_len}"
            yield "evaluation.stride", problem
        if reach.same_length and not reach.mem_len:
            yield "evaluation.same_length", "is true, but mem_len is 0, so attention would see nothing; change one"
        if self.evaluation.pointer_len and not self.model.pointer_len:
            yield "evaluation.pointer_len", "is given, but the network has no pointer (model.pointer_len: 0)"
        if self.model.pointer_len:
            for key, value in (("train.teachers", self.train.teachers), ("search.parent", self.search.parent)):
                if value:
                    yield key, "is given, but distillation does not support a pointer; set model.pointer_len: 0"

    def replace(self, **changes: Any) -> "Config":
        """Return a copy with changed settings; keys have `__` instead of dots, as in `replace(model__d_model=64)`."""
        tree = self.model_dump()
        for key, value in changes.items():
            _set_key(tree, key.split("__"), value)
        return check_config(tree, "The changed configuration")

    def from_scratch(self, **changes: Any) -> "Config":
        """Return a copy without inherited weights, and with further changes as for `replace`."""
        return self.replace(train__inherit=None, train__freeze_embedding=False, **changes)


PRESETS = Path(__file__).parent / "presets"


def find_config(name: str | Path) -> Path:
    """Return `name` if it is a file, else the path of the preset given as NAME, NAME.yaml or configs/NAME.yaml."""
    path = Path(name)
    if path.is_file():
        return path
    preset = PRESETS / f"{path.name.removesuffix('.yaml')}.yaml"
    if path.parent in (Path(), Path("configs")) and preset.is_file():
        return preset
    names = ", ".join(sorted(each.stem for each in PRESETS.glob("*.yaml")))
    raise ParnasError(f"There is no configuration {name}; give the path of a YAML file, or one of {names}.")


def load_config(name: str | Path, overrides: Sequence[Override] = ()) -> Config:
    """Read a YAML file or a preset, apply overrides such as `section.key=value`, and validate all settings.

    Raises:
        ParnasError: A setting is not valid. The message lists each error with the key, the given value, the allowed
            values and, for an unknown key, the most similar known key.
    """
    path = find_config(name)
    tree = read_yaml(read_text(path, MAX_BYTES), str(path))
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ParnasError(f"{path} holds no sections; begin it like 'model:' with indented keys below.")
    return check_config(tree, str(path), overrides)


def check_config(settings: Mapping[Any, Any], source: str, overrides: Sequence[Override] = ()) -> Config:
    """Apply overrides to nested sections and validate them; raise `ParnasError` that names `source` and all errors."""
    tree: dict[Any, Any] = to_yaml_values(settings)
    errors, omitted, removed = [], 0, dict[str, set[str]]()  # names of removed keys, by section
    for override in overrides:
        key, value = read_override(override) if isinstance(override, str) else override
        if not key:
            errors.append(f"{override!r:.80} is not of the form section.key=value")
        elif problem := _set_key(tree, key.split("."), to_yaml_values(value)):
            errors.append(f"{override!r:.80}: {problem}")
    while True:
        try:
            config = Config.model_validate(tree)
            break
        except ValidationError as error:
            details = error.errors(include_url=False)
        listed = details[: max(0, _MAX_ERRORS - len(errors))]
        omitted += len(details) - len(listed)
        for detail in listed:
            # An error of several sections has no location, and may concern a key of each of them.
            sections = detail["loc"][:1] or removed
            names = {name for section in sections for name in removed.get(str(section), ())}
            errors += [line for line in _describe(detail) if names.isdisjoint(re.findall(r"\w+", line))]
        # pydantic checks several fields together only if each of them is valid. To find those errors too, remove the
        # wrong values and validate again. Errors that then name a removed key concern its default: skip them.
        found = False
        for detail in details:
            keys = _remove_key(tree, detail["loc"])
            found = found or bool(keys)
            if keys and detail["type"] != "extra_forbidden":
                removed.setdefault(str(detail["loc"][0]), set()).update(keys)
        if not found:
            break
    if errors:
        lines = [line if len(line) <= _MAX_ERROR_LENGTH else f"{line[: _MAX_ERROR_LENGTH - 3]}..." for line in errors]
        lines = [f"{source} has {len(errors) + omitted} error(s):", *(f"  - {line}" for line in lines)]
        raise ParnasError("\n".join([*lines, *([f"  and {omitted} more"] if omitted else [])]), errors=errors)
    return config


def dump_config(config: Config) -> str:
    """Return all settings as YAML, the content of `config.yaml` in a run folder."""
    return to_yaml(config.model_dump(mode="json"))


def walk_fields(section: type[Section] = Config, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, pydantic `FieldInfo`) of each section and setting, a section before its settings."""
    for name, field in section.model_fields.items():
        yield prefix + name, field
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            yield from walk_fields(field.annotation, f"{prefix}{name}.")


def read_override(text: str) -> tuple[str, Any]:
    """Split `section.key=value` into the key and the parsed value; the key is empty for a text of another form."""
    key, equals, value = text.partition("=")
    return (key, read_yaml(value, f"The value of {key}")) if equals and key else ("", None)


def to_yaml_values(tree: Any) -> Any:
    """Return a deep copy of nested values, with lists as tuples and paths as strings."""
    if isinstance(tree, Mapping):
        return {key: to_yaml_values(value) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return tuple(to_yaml_values(value) for value in tree)
    return str(tree) if isinstance(tree, Path) else tree


def _set_key(tree: dict[Any, Any], keys: Sequence[str], value: Any) -> str | None:
    """Set a nested key in place; return an error text if a key before the last is not a section, else `None`."""
    for key in keys[:-1]:
        inner = tree.setdefault(key, {})
        if not isinstance(inner, dict):
            return f"{key} is not a section"
        tree = inner
    tree[keys[-1]] = value
    return None


def _remove_key(tree: Any, location: Sequence[int | str]) -> set[str]:
    """Remove the deepest key of an error location that `tree` has; return its name and, for a section, its keys."""
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
    """Return a line of text for each error that an entry of pydantic's `ValidationError.errors()` reports."""
    if detail["type"] == "extra_forbidden":
        return [_describe_unknown_key(".".join(map(str, detail["loc"])))]
    key = _known_part(detail["loc"])
    if isinstance(error := detail.get("ctx", {}).get("error"), CrossFieldErrors):
        return [f"{key}.{inner}".lstrip(".") + f" {problem}" for inner, problem in error.errors]
    given = _REPR.repr(detail["input"])
    given = given if len(given) <= 60 else given[:57] + "..."
    allowed = detail["msg"].replace("Input should", "it should", 1).removeprefix("Value error, ")
    return [f"{key} is {given}; {allowed[0].lower()}{allowed[1:]}"]


def _describe_unknown_key(key: str) -> str:
    """Return the error of an unknown key; it suggests a known key with the same last part, else a similar key."""
    section, _, name = key.rpartition(".")
    names = {known: known.rpartition(".")[2] for known in _known_keys()}
    siblings = {other: known for known, other in names.items() if known.rpartition(".")[0] == section}
    near = (
        [known for known, other in names.items() if other == name]
        or [siblings[other] for other in difflib.get_close_matches(name[:80], siblings, 1, 0.6)]
        or [known for known, other in names.items() if difflib.get_close_matches(name[:80], [other], 1, 0.75)]
    )
    return f"{key:.80} is no known key" + (f"; did you mean {near[0]}?" if near else "")


@cache
def _known_keys() -> tuple[str, ...]:
    return tuple(key for key, _ in walk_fields())


_REPR = reprlib.Repr()  # shows the beginning of a value without formatting all of it
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = 57
_REPR.maxdict = _REPR.maxlist = _REPR.maxtuple = _REPR.maxset = 20


def _known_part(location: Sequence[int | str]) -> str:
    """Return the dotted key of an error location, without the parts that pydantic adds for unions and tuples."""
    parts = [str(part) for part in location]
    while parts and ".".join(parts) not in _known_keys():
        parts.pop()
    return ".".join(parts)
