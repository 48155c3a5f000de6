"""YAML as people write it, and safely: no objects are made, and nothing is executed."""

import re
from typing import Any

import yaml

from parnas.errors import ParnasError

MAX_BYTES = 4 << 20
"""Of a YAML file; composing so much takes seconds."""

MAX_SIZE = 100_000
"""Nodes of a text, each alias counting as much as what it stands for, and scalars once more for each 100 characters."""

_MERGE = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e4` is a number, a key given twice is a mistake, and lists become tuples."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.size = 0
        self.sizes: dict[yaml.Node, int] = {}  # of the nodes that are whole
        self.own_keys: dict[yaml.Node, int] = {}  # of mappings: how many keys stand there themselves, not merged ones

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Count the nodes as they come, so that nothing is made of a text whose aliases multiply."""
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
            raise _refusal("an alias stands for what holds it", event)
        if self.size > MAX_SIZE:
            raise _refusal(f"it comes to more than {MAX_SIZE:,} values, as often as aliases repeat them", event)
        return node

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        """Remember which keys are its own, since merging mixes them with others."""
        node = super().compose_mapping_node(anchor)
        self.own_keys[node] = sum(key.tag != _MERGE for key, _ in node.value)
        return node


def _refusal(problem: str, event: Any) -> yaml.YAMLError:
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
    """Quotes the strings that `_Loader` would take for numbers, and escapes line ends of all kinds."""


def _string(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    style = '"' if text and text.splitlines() != [text] else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _string)


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("!exponent", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(text: str, source: str) -> Any:
    """Parse YAML (safe, no objects); `source` names it in the `ParnasError` for broken or oversized text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        # All but the first come from PyYAML's constructors, for tags that do not fit: !!int '' is an IndexError there.
        reason = " ".join(str(error).split())
        raise ParnasError(f"{source} is not valid YAML: {reason}") from error


def to_yaml(tree: Any) -> str:
    """YAML that `read_yaml` reads back as the same."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
