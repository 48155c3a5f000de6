"""Corpora: find a text by name, folder or file, check it, and divide it into train, valid and test."""

import difflib
import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from parnas.data.cache import Note, cached_value, file_hash, silent
from parnas.data.datasets import DATASETS, SPLITS, find_dataset, first_file, split_names
from parnas.data.pydoc_text import gather_pydoc
from parnas.data.text import TextSlice
from parnas.errors import ParnasError
from parnas.runs.files import expand_user

__all__ = ["NAMES", "find_corpus"]

_HELD_OUT_SHARE = 0.05
"""Share of the lines of a single text file that becomes valid; test gets the same share."""

_PYDOC = "pydoc"
NAMES = (*DATASETS, _PYDOC)


@dataclass(frozen=True)
class Corpus:
    """A text in three splits.

    Attributes:
        fingerprint: SHA-256 of the content of the splits, independent of their paths.
    """

    name: str
    splits: Mapping[str, TextSlice]
    fingerprint: str


def find_corpus(name: str, note: Note = silent) -> Corpus:
    """Return the corpus that `name` names: one of `NAMES`, a folder (train.txt, valid.txt, test.txt) or a text file.

    A text file is split 90/5/5 by lines. Files and folders of the user must be in UTF-8. A dataset is read from
    `$PARNAS_DATA/<name>/`, else downloaded into the cache, and its published hashes are checked in both cases.

    Raises:
        ParnasError: The text is missing, empty, too short, binary, wrongly encoded or not as published.
    """
    try:
        if name in DATASETS:
            splits = find_dataset(DATASETS[name], note)
        elif name == _PYDOC:
            splits = _splits_of_folder(gather_pydoc(note))
        else:
            splits = _splits_of_path(expand_user(name))
        return Corpus(name, splits, _fingerprint(splits))
    except OSError as error:
        raise ParnasError(
            f"The corpus {name} cannot be read: {error}. Check that the file exists and is readable."
        ) from error


def _splits_of_path(path: Path) -> dict[str, TextSlice]:
    """Return the splits of the user's folder or file; raise `ParnasError` if a file is not UTF-8 text."""
    splits = _splits_of_folder(path) if path.is_dir() else _splits_of_file(path)
    for file in {text.path: None for text in splits.values()}:
        cached_value(file, "is UTF-8", partial(_check_text, TextSlice.whole(file)))
    return splits


def _splits_of_folder(folder: Path) -> dict[str, TextSlice]:
    """Return the splits in a folder; raise `ParnasError` if one is missing or empty."""
    paths = {split: first_file(folder, split_names(split)) for split in SPLITS}
    if missing := [split for split, path in paths.items() if path is None]:
        raise ParnasError(
            f"{folder} lacks {' and '.join(f'{split}.txt' for split in missing)}; "
            "a corpus folder holds train.txt, valid.txt and test.txt. To split one text automatically, give its file."
        )
    splits = {split: TextSlice.whole(path) for split, path in paths.items() if path is not None}
    for text in splits.values():
        if not text.bytes:
            raise ParnasError(f"{text.path} is empty; put text into it.")
    return splits


def _splits_of_file(path: Path) -> dict[str, TextSlice]:
    """Return the splits of a text file: train first, then valid, then test, each with at least one line."""
    if not path.exists():
        near = difflib.get_close_matches(str(path), NAMES, 1)
        raise ParnasError(
            f"There is no corpus {path}; give an existing text file or folder, or one of {', '.join(NAMES)}."
            + (f" Did you mean {near[0]}?" if near else "")
        )
    whole = TextSlice.whole(path)
    if not whole.bytes:
        raise ParnasError(f"{path} is empty; put text into it.")
    cuts = [0, *cached_value(path, f"lines held out: {_HELD_OUT_SHARE}", partial(_held_out, whole)), whole.bytes]
    return {split: TextSlice(path, *cuts[i : i + 2]) for i, split in enumerate(SPLITS)}


def _held_out(text: TextSlice) -> tuple[int, int]:
    """Return the byte offsets in a text at which its splits valid and test begin."""
    starts = _line_starts(text)
    held_out = max(1, round(len(starts) * _HELD_OUT_SHARE))
    if len(starts) <= 2 * held_out:
        raise ParnasError(
            f"{text.path} is too short to be split by lines into train, valid and test: it has {len(starts)} line(s), "
            "but needs at least 3. Give more text, or a folder with train.txt, valid.txt and test.txt."
        )
    return starts[-2 * held_out], starts[-held_out]


def _line_starts(text: TextSlice) -> "array[int]":
    """Return the byte offset at which each line of a text begins."""
    starts = array("q", [0])
    offset = 0
    for block in text.blocks():
        ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n")) + offset + 1
        starts.extend(ends.tolist())
        offset += len(block)
    if starts[-1] == text.bytes:
        starts.pop()
    return starts


def _check_text(text: TextSlice) -> None:
    """Raise `ParnasError` with the position of the first invalid byte if a text is not UTF-8."""
    offset = 0
    for block in text.blocks():
        if (nul := block.find(b"\0")) >= 0:
            raise ParnasError(
                f"{text.path} is not UTF-8 text: there is a NUL at byte {offset + nul:,}. It may be binary, or UTF-16; "
                "give plain text, saved as UTF-8."
            )
        try:
            block.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ParnasError(
                f"{text.path} is not UTF-8 text: byte {offset + error.start:,} is 0x{block[error.start]:02X} "
                f"({error.reason}). Save it as UTF-8, for example by: iconv -f latin1 -t utf-8"
            ) from error
        offset += len(block)


def _fingerprint(splits: Mapping[str, TextSlice]) -> str:
    """Return a SHA-256 of the contents of the splits, independent of their paths."""
    content = {split: [file_hash(text.path, "sha256"), text.start, text.stop] for split, text in splits.items()}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
