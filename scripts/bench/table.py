"""The rows of a bench for people: a heading for each column, and the words that a row has there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from rich.table import Table

Row = Mapping[str, Any]


def table(
    *groups: Iterable[Row], columns: Mapping[str, Callable[[Row], str]], left: Iterable[str], **options: Any
) -> Table:
    """Return ``groups`` of rows, ruled off from each other; a cell of which a row says nothing stays empty.

    Args: columns: heading and words of each. left: headings of columns that begin on the left.
          options: of ``rich.table.Table``.
    """
    shown = Table(**options)
    for heading in columns:
        shown.add_column(heading, justify="left" if heading in left else "right", no_wrap=True)
    for rows in groups:
        for row in rows:
            shown.add_row(*(_cell(words, row) for words in columns.values()))
        shown.add_section()
    return shown


def spread(values: Iterable[float]) -> str:
    """The least and the most of ``values``."""
    listed = list(values)
    return f"{min(listed):.2f}-{max(listed):.2f}"


def _cell(words: Callable[[Row], str], row: Row) -> str:
    try:
        return words(row)
    except KeyError:
        return ""
