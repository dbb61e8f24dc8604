"""Chromium for tests of pages."""

import contextlib
import shutil
from collections.abc import Iterator
from typing import Any

import pytest

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# As root in a container there is neither a sandbox nor a large /dev/shm.
ARGUMENTS = ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]


def need_browser() -> None:
    """Skip the test where no browser is installed."""
    pytest.importorskip("playwright", reason="playwright drives the browser: pip install playwright")
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine: .ci/chromium installs Debian's")


@contextlib.contextmanager
def open_tab(*allowed: str) -> Iterator[Any]:
    """Yield a tab of a desktop's width. Messages, dialogs and requests to other addresses are errors at the end."""
    need_browser()
    from playwright.sync_api import sync_playwright

    problems: list[str] = []
    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        tab = chromium.new_page(viewport={"width": 1280, "height": 900})
        tab.on("console", lambda text: problems.append(text.text) if text.type in ("error", "warning") else None)
        tab.on("pageerror", lambda error: problems.append(str(error)))
        tab.on("dialog", lambda dialog: problems.append(dialog.message))
        tab.on("request", lambda request: problems.append(request.url))
        yield tab
        chromium.close()
    assert [problem for problem in problems if not problem.startswith(("data:", *allowed))] == []
