"""Bar charts of the results."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import matplotlib as mpl
from matplotlib.figure import Figure

from benchmarks.contenders import CONTENDERS, WORKERS
from benchmarks.jobs import JOBS
from benchmarks.verdict import REFERENCE, Results, ratios

OURS, PEERS = (
    "#c2410c",
    ["#1e3a5f", "#3b6ea5", "#7aa6d1", "#5f8a8b", "#94b8a6", "#8d8d9b", "#b9b9c4", "#d5d5dc"],
)
BAR_WIDTH = 0.09  # relative to the distance between two jobs


def draw(results: Results, path: Path) -> None:
    """Draw the speeds relative to the plain loop, by job, as .svg, .png or .pdf."""
    names = [name for name in next(iter(results.values())) if name != REFERENCE]
    colours = iter(PEERS)
    figure = Figure(figsize=(10, 4.5), layout="constrained")
    axes = figure.subplots()
    for place, name in enumerate(names):
        speeds = [ratios(measurements, name) for measurements in results.values()]
        heights = [median(job_speeds) for job_speeds in speeds]
        ranges = [
            [height - min(job_speeds), max(job_speeds) - height]
            for height, job_speeds in zip(heights, speeds, strict=True)
        ]
        middles = [job + (place - (len(names) - 1) / 2) * BAR_WIDTH for job in range(len(results))]
        ours = CONTENDERS[name].role == "ours"
        bars = axes.bar(
            middles,
            heights,
            BAR_WIDTH,
            label=CONTENDERS[name].title,
            color=OURS if ours else next(colours),
        )
        axes.errorbar(
            middles, heights, list(zip(*ranges, strict=True)), fmt="none", ecolor="black", lw=0.8
        )
        if ours:
            axes.bar_label(bars, fmt="%.2f", padding=4, color=OURS, weight="bold")
    axes.axhline(WORKERS, color="black", lw=0.8, ls="--")
    axes.text(
        1,
        WORKERS,
        " two workers'\n limit",
        transform=axes.get_yaxis_transform(),
        va="center",
        fontsize="small",
    )
    titles = [
        f"{JOBS[job].title}, global batch {JOBS[job].batch_size}".replace(", ", "\n")
        for job in results
    ]
    axes.set_xticks(range(len(results)), titles, fontsize="small")
    axes.set_ylabel("samples per second, relative to a plain loop")
    axes.margins(y=0.1)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(
        ncols=5, loc="upper center", bbox_to_anchor=(0.5, -0.18), frameon=False, fontsize="small"
    )
    # text remains text, and the same figures give the same file
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "samestep"}):
        figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
