"""Token streams: their contents against plain counts, several processes at once, and damaged files."""

import json
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from helpers.data_helpers import ODD_TEXTS, WIKITEXT_2, english, needs_wikitext_2, write_corpus

from parnas.config.schema import DataConfig, TokenizerConfig
from parnas.data import streams, text, tokenizers
from parnas.data.streams import TokenStreams, prepare
from parnas.errors import ParnasError

KINDS: list[dict[str, object]] = [
    {"kind": "word"},
    {"kind": "word", "vocab_size": 30, "lowercase": True},
    {"kind": "byte"},
    {"vocab_size": 320},
    {"vocab_size": 320, "model_type": "bpe", "lowercase": True},
    {"vocab_size": 60, "byte_fallback": False},
]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("PARNAS_DATA", raising=False)


def config(corpus: Path, **tokenizer: object) -> DataConfig:
    return DataConfig(corpus=str(corpus), tokenizer=TokenizerConfig.model_validate(tokenizer))


@pytest.mark.parametrize("kind", KINDS)
def test_the_stream_is_the_tokens_of_the_text(tmp_path: Path, kind: dict[str, object]) -> None:
    texts = {"train": english(300) + "<unk> A b\nopen end", "valid": english(30, 1) + "\n\n", "test": english(30, 2)}
    made = prepare(config(write_corpus(tmp_path / "mine", **texts), **kind))
    for split, source in texts.items():
        tokens = made.tokens(split)
        assert tokens.dtype == np.uint16
        assert tokens.tolist() == made.tokenizer.encode(source)
        counts = made.header.splits[split]
        assert counts.tokens == len(tokens)
        assert counts.words == len(source.split())
        assert counts.lines == len(source.splitlines())
        assert counts.line_ends == source.count("\n")
        assert counts.bytes == len(source.encode())
    assert made.header.vocab_size == made.tokenizer.vocab_size
    assert made.header.tokenizer["kind"] == kind.get("kind", "sentencepiece")
    counts_by_id = made.train_counts()
    assert counts_by_id.dtype == np.int64
    occurrences = Counter(made.tokens("train").tolist())
    assert counts_by_id.tolist() == [occurrences[number] for number in range(made.header.vocab_size)]
    assert counts_by_id.tolist() == sorted(counts_by_id.tolist(), reverse=True)


@pytest.mark.parametrize(
    "kind, valid, loses",
    [
        ({"kind": "word"}, "<unk> .\n", ()),
        ({"kind": "word"}, "neverseen .\n", ("unknown",)),
        ({"kind": "word", "lowercase": True}, "neverseen .\n", ("case", "unknown")),
        ({"kind": "byte"}, "é\n", ()),
        ({"kind": "byte", "lowercase": True}, "é\n", ("case",)),
        ({"vocab_size": 320}, "é <unk>\n", ()),
        ({"vocab_size": 320, "lowercase": True}, "é <unk>\n", ("case",)),
        ({"vocab_size": 60, "byte_fallback": False}, "<unk> .\n", ()),
        ({"vocab_size": 60, "byte_fallback": False}, "é <unk>\n", ("unknown",)),
    ],
)
def test_the_header_says_what_is_lost(
    tmp_path: Path, kind: dict[str, object], valid: str, loses: tuple[str, ...]
) -> None:
    train = english(300)
    made = prepare(config(write_corpus(tmp_path / "mine", train, valid, train), **kind))
    assert made.header.loses == loses
    assert made.header.splits["valid"].unknown == ("unknown" in loses)


@pytest.mark.parametrize("kind", [{"kind": "byte"}, {"vocab_size": 400}])
def test_nothing_is_lost_on_the_way_to_the_disk(tmp_path: Path, kind: dict[str, object]) -> None:
    odd = "".join(ODD_TEXTS).replace("\0", "")
    made = prepare(config(write_corpus(tmp_path / "mine", english(300) + odd, odd, odd), **kind))
    for split in ("valid", "test"):
        assert made.tokenizer.decode(made.tokens(split).tolist()) == odd


def test_small_blocks_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = config(write_corpus(tmp_path / "mine", english(2000)), kind="word")
    whole = prepare(corpus)
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path / "other"))
    monkeypatch.setattr(text.TextSlice.blocks, "__defaults__", (5_000,))
    cut = prepare(corpus)
    assert cut.header == whole.header
    assert cut.folder != whole.folder
    for split in whole.header.splits:
        assert (cut.folder / f"{split}.bin").read_bytes() == (whole.folder / f"{split}.bin").read_bytes()


def test_a_large_corpus_is_sampled_for_training_and_counted_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokenizers, "_SAMPLE_BYTES", 20_000)
    made = prepare(config(write_corpus(tmp_path / "mine", english(4000)), vocab_size=320))
    counts = made.train_counts().tolist()
    assert counts == sorted(counts, reverse=True)
    assert sum(counts) == made.header.splits["train"].tokens


