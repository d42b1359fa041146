"""The batches of a map-style data set from a position on, as one worker sees them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from samestep.data.batch import Batch
from samestep.data.loader import Request, load
from samestep.data.seeds import key

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from samestep.data.plan import Plan


def plan_batches(
    plan: Plan,
    dataset: Any,
    lanes: range,
    positions: Callable[[], Iterator[tuple[int, int]]],
    *,
    seed: int,
    collate_fn: Callable[[list[Any]], Any] | None,
    loader_workers: int,
    pin_memory: bool,
) -> Iterator[Batch]:
    """Yield a `Batch` for each (epoch, step in epoch) of `positions()`, with the batches of `lanes`.

    Loader processes fetch across steps and epochs, so `positions` is iterated twice: for fetching
    and for yielding.
    """

    def requests() -> Iterator[Request]:
        for epoch, step in positions():
            counts = plan.counts(epoch, step)
            for lane in lanes:
                if counts[lane]:
                    where = f"lane {lane} of step {step} in epoch {epoch}"
                    yield Request(
                        where,
                        plan.indices(epoch, step, lane).tolist(),
                        key(seed, "fetch", epoch, step, lane),
                    )

    two_steps = 2 * len(lanes)  # one to compute on while the other is loaded
    source = load(
        dataset,
        requests(),
        collate_fn=collate_fn,
        loader_workers=loader_workers,
        pin_memory=pin_memory,
        ahead=two_steps,
    )
    for epoch, step in positions():
        batch = Batch(epoch, lanes, plan.counts(epoch, step), source)
        yield batch
        batch.load()
