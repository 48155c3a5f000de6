"""Token streams: a corpus as memory-mapped token ids, encoded once and kept in the cache.

The folder of a corpus and a tokenizer, `<cache>/streams/<key>/`, holds `header.json`, `train.bin`, `valid.bin`,
`test.bin` (raw little-endian ids) and `tokenizer/`.
"""

import hashlib
import json
import multiprocessing
import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, astuple, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, TypeAdapter

from parnas.config.schema import DataConfig
from parnas.data.cache import Note, cache_dir, locked, silent
from parnas.data.corpora import Corpus, find_corpus
from parnas.data.datasets import SPLITS
from parnas.data.text import TextSlice, count_words
from parnas.data.tokenizers import PieceTokenizer, Tokenizer, WordTokenizer, load_tokenizer, train_tokenizer
from parnas.errors import ParnasError
from parnas.runs.files import atomic_folder, read_json, write_json

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Count = Annotated[int, Field(ge=0, strict=True)]

FORMAT = 3
"""Increase it with every change that gives other files for the same corpus and settings."""

_HEADER_FILE = "header.json"
_CHUNK = 1 << 22
"""Tokens that are counted or renumbered at once; numpy's copies of them are several times as large."""

_THREADS = 4
"""Blocks encoded at the same time: with fewer, cores wait for Python; WikiText-2 takes a tenth longer with 2."""

POOL_BYTES = 20_000_000
"""Size of text from which worker processes for the word tokenizer save time."""


