"""A table as data, and its three forms: terminal, Markdown, CSV."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

NOTHING = "–"


@dataclass(frozen=True)
class Section:
    """One grid of cells. The first column groups the rows: it is shown when it changes."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 2
    """How many columns from the left hold words; the others hold numbers and stand to the right."""

    def starts_group(self, i: int) -> bool:
        return i == 0 or self.rows[i][0] != self.rows[i - 1][0]


@dataclass(frozen=True)
class Table:
    title: str
    sections: Sequence[Section]
    notes: Sequence[str] = ()
    """The caption: where the numbers come from and how to read them."""
    records: Sequence[Mapping[str, Any]] = field(default=(), repr=False)
    """The same numbers unrounded, one dict per row, for CSV."""


def to_markdown(table: Table) -> str:
    """GitHub's tables under headings, the notes as a list below."""
    lines = [f"## {table.title}", ""]
    for section in table.sections:
        if section.title:
            lines += [f"### {section.title}", ""]
        words = section.text_columns
        rule = ["---" if i < words else "--:" for i in range(len(section.columns))]
        lines += [_markdown_row(section.columns), "|" + "|".join(rule) + "|"]
        for i, row in enumerate(section.rows):
            lines.append(_markdown_row(row if section.starts_group(i) else ["", *row[1:]]))
        lines.append("")
    return "\n".join([*lines, *(f"- {note}" for note in table.notes), ""])


def _markdown_row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def show(table: Table) -> None:
    """Print to the terminal; in plain Markdown where rich is not installed."""
    try:
        from rich import box
        from rich.console import Console
        from rich.table import Table as RichTable
        from rich.text import Text
    except ImportError:
        print(to_markdown(table))
        return
    console = Console()
    # Into a file or a pipe the table keeps its width: a cut number is worse than a long line.
    if not console.is_terminal:
        console = Console(width=200)
    console.print(Text(table.title, style="bold"))
    for section in table.sections:
        grid = RichTable(
            title=Text(section.title) if section.title else None, box=box.SIMPLE_HEAD, title_justify="left"
        )
        for i, column in enumerate(section.columns):
            # On a narrow terminal words go on in the next line; numbers are never broken or cut.
            words = i < section.text_columns
            width = None if words else max((len(row[i]) for row in section.rows), default=1)
            grid.add_column(column, justify="left" if words else "right", overflow="fold", min_width=width)
        for i, row in enumerate(section.rows):
            if i and section.starts_group(i):
                grid.add_section()
            grid.add_row(*(Text(cell) for cell in (row if section.starts_group(i) else ["", *row[1:]])))
        console.print(grid)
    for note in table.notes:
        console.print(Text(f"· {note}"), soft_wrap=True)
