"""One browser for all tests, and a server with empty runs for each module."""

from __future__ import annotations

import time

import pytest
from selenium.common.exceptions import NoAlertPresentException

from tests.leaks import nothing_left
from tests.needs import needs
from tests.watch.browser.pages import Page, browsing, is_local, serving
from tests.watch.writing import started, write

RUNS = 40  # empty runs that exist from the start: more than the largest module uses


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """Return the folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    for number in range(RUNS):
        write(
            folder / f"run-{number:02d}",
            started(config={"lanes": 8, "seed": number}),
            start=time.time(),
        )
    return folder


@pytest.fixture(scope="session")
def driver():
    needs("chromium")
    needs("chromedriver")
    with nothing_left(), browsing() as started_driver:
        yield started_driver


@pytest.fixture(scope="module")
def opened(driver, place):
    """Return the page of a server."""
    with nothing_left(), serving(place) as server:
        yield Page(driver, server)
        driver.get("about:blank")  # no page asks a server that has ended


@pytest.fixture(scope="module")
def names(place):
    return iter(sorted(path.name for path in place.glob("run-*")))


@pytest.fixture
def run(place, names):
    """Return the folder of a run that no other test uses."""
    return place / next(names)


@pytest.fixture
def page(opened):
    """Return the page. The browser must request local URLs only and report no errors."""
    opened.requests(), opened.errors()
    yield opened
    assert {"null", "undefined", "NaN"}.isdisjoint(opened.text("#overview").splitlines())
    with pytest.raises(NoAlertPresentException):
        _ = opened.driver.switch_to.alert.text
    assert [url for url in opened.requests() if not is_local(url)] == []
    assert opened.errors() == []
    opened.reset()
