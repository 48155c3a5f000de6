"""Tokenizers: text to ids and back, by words, bytes or pieces. Ids are sorted by frequency in the training text.

Id 0 is the most frequent, as the adaptive softmax needs it (Grave et al. 2017, section 4); equally frequent symbols are
sorted by their text. A word list (`data.tokenizer.vocabulary`) keeps its own order. Every tokenizer encodes each
newline as one id, the line end `<eos>`.
"""

import io
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from parnas.config.schema import TokenizerConfig
from parnas.data.text import LONGEST_LINE, TextSlice, split_lines
from parnas.data.vocabulary import read_vocabulary
from parnas.errors import ParnasError
from parnas.runs.files import read_json, write_json

__all__ = ["MODEL_FILE", "SETTINGS_FILE", "Tokenizer", "load_tokenizer"]

_Ids = NDArray[np.int32]

SETTINGS_FILE, MODEL_FILE = "tokenizer.json", "sentencepiece.model"
DEFAULT_VOCAB_SIZE = 8000  # pieces of a sentencepiece tokenizer
_UNKNOWN = "<unk>"
_NEWLINE = ord("\n")

_SAMPLE_BYTES = 24 << 20
"""Largest text that sentencepiece is trained on; the training takes about 25 times as much memory."""

# The pieces depend on the number of threads, so the number is fixed to get the same pieces on all machines.
_TRAINER_THREADS = 16
_SPACE_MARK = "▁"
_UNKNOWN_PIECE = 0


class Encoded(NamedTuple):
    """Token ids [N] of a text, and how many of them encode unknown words or characters."""

    ids: _Ids
    unknown: int  # a word `<unk>` in the text itself does not count


