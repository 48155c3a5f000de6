"""The files around the code agree with each other."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[2]


def text_of(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    assert yaml.safe_load(text_of("CITATION.cff"))["version"] == version
    newest = re.search(r"^## \[([^\]]+)\] - (\d{4}-\d\d-\d\d|unreleased)$", text_of("CHANGELOG.md"), flags=re.MULTILINE)
    assert newest
    assert newest[1] == version


def test_the_citation_has_what_its_format_asks_for_and_both_papers() -> None:
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["license"] == tomllib.loads(text_of("pyproject.toml"))["project"]["license"]
    for paper, number in zip(citation["references"], ("2009.04534", "1901.02860"), strict=True):
        assert {"type", "title", "authors"} <= paper.keys()
        assert paper["url"].endswith(number)
        assert number in text_of("README.md")


def test_commits_are_checked_as_make_lint_does() -> None:
    hooks = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    recipe = text_of("Makefile").partition("\nlint:")[2].partition("\n\n")[0]
    checked = [line.removesuffix(" .") for line in re.findall(r"\$\(BIN\)/(.+)", recipe.replace("--check ", ""))]
    assert [hook["entry"] for hook in hooks] == checked
    assert {hook["language"] for hook in hooks} == {"system"}


def imported(nodes: Iterable[ast.AST]) -> set[str]:
    """The packages of others that import statements name, `torch` for `torch.nn`."""
    names: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add(str(node.module))
    return {name.partition(".")[0] for name in names} - {*sys.stdlib_module_names, "parnas"}


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", re.split(r"[<>=;\[ ]", name)[0]).lower()


OWNERS = {"fla": ["fla-core"]}  # packages of extras whose modules have another name


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads(text_of("pyproject.toml"))["project"]
    needed = set(map(normalized, project["dependencies"]))
    extras = {normalized(name) for extra in project["optional-dependencies"].values() for name in extra}
    owners = metadata.packages_distributions()
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "parnas").rglob("*.py")}
    assert len(modules) > 100
    for path, tree in modules.items():
        at_once, ever = imported(tree.body), imported(ast.walk(tree))
        for name in ever:
            known = OWNERS.get(name, [name])  # of an extra that is not installed
            owned_by = set(map(normalized, owners.get(name, known)))
            assert owned_by & (needed if name in at_once else needed | extras), f"{path.name} imports {name}"


def test_every_module_is_named_by_the_contract_of_imports() -> None:
    contract = text_of("pyproject.toml").partition("[tool.importlinter]")[2]
    modules = {path.stem for path in (ROOT / "parnas").iterdir() if path.suffix == ".py"} - {"__init__"}
    packages = {path.parent.name for path in (ROOT / "parnas").glob("*/__init__.py")}
    assert {name for name in modules | packages if f"parnas.{name}" not in contract} == set()
