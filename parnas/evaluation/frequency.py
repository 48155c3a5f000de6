"""Perplexity by word frequency: how well a network predicts words that are common or rare in its training text."""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from parnas.data.tokenizers import Tokenizer
from parnas.evaluation.loading import EvalRun
from parnas.training.perplexity import exp_or_infinity

_EDGES = 100, 1_000, 10_000
BUCKETS = "10,000 and more", "1,000 to 9,999", "100 to 999", "under 100"
"""Buckets of words by their occurrences in the training text, as in Rae et al. 2020 (arXiv 1911.05507, table 5)."""


def perplexity_by_frequency(runs: Sequence[EvalRun], split: str) -> pd.DataFrame:
    """Return a table of perplexity by the frequency of words in the training text of each run.

    Each row is a run and a bucket of words (`BUCKETS`, or `all`): `occurrences` names the bucket, `words` is the number
    of words of the split in the bucket, and `ppl` is their perplexity per word. Words are separated by white space; a
    line end counts as a word. The loss of a word is the sum over its tokens. Unknown text counts as the word `<unk>`.
    """
    rows = []
    for run in runs:
        tokens, tokenizer = np.asarray(run.streams.tokens(split)), run.streams.tokenizer
        starts = word_starts(tokens, tokenizer)
        word_nats = np.add.reduceat(run.score(split).double().cpu().numpy(), starts)  # [words]
        train_tokens = np.asarray(run.streams.tokens("train"))  # a memory map; read it from disk once
        counts = Counter(spell_words(train_tokens, word_starts(train_tokens, tokenizer), tokenizer))
        frequencies = np.array([counts[word] for word in spell_words(tokens, starts, tokenizer)])
        buckets = len(_EDGES) - np.digitize(frequencies, _EDGES)
        for number, bucket in enumerate((*BUCKETS, "all")):
            nats = word_nats if bucket == "all" else word_nats[buckets == number]
            ppl = exp_or_infinity(float(nats.mean())) if len(nats) else math.nan
            rows.append({"run": run.name, "occurrences": bucket, "words": len(nats), "ppl": ppl})
    return pd.DataFrame(rows)


def word_starts(tokens: NDArray[Any], tokenizer: Tokenizer) -> NDArray[np.int64]:
    """Return the position in `tokens` of each word's first token, [words].

    A token that is only white space belongs to the word after it.
    """
    spellings = tokenizer.spellings()
    # 1. A token that begins with white space begins a word ...
    begins = np.array([spelling[:1].isspace() for spelling in spellings])[tokens]
    # 2. ... unless the token before it was white space alone.
    blank = np.array([not spelling.strip() for spelling in spellings])
    blank[tokenizer.eos_id] = False
    begins[1:] &= ~blank[tokens[:-1]]
    # 3. So do the first token, and every token after a line end.
    begins[1:] |= tokens[:-1] == tokenizer.eos_id
    begins[0] = True
    return np.flatnonzero(begins)


def spell_words(tokens: NDArray[Any], starts: NDArray[np.int64], tokenizer: Tokenizer) -> list[str]:
    """Return the words that begin at `starts`, without the white space around them; a line end becomes a newline."""
    spellings, cache = tokenizer.spellings(), dict[bytes, str]()  # words by the bytes of their token ids
    data, size = tokens.tobytes(), tokens.itemsize
    words = []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(tokens)], strict=True):
        key = data[start * size : stop * size]
        if key not in cache:
            cache[key] = "".join(spellings[token] for token in tokens[start:stop].tolist()).strip() or "\n"
        words.append(cache[key])
    return words
