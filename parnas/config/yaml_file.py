"""Reading text files of a bounded size, and YAML with readable numbers and errors; loading executes nothing."""

import re
from pathlib import Path
from typing import Any

import yaml

from parnas.errors import ParnasError

__all__ = ["MAX_BYTES", "read_text", "read_yaml", "to_yaml"]

MAX_BYTES = 4 << 20
"""Largest YAML file; composing one of this size takes seconds."""

MAX_SIZE = 100_000
"""Largest number of nodes, aliases expanded; each 100 characters of a scalar count as one more."""

_MERGE = "tag:yaml.org,2002:merge"


def read_text(path: Path, max_bytes: int) -> str:
    """Read a UTF-8 file; raises `ParnasError` if it is too large, in another encoding, or not a regular file."""
    if path.exists() and not path.is_file():
        raise ParnasError(f"{path} is no file; give one.")  # a device or a pipe may never end
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ParnasError(f"{path} is larger than {max_bytes:,} bytes, the limit for such a file; restore it.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ParnasError(f"{path} is not UTF-8 text; restore it or save it as UTF-8.") from error


class _Loader(yaml.SafeLoader):
    """Safe loader in which `1e4` is a number, a repeated key is an error, and lists become tuples."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.size = 0
        self.sizes: dict[yaml.Node, int] = {}  # nodes in each completed node
        self.own_keys: dict[yaml.Node, int] = {}  # keys of each mapping, without merged ones

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Count the nodes while composing, so that a text whose aliases multiply is refused before construction."""
        event, before = self.peek_event(), self.size  # type: ignore[no-untyped-call]
        node = super().compose_node(parent, index)
        if node is None:
            return None
        if not isinstance(event, yaml.AliasEvent):
            self.size += 1 + (len(node.value) // 100 if isinstance(node, yaml.ScalarNode) else 0)
            self.sizes[node] = self.size - before
        elif node in self.sizes:
            self.size += self.sizes[node]
        else:
            raise _yaml_error("an alias refers to a node that contains it", event)
        if self.size > MAX_SIZE:
            raise _yaml_error(f"it has more than {MAX_SIZE:,} values, aliases expanded", event)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Count the mapping's own keys, since merging mixes them with others."""
        node = super().compose_mapping_node(anchor)
        self.own_keys[node] = sum(key.tag != _MERGE for key, _ in node.value)
        return node


def _yaml_error(problem: str, event: Any) -> yaml.YAMLError:
    return yaml.composer.ComposerError(None, None, problem, event.start_mark)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)  # puts merged pairs first, of which later ones win
    result: dict[Any, Any] = {}
    own: set[Any] = set()
    first_own = len(node.value) - loader.own_keys[node]
    for number, (key_node, value_node) in enumerate(node.value):
        key = loader.construct_object(key_node, deep=True)
        if key in own:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
        if number >= first_own:
            own.add(key)
        result[key] = loader.construct_object(value_node, deep=True)
    return result


def _sequence(loader: yaml.SafeLoader, node: yaml.SequenceNode) -> tuple[Any, ...]:
    return tuple(loader.construct_sequence(node, deep=True))


def _exponent(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int | float:
    value = float(loader.construct_scalar(node))
    return int(value) if value.is_integer() and value < 2**53 else value


_Loader.add_constructor("tag:yaml.org,2002:map", _mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _sequence)
_Loader.add_constructor("!exponent", _exponent)


class _Dumper(yaml.SafeDumper):
    """Safe dumper that quotes strings which `_Loader` would read as numbers, and escapes all line ends."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if text and text.splitlines() != [text] else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("!exponent", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(text: str, source: str) -> Any:
    """Parse YAML without constructing objects; raises `ParnasError` naming `source` for broken or oversized text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # All but the first come from PyYAML's constructors, for tags that do not fit: !!int '' raises an IndexError.
        reason = " ".join(str(error).split())
        raise ParnasError(f"{source} is not valid YAML: {reason}") from error


def to_yaml(tree: Any) -> str:
    """Return YAML that `read_yaml` reads back unchanged."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
