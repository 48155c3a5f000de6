"""What is tuned: ranges and choices of settings, as text and in a file, checked against the configuration."""

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
from parnas.config import Config, check_config, walk_fields
from parnas.errors import ParnasError
from parnas.files import read_text
from parnas.inputs import read_overrides
from parnas.run import OF_THE_OTHER_PHASE
from parnas.yaml_text import MAX_BYTES, read_yaml, to_yaml

Phase = Literal["retrain", "search"]
NUMBER = r"[-+]?(?:\d+(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d+)?"
RANGE = re.compile(rf"(log:)?\s*({NUMBER})\s*\.\.\s*({NUMBER})")
DIGITS = 4  # that count in a number that is drawn, so that configurations can be read
TRIED = 50  # values of the other settings with which one that is refused may yet be right

# Settings that no trial may change, and why.
OTHER_TOKENS = ("data.corpus", "data.tokenizer")  # and what is below them
NO_EFFECT = ("evaluation", "runtime", "train.log_every", "train.eval_every", "train.save_every")


@dataclass(frozen=True)
class Numbers:
    """All numbers from `low` to `high`, by their logarithm where `log` is set; whole ones alone where `whole` is."""

    low: float
    high: float
    log: bool = False
    whole: bool = False

    def __str__(self) -> str:
        return f"{'log:' * self.log}{self.low:.12g}..{self.high:.12g}"

    def ends(self) -> list[Any]:
        """What the configuration must allow."""
        return [self.low, self.high]

    def draw(self, source: random.Random) -> Any:
        """Any of them."""
        if self.whole:
            return source.randint(int(self.low), int(self.high))
        if self.log:
            return self.read(math.exp(source.uniform(math.log(self.low), math.log(self.high))))
        return self.read(source.uniform(self.low, self.high))

    def read(self, drawn: Any) -> Any:
        """The setting that a drawn number stands for."""
        return drawn if self.whole else min(self.high, max(self.low, float(f"{drawn:.{DIGITS}g}")))

    def find(self, value: Any) -> Any:
        """What stands for a setting, none where it is not among them."""
        fits = isinstance(value, int | float) and not isinstance(value, bool) and self.low <= value <= self.high
        return value if fits else None


@dataclass(frozen=True)
class Choices:
    """Some values, each named by a text."""

    values: tuple[Any, ...]

    def __str__(self) -> str:
        return f"[{', '.join(self.labels())}]"

    def labels(self) -> list[str]:
        """The texts, in order."""
        return list(map(to_label, self.values))

    def ends(self) -> list[Any]:
        """What the configuration must allow."""
        return list(self.values)

    def draw(self, source: random.Random) -> Any:
        """Any of them."""
        return source.choice(self.values)

    def read(self, drawn: Any) -> Any:
        """The setting that a text stands for."""
        return self.values[self.labels().index(drawn)]

    def find(self, value: Any) -> Any:
        """What stands for a setting, none where it is not among them."""
        return to_label(value) if to_label(value) in self.labels() else None


Dimension: TypeAlias = Numbers | Choices
Space: TypeAlias = Mapping[str, Dimension]
"""What each setting may be, by dotted key."""
SpaceLike: TypeAlias = Mapping[str, Any] | str | Path | None
"""A YAML file, or texts such as `log:1e-4..1e-2` and lists by dotted key, nested or not."""


def to_label(value: Any) -> str:
    """A text for a value, as YAML would have it."""
    return value if isinstance(value, str) else json.dumps(value)


def read_file(path: Path) -> dict[str, Any]:
    """What a YAML file says is to be tuned, by dotted key."""
    if not path.is_file():
        raise ParnasError(f"There is no file {path}; give one with lines such as 'train.lr: log:1e-4..1e-2'.")
    tree = read_yaml(read_text(path, MAX_BYTES), str(path))
    if not isinstance(tree, dict) or not all(isinstance(key, str) for key in tree):
        raise ParnasError(f"{path} holds no settings; it should have lines such as 'train.lr: log:1e-4..1e-2'.")
    return read_mapping(tree)


