"""The search space of `parnas tune`: for each setting a range or a list of values, read from options or YAML.

A range is `LOW..HIGH`, or `log:LOW..HIGH` for a logarithmic scale. Both ends of a range and each value of a list must
be valid in the configuration, at least together with some values of the other settings to tune.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias, get_args

import optuna
from optuna.samplers import RandomSampler
from optuna.trial import Trial

from parnas.architecture import Architecture
from parnas.config.loader import Config, check_config, walk_fields
from parnas.config.yaml_file import MAX_BYTES, read_text, read_yaml, to_yaml
from parnas.errors import ParnasError
from parnas.runs.records import Kind
from parnas.runs.resolve import read_overrides
from parnas.runs.run import OTHER_PHASE_SETTINGS

__all__ = ["SpaceLike", "read_options", "resolve_space"]

SPACE = "space.yaml"  # file in the folder of a study with its space
_NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"(log:)?\s*({_NUMBER})\s*\.\.\s*({_NUMBER})")
_SIGNIFICANT_DIGITS = 4  # of drawn numbers, which keeps configurations readable
_COMBINATIONS = 50  # random draws of the other tuned settings; a value must be valid with at least one of them

# Settings that no trial may change.
_TOKEN_SETTINGS = ("data.corpus", "data.tokenizer")
_IRRELEVANT_SETTINGS = ("evaluation", "runtime", "train.log_every", "train.eval_every", "train.save_every")


@dataclass(frozen=True)
class NumberRange:
    """A range of numbers from `low` to `high`: on a logarithmic scale if `log` is true, of integers if `whole` is."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return f"{'log:' * self.log}{self.low:.12g}..{self.high:.12g}"

    def extremes(self) -> list[Any]:
        """Return both ends of the range, each of which must be valid in the configuration."""
        return [self.low, self.high]

    def draw(self, trial: Trial, key: str) -> Any:
        """Let the sampler of a study draw a value for the setting `key`."""
        if self.whole:
            return trial.suggest_int(key, int(self.low), int(self.high), log=self.log)
        return self.to_setting(trial.suggest_float(key, self.low, self.high, log=self.log))

    def to_setting(self, parameter: Any) -> Any:
        """Return the setting for an Optuna parameter: the number, rounded to `_SIGNIFICANT_DIGITS` if not whole."""
        rounded = parameter if self.whole else float(f"{parameter:.{_SIGNIFICANT_DIGITS}g}")
        return min(self.high, max(self.low, rounded))

    def to_parameter(self, value: Any) -> Any:
        """Return the Optuna parameter for a setting, or `None` if the value is outside the range."""
        inside = isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high
        return value if inside else None


@dataclass(frozen=True)
class ValueList:
    """A list of values to choose from.

    The parameter of an Optuna trial is the text of a value (`to_label`), since Optuna cannot store lists.
    """

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"[{', '.join(map(to_label, self.values))}]"

    def extremes(self) -> list[Any]:
        """Return all values of the list, each of which must be valid in the configuration."""
        return list(self.values)

    def draw(self, trial: Trial, key: str) -> Any:
        """Let the sampler of a study draw a value for the setting `key`."""
        return self.to_setting(trial.suggest_categorical(key, list(map(to_label, self.values))))

    def to_setting(self, parameter: Any) -> Any:
        """Return the value whose text is the given Optuna parameter."""
        return next(value for value in self.values if to_label(value) == parameter)

    def to_parameter(self, value: Any) -> Any:
        """Return the Optuna parameter of a value, which is its text, or `None` if the value is not in the list."""
        return to_label(value) if to_label(value) in map(to_label, self.values) else None


_Dimension: TypeAlias = NumberRange | ValueList
Space: TypeAlias = Mapping[str, _Dimension]
"""The settings to tune: the range or list of values of each, by dotted key."""
SpaceLike: TypeAlias = Mapping[str, Any] | str | Path | None
"""A space as users give it: the path of a YAML file, or a mapping of keys (dotted or nested by section) to texts such
as `log:1e-4..1e-2` or lists; `None`: not given."""


def to_label(value: Any) -> str:
    """Return a value as text, in YAML syntax."""
    return value if isinstance(value, str) else json.dumps(value)


