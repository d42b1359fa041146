"""`samestep plot`: draw the curves of runs into a file, for papers."""

from __future__ import annotations

import math
import re
from collections import Counter
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samestep.errors import ConfigError, RecordError

# Whatever reads or draws is imported where it is needed, so that help comes at once.
if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from samestep.watch.view import View

# Okabe and Ito (2008), "Color Universal Design", without yellow, which is faint on paper: told
# apart by the colour-blind, too.
PALETTE: Final = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES: Final = ("-", "--", ":", "-.")
FORMATS: Final = (".pdf", ".png", ".svg")
POINTS: Final = 2000  # of a curve: several for each pixel of a column of text
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
    "pdf.fonttype": 42,  # letters that editors and printers can take
    "savefig.dpi": 200,
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "samestep",  # and the same curves the same file
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep plot` to its parser; `main` takes what it parses."""
    parser.add_argument(
        "runs",
        metavar="RUN",
        nargs="+",
        help="a run's folder, a folder of runs, or the URL of either",
    )
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        metavar="FILE",
        help="where to draw: a .png, .pdf or .svg file",
    )
    parser.add_argument(
        "--scalars",
        metavar="NAMES",
        help="what to draw, comma-separated, a panel each (default: all there are)",
    )
    parser.add_argument(
        "--x",
        choices=("step", "time"),
        default="step",
        help="what lies along: step (default), or time since the start",
    )
    parser.add_argument("--log", action="store_true", help="a logarithmic scale")
    parser.add_argument(
        "--smooth",
        type=float,
        default=0.0,
        metavar="WEIGHT",
        help="of what came before in a moving average, such as 0.9",
    )
    parser.add_argument(
        "--size",
        metavar="WIDTHxHEIGHT",
        help="of the whole picture in inches (default: 6x4, and more for several panels)",
    )


def main(options: argparse.Namespace) -> int:
    """Run `samestep plot` and return its exit status. Raises `ConfigError` for wrong use, `RecordError` where there is nothing to draw."""
    if options.out.suffix not in FORMATS:
        raise ConfigError(
            f"--out {options.out} was given; expected a file that ends in {', '.join(FORMATS)}"
        )
    if not 0 <= options.smooth < 1:
        raise ConfigError(
            f"--smooth {options.smooth} was given; expected a weight from 0 to below 1"
        )
    size = None if options.size is None else _size(options.size)
    try:
        import matplotlib as mpl
    except ImportError as error:
        raise ConfigError(
            'samestep plot draws with matplotlib; expected it to be there: pip install "samestep[plot]"'
        ) from error
    views = _read(options.runs)
    names = _chosen(views, options.scalars)
    with mpl.rc_context():
        # whatever the user's own settings are, the same curves give the same picture
        mpl.rcdefaults()
        mpl.rcParams.update(STYLE)
        figure = _draw(views, names, size, axis=options.x, log=options.log, smooth=options.smooth)
        _save(figure, options.out)
    return 0


def _size(text: str) -> tuple[float, float]:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)x(\d+(?:\.\d+)?)", text)
    width, height = map(float, found.groups()) if found else (0.0, 0.0)
    if not (1 <= width <= LARGEST and 1 <= height <= LARGEST):
        raise ConfigError(
            f"--size {text} was given; expected a width and a height of 1 to {LARGEST:g} inches, such as 6x4"
        )
    return width, height


def _read(locations: Sequence[str]) -> list[View]:
    from samestep.watch.view import open_views

    views = open_views(*locations)
    for location in views.locations:
        if not views.at(location):
            raise RecordError(
                f"there is no record at {location}; give a run's folder, a folder of runs, or the URL of either"
            )
    for view in views.values():
        view.refresh()
    return list(views.values())


def _chosen(views: Iterable[View], wanted: str | None) -> list[str]:
    """Return the names of the scalars to draw. Raises `RecordError` where there are none, and `ConfigError` for one that is not there."""
    there = list(
        dict.fromkeys(scalar["name"] for view in views for scalar in view.summary()["scalars"])
    )
    if not there:
        raise RecordError(
            "there is nothing to draw: no run has a scalar yet, as run.log makes them"
        )
    if wanted is None:
        return there
    if wanted in there:
        return [wanted]  # a name with a comma
    names = [name.strip() for name in wanted.split(",")]
    if missing := [name for name in names if name not in there]:
        raise ConfigError(
            f"--scalars {wanted} was given, and there is no {missing[0]!r}; there are {', '.join(map(repr, there))}"
        )
    return names


def _draw(
    views: Sequence[View],
    names: Sequence[str],
    size: tuple[float, float] | None,
    *,
    axis: str,
    log: bool,
    smooth: float,
) -> Figure:
    """Draw a panel a scalar, and in each a curve a run."""
    from matplotlib.figure import Figure

    columns = math.ceil(math.sqrt(len(names)))
    rows = math.ceil(len(names) / columns)
    panel = PANEL if len(names) == 1 else SMALL_PANEL
    figure = Figure(figsize=size or (panel[0] * columns, panel[1] * rows), layout="constrained")
    panels = [figure.add_subplot(rows, columns, number) for number in range(1, len(names) + 1)]
    starts = [(view.row()["started"] or 0.0) if axis == "time" else 0.0 for view in views]
    curves = {
        (name, number): view.curve(name, points=POINTS, smooth=smooth, axis=axis)
        for name, (number, view) in product(names, enumerate(views))
        if view.has_curve(name)
    }
    longest = max(
        (curve["x"][-1] - starts[number] for (_, number), curve in curves.items() if curve["x"]),
        default=0.0,
    )
    unit, label = _unit(longest) if axis == "time" else (1.0, "step")
    for panel_axes, name in zip(panels, names, strict=True):
        panel_axes.set_title(name, parse_math=False)
        panel_axes.set_xlabel(label)
        if log:
            panel_axes.set_yscale("log", nonpositive="clip")
        for number in range(len(views)):
            if curve := curves.get((name, number)):
                _draw_curve(
                    panel_axes, curve, [(x - starts[number]) / unit for x in curve["x"]], number
                )
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

    often = Counter(view.name for view in views)
    names = [view.id if often[view.name] > 1 else view.name for view in views]
    # matplotlib leaves out what begins with _
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


def _unit(seconds: float) -> tuple[float, str]:
    return next(((length, name) for length, name in UNITS if seconds >= 2 * length), UNITS[-1])


def _floats(values: Sequence[float | None] | None) -> list[float]:
    """Return values as they are drawn: gaps where they are not finite."""
    return [math.nan if value is None else value for value in values or ()]


def _save(figure: Figure, path: Path) -> None:
    dates = {".svg": "Date", ".pdf": "CreationDate"}
    metadata = {dates[path.suffix]: None} if path.suffix in dates else None
    try:
        figure.savefig(path, metadata=metadata)
    except OSError as error:
        raise ConfigError(
            f"--out {path} was given, and cannot be written: {error.strerror}; choose a folder that can be written"
        ) from error
