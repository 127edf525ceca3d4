"""No file of the folder imports in a circle, for type checkers included."""

import ast
import graphlib

from checkout import ROOT

FOLDER = ROOT / "stages" / "memory"


def imported(source):
    """The files of the folder that ``source`` imports."""
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    return {str(node.module or node.names[0].name) for node in nodes if node.level == 1}


def test_no_circle_of_imports():
    files = {path.stem: imported(path.read_text()) for path in FOLDER.glob("*.py")}
    assert "packer" in files["hooks"]
    order = list(graphlib.TopologicalSorter(files).static_order())  # raises CycleError
    assert set(order) == set(files)
