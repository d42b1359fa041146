"""Train a small ViT on two workers, evaluate it on one, and verify that both give the same bits.

python recipes/vit/demo.py [key=value ...]
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

# Imported here so that the workers, which are forked from this process, need not import it.
import sklearn.datasets  # noqa: F401
from torch import Tensor

import samestep as ss
from recipes.settings import SETTINGS_FILE, read
from recipes.vit import train
from recipes.vit.config import Settings
from recipes.vit.data import open_images
from recipes.vit.mistakes import predictions

HERE = Path(__file__).resolve().parent
SHADES = " ░▒▓█"
SHOWN = 8
COLUMNS = 4


def main(changes: Sequence[str]) -> None:
    """Run the demonstration with changed settings, in a new directory under runs/."""
    directory = Path("runs") / time.strftime("digits-%Y%m%d-%H%M%S")
    script, settings = (os.path.relpath(HERE / name) for name in ("train.py", "digits.yaml"))
    arguments = [settings, *changes]

    announce(
        "Train a Vision Transformer on two workers.",
        "run",
        "-n",
        2,
        script,
        *arguments,
        "--dir",
        directory,
    )
    start = time.perf_counter()
    trained = ss.launch(train.main, [*arguments, "--dir", str(directory)], workers=2)
    print(f"trained in {time.perf_counter() - start:.0f} s")

    announce("Evaluate it on one worker.", "run", "-n", 1, script, "--eval", "--dir", directory)
    evaluated = ss.launch(train.main, ["--eval", "--dir", str(directory)], workers=1)
    if evaluated != trained:
        raise SystemExit(f"two workers found {trained}, one worker found {evaluated}")
    print("Two workers found the same numbers, to the last bit.")

    print("\nShow held-out digits, mistakes first.", flush=True)
    ss.launch(show, directory, workers=1)

    verify = ("verify", "-n", "1,2", "--steps", 3, script, *arguments)
    announce("Verify: train with one worker and with two, and compare every bit.", *verify)
    samestep(*verify)

    report = ("report", directory, "--out", directory / "report.html")
    announce("Write the curves, events and settings to one page.", *report)
    samestep(*report)
    command = os.path.relpath(Path(sys.executable).with_name("samestep"))
    print(f"\nThe run is in {directory}. Open {report[-1]} in a browser, or watch runs live with")
    print(f"$ {command} watch runs")


def samestep(*words: object) -> None:
    """Run a samestep command. Raises `CalledProcessError` if it fails."""
    subprocess.run([sys.executable, "-m", "samestep", *map(str, words)], check=True)


def announce(text: str, *words: object) -> None:
    """Print the next part of the demonstration and its samestep command."""
    print(f"\n{text}\n$ samestep", *words, flush=True)


def show(directory: Path) -> None:
    """Print some held-out digits with the predictions of the model in a run's directory."""
    settings = read(Settings, [str(directory / SETTINGS_FILE)])
    with ss.init(dir=directory, read_only=True, lanes=settings.lanes, seed=settings.seed) as run:
        images = open_images(settings.data, settings.model).test
        models = train.make_models(run, settings, evaluates=True)
        run.track(**models)
        pairs = run.evaluate(
            predictions, models["model"], images, settings.batch_size, gather=True
        ).tolist()
    mistakes_first = sorted(range(len(pairs)), key=lambda index: pairs[index][0] == pairs[index][1])
    cards = [card(images[index][0], *pairs[index]) for index in mistakes_first[:SHOWN]]
    for start in range(0, SHOWN, COLUMNS):
        for lines in zip(*cards[start : start + COLUMNS], strict=True):
            print("  ".join(lines))


def card(image: Tensor, label: int, predicted: int) -> list[str]:
    """Return the lines of an image [1, size, size] in characters, above its class."""
    pixels = image[0] - image.min()
    shades = (pixels / pixels.max() * (len(SHADES) - 1)).round().int().tolist()
    lines = ["".join(SHADES[shade] * 2 for shade in row) for row in shades]
    caption = f"{label}, predicted {predicted}"
    return [*lines, caption.ljust(len(lines[0])), " " * len(lines[0])]


if __name__ == "__main__":
    main(sys.argv[1:])
