from __future__ import annotations

import math
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from selenium.common.exceptions import NoAlertPresentException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.select import Select

from samestep.record import read_events
from tests.leaks import nothing_left
from tests.needs import needs
from tests.watch.browser.pages import OWN_SCRIPTS, Page, browsing, is_local, serving
from tests.watch.writing import scalars, started, timing, write
from tests.workers import free_port

ROOT = Path(__file__).parents[3]
TABS = ("curves", "images", "time", "workers", "events", "configuration")
RUNS = 20  # empty runs that exist from the start, one or two per test
EVIL = "<script>alert(1)</script>"
EVIL_IMAGE = "<img src=x onerror=alert(2)>"


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


@pytest.fixture(scope="module")
def opened(place, tmp_path_factory):
    """Return the page of a server, in one browser for all tests."""
    needs("chromium")
    needs("chromedriver")
    with (
        nothing_left(),
        serving(place) as server,
        browsing(tmp_path_factory.mktemp("chromium")) as driver,
    ):
        yield Page(driver, server)


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


def append(run, *events):
    write(run, *events, start=time.time(), seconds=0.0)


def losses(*steps):
    return [
        {
            **scalars(step, loss=2.0 / (step + 1)),
            "low": {"loss": 1.9 / (step + 1)},
            "high": {"loss": 2.1 / (step + 1)},
        }
        for step in steps
    ]


def paint(run, step, color, size=(8, 8)):
    """Write an image of one color, and return its event."""
    path = f"images/cells-{step:08d}.png"
    (run / "images").mkdir(exist_ok=True)
    Image.new("RGB", size, color).save(run / path)
    return {
        "event": "image",
        "name": "cells",
        "step": step,
        "path": path,
        "width": size[0],
        "height": size[1],
    }


def test_an_appended_point_is_drawn_without_a_reload(run, page):
    append(run, *losses(*range(10)))
    page.open(run.name).points("loss", 10)
    seconds = []
    for step in range(10, 13):
        begin = time.monotonic()
        append(run, *losses(step))
        page.points("loss", step + 1)
        seconds.append(time.monotonic() - begin)
    sys.stdout.write(
        f"seconds until an appended point was drawn: {', '.join(f'{one:.2f}' for one in seconds)}\n"
    )
    assert page.newest("loss") == "0.1538"
    assert page.was_loaded_once()


def test_dragging_zooms_to_exact_data(run, page):
    append(
        run, *(scalars(step, loss=math.sin(step / 500) + (step % 7) / 10) for step in range(20_000))
    )
    page.open(run.name).until(
        "return document.getElementById('overview').textContent.includes('19,999')"
    )
    page.until("return document.querySelector('[data-scalar=loss]')?.dataset.exact === 'false'")
    assert 0 < page.points("loss") < 5000
    page.drag("loss", 0.50, 0.53)
    page.until(
        "return location.hash.includes('from=') && document.querySelector('[data-scalar=loss]').dataset.exact === 'true'"
    )
    first, last = page.run(
        "const chosen = new URLSearchParams(location.hash.slice(1)); return [+chosen.get('from'), +chosen.get('to')]"
    )
    assert 9000 < first < last < 11000
    assert page.points("loss") == math.floor(last) - math.ceil(first) + 1
    page.driver.find_element(By.ID, "zoom-reset").click()
    page.until("return document.querySelector('[data-scalar=loss]').dataset.exact === 'false'")


def shown_color(page, step):
    """Return the color of a step's image on the page."""
    return page.until(
        "const image = document.querySelector('figure img');"
        "if (!image?.complete || !image.naturalWidth || image.alt !== `cells at step ${arguments[0]}`) return null;"
        "const canvas = new OffscreenCanvas(1, 1).getContext('2d'); canvas.drawImage(image, 0, 0, 1, 1);"
        "return [...canvas.getImageData(0, 0, 1, 1).data].slice(0, 3)",
        step,
    )


