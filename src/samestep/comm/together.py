"""Jobs of single workers that take long, while all workers keep communicating."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, Final, TypeVar

import torch

from samestep.comm.base import World
from samestep.errors import WorldError

Value = TypeVar("Value")

POLL_SECONDS: Final = 1.0


def in_thread(function: Callable[[], Value], name: str) -> Future[Value]:
    """Call a function in a thread that ends with the process; return its future result."""

    def work(result: Future[Value]) -> None:
        try:
            result.set_result(function())
        except BaseException as error:  # noqa: BLE001  raised by `result`
            result.set_exception(error)
        finally:
            del result  # a cycle with the error's traceback would keep what it holds alive

    result: Future[Value] = Future()
    threading.Thread(target=work, args=(result,), name=name, daemon=True).start()
    return result


def run_together(world: World, job: Callable[[], Any], what: str) -> list[Any]:
    """Run each worker's `job` and return the JSON values by rank, none of them None; collective.

    The job runs in a thread. Meanwhile, all workers exchange messages every second, so that none of
    them times out, and each learns of the end of another one.
    """
    future = in_thread(job, what)
    # A worker whose job is done keeps answering until all are done.
    gathered: list[Any] = [None]
    while None in gathered:
        wait([future], POLL_SECONDS)
        gathered = world.all_gather_json(future.result() if future.done() else None, what)
    return gathered


def call_once(world: World, fn: Callable[[], Any], what: str) -> Any:
    """Call `fn()` on rank 0 and return its picklable result on all workers; collective.

    There is no time limit. An exception is raised on rank 0, and as `WorldError` on the others.
    """
    if world.size == 1:
        return fn()
    value: Any = None
    error: BaseException | None = None
    has_gradients = torch.is_grad_enabled()  # of this thread

    def call() -> str:
        nonlocal value, error
        try:
            with torch.set_grad_enabled(has_gradients):
                value = fn()
        except BaseException as raised:  # noqa: BLE001  raised below, in the main thread
            error = raised
            return f"{type(raised).__name__}: {raised}"
        return ""

    fault = run_together(world, call if world.rank == 0 else str, what)[0]
    if error is not None:
        raise error
    if fault:
        raise WorldError(f"worker 0 failed while {what}: {fault}")
    return world.broadcast_object(value, what)