def resolve_space(given: SpaceLike, options: Mapping[str, Any], config: Config, phase: Kind, folder: Path) -> Space:
    """Return the space to tune, from the first of these sources that exists.

    1. `given` (a file or a mapping) and `options`, if either is given; for a key in both, the values in `options` count
    2. `space.yaml` in `folder`, which an earlier call has written
    3. the default of the phase; see `default_space`

    Raises `ParnasError` with all errors of the space at once.
    """
    if given is None and not options:
        earlier = folder / SPACE
        wanted = read_file(earlier) if earlier.is_file() else default_space(config, phase)
    elif isinstance(given, Mapping):
        wanted = _by_dotted_key(given)
    else:
        wanted = {} if given is None else read_file(Path(given))
    return read_space({**wanted, **options}, config, phase)


def read_file(path: Path) -> dict[str, Any]:
    """Read a space from a YAML file: the text or list of each setting, by dotted key, not checked yet.

    Raises `ParnasError` if there is no such file, or if it does not hold settings.
    """
    if not path.is_file():
        raise ParnasError(f"There is no file {path}; give one with lines such as 'train.lr: log:1e-4..1e-2'.")
    tree = read_yaml(read_text(path, MAX_BYTES), str(path))
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ParnasError(f"{path} holds no settings; it should have lines such as 'train.lr: log:1e-4..1e-2'.")
    return _by_dotted_key(tree)


