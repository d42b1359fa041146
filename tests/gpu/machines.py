"""Makes a worker believe that it is on one of several machines."""

from __future__ import annotations

import os
from bisect import bisect
from collections.abc import Sequence

from tests.gpu.simulated import VISIBLE


def enter_machine(first_ranks: Sequence[int]) -> range:
    """Set this worker's environment; return the ranks of its machine. `first_ranks` has one each.

    Workers with other first ranks on their host are on another one, and each has a device.
    """
    rank, bounds = int(os.environ["RANK"]), [*first_ranks, int(os.environ["WORLD_SIZE"])]
    number = bisect(first_ranks, rank) - 1
    machine = range(bounds[number], bounds[number + 1])
    os.environ["LOCAL_RANK"] = str(rank - machine.start)
    os.environ["LOCAL_WORLD_SIZE"] = str(len(machine))
    os.environ[VISIBLE] = ",".join(map(str, machine))
    return machine