def test_the_slider_selects_images_by_step(run, page):
    append(
        run,
        *(paint(run, step, color) for step, color in ((0, "red"), (10, "lime"), (20, "blue"))),
    )
    page.open(run.name, tab="images")
    assert shown_color(page, 20) == [0, 0, 255]
    slider = page.driver.find_element(By.ID, "image-step")
    slider.send_keys(Keys.ARROW_LEFT)
    assert shown_color(page, 10) == [0, 255, 0]
    slider.send_keys(Keys.HOME)
    assert shown_color(page, 0) == [255, 0, 0]
    append(run, paint(run, 30, "white"))
    page.until("return document.getElementById('image-step').max === '3'")
    assert shown_color(page, 0) == [255, 0, 0]  # the selected image does not change
    slider.send_keys(Keys.END)
    assert shown_color(page, 30) == [255, 255, 255]


def test_points_that_a_resume_makes_void_are_removed(run, page):
    append(run, *losses(*range(10)))
    page.open(run.name).points("loss", 10)
    append(run, started(5, kind="resumed", workers=1))
    page.points("loss", 5)
    append(run, *losses(5, 6))
    page.points("loss", 7)
    page.choose_tab("events")
    row = page.until("return document.querySelector('#events [data-kind=resumed]')?.textContent")
    assert "resumed at step 5 with 1 worker: resized from 2 to 1 worker" in row
    assert page.was_loaded_once()


def test_the_page_reconnects_to_a_restarted_server(run, page):
    port = free_port()
    append(run, *losses(*range(3)))
    with serving(run.parent, port=port) as server:
        own = Page(page.driver, server).open(run.name)
        own.points("loss", 3)
        own.until("return document.getElementById('connection').dataset.state === 'live'")
    own.until("return document.getElementById('connection').dataset.state === 'lost'")
    append(run, *losses(3))
    with serving(run.parent, port=port):
        own.until("return document.getElementById('connection').dataset.state === 'live'")
        own.points("loss", 4)
        assert own.was_loaded_once()
        page.driver.get("about:blank")
    # no connection for a while
    assert all("ERR_" in error for error in page.errors())
    page.open(run.name)


def test_an_unreadable_location_is_reported_until_it_is_readable(run, page, place):
    append(run, scalars(0, loss=1.0))
    page.open(run.name).until("return document.querySelector('#banner').hidden")
    away = place.rename(place.with_name("away"))
    place.write_bytes(b"no folder")
    try:
        page.until(
            "return document.getElementById('banner').textContent.includes(', will try again: ')"
        )
        assert page.points("loss", 1) == 1
    finally:
        place.unlink()
        away.rename(place)
    page.until("return document.querySelector('#banner').hidden")
    append(run, scalars(1, loss=0.5))
    assert page.points("loss", 2) == 2


def test_text_of_a_record_is_never_markup(run, page, place):
    config = {EVIL_IMAGE: EVIL, "lanes": EVIL}
    worker = {"rank": 0, "host": EVIL_IMAGE, "pid": 1}
    append(
        run, {**started(config=config, torch=EVIL, devices=[EVIL]), "workers": [worker]}, *losses(0)
    )
    append(
        run,
        scalars(0, **{EVIL: 1.0, f"{EVIL_IMAGE}/{EVIL_IMAGE}": 2.0}),
        timing(0, (1, 1, 1, 1, 1)),
    )
    append(
        run,
        {**paint(run, 0, "red"), "name": EVIL},
        {"event": EVIL, "step": 0, "reason": EVIL_IMAGE},
    )
    append(
        run,
        {
            "event": "failed",
            "step": 0,
            "host": EVIL,
            "rank": 0,
            "error": EVIL,
            "traceback": EVIL_IMAGE,
        },
    )
    evil = place / EVIL_IMAGE
    write(evil, started(config=config), *losses(0), start=time.time())
    page.open(run.name)
    page.points(EVIL, 1)
    page.until(
        "return [...document.querySelectorAll('#runs .name')].some((one) => one.textContent === arguments[0])",
        EVIL_IMAGE,
    )
    for tab in TABS:
        page.choose_tab(tab)
        page.until(
            "return document.getElementById(`panel-${arguments[0]}`).textContent.length", tab
        )
        assert page.run("return document.scripts.length") == OWN_SCRIPTS
        assert (
            page.run(
                "return [...document.images].filter((image) => !image.src.includes('/api/image')).length"
            )
            == 0
        )
    page.choose_tab("workers")
    assert EVIL_IMAGE in page.text("#panel-workers")
    page.choose_tab("configuration")
    assert EVIL in page.text("#config")
    page.open(EVIL_IMAGE, versus=run.name, tab="configuration")
    assert page.text("#run-name") == EVIL_IMAGE


