"""Write docs/configuration.md from the configuration's models: `python docs/make_configuration.py`."""

import types
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

import yaml

from parnas.config import walk_fields
from parnas.files import write_text
from parnas.sections import Section

PAGE = Path(__file__).with_name("configuration.md")
INTRODUCTION = """# Configuration

Made by `python docs/make_configuration.py` from the sections in `parnas/`. A YAML file sets what differs from the
defaults; the command line overrides by dotted key: `python search.py configs/wikitext2-par.yaml search.steps=20000`.
"""
SIGNS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def render() -> str:
    """The whole page: a table for each section, its own keys before those of a section inside it."""
    tables: dict[str, list[str]] = {}
    for key, field in walk_fields():
        if isinstance(field.default, Section):
            head = [f"\n## {key}\n", f"{field.description}\n", "| key | type | default | meaning |"]
            tables[key] = [*head, "| --- | --- | --- | --- |"]
        else:
            row = f"| `{key}` | {type_name(field)} | `{show(field.default)}` | {field.description} |"
            tables[key.rpartition(".")[0]].append(row)
    return "\n".join([INTRODUCTION, *(line for table in tables.values() for line in table)]) + "\n"


def type_name(field: Any) -> str:
    """The type as people write it in YAML, with its bounds."""
    bounds = [f"{SIGNS[side]} {getattr(m, side)}" for m in field.metadata for side in SIGNS if hasattr(m, side)]
    return ", ".join([describe(field.annotation), *bounds])


def describe(annotation: Any) -> str:
    """`int or null`, `post or pre`, `list of str`."""
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        return " or ".join(map(describe, inner))
    if origin is Literal:
        return " or ".join(f"`{value}`" for value in inner)
    if origin is tuple:
        return f"list of {describe(inner[0])}"
    return "null" if annotation is types.NoneType else str(annotation.__name__)


def show(default: Any) -> str:
    """A default as YAML has it."""
    value = list(default) if isinstance(default, tuple) else default
    return yaml.safe_dump(value, default_flow_style=True).removesuffix("\n...\n").strip()


if __name__ == "__main__":
    write_text(PAGE, render())
