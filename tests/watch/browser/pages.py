"""The page in headless Chromium without network, served by a `samestep watch` process."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlencode, urlsplit
from urllib.request import urlopen

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.keys import Keys

CHROMIUM = "/usr/bin/chromium"
CHROMEDRIVER = "/usr/bin/chromedriver"
TIMEOUT_SECONDS = 120.0
MOST_TABS = 160  # presses of the Tab key until an element is reached
OWN_SCRIPTS = 2  # elements of index.html
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--no-first-run",
    "--password-store=basic",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--window-size=1280,900",
)


class Server:
    """A process of `samestep watch`."""

    def __init__(self, *locations: Path, port: int = 0) -> None:
        places = [str(location) for location in locations]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "samestep", "watch", *places, "--port", str(port)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], TIMEOUT_SECONDS)[0]:
            self._process.kill()
            raise TimeoutError(f"after {TIMEOUT_SECONDS:g} s samestep watch has no address")
        self.line = self._process.stdout.readline()
        self.address = self.line.split()[-1] if self.line else ""

    def peak_memory(self) -> int:
        """Return the peak memory of the process in bytes."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return 1024 * int(
            next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM:"))
        )

    def stop(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(timeout=TIMEOUT_SECONDS)
        assert self._process.stdout is not None
        self._process.stdout.close()


@contextmanager
def serving(*locations: Path, port: int = 0) -> Iterator[Server]:
    server = Server(*locations, port=port)
    try:
        yield server
    finally:
        server.stop()


@contextmanager
def browsing() -> Iterator[Chrome]:
    """Start a browser with its profile in a folder of its own.

    The folder's name is short: the path of a socket in it may have 107 characters.
    """
    options = ChromeOptions()
    options.add_experimental_option("binary", CHROMIUM)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    with TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True) as folder:
        for flag in (*FLAGS, f"--user-data-dir={folder}/profile"):
            options.add_argument(flag)
        service = Service(CHROMEDRIVER, env={**os.environ, "HOME": folder, "TMPDIR": folder})
        driver = Chrome(options=options, service=service)
        try:
            yield driver
        finally:
            driver.quit()


def downloaded(folder: Path, pattern: str) -> Path:
    """Wait until a file was saved whole, and return its path.

    The browser reserves the name with an empty file first, and then renames the whole one to it.
    """
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while not (files := [file for file in folder.glob(pattern) if file.stat().st_size]):
        assert time.monotonic() < deadline, f"no {pattern} among {list(folder.iterdir())}"
        time.sleep(0.05)
    return files[0]


