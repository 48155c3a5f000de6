"""Token streams: the token ids of a corpus, encoded once, stored in the cache and memory-mapped.

The folder of a corpus and a tokenizer, `<cache>/streams/<key>/`, contains `header.json`, `train.bin`, `valid.bin`,
`test.bin` (raw little-endian ids) and `tokenizer/`.
"""

import hashlib
import json
from collections import Counter, deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from parnas.config.schema import DataConfig
from parnas.data.cache import Note, cache_dir, locked, silent
from parnas.data.corpora import Corpus, find_corpus
from parnas.data.datasets import SPLITS
from parnas.data.text import TextSlice, count_words
from parnas.data.tokenizers import PieceTokenizer, Tokenizer, load_tokenizer, train_tokenizer
from parnas.data.vocabulary import describe_tokenizer
from parnas.errors import ParnasError
from parnas.runs.files import atomic_folder, read_json, write_json
from parnas.runs.records import Record

__all__ = ["SplitCounts", "StreamHeader", "TokenStreams", "Tokens", "prepare"]

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
_Count = Annotated[int, Field(ge=0, strict=True)]
_SplitName = Annotated[str, Field(pattern=f"^({'|'.join(SPLITS)})$")]

_FORMAT = 3
"""Version of the files. Increase it if a change of the code gives other files for the same corpus and settings."""

_HEADER_FILE = "header.json"
_CHUNK = 1 << 22
"""Number of tokens that are counted or renumbered at once; numpy's copies of them take several times their memory."""

_THREADS = 4
"""Number of blocks encoded at the same time; with 2 instead of 4, encoding WikiText-2 takes a tenth longer."""


class SplitCounts(Record, extra="forbid"):
    """The size of a split: numbers of tokens, words, lines and bytes."""

    tokens: _Count
    words: _Count  # separated by whitespace, without line ends
    line_ends: _Count  # tokens `eos_id`
    lines: _Count  # lines of the text, a last one without a newline included
    bytes: _Count
    unknown: _Count  # tokens for words or characters outside the vocabulary


class StreamHeader(Record, extra="forbid"):
    """The content of `header.json`: the corpus and the tokenizer of token streams, and their sizes."""

    corpus: str
    fingerprint: str  # see `Corpus.fingerprint`
    tokenizer: dict[str, Any]  # settings of the tokenizer, see `describe_tokenizer`
    vocab_size: Annotated[int, Field(ge=1, lt=2**31, strict=True)]
    dtype: Literal["<u2", "<u4"]
    loses: tuple[str, ...]
    """Information that tokens lack: "case" if the text was lower-cased, "unknown" if a split has unknown tokens."""
    splits: Annotated[dict[_SplitName, SplitCounts], Field(min_length=3)]

    @classmethod
    def read(cls, path: Path) -> "StreamHeader":
        """Read a header from a JSON file; raise `ParnasError` if the file is missing or broken."""
        return cls.parse(read_json(path), str(path))


@dataclass(frozen=True)
class TokenStreams:
    """The token ids of a corpus's three splits, in files."""

    folder: Path
    header: StreamHeader
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> "TokenStreams":
        """Open the streams in a folder; raise `ParnasError` if one is missing, broken or of the wrong length."""
        header = StreamHeader.read(folder / _HEADER_FILE)
        for split, counts in header.splits.items():
            path = _tokens_file(folder, split)
            expected = counts.tokens * np.dtype(header.dtype).itemsize
            if not path.is_file() or path.stat().st_size != expected:
                raise ParnasError(f"{path} is not {expected:,} bytes long; delete {folder} to have it made again.")
        return cls(folder, header, load_tokenizer(folder / "tokenizer"))

    def tokens(self, split: str) -> Tokens:
        """Return the token ids of a split [N], memory-mapped and read-only."""
        return np.memmap(_tokens_file(self.folder, split), dtype=self.header.dtype, mode="r")

    def train_counts(self) -> NDArray[np.int64]:
        """Return the number of occurrences of each token id in the training split [V].

        The largest comes first, unless the tokenizer has a word list (`data.tokenizer.vocabulary`).
        """
        return _count_tokens(_tokens_file(self.folder, "train"), self.header.dtype, self.header.vocab_size)


