"""Word lists: the words of a trained model in the order of its ids, for a word tokenizer that must use the same ids."""

import hashlib
import json
from pathlib import Path
from typing import Any

from parnas.config.schema import TokenizerConfig
from parnas.errors import ParnasError
from parnas.runs.files import expand_user, read_json

__all__ = ["describe_tokenizer", "read_vocabulary"]

LINE_END, UNKNOWN = "<eos>", "<unk>"
_MAX_BYTES = 256 << 20
_PICKLED = (b"\x80", b"PK")  # first bytes of pickled data, and of a file of torch.save


def read_vocabulary(name: str) -> list[str]:
    r"""Return the word of each id [V] of a word list, with "\n" for the line end.

    Args:
        name: a text file in UTF-8 with one word per line, `<eos>` (line end) and `<unk>` among them; or the
            `tokenizer.json` of a run with a word tokenizer.

    Raises:
        ParnasError: the file is missing, pickled, not in UTF-8 or empty, a line is not one word, words are repeated, or
            the line end or the unknown word is missing.
    """
    path = expand_user(name)
    if path.suffix == ".json":
        return _read_tokenizer(path)
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        raise ParnasError(
            f"data.tokenizer.vocabulary is {name}, which is no file of at most {_MAX_BYTES >> 20} MiB; give a text "
            "file with one word per line."
        )
    content = path.read_bytes()
    if content.startswith(_PICKLED):
        raise ParnasError(
            f"{name} is pickled, which can run code, so it is not read. Where you trust it, write its words as a text: "
            r"""open("words.txt", "w", encoding="utf-8", newline="").write("\n".join(vocab.idx2sym) + "\n")"""
        )
    try:
        words = content.decode("utf-8").removesuffix("\n").split("\n")
    except UnicodeDecodeError as error:
        raise ParnasError(f"{name} is not a text in UTF-8 ({error.reason} at byte {error.start:,}).") from error
    if words == [""]:
        raise ParnasError(f"The word list {name} is empty; write one word per line.")
    if wrong := [number for number, word in enumerate(words, 1) if word.split() != [word]]:
        raise ParnasError(f"{name} must have one word on each line, without spaces; line {wrong[0]:,} has not.")
    _check(words, name, LINE_END)
    return ["\n" if word == LINE_END else word for word in words]


def describe_tokenizer(config: TokenizerConfig) -> dict[str, Any]:
    """Return the settings of a tokenizer, with a hash of the words in place of the path of a word list.

    So equal settings mean equal tokenizers wherever the list is, and another list has other settings.
    """
    settings = config.model_dump(mode="json")
    name = settings.pop("vocabulary")
    if name is not None:
        settings["vocabulary"] = hashlib.sha256(json.dumps(read_vocabulary(name)).encode()).hexdigest()
    return settings


def _read_tokenizer(path: Path) -> list[str]:
    """Return the words in the `tokenizer.json` of a word tokenizer."""
    settings = read_json(path)
    words = settings.get("symbols") if isinstance(settings, dict) else None
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise ParnasError(f"{path} holds no words; give the tokenizer.json of a run with data.tokenizer.kind: word.")
    _check(words, str(path), "\n")
    return words


def _check(words: list[str], name: str, line_end: str) -> None:
    """Raise `ParnasError` if words are repeated, or the line end or the unknown word is missing."""
    if len(set(words)) < len(words):
        seen = set[str]()
        repeated = next(word for word in words if word in seen or seen.add(word))  # type: ignore[func-returns-value]
        raise ParnasError(f"{name} has the word {repeated!r:.80} twice; each id must have a word of its own.")
    if missing := [word for word in (line_end, UNKNOWN) if word not in words]:
        raise ParnasError(
            f"{name} lacks {' and '.join(map(repr, missing))}; a word list has {LINE_END} for line ends and {UNKNOWN} "
            "for unknown words, at the places of their ids."
        )
