"""The page in a real browser, from disk: no error, no request, sorts on click, fits a phone."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from page_cases import EPOCHS, bench, demo, put_run

pytest.importorskip("tyro")
pytest.importorskip("yaml")
pytest.importorskip("playwright", reason="playwright drives the browser: pip install playwright")

from playwright.sync_api import sync_playwright

from primal_attention.cli.report import page as make_page
from primal_attention.report.page_runs import collect

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# As root in a container there is neither a sandbox nor a large /dev/shm.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("page")
    for label, last in (("primal", (0.98, 0.96)), ("softmax", (0.95, 0.93)), ("a-model-with-a-long-name", (0.99,))):
        for seed, accuracy in enumerate(last):
            put_run(folder / "runs" / f"{label}-seed{seed}", label, seed, accuracy)
    (folder / "bench.json").write_text(json.dumps(bench()))
    (folder / "demo.json").write_text(json.dumps(demo()))
    out = folder / "report.html"
    command = "primal report " + "a-long-path/" * 20
    out.write_text(make_page(collect([folder]), command=command), encoding="utf-8")
    return out


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: .ci/chromium installs Debian's")
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield chromium
        chromium.close()


@pytest.fixture
def page(browser: Any, file: Path) -> Iterator[Any]:
    """The page at a desktop's width; whatever it complains about or asks the network for fails the test."""
    complaints: list[str] = []
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = context.new_page()
    tab.on("console", lambda message: complaints.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: complaints.append(str(error)))
    tab.on("request", lambda request: complaints.append(request.url) if "report.html" not in request.url else None)
    tab.goto(file.as_uri())
    yield tab
    context.close()
    assert [c for c in complaints if not c.startswith("data:")] == []


def column(page: Any, title: str, section: str = "results") -> list[str]:
    """A column's cells from top to bottom."""
    table = page.locator(f"#{section} table")
    titles = [text.strip() for text in table.locator("thead th").all_inner_texts()]
    return [row.locator("td").nth(titles.index(title)).inner_text() for row in table.locator("tbody tr").all()]


def sort_by(page: Any, title: str, section: str = "results") -> str | None:
    head = page.locator(f"#{section} thead th").filter(has_text=title).first
    head.get_by_role("button").click()
    return head.get_attribute("aria-sort")


def test_numbers_sort_from_the_largest_and_back(page: Any):
    assert sort_by(page, "LAST") == "descending"
    assert column(page, "LAST") == ["99.0", "97.0 ± 1.4", "94.0 ± 1.4"]
    assert sort_by(page, "LAST") == "ascending"
    assert column(page, "LAST") == ["94.0 ± 1.4", "97.0 ± 1.4", "99.0"]


def test_empty_cells_stay_at_the_end(page: Any):
    for _ in range(2):
        sort_by(page, "J first")
        assert column(page, "J first") == ["+3.000", "–", "–"]


def test_names_sort_from_a_and_only_one_column_is_marked(page: Any):
    sort_by(page, "LAST")
    assert sort_by(page, "Model") == "ascending"
    assert column(page, "Model") == ["a-model-with-a-long-name", "primal", "softmax"]
    assert page.locator("#results th[aria-sort]").count() == 1


def test_headings_sort_by_keyboard_too(page: Any):
    page.locator("#runs thead th").filter(has_text="Seed").get_by_role("button").focus()
    page.keyboard.press("Enter")
    assert column(page, "Seed", "runs") == ["1", "1", "0", "0", "0"]


@pytest.mark.parametrize("width", [320, 390, 768])
def test_the_page_fits_a_phone(page: Any, width: int):
    page.set_viewport_size({"width": width, "height": 844})
    page.evaluate("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.evaluate("document.documentElement.scrollWidth") <= page.evaluate("innerWidth") == width
    frame = page.locator("#results .scroll")
    assert frame.evaluate("e => e.scrollWidth > e.clientWidth")  # the table scrolls in its own frame


def test_a_line_can_be_read(page: Any):
    chart = page.locator("#learning figure").filter(has_text="Test accuracy").locator("svg")
    chart.scroll_into_view_if_needed()
    line = chart.locator('g[data-label="primal, seed 0"] .line')
    x, y = line.evaluate("""path => {
        const end = path.getPointAtLength(path.getTotalLength()).matrixTransform(path.getScreenCTM());
        return [end.x, end.y];
    }""")
    page.mouse.move(x, y)
    assert page.locator("#tip").inner_text() == f"primal, seed 0: 98 at epoch {EPOCHS}"
    page.mouse.move(0, 0)
    assert page.locator("#tip").is_hidden()


def test_a_legend_hides_what_it_names(page: Any):
    button = page.locator("#learning .legend button").filter(has_text="softmax")
    lines = page.locator('#learning g[data-s="softmax"]')
    assert lines.first.is_visible()
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert not any(line.is_visible() for line in lines.all())
    button.click()
    assert lines.first.is_visible()


def test_a_link_opens_the_run(page: Any):
    page.locator("#runs tbody a").first.click()
    page.wait_for_selector("details[open]")
    opened = page.locator("details[open]")
    assert opened.count() == 1
    assert "primal train uea/JapaneseVowels" in opened.inner_text()
    assert "model.embed_dim: 16" in opened.inner_text()


def test_light_and_dark_by_system_and_by_button(page: Any):
    def ground() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    page.emulate_media(color_scheme="light")
    light = ground()
    page.emulate_media(color_scheme="dark")
    dark = ground()
    assert light != dark
    page.locator("#theme").click()
    assert ground() == light


def test_it_can_be_photographed(page: Any, tmp_path: Path):
    picture = tmp_path / "page.png"
    page.screenshot(path=picture, full_page=True)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 50_000
