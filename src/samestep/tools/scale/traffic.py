"""What the workers of a run send each other in a step, counted and not measured. Pure: sizes only.

See `samestep.step.exchange` for what happens, and in which order.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

from samestep.step.exchange import BUCKET_BYTES
from samestep.step.layout import Layout
from samestep.step.tree import lanes_of, subtrees

ELEMENT_BYTES: Final = 4
# of a host's workers in a step: with the losses, and before and after what each has is gathered
MEETINGS: Final = 3
# that a worker tells all others with the losses; those of many lanes take more
MEETING_BYTES: Final = 1024


@dataclass(frozen=True)
class Traffic:
    """What a step costs the worker, or the host, that it costs most.

    Between hosts: `rounds` wait for each other (who passes on what it received), `messages` do not
    (they leave for all partners at once), in `batches` of such; `sent_bytes` leave a host for its
    partners and `passed_bytes` in rounds. Within a host: `meetings` messages among its workers;
    `moved_bytes` that each reads or writes in memory.
    """

    rounds: int = 0
    messages: int = 0
    batches: int = 0
    sent_bytes: int = 0
    passed_bytes: int = 0
    meetings: int = 0
    moved_bytes: int = 0


@cache
def traffic(workers: int, per_host: int, lanes: int, nbytes: int) -> Traffic:
    """Return what a step sends with `nbytes` of float32 parameters, all in one tensor, at so many workers of equal hosts.

    Hosts of several workers are taken to share memory. Of a last host with fewer workers than the
    others, nothing is seen.
    """
    if workers == 1:
        return Traffic()
    on_host = min(workers, per_host)
    hosts = -(-workers // on_host)
    slice_bytes = ELEMENT_BYTES * Layout((nbytes // ELEMENT_BYTES,), workers).slice_size
    own, of_host, everywhere = _spans(workers, on_host, lanes)
    add_bytes = 3 * (everywhere - 1) * slice_bytes  # two are read and one is written
    moved = 2 * own * slice_bytes * workers + add_bytes + 2 * (workers - 1) * slice_bytes
    if hosts == 1:
        return Traffic(meetings=MEETINGS * (workers - 1), moved_bytes=moved)
    partners, others = hosts - 1, workers - 1
    # of losses: each time a host has those of twice as many
    doublings, told = partners.bit_length(), partners * on_host * MEETING_BYTES
    exchanged = partners * on_host * slice_bytes * of_host
    if on_host == 1:  # buckets travel one after the other, and their gather is a ring
        buckets = max(1, -(-nbytes // BUCKET_BYTES))
        return Traffic(
            rounds=doublings + buckets * others,
            messages=buckets * others,
            batches=buckets,
            sent_bytes=exchanged,
            passed_bytes=told + others * slice_bytes,
            moved_bytes=moved,
        )
    return Traffic(
        rounds=doublings,
        messages=2 * others,
        batches=2,
        sent_bytes=exchanged + partners * on_host * slice_bytes,
        passed_bytes=told,
        # with losses they meet twice: before the first of them fetches those of others, and after
        meetings=(MEETINGS + 1) * (on_host - 1),
        moved_bytes=moved,
    )


def _spans(workers: int, on_host: int, lanes: int) -> tuple[int, int, int]:
    """Return how many sums the worker and the host with most of them have, and how many all workers have together."""
    own = [len(subtrees(lanes_of(rank, workers, lanes), lanes)) for rank in range(workers)]
    of_host = []
    for first in range(0, workers, on_host):
        last = min(first + on_host, workers) - 1
        together = range(lanes_of(first, workers, lanes).start, lanes_of(last, workers, lanes).stop)
        of_host.append(len(subtrees(together, lanes)))
    return max(own), max(of_host), sum(own)
