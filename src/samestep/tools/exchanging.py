"""The exchange of a step by itself, for what measures it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from samestep.step.exchange import Exchange

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from samestep.comm.base import World


def exchanging(world: World, gradient: torch.Tensor, what: str) -> Callable[[], None]:
    """Return what sums gradients of that shape over all workers and gives everybody the whole sum, as an all-reduce does; collective."""
    exchange = Exchange([gradient], world.size, world)

    def add_up() -> None:
        exchange.put([[gradient]])
        world.barrier(what)
        exchange.sum()
        exchange.gather()

    return add_up
