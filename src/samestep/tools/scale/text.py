"""What `samestep scale` prints: tables that a terminal shows, and sentences that say what they mean. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from samestep.tools.scale.advice import learning_rates
from samestep.tools.scale.study import EXPECTED_AT
from samestep.tools.scale.timing import PARTS

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from samestep.tools.scale.model import Link
    from samestep.tools.scale.ranges import Range
    from samestep.tools.scale.study import Study

THOUSAND: Final = 1000
BUSY: Final = 0.5  # of what a machine has room for
MARGIN: Final = 2  # characters between columns


def lines_of(study: Study) -> Iterator[str]:
    """Yield all lines about a job, in the order of a reader's questions."""
    yield from _measured(study)
    yield ""
    yield from _limits(study)
    yield ""
    yield from _expected(study)
    yield ""
    yield from _advice(study)


def _measured(study: Study) -> Iterator[str]:
    runs = max(len(some) for some in study.timings.values())
    yield _job(study)
    yield f"Milliseconds a step, the median of {runs} run{'s' * (runs > 1)} of each number of workers, taken in turns (lowest to highest):"
    rows = [["workers", *PARTS, "step", "speed-up", "efficiency"]]
    for workers in sorted(study.timings):
        speed_up = study.speed_up(workers)
        parts = [milliseconds(study.part(workers, name).middle) for name in PARTS]
        spread = f"{_range(study.step(workers))}"
        rows.append(
            [str(workers), *parts, spread, times(speed_up), f"{speed_up.middle / workers:.0%}"]
        )
    yield from table(rows)
    if study.setting.load > BUSY * study.setting.room:
        yield f"Other programs were using this machine (a load of {study.setting.load:.1f}): measure again when it is idle."
    if study.crowded:
        yield (
            f"This machine has room for {study.setting.room} worker{'s' * (study.setting.room > 1)}: what was measured with "
            f"{', '.join(map(str, study.crowded))} is of a shared machine, and left out of the model."
        )


def _job(study: Study) -> str:
    job = study.job
    batch = "" if job.batch_size is None else f", batches of {job.batch_size}"
    shard = {None: "", True: ", sharded optimizer", False: ", whole optimizer"}[job.sharded]
    return f"{job.lanes} lane{'s' * (job.lanes > 1)}{batch}, {job.nbytes / 1e6:.3g} MB of parameters{shard}, on {job.device}"


def _limits(study: Study) -> Iterator[str]:
    if study.most == study.fewest:
        yield "What limits more workers shows when a job is measured at two numbers of workers, as by -n 1,2."
        return
    limit, serial = study.limit(), study.serial()
    if limit is None:
        yield f"{study.most} workers are within a twentieth of the ideal; nothing limits them yet."
    else:
        where = "waiting for slower workers" if limit.part == "waiting" else limit.part
        yield f"What limits {study.most} workers: {where}, {milliseconds(limit.seconds)} ms a step beyond its share. What helps:"
        yield f"  {limit.to_do}."
    waiting = study.waiting(study.most)
    yield f"Of the exchange, {milliseconds(waiting.middle)} ms were waiting for the slowest worker."
    if serial is not None and serial >= 1:
        yield f"More workers were no faster than {study.fewest}."
    elif serial:
        most = f"{study.fewest / serial:.3g}"
        yield f"{serial:.1%} of a step stayed as long (Karp and Flatt 1990): if it stays, the speed-up ends at {most} (Amdahl 1967)."


def _expected(study: Study) -> Iterator[str]:
    network = study.network
    source = (
        "as given"
        if study.network_is_given
        else "this machine's loopback: give that of your network by --latency and --bandwidth"
    )
    hosts = f"{network.workers_per_host} worker{'s' * (network.workers_per_host > 1)} a host"
    yield "What to expect, of a step that is computed as here, by latency x messages + bytes / bandwidth (lowest to highest):"
    yield f"  within a host {_link(network.memory)}; {hosts}"
    yield f"  between hosts {_link(network.between)} ({source})"
    if check := study.check():
        workers, expected = check
        measured = study.step(workers)
        met = (
            "within it"
            if measured.middle in expected
            else f"{abs(measured.middle / expected.middle - 1):.0%} off the middle"
        )
        yield f"  from fewer workers alone it expects {_range(expected)} ms at {workers}; measured {_range(measured)}: {met}"
    rows = [
        [
            "workers",
            "same batch: ms",
            "speed-up",
            "most of it",
            f"same {lane_batch(study)}: ms",
            "speed-up",
            "efficiency",
            "most of it",
        ]
    ]
    for workers in EXPECTED_AT:
        same, larger = study.same_batch(workers), study.same_lane_batch(workers)
        grown = study.expected_speed_up(larger)
        strong = (
            [f"(only {study.job.lanes} lanes)", "", ""]
            if same is None
            else [_range(same.step), times(study.expected_speed_up(same)), same.largest_part]
        )
        rows.append(
            [
                str(workers),
                *strong,
                _range(larger.step),
                times(grown),
                f"{grown.middle / workers:.0%}",
                larger.largest_part,
            ]
        )
    yield from table(rows)
    yield from _what_to_do_between_hosts(study)
    if study.job.lanes < max(EXPECTED_AT):
        yield f"With the same batch, workers beyond {study.job.lanes} lanes have nothing to do, and samestep does not start them."


