"""Imports: the files of the checkout as a graph.

An import is one wherever it stands: at the top, in a function, for types alone. What a file starts by its
name (a process, ``importlib``, a ``_target_`` of Hydra) is no import."""

import ast
import functools
from collections.abc import Iterable, Iterator
from pathlib import Path

from checkout import ROOT

import penstock

SCRIPTS = tuple(Path("scripts", name) for name in ("bench", "coverage", "examples", "notebooks", "site"))
BARE = (Path("tests/support"), Path("tests/laws"), *SCRIPTS)
"""Folders whose modules are imported by their bare names, as ``pythonpath`` in setup.cfg has them."""


def names_in(tree: ast.AST, package: str) -> Iterator[str]:
    """Yield the full dotted name of whatever the code, a module in ``package``, imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package.split(".")
            above = parts[: len(parts) - node.level + 1] if node.level else []
            yield from (".".join([*above, *filter(None, [node.module]), alias.name]) for alias in node.names)


def package_of(path: Path) -> str:
    """The package of a file of ours."""
    return ".".join(["penstock", *path.parts[:-1]])


@functools.cache
def imports_of(path: Path) -> set[Path]:
    """The files of the checkout that a file of it imports; all relative to the checkout.

    A name that the root exports lazily (``penstock.trace``) stands for the file that defines it, and the root
    itself imports nothing.
    """
    if path == Path("__init__.py"):
        return set()
    tree = ast.parse((ROOT / path).read_text())
    tested = path.parts[0] == "tests" or path.parent in BARE
    names = [*names_in(tree, "" if tested else package_of(path)), *_attributes_of_the_root(tree)]
    ours = {_ours(name) for name in names if f"{name}.".startswith("penstock.")}
    bare = {_bare(name, path) for name in names} if tested else set()
    return {file for file in ours | bare if file and file != path}


def reached_from(paths: Iterable[Path]) -> set[Path]:
    """The files, all that they import, what these import, and so on; with the packages that hold them."""
    found, left = set(), [*paths]
    while left:
        path = left.pop()
        if path not in found:
            found.add(path)
            left += imports_of(path)
            package = path.with_name("__init__.py")
            left += [package] if (ROOT / package).is_file() else []
    return found


def _attributes_of_the_root(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "penstock"
        ):
            yield f"penstock.{node.attr}"


def _ours(name: str) -> Path | None:
    """The file of ``penstock.a.b.c``, which may be a module, a package, or a name in one of them."""
    parts = name.split(".")[1:]
    if parts and parts[0] in penstock._HOMES:
        parts = penstock._HOMES[parts[0]].split(".")
    for length in range(len(parts), -1, -1):
        path = Path(*parts[:length])
        for file in (path.with_suffix(".py") if length else path, path / "__init__.py"):
            if (ROOT / file).is_file():
                return file
    return None


def _bare(name: str, path: Path) -> Path | None:
    folders = (path.parent, *BARE)
    file = Path(name.partition(".")[0]).with_suffix(".py")
    return next((folder / file for folder in folders if (ROOT / folder / file).is_file()), None)
