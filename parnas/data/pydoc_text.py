"""The embedded corpus: the English prose in this Python's own documentation, gathered without running any of it."""

import ast
import hashlib
import platform
import re
import sysconfig
import warnings
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from parnas.data.cache import Note, cache_dir, locked, silent
from parnas.errors import ParnasError
from parnas.files import folder_in_one_piece, write_text

SHARES = {"train": 0.9, "valid": 0.05, "test": 0.05}
FORMAT = 2

_SKIPPED = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "idlelib",
    "lib2to3",
    "lib-dynload",
    "turtledemo",
    "ensurepip",
    "distutils",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
_CODE = re.compile(r">>>|::=|^\s*\||[-=*~^]{6}|\w\(.*\)\s*->", re.MULTILINE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def gather_pydoc(note: Note = silent) -> Path:
    """A folder in the cache with train.txt, valid.txt and test.txt, written once for each version of Python.

    One line is one paragraph; a document (a topic of `help()`, or a module's docstrings) lies in one split whole.
    A paragraph that occurs again is left out, so that no split repeats another.

    Raises `ParnasError` where Python came without its sources, or the cache cannot be written.
    """
    folder = cache_dir() / "corpora" / f"pydoc-{platform.python_version()}-{FORMAT}"
    with locked(folder, note):
        if not folder.is_dir():
            note("gathering Python's documentation")
            splits = split_documents(unique_paragraphs(_documents()))
            if not all(splits.values()):
                raise ParnasError(
                    "This Python came without the sources of its standard library, so there is no corpus pydoc; "
                    "give data.corpus another one, such as a text file."
                )
            with folder_in_one_piece(folder) as beside:
                for split, paragraphs in splits.items():
                    write_text(beside / f"{split}.txt", "".join(f"{paragraph}\n" for paragraph in paragraphs))
    return folder


def unique_paragraphs(documents: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """The prose of each named document, a paragraph a string, leaving out what an earlier one said."""
    seen: set[str] = set()
    result = {}
    for name, text in documents:
        fresh = [paragraph for paragraph in dict.fromkeys(prose(text)) if paragraph not in seen]
        seen.update(fresh)
        if fresh:
            result[name] = fresh
    return result


def prose(text: str) -> Iterator[str]:
    """The paragraphs of English among a text's examples, tables, grammars and signatures, each on one line."""
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        line = " ".join(words)
        plain = sum(character.isalpha() or character == " " for character in line)
        if len(words) >= 4 and plain >= 0.8 * len(line) and not _CODE.search(paragraph):
            yield line


def split_documents(documents: dict[str, list[str]]) -> dict[str, list[str]]:
    """Share the documents out whole, about 90/5/5 by characters, in an order that only their names decide."""
    splits: dict[str, list[str]] = {split: [] for split in SHARES}
    sizes = dict.fromkeys(SHARES, 0)
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        size = sum(map(len, documents[name]))
        split = min(SHARES, key=lambda split: (sizes[split] + size) / SHARES[split])
        splits[split] += documents[name]
        sizes[split] += size
    return splits


def _documents() -> Iterator[tuple[str, str]]:
    """Name and text: the topics of `help()`, then each standard module's docstrings in the order of its source."""
    with suppress(ImportError):  # Some systems package the topics apart; the docstrings remain.
        yield from sorted(import_module("pydoc_data.topics").topics.items())
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED.isdisjoint(parts) and not parts[0].startswith("config-"):
            yield "/".join(parts), "\n\n".join(_docstrings(path))


def _docstrings(path: Path) -> list[str]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]