def test_a_large_image_is_loaded_on_request(run, page):
    width, height = 5000, 3400
    event = paint(run, 0, "red")
    pixels = random.Random(0).randbytes(width * height * 3)
    Image.frombytes("RGB", (width, height), pixels).save(run / event["path"], compress_level=0)
    size = (run / event["path"]).stat().st_size
    assert size > 50e6
    append(run, {**event, "width": width, "height": height}, *losses(0))
    page.open(run.name, tab="images")
    button = page.until("return document.querySelector('figure button.load')")
    assert not any("/api/image" in url for url in page.requests())
    before = page.server.peak_memory()
    button.click()
    page.choose_tab("curves")  # the page responds while it loads
    append(run, *losses(1))
    page.points("loss", 2)
    page.choose_tab("images")
    page.until("return document.querySelector('figure img')?.naturalWidth === arguments[0]", width)
    assert page.server.peak_memory() - before < size / 2


def test_a_phone_needs_no_horizontal_scrolling(run, page):
    page.use_phone_screen()
    append(
        run,
        {
            **started(workers=4, lanes=64, config={"name": "x" * 300, "words": "word " * 60}),
            "torch": "2" * 80,
        },
    )
    append(
        run,
        *losses(*range(3)),
        scalars(3, **{f"{'deep/' * 20}{'long' * 30}": 1.0}),
        timing(0, *[(1, 2, 3, 4, 5)] * 4),
    )
    append(
        run,
        paint(run, 0, "red", (2000, 20)),
        {"event": "failed", "error": "e" * 300, "traceback": "t" * 300, "step": 3},
    )
    page.open(run.name)
    page.points("loss", 3)
    for tab in TABS:
        page.choose_tab(tab)
        page.until(
            "return document.getElementById(`panel-${arguments[0]}`).textContent.length", tab
        )
        widest = page.run(
            "return Math.max(document.scrollingElement.scrollWidth, document.body.scrollWidth)"
        )
        assert (tab, widest) == (tab, 360)


def test_keyboard_control(run, page, names, place):
    other = place / next(names)
    append(run, *losses(*range(100)), paint(run, 0, "red"), paint(run, 1, "blue"))
    append(other, *losses(*range(50)))
    page.open(run.name)
    page.points("loss", 100)
    page.reach(f"[data-run='{other.name}'] button")
    page.press(Keys.ENTER)
    page.until(
        "return document.getElementById('run-name')?.textContent === arguments[0]", other.name
    )
    page.points("loss", 150)
    page.open(run.name)
    page.points("loss", 100)
    page.reach("[data-scalar=loss] [role=group]")
    page.press(Keys.ARROW_RIGHT)
    assert "step" in page.until("return document.querySelector('.tip:not([hidden])')?.textContent")
    page.press("+")
    page.until("return Number(document.querySelector('[data-scalar=loss]').dataset.points) < 60")
    page.press(Keys.ESCAPE)
    page.points("loss", 100)
    page.open(run.name)
    page.reach("[role=tab][aria-selected=true]")
    page.press(Keys.ARROW_RIGHT)
    page.until("return !document.getElementById('panel-images').hidden")
    page.reach("#image-step")
    page.press(Keys.HOME)
    assert shown_color(page, 0) == [255, 0, 0]


