"""The site of docs/: every page is in the menu, every public name in the reference, no warning."""

import re
import subprocess
import sys

import pytest
import yaml
from checkout import ROOT

import penstock

PAGES = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}


def test_the_reference_has_every_public_name():
    page = (ROOT / "docs" / "api.md").read_text()
    assert sorted(re.findall(r"^::: penstock\.(\w+)$", page, flags=re.MULTILINE)) == sorted(penstock.__all__)


def test_the_menu_has_every_page():
    entries = yaml.safe_load((ROOT / "mkdocs.yml").read_text())["nav"]
    files = [page for section in entries for page in re.findall(r"[\w/]+\.md", str(section))]
    assert sorted(files) == sorted({*PAGES, "CONTRIBUTING.md", "SECURITY.md"})


@pytest.mark.slow
def test_the_site_builds_without_a_warning_and_asks_no_network(tmp_path):
    pytest.importorskip("material", reason='the site needs pip install -e ".[docs]"')
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {page.name: page.read_text() for page in tmp_path.glob("*.html")}
    assert {"index.html", "api.html", "options.html", "SECURITY.html"} <= pages.keys()
    assert "memory.writeout_layers" in pages["options.html"]
    assert "Pipeline.step" in pages["api.html"]
    for name, text in pages.items():
        assert not re.search(r'<(?:script|link|img)[^>]+(?:src|href)="https?://', text), name