class Page:
    """The page as a reader sees and uses it."""

    def __init__(self, driver: Chrome, server: Server) -> None:
        self.driver, self.server = driver, server

    def open(self, *runs: str, **chosen: Any) -> Page:
        """Show the curves of runs and the first run in the other panels, with further choices."""
        self.driver.get("about:blank")
        shown_runs = [("shown", run) for run in runs]
        self.driver.get(
            f"{self.server.address}#{urlencode([('run', runs[0]), *shown_runs, *chosen.items()])}"
        )
        self.run("window.opened = true")
        self.until("return document.getElementById('run-name')")
        return self

    def wait_for_run(self, run: str) -> None:
        """Wait until the server has found a run."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        address = f"{self.server.address}api/runs"
        while run not in {
            row["id"] for row in json.load(urlopen(address, timeout=TIMEOUT_SECONDS))["runs"]
        }:
            if time.monotonic() > deadline:
                raise TimeoutError(f"after {TIMEOUT_SECONDS:g} s the server has no run {run}")
            time.sleep(0.05)

    def run(self, script: str, *arguments: Any) -> Any:
        return self.driver.execute_script(script, *arguments)

    def until(self, script: str, *arguments: Any) -> Any:
        """Wait until a script returns a true value, and return it. Raises `TimeoutError`."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not (value := self.run(script, *arguments)):
            if time.monotonic() > deadline:
                body = self.text("body")
                raise TimeoutError(f"timed out: {script} {arguments}\n{body}")
            time.sleep(0.01)
        return value

    def element(self, selector: str) -> Any:
        """Wait until an element is shown, and return it."""
        return self.until(
            "const found = document.querySelector(arguments[0]);"
            "const isShown = found?.tagName === 'OPTION' || found?.getClientRects().length;"
            "return isShown && found",
            selector,
        )

    def text(self, selector: str) -> str:
        return str(
            self.run("return document.querySelector(arguments[0])?.innerText ?? ''", selector)
        )

    def points(self, scalar: str, count: int | None = None) -> int:
        """Wait until a scalar has points, or `count` points, and return their number."""
        script = (
            "const cards = [...document.querySelectorAll('[data-scalar]')];"
            "const card = cards.find((one) => one.dataset.scalar === arguments[0]);"
            "const count = Number(card?.dataset.points ?? 0);"
            "return arguments[1] === null ? count : count === arguments[1] && count"
        )
        return int(self.until(script, scalar, count))

    def newest(self, scalar: str) -> str:
        """Return the value next to a scalar's name."""
        return self.run(
            "return document.querySelector(`[data-scalar='${arguments[0]}'] .readout`).textContent",
            scalar,
        )

    def choose_tab(self, name: str) -> None:
        self.element(f"#tab-{name}").click()
        self.until("return !document.getElementById(`panel-${arguments[0]}`).hidden", name)

    def wait_for(self, expected: Any, script: str, *arguments: Any) -> None:
        """Wait until a script returns a value. Raises `AssertionError` with another one."""
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while (value := self.run(script, *arguments)) != expected:
            assert time.monotonic() < deadline, f"expected {expected}, got {value}"
            time.sleep(0.05)

    def collect_drawn_texts(self) -> None:
        """Collect the texts that charts draw from now on in `drawn`."""
        self.run(
            "window.drawn = []; const pen = CanvasRenderingContext2D.prototype;"
            "const draw = pen.fillText;"
            "pen.fillText = function (text, ...at)"
            " { drawn.push(text); draw.call(this, text, ...at) }"
        )

    def drag(self, scalar: str, start: float, end: float) -> None:
        """Drag the mouse over a chart; start and end are fractions of its width."""
        chart = self.element(f"[data-scalar='{scalar}'] .u-over")
        left, right = ((share - 0.5) * chart.size["width"] for share in (start, end))
        actions = (
            ActionChains(self.driver, duration=20)
            .move_to_element_with_offset(chart, round(left), 0)
            .click_and_hold()
        )
        actions.move_by_offset(round((right - left) / 2), 0).move_by_offset(
            round(right - left) - round((right - left) / 2), 0
        )
        actions.release().perform()

    def press(self, *keys: str) -> None:
        ActionChains(self.driver, duration=0).send_keys(*keys).perform()

    def reach(self, selector: str) -> None:
        """Press Tab until an element has the focus."""
        for _ in range(MOST_TABS):
            self.press(Keys.TAB)
            if self.run("return document.activeElement.matches(arguments[0])", selector):
                return
        raise AssertionError(f"Tab never reached {selector}")

    def save_downloads_in(self, folder: Path) -> None:
        allowed = {"behavior": "allow", "downloadPath": str(folder)}
        self.driver.execute_cdp_cmd("Browser.setDownloadBehavior", allowed)

    def was_loaded_once(self) -> bool:
        return bool(self.run("return window.opened"))

    def requests(self) -> list[str]:
        """Return the URLs requested since the last call."""
        messages = [
            json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")
        ]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def errors(self) -> list[str]:
        """Return errors and violations of the content policy since the last call."""
        return [
            entry["message"]
            for entry in self.driver.get_log("browser")
            if entry["level"] in {"SEVERE", "WARNING"}
        ]

    def use_phone_screen(self) -> None:
        size = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def use_laptop_screen(self) -> None:
        size = {"width": 1280, "height": 720, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def use_tablet_screen(self) -> None:
        size = {"width": 1024, "height": 768, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def use_desktop_screen(self) -> None:
        size = {"width": 1440, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)

    def use_color_scheme(self, scheme: str) -> None:
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def reset(self) -> None:
        """Reset the screen, the color scheme and the storage, and leave the page."""
        self.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        self.run("localStorage.clear()")
        self.driver.get("about:blank")


def is_local(url: str) -> bool:
    """Return whether a URL is the server's or the browser's own."""
    return (
        urlsplit(url).scheme in {"about", "blob", "chrome", "chrome-untrusted", "data", "file"}
        or urlsplit(url).hostname == "127.0.0.1"
    )
