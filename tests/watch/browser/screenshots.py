"""Take the pictures of docs/watch.md: `python -m tests.watch.browser.screenshots FOLDER OUT`.

FOLDER has runs with two workers: `digits`, `digits-low` and others whose names begin with `digits`,
of recipes/vit with digits.yaml, 16 epochs and an evaluation every 2, the second with a learning
rate of 0.0003; and `tissue` of recipes/stain, 60 epochs and an evaluation every 6, with a worker
killed during training.
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from PIL import Image

from tests.watch.browser.pages import Page, browsing, serving

MOST_BYTES = 120_000


def main(runs: Path, out: Path) -> None:
    """Take all pictures."""
    out.mkdir(exist_ok=True)
    with TemporaryDirectory() as folder, serving(runs) as server, browsing(Path(folder)) as driver:
        page = Page(driver, server)
        page.use_color_scheme("light")
        page.use_desktop_screen()
        take(page, out / "curves.png", "digits", "digits-low", smooth=0.8)
        take(page, out / "images.png", "tissue", tab="images")
        take(page, out / "workers.png", "tissue", tab="workers")
        page.open("tissue", tab="events")
        page.element("[aria-label='Kinds of events'] [data-kind=snapshot_removed]").click()
        save(page, out / "events.png")
        page.use_color_scheme("dark")
        page.use_laptop_screen()
        against = {"setting": "optimizer.learning_rate", "score": "best model_top1"}
        take(page, out / "table.png", "digits", tab="table", filter="digits", **against)
        take(page, out / "system.png", "tissue", tab="system")
        page.use_desktop_screen()
        take(page, out / "logs.png", "tissue", tab="logs")
        page.use_phone_screen()
        take(page, out / "phone.png", "digits", smooth=0.8)
        page.use_color_scheme("light")
        take(page, out / "phone-settings.png", "digits", tab="settings", versus="digits-low")


def take(page: Page, file: Path, *runs: str, **chosen: Any) -> None:
    """Open runs, and save the screen when everything is loaded."""
    page.open(*runs, **chosen)
    page.until(
        "const open = document.querySelector('[role=tabpanel]:not([hidden])');"
        "const cards = [...open.querySelectorAll('[data-scalar]')].slice(0, 2);"
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
    main(Path(sys.argv[1]), Path(sys.argv[2]))
