"""The corpus pydoc: English prose from the documentation of the installed Python, read without running any code."""

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
from parnas.runs.files import atomic_folder, write_text

SHARES = {"train": 0.9, "valid": 0.05, "test": 0.05}
_FORMAT = 2

_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "idlelib", "lib2to3", "lib-dynload"}
_SKIPPED |= {"turtledemo", "ensurepip", "distutils", "encodings", "pydoc_data", "__pycache__"}
"""Folders of the standard library without documentation for users."""
_CODE = re.compile(r">>>|::=|^\s*\||[-=*~^]{6}|\w\(.*\)\s*->", re.MULTILINE)
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


def gather_pydoc(note: Note = silent) -> Path:
    """Return a folder in the cache with train.txt, valid.txt and test.txt, written once for each version of Python.

    Each line is a paragraph. A document (a topic of `help()`, or a module's docstrings) lies in one split as a whole.
    Each paragraph occurs only once, so that no split repeats text of another.

    Raises:
        ParnasError: Python is installed without its sources, or the cache cannot be written.
    """
    folder = cache_dir() / "corpora" / f"pydoc-{platform.python_version()}-{_FORMAT}"
    with locked(folder, note):
        if not folder.is_dir():
            note("gathering Python's documentation")
            splits = _split_documents(_unique_paragraphs(_documents()))
            if not all(splits.values()):
                raise ParnasError(
                    "This Python came without the sources of its standard library, so there is no corpus pydoc; "
                    "set data.corpus to another corpus, such as a text file."
                )
            with atomic_folder(folder) as unfinished:
                for split, paragraphs in splits.items():
                    write_text(unfinished / f"{split}.txt", "".join(f"{paragraph}\n" for paragraph in paragraphs))
    return folder


def _unique_paragraphs(documents: Iterator[tuple[str, str]]) -> dict[str, list[str]]:
    """Return the paragraphs of each document that no earlier document has, without documents that have none."""
    seen: set[str] = set()
    unique = {}
    for name, text in documents:
        paragraphs = [paragraph for paragraph in dict.fromkeys(prose(text)) if paragraph not in seen]
        seen.update(paragraphs)
        if paragraphs:
            unique[name] = paragraphs
    return unique


def prose(text: str) -> Iterator[str]:
    """Yield the English paragraphs of a text, each on one line, without examples, tables, grammars and signatures."""
    for paragraph in re.split(r"\n\s*\n", text):
        words = paragraph.split()
        line = " ".join(words)
        plain = sum(character.isalpha() or character == " " for character in line)
        if len(words) >= 4 and plain >= 0.8 * len(line) and not _CODE.search(paragraph):
            yield line


def _split_documents(documents: dict[str, list[str]]) -> dict[str, list[str]]:
    """Assign whole documents to the splits, about 90/5/5 by characters, in the order of the hashes of their names."""
    splits: dict[str, list[str]] = {split: [] for split in SHARES}
    sizes = dict.fromkeys(SHARES, 0)
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        size = sum(map(len, documents[name]))
        split = min(SHARES, key=lambda split: (sizes[split] + size) / SHARES[split])
        splits[split] += documents[name]
        sizes[split] += size
    return splits


def _documents() -> Iterator[tuple[str, str]]:
    """Yield (name, text) for each topic of `help()`, then for the docstrings of each module of the standard library."""
    with suppress(ImportError):  # some systems package the topics separately; the docstrings remain
        yield from sorted(import_module("pydoc_data.topics").topics.items())
    root = Path(sysconfig.get_path("stdlib"))
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).parts
        if _SKIPPED.isdisjoint(parts) and not parts[0].startswith("config-"):
            yield "/".join(parts), "\n\n".join(_docstrings(path))


def _docstrings(path: Path) -> list[str]:
    """Return the docstrings of a Python file in order; an empty list if the file cannot be read or parsed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return []
    nodes = [node for node in ast.walk(tree) if isinstance(node, _DOCUMENTED)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [text for node in nodes if (text := ast.get_docstring(node))]
