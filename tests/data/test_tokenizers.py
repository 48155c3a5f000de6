"""Tokenizers: lossless decoding, ids sorted by frequency, and the vocabulary sizes of the literature."""

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
from helpers.data_helpers import ODD_TEXTS, english
from hypothesis import given
from hypothesis import strategies as st

from parnas.config.schema import TokenizerConfig
from parnas.data.text import TextSlice, split_lines
from parnas.data.tokenizers import PieceTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from parnas.errors import ParnasError

TEXT = english(400) + "a <unk> of @-@ text ▁ é 日本 <unk> BA KE\n"
SETTINGS = {
    "unigram": {"vocab_size": 350},
    "bpe": {"vocab_size": 350, "model_type": "bpe"},
    "unigram lowercase": {"vocab_size": 350, "lowercase": True},
    "no byte fallback": {"vocab_size": 100, "byte_fallback": False},
    "word": {"kind": "word"},
    "some words": {"kind": "word", "vocab_size": 50},
    "byte": {"kind": "byte"},
    "byte lowercase": {"kind": "byte", "lowercase": True},
}


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tokenizer]:
    text = as_file(tmp_path_factory.mktemp("text"), TEXT)
    odd = as_file(tmp_path_factory.mktemp("odd"), "".join(ODD_TEXTS))
    return {
        name: train_sorted(TokenizerConfig.model_validate(settings), text, [odd]) for name, settings in SETTINGS.items()
    }


def train_sorted(config: TokenizerConfig, train: TextSlice, held_out: Iterable[TextSlice] = ()) -> Tokenizer:
    """Train a tokenizer, and sort pieces as the token streams do."""
    tokenizer = train_tokenizer(config, train, held_out)
    if isinstance(tokenizer, PieceTokenizer):
        ids = np.concatenate([tokenizer.encode_block(block).ids for block in train.blocks()])
        tokenizer, _ = tokenizer.sorted_by(np.bincount(ids, minlength=tokenizer.vocab_size))
    return tokenizer


def as_file(folder: Path, text: str) -> TextSlice:
    (folder / "text.txt").write_bytes(text.encode())
    return TextSlice.whole(folder / "text.txt")


