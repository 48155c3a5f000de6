"""What a module lists in `__all__` is what other folders use; the rest is internal to its folder."""

import ast
from collections import defaultdict
from pathlib import Path

import parnas

ROOT = Path(parnas.__file__).parent
FOR_USERS = {"parnas", "parnas.export", "parnas.model.layers"}  # their names need no user in the package
PAGES = "\n".join(page.read_text("utf-8") for page in [*ROOT.parent.glob("docs/*.md"), ROOT.parent / "README.md"])


def parse_modules() -> dict[str, ast.Module]:
    """Return the syntax tree of each module by name."""
    paths = {path.relative_to(ROOT.parent).with_suffix(""): path for path in sorted(ROOT.rglob("*.py"))}
    return {".".join(name.parts).removesuffix(".__init__"): ast.parse(path.read_text()) for name, path in paths.items()}


def folder(module: str) -> str:
    """Return the folder of a module: `parnas.nas` of `parnas.nas.derive`."""
    return ".".join(module.split(".")[:2])


def names_used_elsewhere(modules: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Return the names of each module that modules of other folders import or read as an attribute of it."""
    used: dict[str, set[str]] = defaultdict(set)
    for user, tree in modules.items():
        aliases: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and node.module in modules:
                for imported in node.names:
                    if (module := f"{node.module}.{imported.name}") in modules:
                        aliases[imported.asname or imported.name] = module
                    elif folder(user) != folder(node.module):
                        used[node.module].add(imported.name)
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in aliases:
                module = aliases[node.value.id]
                if folder(user) != folder(module) and not node.attr.startswith("__"):
                    used[module].add(node.attr)
    return used


def listed_names(tree: ast.Module) -> set[str]:
    """Return the names in `__all__` of a module, none where it has no such list."""
    lists = [
        node.value for node in tree.body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    ]
    return set(ast.literal_eval(lists[0])) if lists else set()


def test_all_lists_what_other_folders_use() -> None:
    modules = parse_modules()
    used = names_used_elsewhere(modules)
    listed = {name: listed_names(tree) for name, tree in modules.items()}
    missing = {name: names - listed[name] for name, names in used.items() if names - listed[name]}
    assert missing == {}
    unused = {
        f"{name}.{entry}"
        for name in modules
        for entry in listed[name] - used[name]
        if name not in FOR_USERS and entry not in PAGES
    }
    assert unused == set()
