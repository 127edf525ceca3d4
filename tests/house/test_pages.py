"""Pages name files as they lie: whoever follows a name finds the file."""

from __future__ import annotations

import re

import pytest
from checkout import ROOT, files

PAGES = [path for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")) if path.name != "CHANGELOG.md"]
NAMED = re.compile(r"(?<![\w/.*<-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b")


def missing(text: str) -> set[str]:
    there = {str(file) for file in files()}
    return {
        name for name in NAMED.findall(text) if not any(f"/{file}".endswith(f"/{name}") for file in there)
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_the_files_that_a_page_names_exist(page):
    assert missing(page.read_text()) == set()


def test_a_name_without_a_file_is_seen():
    assert missing("`stages/nowhere.py`, engine.py") == {"stages/nowhere.py"}
