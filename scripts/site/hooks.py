"""Hooks of mkdocs: the text of ``--help`` on the page of options, and links that leave docs/."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

from penstock.conf.schema import PlanningConfig, TrainConfig
from penstock.scripts.command_line import help_text

ROOT = Path(__file__).parents[2]
BESIDE = ("CONTRIBUTING.md", "SECURITY.md")  # pages of the root that are part of the site
SCHEMAS = {"train": TrainConfig, "plan": PlanningConfig}


def on_files(files: Files, *, config: Any) -> None:
    """Add the pages of the root."""
    for name in BESIDE:
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Fill in the help, and name files that are not part of the site in the place of linking them."""
    markdown = re.sub(
        r"<!-- help: (\w+) -->", lambda m: f"```text\n{help_text(m[1], SCHEMAS[m[1]])}\n```", markdown
    )
    in_root = page.file.src_uri in BESIDE

    def link(match: re.Match[str]) -> str:
        text, target = match.groups()
        if in_root:
            target = target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"
        outside = target.removeprefix("../")
        if target == outside or outside in BESIDE:
            return f"[{text}]({outside})"
        return f"`{outside}`"

    return re.sub(r"(?<!!)\[([^\]]+)\]\((?!http|#)([^)]+)\)", link, markdown)