def _what_to_do_between_hosts(study: Study) -> Iterator[str]:
    workers = max(EXPECTED_AT)
    if study.same_lane_batch(workers).largest_part != "exchange":
        return
    share = study.share_of_latency(workers)
    helps = (
        "fewer and larger workers help (devices=4 for a worker of 4 GPUs), and larger lane batches; more bandwidth does not"
        if share > 1 / 2
        else "larger lane batches, fewer bytes of parameters and more bandwidth help"
    )
    yield f"At {workers} workers messages take {share:.0%} of the exchange between hosts, and their bytes the rest:"
    yield f"  {helps}."


def lane_batch(study: Study) -> str:
    """Say how much a lane holds."""
    batch_size = study.job.batch_size
    return (
        "lane batch" if batch_size is None else f"lane batch of {-(-batch_size // study.job.lanes)}"
    )


def _advice(study: Study) -> Iterator[str]:
    yield from _memory_advice(study)
    batch_size = study.job.batch_size
    if batch_size is None:
        yield "Lanes and learning rate: the record names no batch size, as of streams; take a lane for each worker there will ever be."
        return
    yield "Lanes to choose, where a lane still computes longer than the rest of its step takes, with batches as now:"
    yield "  " + ", ".join(
        f"{study.lanes_to_choose(workers)} for at most {workers} workers" for workers in EXPECTED_AT
    )
    rate = study.setting.learning_rate
    if rate is None:
        yield "Learning rate: give the one of now, as by --learning-rate 0.1, to see it for larger batches."
        return
    now = study.setting.batch_size_now or batch_size
    yield f"Learning rate, now {rate:g} at {now}, for the batches of a lane a worker; after a warm-up of epochs from the rate in brackets:"
    rows: list[list[str]] = []
    for workers in EXPECTED_AT:
        larger = workers * -(-batch_size // study.job.lanes)
        linear, root = learning_rates(rate, now, larger)
        betas = "too far" if root.betas is None else f"{root.betas[0]:.3g}, {root.betas[1]:.4g}"
        shown = [f"{some.rate:.3g} ({some.warm_up_from:.3g})" for some in (linear, root)]
        rows = rows or [
            ["workers", "batch", linear.rule, root.rule, "warm-up", "betas of (0.9, 0.999)"]
        ]
        rows.append([str(workers), str(larger), *shown, f"{linear.warm_up_epochs} epochs", betas])
    yield from table(rows)
    yield "Rules hold up to some batch size that depends on the job (8,192 images of ImageNet in Goyal et al.): look at the loss."


def _memory_advice(study: Study) -> Iterator[str]:
    if study.job.device != "cpu":
        yield "Largest lane batch: memory is measured for workers on CPUs only."
        return
    workers = max(study.fair)
    largest = study.largest_lane_batch(workers)
    if study.memory is None or largest is None:
        yield "Largest lane batch: a worker's memory does not visibly grow with it here."
        return
    share = f"{workers} worker{'s' * (workers > 1)} share the {study.setting.available / 1e9:.3g} GB that are free here"
    yield f"Largest lane batch: about {largest} samples, where {share}: {study.memory.fixed / 1e6:.0f} MB a worker and"
    yield f"  {study.memory.a_sample / 1e6:.3g} MB a sample, a line through two measured lane batches."


def table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """Yield lines in which columns stand under each other, numbers to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield (
            (" " * MARGIN)
            .join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
            .rstrip()
        )


def milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds with three digits."""
    return _digits(seconds * THOUSAND)


def times(factor: Range) -> str:
    """Return how many times something is, with its range."""
    middle = _digits(factor.middle)
    return (
        middle
        if factor.lowest == factor.highest
        else f"{middle} ({_digits(factor.lowest)} to {_digits(factor.highest)})"
    )


def _digits(value: float) -> str:
    return f"{value:.0f}" if value >= THOUSAND else f"{value:.3g}"


def _range(seconds: Range) -> str:
    return f"{milliseconds(seconds.middle)} ({milliseconds(seconds.lowest)} to {milliseconds(seconds.highest)})"


def _link(link: Link) -> str:
    return f"{link.latency * 1e6:.3g} us a message and {link.bandwidth / 1e9:.3g} GB/s"
