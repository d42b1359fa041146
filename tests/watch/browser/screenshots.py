"""Train the runs of docs/watch.md and docs/history.md, and take their pictures: `make pictures`.

Curves and images are those of any other time. Durations, dates and the use of the host are not.
"""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from tests.jobs import events
from tests.watch.browser.pages import Page, browsing, serving

MOST_BYTES = 120_000
DIGITS = ("recipes/vit/train.py", "recipes/vit/digits.yaml", "epochs=16", "evaluate_every=2")
LEARNING_RATES = {"digits-low": 3e-4, "digits-1e-3": 1e-3, "digits-5e-3": 5e-3}
STABLE = (*DIGITS, "optimizer.final_learning_rate=0.002")  # the peak, from the warmup on
COOLDOWNS = {  # by name: of which run, at which step, and the last epoch, at which the rate is 0
    "cooldown-at-115": ("stable", 115, 8),
    "cooldown-at-207": ("stable", 207, 12),
    "cooldown-at-299": ("stable", 299, 16),
    "cooldown-at-207-longer": ("cooldown-at-207", 230, 16),
}
TISSUE = ("recipes/stain/train.py", "recipes/stain/tissue.yaml", "epochs=60", "evaluate_every=6")
KILLED_AT = 100  # step
EVENT_SECONDS = 600.0  # until an event of a run on a busy machine
STALL_TIMEOUT = 240  # seconds; the run is stalled after a quarter of it
EXAMPLE = "tests/watch/browser/example_job.py"


def main(out: Path) -> None:
    """Train the runs, and take all pictures."""
    out.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder:
        runs = Path(folder, "runs")
        train(runs / "digits", *DIGITS)
        for name, rate in LEARNING_RATES.items():
            train(runs / name, *DIGITS, f"optimizer.learning_rate={rate}")
        decay = "optimizer.weight_decay=1e30"
        train(runs / "nan", "--nonfinite-loss", "continue", *DIGITS, decay)
        train_with_a_killed_worker(runs / "tissue", Path(folder, "tissue"))
        for name in ("histograms", "failed"):
            train(runs / name, EXAMPLE, name)
        train_a_family(Path(folder, "family"))
        with browsing() as driver:
            with serving(Path(folder, "family")) as server:
                take_family(Page(driver, server), out)
            with stalled(runs / "stalled"), serving(runs) as server:
                take_all(Page(driver, server), out)


def train(directory: Path, *command: str) -> None:
    """Train a run on two workers. A run that fails is shown as well."""
    with started(directory, *command) as process:
        process.wait()


def train_a_family(runs: Path) -> None:
    """Train a run with a constant learning rate, and forks of it whose rate falls to 0."""
    train(runs / "stable", "--snapshot-every", "23", "--keep-last", "16", *STABLE)
    for name, (trunk, step, epochs) in COOLDOWNS.items():
        words = ("fork", runs / trunk, "--at", step, "--dir", runs / name, "-n", 2)
        program = [sys.executable, "-m", "samestep", *map(str, words)]
        subprocess.run([*program, *DIGITS, f"epochs={epochs}"], check=True)


def train_with_a_killed_worker(directory: Path, data: Path) -> None:
    """Train the stain recipe, and kill worker 1 on the way."""
    subprocess.run([sys.executable, "recipes/stain/make_data.py", data], check=True)
    with started(directory, *TISSUE, f"data.path={data}") as process:
        wait_for(directory, lambda event: event.get("step", 0) >= KILLED_AT)
        os.kill(events(directory, "started")[0]["workers"][1]["pid"], signal.SIGKILL)
        process.wait()


@contextmanager
def stalled(directory: Path) -> Iterator[None]:
    """Train until worker 1 stalls, and stop at the end of the block."""
    with started(directory, "--timeout", str(STALL_TIMEOUT), EXAMPLE, "stalled") as process:
        wait_for(directory, lambda event: event["event"] == "stalled")
        yield
        process.kill()  # its workers end with it; worker 1 would not take a snapshot


@contextmanager
def started(directory: Path, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start two workers that write to `directory`; at the end, wait until they have ended."""
    arguments = ("run", "-n", "2", "--dir", str(directory), *command)
    with subprocess.Popen([sys.executable, "-m", "samestep", *arguments]) as process:
        yield process


def wait_for(directory: Path, matches: Callable[[dict[str, Any]], bool]) -> None:
    """Wait until the record has an event. Raises `TimeoutError`."""
    deadline = time.monotonic() + EVENT_SECONDS
    while not (directory.exists() and any(matches(event) for event in events(directory))):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {EVENT_SECONDS:g} s for an event in {directory}")
        time.sleep(0.2)


def take_all(page: Page, out: Path) -> None:
    """Take all pictures."""
    page.use_color_scheme("light")
    page.use_desktop_screen()
    take(page, out / "curves.png", "digits", "digits-low", smooth=0.8)
    take(page, out / "images.png", "tissue", tab="images")
    take(page, out / "workers.png", "tissue", tab="workers")
    take(page, out / "events.png", "tissue", tab="events")
    take(page, out / "settings.png", "digits", tab="settings", versus="digits-low")
    page.use_laptop_screen()
    take(page, out / "failed.png", "failed")
    take(page, out / "stalled.png", "stalled")
    take(page, out / "nan.png", "nan")
    page.open("histograms")
    page.until(
        "const section = document.getElementById('histograms');"
        "section?.scrollIntoView(); return section && !section.hidden"
    )
    save(page, out / "histograms.png")
    page.use_color_scheme("dark")
    against = {"setting": "optimizer.learning_rate", "score": "best model_top1"}
    take(page, out / "table.png", "digits", tab="table", filter="digits", **against)
    take(page, out / "system.png", "tissue", tab="system")
    page.use_desktop_screen()
    take(page, out / "logs.png", "tissue", tab="logs")
    page.use_phone_screen()
    take(page, out / "phone.png", "digits", smooth=0.8)
    page.use_color_scheme("light")
    take(page, out / "phone-settings.png", "digits", tab="settings", versus="digits-low")


def take_family(page: Page, out: Path) -> None:
    """Take the picture of docs/history.md."""
    page.use_color_scheme("light")
    page.use_desktop_screen()
    take(page, out / "family.png", "stable", *COOLDOWNS, smooth=0.8)


def take(page: Page, file: Path, *runs: str, **chosen: Any) -> None:
    """Open runs, and save the screen when everything is loaded."""
    page.open(*runs, **chosen)
    page.until(
        "const open = document.querySelector('[role=tabpanel]:not([hidden])');"
        "const isSeen = (card) => card.getBoundingClientRect().top < innerHeight;"
        "const cards = [...open.querySelectorAll('[data-scalar]')].filter(isSeen);"
        "const drawn = cards.every((card) => Number(card.dataset.points) > 0);"
        "const images = [...open.querySelectorAll('img')];"
        "const loaded = images.every((image) => image.complete && image.naturalWidth);"
        "return open.textContent.length > 0 && drawn && loaded"
    )
    save(page, file)


def save(page: Page, file: Path) -> None:
    """Save the screen, with fewer colors if the file would be large."""
    with Image.open(io.BytesIO(page.driver.get_screenshot_as_png())) as shot:
        image = shot.convert("RGB")
    image.save(file, optimize=True)
    if file.stat().st_size > MOST_BYTES:
        image.quantize(256, kmeans=8).save(file, optimize=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
