"""The pieces that sections of a report are built from: cards, legends, and tables that sort."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

from primal_attention.report import charts
from primal_attention.report.page_groups import Spread


@dataclass(frozen=True)
class Cell:
    """What a cell shows (HTML if `safe`) and what it is sorted by."""

    text: str = ""
    key: float | str | None = None
    safe: bool = False


def section(name: str, title: str, lead: str, content: str) -> str:
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    heading = f'<h2 id="{name}-title">{title}</h2>'
    return f'<section id="{name}" aria-labelledby="{name}-title">{heading}{lead}{content}</section>'


def note(text: str) -> str:
    return f'<p class="note">{text}</p>'


def panel(title: str, chart: str, caption: str = "") -> str:
    """A card with a chart in it; nothing for an empty chart."""
    if not chart:
        return ""
    caption = f"<figcaption>{caption}</figcaption>" if caption else ""
    return f"<figure><h4>{escape(title)}</h4>{chart}{caption}</figure>"


def panels(content: Iterable[str], heading: str = "") -> str:
    """Cards side by side, as many as fit, under a heading of their own."""
    inside = "".join(content)
    heading = f"<h3>{escape(heading)}</h3>" if heading else ""
    return f'{heading}<div class="panels">{inside}</div>' if inside else ""


def legend(names: Mapping[str, int]) -> str:
    """Buttons that show and hide what carries a name, all over the section."""
    buttons = "".join(
        f'<button type="button" class="c{slot % charts.SLOTS}" data-toggle="{escape(name)}" aria-pressed="true">'
        f'<span class="swatch" aria-hidden="true"></span>{escape(name)}</button>'
        for name, slot in names.items()
    )
    return f'<div class="legend" role="group" aria-label="show or hide">{buttons}</div>' if len(names) > 1 else ""


def table(caption: str, headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """A table that sorts on click and scrolls inside its own frame; columns without any content are left out."""
    used = [i for i in range(len(headings)) if any(row[i].text for row in rows)]
    numeric = {i for i in used if all(isinstance(row[i].key, float) for row in rows if row[i].text)}

    def kind(i: int) -> str:
        return ' class="number"' if i in numeric else ""

    head = "".join(f'<th scope="col"{kind(i)}><button type="button">{headings[i]}</button></th>' for i in used)
    body = "".join(
        "<tr>" + "".join(f"<td{kind(i)}{sort_key(row[i])}>{shown(row[i])}</td>" for i in used) + "</tr>" for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(caption)}"><table class="sortable">'
        f"<caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def shown(cell: Cell) -> str:
    return (cell.text if cell.safe else escape(cell.text)) or '<span class="none">–</span>'


def sort_key(cell: Cell) -> str:
    return "" if cell.key is None else f' data-key="{escape(str(cell.key))}"'


def number(value: float | None, form: str = "{:,.1f}") -> Cell:
    return Cell() if value is None else Cell(form.format(value).replace("-", "−"), float(value))


def spread(value: Spread | None) -> Cell:
    return Cell() if value is None else Cell(str(value), value.mean)


def mean(value: Spread | None, form: str) -> Cell:
    return number(None if value is None else value.mean, form)
