"""Token streams: a corpus as memory-mapped token ids, made once and kept in the cache.

The folder of a stream, `<cache>/streams/<key>/`, holds `header.json`, `train.bin`, `valid.bin`, `test.bin` (raw
little-endian ids) and `tokenizer/`.
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

from parnas.data.cache import Note, cache_dir, locked, silent
from parnas.data.corpora import SPLITS, Corpus, find_corpus
from parnas.data.pieces import PieceTokenizer
from parnas.data.text import TextSlice, count_words
from parnas.data.tokenizers import Tokenizer, WordTokenizer, learn_tokenizer, load_tokenizer
from parnas.errors import ParnasError
from parnas.files import folder_in_one_piece, read_json, write_json
from parnas.sections import DataConfig

Tokens = NDArray[np.uint16] | NDArray[np.uint32]
Count = Annotated[int, Field(ge=0, strict=True)]

FORMAT = 3
"""Raise it whenever the same corpus and settings would give other files."""

HEADER_FILE = "header.json"
PART = 1 << 22
"""Tokens that are counted or renumbered at once; numpy's copies of them are several times as large."""

THREADS = 4
"""Blocks in work at once: with fewer, cores wait for Python; WikiText-2 takes a tenth longer with 2."""

POOL_BYTES = 20_000_000
"""Text above which starting worker processes pays for the word tokenizer."""


@dataclass(frozen=True)
class SplitCounts:
    """What a split holds, in tokens and in the terms of its text.

    words: whitespace-separated ones, without line ends. line_ends: those predicted, that is tokens that are
    `eos_id`. lines: those of the text, a last one without a newline included. bytes: of the text. unknown: tokens
    that stand for something without an id.
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
    """What a stream was made of and what is in it.

    loses: what the tokenizer does not keep of the text: "case" where it is folded, "unknown" where any split has an
    unknown token. tokenizer: the settings (`TokenizerConfig`) it was made with.
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
        """Raises `ParnasError` for a missing or broken file."""
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
    """The three splits as token ids, on disk."""

    folder: Path
    header: StreamHeader
    tokenizer: Tokenizer

    @classmethod
    def open(cls, folder: Path) -> "TokenStreams":
        """The streams in a folder; raises `ParnasError` where one is missing, broken or of the wrong length."""
        header = StreamHeader.read(folder / HEADER_FILE)
        for split, counts in header.splits.items():
            path = _tokens_file(folder, split)
            expected = counts.tokens * np.dtype(header.dtype).itemsize
            if not path.is_file() or path.stat().st_size != expected:
                raise ParnasError(f"{path} is not {expected:,} bytes long; delete {folder}, and it is made anew.")
        return cls(folder, header, load_tokenizer(folder / "tokenizer"))

    def tokens(self, split: str) -> Tokens:
        """Token ids of a split [N], memory-mapped and read-only."""
        return np.memmap(_tokens_file(self.folder, split), dtype=self.header.dtype, mode="r")

    def train_counts(self) -> NDArray[np.int64]:
        """Occurrences of each token in the training split [V]; they never rise."""
        return _count_tokens(_tokens_file(self.folder, "train"), self.header.dtype, self.header.vocab_size)


def prepare(config: DataConfig, note: Note = silent) -> TokenStreams:
    """The token streams that a configuration asks for: opened from the cache, or made there first.

    They are made under a lock and appear whole, so any number of processes may ask at once; a damaged cache is made
    anew. `note` hears of each step that takes time.

    Raises `ParnasError` for every fault of corpus, tokenizer settings or disk.
    """
    corpus = find_corpus(config.corpus, note)
    settings = config.tokenizer.model_dump(mode="json")
    key = hashlib.sha256(json.dumps([FORMAT, corpus.fingerprint, settings], sort_keys=True).encode()).hexdigest()[:32]
    folder = cache_dir() / "streams" / key
    with locked(folder, note):
        try:
            return TokenStreams.open(folder)
        except ParnasError:
            with folder_in_one_piece(folder) as beside:
                _make(beside, corpus, config, settings, note)
            return TokenStreams.open(folder)


def encode_file(text: TextSlice, tokenizer: Tokenizer, saved: Path, target: Path, dtype: str) -> SplitCounts:
    """Write the ids of a text to `target` as raw `dtype` and count what it holds; `saved`: the tokenizer's folder."""
    return _write_tokens(target, _encode(text, tokenizer, saved), dtype)