def prepare(config: DataConfig, note: Note = silent) -> TokenStreams:
    """Return the token streams of a corpus from the cache; make them first if they are missing or damaged.

    Several processes may call this function at once: a lock lets one of them make the streams, and the others wait.

    Args:
        config: The corpus and the tokenizer.
        note: Function that displays a line of progress for each step that takes time.

    Raises:
        ParnasError: The corpus or the settings of the tokenizer are wrong, or the disk is full.
    """
    corpus = find_corpus(config.corpus, note)
    settings = describe_tokenizer(config.tokenizer)
    key = hashlib.sha256(json.dumps([_FORMAT, corpus.fingerprint, settings], sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir() / "streams" / key
    with locked(folder, note):
        try:
            return TokenStreams.open(folder)
        except ParnasError:
            with atomic_folder(folder) as unfinished:
                _make(unfinished, corpus, config, settings, note)
            return TokenStreams.open(folder)


def encode_file(text: TextSlice, tokenizer: Tokenizer, target: Path, dtype: str) -> SplitCounts:
    """Write the token ids of a text to the file `target` as raw `dtype`; return the split's counts."""
    totals: Counter[str] = Counter()
    with target.open("wb") as file:
        for block in _encode(text, tokenizer):
            file.write(block.ids.astype(dtype).data)
            totals.update(block.counts)
    return SplitCounts(**totals, lines=totals["line_ends"] + (not block.ends_line))


def _make(folder: Path, corpus: Corpus, config: DataConfig, settings: dict[str, Any], note: Note) -> None:
    """Train the tokenizer, encode the splits and write the header into an empty folder."""
    if config.tokenizer.vocabulary is None:
        note(f"training the {config.tokenizer.kind} tokenizer on {corpus.splits['train'].bytes:,} bytes")
    train, *held_out = (corpus.splits[split] for split in SPLITS)
    tokenizer = train_tokenizer(config.tokenizer, train, held_out)
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    dtype: Literal["<u2", "<u4"] = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    splits = {}
    for split in SPLITS:
        text = corpus.splits[split]
        note(f"encoding {split}: {text.bytes:,} bytes")
        splits[split] = encode_file(text, tokenizer, _tokens_file(folder, split), dtype)
        if splits[split].tokens < 2:
            raise ParnasError(
                f"The {split} split of {corpus.name} is too short: it has {splits[split].tokens} token(s), but needs "
                "at least 2. Give more text."
            )
    if isinstance(tokenizer, PieceTokenizer):
        tokenizer = _sort_by_frequency(folder, tokenizer, dtype)
    unknown = any(counts.unknown for counts in splits.values())
    loses = ("case",) * tokenizer.folds_case + ("unknown",) * unknown
    header = StreamHeader(
        corpus=corpus.name,
        fingerprint=corpus.fingerprint,
        tokenizer=settings,
        vocab_size=tokenizer.vocab_size,
        dtype=dtype,
        loses=loses,
        splits=splits,
    )
    write_json(folder / _HEADER_FILE, header.to_dict())


class _EncodedBlock(NamedTuple):
    """The token ids of a block of text, and the numbers of its tokens, words and bytes."""

    ids: NDArray[np.int32]
    counts: dict[str, int]  # the fields of `SplitCounts` except `lines`
    ends_line: bool


def _sort_by_frequency(folder: Path, tokenizer: PieceTokenizer, dtype: str) -> PieceTokenizer:
    """Renumber the tokens in the files of all splits by frequency, faster than encoding again; return the tokenizer."""
    counts = _count_tokens(_tokens_file(folder, "train"), dtype, tokenizer.vocab_size)
    tokenizer, new_ids = tokenizer.sorted_by(counts)
    for split in SPLITS:
        tokens = np.memmap(_tokens_file(folder, split), dtype, "r+")
        for start in range(0, len(tokens), _CHUNK):
            tokens[start : start + _CHUNK] = new_ids[tokens[start : start + _CHUNK]]
    tokenizer.save(folder / "tokenizer")
    return tokenizer


def _count_tokens(path: Path, dtype: str, vocab_size: int) -> NDArray[np.int64]:
    """Return the number of occurrences of each token id in a file [V]."""
    counts = np.zeros(vocab_size, np.int64)
    tokens = np.memmap(path, dtype, "r")
    for start in range(0, len(tokens), _CHUNK):
        counts += np.bincount(tokens[start : start + _CHUNK], minlength=vocab_size)
    return counts


def _encode_block(tokenizer: Tokenizer, block: bytes) -> _EncodedBlock:
    """Encode a block of text, and count its tokens, words and bytes."""
    ids, unknown = tokenizer.encode_block(block)
    counts = {
        "tokens": len(ids),
        "words": count_words(block),
        "line_ends": int(np.count_nonzero(ids == tokenizer.eos_id)),
        "bytes": len(block),
        "unknown": unknown,
    }
    return _EncodedBlock(ids, counts, block.endswith(b"\n"))


def _encode(text: TextSlice, tokenizer: Tokenizer) -> Iterator[_EncodedBlock]:
    """Yield the encoded blocks of a text in order.

    sentencepiece encodes a block in threads of its own; meanwhile the threads of this function prepare the next blocks
    and count the words of earlier ones. Only a few blocks are in memory at a time; `pool.map` would load all.
    """
    waiting: deque[Future[_EncodedBlock]] = deque()
    with ThreadPoolExecutor(_THREADS) as pool:
        for block in text.blocks():
            waiting.append(pool.submit(_encode_block, tokenizer, block))
            if len(waiting) == _THREADS + 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _tokens_file(folder: Path, split: str) -> Path:
    """Return the path of the file with the token ids of a split."""
    return folder / f"{split}.bin"