def test_the_theme_follows_the_system_and_the_button(run, page):
    append(run, *losses(0, 1))
    brightness = (
        "const found = getComputedStyle(document.body).backgroundColor.match(/[0-9.]+/g).slice(0, 3).map(Number);"
        "return found.reduce((sum, one) => sum + one) / 3"
    )
    seen = {}
    for scheme in ("light", "dark"):
        page.use_color_scheme(scheme)
        page.open(run.name).points("loss", 2)
        seen[scheme] = page.run(brightness)
    assert seen["light"] > 200
    assert seen["dark"] < 60
    page.driver.find_element(By.ID, "theme").click()
    assert page.run(brightness) > 200
    page.driver.find_element(By.ID, "theme").click()
    assert page.run(brightness) < 60


def test_two_runs_are_overlaid_and_their_configurations_compared(run, page, names, place):
    other = place / next(names)
    append(run, *losses(*range(10)))
    append(other, *losses(*range(20)))
    page.open(run.name, other.name)
    page.points("loss", 30)
    page.choose_tab("configuration")
    Select(page.driver.find_element(By.ID, "versus")).select_by_visible_text(other.name)
    page.driver.find_element(By.ID, "only-differences").click()
    seeds = [str(int(folder.name.removeprefix("run-"))) for folder in (run, other)]
    page.until("return document.querySelectorAll('#config tbody tr').length === 1")
    assert page.text("#config tbody tr").split() == ["seed", "differs", *seeds]


def test_a_report_is_self_contained(run, page, tmp_path):
    append(run, *losses(*range(10)), paint(run, 4, "lime"), {"event": "finished", "step": 10})
    file = tmp_path / "report.html"
    command = [sys.executable, "-m", "samestep", "report", str(run), "--out", str(file)]
    subprocess.run(command, check=True, timeout=60, stdout=subprocess.DEVNULL)
    page.driver.get(file.as_uri())
    page.points("loss", 10)
    assert page.text("#run-state") == "finished"
    page.choose_tab("images")
    assert shown_color(page, 4) == [0, 255, 0]
    assert [url for url in page.requests() if not url.startswith(("data:", file.as_uri()))] == []


def test_a_real_run_with_a_killed_and_replaced_worker(place, page):
    run = place / "real"
    command = [
        sys.executable,
        "-m",
        "samestep",
        "run",
        "-n",
        "2",
        "--lanes",
        "4",
        "--dir",
        str(run),
        "--hot-every",
        "1",
    ]
    training = subprocess.Popen([*command, "-m", "tests.watch.browser.job"], cwd=ROOT)
    try:
        page.wait_for_run("real")
        page.open("real")
        page.until(
            "return Number(document.querySelector('[data-scalar=loss]')?.dataset.points) > 5"
        )
        page.choose_tab("workers")
        page.until("return document.querySelectorAll('[data-worker]').length === 2")
        (event,) = (event for event in read_events(run) if event["event"] == "started")
        victim = event["workers"][1]["pid"]
        os.kill(victim, signal.SIGKILL)
        page.until(
            "const row = document.querySelector('[data-worker=\"1\"]'); return row && !row.textContent.includes(arguments[0])",
            f"process {victim} ",
        )
        page.choose_tab("events")
        assert "worker 1" in page.until(
            "return document.querySelector('#events [data-kind=restarting]')?.textContent"
        )
        assert "with 2 workers" in page.until(
            "return document.querySelector('#events [data-kind=resumed]')?.textContent"
        )
        training.send_signal(signal.SIGTERM)
        page.until("return document.getElementById('run-state')?.textContent === 'stopped'")
        assert page.was_loaded_once()
    finally:
        training.terminate()
        training.wait(timeout=30)
