"""What is known of a text before it is encoded, or where it is not: its vocabulary, and how often each token occurs."""

import os
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parnas.data.cache import Note, cache_dir, silent
from parnas.data.known import KNOWN
from parnas.data.pieces import DEFAULT_VOCAB_SIZE
from parnas.data.streams import prepare
from parnas.errors import ParnasError
from parnas.files import expand_user
from parnas.sections import DataConfig

PUBLISHED = {
    ("wikitext-103", "word"): 267_735,
    ("wikitext-2", "word"): 33_278,
    ("enwik8", "byte"): 205,
    ("text8", "byte"): 28,
}
"""Vocabularies of known corpora with all their words, or bytes."""

FREQUENT, RARE_EXPONENT = 8000, 1.65  # of `zipf`


class Foreseen(NamedTuple):
    """The tokens of a text, and where that is known from."""

    counts: NDArray[np.int64]  # [V] occurrences, or what is proportional to them; they never rise
    source: str


def foresee(config: DataConfig, note: Note = silent) -> Foreseen:
    """Counts of the text where it is on this machine, else the vocabulary that is published or set, and Zipf's law.

    Never downloads. Raises `ParnasError` where neither the text nor the size of its vocabulary is known.
    """
    if at_hand(config.corpus):
        return Foreseen(prepare(config, note).train_counts(), "counted in the text")
    settings = config.tokenizer
    published = None if settings.lowercase else PUBLISHED.get((config.corpus, settings.kind))
    size = settings.vocab_size or published or (DEFAULT_VOCAB_SIZE if settings.kind == "sentencepiece" else None)
    if size is None:
        raise ParnasError(
            f"{config.corpus} is not on this machine, and its vocabulary is not known; fetch it by 'parnas data "
            f"{config.corpus}', or set data.tokenizer.vocab_size."
        )
    return Foreseen(zipf(size), f"{config.corpus} is not on this machine: frequencies by Zipf's law")


def at_hand(corpus: str) -> bool:
    """Whether a corpus can be read without fetching it."""
    if corpus not in KNOWN:
        return corpus == "pydoc" or expand_user(corpus).exists()
    given = os.environ.get("PARNAS_DATA")
    folders = [cache_dir() / "corpora" / corpus, *([expand_user(given) / corpus] if given else [])]
    return any(folder.is_dir() for folder in folders)


def zipf(size: int) -> NDArray[np.int64]:
    """Occurrences of so many words, the most frequent first, up to a factor: [size].

    1 / rank up to the 8000th, then falling by rank^-1.65: two regimes, as Ferrer i Cancho & Solé 2001 found. The
    exponent is that by which the rarest of WikiText-103's 267,735 words occurs three times in its 103 million, as it
    does; of WikiText-2, the words beyond the 1000th, 5000th and 20,000th are a share of the text that is right within
    a tenth.
    """
    ranks = np.arange(1, size + 1, dtype=np.float64)
    frequencies = np.where(ranks <= FREQUENT, 1 / ranks, (ranks / FREQUENT) ** -RARE_EXPONENT / FREQUENT)
    counts: NDArray[np.int64] = np.ceil(frequencies / frequencies[-1]).astype(np.int64)
    return counts