@pytest.mark.parametrize("name", SETTINGS)
def test_ids_are_sorted_by_frequency_in_the_training_text(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    counts = Counter(tokenizer.encode(TEXT))
    by_id = [counts[number] for number in range(tokenizer.vocab_size)]
    assert by_id == sorted(by_id, reverse=True)
    assert max(counts) < tokenizer.vocab_size
    assert by_id[0] > 20


@pytest.mark.parametrize("name", SETTINGS)
def test_training_again_gives_the_same(tokenizers: dict[str, Tokenizer], name: str, tmp_path: Path) -> None:
    again = train_sorted(
        TokenizerConfig.model_validate(SETTINGS[name]), as_file(tmp_path, TEXT), [as_file(tmp_path, TEXT)]
    )
    assert again.encode(TEXT) == tokenizers[name].encode(TEXT)


@pytest.mark.parametrize("name", SETTINGS)
def test_a_saved_tokenizer_is_the_same(tokenizers: dict[str, Tokenizer], name: str, tmp_path: Path) -> None:
    tokenizer = tokenizers[name]
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    for attribute in ("vocab_size", "eos_id", "unknown_id", "folds_case", "kind"):
        assert getattr(loaded, attribute) == getattr(tokenizer, attribute)
    assert loaded.encode(TEXT) == tokenizer.encode(TEXT)
    assert {path.suffix for path in tmp_path.iterdir()} <= {".json", ".model"}


@pytest.mark.parametrize("name", ["unigram", "bpe", "byte"])
@pytest.mark.parametrize("text", ODD_TEXTS)
def test_what_keeps_all_gives_all_back(tokenizers: dict[str, Tokenizer], name: str, text: str) -> None:
    tokenizer = tokenizers[name]
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_block(text.encode()).ids.tolist() == tokenizer.encode(text)
    assert tokenizer.unknown_id is None


@given(text=st.text())
def test_bpe_gives_any_unicode_back(tokenizers: dict[str, Tokenizer], text: str) -> None:
    assert tokenizers["bpe"].decode(tokenizers["bpe"].encode(text)) == text


@pytest.mark.parametrize("name", SETTINGS)
def test_a_line_end_is_one_eos_and_an_open_line_has_none(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    line = tokenizer.encode("ba ke")
    assert tokenizer.eos_id not in line
    assert tokenizer.encode("ba ke\n\nba ke\n") == [*line, tokenizer.eos_id, tokenizer.eos_id, *line, tokenizer.eos_id]
    assert tokenizer.decode([tokenizer.eos_id]) == "\n"
    assert tokenizer.decode(tokenizer.encode("ba ke\n\nba ke\n")) == "ba ke\n\nba ke\n"


@pytest.mark.parametrize("name", ["unigram", "bpe", "unigram lowercase", "no byte fallback"])
def test_a_symbol_is_one_piece_wherever_it_stands(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    assert len(tokenizer.encode("<unk>")) == 1
    assert len(tokenizer.encode("ba <unk> ba")) == len(tokenizer.encode("ba ba")) + 1
    assert tokenizer.decode(tokenizer.encode("<unk> ba<unk>")) == "<unk> ba<unk>"
    assert tokenizer.encode_text("<unk> <unk>\n").unknown == 0


def test_user_symbols_stay_whole(tmp_path: Path) -> None:
    config = TokenizerConfig(vocab_size=350, user_symbols=("@-@", "[SEP]"), lowercase=True)
    tokenizer = train_tokenizer(config, as_file(tmp_path, TEXT))
    assert [len(tokenizer.encode(text)) for text in ("@-@", "[SEP]", "@-@[SEP]")] == [1, 1, 2]
    assert tokenizer.decode(tokenizer.encode("BA [SEP] Ke")) == "ba [SEP] ke"


def test_spaces_at_the_ends_of_lines_teach_no_pieces(tokenizers: dict[str, Tokenizer], tmp_path: Path) -> None:
    spaced = TEXT.replace("\n", " \n")
    tokenizer = train_tokenizer(TokenizerConfig.model_validate(SETTINGS["unigram"]), as_file(tmp_path, spaced))
    assert sorted(tokenizer.spellings()) == sorted(tokenizers["unigram"].spellings())
    assert tokenizer.decode(tokenizer.encode(spaced)) == spaced


@pytest.mark.parametrize("name", SETTINGS)
def test_folding_case_is_declared(tokenizers: dict[str, Tokenizer], name: str) -> None:
    tokenizer = tokenizers[name]
    assert (tokenizer.encode("BA KE") == tokenizer.encode("ba ke")) == tokenizer.folds_case
    assert tokenizer.folds_case == ("lowercase" in name)


def test_unknown_is_counted_but_a_literal_unk_is_not(tokenizers: dict[str, Tokenizer]) -> None:
    words, pieces = tokenizers["some words"], tokenizers["no byte fallback"]
    encoded = words.encode_text("qqqq <unk> qqqq\n")
    assert encoded.unknown == 2
    assert encoded.ids.tolist() == [words.unknown_id] * 3 + [words.eos_id]
    encoded = pieces.encode_text("ba \U0001f389 <unk>\n")
    assert encoded.unknown == 1 == encoded.ids.tolist().count(pieces.unknown_id)


def test_word_vocabulary_is_all_words_or_the_most_frequent(tmp_path: Path) -> None:
    text = as_file(tmp_path, "b b b a a <unk> <unk> c d\nb a\n")
    everything = train_tokenizer(TokenizerConfig(kind="word"), text)
    assert everything.decode(range(6)) == "b a\n<unk> c d"
    few = train_tokenizer(TokenizerConfig(kind="word", vocab_size=4), text)
    # c and d make <unk> 4 tokens, as many as b.
    assert few.decode(range(4)) == "<unk> b a\n"


def test_a_word_spelt_as_eos_is_no_line_end(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind="word"), as_file(tmp_path, "a <eos> b\n"))
    assert tokenizer.encode("a <eos>\n").count(tokenizer.eos_id) == 1


def test_byte_vocabulary_is_the_bytes_of_all_splits_and_the_newline(tmp_path: Path) -> None:
    (tmp_path / "held").mkdir()
    train, held_out = as_file(tmp_path, "aab"), as_file(tmp_path / "held", "éa")
    tokenizer = train_tokenizer(TokenizerConfig(kind="byte"), train, [held_out])
    assert tokenizer.encode("ab\n") == [0, 1, 2]
    assert tokenizer.vocab_size == 5
    with pytest.raises(ParnasError, match="0x7A"):
        tokenizer.encode("z")


@pytest.mark.parametrize("kind", [{}, {"model_type": "bpe"}, {"byte_fallback": False}, {"kind": "word"}])
def test_a_vocabulary_too_large_names_the_largest_possible(tmp_path: Path, kind: dict[str, object]) -> None:
    text = as_file(tmp_path, english(5))
    with pytest.raises(ParnasError, match=r"at most [\d,]+") as raised:
        train_tokenizer(TokenizerConfig.model_validate({"vocab_size": 12_000, **kind}), text)
    largest = int(str(raised.value).partition("at most ")[2].split(";")[0].replace(",", ""))
    fits = train_tokenizer(TokenizerConfig.model_validate({"vocab_size": largest, **kind}), text)
    assert fits.vocab_size == largest


@pytest.mark.parametrize("vocab_size, text", [(350, "\n\n"), (4, english(30))])
def test_text_that_sentencepiece_cannot_use(tmp_path: Path, vocab_size: int, text: str) -> None:
    config = TokenizerConfig(vocab_size=vocab_size, byte_fallback=vocab_size > 300)
    with pytest.raises(ParnasError, match="vocab_size"):
        train_tokenizer(config, as_file(tmp_path, text))


def test_training_says_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    train_tokenizer(TokenizerConfig(vocab_size=350), as_file(tmp_path, TEXT))
    captured = capfd.readouterr()
    assert captured.out == captured.err == ""


def _drop_model(folder: Path) -> None:
    (folder / "sentencepiece.model").unlink()


def _garble_model(folder: Path) -> None:
    (folder / "sentencepiece.model").write_bytes(b"no model")


def _edit(key: str, value: object) -> object:
    def damage(folder: Path) -> None:
        settings = json.loads((folder / "tokenizer.json").read_text())
        (folder / "tokenizer.json").write_text(json.dumps({**settings, key: value}))

    return damage


@pytest.mark.parametrize(
    "damage", [_drop_model, _garble_model, _edit("pieces", [0, 1]), _edit("kind", "what"), _edit("pieces", None)]
)
def test_a_broken_saved_tokenizer_is_an_error(tokenizers: dict[str, Tokenizer], tmp_path: Path, damage) -> None:
    tokenizers["bpe"].save(tmp_path)
    damage(tmp_path)
    with pytest.raises(ParnasError, match="broken"):
        load_tokenizer(tmp_path)


def test_a_long_line_is_encoded_as_if_it_were_whole(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch
) -> None:
    line = english(20_000).replace("\n", " ")
    assert max(map(len, split_lines(line))) < len(line) / 5
    encoded = {name: tokenizers[name].encode(line) for name in ("word", "byte", "unigram", "unigram lowercase")}
    for module in ("text", "tokenizers"):
        monkeypatch.setattr(f"parnas.data.{module}.LONGEST_LINE", len(line) + 1)
    for name, ids in encoded.items():
        assert tokenizers[name].encode(line) == ids
        assert tokenizers[name].eos_id not in ids
