"""The report of `samestep scale`: tables and sentences for a terminal, and a picture."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from samestep.tools import some
from samestep.tools.scale.model import PARTS, Prediction, Range
from samestep.tools.scale.network import LinkModel
from samestep.tools.scale.study import PREDICTED_WORKERS, WARM_UP_EPOCHS, Study, learning_rates

BUSY: Final = 0.5  # of the machine's capacity
DRAWN_WORKERS: Final = tuple(2**exponent for exponent in range(11))
SIZE_INCHES: Final = (10, 4.4)
WIDTH: Final = 100  # columns; the tables are narrower


def report_lines(study: Study) -> Iterator[str]:
    """Yield the lines of the report: measurements, bottleneck, predictions, and advice."""
    for line in _unwrapped_lines(study):
        indent = line[: len(line) - len(line.lstrip())]
        wrapped = textwrap.wrap(line, WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        yield from wrapped or [""]


def _unwrapped_lines(study: Study) -> Iterator[str]:
    for section in (_measurements, _bottleneck, _predictions):
        yield from section(study)
        yield ""
    yield from _lane_batch_advice(study)
    yield from _lanes_and_learning_rate_advice(study)


def _measurements(study: Study) -> Iterator[str]:
    workload, machine = study.workload, study.machine
    batch = "" if workload.batch_size is None else f", batches of {workload.batch_size}"
    optimizer = {None: "", True: ", sharded optimizer", False: ", unsharded optimizer"}
    yield (
        f"{some(workload.lanes, 'lane')}{batch}, {workload.nbytes / 1e6:.3g} MB of parameters"
        f"{optimizer[workload.sharded]}, on {workload.device}"
    )
    runs = some(max(map(len, study.timings.values())), "interleaved run")
    yield f"Milliseconds per step, median of {runs} per worker count (lowest to highest):"
    rows, parts = [["workers", "step", "speedup", "efficiency"]], [["workers", *PARTS]]
    for workers in sorted(study.timings):
        speedup = study.speedup(workers)
        step, efficiency = _time_range(study.step(workers)), f"{speedup.middle / workers:.0%}"
        rows.append([str(workers), step, _factor(speedup), efficiency])
        medians = [milliseconds(study.part(workers, name).middle) for name in PARTS]
        parts.append([str(workers), *medians])
    yield from table(rows)
    yield "The parts of a step:"
    yield from table(parts)
    if machine.load > BUSY * machine.capacity:
        yield f"This machine was busy (load {machine.load:.1f}): measure again when it is idle."
    if oversubscribed := [str(n) for n in study.timings if n > machine.capacity]:
        counts = ", ".join(oversubscribed)
        yield (
            f"This machine has capacity for {some(machine.capacity, 'worker')}. Measurements "
            f"with {counts} workers, which share cores or GPUs, are excluded from the model."
        )


def _bottleneck(study: Study) -> Iterator[str]:
    if study.most == study.fewest:
        yield "To find the bottleneck, measure at least two worker counts, for example -n 1,2."
        return
    bottleneck, serial = study.bottleneck(), study.serial_fraction()
    if bottleneck is None:
        yield f"{study.most} workers are within 5% of the ideal; there is no bottleneck yet."
    else:
        waiting = bottleneck.part == "waiting"
        part = "waiting for slower workers" if waiting else bottleneck.part
        excess = f"{milliseconds(bottleneck.seconds)} ms per step above its ideal share"
        yield f"Bottleneck of {study.most} workers: {part}, {excess}. Remedy:"
        yield f"  {bottleneck.remedy}."
    waited = milliseconds(study.waiting(study.most).middle)
    yield f"Waiting for the slowest worker takes {waited} ms of the exchange."
    if serial is not None and serial >= 1:
        yield f"More workers were no faster than {study.fewest}."
    elif serial:
        yield f"{serial:.1%} of a step did not get faster (Karp and Flatt 1990)."
        limit = f"{study.fewest / serial:.3g}"
        yield f"If that share stays, the speedup is at most {limit} (Amdahl 1967)."


def _predictions(study: Study) -> Iterator[str]:
    network = study.network
    hint = "this machine's loopback; set your network's --latency and --bandwidth"
    yield "Predicted milliseconds per step at this machine's computing speed (lowest to highest):"
    yield "  exchange: latency x messages + bytes / bandwidth"
    per_host = some(network.workers_per_host, "worker")
    yield f"  within a host: {_link(network.memory)}; {per_host} per host"
    source = "as given" if study.network_is_given else hint
    yield f"  between hosts: {_link(network.between)} ({source})"
    measured_links = (network.memory, *(() if study.network_is_given else (network.between,)))
    if any(link.is_bound for link in measured_links):
        yield (
            "  too noisy to estimate the bandwidth: the transfer time is within measurement noise. "
            "The lowest possible bandwidth is assumed, so exchanges may be faster than predicted. "
            "Measure again on an idle machine, or pass --latency and --bandwidth of the network."
        )
    if check := study.check():
        workers, expected = check
        measured = study.step(workers)
        error = f"{abs(measured.middle / expected.middle - 1):.0%} off the middle"
        verdict = "within the range" if measured.middle in expected else error
        yield (
            f"  check: fewer workers alone predict {_time_range(expected)} ms at {workers} "
            f"workers; measured {_time_range(measured)}, {verdict}"
        )
    yield from _prediction_tables(study)
    most, lanes = max(PREDICTED_WORKERS), study.workload.lanes
    if study.same_lane_batch(most).largest_part == "exchange":
        share = study.latency_share(most)
        yield (
            f"At {most} workers, latency takes {share:.0%} of the exchange between hosts, and "
            "bandwidth the rest. Remedy:"
        )
        yield (
            "  use fewer, larger workers (devices=4 for a worker of 4 GPUs) and larger lane "
            "batches; more bandwidth does not help."
            if share > 1 / 2
            else "  use larger lane batches, fewer bytes of parameters, or more bandwidth."
        )
    if lanes < most:
        yield f"With the same batch, samestep starts at most one worker per lane ({lanes})."


def _prediction_tables(study: Study) -> Iterator[str]:
    lanes, batch_size = study.workload.lanes, study.workload.batch_size
    samples = "" if batch_size is None else f" of {-(-batch_size // lanes)}"
    strong = [["workers", "step", "speedup", "largest part"]]
    weak = [["workers", "step", "speedup", "efficiency", "largest part"]]
    for workers in PREDICTED_WORKERS:
        same, larger = study.same_batch(workers), study.same_lane_batch(workers)
        missing = [f"(only {some(lanes, 'lane')})", "", ""]
        strong.append([str(workers), *(missing if same is None else _cells(study, same))])
        step, speedup, part = _cells(study, larger)
        efficiency = f"{study.predicted_speedup(larger).middle / workers:.0%}"
        weak.append([str(workers), step, speedup, efficiency, part])
    yield "With the same batch:"
    yield from table(strong)
    yield f"With the same lane batch{samples}, one lane per worker:"
    yield from table(weak)


def _cells(study: Study, prediction: Prediction) -> list[str]:
    speedup = _factor(study.predicted_speedup(prediction))
    return [_time_range(prediction.step), speedup, prediction.largest_part]


def _lane_batch_advice(study: Study) -> Iterator[str]:
    workers = max(study.modeled)
    largest = study.largest_lane_batch(workers)
    if study.workload.device != "cpu":
        yield "Largest lane batch: memory is measured only for workers on CPUs."
    elif study.memory is None or largest is None:
        yield (
            "Largest lane batch: too noisy to estimate how memory grows with batch size; try a "
            "larger batch."
        )
    else:
        available = f"{study.machine.available_bytes / 1e9:.3g} GB of free memory"
        yield (
            f"Largest lane batch: about {largest} samples with {some(workers, 'worker')} in "
            f"{available}:"
        )
        yield (
            f"  {study.memory.fixed / 1e6:.0f} MB per worker and "
            f"{study.memory.per_sample / 1e6:.3g} MB per sample, from a line through two measured "
            "lane batches."
        )


def _lanes_and_learning_rate_advice(study: Study) -> Iterator[str]:
    batch_size, rate = study.workload.batch_size, study.learning_rate
    if batch_size is None:
        yield (
            "Lanes and learning rate: the record has no batch size (streams have none); use one "
            "lane for each worker of your largest run."
        )
        return
    yield (
        "Recommended lanes at the current batch size, so that computing a lane takes longer than "
        "the rest of its step:"
    )
    yield "  " + ", ".join(
        f"{study.recommended_lanes(workers)} for up to {workers} workers"
        for workers in PREDICTED_WORKERS
    )
    if rate is None:
        yield "Learning rate: pass the current one, for example --learning-rate 0.1, to scale it."
        return
    now = study.batch_size_now or batch_size
    yield (
        f"Learning rate, now {rate:g} at batch size {now}, with one lane per worker and a warm-up "
        "from the rate in parentheses:"
    )
    rules = ["linear (SGD)", "square root (Adam)"]
    rows = [["workers", "batch", *rules, "warm-up", "betas of (0.9, 0.999)"]]
    for workers in PREDICTED_WORKERS:
        larger = workers * -(-batch_size // study.workload.lanes)
        linear, root = learning_rates(rate, now, larger)
        betas = "too far" if root.betas is None else f"{root.betas[0]:.3g}, {root.betas[1]:.4g}"
        rates = [f"{rule.rate:.3g} ({rule.warm_up_from:.3g})" for rule in (linear, root)]
        rows.append([str(workers), str(larger), *rates, f"{WARM_UP_EPOCHS} epochs", betas])
    yield from table(rows)
    yield (
        "The linear rule is that of Goyal et al. (2017), the square root rule that of Malladi et "
        "al. (2022). Each holds up to a batch size that depends on the workload (8,192 images of "
        "ImageNet in Goyal et al.): check the loss."
    )


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table with right-aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        yield "  ".join(cells).rstrip()


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds with at least three digits."""
    return _digits(seconds * 1000)


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"


