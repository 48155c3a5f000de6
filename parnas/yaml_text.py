"""YAML as people write it, and safely: no objects are made, and nothing is executed."""

import re
from typing import Any

import yaml

from parnas.errors import ParnasError


class _Loader(yaml.SafeLoader):
    """YAML as people write it: `1e4` is a number, a key given twice is a mistake, and lists become tuples."""


def _mapping(loader: yaml.SafeLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    loader.flatten_mapping(node)
    result: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        if key in result:
            raise yaml.constructor.ConstructorError(None, None, f"{key!r} is given twice", key_node.start_mark)
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
    """Quotes the strings that `_Loader` would take for numbers."""


for _side in (_Loader, _Dumper):
    _side.add_implicit_resolver("!exponent", re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789"))


def read_yaml(text: str, source: str) -> Any:
    """Parse YAML (safe, no objects); `source` names it in the `ParnasError` for broken text."""
    try:
        return yaml.load(text, Loader=_Loader)
    except (yaml.YAMLError, ValueError, TypeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise ParnasError(f"{source} is not valid YAML: {reason}") from error


def to_yaml(tree: Any) -> str:
    """YAML that `read_yaml` reads back as the same."""
    text: str = yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True)
    return text