def read_mapping(tree: Mapping[str, Any]) -> dict[str, Any]:
    """Texts and lists by dotted key, of keys that may be nested by section."""
    return dict(each for each in read_overrides(tree) if isinstance(each, tuple))


def read_options(options: Sequence[str]) -> dict[str, Any]:
    """What `--set KEY=VALUES` says is to be tuned; raises `ParnasError` with all that have no such form."""
    if wrong := [option for option in options if not re.match(r"[^=]+=.", option)]:
        listed = ", ".join(f"{option!r:.60}" for option in wrong)
        raise ParnasError(f"--set {listed}: give KEY=LOW..HIGH, KEY=log:LOW..HIGH or KEY=VALUE,VALUE.")
    return {key: text for key, _, text in (option.partition("=") for option in options)}


def read_space(wanted: Mapping[str, Any], config: Config, phase: Phase) -> Space:
    """Ranges and choices, checked; raises `ParnasError` with all mistakes at once, those of the configuration too."""
    space: dict[str, Dimension] = {}
    found: list[str] = []
    for key, values in wanted.items():
        if problem := unfit(key, phase):
            found.append(f"{key:.80} {problem}")
            continue
        try:
            space[key] = read_dimension(key, values)
        except ParnasError as error:
            found.append(f"{key:.80} {error}")
    found += check_space(space, config)
    if found:
        lines = "\n".join(f"  - {line}" for line in dict.fromkeys(found))
        raise ParnasError(f"What is to be tuned has {len(dict.fromkeys(found))} mistake(s):\n{lines}")
    if not space:
        raise ParnasError("Nothing is to be tuned; give --set KEY=VALUES, or leave out --space for the usual settings.")
    return space


def unfit(key: str, phase: Phase) -> str | None:
    """Why a setting cannot be tuned whatever its values; none where it can."""

    def below(*keys: str) -> bool:
        return any(key == each or key.startswith(f"{each}.") for each in keys)

    if below(*OTHER_TOKENS):
        return "changes the tokens, so that losses per token would not compare; leave it out"
    if below(*NO_EFFECT):
        return "does not belong to what is learnt; leave it out"
    if below(*OF_THE_OTHER_PHASE[phase]):
        return f"has no effect on {phase}; leave it out, or give the other --phase"
    if key == "search.cost.target":
        return "decides how large the network may be, so that the largest would win; leave it out, and set it"
    if key in ("train.steps", "search.steps"):
        return "decides how long is trained, so that the longest would win; leave it out, and set it"
    return None


def read_dimension(key: str, values: Any) -> Dimension:
    """What a setting may be, by `LOW..HIGH`, `log:LOW..HIGH`, `VALUE,VALUE` or a list; raises `ParnasError`."""
    if isinstance(values, str):
        if found := RANGE.fullmatch(values.strip()):
            return read_numbers(values, bool(found[1]), found[2], found[3], is_whole(key))
        if values.startswith("log:"):
            raise ParnasError(f"is {values!r:.60}; give log:LOW..HIGH with two numbers")
        values = read_yaml(f"[{values}]", "the list")
    several = tuple(values) if isinstance(values, list | tuple) else (values,)
    several = tuple({to_label(value): value for value in (as_configured(key, value) for value in several)}.values())
    if len(several) < 2:
        raise ParnasError(f"has {'one value' if several else 'no value'}; give LOW..HIGH, log:LOW..HIGH or VALUE,VALUE")
    return Choices(several)


def read_numbers(text: str, log: bool, low: str, high: str, whole: bool) -> Numbers:
    """A range; its ends are whole where the setting is a whole number and they are too."""
    ends = [float(end) for end in (low, high)]
    if not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise ParnasError(f"is {text!r:.60}; the first number must be less than the second")
    if log and ends[0] <= 0:
        raise ParnasError(f"is {text!r:.60}; a logarithm wants numbers above 0")
    if whole and all(end.is_integer() for end in ends):
        return Numbers(int(ends[0]), int(ends[1]), log, whole=True)
    return Numbers(ends[0], ends[1], log)


