"""Communication of user code: the methods of `Run` that move objects between workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from samestep.comm.base import World
from samestep.errors import DataError


class Collectives:
    """The methods of `Run` that move objects between workers."""

    _world: World
    world_size: int

    def gather(self, obj: Any) -> list[Any] | None:
        """Return every worker's picklable object, by rank, on rank 0, and None on other ranks.

        Example:
            >>> run.gather({"rank": run.rank})
            [{'rank': 0}]
        """
        return self._world.gather_object(obj, "gathering an object")

    def all_gather(self, obj: Any) -> list[Any]:
        """Return every worker's picklable object, by rank.

        Example:
            >>> run.all_gather(run.rank)
            [0]
        """
        return self._world.all_gather_object(obj, "gathering an object")

    def broadcast(self, obj: Any) -> Any:
        """Return rank 0's picklable object.

        Example:
            >>> run.broadcast("name" if run.is_main else None)
            'name'
        """
        return self._world.broadcast_object(obj, "broadcasting an object")

    def reduce_dict(self, values: Mapping[str, Any], *, average: bool = True) -> dict[str, Any]:
        """Return the means, or sums, of numbers and tensors over workers.

        Args:
            values: Numbers and tensors, with the same names on all workers.
            average: Whether to return means instead of sums.

        Raises:
            DataError: Names differ between workers.

        Example:
            >>> run.reduce_dict({"seconds": 0.5})
            {'seconds': 0.5}
        """
        everyone = self._world.all_gather_object(dict(values), "reducing a dict")
        names = everyone[0].keys()
        for rank, other in enumerate(everyone):
            if other.keys() != names:
                raise DataError(
                    "reduce_dict expected the same names on all workers, got "
                    f"{sorted(names)} on worker 0 and {sorted(other)} on worker {rank}"
                )
        divisor = self.world_size if average else 1
        return {name: sum(other[name] for other in everyone) / divisor for name in names}

    def barrier(self, what: str) -> None:
        """Wait for all workers; `what` describes the wait in errors, as in "preparing data".

        Raises:
            WorldError: A worker did not arrive within `timeout`.

        Example:
            >>> run.barrier("preparing data")
        """
        self._world.barrier(what)
