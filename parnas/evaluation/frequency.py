"""Perplexity by word frequency: how well a network predicts words that were common or rare in its training text."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from parnas.data.tokenizers import Tokenizer
from parnas.evaluation.entries import Entry
from parnas.training.perplexity import exp_or_infinity

EDGES = 100, 1_000, 10_000
BUCKETS = "10,000 and more", "1,000 to 9,999", "100 to 999", "under 100"
"""Occurrences in the training text, as Rae et al. 2020 (arXiv 1911.05507, table 5) divide them."""


def perplexity_by_frequency(entries: Sequence[Entry], split: str) -> pd.DataFrame:
    """For each run and bucket: the words of the split that are in it, and the perplexity per word.

    Words are separated by white space; a line end counts as one. A word's loss is the sum over its tokens. What the
    tokenizer does not know counts as one word, `<unk>`.
    """
    rows = []
    for entry in entries:
        tokens, tokenizer = np.asarray(entry.streams.tokens(split)), entry.streams.tokenizer
        starts = word_starts(tokens, tokenizer)
        per_word = np.add.reduceat(entry.score(split).double().cpu().numpy(), starts)  # [words]
        counts = word_counts(entry.streams.tokens("train"), tokenizer)
        seen = np.array([counts[word] for word in spell_words(tokens, starts, tokenizer)])
        buckets = len(EDGES) - np.digitize(seen, EDGES)
        for number, bucket in enumerate((*BUCKETS, "all")):
            losses = per_word if bucket == "all" else per_word[buckets == number]
            ppl = exp_or_infinity(float(losses.mean())) if len(losses) else math.nan
            rows.append({"run": entry.name, "occurrences": bucket, "words": len(losses), "ppl": ppl})
    return pd.DataFrame(rows)


def word_starts(tokens: NDArray[Any], tokenizer: Tokenizer) -> NDArray[np.int64]:
    """The place of the first token of each word of a text.

    White space that stands by itself belongs to the word behind it.
    """
    spellings = tokenizer.spellings()
    begins = np.array([spelling[:1].isspace() for spelling in spellings])[tokens]
    blank = np.array([not spelling.strip() for spelling in spellings])
    blank[tokenizer.eos_id] = False
    begins[1:] &= ~blank[tokens[:-1]]
    begins[1:] |= tokens[:-1] == tokenizer.eos_id
    begins[0] = True
    return np.flatnonzero(begins)


def word_counts(tokens: NDArray[Any], tokenizer: Tokenizer) -> Counter[str]:
    """How often each word occurs in a text."""
    tokens = np.asarray(tokens)  # out of the memory map
    return Counter(spell_words(tokens, word_starts(tokens, tokenizer), tokenizer))


def spell_words(tokens: NDArray[Any], starts: NDArray[np.int64], tokenizer: Tokenizer) -> list[str]:
    """The words of a text, each without the white space around it; a line end is a newline."""
    spellings, known = tokenizer.spellings(), dict[bytes, str]()
    data, size = tokens.tobytes(), tokens.itemsize
    words = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(tokens)], strict=True):
        raw = data[start * size : stop * size]
        word = known.get(raw)
        if word is None:
            word = "".join(spellings[number] for number in tokens[start:stop].tolist()).strip() or "\n"
            known[raw] = word
        words.append(word)
    return words
