"""The search space of `parnas tune`: ranges and choices of settings, read from text or YAML and checked.

A range is `LOW..HIGH` or `log:LOW..HIGH`, a choice is a list of values. Each end of a range and each choice must be
valid in the configuration, at least together with some values of the other settings.
"""

import json
import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias, get_args

from parnas.architecture import Architecture
from parnas.config.loader import Config, check_config, walk_fields
from parnas.config.yaml_file import MAX_BYTES, read_text, read_yaml, to_yaml
from parnas.errors import ParnasError
from parnas.runs.resolve import read_overrides
from parnas.runs.run import OTHER_PHASE_SETTINGS

Phase = Literal["retrain", "search"]
NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?\s*({NUMBER})\s*\.\.\s*({NUMBER})")
_SIGNIFICANT_DIGITS = 4  # of numbers that are drawn, so that configurations stay readable
_COMBINATIONS = 50  # of the other settings, with which a value may be valid

# Settings that no trial may change.
_TOKEN_SETTINGS = ("data.corpus", "data.tokenizer")
_IRRELEVANT_SETTINGS = ("evaluation", "runtime", "train.log_every", "train.eval_every", "train.save_every")


@dataclass(frozen=True)
class NumberRange:
    """The numbers from `low` to `high`, drawn by their logarithm if `log`; only whole ones if `whole`."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return f"{'log:' * self.log}{self.low:.12g}..{self.high:.12g}"

    def ends(self) -> list[Any]:
        """Return the values that the configuration must allow."""
        return [self.low, self.high]

    def draw(self, source: random.Random) -> Any:
        """Draw a value."""
        if self.whole:
            return source.randint(int(self.low), int(self.high))
        if self.log:
            return self.to_setting(math.exp(source.uniform(math.log(self.low), math.log(self.high))))
        return self.to_setting(source.uniform(self.low, self.high))

    def to_setting(self, drawn: Any) -> Any:
        """Return the value of a drawn parameter, rounded to `_SIGNIFICANT_DIGITS`."""
        rounded = drawn if self.whole else float(f"{drawn:.{_SIGNIFICANT_DIGITS}g}")
        return min(self.high, max(self.low, rounded))

    def to_parameter(self, value: Any) -> Any:
        """Return the parameter of a value, or `None` if the value is outside the range."""
        inside = isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high
        return value if inside else None


@dataclass(frozen=True)
class ValueList:
    """A list of values, each with a label."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"[{', '.join(self.labels())}]"

    def labels(self) -> list[str]:
        """Return the labels in the order of the values."""
        return list(map(to_label, self.values))

    def ends(self) -> list[Any]:
        """Return the values that the configuration must allow."""
        return list(self.values)

    def draw(self, source: random.Random) -> Any:
        """Draw a value."""
        return source.choice(self.values)

    def to_setting(self, drawn: Any) -> Any:
        """Return the value with a drawn label."""
        return self.values[self.labels().index(drawn)]

    def to_parameter(self, value: Any) -> Any:
        """Return the label of a value, or `None` if the value is not in the list."""
        return to_label(value) if to_label(value) in self.labels() else None


_Dimension: TypeAlias = NumberRange | ValueList
Space: TypeAlias = Mapping[str, _Dimension]
"""The values of each tuned setting, by dotted key."""
SpaceLike: TypeAlias = Mapping[str, Any] | str | Path | None
"""A YAML file, or texts such as `log:1e-4..1e-2` and lists by dotted key, nested or not."""


def to_label(value: Any) -> str:
    """Return a value as YAML text."""
    return value if isinstance(value, str) else json.dumps(value)


# Reading.


def read_file(path: Path) -> dict[str, Any]:
    """Read ranges and choices by dotted key from a YAML file."""
    if not path.is_file():
        raise ParnasError(f"There is no file {path}; give one with lines such as 'train.lr: log:1e-4..1e-2'.")
    tree = read_yaml(read_text(path, MAX_BYTES), str(path))
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ParnasError(f"{path} holds no settings; it should have lines such as 'train.lr: log:1e-4..1e-2'.")
    return read_mapping(tree)


