"""A real browser for tests, without a network."""

import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from mgwfbp.report import Inputs, build_page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def find_browser() -> str:
    """Return the path of a browser, or skip the test."""
    pytest.importorskip("playwright", reason="playwright is not installed")
    for name in NAMES:
        path = shutil.which(name)
        if path is not None:
            return path
    pytest.skip(f"no browser here: none of {', '.join(NAMES)} is installed")


@contextmanager
def open_browser() -> Iterator[Any]:
    """Start a browser, or skip the test."""
    path = find_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Tab:
    """An open page, what it asked of a network and what it complained about."""

    page: Any
    requests: list[str] = field(default_factory=list)
    complaints: list[str] = field(default_factory=list)

    def open(self, path: Path) -> None:
        self.page.goto(path.as_uri())
        self.page.wait_for_selector("html[data-ready=yes]", state="attached", timeout=30_000)

    def check(self) -> None:
        """Raise if it reached for anything but the file itself, or complained."""
        assert all(url.startswith(("file:", "data:")) for url in self.requests), self.requests
        assert not self.complaints, self.complaints


@contextmanager
def open_tab(browser: Any, **options: Any) -> Iterator[Tab]:
    """A fresh tab of which every request but for a file is refused."""
    context = browser.new_context(**{"viewport": {"width": 1200, "height": 900}, **options})
    try:
        tab = Tab(context.new_page())
        tab.page.on("request", lambda request: tab.requests.append(request.url))
        tab.page.on("console", lambda message: tab.complaints.append(f"{message.type}: {message.text}"))
        tab.page.on("pageerror", lambda error: tab.complaints.append(str(error)))
        tab.page.route(lambda url: not url.startswith("file:"), lambda route: route.abort())
        yield tab
    finally:
        context.close()


def write_page(folder: Path, inputs: Inputs, **options: Any) -> Path:
    """Write the page of these inputs; returns where it is."""
    path = folder / "report.html"
    path.write_text(build_page(inputs, **options), encoding="utf-8")
    return path


def drawn_messages(tab: Tab, where: str) -> list[tuple[float, float, float]]:
    """Left, top and width of every message that is drawn, in the picture's own pixels."""
    paths = tab.page.locator(f"{where} path.message").evaluate_all("all => all.map(path => path.getAttribute('d'))")
    found = [re.findall(r"M([\d.]+) ([\d.]+)h([\d.]+)", path) for path in paths]
    return sorted((float(left), float(top), float(width)) for some in found for left, top, width in some)