def _by_dotted_key(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of `tree` by dotted key; the keys of `tree` may be dotted or nested by section."""
    return dict(each for each in read_overrides(tree) if isinstance(each, tuple))


def read_options(options: Sequence[str]) -> dict[str, Any]:
    """Return the text VALUES of each option `--set KEY=VALUES`, by KEY.

    Raises `ParnasError` with all options that have another form.
    """
    if wrong := [option for option in options if not re.match(r"[^=]+=.", option)]:
        listed = ", ".join(f"{option!r:.60}" for option in wrong)
        raise ParnasError(
            f"--set {listed} is not KEY=VALUES; give KEY=LOW..HIGH, KEY=log:LOW..HIGH or KEY=VALUE,VALUE."
        )
    return {key: text for key, _, text in (option.partition("=") for option in options)}


def read_space(wanted: Mapping[str, Any], config: Config, phase: Kind) -> Space:
    """Convert a space from text and lists to ranges and lists of values, and check it.

    `wanted` holds the text or list of each setting by dotted key. Raises `ParnasError` with all errors at once.
    """
    space: dict[str, _Dimension] = {}
    errors: list[str] = []
    for key, values in wanted.items():
        if reason := _why_untunable(key, phase):
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
        raise ParnasError(
            "There is no setting to tune; give --set KEY=VALUES, or leave out --space for the default settings."
        )
    return space


def _why_untunable(key: str, phase: Kind) -> str | None:
    """Return why the setting `key` can never be tuned, as text to print after the key; `None` if it can be tuned."""
    reasons = {
        _TOKEN_SETTINGS: "changes the tokens, so that losses per token are not comparable; leave it out",
        _IRRELEVANT_SETTINGS: "does not change the trained weights; leave it out",
        OTHER_PHASE_SETTINGS[phase]: f"has no effect on {phase}; leave it out, or give the other --phase",
        ("search.cost.target", "search.cost.spend"): "limits the cost of the network, and the highest limit would "
        "always be best; set it in the configuration",
        ("train.steps", "search.steps"): "decides how long is trained, and the longest training would always be best; "
        "set it in the configuration",
    }
    for sections, reason in reasons.items():
        if any(f"{key}.".startswith(f"{section}.") for section in sections):
            return reason
    return None


def _read_dimension(key: str, values: Any) -> _Dimension:
    """Convert `LOW..HIGH`, `log:LOW..HIGH`, `VALUE,VALUE` or a list to a range or a list of values.

    Raises `ParnasError` for another form or fewer than two different values; the message is printed after the key.
    """
    if isinstance(values, str):
        if match := _RANGE.fullmatch(values.strip()):
            return _read_range(values, bool(match[1]), float(match[2]), float(match[3]), key)
        if values.startswith("log:"):
            raise ParnasError(f"is {values!r:.60}; give log:LOW..HIGH with two numbers")
        values = read_yaml(f"[{values}]", "the list")
    listed = values if isinstance(values, list | tuple) else [values]
    distinct = {to_label(value): value for value in (as_configured(key, value) for value in listed)}
    if len(distinct) < 2:
        count = "one value" if distinct else "no value"
        raise ParnasError(f"has {count}, but needs two; give LOW..HIGH, log:LOW..HIGH or VALUE,VALUE")
    return ValueList(tuple(distinct.values()))


def _read_range(text: str, log: bool, low: float, high: float, key: str) -> NumberRange:
    """Return a range of numbers, of integers if the setting is an integer and both ends are whole.

    `text` is the range as it was given, for messages. Raises `ParnasError` unless low < high, and 0 < low if `log`.
    """
    if not -math.inf < low < high < math.inf:
        raise ParnasError(f"is {text!r:.60}; the first number must be less than the second")
    if log and low <= 0:
        raise ParnasError(f"is {text!r:.60}; a logarithmic range needs numbers above 0")
    types = _value_types(key)
    if int in types and float not in types and low.is_integer() and high.is_integer():
        return NumberRange(int(low), int(high), log, whole=True)
    return NumberRange(low, high, log)


def _value_types(key: str) -> set[Any]:
    """Return the types that the values of the setting `key` may have; empty for an unknown setting."""
    field = dict(walk_fields()).get(key)
    return set() if field is None else {field.annotation, *get_args(field.annotation)}


def as_configured(key: str, value: Any) -> Any:
    """Return a value in the form in which the configuration stores it, so that equal values have equal texts.

    An integer becomes a float if the setting is a float, and a named architecture becomes its layer string.
    """
    if isinstance(value, int) and not isinstance(value, bool) and float in _value_types(key):
        return float(value)
    if key == "model.arch" and isinstance(value, str):
        with suppress(ParnasError):  # an invalid architecture is reported by the configuration
            return str(Architecture.parse(value))
    return value


def _check_space(space: Space, config: Config) -> Iterator[str]:
    """Yield the configuration errors of each end of a range and each value of a list that no trial could use.

    A trial could use a value if it is valid with the other settings as configured, or with one of several random draws
    of the other tuned settings.
    """
    for key, dimension in space.items():
        for value in dimension.extremes():
            errors = _errors_with(config, {key: value})
            if errors and not _valid_with_others(key, value, space, config):
                yield from errors


def _valid_with_others(key: str, value: Any, space: Space, config: Config) -> bool:
    """Return whether a value of the setting `key` is valid with at least one random draw of the other settings."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)  # Optuna would log each study that is created
    study = optuna.create_study(sampler=RandomSampler(seed=0))
    others = {other: dimension for other, dimension in space.items() if other != key}
    trials = (study.ask() for _ in range(_COMBINATIONS if others else 0))
    drawn = ({other: dimension.draw(trial, other) for other, dimension in others.items()} for trial in trials)
    return any(not _errors_with(config, {**settings, key: value}) for settings in drawn)


def _errors_with(config: Config, settings: Mapping[str, Any]) -> list[str]:
    """Return the errors of the configuration after replacing settings, given by dotted key; empty if it is valid."""
    try:
        configure(config, settings)
    except ParnasError as error:
        return list(error.errors)
    return []


def configure(config: Config, settings: Mapping[str, Any]) -> Config:
    """Return the configuration after replacing settings, given by dotted key; raise `ParnasError` if it is invalid."""
    return check_config(config.model_dump(), "The configuration of the trial", list(settings.items()))


def describe_space(space: Space) -> dict[str, str | list[Any]]:
    """Convert a space back to the form that `read_space` reads: the text of each range and each list, by dotted key."""
    return {key: list(each.values) if isinstance(each, ValueList) else str(each) for key, each in space.items()}


def dump_space(space: Space) -> str:
    """Return a space as the content of a YAML file that `read_file` reads."""
    return to_yaml(json.loads(json.dumps(describe_space(space))))


def default_space(config: Config, phase: Kind) -> dict[str, Any]:
    """Return the space to tune by default, in the form that `read_space` reads.

    For a retraining: the learning rate around the configured value, dropout and weight decay. For a search: the
    learning rates of weights and alpha around the configured values, the temperature tau, and the weight of the cost
    penalty if there is a cost target. With the estimator `uniform` the penalty is not tuned: derivation meets the cost
    target without a penalty, which would flatten pi (`SearchConfig.cost_weight`).
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
    """Return the text of a logarithmic range from a fifth of a value to five times the value."""
    return f"log:{value / 5:.3g}..{value * 5:.3g}"
