"""Starting and supervising workers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from samestep.errors import WorkerError

__all__ = ["launch"]


def launch(
    fn: Callable[..., Any],
    *args: Any,
    workers: int = 2,
    on_log: Callable[[int, dict[str, float]], object] | None = None,
    **options: Any,
) -> Any:
    """Run `fn(*args)` in new processes on this machine and return rank 0's result.

    This process must not have used CUDA, nor more than one thread for a torch operation. If a
    worker is killed from outside after the run has begun, all workers restart from the saved state,
    up to `max_restarts` consecutive times without a completed step. If a worker does not exit
    within `timeout` seconds after `fn` has returned, it is ended, and its result counts. A signal
    that stops this process stops the workers first, which have `grace_period` seconds to save a
    snapshot. Random generators are seeded before `fn` is called.

    Args:
        fn: Body of each worker; may be a lambda or a closure. Its result must be picklable.
        *args: Arguments of `fn`.
        workers: Number of processes.
        on_log: Called in this process as `on_log(step, values)` with the scalars of each `run.log`,
            such as to report a trial. If it raises an exception, the workers are killed, and the
            exception is that of the launch. Steps that are repeated after a restart come again.
        **options: Options of `samestep.init`, which they override in the workers.

    Returns:
        Rank 0's result, with its tensors on the CPU.

    Raises:
        ConfigError: An option is invalid. No worker was started.
        LaunchError: The workers cannot be started.
        WorkerError: A worker failed; with the traceback of the first one that did. It also has the
            type of the worker's exception, so `except` with that type finds it, unless Python
            cannot combine the two, or the exception cannot be pickled.

    Example:
        >>> def train():
        ...     with ss.init(lanes=4) as run:
        ...         return run.all_gather(run.rank)
        >>> ss.launch(train, workers=2)
        [0, 1]
    """
    from samestep.launch.local import start  # most processes that import samestep launch nothing

    try:
        return start(partial(fn, *args), workers, options, on_log=on_log)
    except WorkerError as error:
        raise error.with_type_of_cause() from error.__cause__
