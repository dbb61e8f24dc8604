"""The documentation site in a browser: search, console, phone width."""

import functools
import http.server
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from browser import need_browser, open_tab
from once import once

ROOT = Path(__file__).parents[1]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        pass


def build(folder: Path) -> None:
    """Build the site, or copy that of `make docs` if no source is newer."""
    made = ROOT / "docs" / "_build"
    sources = [*ROOT.glob("docs/*.py"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("src/**/*.py")]
    index = made / "searchindex.js"
    if index.exists() and index.stat().st_mtime > max(file.stat().st_mtime for file in sources):
        shutil.copytree(made, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".doctrees"))
        return
    command = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", f"{folder}.cache", "docs", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The site on a local server: search reads pages with fetch, which browsers refuse for files."""
    need_browser()  # without one, `make docs` checks the build
    pytest.importorskip("sphinx", reason="builds the site: pip install -e '.[docs]'")
    folder = once(tmp_path_factory, "site", build)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(QuietHandler, directory=str(folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()


@pytest.fixture(scope="module")
def page(address: str) -> Iterator[Any]:
    with open_tab(address) as tab:
        yield tab


def test_search_finds_the_loss(page: Any, address: str) -> None:
    page.goto(f"{address}/search.html?q=ksvd_loss")
    page.locator("#search-results li a").first.wait_for()
    links = page.locator("#search-results li a").evaluate_all("links => links.map((link) => link.href)")
    assert any("reference/attention.html" in link for link in links)


@pytest.mark.parametrize("path", ["index", "guide/quickstart", "guide/choosing", "reference/attention", "results/uea"])
def test_the_page_fits_a_phone(page: Any, address: str, path: str) -> None:
    page.set_viewport_size({"width": 390, "height": 844})
    page.goto(f"{address}/{path}.html")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
