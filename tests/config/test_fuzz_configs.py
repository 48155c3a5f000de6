"""Fuzzing of configurations: valid ones come back as they were, others are refused by a `ParnasError`."""

import pytest
from helpers.fuzz_helpers import Cases, cases, damage, expressions, mutate, plain, scalars, values
from hypothesis import given, settings
from hypothesis import strategies as st

from parnas.config.loader import Config, check_config, dump_config, walk_fields
from parnas.config.yaml_file import read_yaml, to_yaml

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # the other tests cover what these read
__all__ = ["cases"]

DEFAULT = Config().model_dump(mode="json")
KEYS = [key for key, _ in walk_fields()]


def test_valid_configurations_survive_a_round_trip(cases: Cases) -> None:
    paths = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
    values_by_key = {
        "data__corpus": paths,
        "data__tokenizer__user_symbols": st.lists(paths).map(tuple),
        "train__steps": st.integers(1, 2**63 - 1),
        "train__lr": st.floats(min_value=1e-300, max_value=1e300),
        "model__d_inner": st.integers(1, 999_999),
        "model__d_head": st.none() | st.integers(1, 99),
        "model__cutoffs": st.lists(st.integers(1, 10**6), max_size=3, unique=True).map(sorted).map(tuple),
        "model__arch": st.none() | expressions(depth=1).map(lambda pair: pair[0]),
        "model__tie_weights": st.booleans(),
        "search__space": st.permutations("sfic").map(tuple),
        "search__cost__table": paths,
    }

    @settings(max_examples=150)
    @given(st.fixed_dictionaries(values_by_key))
    def check(changes) -> None:
        config = cases.attempt(lambda: Config().replace(**changes))
        if config is not None:
            assert read_back(config) == config

    check()


def read_back(config: Config) -> Config:
    """Return the configuration that is read from the YAML text of another one."""
    return check_config(read_yaml(dump_config(config), "the dump"), "the dump")


def test_mutated_configurations_are_read_as_themselves_or_refused(cases: Cases) -> None:
    @settings(max_examples=300)
    @given(st.randoms(use_true_random=False), st.lists(values, min_size=1, max_size=3))
    def check(draw, given_values) -> None:
        tree = DEFAULT
        for value in given_values:
            tree = mutate(tree, draw, as_numbers(value))
        if isinstance(tree, dict):
            text = to_yaml(tree)
            config = cases.attempt(lambda: check_config(dict(read_yaml(text, "the text") or {}), "the text"))
            if config is not None:
                assert read_back(config) == config

    check()


def as_numbers(value: object) -> object:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) else value


def test_mutated_text_of_a_configuration_is_read_or_refused(cases: Cases) -> None:
    text = dump_config(Config()).encode()

    @settings(max_examples=200)
    @given(st.randoms(use_true_random=False))
    def check(draw) -> None:
        wrong = damage(text, draw).decode("utf-8", errors="replace")

        def load() -> Config:
            tree = read_yaml(wrong, "the text")
            return check_config(tree if isinstance(tree, dict) else {}, "the text")

        config = cases.attempt(load)
        if config is not None:
            assert read_back(config) == config

    check()


def test_overrides_set_what_they_name_or_are_refused(cases: Cases) -> None:
    wrong = st.sampled_from(["", ".", "model.", ".model", "model..d_model", "a.b.c", "model.d_modle"])

    @settings(max_examples=400)
    @given(st.sampled_from(KEYS) | wrong | st.text("model.d_", max_size=10), scalars)
    def check(key: str, value: object) -> None:
        text = str(value) if isinstance(value, int | str) else to_yaml(value).removesuffix("...\n").strip()
        config = cases.attempt(lambda: check_config({}, "the command line", [f"{key}={text}"]))
        if config is not None:
            found, named = found_at(config, key), plain(read_yaml(text, "the value"))
            # An integer beyond 2^53 may be no float: a setting of that type holds the nearest one.
            assert found == (float(named) if isinstance(found, float) and isinstance(named, int) else named)

    check()


def found_at(config: Config, key: str) -> object:
    """The value of a dotted key."""
    value: object = config
    for part in key.split("."):
        value = getattr(value, part)
    return value


def test_configurations_with_very_many_mistakes_are_refused_soon(cases: Cases) -> None:
    many = {f"key{number}": number for number in range(2_000)}
    trees = [
        many,
        {"model": many, "data": many},
        {"search": {"space": tuple(f"s:heads={n}" for n in range(1, 20_000)), "blocks": 1000}},
        {"search": {"space": ("x",) * 20_000, "blocks": 1000}},
        {"search": {"space": (("s", 3),) * 10_000}},
        {"model": {"cutoffs": tuple(range(1, 20_000)), "div_val": 2**62}},
        {"model": {"cutoffs": ("x",) * 20_000}},
        {"data": {"tokenizer": {"user_symbols": (3,) * 20_000}}},
        {"x" * 1_000_000: 1},
        {"model": {"x" * 1_000_000: {"y": 1}}},
        {1: 2, None: 3, (1, 2): 4, False: 5},
    ]
    for tree in trees:
        assert cases.attempt(lambda tree=tree: check_config(tree, "the tree")) is None
