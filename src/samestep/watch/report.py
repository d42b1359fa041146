"""`samestep report`: write runs' curves, tables and images into one HTML file that stands alone."""

from __future__ import annotations

import base64
import sys
import time
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import urlencode

from samestep.config import is_url
from samestep.errors import ConfigError, RecordError
from samestep.watch.bundle import one_file
from samestep.watch.pictures import recognized
from samestep.watch.view import open_views

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable

    from samestep.watch.view import View

MOST_POINTS: Final = 1000  # of a curve
FEWEST_POINTS: Final = 60
ALL_POINTS: Final = 400_000  # of all curves, about 15 MB
SPANS: Final = 500
DIGITS: Final = 6  # of a value, more than a screen shows
DEFAULT_MEGABYTES: Final = 20
AXES: Final = ("step", "time")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep report` to its parser; `main` takes what it parses."""
    parser.add_argument(
        "locations",
        metavar="RUN",
        nargs="+",
        help="a run's folder, a folder of runs, or the URL of either",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        help="the file to write (default: %(default)s)",
    )
    parser.add_argument(
        "--images",
        type=float,
        metavar="MB",
        default=DEFAULT_MEGABYTES,
        help="megabytes of images to take in, the newest first (default: %(default)s)",
    )


def main(options: argparse.Namespace) -> int:
    """Run `samestep report` and return its exit status. Raises `RecordError`, and `ConfigError` for wrong use."""
    if not options.images >= 0:
        raise ConfigError(f"--images {options.images} was given; expected megabytes, 0 or more")
    for location in options.locations:
        if not is_url(location) and not Path(location).is_dir():
            raise ConfigError(
                f"{location} was given; expected the folder of a run or of runs, or a URL"
            )
    report = make_report(options.locations, image_bytes=round(options.images * 1e6))
    try:
        options.out.write_text(report.page, encoding="utf-8", newline="")
    except OSError as error:
        raise ConfigError(
            f"--out {options.out} cannot be written: {error.strerror}; give a file in a folder that is there"
        ) from error
    sys.stdout.write(f"{options.out}: {report.text}\n")
    return 0


@dataclass(frozen=True)
class Report:
    """A report: the text of its file, and in a sentence what is in it and what was left out."""

    page: str
    text: str


def make_report(locations: Iterable[str], *, image_bytes: int) -> Report:
    """Read all runs at or below `locations` and return their report, with at most `image_bytes` of image files.

    Curves are downsampled, their extremes kept, and values rounded to 6 digits. Raises
    `RecordError` where there is no run.
    """
    locations = list(locations)
    views = list(open_views(*locations).values())
    for view in views:
        view.refresh()
    if not views:
        raise RecordError(
            f"no run is at or below {' or '.join(locations)}; give a folder that holds an events.jsonl"
        )
    answers: dict[str, Any] = {_path("runs"): {"runs": [view.row() for view in views]}}
    summaries = {view: view.summary() for view in views}
    curves = sum(len(summary["scalars"]) for summary in summaries.values())
    points = max(FEWEST_POINTS, min(MOST_POINTS, ALL_POINTS // max(1, curves * len(AXES))))
    for view, summary in summaries.items():
        answers[_path("run", id=view.id)] = summary
        answers[_path("timing", id=view.id)] = _rounded(view.timing(points=SPANS))
        for scalar in summary["scalars"]:
            for axis in AXES:
                curve = view.curve(scalar["name"], points=points, axis=axis)
                answers[_path("curve", id=view.id, name=scalar["name"], x=axis)] = _rounded(curve)
    images = _Images(image_bytes)
    for view, number in _newest_first(summaries):
        images.take(view, number)
    now = time.time()
    text = _told(len(views), now, points, images)
    return Report(
        one_file({"answers": answers | images.taken, "report": {"text": text, "written": now}}),
        text,
    )


@dataclass
class _Images:
    """Images as data URLs, as many as there is room for."""

    room: int
    taken: dict[str, str] = field(default_factory=dict)
    left_out: int = 0

    def take(self, view: View, number: int) -> None:
        """Take in an image if it fits; one that is gone or damaged is left out."""
        try:
            size, pieces = view.source.open_image(view.image(number).path)
            kind, pieces = recognized(pieces)
            data = b"".join(pieces) if kind and size <= self.room else None
        except RecordError:
            data = None
        if data is None:
            self.left_out += 1
            return
        self.room -= len(data)
        self.taken[_path("image", id=view.id, number=number)] = (
            f"data:{kind};base64,{base64.b64encode(data).decode()}"
        )


def _newest_first(summaries: dict[View, dict[str, Any]]) -> Iterable[tuple[View, int]]:
    """Yield the newest image of every name, then the one before of every name, and so on."""
    names = [
        [(view, item["number"]) for item in reversed(images["items"])]
        for view, summary in summaries.items()
        for images in summary["images"]
    ]
    return (image for layer in zip_longest(*names) for image in layer if image)


def _told(runs: int, now: float, points: int, images: _Images) -> str:
    written = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(now))
    text = f"Report of {runs} run{'s' * (runs != 1)}, written {written}; curves keep at most {points} points, with their extremes"
    if images.left_out:
        text += f"; {images.left_out} of {images.left_out + len(images.taken)} images are left out: no room (--images), gone, or damaged"
    return text


def _path(place: str, **query: str | int) -> str:
    """Return the path that the page asks for, with the query as a browser's URLSearchParams writes it."""
    return f"/api/{place}" + (
        f"?{urlencode(query, safe='*', errors='replace').replace('~', '%7E')}" if query else ""
    )


def _rounded(answer: Any) -> Any:
    """Return an answer with values of fewer digits; places on the x axis, such as times, keep microseconds."""
    if isinstance(answer, dict):
        return {
            key: [round(place, 6) for place in item] if key == "x" else _rounded(item)
            for key, item in answer.items()
        }
    if isinstance(answer, list):
        return [_rounded(item) for item in answer]
    return float(f"{answer:.{DIGITS}g}") if isinstance(answer, float) else answer
