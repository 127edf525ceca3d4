"""Prose of the code: first words of docstrings, and words that are no names."""

import ast
import re
from collections.abc import Iterator
from pathlib import PurePath

from checkout import ROOT, files

DOCSTRING_FOLDERS = ("compression", "conf", "pipeline", "scripts", "stages", "tests")
NAME_FOLDERS = ("compression", "pipeline")
FIRST_WORDS = ("What", "Where", "Which", "Who", "Whose", "How", "Whether")
NO_NAMES = {"told", "said", "made", "found", "near", "away", "lose", "apart", "laid", "again", "unseen"}
PUBLIC = {("pipeline/pipeline.py", "near")}  # Pipeline.near() is exported
Defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def sources(folders: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Yield the path and the text of every Python file of ``folders``."""
    for path in files():
        if path.suffix == ".py" and path.parts[0] in folders:
            yield path.as_posix(), (ROOT / path).read_text(encoding="utf-8")


def questions(source: str) -> list[str]:
    """Docstrings of ``source`` that begin with the words of a question."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Module | Defined)]
    texts = [ast.get_docstring(node) or "" for node in nodes]
    return [text for text in texts if re.match(rf"({'|'.join(FIRST_WORDS)})\b", text)]


def odd_names(path: str, source: str) -> list[str]:
    """The file, functions and classes with one of ``NO_NAMES`` as a word of their name."""
    names = [node.name for node in ast.walk(ast.parse(source)) if isinstance(node, Defined)]
    words = {name: re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_") for name in names}
    words[PurePath(path).name] = PurePath(path).stem.split("_")
    return [name for name, parts in words.items() if NO_NAMES & {*parts} and (path, name) not in PUBLIC]


def test_docstrings_begin_with_a_verb_or_a_noun():
    texts = {path: questions(source) for path, source in sources(DOCSTRING_FOLDERS)}
    assert len(texts) > 100
    assert {path: rest for path, rest in texts.items() if rest} == {}
    for text in ("What it holds.", "Whether it ends."):
        assert questions(f'"""{text}"""') == [text]
        assert questions(f'class A:\n    def b(self):\n        """{text}"""') == [text]
    assert questions('"""Whatever it holds."""') == []


def test_names_are_plain():
    names = {path: odd_names(path, source) for path, source in sources(NAME_FOLDERS)}
    assert len(names) > 50
    assert {path: rest for path, rest in names.items() if rest} == {}
    source = "def _told(): ...\nclass RunAgain: ...\ndef remade(): ...\ndef near(): ..."
    assert odd_names("pipeline/found_it.py", source) == ["_told", "RunAgain", "near", "found_it.py"]
    assert odd_names("pipeline/pipeline.py", "def near(): ...") == []
