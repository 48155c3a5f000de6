"""Word lists: a word tokenizer with given ids, its cache, its copy in a run, and what is refused."""

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from conftest import small_config
from helpers.data_helpers import english, write_corpus

from parnas.config.loader import check_config
from parnas.config.schema import DataConfig, TokenizerConfig
from parnas.data.streams import TokenStreams, prepare
from parnas.data.token_frequencies import estimate_token_counts
from parnas.data.vocabulary import describe_tokenizer, read_vocabulary
from parnas.errors import ParnasError
from parnas.runs.run import Run
from parnas.training.progress import Silent
from parnas.training.retrain import retrain
from parnas.training.session import check_same_results

WORDS = ["<eos>", "the", "boat", "<unk>", "Ada"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path / "cache"))


def write_words(path: Path, words: list[str]) -> str:
    path.write_bytes("".join(f"{word}\n" for word in words).encode())
    return str(path)


def made(corpus: Path, words: str, **more: object) -> TokenStreams:
    tokenizer = TokenizerConfig.model_validate({"kind": "word", "vocabulary": words, **more})
    return prepare(DataConfig(corpus=str(corpus), tokenizer=tokenizer))


def test_ids_are_the_places_in_the_list(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text", "Ada mends the boat\n\nthe <unk> boat .\n")
    streams = made(corpus, write_words(tmp_path / "words.txt", WORDS))
    assert streams.tokens("train").tolist() == [4, 3, 1, 2, 0, 0, 1, 3, 2, 3, 0]
    assert streams.header.splits["train"].unknown == 2, "the word <unk> of the text has its own id"
    assert (streams.tokenizer.vocab_size, streams.tokenizer.eos_id, streams.tokenizer.unknown_id) == (5, 0, 3)
    assert streams.tokenizer.decode([4, 2, 0, 1]) == "Ada boat\nthe"
    assert streams.train_counts().tolist() == [3, 2, 2, 3, 1]


def test_case_is_folded_in_the_text_alone(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text", "Ada mends The boat\n")
    streams = made(corpus, write_words(tmp_path / "words.txt", [*WORDS, "ada"]), lowercase=True)
    assert streams.tokens("train").tolist() == [5, 3, 1, 2, 0]


def test_a_list_without_a_last_line_end_is_the_same(tmp_path: Path) -> None:
    (tmp_path / "words.txt").write_text("\n".join(WORDS), encoding="utf-8")
    assert read_vocabulary(str(tmp_path / "words.txt")) == ["\n", *WORDS[1:]]


def test_words_identify_the_cache_and_their_path_does_not(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text")
    first = made(corpus, write_words(tmp_path / "words.txt", WORDS))
    assert made(corpus, write_words(tmp_path / "again.txt", WORDS)).folder == first.folder
    assert str(tmp_path) not in json.dumps(first.header.tokenizer)
    other = made(corpus, write_words(tmp_path / "words.txt", [*WORDS[:-1], "lobster"]))
    assert other.folder != first.folder
    assert other.header != first.header
    reordered = made(corpus, write_words(tmp_path / "words.txt", WORDS[::-1]))
    assert len({first.folder, other.folder, reordered.folder}) == 3


def test_without_a_list_nothing_changes_in_the_header() -> None:
    assert "vocabulary" not in describe_tokenizer(TokenizerConfig(kind="word"))


def test_the_tokenizer_of_a_run_is_a_list(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text")
    own = prepare(DataConfig(corpus=str(corpus), tokenizer=TokenizerConfig(kind="word")))
    again = made(corpus, str(own.folder / "tokenizer" / "tokenizer.json"))
    assert again.tokens("valid").tolist() == own.tokens("valid").tolist()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"<eos>\n<unk>\nboat\nboat\n", "the word 'boat' twice"),
        (b"<eos>\nboat\n", "lacks '<unk>'"),
        (b"boat\n", "lacks '<eos>' and '<unk>'"),
        (b"<eos>\n<unk>\na boat\n", "line 3 has not"),
        (b"<eos>\n\n<unk>\n", "line 2 has not"),
        (b"<eos> 12\n<unk> 7\n", "line 1 has not"),
        (b"<eos>\n<unk>\n\xff\n", "not a text in UTF-8"),
        (pickle.dumps(["<eos>", "<unk>"]), "vocab.idx2sym"),
        (None, "vocab.idx2sym"),
    ],
)
def test_other_files_are_one_message(content: bytes | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "words.txt"
    if content is None:
        torch.save({"sym2idx": {}}, path)
    else:
        path.write_bytes(content)
    with pytest.raises(ParnasError, match=message):
        read_vocabulary(str(path))


def test_a_file_that_is_missing_or_not_of_words_is_refused(tmp_path: Path) -> None:
    for name in (str(tmp_path / "words.txt"), str(tmp_path), "/dev/zero"):
        with pytest.raises(ParnasError, match="which is no file"):
            read_vocabulary(name)
    for content in ({"kind": "byte", "bytes": [10]}, [], {"symbols": [1]}):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        with pytest.raises(ParnasError, match="holds no words"):
            read_vocabulary(str(tmp_path / "tokenizer.json"))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kind": "sentencepiece"}, "set data.tokenizer.kind: word"),
        ({"kind": "word", "vocab_size": 10}, "the word list of vocabulary decides it"),
    ],
)
def test_a_list_belongs_to_a_word_tokenizer(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ParnasError, match=message):
        check_config({"data": {"tokenizer": {"vocabulary": "words.txt", **settings}}}, "the test")


def test_a_plan_knows_the_size_from_the_list(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PARNAS_DATA", raising=False)
    words = write_words(tmp_path / "words.txt", WORDS)
    config = DataConfig(corpus="wikitext-103", tokenizer=TokenizerConfig(kind="word", vocabulary=words))
    assert len(estimate_token_counts(config).counts) == len(WORDS)


def test_a_run_keeps_its_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It needs the list no more, can be moved, and is not changed by another list at the same place."""
    corpus = write_corpus(tmp_path / "text", english(300))
    monkeypatch.chdir(tmp_path)
    words = write_words(tmp_path / "words.txt", ["<eos>", "<unk>", *sorted(set(english(300).split()))])
    config = small_config(
        corpus, model__arch="f", train__steps=2, data__tokenizer__vocabulary="words.txt", train__save_every=1
    )
    run = retrain(config, Path("run"), Silent())
    check_same_results(run, config)
    shutil.move("run", "moved")
    moved = Run("moved")
    own = moved.config()
    assert own.data.tokenizer.vocabulary == str(tmp_path / "moved" / "tokenizer" / "tokenizer.json")
    Path(words).rename("elsewhere.txt")
    check_same_results(moved, config.replace(data__tokenizer__vocabulary="elsewhere.txt"))
    assert prepare(own.data).header.tokenizer == describe_tokenizer(own.data.tokenizer)
    # A longer training resumes with the same words at another place, and refuses others.
    longer = own.replace(train__steps=3)
    retrain(longer.replace(data__tokenizer__vocabulary="elsewhere.txt"), moved.folder, Silent())
    assert moved.summary().steps == 3
    write_words(tmp_path / "words.txt", WORDS)
    for other in (config, config.replace(data__tokenizer__vocabulary=None)):
        with pytest.raises(ParnasError, match="another word list"):
            check_same_results(moved, other.replace(train__steps=3))
        with pytest.raises(ParnasError, match=r"the word list of data\.tokenizer"):
            retrain(other.replace(train__steps=4), moved.folder, Silent())
