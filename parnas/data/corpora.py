"""Corpora: `find_corpus` turns a name or a path into three checked splits of text."""

import difflib
import hashlib
import json
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from parnas.data.cache import Note, silent
from parnas.data.known import KNOWN, SPLITS, file_hash, find_known, first_file, split_names
from parnas.data.pydoc_text import gather_pydoc
from parnas.data.remembered import remember
from parnas.data.text import TextSlice
from parnas.errors import ParnasError
from parnas.files import expand_user

__all__ = ["SPLITS", "Corpus", "TextSlice", "find_corpus"]

HELD_OUT_SHARE = 0.05
"""Of the lines of a single text file: this much for valid, and as much for test."""


PYDOC = "pydoc"
NAMES = (*KNOWN, PYDOC)


@dataclass(frozen=True)
class Corpus:
    """A text in three splits.

    fingerprint: SHA-256 of the content of the splits, whatever their paths.
    """

    name: str
    splits: Mapping[str, TextSlice]
    fingerprint: str


def find_corpus(name: str, note: Note = silent) -> Corpus:
    """The corpus of that name (`KNOWN`, or pydoc), folder (train.txt, valid.txt, test.txt) or text file.

    A text file is split 90/5/5 by lines. Known corpora are looked for in `$PARNAS_DATA/<name>/` first, else
    downloaded into the cache, and compared with their published hashes either way; a path's files must be UTF-8.

    Raises `ParnasError` for what is missing, empty, too short, binary, wrongly encoded or not as published.
    """
    try:
        if name in KNOWN:
            splits = find_known(KNOWN[name], note)
        elif name == PYDOC:
            splits = _splits_of_folder(gather_pydoc(note))
        else:
            splits = _splits_of_path(expand_user(name))
        return Corpus(name, splits, _fingerprint(splits))
    except OSError as error:
        raise ParnasError(
            f"The corpus {name} cannot be read: {error}. See that the file is there and readable."
        ) from error


def _splits_of_path(path: Path) -> dict[str, TextSlice]:
    splits = _splits_of_folder(path) if path.is_dir() else _splits_of_file(path)
    for file in {text.path: None for text in splits.values()}:
        remember(file, "is UTF-8", partial(_check_text, TextSlice.whole(file)))
    return splits


def _splits_of_folder(folder: Path) -> dict[str, TextSlice]:
    found = {split: first_file(folder, split_names(split)) for split in SPLITS}
    if missing := [split for split, path in found.items() if path is None]:
        raise ParnasError(
            f"{folder} lacks {' and '.join(f'{split}.txt' for split in missing)}; "
            "a corpus folder holds train.txt, valid.txt and test.txt. To have one text split for you, name the file."
        )
    splits = {split: TextSlice.whole(path) for split, path in found.items() if path is not None}
    for text in splits.values():
        if not text.bytes:
            raise ParnasError(f"{text.path} is empty; put text into it.")
    return splits


def _splits_of_file(path: Path) -> dict[str, TextSlice]:
    """Cut a file at line ends: the last lines are test, those before valid, at least one line each."""
    if not path.exists():
        near = difflib.get_close_matches(str(path), NAMES, 1)
        raise ParnasError(
            f"There is no corpus {path}: it is no file or folder here, and the known names are {', '.join(NAMES)}."
            + (f" Did you mean {near[0]}?" if near else "")
        )
    whole = TextSlice.whole(path)
    if not whole.bytes:
        raise ParnasError(f"{path} is empty; put text into it.")
    cuts = [0, *remember(path, f"lines held out: {HELD_OUT_SHARE}", partial(_held_out, whole)), whole.bytes]
    return {split: TextSlice(path, *cuts[i : i + 2]) for i, split in enumerate(SPLITS)}


def _held_out(text: TextSlice) -> tuple[int, int]:
    """Where valid and test begin."""
    starts = _line_starts(text)
    held_out = max(1, round(len(starts) * HELD_OUT_SHARE))
    if len(starts) <= 2 * held_out:
        raise ParnasError(
            f"{text.path} is too short to be split by lines into train, valid and test: it has {len(starts)} line(s), "
            "and 3 is the least. Give more text, or a folder with train.txt, valid.txt and test.txt."
        )
    return starts[-2 * held_out], starts[-held_out]


def _line_starts(text: TextSlice) -> "array[int]":
    """Byte offset of every line's first byte."""
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
    """Raise `ParnasError` where a file is no UTF-8 text, naming the byte."""
    offset = 0
    for block in text.blocks():
        if (nul := block.find(b"\0")) >= 0:
            raise ParnasError(
                f"{text.path} is no UTF-8 text: there is a NUL at byte {offset + nul:,}. It may be binary, or UTF-16; "
                "give plain text, saved as UTF-8."
            )
        try:
            block.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ParnasError(
                f"{text.path} is no UTF-8 text: byte {offset + error.start:,} is 0x{block[error.start]:02X} "
                f"({error.reason}). Save it as UTF-8, for example by: iconv -f latin1 -t utf-8"
            ) from error
        offset += len(block)


def _fingerprint(splits: Mapping[str, TextSlice]) -> str:
    content = {split: [file_hash(text.path, "sha256"), text.start, text.stop] for split, text in splits.items()}
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()