def test_a_text_of_one_line_has_no_line_ends(tmp_path: Path) -> None:
    line = english(3000).replace("\n", " ")
    made = prepare(config(write_corpus(tmp_path / "mine", line, line, line), vocab_size=320))
    assert made.header.splits["train"].line_ends == 0
    assert made.header.splits["train"].lines == 1
    assert made.tokenizer.decode(made.tokens("train").tolist()) == line


def test_many_symbols_need_wider_numbers(tmp_path: Path) -> None:
    train = "".join(f"word{number}\n" for number in range(70_000))
    made = prepare(config(write_corpus(tmp_path / "mine", train, "word69999\n", "word1\n"), kind="word"))
    assert made.tokens("train").dtype == np.uint32
    assert made.tokenizer.decode(made.tokens("valid").tolist()) == "word69999\n"


# The cache


def test_a_stream_is_made_once_for_each_text_and_setting(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "mine")
    notes: list[str] = []
    first = prepare(config(corpus, kind="word"), notes.append)
    assert [note.split()[0] for note in notes] == ["training", "encoding", "encoding", "encoding"]
    again = prepare(config(corpus, kind="word"), notes.append)
    assert len(notes) == 4
    assert (again.folder, again.header) == (first.folder, first.header)
    assert prepare(config(corpus, kind="word", lowercase=True)).folder != first.folder
    assert prepare(config(write_corpus(corpus, valid="other\n"), kind="word")).folder != first.folder


def _truncate(folder: Path) -> None:
    os.truncate(folder / "train.bin", 10)


def _lose_split(folder: Path) -> None:
    (folder / "test.bin").unlink()


def _lose_tokenizer(folder: Path) -> None:
    (folder / "tokenizer" / "tokenizer.json").unlink()


def _garble_header(folder: Path) -> None:
    (folder / "header.json").write_text("{")


def _strip_header(folder: Path) -> None:
    (folder / "header.json").write_text(json.dumps({"splits": {}}))


@pytest.mark.parametrize("damage", [_truncate, _lose_split, _lose_tokenizer, _garble_header, _strip_header])
def test_a_damaged_stream_is_refused_and_made_anew(tmp_path: Path, damage: Callable[[Path], None]) -> None:
    corpus = config(write_corpus(tmp_path / "mine"), kind="word")
    first = prepare(corpus)
    tokens = first.tokens("train").tolist()
    damage(first.folder)
    with pytest.raises(ParnasError):
        TokenStreams.open(first.folder)
    again = prepare(corpus)
    assert again.tokens("train").tolist() == tokens
    assert again.header == first.header


def _prepare_and_report(corpus: Path, barrier: object, queue: object) -> None:
    barrier.wait()
    notes: list[str] = []
    made = prepare(config(corpus, vocab_size=320), notes.append)
    queue.put((made.tokens("train").tolist(), any("training" in note for note in notes)))


def test_two_processes_may_start_at_once(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "mine")
    spawn = multiprocessing.get_context("spawn")
    barrier, queue = spawn.Barrier(2), spawn.Queue()
    processes = [spawn.Process(target=_prepare_and_report, args=(corpus, barrier, queue)) for _ in range(2)]
    for process in processes:
        process.start()
    results = [queue.get(timeout=60) for _ in processes]
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert results[0][0] == results[1][0]
    assert sorted(made for _, made in results) == [False, True]
    assert len([path for path in (tmp_path / "cache" / "streams").iterdir() if path.is_dir()]) == 1


def test_a_failure_leaves_nothing_behind(tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match="vocab_size"):
        prepare(config(write_corpus(tmp_path / "mine", english(5)), vocab_size=30_000))
    assert not [path for path in (tmp_path / "cache" / "streams").iterdir() if path.is_dir()]


def test_a_full_disk_is_a_clear_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(streams, "encode_file", full)
    with pytest.raises(ParnasError, match="PARNAS_CACHE"):
        prepare(config(write_corpus(tmp_path / "mine"), kind="word"))
    assert not [path for path in (tmp_path / "cache" / "streams").iterdir() if path.is_dir()]


def test_a_split_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParnasError, match=r"valid .* 1 .* 2\b"):
        prepare(config(write_corpus(tmp_path / "mine", valid="\n"), kind="word"))


@needs_wikitext_2
def test_the_real_wikitext_2_has_the_published_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PARNAS_DATA", str(WIKITEXT_2.parent))
    header = prepare(DataConfig(corpus="wikitext-2", tokenizer=TokenizerConfig(kind="word"))).header
    assert (header.corpus, header.vocab_size, header.loses) == ("wikitext-2", 33_278, ())
    counted = [(counts.lines, counts.words, counts.tokens) for counts in header.splits.values()]
    assert counted == [(36_718, 2_051_910, 2_088_628), (3_760, 213_886, 217_646), (4_358, 241_211, 245_569)]
    assert header.splits["valid"].bytes == 1_121_681
