"""Tokenizers: text to ids and back. Ids are sorted by frequency in the training text, 0 the most frequent.

The adaptive softmax needs that order (Grave et al. 2017, section 4); ties go to the symbol that sorts first.
The line end, `<eos>`, is one id of every tokenizer, written once for each newline.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from parnas.data.text import TextSlice, split_lines
from parnas.errors import ParnasError
from parnas.files import read_json, write_json
from parnas.sections import TokenizerConfig

Ids = NDArray[np.int32]

SETTINGS_FILE = "tokenizer.json"
UNKNOWN = "<unk>"
NEWLINE = ord("\n")


class Encoded(NamedTuple):
    """Token ids [N], and how many of them stand for something that the tokenizer does not know."""

    ids: Ids
    unknown: int


class Tokenizer(ABC):
    """What every tokenizer can do.

    vocab_size: number of ids, `eos_id` among them. unknown_id: stands for what has no id, None where all has one.
    folds_case: upper and lower case become one.
    """

    kind: ClassVar[str]
    vocab_size: int
    eos_id: int
    unknown_id: int | None
    folds_case: bool

    @abstractmethod
    def encode_counting(self, lines: list[str]) -> Encoded:
        r"""Tokens of lines in a row, `eos_id` wherever one ends in "\n"; a line's piece without it gets none."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        r"""Text of token ids; `eos_id` gives "\n". The inverse of `encode` but for what the tokenizer loses."""

    @abstractmethod
    def spellings(self) -> list[str]:
        r"""What each id stands for [V], a space where it begins a word behind white space; "\n" for `eos_id`."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Write plain data, from which `load_tokenizer` makes an equal tokenizer."""

    @classmethod
    @abstractmethod
    def load(cls, folder: Path) -> Self:
        """The tokenizer saved in `folder`; `load_tokenizer` is the door to it, and knows which class to ask."""

    def encode_lines(self, lines: list[str]) -> Ids:
        """The ids of `encode_counting`."""
        return self.encode_counting(lines).ids

    def encode_block(self, block: bytes) -> Encoded:
        """Tokens of UTF-8 text as it lies in a file."""
        return self.encode_counting(split_lines(block.decode("utf-8", errors="replace")))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, such as a prompt; nothing is added at its end."""
        ids: list[int] = self.encode_lines(split_lines(text)).tolist()
        return ids


class WordTokenizer(Tokenizer):
    r"""Whitespace words, and `<eos>` after each line: the literature's WikiText setting.

    symbols: the word of each id, "\n" for `<eos>`, and `<unk>`, which stands for all other words.
    """

    kind = "word"

    def __init__(self, symbols: list[str], lowercase: bool) -> None:
        self._symbols = symbols
        self._ids = {symbol: number for number, symbol in enumerate(symbols)}
        self.vocab_size = len(symbols)
        self.eos_id = self._ids["\n"]
        self.unknown_id: int = self._ids[UNKNOWN]
        self.folds_case = lowercase

    @classmethod
    def train(cls, config: TokenizerConfig, train: TextSlice) -> Self:
        """Keep all words of the training text, or the `vocab_size - 2` most frequent besides `<eos>` and `<unk>`."""
        counts: Counter[str] = Counter()
        for lines in train.lines():
            for line in lines:
                counts.update((line.lower() if config.lowercase else line).split())
                counts["\n"] += line.endswith("\n")
        special = {"\n": counts.pop("\n"), UNKNOWN: counts.pop(UNKNOWN, 0)}
        words = sorted(counts, key=lambda word: (-counts[word], word))
        if config.vocab_size is not None:
            if config.vocab_size > len(words) + len(special):
                raise vocabulary_too_large(config.vocab_size, len(words) + len(special))
            special[UNKNOWN] += sum(counts[word] for word in words[config.vocab_size - len(special) :])
            words = words[: config.vocab_size - len(special)]
        final = special | {word: counts[word] for word in words}
        return cls(sorted(final, key=lambda symbol: (-final[symbol], symbol)), config.lowercase)

    def encode_counting(self, lines: list[str]) -> Encoded:
        get, missing = self._ids.get, self.vocab_size
        numbers: list[int] = []
        for line in lines:
            words = (line.lower() if self.folds_case else line).split()
            numbers += [get(word, missing) for word in words]
            if line.endswith("\n"):
                numbers.append(self.eos_id)
        ids = np.array(numbers, np.int32)
        # A word of the text that is itself "<unk>" is known, and must not count.
        unknown = ids == missing
        ids[unknown] = self.unknown_id
        return Encoded(ids, int(unknown.sum()))

    def decode(self, ids: Sequence[int]) -> str:
        return " ".join(self._symbols[number] for number in ids).replace(" \n", "\n").replace("\n ", "\n")

    def spellings(self) -> list[str]:
        return [symbol if symbol == "\n" else f" {symbol}" for symbol in self._symbols]

    def save(self, folder: Path) -> None:
        write_json(folder / SETTINGS_FILE, {"kind": self.kind, "lowercase": self.folds_case, "symbols": self._symbols})

    @classmethod
    def load(cls, folder: Path) -> Self:
        settings = read_json(folder / SETTINGS_FILE)
        symbols, lowercase = settings["symbols"], settings["lowercase"]
        listed = isinstance(symbols, list) and all(isinstance(symbol, str) for symbol in symbols)
        if not listed or len(set(symbols)) != len(symbols):
            raise ValueError("its symbols are not different strings")
        return cls(symbols, bool(lowercase))


class ByteTokenizer(Tokenizer):
    r"""The bytes of the text, for enwik8 and text8; the newline is `<eos>`.

    Known are the bytes that occur in any split, and the newline: which bytes there are says next to nothing about a
    held-out text, and so none is ever unknown. The literature counts the same way, but for a newline where the text
    has none: 205 for enwik8, and 28, not 27, for text8, because generation and evaluation need an `<eos>`.
    """

    kind = "byte"
    unknown_id = None

    def __init__(self, values: list[int], lowercase: bool) -> None:
        self._values = np.array(values, np.uint8)
        self._table = np.full(256, -1, np.int32)
        self._table[self._values] = np.arange(len(values))
        self.vocab_size = len(values)
        self.eos_id = int(self._table[NEWLINE])
        self.folds_case = lowercase

    @classmethod
    def train(cls, config: TokenizerConfig, train: TextSlice, held_out: Iterable[TextSlice]) -> Self:
        """Sort the bytes by frequency in `train`; those in `held_out` alone come last. Folds ASCII letters only."""
        counts = _byte_counts(train, config.lowercase)
        occurs = (counts + sum(_byte_counts(text, config.lowercase) for text in held_out)) > 0
        occurs[NEWLINE] = True
        order = np.argsort(-counts, kind="stable")
        return cls(order[occurs[order]].tolist(), config.lowercase)

    def encode_counting(self, lines: list[str]) -> Encoded:
        return self.encode_block("".join(lines).encode("utf-8"))

    def encode_block(self, block: bytes) -> Encoded:
        values = np.frombuffer(block.lower() if self.folds_case else block, np.uint8)
        ids = self._table[values]
        if (ids < 0).any():
            missing = ", ".join(f"0x{value:02X}" for value in np.unique(values[ids < 0]))
            raise ParnasError(f"The byte(s) {missing} do not occur in the text that this tokenizer was made for.")
        return Encoded(ids, 0)

    def decode(self, ids: Sequence[int]) -> str:
        return self._values[np.asarray(ids, np.int64)].tobytes().decode("utf-8", errors="replace")

    def spellings(self) -> list[str]:
        # Of a character of several bytes none may look like white space.
        return [chr(value) if value < 128 else f"<{value}>" for value in self._values.tolist()]

    def save(self, folder: Path) -> None:
        write_json(
            folder / SETTINGS_FILE,
            {"kind": self.kind, "lowercase": self.folds_case, "bytes": self._values.tolist()},
        )

    @classmethod
    def load(cls, folder: Path) -> Self:
        settings = read_json(folder / SETTINGS_FILE)
        values, lowercase = settings["bytes"], settings["lowercase"]
        listed = isinstance(values, list) and all(type(value) is int for value in values)
        if not listed or NEWLINE not in values or len(set(values)) != len(values) or not set(values) <= set(range(256)):
            raise ValueError("its bytes are not different numbers below 256 with the newline among them")
        return cls(values, bool(lowercase))


def train_tokenizer(config: TokenizerConfig, train: TextSlice, held_out: Iterable[TextSlice] = ()) -> Tokenizer:
    """A tokenizer made from the training text, its ids sorted by frequency there; deterministic.

    held_out: the other splits, of which the byte tokenizer takes the set of bytes, and the others nothing.

    Raises `ParnasError` for a vocabulary larger than the text supports.
    """
    from parnas.data.pieces import PieceTokenizer

    tokenizer = learn_tokenizer(config, train, held_out)
    if isinstance(tokenizer, PieceTokenizer):
        counts = np.zeros(tokenizer.vocab_size, np.int64)
        for block in train.blocks():
            counts += np.bincount(tokenizer.encode_block(block).ids, minlength=tokenizer.vocab_size)
        tokenizer, _ = tokenizer.sorted_by(counts)
    return tokenizer


def learn_tokenizer(config: TokenizerConfig, train: TextSlice, held_out: Iterable[TextSlice] = ()) -> Tokenizer:
    """As `train_tokenizer`, but that pieces are not yet sorted: for who encodes the text anyway, and counts then."""
    if config.kind == "word":
        return WordTokenizer.train(config, train)
    if config.kind == "byte":
        return ByteTokenizer.train(config, train, held_out)
    from parnas.data.pieces import PieceTokenizer

    return PieceTokenizer.train(config, train)


def load_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer that `Tokenizer.save` wrote; raises `ParnasError` where its files are missing or broken."""
    from parnas.data.pieces import PieceTokenizer

    settings = read_json(folder / SETTINGS_FILE)
    kinds: dict[str, type[Tokenizer]] = {kind.kind: kind for kind in (WordTokenizer, ByteTokenizer, PieceTokenizer)}
    try:
        return kinds[settings["kind"]].load(folder)
    except (KeyError, TypeError, ValueError, OverflowError, IndexError, OSError, RuntimeError) as error:
        raise ParnasError(
            f"The tokenizer in {folder} is broken ({error!r:.300}); restore its files, or make it anew."
        ) from error


def _byte_counts(text: TextSlice, lowercase: bool) -> NDArray[np.int64]:
    counts = np.zeros(256, np.int64)
    for block in text.blocks():
        counts += np.bincount(np.frombuffer(block.lower() if lowercase else block, np.uint8), minlength=256)
    return counts


def vocabulary_too_large(wanted: int, largest: int) -> ParnasError:
    return ParnasError(
        f"data.tokenizer.vocab_size is {wanted:,}, but the training text supports at most {largest:,}; "
        "lower it, or give more text."
    )
