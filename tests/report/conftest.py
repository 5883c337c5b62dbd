"""A browser for the tests of the page, started once and closed before other tests begin."""

from collections.abc import Iterator
from typing import Any

import pytest

from tests.report.browser import Tab, open_browser, open_tab


@pytest.fixture(scope="package")
def browser() -> Iterator[Any]:
    with open_browser() as found:
        yield found


@pytest.fixture
def tab(browser: Any) -> Iterator[Tab]:
    with open_tab(browser) as opened:
        yield opened
