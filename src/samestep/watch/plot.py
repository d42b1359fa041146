"""`samestep plot`: draw the curves of runs into a picture file, for papers."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import ConfigError, RecordError
from samestep.watch.curves import AXES
from samestep.watch.runs import LOCATIONS, check_locations, open_views, read_all
from samestep.watch.view import View

if TYPE_CHECKING:  # matplotlib is optional
    from matplotlib.figure import Figure

# Okabe and Ito (2008), "Color Universal Design": distinct for color-blind readers. Without yellow,
# which is faint on paper.
PALETTE: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: Final = ("-", "--", ":", "-.")
POINTS: Final = 2000  # per curve: several per pixel of a text column
PANEL: Final = (4.0, 3.0)  # inches
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
    "text.parse_math": False,
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep plot` to its parser."""
    add = parser.add_argument
    add("locations", **LOCATIONS)
    out = "picture to write: a .png, .pdf or .svg file"
    add("--out", type=Path, required=True, metavar="FILE", help=out)
    scalars = "scalars to draw, comma-separated, one panel each (default: all)"
    add("--scalars", metavar="NAMES", help=scalars)
    x = "x axis: step (default), hours since the start of the run, or samples used for training"
    add("--x", choices=AXES, default="step", help=x)
    add("--log", action="store_true", help="use a logarithmic y axis")
    smooth = "draw a moving average with this weight on earlier values, such as 0.9"
    add("--smooth", type=float, default=0.0, metavar="WEIGHT", help=smooth)
    size = "size of the picture in inches (default: 4x3 per panel)"
    add("--size", type=_inches, metavar="WIDTHxHEIGHT", help=size)


def _inches(text: str) -> tuple[float, float]:
    width, height = map(float, text.split("x"))
    return width, height


def main(options: argparse.Namespace) -> int:
    """Draw the picture and return 0. Raises `ConfigError`, or `RecordError` if nothing is found."""
    if not 0 <= options.smooth < 1:
        raise ConfigError(f"--smooth must be at least 0 and below 1, got {options.smooth}")
    check_locations(options.locations)
    try:
        import matplotlib as mpl
    except ImportError as error:
        text = 'samestep plot requires matplotlib: pip install "samestep[plot]"'
        raise ConfigError(text) from error
    views = read_all(open_views(*options.locations))
    scalars = list(dict.fromkeys(name for view in views for name in view.scalars()))
    names = [name.strip() for name in options.scalars.split(",")] if options.scalars else scalars
    if not scalars:
        raise RecordError("nothing to plot: no run has a scalar yet; log one with run.log")
    if missing := [name for name in names if name not in scalars]:
        choices = ", ".join(map(repr, scalars))
        raise ConfigError(f"--scalars: expected some of {choices}, got {missing[0]!r}")
    if options.x == "samples" and (unknown := [view for view in views if view.samples is None]):
        text = f"the record of {unknown[0].name} has no number of samples; use --x step"
        raise ConfigError(text)
    date = {".svg": "Date", ".pdf": "CreationDate"}.get(options.out.suffix)
    with mpl.rc_context():
        mpl.rcdefaults()  # the user's own settings must not change the picture
        mpl.rcParams.update(STYLE)
        try:
            _draw(views, names, options).savefig(options.out, metadata=date and {date: None})
        except (OSError, ValueError) as error:
            raise ConfigError(f"--out {options.out} cannot be written: {error}") from error
    return 0


def _draw(views: Sequence[View], names: Sequence[str], options: argparse.Namespace) -> Figure:
    """Draw one panel per scalar, with one curve per run."""
    from matplotlib.figure import Figure

    columns = math.ceil(math.sqrt(len(names)))
    rows = math.ceil(len(names) / columns)
    size = options.size or (PANEL[0] * columns, PANEL[1] * rows)
    figure = Figure(figsize=size, layout="constrained")
    lines = {}
    for place, name in enumerate(names, 1):
        axes = figure.add_subplot(rows, columns, place, title=name)
        axes.set_xlabel("hours" if options.x == "time" else options.x)
        if options.log:
            axes.set_yscale("log", nonpositive="clip")
        for number, view in enumerate(views):
            if name not in view.scalars():
                continue
            curve = view.curve(name, points=POINTS, smooth=options.smooth, axis=options.x)
            start = view.row()["started"] or 0.0
            x = [(x - start) / 3600 for x in curve["x"]] if options.x == "time" else curve["x"]
            value, low, high, smooth = (
                [math.nan if each is None else each for each in curve[part] or ()]  # NaN: a gap
                for part in ("value", "low", "high", "smooth")
            )
            style: dict[str, Any] = {
                "color": PALETTE[number % len(PALETTE)],
                "linestyle": DASHES[number // len(PALETTE) % len(DASHES)],
            }
            if low and high:
                axes.fill_between(x, low, high, color=style["color"], alpha=0.2, linewidth=0)
            if smooth:
                axes.plot(x, value, **style, alpha=0.3, linewidth=0.8)
            marker = "o" if len(x) == 1 else None
            (lines[view.id],) = axes.plot(x, smooth or value, **style, marker=marker)
    if len(lines) > 1:
        # matplotlib skips labels that start with _
        labels = [f" {name}" if name.startswith("_") else name for name in lines]
        figure.legend([*lines.values()], labels, loc="outside upper center", ncols=4)
    return figure
