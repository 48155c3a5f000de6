"""Read text files of bounded size, and read and write YAML in which `1e4` is a number; reading executes nothing."""

import re
from pathlib import Path
from typing import Any

import yaml

from parnas.errors import ParnasError

__all__ = ["MAX_BYTES", "read_text", "read_yaml", "to_yaml"]

MAX_BYTES = 4 << 20
"""Largest size of a YAML file; parsing a file of this size takes seconds."""

MAX_SIZE = 100_000
"""Largest number of values in a YAML text; each 100 characters of a string count as one more."""


def read_text(path: Path, max_bytes: int) -> str:
    """Read a UTF-8 file; raise `ParnasError` if it is too large, in another encoding, or not a regular file."""
    if path.exists() and not path.is_file():  # reading a device or a pipe may never end
        raise ParnasError(f"{path} is not a regular file; give the path of a file.")
    with path.open("rb") as file:
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise ParnasError(f"{path} is larger than {max_bytes:,} bytes, the limit; give a smaller file.")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ParnasError(f"{path} is not UTF-8 text; restore it or save it as UTF-8.") from error


class _Loader(yaml.SafeLoader):
    """Safe loader in which `1e4` is a number, lists become tuples, and repeated keys and aliases are errors."""

    size = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Compose a node; raise `YAMLError` for an alias, or once the text has more than `MAX_SIZE` values."""
        event = self.peek_event()  # type: ignore[no-untyped-call]
        self.size += 1 + len(getattr(event, "value", "")) // 100
        if self.size > MAX_SIZE:
            raise _yaml_error(f"it has more than {MAX_SIZE:,} values", event)
        if isinstance(event, yaml.AliasEvent):
            raise _yaml_error(f"the alias *{event.anchor} is not supported; write the value instead", event)
        return super().compose_node(parent, index)


def _yaml_error(problem: str, place: Any) -> yaml.YAMLError:
    """Return an error at the line and column where an event or a node starts."""
    return yaml.MarkedYAMLError(None, None, problem, place.start_mark)


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in result:
            raise _yaml_error(f"{key!r} is given twice", key_node)
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
    """Safe dumper without aliases that quotes strings which `_Loader` would read as numbers, and escapes line ends."""

    def ignore_aliases(self, data: Any) -> bool:  # noqa: ARG002
        return True


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if text and text.splitlines() != [text] else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("!exponent", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(text: str, source: str) -> Any:
    """Parse YAML to plain values; raise `ParnasError`, naming `source`, if it is invalid, too large or has aliases."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # PyYAML itself raises the errors after the first one, for tags that do not fit: !!int '' raises an IndexError.
        reason = " ".join(str(error).split())
        raise ParnasError(f"{source} is not valid YAML: {reason}") from error


def to_yaml(tree: Any) -> str:
    """Return YAML that `read_yaml` reads back unchanged."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