def _factor(factor: Range) -> str:
    middle, lowest, highest = map(_digits, (factor.middle, factor.lowest, factor.highest))
    return middle if factor.lowest == factor.highest else f"{middle} ({lowest} to {highest})"


def _time_range(seconds: Range) -> str:
    lowest, highest = milliseconds(seconds.lowest), milliseconds(seconds.highest)
    return f"{milliseconds(seconds.middle)} ({lowest} to {highest})"


def _link(link: LinkModel) -> str:
    bandwidth = f"{'at least ' * link.is_bound}{_digits(link.bandwidth / 1e9)} GB/s"
    return f"{_digits(link.latency * 1e6)} us per message, {bandwidth}"


def draw(study: Study, path: Path) -> None:
    """Draw speedups with the same batch and the same lane batch; the suffix selects the format."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=SIZE_INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    lanes = study.workload.lanes
    _draw_model(left, study, [p for workers in DRAWN_WORKERS if (p := study.same_batch(workers))])
    counts = sorted(study.timings)
    ranges = [study.speedup(workers) for workers in counts]
    middles = [m.middle for m in ranges]
    errors = [[m.middle - m.lowest for m in ranges], [m.highest - m.middle for m in ranges]]
    left.errorbar(counts, middles, errors, fmt="o", color="tab:orange", capsize=3, label="measured")
    left.axvline(lanes, color="0.6", linestyle=":", label=f"{lanes} lanes")
    left.set(title="same global batch", ylabel="speedup")
    _draw_model(right, study, [study.same_lane_batch(workers) for workers in DRAWN_WORKERS])
    right.set(title="same lane batch, one lane per worker")
    for axes in (left, right):
        axes.loglog(DRAWN_WORKERS, DRAWN_WORKERS, "--", base=2, color="0.6", label="ideal")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set_xlabel("workers")
        axes.grid(visible=True, color="0.92")
        axes.legend(frameon=False)
    figure.savefig(path)


def _draw_model(axes: Any, study: Study, predictions: Sequence[Prediction]) -> None:
    workers = [prediction.workers for prediction in predictions]
    speedups = [study.predicted_speedup(prediction) for prediction in predictions]
    lowest, highest = [one.lowest for one in speedups], [one.highest for one in speedups]
    axes.fill_between(workers, lowest, highest, color="tab:blue", alpha=0.2, linewidth=0)
    axes.plot(workers, [one.middle for one in speedups], color="tab:blue", label="model")
