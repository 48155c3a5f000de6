"""The sentencepiece tokenizer: unigram or BPE pieces (Kudo & Richardson 2018), with ids sorted by frequency."""

import io
import re
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from parnas.data.text import LONGEST_LINE, TextSlice
from parnas.data.tokenizers import SETTINGS_FILE, UNKNOWN, Encoded, Ids, Tokenizer, vocabulary_too_large
from parnas.errors import ParnasError
from parnas.files import read_json, write_json
from parnas.sections import TokenizerConfig

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
        self._eos = np.array([eos_piece], np.int32).tobytes()
        if (self._ids < 0).any() or len(pieces) != _slots(self._processor.vocab_size(), byte_fallback):
            raise ValueError("its numbers do not fit the sentencepiece model")
        self.vocab_size = len(pieces)
        self.eos_id = int(self._ids[eos_piece])
        self.unknown_id = None if byte_fallback else int(self._ids[UNKNOWN_PIECE])
        self.folds_case = lowercase

    @classmethod
    def train(cls, config: TokenizerConfig, train: TextSlice) -> Self:
        """Train sentencepiece on `SAMPLE_BYTES` of evenly spread lines at most; ids are not sorted by frequency yet."""
        vocab_size = config.vocab_size or DEFAULT_VOCAB_SIZE
        model = _train_model(config, vocab_size, train)
        return cls(model, np.arange(vocab_size), config.byte_fallback, config.lowercase)

    def sorted_by(self, counts: NDArray[np.int64]) -> tuple[Self, Ids]:
        """The tokenizer with ids sorted by frequency, given the count of each of this one's; and their new ids [V]."""
        order = np.argsort(-counts, kind="stable")
        new_ids = np.empty(len(order), np.int32)
        new_ids[order] = np.arange(len(order))
        return type(self)(self._model, self._pieces[order], self._byte_fallback, self.folds_case), new_ids

    def encode_counting(self, lines: list[str]) -> Encoded:
        encoded = self._encode_texts([line.removesuffix("\n") for line in lines])
        ends = [self._eos if line.endswith("\n") else b"" for line in lines]
        return self._number(b"".join(part for pair in zip(encoded, ends, strict=True) for part in pair))

    def encode_block(self, block: bytes) -> Encoded:
        texts = block.decode("utf-8", errors="replace").split("\n")
        if max(map(len, texts)) >= LONGEST_LINE:
            return super().encode_block(block)
        # What `encode_counting` gives, without a list of lines and of their ends. A text's last line end is before "".
        return self._number(self._eos.join(self._encode_texts(texts)))

    def decode(self, ids: Sequence[int]) -> str:
        text = ""
        for line_end, group in groupby(ids, key=lambda number: number == self.eos_id):
            numbers = list(group)
            text += "\n" * len(numbers) if line_end else self._processor.decode(self._pieces[numbers].tolist())
        return text

    def spellings(self) -> list[str]:
        known = [self._processor.id_to_piece(piece) for piece in range(self._processor.vocab_size())]
        spelt = [*(piece.replace(SPACE_MARK, " ") for piece in known), "\n"]  # the last is one more id, or is not used
        return ["\n" if number == self.eos_id else spelt[piece] for number, piece in enumerate(self._pieces.tolist())]

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
        pieces = np.array(settings["pieces"])
        if pieces.dtype != np.int64 or pieces.ndim != 1 or not np.array_equal(np.sort(pieces), np.arange(len(pieces))):
            raise ValueError("its numbers are not those below their count in some order")
        tokenizer = cls(model, pieces, bool(settings["byte_fallback"]), bool(settings["lowercase"]))
        tokenizer.spellings()  # pieces that are no UTF-8 are told here
        return tokenizer

    @property
    def _loses(self) -> bool:
        return self.folds_case or not self._byte_fallback

    def _encode_texts(self, texts: list[str]) -> list[Any]:
        """The pieces of each text, none of which holds a line end, as int32 arrays."""
        encoded: list[Any] = self._processor.encode(texts, return_type="numpy", num_threads=-1)
        if not self._loses:
            for index, text in enumerate(texts):
                if SPACE_MARK in text:
                    encoded[index] = self._encode_space_marks(text)
        return encoded

    def _number(self, pieces: bytes) -> Encoded:
        """Our ids of pieces in a row, given as the bytes of their arrays: bytes join several times as fast."""
        ids = self._ids[np.frombuffer(pieces, np.int32)]
        return Encoded(ids, 0 if self.unknown_id is None else int(np.count_nonzero(ids == self.unknown_id)))

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
    """Every n-th line, n as small as `SAMPLE_BYTES` allow, without the spaces at its end.

    Such as those of WikiText would make a lone "▁" so frequent that unigram cuts it off from words as well.
    """
    step = -(-train.bytes // SAMPLE_BYTES)
    number = 0
    for lines in train.lines():
        for line in lines:
            if number % step == 0:
                yield line.removesuffix("\n").rstrip(" ")
            number += 1
