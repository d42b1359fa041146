"""`samestep plot`: draw the curves of runs into a picture file, for papers."""

from __future__ import annotations

import argparse
import math
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import ConfigError, RecordError
from samestep.watch.curves import AXES
from samestep.watch.runs import LOCATIONS, open_views, read_all
from samestep.watch.view import View

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito (2008), "Color Universal Design": distinct for color-blind readers. Without yellow,
# which is faint on paper.
PALETTE: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: Final = ("-", "--", ":", "-.")
FORMATS: Final = (".pdf", ".png", ".svg")
POINTS: Final = 2000  # per curve: several per pixel of a text column
PANEL: Final = (6.0, 4.0)  # inches
SMALL_PANEL: Final = (4.0, 3.0)
LARGEST: Final = 100.0  # inches
UNITS: Final = ((3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
STYLE: Final[dict[Any, Any]] = {
    "axes.grid": True,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "font.size": 11,
    "grid.alpha": 0.3,
    "legend.frameon": False,
    "pdf.fonttype": 42,  # fonts that editors and printers accept
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "samestep",  # the same curves give the same file
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep plot` to its parser."""
    add = parser.add_argument
    add("locations", **LOCATIONS)
    out = "picture to write: a .png, .pdf or .svg file"
    add("--out", type=Path, required=True, metavar="FILE", help=out)
    scalars = "scalars to draw, comma-separated, one panel each (default: all)"
    add("--scalars", metavar="NAMES", help=scalars)
    x = "x axis: step (default), time since the start of the run, or samples used for training"
    add("--x", choices=AXES, default="step", help=x)
    add("--log", action="store_true", help="use a logarithmic y axis")
    smooth = "draw a moving average with this weight on earlier values, such as 0.9"
    add("--smooth", type=float, default=0.0, metavar="WEIGHT", help=smooth)
    size = "size of the picture in inches (default: 6x4, larger for several panels)"
    add("--size", metavar="WIDTHxHEIGHT", help=size)


def main(options: argparse.Namespace) -> int:
    """Draw the picture and return 0. Raises `ConfigError`, or `RecordError` if nothing is found."""
    if options.out.suffix not in FORMATS:
        raise ConfigError(f"--out must end in {', '.join(FORMATS)}, got {options.out}")
    if not 0 <= options.smooth < 1:
        raise ConfigError(f"--smooth must be at least 0 and below 1, got {options.smooth}")
    if options.size is not None:
        options.size = _size(options.size)
    try:
        import matplotlib as mpl
    except ImportError as error:
        text = 'samestep plot requires matplotlib: pip install "samestep[plot]"'
        raise ConfigError(text) from error
    views = _read(options.locations)
    names = _choose(views, options.scalars)
    views = [view for view in views if set(names) & set(view.scalars())]
    if options.x == "samples" and (
        unknown := [view.name for view in views if view.samples is None]
    ):
        text = f"the record of {unknown[0]} has no number of samples; use --x step"
        raise ConfigError(text)
    with mpl.rc_context():
        mpl.rcdefaults()  # the user's own settings must not change the picture
        mpl.rcParams.update(STYLE)
        _save(_draw(views, names, options), options.out)
    return 0


def _size(text: str) -> tuple[float, float]:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)x(\d+(?:\.\d+)?)", text)
    width, height = map(float, match.groups()) if match else (0.0, 0.0)
    if not (1 <= width <= LARGEST and 1 <= height <= LARGEST):
        expected = f"a width and a height from 1 to {LARGEST:g} inches, such as 6x4"
        raise ConfigError(f"--size must be {expected}, got {text}")
    return width, height


def _read(locations: Sequence[str]) -> list[View]:
    views = open_views(*locations)
    for location in views.locations:
        if not views.at(location):
            expected = "a run's folder, a folder of runs, or the URL of either"
            raise RecordError(f"no record at {location}; pass {expected}")
    return read_all(views)


def _choose(views: Iterable[View], wanted: str | None) -> list[str]:
    """Return the names of the scalars to draw."""
    scalars = list(dict.fromkeys(name for view in views for name in view.scalars()))
    if not scalars:
        raise RecordError("nothing to plot: no run has a scalar yet; log one with run.log")
    if wanted is None:
        return scalars
    if wanted in scalars:
        return [wanted]  # may have a comma in its name
    names = [name.strip() for name in wanted.split(",")]
    if missing := [name for name in names if name not in scalars]:
        choices = ", ".join(map(repr, scalars))
        raise ConfigError(f"--scalars: expected some of {choices}, got {missing[0]!r}")
    return names


def _draw(views: Sequence[View], names: Sequence[str], options: argparse.Namespace) -> Figure:
    """Draw one panel per scalar, with one curve per run."""
    from matplotlib.figure import Figure

    columns = math.ceil(math.sqrt(len(names)))
    rows = math.ceil(len(names) / columns)
    panel = PANEL if len(names) == 1 else SMALL_PANEL
    size = options.size or (panel[0] * columns, panel[1] * rows)
    figure = Figure(figsize=size, layout="constrained")
    is_time = options.x == "time"
    starts = [(view.row()["started"] or 0.0) if is_time else 0.0 for view in views]
    curves = {
        (name, number): view.curve(name, points=POINTS, smooth=options.smooth, axis=options.x)
        for name in names
        for number, view in enumerate(views)
        if name in view.scalars()
    }
    longest = max(
        (curve["x"][-1] - starts[number] for (_, number), curve in curves.items() if curve["x"]),
        default=0.0,
    )
    of_time = next((unit for unit in UNITS if longest >= 2 * unit[0]), UNITS[-1])
    unit, label = of_time if is_time else (1.0, options.x)
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, place)
        axes.set_title(name, parse_math=False)
        axes.set_xlabel(label)
        if options.log:
            axes.set_yscale("log", nonpositive="clip")
        for number in range(len(views)):
            if curve := curves.get((name, number)):
                x = [(x - starts[number]) / unit for x in curve["x"]]
                _draw_curve(axes, curve, x, number)
    if len(views) > 1:
        _add_legend(figure, views)
    return figure


def _draw_curve(axes: Axes, curve: dict[str, Any], x: list[float], number: int) -> None:
    style = _style(number)
    value, low, high, smooth = (_floats(curve[part]) for part in ("value", "low", "high", "smooth"))
    if low and high:
        axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
    if smooth:
        axes.plot(x, value, **style, alpha=0.3, linewidth=0.8)
    axes.plot(x, smooth or value, **style, marker="o" if len(x) == 1 else None)


def _add_legend(figure: Figure, views: Sequence[View]) -> None:
    from matplotlib.lines import Line2D

    counts = Counter(view.name for view in views)
    names = [view.id if counts[view.name] > 1 else view.name for view in views]
    # matplotlib skips labels that start with _
    labels = [f" {name}" if name.startswith("_") else name for name in names]
    lines = [Line2D([], [], **_style(number)) for number in range(len(views))]
    legend = figure.legend(lines, labels, loc="outside upper center", ncols=min(len(views), 4))
    for text in legend.get_texts():
        text.set_parse_math(False)


def _style(number: int) -> dict[str, Any]:
    return {
        "color": PALETTE[number % len(PALETTE)],
        "linestyle": DASHES[number // len(PALETTE) % len(DASHES)],
    }


def _floats(values: Sequence[float | None] | None) -> list[float]:
    """Return values with NaN, which leaves a gap, for those that are not finite."""
    return [math.nan if value is None else value for value in values or ()]


def _save(figure: Figure, path: Path) -> None:
    date = {".svg": "Date", ".pdf": "CreationDate"}.get(path.suffix)
    try:
        figure.savefig(path, metadata={date: None} if date else None)
    except OSError as error:
        text = f"--out {path} cannot be written: {error.strerror}; use a writable folder"
        raise ConfigError(text) from error
