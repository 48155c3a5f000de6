"""Texts and token streams for the tests of parnas/data."""

import os
import random
from pathlib import Path

import numpy as np
import pytest

from parnas.data.batching import TrainingBatches

_DATA = os.environ.get("PARNAS_DATA") or Path(__file__).resolve().parents[3] / "shared"
WIKITEXT_2 = Path(_DATA) / "wikitext-2"

needs_wikitext_2 = pytest.mark.skipif(not WIKITEXT_2.is_dir(), reason=f"the real WikiText-2 is not at {WIKITEXT_2}")

ODD_TEXTS = [
    "",
    "\n",
    "\n\n\n",
    "plain words\n",
    "no line end",
    "  two  spaces , and trailing \n \n",
    "tab\tand\rreturn\r\n",
    "▁ marks ▁▁ of sentencepiece▁\n▁",
    "e\u0301 é ① ﬁ \u200b\u2028 \u00a0 x\u3000y\n",
    "日本語 🎉 👩\u200d👩\u200d👧 العربية\n",
    "<unk> <eos> <s> <0x41> <no piece> @-@ a<unk>b\n",
    "\x00\x01\x7f\x85\n",
]


def english(lines: int, seed: int = 0) -> str:
    """Return lines of made-up words, frequent and rare ones, with capitals and punctuation."""
    draw = random.Random(seed)
    syllables = ["ba", "ke", "lo", "mi", "nu", "ra", "se", "ti", "vo", "za"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(300)]
    weights = [1 / rank for rank in range(1, len(words) + 1)]
    rows = [draw.choices(words, weights, k=draw.randint(1, 15)) for _ in range(lines)]
    return "".join(" ".join(row).capitalize() + " .\n" for row in rows)


def write_corpus(folder: Path, train: str = "", valid: str = "", test: str = "") -> Path:
    """Write a corpus folder, with generated text for splits that are not given; return it."""
    folder.mkdir(parents=True, exist_ok=True)
    given = {"train": train or english(400), "valid": valid or english(40, 1), "test": test or english(40, 2)}
    for split, text in given.items():
        (folder / f"{split}.txt").write_bytes(text.encode())
    return folder


def distinct_tokens(length: int) -> np.ndarray:
    """Return tokens that are all different, so that each shows its position."""
    return np.arange(100, 100 + length, dtype=np.uint32)


def read_rows(batches: TrainingBatches, epoch: int) -> tuple[np.ndarray, np.ndarray]:
    """Return inputs and targets of all rows in an epoch, [B, tokens of a row] each."""
    read = [batches.batch(epoch * batches.segments + segment) for segment in range(batches.segments)]
    assert [batch.starts_epoch for batch in read] == [True] + [False] * (batches.segments - 1)
    return np.hstack([batch.inputs for batch in read]), np.hstack([batch.targets for batch in read])