@dataclass(frozen=True)
class SplitCounts:
    """The size of a split, in tokens and in units of its text.

    Attributes:
        words: Whitespace-separated words, without line ends.
        line_ends: Predicted line ends, that is tokens `eos_id`.
        lines: Lines of the text, a last one without a newline included.
        bytes: Bytes of the text.
        unknown: Tokens for text without an id of its own.
    """

    tokens: Count
    words: Count
    line_ends: Count
    lines: Count
    bytes: Count
    unknown: Count

    def __add__(self, other: "SplitCounts") -> "SplitCounts":
        return SplitCounts(*(mine + theirs for mine, theirs in zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class StreamHeader:
    """The source of a corpus's token streams, and their sizes.

    Attributes:
        tokenizer: Settings of the tokenizer (`TokenizerConfig`).
        loses: Information that the tokenizer drops: "case" where it is folded, "unknown" where a split has unknown
            tokens.
    """

    corpus: str
    fingerprint: str
    tokenizer: dict[str, Any]
    vocab_size: Annotated[int, Field(ge=1, lt=2**31, strict=True)]
    dtype: Literal["<u2", "<u4"]
    loses: tuple[str, ...]
    splits: dict[str, SplitCounts]

    @classmethod
    def read(cls, path: Path) -> "StreamHeader":
        """Read a header; raise `ParnasError` for a missing or broken file."""
        tree = read_json(path)
        try:
            if set(tree["splits"]) != set(SPLITS):
                raise KeyError("splits")
            splits = {split: SplitCounts(**tree["splits"][split]) for split in SPLITS}
            header = cls(**{**tree, "splits": splits})
            return TypeAdapter(cls).validate_python(asdict(header))
        except (KeyError, TypeError, ValueError) as error:  # pydantic's among them
            reason = " ".join(str(error).split())[:200]
            raise ParnasError(f"{path} is no header of a token stream ({reason}); restore it.") from error


@dataclass(frozen=True)
class TokenStreams:
    """Three splits as token ids on disk."""

    folder: Path
    header: StreamHeader
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> "TokenStreams":
        """Open the streams in a folder; raise `ParnasError` where one is missing, broken or of the wrong length."""
        header = StreamHeader.read(folder / _HEADER_FILE)
        for split, counts in header.splits.items():
            path = _tokens_file(folder, split)
            expected = counts.tokens * np.dtype(header.dtype).itemsize
            if not path.is_file() or path.stat().st_size != expected:
                raise ParnasError(f"{path} is not {expected:,} bytes long; delete {folder}, and it is made again.")
        return cls(folder, header, load_tokenizer(folder / "tokenizer"))

    def tokens(self, split: str) -> Tokens:
        """Return the token ids of a split [N], memory-mapped and read-only."""
        return np.memmap(_tokens_file(self.folder, split), dtype=self.header.dtype, mode="r")

    def train_counts(self) -> NDArray[np.int64]:
        """Count each token in the training split [V]; ids are sorted by frequency, so the counts never rise."""
        return _count_tokens(_tokens_file(self.folder, "train"), self.header.dtype, self.header.vocab_size)


def prepare(config: DataConfig, note: Note = silent) -> TokenStreams:
    """Return the token streams of a configuration from the cache, after making them where they are missing.

    They are made under a lock and appear as a whole, so any number of processes may call at once; damaged ones are made
    again. `note` gets a line for each step that takes time.

    Raises:
        ParnasError: Corpus, tokenizer settings or disk are at fault.
    """
    corpus = find_corpus(config.corpus, note)
    settings = config.tokenizer.model_dump(mode="json")
    key = hashlib.sha256(json.dumps([FORMAT, corpus.fingerprint, settings], sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir() / "streams" / key
    with locked(folder, note):
        try:
            return TokenStreams.open(folder)
        except ParnasError:
            with atomic_folder(folder) as unfinished:
                _make(unfinished, corpus, config, settings, note)
            return TokenStreams.open(folder)


def encode_file(text: TextSlice, tokenizer: Tokenizer, saved: Path, target: Path, dtype: str) -> SplitCounts:
    """Write the ids of a text to `target` as raw `dtype` and return its size; `saved` is the tokenizer's folder."""
    total, ends_line = SplitCounts(0, 0, 0, 0, 0, 0), True
    with target.open("wb") as file:
        for block in _encode(text, tokenizer, saved):
            file.write(block.ids.astype(dtype).data)
            total += block.counts
            ends_line = block.ends_line
    return total if ends_line else replace(total, lines=total.lines + 1)


def _make(folder: Path, corpus: Corpus, config: DataConfig, settings: dict[str, Any], note: Note) -> None:
    """Train the tokenizer, encode the splits and write the header into an empty folder."""
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
        splits[split] = encode_file(text, tokenizer, folder / "tokenizer", _tokens_file(folder, split), dtype)
        if splits[split].tokens < 2:
            raise ParnasError(
                f"The {split} split of {corpus.name} is too short: it gives {splits[split].tokens} token(s), and 2 is "
                "the least. Give more text."
            )
    if isinstance(tokenizer, PieceTokenizer):
        tokenizer = _sort_by_frequency(folder, tokenizer, dtype)
    unknown = any(counts.unknown for counts in splits.values())
    loses = ("case",) * tokenizer.folds_case + ("unknown",) * unknown
    header = StreamHeader(corpus.name, corpus.fingerprint, settings, tokenizer.vocab_size, dtype, loses, splits)
    write_json(folder / _HEADER_FILE, asdict(header))


class _EncodedBlock(NamedTuple):
    """A block of text in tokens."""

    ids: NDArray[np.int32]
    counts: SplitCounts
    ends_line: bool


def _sort_by_frequency(folder: Path, tokenizer: PieceTokenizer, dtype: str) -> PieceTokenizer:
    """Renumber the tokens of all splits by frequency, which is far faster than to encode them again."""
    counts = _count_tokens(_tokens_file(folder, "train"), dtype, tokenizer.vocab_size)
    tokenizer, new_ids = tokenizer.sorted_by(counts)
    for split in SPLITS:
        tokens = np.memmap(_tokens_file(folder, split), dtype, "r+")
        for start in range(0, len(tokens), _CHUNK):
            tokens[start : start + _CHUNK] = new_ids[tokens[start : start + _CHUNK]]
    tokenizer.save(folder / "tokenizer")
    return tokenizer


def _count_tokens(path: Path, dtype: str, vocab_size: int) -> NDArray[np.int64]:
    """Count each token of a file [V]."""
    counts = np.zeros(vocab_size, np.int64)
    tokens = np.memmap(path, dtype, "r")
    for start in range(0, len(tokens), _CHUNK):
        counts += np.bincount(tokens[start : start + _CHUNK], minlength=vocab_size)
    return counts


def _encode_block(tokenizer: Tokenizer, block: bytes) -> _EncodedBlock:
    """Encode a block and measure it."""
    ids, unknown = tokenizer.encode_block(block)
    counts = SplitCounts(
        tokens=len(ids),
        words=count_words(block),
        line_ends=int(np.count_nonzero(ids == tokenizer.eos_id)),
        lines=block.count(b"\n"),
        bytes=len(block),
        unknown=unknown,
    )
    return _EncodedBlock(ids, counts, block.endswith(b"\n"))


def _encode(text: TextSlice, tokenizer: Tokenizer, saved: Path) -> Iterator[_EncodedBlock]:
    """Yield the encoded blocks of a text in sequence, on all cores; `saved` is the tokenizer's folder.

    Words are encoded in Python, which needs processes. sentencepiece has its own threads for a block; meanwhile our
    threads prepare the next blocks and count the words of the previous ones.
    """
    workers = os.cpu_count() or 1
    if not isinstance(tokenizer, WordTokenizer) or text.bytes < POOL_BYTES or workers == 1:
        threads, encode = ThreadPoolExecutor(_THREADS), partial(_encode_block, tokenizer)
        yield from _map_ahead(threads, _THREADS + 2, encode, text.blocks())
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(saved,))
    try:
        yield from _map_ahead(pool, 2 * workers, _encode_in_worker, text.blocks())
    except BrokenProcessPool as error:
        raise ParnasError(
            "The worker processes that encode words died. Make room in memory; and if a script of yours calls parnas, "
            'let it do so below: if __name__ == "__main__":'
        ) from error


def _map_ahead(
    pool: Executor, ahead: int, encode: Callable[[bytes], _EncodedBlock], blocks: Iterable[bytes]
) -> Iterator[_EncodedBlock]:
    """Yield results in the sequence of the blocks, with `ahead` in memory; `pool.map` would read the whole text."""
    waiting: deque[Future[_EncodedBlock]] = deque()
    with pool:
        for block in blocks:
            waiting.append(pool.submit(encode, block))
            if len(waiting) == ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


_worker_tokenizer: Tokenizer | None = None


def _start_worker(folder: Path) -> None:
    """Load the tokenizer of a worker process."""
    global _worker_tokenizer  # noqa: PLW0603 (the one place where an initializer can leave what its tasks need)
    _worker_tokenizer = load_tokenizer(folder)


def _encode_in_worker(block: bytes) -> _EncodedBlock:
    """Encode a block with the tokenizer of this worker process."""
    assert _worker_tokenizer is not None
    return _encode_block(_worker_tokenizer, block)


def _tokens_file(folder: Path, split: str) -> Path:
    """Return the path of the ids of a split."""
    return folder / f"{split}.bin"
