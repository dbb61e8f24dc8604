"""The page in a real browser, from disk: no error, no foreign request, charts, sorting, phones, both themes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from page_cases import SPECTRUM, bench, put_run

pytest.importorskip("plotly")
pytest.importorskip("playwright", reason="playwright drives the browser: pip install playwright")

from playwright.sync_api import sync_playwright

from primal_attention.report.page import make_page, write_page
from primal_attention.report.results import collect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# As root in a container there is neither a sandbox nor a large /dev/shm.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
ALERT = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for label, last in (("primal", (0.98, 0.96)), ("softmax", (0.95, 0.93)), (ALERT, (0.99,))):
        for seed, accuracy in enumerate(last):
            put_run(folder / "runs" / f"{len(label)}-seed{seed}", label, seed, accuracy)
    (folder / "bench.json").write_text(json.dumps(bench()))
    (folder / "runs" / "6-seed0" / "spectrum.csv").write_text(SPECTRUM)
    page = make_page(collect([folder]), title=ALERT, command="primal report " + "a-long-path/" * 20)
    write_page(folder / "report.html", page)
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: .ci/chromium installs Debian's")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def page(browser: Any, file: Path) -> Iterator[Any]:
    """The page at a desktop's width. Errors, dialogs and requests other than for plotly's script fail the last test."""
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("dialog", lambda dialog: complaints.append(dialog.message))
    tab.on("request", lambda request: complaints.append(request.url))
    tab.goto(file.as_uri())
    yield tab
    context.close()
    expected = (file.as_uri(), file.with_name("plotly.min.js").as_uri())
    assert [c for c in complaints if not c.startswith(("data:", *expected))] == []


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
    assert page.locator("h1").inner_text() == ALERT
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
