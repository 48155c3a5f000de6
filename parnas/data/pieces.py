"""The sentencepiece tokenizer: unigram or BPE pieces (Kudo & Richardson 2018), with ids sorted by frequency."""

import io
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from parnas.config import TokenizerConfig
from parnas.data.text import LONGEST_LINE, TextSlice
from parnas.data.tokenizers import SETTINGS_FILE, UNKNOWN, Encoded, Tokenizer, vocabulary_too_large
from parnas.errors import ParnasError
from parnas.files import read_json, write_json

MODEL_FILE = "sentencepiece.model"
DEFAULT_VOCAB_SIZE = 8000
SAMPLE_BYTES = 24 << 20
"""Text that sentencepiece is trained on at most, which bounds its memory (about 25 times that)."""

# The trainer's result depends on its number of threads, so that is fixed, and no machine gets pieces of its own.
TRAINER_THREADS = 16
SPACE_MARK = "▁"
UNKNOWN_PIECE = 0


class PieceTokenizer(Tokenizer):
    """Pieces of sentencepiece, and `<eos>` after each line.

    With byte fallback and case kept nothing is lost: `decode(encode(text)) == text`. Folding case normalises by
    NFKC_CF and also joins runs of spaces and drops those at the ends of lines.

    model: a serialized sentencepiece model. pieces [V]: sentencepiece's number of each of our ids. With byte
    fallback its unknown piece (0) never occurs, and stands for `<eos>` here; else that is one past its last piece.
    """

    kind = "sentencepiece"

    def __init__(self, model: bytes, pieces: NDArray[np.int64], byte_fallback: bool, lowercase: bool) -> None:
        from sentencepiece import SentencePieceProcessor

        self._model = model
        self._processor = SentencePieceProcessor(model_proto=model)
        self._pieces = pieces
        self._byte_fallback = byte_fallback
        eos_piece = UNKNOWN_PIECE if byte_fallback else self._processor.vocab_size()
        self._ids = np.full(len(pieces), -1, np.int32)
        self._ids[pieces] = np.arange(len(pieces))
        if (self._ids < 0).any() or len(pieces) != _slots(self._processor.vocab_size(), byte_fallback):
            raise ValueError("its numbers do not fit the sentencepiece model")
        self.vocab_size = len(pieces)
        self.eos_id = int(self._ids[eos_piece])
        self.unknown_id = None if byte_fallback else int(self._ids[UNKNOWN_PIECE])
        self.folds_case = lowercase

    @classmethod
    def train(cls, config: TokenizerConfig, train: TextSlice) -> Self:
        """Train sentencepiece on `SAMPLE_BYTES` of evenly spread lines at most, then count its pieces in all lines."""
        vocab_size = config.vocab_size or DEFAULT_VOCAB_SIZE
        model = _train_model(config, vocab_size, train)
        unsorted = cls(model, np.arange(vocab_size), config.byte_fallback, config.lowercase)
        counts = np.zeros(vocab_size, np.int64)
        for block in train.blocks():
            counts += np.bincount(unsorted.encode_block(block).ids, minlength=vocab_size)
        return cls(model, np.argsort(-counts, kind="stable"), config.byte_fallback, config.lowercase)

    def encode_counting(self, lines: list[str]) -> Encoded:
        texts = [line.removesuffix("\n") for line in lines]
        encoded = self._processor.encode(texts, return_type="numpy", num_threads=-1)
        if not self._loses:
            for index, text in enumerate(texts):
                if SPACE_MARK in text:
                    encoded[index] = self._encode_space_marks(text)
        eos = np.array([self._pieces[self.eos_id]], np.int32)
        parts = [np.empty(0, np.int32)]
        for line, pieces in zip(lines, encoded, strict=True):
            parts.append(pieces)
            if line.endswith("\n"):
                parts.append(eos)
        ids = self._ids[np.concatenate(parts)]
        return Encoded(ids, 0 if self.unknown_id is None else int(np.count_nonzero(ids == self.unknown_id)))

    def decode(self, ids: Sequence[int]) -> str:
        text = ""
        for line_end, group in groupby(ids, key=lambda number: number == self.eos_id):
            numbers = list(group)
            text += "\n" * len(numbers) if line_end else self._processor.decode(self._pieces[numbers].tolist())
        return text

    def save(self, folder: Path) -> None:
        (folder / MODEL_FILE).write_bytes(self._model)
        settings = {
            "kind": self.kind,
            "lowercase": self.folds_case,
            "byte_fallback": self._byte_fallback,
            "pieces": self._pieces.tolist(),
        }
        write_json(folder / SETTINGS_FILE, settings)

    @classmethod
    def load(cls, folder: Path) -> Self:
        settings = read_json(folder / SETTINGS_FILE)
        model = (folder / MODEL_FILE).read_bytes()
        pieces = np.array(settings["pieces"], np.int64)
        return cls(model, pieces, bool(settings["byte_fallback"]), bool(settings["lowercase"]))

    @property
    def _loses(self) -> bool:
        return self.folds_case or not self._byte_fallback

    def _encode_space_marks(self, text: str) -> NDArray[np.int32]:
        """Pieces of a text with "▁" in it, which sentencepiece would take for a space: spelt as bytes here."""
        mark = [self._processor.piece_to_id(f"<0x{value:02X}>") for value in SPACE_MARK.encode()]
        first, *rest = (self._processor.encode(part) for part in text.split(SPACE_MARK))
        return np.array(first + [piece for part in rest for piece in mark + part], np.int32)


def _slots(model_size: int, byte_fallback: bool) -> int:
    """Number of our ids, given sentencepiece's: `<eos>` needs one more where no unused piece stands for it."""
    return model_size if byte_fallback else model_size + 1


def _train_model(config: TokenizerConfig, vocab_size: int, train: TextSlice) -> bytes:
    from sentencepiece import SentencePieceTrainer

    extra = 0 if config.byte_fallback else 1
    # A symbol together with the space before it is a piece too: else every one costs a lone "▁" besides.
    symbols = [spelling for symbol in (UNKNOWN, *config.user_symbols) for spelling in (symbol, SPACE_MARK + symbol)]
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
            # Without it, tokens can be cut and joined anywhere, and a line's leading space is as any other.
            add_dummy_prefix=config.lowercase,
            max_sentence_length=4 * LONGEST_LINE,
            unk_id=UNKNOWN_PIECE,
            unk_piece="<no piece>",
            unk_surface=UNKNOWN,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=TRAINER_THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        if largest := re.search(r"value <= (\d+)", str(error)):
            raise vocabulary_too_large(vocab_size, int(largest[1]) + extra) from error
        raise ParnasError(
            f"sentencepiece cannot make {vocab_size:,} pieces of this text ({error}). Give more text, "
            "or change data.tokenizer.vocab_size or data.tokenizer.user_symbols."
        ) from error
    return model.getvalue()


def _sample(train: TextSlice) -> Iterator[str]:
    """Every n-th line, n as small as `SAMPLE_BYTES` allow."""
    step = -(-train.bytes // SAMPLE_BYTES)
    number = 0
    for lines in train.lines():
        for line in lines:
            if number % step == 0:
                yield line.removesuffix("\n")
            number += 1