class Tokenizer(ABC):
    """A mapping of text to ids and back.

    Attributes:
        vocab_size: Number of ids, `eos_id` among them.
        eos_id: Id of the line end.
        unknown_id: Id of all words or characters outside the vocabulary; `None` if every text can be encoded.
        folds_case: Whether upper-case and lower-case text gets the same ids.
    """

    kind: ClassVar[str]
    vocab_size: int
    eos_id: int
    unknown_id: int | None
    folds_case: bool

    @abstractmethod
    def encode_text(self, text: str) -> Encoded:
        r"""Encode a text, with `eos_id` for each "\n"."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        r"""Return the text of token ids, with "\n" for `eos_id`; unknown words, case and spaces may be lost."""

    @abstractmethod
    def spellings(self) -> list[str]:
        r"""Return the text of each id [V], with a space before a word that follows white space; "\n" for `eos_id`."""

    def save(self, folder: Path) -> None:
        """Write data files, without code, from which `load_tokenizer` makes an equal tokenizer."""
        write_json(folder / SETTINGS_FILE, {"kind": self.kind, "lowercase": self.folds_case, **self._settings()})

    @abstractmethod
    def _settings(self) -> dict[str, Any]:
        """Return the settings in `tokenizer.json` that only this kind of tokenizer has."""

    @classmethod
    @abstractmethod
    def load(cls, settings: dict[str, Any], folder: Path) -> Self:
        """Make a tokenizer from the content of `tokenizer.json`; raise `ValueError` if a setting is not valid."""

    def encode_block(self, block: bytes) -> Encoded:
        """Encode a block of a file in UTF-8."""
        return self.encode_text(block.decode("utf-8", errors="replace"))

    def encode(self, text: str) -> list[int]:
        """Return the token ids of a text, such as a prompt; nothing is added at its end."""
        ids: list[int] = self.encode_text(text).ids.tolist()
        return ids


class WordTokenizer(Tokenizer):
    r"""Words separated by white space, and `<eos>` after each line, as usual for WikiText."""

    kind = "word"

    def __init__(self, symbols: list[str], lowercase: bool) -> None:
        r"""Make a tokenizer from the word of each id [V], with "\n" for line ends and `<unk>` for unknown words."""
        self._symbols = symbols
        self._ids = {symbol: number for number, symbol in enumerate(symbols)}
        self.vocab_size = len(symbols)
        self.eos_id = self._ids["\n"]
        self.unknown_id: int = self._ids[_UNKNOWN]
        self.folds_case = lowercase

    @classmethod
    def train(cls, config: TokenizerConfig, train: TextSlice) -> Self:
        """Return a tokenizer with the `vocab_size - 2` most frequent words of a text, or all for `None`."""
        counts: Counter[str] = Counter()
        for lines in train.lines():
            for line in lines:
                counts.update((line.lower() if config.lowercase else line).split())
                counts["\n"] += line.endswith("\n")
        special = {"\n": counts.pop("\n"), _UNKNOWN: counts.pop(_UNKNOWN, 0)}
        words = sorted(counts, key=lambda word: (-counts[word], word))
        if config.vocab_size is not None:
            if config.vocab_size > len(words) + len(special):
                raise _vocabulary_too_large(config.vocab_size, len(words) + len(special))
            special[_UNKNOWN] += sum(counts[word] for word in words[config.vocab_size - len(special) :])
            words = words[: config.vocab_size - len(special)]
        final = special | {word: counts[word] for word in words}
        return cls(sorted(final, key=lambda symbol: (-final[symbol], symbol)), config.lowercase)

    def encode_text(self, text: str) -> Encoded:
        """Encode a text as words."""
        get, missing = self._ids.get, self.vocab_size
        numbers: list[int] = []
        for line in split_lines(text):
            words = (line.lower() if self.folds_case else line).split()
            numbers += [get(word, missing) for word in words]
            if line.endswith("\n"):
                numbers.append(self.eos_id)
        ids = np.array(numbers, np.int32)
        # A word "<unk>" of the text has an id of its own and does not count as unknown.
        unknown = ids == missing
        ids[unknown] = self.unknown_id
        return Encoded(ids, int(unknown.sum()))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the words of token ids, joined by spaces and divided into lines."""
        return " ".join(self._symbols[number] for number in ids).replace(" \n", "\n").replace("\n ", "\n")

    def spellings(self) -> list[str]:
        r"""Return each word with a space before it, and "\n" for the line end."""
        return [symbol if symbol == "\n" else f" {symbol}" for symbol in self._symbols]

    def _settings(self) -> dict[str, Any]:
        return {"symbols": self._symbols}

    @classmethod
    def load(cls, settings: dict[str, Any], folder: Path) -> Self:  # noqa: ARG003
        """Make a word tokenizer from its settings; raise `ValueError` if the words are not different strings."""
        symbols = settings["symbols"]
        listed = isinstance(symbols, list) and all(isinstance(symbol, str) for symbol in symbols)
        if not listed or len(set(symbols)) != len(symbols):
            raise ValueError("symbols must be a list of different strings")
        return cls(symbols, bool(settings["lowercase"]))


