"""Token counts: counted in a corpus, estimated if the corpus is not on this machine, or read from a file."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from parnas.config.schema import DataConfig
from parnas.data.cache import Note, cache_dir, silent
from parnas.data.datasets import DATASETS
from parnas.data.streams import prepare
from parnas.data.tokenizers import DEFAULT_VOCAB_SIZE
from parnas.data.vocabulary import read_vocabulary
from parnas.errors import ParnasError
from parnas.runs.files import expand_user

__all__ = ["estimate_token_counts", "is_local", "read_counts", "zipf"]

PUBLISHED = {
    ("wikitext-103", "word"): 267_735,
    ("wikitext-2", "word"): 33_278,
    ("enwik8", "byte"): 205,
    ("text8", "byte"): 28,
    ("tiny-shakespeare", "byte"): 65,
}
"""Number of different words, or bytes, of each dataset."""


class _TokenCounts(NamedTuple):
    """The token counts of a text, and a description of their source."""

    counts: NDArray[np.int64]  # [V] occurrences of each token, or numbers proportional to them, the largest first
    source: str


def estimate_token_counts(config: DataConfig, note: Note = silent) -> _TokenCounts:
    """Return the token counts of a corpus; if it is not on this machine, estimate them by Zipf's law.

    Nothing is downloaded. The estimate needs the vocabulary size, which is configured or published.

    Raises:
        ParnasError: The corpus is not on this machine, and its vocabulary size is neither configured nor published.
    """
    if is_local(config.corpus):
        return _TokenCounts(prepare(config, note).train_counts(), "counted in the text")
    settings = config.tokenizer
    published = None if settings.lowercase else PUBLISHED.get((config.corpus, settings.kind))
    if settings.vocabulary is not None:
        published = len(read_vocabulary(settings.vocabulary))
    size = settings.vocab_size or published or (DEFAULT_VOCAB_SIZE if settings.kind == "sentencepiece" else None)
    if size is None:
        raise ParnasError(
            f"{config.corpus} is not on this machine, and its vocabulary size is not known; download the corpus by "
            f"'parnas data {config.corpus}', or set data.tokenizer.vocab_size."
        )
    return _TokenCounts(zipf(size), f"{config.corpus} is not on this machine: frequencies by Zipf's law")


def is_local(corpus: str) -> bool:
    """Return whether a corpus can be read without a download."""
    if corpus not in DATASETS:
        return corpus == "pydoc" or expand_user(corpus).exists()
    given = os.environ.get("PARNAS_DATA")
    folders = [cache_dir() / "corpora" / corpus, *([expand_user(given) / corpus] if given else [])]
    return any(folder.is_dir() for folder in folders)


def zipf(size: int) -> NDArray[np.int64]:
    """Return estimated relative counts of `size` words by Zipf's law, the largest first, [size].

    Counts are proportional to 1 / rank up to rank 8000, then to rank^-1.65: two regimes, as Ferrer i Cancho & Solé 2001
    found. This exponent gives the rarest of WikiText-103's 267,735 words its true count, 3 of 103 million. In
    WikiText-2, the shares of all words beyond ranks 1000, 5000 and 20,000 are right within a tenth.
    """
    ranks, last = np.arange(1, size + 1, dtype=np.float64), 8000
    frequencies = np.where(ranks <= last, 1 / ranks, (ranks / last) ** -1.65 / last)
    counts: NDArray[np.int64] = np.ceil(frequencies / frequencies[-1]).astype(np.int64)
    return counts


def read_counts(path: Path) -> NDArray[np.int64]:
    """Read counts [V], the largest first, from a text file whose lines end in a count: `123` or `word 123`."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
        counts = np.array([int(line.split()[-1]) for line in lines if line.strip()], dtype=np.int64)
    except FileNotFoundError as error:
        raise ParnasError(
            f"There is no run folder or file {path}; give a run folder, or a file with a count on each line."
        ) from error
    except (ValueError, OverflowError) as error:
        raise ParnasError(f"{path} is not a list of counts: each line must end in a whole number ({error}).") from error
    return np.sort(counts)[::-1]
