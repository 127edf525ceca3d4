"""Every test of a run types in an empty folder."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    yield
    for name in ("own", "mine"):  # a module of the user's own, in that folder
        sys.modules.pop(name, None)