class ByteTokenizer(Tokenizer):
    r"""The bytes of the text as tokens, for enwik8 and text8; the newline is `<eos>`.

    The vocabulary holds the bytes of all splits, so that no byte is unknown, and the newline. The set of bytes reveals
    next to nothing about a held-out text. The vocabulary of enwik8 has 205 bytes, as in the literature. That of text8
    has 28 instead of 27, because generation and evaluation need an `<eos>`.
    """

    kind = "byte"
    unknown_id = None

    def __init__(self, values: list[int], lowercase: bool) -> None:
        self._values = np.array(values, np.uint8)
        self._table = np.full(256, -1, np.int32)
        self._table[self._values] = np.arange(len(values))
        self.vocab_size = len(values)
        self.eos_id = int(self._table[_NEWLINE])
        self.folds_case = lowercase

    @classmethod
    def train(cls, config: TokenizerConfig, train: TextSlice, held_out: Iterable[TextSlice]) -> Self:
        """Return a tokenizer with the bytes of all splits, by frequency in `train`; `lowercase` affects ASCII alone."""
        counts = _byte_counts(train, config.lowercase)
        occurs = (counts + sum(_byte_counts(text, config.lowercase) for text in held_out)) > 0
        occurs[_NEWLINE] = True
        order = np.argsort(-counts, kind="stable")
        return cls(order[occurs[order]].tolist(), config.lowercase)

    def encode_text(self, text: str) -> Encoded:
        """Encode a text as bytes."""
        return self.encode_block(text.encode("utf-8"))

    def encode_block(self, block: bytes) -> Encoded:
        """Encode bytes; raise `ParnasError` for a byte that is not in the vocabulary."""
        values = np.frombuffer(block.lower() if self.folds_case else block, np.uint8)
        ids = self._table[values]
        if (ids < 0).any():
            missing = ", ".join(f"0x{value:02X}" for value in np.unique(values[ids < 0]))
            raise ParnasError(f"The text has byte(s) {missing}, which the tokenizer lacks; remove them from the text.")
        return Encoded(ids, 0)

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, decoded as UTF-8, with U+FFFD for invalid bytes."""
        return self._values[np.asarray(ids, np.int64)].tobytes().decode("utf-8", errors="replace")

    def spellings(self) -> list[str]:
        """Return the text of each id [V]: an ASCII character, or the number of another byte, such as `<195>`."""
        return [chr(value) if value < 128 else f"<{value}>" for value in self._values.tolist()]

    def _settings(self) -> dict[str, Any]:
        return {"bytes": self._values.tolist()}

    @classmethod
    def load(cls, settings: dict[str, Any], folder: Path) -> Self:  # noqa: ARG003
        """Make a byte tokenizer from its settings; raise `ValueError` if bytes are repeated or lack the newline."""
        values = settings["bytes"]
        listed = isinstance(values, list) and all(type(value) is int and 0 <= value < 256 for value in values)
        if not listed or len(set(values)) != len(values) or _NEWLINE not in values:
            raise ValueError("bytes must be a list of different numbers from 0 to 255, including 10, the newline")
        return cls(values, bool(settings["lowercase"]))


class PieceTokenizer(Tokenizer):
    """Pieces of sentencepiece, unigram or BPE (Kudo & Richardson 2018), and `<eos>` after each line.

    With byte fallback and without `lowercase`, nothing is lost: `decode(encode(text)) == text`. With `lowercase`, text
    is normalised by NFKC_CF, runs of spaces are joined, and spaces at the ends of lines are dropped.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, pieces: NDArray[np.int64], byte_fallback: bool, lowercase: bool) -> None:
        """Make a tokenizer from a serialized sentencepiece model and the model's piece number of each id [V].

        The model has no piece for `<eos>`. With byte fallback, `<eos>` gets number 0, of the unknown piece, which then
        never occurs; without it, the number after the last piece.
        """
        from sentencepiece import SentencePieceProcessor

        self._model = model
        self._processor = SentencePieceProcessor(model_proto=model)
        self._pieces = pieces
        self._byte_fallback = byte_fallback
        eos_piece = _UNKNOWN_PIECE if byte_fallback else self._processor.vocab_size()
        self._ids = np.full(len(pieces), -1, np.int32)
        self._ids[pieces] = np.arange(len(pieces))
        self._eos = np.array([eos_piece], np.int32).tobytes()
        if (self._ids < 0).any() or len(pieces) != self._processor.vocab_size() + (not byte_fallback):
            raise ValueError("pieces must have a number for each piece of the sentencepiece model")
        self.vocab_size = len(pieces)
        self.eos_id = int(self._ids[eos_piece])
        self.unknown_id = None if byte_fallback else int(self._ids[_UNKNOWN_PIECE])
        self.folds_case = lowercase

    @classmethod
    def train(cls, config: TokenizerConfig, train: TextSlice) -> Self:
        """Train sentencepiece on lines spread evenly over a text; `sorted_by` later sorts the ids by frequency."""
        vocab_size = config.vocab_size or DEFAULT_VOCAB_SIZE
        model = _train_model(config, vocab_size, train)
        return cls(model, np.arange(vocab_size), config.byte_fallback, config.lowercase)

    def sorted_by(self, counts: NDArray[np.int64]) -> tuple[Self, _Ids]:
        """Return a tokenizer with ids sorted by their counts [V], the largest first, and the new id of each id [V]."""
        order = np.argsort(-counts, kind="stable")
        new_ids = np.empty(len(order), np.int32)
        new_ids[order] = np.arange(len(order))
        return type(self)(self._model, self._pieces[order], self._byte_fallback, self.folds_case), new_ids

    def encode_text(self, text: str) -> Encoded:
        """Encode a text as pieces."""
        lines = text.split("\n")
        if max(map(len, lines)) < LONGEST_LINE:
            encoded = self._encode_lines(lines)
        else:
            encoded = [np.concatenate(self._encode_lines(split_lines(line) or [""])) for line in lines]
        # Joining bytes is several times as fast as joining arrays.
        ids = self._ids[np.frombuffer(self._eos.join(encoded), np.int32)]
        return Encoded(ids, 0 if self.unknown_id is None else int(np.count_nonzero(ids == self.unknown_id)))

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of token ids, decoded line by line."""
        text = ""
        for line_end, group in groupby(ids, key=lambda number: number == self.eos_id):
            numbers = list(group)
            text += "\n" * len(numbers) if line_end else self._processor.decode(self._pieces[numbers].tolist())
        return text

    def spellings(self) -> list[str]:
        """Return the text of each id [V]: its piece, with a space instead of "▁"."""
        pieces = [self._processor.id_to_piece(piece) for piece in range(self._processor.vocab_size())]
        texts = [*(piece.replace(_SPACE_MARK, " ") for piece in pieces), "\n"]  # the last one is `<eos>`, or unused
        return ["\n" if number == self.eos_id else texts[piece] for number, piece in enumerate(self._pieces.tolist())]

    def save(self, folder: Path) -> None:
        """Write `tokenizer.json` and the sentencepiece model."""
        super().save(folder)
        (folder / MODEL_FILE).write_bytes(self._model)

    def _settings(self) -> dict[str, Any]:
        return {"byte_fallback": self._byte_fallback, "pieces": self._pieces.tolist()}

    @classmethod
    def load(cls, settings: dict[str, Any], folder: Path) -> Self:
        """Make a tokenizer from its settings and model; raise `ValueError` if piece numbers do not fit the model."""
        model = (folder / MODEL_FILE).read_bytes()
        pieces = np.array(settings["pieces"])
        if pieces.dtype != np.int64 or pieces.ndim != 1 or not np.array_equal(np.sort(pieces), np.arange(len(pieces))):
            raise ValueError("pieces must be the numbers 0 to V - 1 in some order")
        tokenizer = cls(model, pieces, bool(settings["byte_fallback"]), bool(settings["lowercase"]))
        tokenizer.spellings()  # raises an error for pieces that are not UTF-8
        return tokenizer

    def _encode_lines(self, lines: list[str]) -> list[Any]:
        """Return the piece numbers of each line as an int32 array; `lines` have no line ends."""
        encoded: list[Any] = self._processor.encode(lines, return_type="numpy", num_threads=-1)
        if self._byte_fallback and not self.folds_case:  # these settings promise to keep all text, also "▁"
            for index, line in enumerate(lines):
                if _SPACE_MARK in line:
                    encoded[index] = self._encode_space_marks(line)
        return encoded

    def _encode_space_marks(self, text: str) -> NDArray[np.int32]:
        """Return the piece numbers of a text, with byte pieces for "▁", which sentencepiece would read as a space."""
        mark = [self._processor.piece_to_id(f"<0x{value:02X}>") for value in _SPACE_MARK.encode()]
        first, *rest = (self._processor.encode(part) for part in text.split(_SPACE_MARK))
        return np.array(first + [piece for part in rest for piece in mark + part], np.int32)


def train_tokenizer(config: TokenizerConfig, train: TextSlice, held_out: Iterable[TextSlice] = ()) -> Tokenizer:
    """Train a tokenizer on the split `train`, deterministically; a byte tokenizer also includes bytes of `held_out`.

    The ids of words and bytes are sorted by frequency. Those of pieces are sorted later, by `PieceTokenizer.sorted_by`,
    because the frequencies of pieces are known only once the text is encoded. A word tokenizer with a word list
    (`vocabulary`) has the words of this list in its order, and learns nothing from the text.

    Raises:
        ParnasError: `vocab_size` is larger than the text supports, or the word list cannot be read.
    """
    if config.vocabulary is not None:
        return WordTokenizer(read_vocabulary(config.vocabulary), config.lowercase)
    if config.kind == "word":
        return WordTokenizer.train(config, train)
    if config.kind == "byte":
        return ByteTokenizer.train(config, train, held_out)
    return PieceTokenizer.train(config, train)


def load_tokenizer(folder: Path) -> Tokenizer:
    """Load the tokenizer that `Tokenizer.save` wrote; raise `ParnasError` if a file is missing or broken."""
    settings = read_json(folder / SETTINGS_FILE)
    kinds: dict[str, type[Tokenizer]] = {kind.kind: kind for kind in (WordTokenizer, ByteTokenizer, PieceTokenizer)}
    try:
        return kinds[settings["kind"]].load(settings, folder)
    except (KeyError, TypeError, ValueError, OverflowError, IndexError, OSError, RuntimeError) as error:
        raise ParnasError(
            f"The tokenizer in {folder} is broken ({error!r:.300}); restore its files, or make it again."
        ) from error


def _byte_counts(text: TextSlice, lowercase: bool) -> NDArray[np.int64]:
    """Return the number of occurrences of each byte value in a text [256]."""
    counts = np.zeros(256, np.int64)
    for block in text.blocks():
        counts += np.bincount(np.frombuffer(block.lower() if lowercase else block, np.uint8), minlength=256)
    return counts


def _vocabulary_too_large(wanted: int, largest: int) -> ParnasError:
    """Return the error for a vocabulary that is larger than the training text supports."""
    return ParnasError(
        f"data.tokenizer.vocab_size is {wanted:,}, but the training text supports at most {largest:,}; "
        "lower data.tokenizer.vocab_size, or give more text."
    )


def _train_model(config: TokenizerConfig, vocab_size: int, train: TextSlice) -> bytes:
    """Train sentencepiece and return the serialized model; raise `ParnasError` if the text is too small."""
    from sentencepiece import SentencePieceTrainer

    extra = 0 if config.byte_fallback else 1
    # Symbols are also pieces together with a space before them; else each symbol would need a separate "▁".
    symbols = [spelling for symbol in (_UNKNOWN, *config.user_symbols) for spelling in (symbol, _SPACE_MARK + symbol)]
    model = io.BytesIO()
    try:
        SentencePieceTrainer.train(
            sentence_iterator=_sample(train),
            model_writer=model,
            vocab_size=vocab_size - extra,
            model_type=config.model_type,
            user_defined_symbols=list(dict.fromkeys(symbols)),
            byte_fallback=config.byte_fallback,
            normalization_rule_name="nfkc_cf" if config.lowercase else "identity",
            remove_extra_whitespaces=config.lowercase,
            # Without the dummy prefix a text can be cut anywhere, and a leading space is like any other.
            add_dummy_prefix=config.lowercase,
            max_sentence_length=4 * LONGEST_LINE,
            unk_id=_UNKNOWN_PIECE,
            unk_piece="<no piece>",
            unk_surface=_UNKNOWN,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=_TRAINER_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        if largest := re.search(r"value <= (\d+)", str(error)):
            raise _vocabulary_too_large(vocab_size, int(largest[1]) + extra) from error
        raise ParnasError(
            f"sentencepiece cannot make {vocab_size:,} pieces of this text ({error}). Give more text, "
            "or change data.tokenizer.vocab_size or data.tokenizer.user_symbols."
        ) from error
    return model.getvalue()


def _sample(train: TextSlice) -> Iterator[str]:
    """Yield every n-th line of a text, without spaces at its end; n is the smallest that `_SAMPLE_BYTES` allows.

    Spaces at the ends of lines, as in WikiText, would make a single "▁" so frequent that the unigram algorithm would
    also split it off from words.
    """
    step = -(-train.bytes // _SAMPLE_BYTES)
    for line in islice(chain.from_iterable(train.lines()), 0, None, step):
        yield line.removesuffix("\n").rstrip(" ")
