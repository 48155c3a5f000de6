"""Fuzzing of corpora, through all of `prepare`, with each kind of tokenizer.

A corpus is refused by a `ParnasError`, or what is counted and decoded equals what a slow and obvious reader finds.
"""

from pathlib import Path

import pytest
from helpers.data_helpers import ODD_TEXTS, english
from helpers.fuzz_helpers import Cases, cases
from hypothesis import given, settings
from hypothesis import strategies as st

from parnas.config.schema import DataConfig, TokenizerConfig
from parnas.data.streams import TokenStreams, prepare
from parnas.data.text import LONGEST_LINE

pytestmark = [pytest.mark.slow, pytest.mark.no_cover]  # the other tests cover what these read
__all__ = ["cases"]

SPLITS = ("train", "valid", "test")
odd_texts = st.sampled_from([text.encode() for text in ODD_TEXTS])
contents = st.one_of(
    st.text(max_size=60).map(str.encode),
    st.lists(
        st.sampled_from(["a", "b b", "The", "<unk>", "\n", "\n", " ", "\t", "é", "\u2028", "\x85", "▁"]), max_size=40
    )
    .map(" ".join)
    .map(str.encode),
    st.lists(odd_texts, min_size=1, max_size=4).map(b"".join),
    st.integers(0, 99).map(lambda seed: english(8, seed).encode()),
    st.integers(0, 99).map(lambda seed: english(8, seed).replace("\n", "\r\n").encode()),
    st.integers(0, 99).map(lambda seed: b"\xef\xbb\xbf" + english(4, seed).rstrip().encode()),
    st.binary(max_size=60),
    st.sampled_from(
        [
            b"",
            b"\n",
            b"\n" * 50,
            b" ",
            b" \n \n",
            b"word",
            b"word\n",
            b"w\0rd\n",
            b"\xff\xfe",
            b"\r" * 9,
            b"x" * 100_000,
        ]
    ),
    st.sampled_from(["a line\n" * 4, "日本語\n" * 9]).map(lambda text: text.encode("utf-16")),
    st.sampled_from([b"x" * LONGEST_LINE, b"ab " * LONGEST_LINE, "é".encode() * LONGEST_LINE + b"\nend"]),
)


@pytest.fixture(autouse=True)
def _without_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("parnas.runs.files.flush_to_disk", lambda path: None)
    monkeypatch.setenv("PARNAS_CACHE", str(tmp_path / "cache"))


def readable(parts: list[bytes]) -> bool:
    """Whether all parts are texts that hold something."""
    try:
        return all(part and b"\0" not in part and part.decode("utf-8") for part in parts)
    except UnicodeDecodeError:
        return False


def write_folder(folder: Path, parts: list[bytes]) -> Path:
    """A corpus of three files."""
    folder.mkdir(exist_ok=True)
    for split, part in zip(SPLITS, parts, strict=True):
        (folder / f"{split}.txt").write_bytes(part)
    return folder


def check_counts(streams: TokenStreams, parts: list[bytes]) -> None:
    """Compare all counts of the header with the texts', and the order of ids with their frequencies."""
    for split, part in zip(SPLITS, parts, strict=True):
        counts, text, tokens = streams.header.splits[split], part.decode(), streams.tokens(split)
        assert counts.bytes == len(part)
        assert counts.words == len(text.split())
        assert counts.lines == part.count(b"\n") + (not part.endswith(b"\n"))
        assert counts.line_ends == part.count(b"\n") == (tokens == streams.tokenizer.eos_id).sum()
        assert counts.tokens == len(tokens)
        assert tokens.max() < streams.tokenizer.vocab_size
    frequencies = streams.train_counts().tolist()
    assert frequencies == sorted(frequencies, reverse=True)
    assert sum(frequencies) == streams.header.splits["train"].tokens


def test_corpora_in_bytes_are_decoded_to_the_same_bytes_or_refused(cases: Cases, tmp_path: Path) -> None:
    @settings(max_examples=150)
    @given(st.lists(contents, min_size=3, max_size=3))
    def check(parts: list[bytes]) -> None:
        config = DataConfig(
            corpus=str(write_folder(tmp_path / "corpus", parts)), tokenizer=TokenizerConfig(kind="byte")
        )
        streams = cases.attempt(lambda: prepare(config))
        assert (streams is not None) == (readable(parts) and all(len(part) >= 2 for part in parts))
        if streams is not None:
            check_counts(streams, parts)
            for split, part in zip(SPLITS, parts, strict=True):
                assert streams.tokenizer.decode(streams.tokens(split).tolist()) == part.decode()

    check()


