"""What was once read wrongly, or not refused: each test is named after it."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from parnas.architecture import Architecture
from parnas.config.loader import Config, check_config, load_config
from parnas.config.yaml_file import MAX_BYTES, read_text, read_yaml, to_yaml
from parnas.data.corpora import find_corpus
from parnas.data.streams import StreamHeader
from parnas.data.text import TextSlice
from parnas.data.tokenizers import TokenizerConfig, load_tokenizer, train_tokenizer
from parnas.errors import ParnasError
from parnas.nas.cost import costs_of_run, read_costs
from parnas.runs.files import MAX_JSON_BYTES, from_json, read_json
from parnas.runs.run import METRICS, PI, Run, read_derivation
from parnas.training.progress import Silent
from parnas.training.session import resolve_paths


def complaint(make: Callable[[], object]) -> str:
    """The text of the `ParnasError` that a call must raise; no more than a terminal can show."""
    with pytest.raises(ParnasError) as caught:
        make()
    assert len(str(caught.value)) < 60_000
    return str(caught.value)


# YAML


def test_aliases_and_merge_keys_are_refused() -> None:
    message = complaint(lambda: read_yaml("data: &a {tgt_len: 8}\nevaluation: *a", "text"))
    assert "alias *a is not supported" in message
    assert "line 2" in message
    assert "alias *a" in complaint(lambda: read_yaml("a: &a {b: [*a]}", "text"))
    assert "alias *a" in complaint(lambda: read_yaml("a: &a {k: 1}\nb: {<<: *a}", "text"))
    assert "text is not valid YAML" in complaint(lambda: read_yaml("b: {<<: {k: 1}}", "text"))
    shared = [1]
    assert read_yaml(to_yaml({"a": shared, "b": shared}), "text") == {"a": (1,), "b": (1,)}


def test_a_key_that_is_given_twice_is_refused_with_its_line() -> None:
    message = complaint(lambda: read_yaml("a: {k: 1}\nb: {k: 2, k: 3}", "text"))
    assert "'k' is given twice" in message
    assert "line 2" in message


@pytest.mark.parametrize("value", ["!!int ''", "!!float ''", "!!bool x", "!!timestamp x", "!!int x"])
def test_tags_that_do_not_fit_are_no_valid_yaml(value: str) -> None:
    assert "text is not valid YAML" in complaint(lambda: read_yaml(f"a: {value}", "text"))


def test_values_are_counted_before_anything_is_made_of_them() -> None:
    assert "more than 100,000 values" in complaint(lambda: read_yaml(f"[{'x, ' * 100_000}]", "text"))
    assert "more than 100,000 values" in complaint(lambda: read_yaml(f"[{'x' * 10**5}, {'y, ' * 99_000}]", "text"))
    assert len(read_yaml(f"[{'x, ' * 99_999}]", "text")) == 99_999


def test_line_ends_of_all_kinds_survive_a_round_trip() -> None:
    for text in ("a\x85b", "\u2028", "a\u2029", "a\r\nb", "\r", "\x0b", "\x1c", "a\n"):
        assert read_yaml(to_yaml({"key": text}), "text") == {"key": text}


def test_files_that_are_too_large_or_no_files_are_not_read(tmp_path: Path) -> None:
    for name, most in (("large.yaml", MAX_BYTES), ("large.json", MAX_JSON_BYTES)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(most + 1)
    assert "is larger than" in complaint(lambda: load_config(tmp_path / "large.yaml"))
    assert "is larger than" in complaint(lambda: read_json(tmp_path / "large.json"))
    assert "/dev/zero is not a regular file" in complaint(lambda: read_text(Path("/dev/zero"), 9))
    assert "is not a regular file" in complaint(lambda: read_json(tmp_path))


# Configurations


def test_an_override_does_not_show_in_another_section_that_was_given_as_the_same_object() -> None:
    section = {"tgt_len": 8}
    config = check_config({"data": section, "evaluation": section}, "tree", ["data.tgt_len=16"])
    assert (config.data.tgt_len, config.evaluation.tgt_len) == (16, 8)


def test_the_tree_that_is_checked_stays_as_it_is() -> None:
    tree = {"model": {"d_model": 64, "wrong": 1}}
    complaint(lambda: check_config(tree, "tree", ["model.n_heads=2"]))
    assert tree == {"model": {"d_model": 64, "wrong": 1}}


@pytest.mark.parametrize("key", ["train.steps", "search.steps", "model.d_model"])
def test_numbers_beyond_64_bits_are_refused(key: str) -> None:
    assert f"{key} is " in complaint(lambda: check_config({}, "tree", [f"{key}={10**400}"]))


def test_of_very_many_mistakes_the_first_are_told_and_the_others_counted() -> None:
    text = complaint(lambda: check_config({f"key{number}": 1 for number in range(5000)}, "tree"))
    assert "tree has 5000 error(s)" in text
    assert text.endswith("and 4900 more")
    assert len(complaint(lambda: check_config({"x" * 10**6: 1}, "tree"))) < 1000


def test_a_block_has_a_hundred_candidates_at_most() -> None:
    many = tuple(f"s:heads={number}" for number in range(1, 102))
    assert "101 candidates" in complaint(lambda: check_config({"search": {"space": many}}, "tree"))
    assert "101 candidates" in complaint(lambda: check_config({"search": {"space": (many,), "blocks": 1}}, "tree"))
    assert len(check_config({"search": {"space": many[1:]}}, "tree").search.candidates) == 100


def test_very_many_cutoffs_are_checked_without_powers() -> None:
    tree = {"model": {"cutoffs": tuple(range(1, 50_000)), "div_val": 2**62}}
    assert "leaves a cluster without width" in complaint(lambda: check_config(tree, "tree"))
    model = Config().replace(model__cutoffs=(10, 20, 30), model__div_val=2, model__d_model=100).model
    assert model.embedding_dims() == [100, 50, 25, 12]


def test_an_architecture_of_a_file_may_be_no_string_and_messages_stay_short() -> None:
    for value in (3, None, ["s", "f"], {"s": 1}):
        assert "not a string" in complaint(lambda value=value: Architecture.parse(value))
    assert len(complaint(lambda: Architecture.parse("random" + "-1" * 40_000))) < 400
    assert len(complaint(lambda: Architecture.parse("i*1000").canonical())) < 400


# JSON


def test_json_that_is_invalid_or_beyond_what_anybody_can_use_is_refused() -> None:
    for text in ("[" * 100_000, '"\\ud800"', '{"\\uDFFF": 1}', "9" * 5000, b'"\xff"', "[1,]", ""):
        with pytest.raises(ValueError, match=r".+"):
            from_json(text)
    assert from_json('[null, -18446744073709551615, "\\ud83d\\ude00"]') == [None, 1 - 2**64, "😀"]
    assert repr(from_json("[NaN, -Infinity, 1e999]")) == "[nan, -inf, inf]"


@pytest.mark.parametrize("number", ["1e999", "9" * 400, "NaN"])
def test_numbers_beyond_floats_are_refused_in_records(number: str, tmp_path: Path) -> None:
    (tmp_path / PI).write_text(f'{{"step": 1, "tau": {number}, "pi": [[1.0]]}}\n{{"step": 2}}\n')
    assert "line 1, has no valid tau" in complaint(Run(tmp_path).pi_records)
    (tmp_path / PI).write_text(f'{{"step": 1, "tau": 1.0, "pi": [[{number}]]}}\n{{"step": 2}}\n')
    assert "line 1, has no valid pi" in complaint(Run(tmp_path).pi_records)


def test_lines_of_json_may_hold_characters_that_end_lines_and_a_line_torn_within_a_character(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.append(METRICS, {"step": 1, "text": "a\u2028b\x85c"})
    run.append(METRICS, {"step": 2, "text": "é"})
    path = tmp_path / METRICS
    path.write_bytes(path.read_bytes().removesuffix(b'\xa9"}\n'))
    assert run.raw_lines(METRICS) == [{"step": 1, "text": "a\u2028b\x85c"}]
    run.truncate_after(1)
    assert run.raw_lines(METRICS) == [{"step": 1, "text": "a\u2028b\x85c"}]


@pytest.mark.parametrize("step", ["true", "-1", "1.0", str(2**63), "null"])
def test_a_step_is_a_whole_number_that_numpy_can_hold(step: str, tmp_path: Path) -> None:
    (tmp_path / METRICS).write_text(f'{{"step": {step}}}\n{{"step": 2}}\n')
    assert "step at line 1" in complaint(lambda: Run(tmp_path).raw_lines(METRICS))


def test_json_files_of_a_run_that_are_no_objects_are_refused(tmp_path: Path) -> None:
    for name, read in (("environment.json", Run.environment), ("summary.json", Run.summary)):
        (tmp_path / name).write_text('[["kind", "search"]]')
        assert f"{name} holds no JSON object" in complaint(lambda read=read: read(Run(tmp_path)))


def test_an_arch_yaml_whose_string_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "arch.yaml").write_text("arch: sfz\n")
    assert f"{tmp_path / 'arch.yaml'}: Unknown layer letter" in complaint(
        lambda: read_derivation(tmp_path / "arch.yaml")
    )


@pytest.mark.parametrize(
    "change",
    [
        {"vocab_size": "34"},
        {"vocab_size": -1},
        {"dtype": "O"},
        {"loses": "case"},
        {"corpus": 3},
        {"more": 1},
        {"splits": {}},
    ],
)
def test_headers_of_streams_hold_what_they_should(change: dict[str, object], search_run: Run, tmp_path: Path) -> None:
    header = json.loads((search_run.folder / "streams.json").read_text())
    path = tmp_path / "streams.json"
    path.write_text(json.dumps(header))
    assert StreamHeader.read(path).vocab_size == header["vocab_size"]
    path.write_text(json.dumps(header | change))
    assert f"{path} has no valid" in complaint(lambda: StreamHeader.read(path))


@pytest.mark.parametrize(
    ("per_layer", "interleaved"),
    [({"s": 1, "f": -1}, 2), ({"s": None, "f": 1}, 2), ({"s": 1, "f": 1}, 0), ({"s": 1}, 2)],
)
def test_costs_that_are_none_are_refused(per_layer: dict[str, float], interleaved: float, tmp_path: Path) -> None:
    (tmp_path / "costs.json").write_text(
        json.dumps({"metric": "macs", "per_layer": per_layer, "interleaved": interleaved})
    )
    config = Config().replace(search__cost__metric="macs")
    assert "costs.json h" in complaint(lambda: costs_of_run(tmp_path, config, "macs", Silent()))
    if "f" in per_layer:
        complaint(lambda: read_costs(tmp_path))


# Text


def test_a_home_that_nobody_has_is_no_corpus() -> None:
    config = Config().replace(data__corpus="~nobody-of-that-name/text")
    assert "names an unknown user" in complaint(lambda: find_corpus(config.data.corpus))
    assert "names an unknown user" in complaint(lambda: resolve_paths(config))


@pytest.mark.parametrize(
    "pieces", [[-1] * 300, [0.5] * 300, list(range(1, 301)), [0] * 300, 300, [10**18] * 300, [[0]] * 300]
)
def test_numbers_of_pieces_are_those_below_their_count_in_some_order(
    pieces: object, corpus: Path, tmp_path: Path
) -> None:
    config = TokenizerConfig(vocab_size=300)
    train_tokenizer(config, TextSlice.whole(corpus / "train.txt")).save(tmp_path)
    assert load_tokenizer(tmp_path).vocab_size == 300
    settings = json.loads((tmp_path / "tokenizer.json").read_text())
    settings["pieces"] = pieces
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    assert "is broken" in complaint(lambda: load_tokenizer(tmp_path))


def test_a_model_of_sentencepiece_that_is_none_is_refused(corpus: Path, tmp_path: Path) -> None:
    train_tokenizer(TokenizerConfig(vocab_size=300), TextSlice.whole(corpus / "train.txt")).save(tmp_path)
    model = (tmp_path / "sentencepiece.model").read_bytes()
    for content in (b"", b"x", model[:100], np.random.default_rng(0).bytes(5000)):
        (tmp_path / "sentencepiece.model").write_bytes(content)
        assert "is broken" in complaint(lambda: load_tokenizer(tmp_path))
