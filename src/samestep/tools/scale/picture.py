"""A picture of how a job scales: measured points with their spread, the ideal, and what the model expects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from samestep.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from samestep.tools.scale.model import Prediction
    from samestep.tools.scale.study import Study

DRAWN_AT: Final = tuple(2**exponent for exponent in range(11))  # workers
SUFFIXES: Final = (".svg", ".png", ".pdf")
SIZE_INCHES: Final = (10, 4.4)


def check_can_draw(path: Path) -> None:
    """Raise `ConfigError` unless a picture can be drawn into a file of this name."""
    if path.suffix.lower() not in SUFFIXES:
        raise ConfigError(
            f"--out {path} was given; expected a name that ends in {', '.join(SUFFIXES)}"
        )
    if not path.parent.is_dir():
        raise ConfigError(
            f"--out {path} was given, and there is no directory {path.parent}; make it, or give another"
        )
    try:
        import matplotlib as mpl  # noqa: F401  only who draws needs it
    except ImportError:
        raise ConfigError('--out needs matplotlib: pip install "samestep[plot]"') from None


def draw(study: Study, path: Path) -> None:
    """Draw speed-up over workers, with the same batch and with the same batch a lane, into a file of the kind that its name ends in."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    same = [prediction for workers in DRAWN_AT if (prediction := study.same_batch(workers))]
    _expected(left, study, same)
    _measured(left, study)
    left.axvline(study.job.lanes, color="0.6", linestyle=":", label=f"{study.job.lanes} lanes")
    left.set(title="same global batch", ylabel="speed-up")
    _expected(right, study, [study.same_lane_batch(workers) for workers in DRAWN_AT])
    right.set(title="same batch a lane, a lane a worker")
    for axes in (left, right):
        axes.plot(DRAWN_AT, DRAWN_AT, color="0.6", linestyle="--", label="ideal")
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("workers")
        axes.grid(visible=True, color="0.92")
        axes.legend(frameon=False)
    figure.savefig(path)


def _expected(axes: Any, study: Study, predictions: Sequence[Prediction]) -> None:
    workers = [prediction.workers for prediction in predictions]
    speed_ups = [study.expected_speed_up(prediction) for prediction in predictions]
    axes.fill_between(
        workers,
        [one.lowest for one in speed_ups],
        [one.highest for one in speed_ups],
        color="tab:blue",
        alpha=0.2,
        linewidth=0,
    )
    axes.plot(workers, [one.middle for one in speed_ups], color="tab:blue", label="model")


def _measured(axes: Any, study: Study) -> None:
    points = {workers: study.speed_up(workers) for workers in sorted(study.timings)}
    below = [one.middle - one.lowest for one in points.values()]
    above = [one.highest - one.middle for one in points.values()]
    middles = [one.middle for one in points.values()]
    axes.errorbar(
        list(points),
        middles,
        yerr=[below, above],
        fmt="o",
        color="tab:orange",
        capsize=3,
        label="measured",
    )