def test_corpora_in_words_are_decoded_to_the_same_words_or_refused(cases: Cases, tmp_path: Path) -> None:
    @settings(max_examples=150)
    @given(st.lists(contents, min_size=3, max_size=3), st.booleans(), st.none() | st.integers(2, 9))
    def check(parts: list[bytes], lowercase: bool, vocab_size: int | None) -> None:
        settings = TokenizerConfig(kind="word", lowercase=lowercase, vocab_size=vocab_size)
        config = DataConfig(corpus=str(write_folder(tmp_path / "corpus", parts)), tokenizer=settings)
        streams = cases.attempt(lambda: prepare(config))
        if streams is None:
            assert (
                vocab_size
                or not readable(parts)
                or min(len(part.decode().split()) + part.count(b"\n") for part in parts) < 2
            )
            return
        assert readable(parts)
        check_counts(streams, parts)
        cut = any(len(line) > LONGEST_LINE for part in parts for line in part.decode().split("\n"))
        train = parts[0].decode()
        known = set((train.lower() if lowercase else train).split())
        for split, part in zip(SPLITS, parts, strict=True) if not cut and vocab_size is None else ():
            text = part.decode().lower() if lowercase else part.decode()
            lines = [[word if word in known else "<unk>" for word in line.split()] for line in text.split("\n")]
            decoded = streams.tokenizer.decode(streams.tokens(split).tolist())
            assert decoded == "\n".join(map(" ".join, lines))
            unknown = sum(word not in known and word != "<unk>" for word in text.split())
            assert streams.header.splits[split].unknown == unknown

    check()


def test_corpora_in_pieces_are_decoded_to_the_same_text_or_refused(cases: Cases, tmp_path: Path) -> None:
    @settings(max_examples=20)
    @given(
        st.lists(contents, min_size=3, max_size=3),
        st.booleans(),
        st.booleans(),
        st.sampled_from(["unigram", "bpe"]),
        st.integers(300, 330),
        st.lists(st.sampled_from(["<eos>", "▁", "a b", "\n", "", "<unk>", "日本", "<0x41>"]), max_size=2),
    )
    def check(parts, padded, byte_fallback, model_type, size, symbols) -> None:
        if padded:  # enough text for so many pieces
            parts[0] += english(60).encode()
        settings = TokenizerConfig(
            vocab_size=size if byte_fallback else size - 250,
            byte_fallback=byte_fallback,
            model_type=model_type,
            user_symbols=tuple(symbols),
        )
        config = DataConfig(corpus=str(write_folder(tmp_path / "corpus", parts)), tokenizer=settings)
        streams = cases.attempt(lambda: prepare(config))
        if streams is None:
            return
        assert readable(parts)
        check_counts(streams, parts)
        for split, part in zip(SPLITS, parts, strict=True) if byte_fallback else ():
            assert streams.tokenizer.decode(streams.tokens(split).tolist()) == part.decode()

    check()


def test_a_single_text_is_cut_at_line_ends_into_three_or_refused(cases: Cases, tmp_path: Path) -> None:
    path = tmp_path / "text.txt"

    @settings(max_examples=150)
    @given(st.lists(contents, max_size=6).map(b"".join))
    def check(text: bytes) -> None:
        path.write_bytes(text)
        streams = cases.attempt(lambda: prepare(DataConfig(corpus=str(path), tokenizer=TokenizerConfig(kind="byte"))))
        if streams is None:
            ends = text.count(b"\n") + (not text.endswith(b"\n"))
            assert not readable([text]) or ends < 3 or b"\n\n" in b"\n" + text or len(text.split(b"\n")[-1]) == 1
            return
        decoded = [streams.tokenizer.decode(streams.tokens(split).tolist()) for split in SPLITS]
        assert "".join(decoded) == text.decode()
        assert all(part.endswith("\n") for part in decoded[:2])
        check_counts(streams, [part.encode() for part in decoded])

    check()