def is_whole(key: str) -> bool:
    """Whether a setting takes whole numbers alone."""
    kinds = kinds_of(key)
    return int in kinds and float not in kinds


def kinds_of(key: str) -> set[Any]:
    """The types of a setting's values; none for an unknown one."""
    kinds = {name: {field.annotation, *get_args(field.annotation)} for name, field in walk_fields()}
    return kinds.get(key, set())


def as_configured(key: str, value: Any) -> Any:
    """A value as the configuration has it, so that equal ones are told to be: 0.0 for 0, one string for a network."""
    if isinstance(value, int) and not isinstance(value, bool) and float in kinds_of(key):
        return float(value)
    if key == "model.arch" and isinstance(value, str):
        with suppress(ParnasError):  # which the configuration tells of
            return str(Architecture.parse(value))
    return value


def check_space(space: Space, config: Config) -> Iterator[str]:
    """What the configuration refuses of the ends of ranges and of choices, whatever the other settings are."""
    for key, dimension in space.items():
        for value in dimension.ends():
            mistakes = refused(config, {key: value})
            if mistakes and not goes_with_others(key, value, space, config):
                yield from mistakes


def goes_with_others(key: str, value: Any, space: Space, config: Config) -> bool:
    """Whether a value is right with some values of the other settings, since it is not with those of the file."""
    source = random.Random(0)
    others = {other: dimension for other, dimension in space.items() if other != key}
    drawn = ({other: dimension.draw(source) for other, dimension in others.items()} for _ in range(TRIED))
    return bool(others) and any(not refused(config, {**settings, key: value}) for settings in drawn)


def refused(config: Config, settings: Mapping[str, Any]) -> list[str]:
    """What the configuration has against settings by dotted key; empty where it takes them."""
    try:
        configure(config, settings)
    except ParnasError as error:
        return list(error.mistakes)
    return []


def configure(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with settings by dotted key; raises `ParnasError` where they do not fit."""
    return check_config(config.model_dump(), "The configuration of the trial", list(settings.items()))


def describe_space(space: Space) -> dict[str, str | list[Any]]:
    """As `read_space` reads it, by dotted key: the text of a range, the list of choices."""
    return {key: list(each.values) if isinstance(each, Choices) else str(each) for key, each in space.items()}


def dump_space(space: Space) -> str:
    """The content of a file that `read_file` reads."""
    return to_yaml(json.loads(json.dumps(describe_space(space))))


def default_space(config: Config, phase: Phase) -> dict[str, Any]:
    """What is tuned where nothing is said: learning rates around the configured ones, and what holds weights back.

    For a search the temperature too, and the weight of the cost where there is one: with estimator uniform derive keeps
    to the target by itself, and a penalty would only make pi say less (`SearchConfig.cost_weight`).
    """
    if phase == "retrain":
        return {
            "train.lr": around(config.train.lr),
            "model.dropout": "0..0.5",
            "model.attention_dropout": "0..0.3",
            "train.weight_decay": "log:1e-3..0.3" if config.train.weight_decay else "0..0.3",
        }
    search, uniform = config.search, config.search.estimator == "uniform"
    space: dict[str, Any] = {
        "search.lr": around(search.lr),
        "search.alpha_lr": around(search.alpha_lr),
        "search.tau_start": "0.3..1" if uniform else "log:0.5..5",
        "search.tau_end": "log:0.01..0.3",
        "search.tau_schedule": ["exponential", "linear", "cosine"],
    }
    if search.cost.target is not None and not uniform:
        space["search.cost.weight"] = "log:0.3..10"
    return space


def around(value: float) -> str:
    """From a fifth to five times a value."""
    return f"log:{value / 5:.3g}..{value * 5:.3g}"
