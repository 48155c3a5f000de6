"""Overrides of a configuration, and search spaces for all blocks or for each."""

import pytest
from helpers.config_helpers import complaints, load

from parnas.cli.common import split_configuration
from parnas.config.loader import Config, check_config, dump_config, load_config
from parnas.config.yaml_file import read_yaml
from parnas.errors import ParnasError

__all__ = ["complaints", "load"]


# Overrides


def test_overrides_from_python_may_hold_lists():
    config = load_config("demo", [("model.cutoffs", [100, 1000]), ("search.space", [["s", "f"]] * 6)])
    assert config.model.cutoffs == (100, 1000)
    assert config.search.space == (("s", "f"),) * 6


def test_overrides_go_before_the_file(load):
    config = load("model: {d_model: 64}", "model.d_model=256", "search.space=[s, f]", "data.tokenizer.kind=byte")
    assert (config.model.d_model, config.search.space, config.data.tokenizer.kind) == (256, ("s", "f"), "byte")
    assert load("", "data.corpus=a=b").data.corpus == "a=b"
    assert load("", "data.corpus=1e5.txt").data.corpus == "1e5.txt"
    assert load("model: {d_head: 8}", "model.d_head=null").model.d_head is None


@pytest.mark.parametrize(
    "override, complaint",
    [
        ("model.d_model", "'model.d_model' is not of the form section.key=value"),
        ("=4", "'=4' is not of the form section.key=value"),
        ("model.d_modle=4", "model.d_modle is no known key; did you mean model.d_model?"),
        ("model.d_model.x=4", "'model.d_model.x=4': d_model is not a section"),
        ("model.d_model=4.5", "model.d_model is 4.5; it should be a valid integer"),
    ],
)
def test_overrides_with_a_mistake(complaints, override, complaint):
    assert complaints("model: {d_model: 8}", override)[0].startswith(complaint)


def test_an_override_may_be_longer_than_any_file_name():
    spaces = f"search.space={[['s', 'f', 'i']] * 40}"
    assert split_configuration(["demo", spaces]) == ("demo", [spaces])


def test_an_override_that_is_no_yaml_is_named(load):
    with pytest.raises(ParnasError, match=r"model\.arch"):
        load("", "model.arch=[s")


def test_replace_gives_a_checked_copy():
    config = Config()
    assert config.replace(model__d_model=64).model.d_model == 64
    assert config.model.d_model == 128
    with pytest.raises(ParnasError, match=r"model\.n_heads"):
        config.replace(model__d_model=63)
    with pytest.raises(ValueError, match="frozen"):
        config.model.d_model = 64


# Candidates of blocks


def test_candidates_are_those_of_all_blocks_in_order(load):
    search = load("search: {blocks: 3, space: [[f, s:heads=2], [i], [s, f]]}").search
    assert search.candidates == ("f", "s:heads=2", "i", "s")
    assert search.block_spaces == (("f", "s:heads=2"), ("i",), ("s", "f"))
    shared = load("search: {blocks: 2, space: [s, 's:d_head=16,heads=02']}").search
    assert shared.block_spaces == (("s", "s:heads=2,d_head=16"),) * 2
    assert shared.candidates == ("s", "s:heads=2,d_head=16")


@pytest.mark.parametrize("space", ["[[s, f], [f]]", "[s, 's:heads=2,d_head=4']"])
def test_spaces_survive_a_round_trip(load, space):
    config = load("search: {blocks: 2, space: " + space + "}")
    assert check_config(read_yaml(dump_config(config), "dump"), "dump") == config


def test_a_space_of_names_and_lists_is_refused(complaints):
    assert all(line.startswith("search.space is ") for line in complaints("search: {blocks: 2, space: [[s, f], s]}"))
