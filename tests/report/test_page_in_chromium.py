"""The page in a real browser, from disk: no error, no foreign request, charts, sorting, phones, both themes."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import need_browser, open_tab
from page_cases import SPECTRUM, bench, put_runs
from primal_attention.report.page import write_page
from primal_attention.report.results import collect

ALERT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    need_browser()
    folder = tmp_path_factory.mktemp("page")
    put_runs(folder / "runs", {"primal": (0.98, 0.96), "softmax": (0.95, 0.93), ALERT: (0.99,)})
    (folder / "bench.json").write_text(json.dumps(bench()))
    (folder / "runs" / "primal-seed0" / "spectrum.csv").write_text(SPECTRUM)
    write_page(folder / "report.html", collect([folder]), command="primal report " + "a-long-path/" * 20 + ALERT)
    return folder / "report.html"


@pytest.fixture(scope="module")
def page(file: Path) -> Iterator[Any]:
    with open_tab(file.as_uri(), file.with_name("plotly.min.js").as_uri()) as tab:
        tab.goto(file.as_uri())
        yield tab


def column(page: Any, title: str, section: str = "results") -> list[str]:
    """A column's cells from top to bottom."""
    table = page.locator(f"#{section} table")
    titles = [text.strip() for text in table.locator("thead th").all_inner_texts()]
    return [row.locator("td").nth(titles.index(title)).inner_text() for row in table.locator("tbody tr").all()]


def sort_by(page: Any, title: str) -> str | None:
    head = page.locator("#results thead th").filter(has_text=title).first
    head.get_by_role("button").click()
    return head.get_attribute("aria-sort")


def test_every_chart_is_drawn_and_names_are_text(page: Any) -> None:
    assert page.locator(".chart .main-svg").count() >= page.locator(".chart").count() == 8
    assert ALERT in page.locator("footer").inner_text()
    assert ALERT in column(page, "Model")
    assert ALERT in page.locator("#learning .legendtext").all_text_contents()


def test_hovering_reads_a_line(page: Any) -> None:
    chart = page.locator("#learning figure").filter(has_text="Task loss").first
    chart.scroll_into_view_if_needed()
    box = chart.locator(".scatterlayer .point").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    chart.locator(".hoverlayer .hovertext").first.wait_for()
    assert "epoch=1" in chart.locator(".hoverlayer").text_content()


def test_tables_sort_by_numbers_and_names(page: Any) -> None:
    assert sort_by(page, "LAST") == "descending"
    assert column(page, "LAST") == ["99.0", "97.0 ± 1.4", "94.0 ± 1.4"]
    assert sort_by(page, "LAST") == "ascending"
    assert column(page, "LAST") == ["94.0 ± 1.4", "97.0 ± 1.4", "99.0"]
    for _ in range(2):  # empty cells stay at the end
        sort_by(page, "J first")
        assert column(page, "J first") == ["+3.000", "–", "–"]
    page.locator("#results thead th").filter(has_text="Model").get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert column(page, "Model") == [ALERT, "primal", "softmax"]
    assert page.locator("#results th[aria-sort]").count() == 1


def test_the_theme_follows_the_system_in_page_and_charts(page: Any) -> None:
    colours = """() => getComputedStyle(document.body).backgroundColor + " "
        + getComputedStyle(document.querySelector(".chart .xtick text")).fill"""
    page.emulate_media(color_scheme="light")
    light = page.evaluate(colours).split(" rgb")
    page.emulate_media(color_scheme="dark")
    page.wait_for_function(f"light => {{ const now = ({colours})().split(' rgb'); "
                           "return now.every((colour, i) => colour !== light[i]); }", arg=light)  # fmt: skip


def test_the_page_fits_a_phone(page: Any) -> None:
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    for width in (768, 320):
        page.set_viewport_size({"width": width, "height": 844})
        page.wait_for_function("() => document.documentElement.scrollWidth <= innerWidth")
    assert page.locator("#results .scroll").evaluate("e => e.scrollWidth > e.clientWidth")
