"""Train a small ViT on two workers, evaluate it on one, look at its mistakes, and prove that the number of workers changes nothing.

python recipes/vit/demo.py [key=value ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

# a script finds only its neighbours by itself
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

# workers are forked from this process, and so need not import it themselves
import sklearn.datasets  # noqa: F401

import samestep as ss
from recipes.settings import SETTINGS_FILE, read
from recipes.vit import train
from recipes.vit.config import Settings
from recipes.vit.data import open_images
from recipes.vit.mistakes import labels_and_guesses

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

HERE = Path(__file__).resolve().parent
SHADES = " ░▒▓█"
SHOWN = 8
IN_A_ROW = 4


def main(changes: Sequence[str]) -> None:
    """Run the demonstration with changed settings, in a new directory under runs/."""
    directory = Path("runs") / time.strftime("digits-%Y%m%d-%H%M%S")
    script, settings = (os.path.relpath(HERE / name) for name in ("train.py", "digits.yaml"))
    given = [settings, *changes]

    tell(
        "Train a Vision Transformer on two workers.",
        f"samestep run -n 2 {script} {' '.join(given)} --dir {directory}",
    )
    began = time.perf_counter()
    trained = ss.launch(train.main, [*given, "--dir", str(directory)], workers=2)
    print(f"trained in {time.perf_counter() - began:.0f} s")

    tell(
        "Evaluate it exactly, on one worker.",
        f"samestep run -n 1 {script} --eval --dir {directory}",
    )
    evaluated = ss.launch(train.main, ["--eval", "--dir", str(directory)], workers=1)
    if evaluated != trained:
        raise SystemExit(
            f"two workers found {trained} and one worker {evaluated}; expected the same"
        )
    print("Two workers found the same numbers, to the last bit.")

    tell("Look at held-out digits, mistakes first.")
    ss.launch(show, directory, workers=1)

    tell(
        "Prove it: train with one worker and with two, and compare every bit.",
        f"samestep verify -n 1,2 --steps 3 {script} {' '.join(given)}",
    )
    samestep("verify", "-n", "1,2", "--steps", "3", script, *given)

    page = directory / "report.html"
    tell(
        "Put its curves, events and settings on one page.",
        f"samestep report {directory} --out {page}",
    )
    samestep("report", str(directory), "--out", str(page))
    command = os.path.relpath(Path(sys.executable).with_name("samestep"))
    print(
        f"\nAll of this run is in {directory}: open {page} in a browser, or see runs as they go with\n$ {command} watch runs"
    )


def samestep(*words: str) -> None:
    """Run a command of samestep's. Raises `CalledProcessError` where it fails."""
    subprocess.run([sys.executable, "-m", "samestep", *words], check=True)


def tell(what: str, command: str = "") -> None:
    """Print what comes next, and the command that does it."""
    print(f"\n{what}" + (f"\n$ {command}" if command else ""), flush=True)


def show(directory: Path) -> None:
    """Draw some held-out digits with what the model in a run's directory takes them for."""
    settings = read(Settings, [str(directory / SETTINGS_FILE)])
    with ss.init(dir=directory, lanes=settings.lanes, seed=settings.seed) as run:
        images = open_images(settings.data, settings.model)
        models = train.make_models(run, settings)
        run.track(**models)
        pairs = run.evaluate(
            labels_and_guesses, models["model"], images.test, settings.batch_size, gather=True
        ).tolist()
    mistakes_first = sorted(range(len(pairs)), key=lambda index: pairs[index][0] == pairs[index][1])
    cards = [card(images.test[index][0], *pairs[index]) for index in mistakes_first[:SHOWN]]
    for start in range(0, SHOWN, IN_A_ROW):
        print(
            *("  ".join(lines) for lines in zip(*cards[start : start + IN_A_ROW], strict=True)),
            sep="\n",
        )


def card(image: Tensor, label: int, guessed: int) -> list[str]:
    """Return the lines of an image [1, size, size] in characters, two a pixel, over what it is and was taken for."""
    pixels = image[0] - image.min()
    shades = (pixels / pixels.max() * (len(SHADES) - 1)).round().int().tolist()
    lines = ["".join(SHADES[shade] * 2 for shade in row) for row in shades]
    caption = f"{label}, seen as {guessed}" if guessed == label else f"{label}, taken for {guessed}"
    return [*lines, caption.ljust(len(lines[0])), " " * len(lines[0])]


if __name__ == "__main__":
    main(sys.argv[1:])