def read_mapping(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return texts and lists by dotted key, from keys that may be nested by section."""
    return dict(each for each in read_overrides(tree) if isinstance(each, tuple))


def read_options(options: Sequence[str]) -> dict[str, Any]:
    """Return the texts of `--set KEY=VALUES` by key; raise `ParnasError` with all options of another form."""
    if wrong := [option for option in options if not re.match(r"[^=]+=.", option)]:
        listed = ", ".join(f"{option!r:.60}" for option in wrong)
        raise ParnasError(f"--set {listed}: give KEY=LOW..HIGH, KEY=log:LOW..HIGH or KEY=VALUE,VALUE.")
    return {key: text for key, _, text in (option.partition("=") for option in options)}


def read_space(wanted: Mapping[str, Any], config: Config, phase: Phase) -> Space:
    """Return checked ranges and choices; raise `ParnasError` with all errors at once."""
    space: dict[str, _Dimension] = {}
    errors: list[str] = []
    for key, values in wanted.items():
        if reason := untunable(key, phase):
            errors.append(f"{key:.80} {reason}")
            continue
        try:
            space[key] = _read_dimension(key, values)
        except ParnasError as error:
            errors.append(f"{key:.80} {error}")
    errors = list(dict.fromkeys([*errors, *_check_space(space, config)]))
    if errors:
        lines = "\n".join(f"  - {line}" for line in errors)
        raise ParnasError(f"The settings to tune have {len(errors)} error(s):\n{lines}")
    if not space:
        raise ParnasError("There is no setting to tune; give --set KEY=VALUES, or leave out --space for the default.")
    return space


def untunable(key: str, phase: Phase) -> str | None:
    """Return why a setting cannot be tuned, whatever its values, or `None`."""

    def below(*keys: str) -> bool:
        return any(key == each or key.startswith(f"{each}.") for each in keys)

    if below(*_TOKEN_SETTINGS):
        return "changes the tokens, so that losses per token are not comparable; leave it out"
    if below(*_IRRELEVANT_SETTINGS):
        return "does not change the trained weights; leave it out"
    if below(*OTHER_PHASE_SETTINGS[phase]):
        return f"has no effect on {phase}; leave it out, or give the other --phase"
    if key == "search.cost.target":
        return "decides how large the network may be, so that the largest would win; leave it out, and set it"
    if key in ("train.steps", "search.steps"):
        return "decides how long is trained, so that the longest would win; leave it out, and set it"
    return None


def _read_dimension(key: str, values: Any) -> _Dimension:
    """Read `LOW..HIGH`, `log:LOW..HIGH`, `VALUE,VALUE` or a list; raise `ParnasError` for another form."""
    if isinstance(values, str):
        if match := _RANGE.fullmatch(values.strip()):
            return _read_range(values, bool(match[1]), match[2], match[3], is_whole(key))
        if values.startswith("log:"):
            raise ParnasError(f"is {values!r:.60}; give log:LOW..HIGH with two numbers")
        values = read_yaml(f"[{values}]", "the list")
    listed = tuple(values) if isinstance(values, list | tuple) else (values,)
    distinct = tuple({to_label(value): value for value in (as_configured(key, value) for value in listed)}.values())
    if len(distinct) < 2:
        raise ParnasError(
            f"has {'one value' if distinct else 'no value'}; give LOW..HIGH, log:LOW..HIGH or VALUE,VALUE"
        )
    return ValueList(distinct)


def _read_range(text: str, log: bool, low: str, high: str, whole: bool) -> NumberRange:
    """Return a range, of whole numbers if the setting and both ends are whole."""
    ends = [float(end) for end in (low, high)]
    if not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise ParnasError(f"is {text!r:.60}; the first number must be less than the second")
    if log and ends[0] <= 0:
        raise ParnasError(f"is {text!r:.60}; a logarithmic range needs numbers above 0")
    if whole and all(end.is_integer() for end in ends):
        return NumberRange(int(ends[0]), int(ends[1]), log, whole=True)
    return NumberRange(ends[0], ends[1], log)


def is_whole(key: str) -> bool:
    """Return whether a setting takes only whole numbers."""
    kinds = _value_types(key)
    return int in kinds and float not in kinds


def _value_types(key: str) -> set[Any]:
    """Return the types of a setting's values; empty for an unknown setting."""
    types = {name: {field.annotation, *get_args(field.annotation)} for name, field in walk_fields()}
    return types.get(key, set())


def as_configured(key: str, value: Any) -> Any:
    """Return a value as the configuration stores it, so that 0 equals 0.0, and all names of a network are equal."""
    if isinstance(value, int) and not isinstance(value, bool) and float in _value_types(key):
        return float(value)
    if key == "model.arch" and isinstance(value, str):
        with suppress(ParnasError):  # the configuration reports it
            return str(Architecture.parse(value))
    return value


# Checking.


def _check_space(space: Space, config: Config) -> Iterator[str]:
    """Yield the errors of ends and choices that are invalid whatever the other settings are."""
    for key, dimension in space.items():
        for value in dimension.ends():
            errors = _errors_of(config, {key: value})
            if errors and not _valid_with_others(key, value, space, config):
                yield from errors


def _valid_with_others(key: str, value: Any, space: Space, config: Config) -> bool:
    """Return whether some drawn combination of the other settings makes a value valid."""
    source = random.Random(0)
    others = {other: dimension for other, dimension in space.items() if other != key}
    drawn = ({other: dimension.draw(source) for other, dimension in others.items()} for _ in range(_COMBINATIONS))
    return bool(others) and any(not _errors_of(config, {**settings, key: value}) for settings in drawn)


def _errors_of(config: Config, settings: Mapping[str, Any]) -> list[str]:
    """Return the errors of the configuration with settings by dotted key."""
    try:
        configure(config, settings)
    except ParnasError as error:
        return list(error.errors)
    return []


def configure(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration with settings by dotted key; raise `ParnasError` if they are invalid."""
    return check_config(config.model_dump(), "The configuration of the trial", list(settings.items()))


# Writing, and the default.


def describe_space(space: Space) -> dict[str, str | list[Any]]:
    """Return the form that `read_space` reads, by dotted key: the text of a range, the list of choices."""
    return {key: list(each.values) if isinstance(each, ValueList) else str(each) for key, each in space.items()}


def dump_space(space: Space) -> str:
    """Return the content of a file that `read_file` reads."""
    return to_yaml(json.loads(json.dumps(describe_space(space))))


def default_space(config: Config, phase: Phase) -> dict[str, Any]:
    """Return the settings tuned by default: learning rates around the configured ones, and regularisation.

    A search tunes the temperature instead, and the weight of the cost if it has a cost target. With the estimator
    `uniform`, derivation meets the target by itself, and a penalty would only flatten pi (`SearchConfig.cost_weight`).
    """
    if phase == "retrain":
        return {
            "train.lr": _around(config.train.lr),
            "model.dropout": "0..0.5",
            "model.attention_dropout": "0..0.3",
            "train.weight_decay": "log:1e-3..0.3" if config.train.weight_decay else "0..0.3",
        }
    search, uniform = config.search, config.search.estimator == "uniform"
    space: dict[str, Any] = {
        "search.lr": _around(search.lr),
        "search.alpha_lr": _around(search.alpha_lr),
        "search.tau_start": "0.3..1" if uniform else "log:0.5..5",
        "search.tau_end": "log:0.01..0.3",
        "search.tau_schedule": ["exponential", "linear", "cosine"],
    }
    if search.cost.target is not None and not uniform:
        space["search.cost.weight"] = "log:0.3..10"
    return space


def _around(value: float) -> str:
    """Return the range from a fifth to five times a value."""
    return f"log:{value / 5:.3g}..{value * 5:.3g}"