def _make(folder: Path, corpus: Corpus, config: DataConfig, settings: dict[str, Any], note: Note) -> None:
    note(f"training the {config.tokenizer.kind} tokenizer on {corpus.splits['train'].bytes:,} bytes")
    tokenizer = learn_tokenizer(
        config.tokenizer, corpus.splits["train"], [corpus.splits[split] for split in ("valid", "test")]
    )
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer")
    dtype: Literal["<u2", "<u4"] = "<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4"
    splits = {}
    for split in SPLITS:
        note(f"encoding {split}: {corpus.splits[split].bytes:,} bytes")
        splits[split] = encode_file(
            corpus.splits[split], tokenizer, folder / "tokenizer", _tokens_file(folder, split), dtype
        )
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
    write_json(folder / HEADER_FILE, asdict(header))


class _EncodedBlock(NamedTuple):
    ids: NDArray[np.int32]
    counts: SplitCounts
    ends_line: bool


def _write_tokens(path: Path, blocks: Iterable[_EncodedBlock], dtype: str) -> SplitCounts:
    """Write the ids of a split, one block after another, and add up what it holds."""
    total = SplitCounts(0, 0, 0, 0, 0, 0)
    ends_line = True
    with path.open("wb") as file:
        for block in blocks:
            file.write(block.ids.astype(dtype).data)
            total += block.counts
            ends_line = block.ends_line
    return total if ends_line else replace(total, lines=total.lines + 1)


def _sort_by_frequency(folder: Path, tokenizer: PieceTokenizer, dtype: str) -> PieceTokenizer:
    """Renumber the tokens of all splits, since to encode them a second time takes far longer."""
    counts = _count_tokens(_tokens_file(folder, "train"), dtype, tokenizer.vocab_size)
    tokenizer, new_ids = tokenizer.sorted_by(counts)
    for split in SPLITS:
        tokens = np.memmap(_tokens_file(folder, split), dtype, "r+")
        for start in range(0, len(tokens), PART):
            tokens[start : start + PART] = new_ids[tokens[start : start + PART]]
    tokenizer.save(folder / "tokenizer")
    return tokenizer


def _count_tokens(path: Path, dtype: str, vocab_size: int) -> NDArray[np.int64]:
    counts = np.zeros(vocab_size, np.int64)
    tokens = np.memmap(path, dtype, "r")
    for start in range(0, len(tokens), PART):
        counts += np.bincount(tokens[start : start + PART], minlength=vocab_size)
    return counts


def _encode_block(tokenizer: Tokenizer, block: bytes) -> _EncodedBlock:
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
    """Encode the blocks of a text in order, on all cores; `saved` is the tokenizer's folder.

    Words are Python's, and need processes. sentencepiece has threads of its own for a block, and while they work,
    threads of ours prepare the next blocks and count the ones before.
    """
    workers = os.cpu_count() or 1
    if not isinstance(tokenizer, WordTokenizer) or text.bytes < POOL_BYTES or workers == 1:
        yield from _in_order(ThreadPoolExecutor(THREADS), THREADS + 2, partial(_encode_block, tokenizer), text.blocks())
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start_worker, initargs=(saved,))
    try:
        yield from _in_order(pool, 2 * workers, _encode_in_worker, text.blocks())
    except BrokenProcessPool as error:
        raise ParnasError(
            "The worker processes that encode words died. Make room in memory; and if a script of yours calls parnas, "
            'let it do so below: if __name__ == "__main__":'
        ) from error


def _in_order(
    pool: Executor, ahead: int, encode: Callable[[bytes], _EncodedBlock], blocks: Iterable[bytes]
) -> Iterator[_EncodedBlock]:
    """Results in the order of the blocks, of which `ahead` are in memory: pool.map would read all of the text."""
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
    global _worker_tokenizer  # noqa: PLW0603 (the one place where an initializer can leave what its tasks need)
    _worker_tokenizer = load_tokenizer(folder)


def _encode_in_worker(block: bytes) -> _EncodedBlock:
    assert _worker_tokenizer is not None
    return _encode_block(_worker_tokenizer, block)


def _tokens_file(folder: Path, split: str) -> Path:
    return folder / f"{split}.bin"
