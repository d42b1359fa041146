"""The `launch` function, and running a script in workers."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any

from samestep.cluster import STARTED_BY
from samestep.config import PREFIX, TOKEN, merge
from samestep.errors import ConfigError, LaunchError
from samestep.handoff import open_launcher_state
from samestep.host import no_garbage_collection, open_standard_files, socket_folder
from samestep.launch.cluster_spec import ClusterSpec


def preload() -> None:
    """Import what training needs once, before workers are forked.

    No torch operation runs and no GPU is queried; either would break forked workers. torch's
    optimizers import torch._dynamo, with 800 modules. Otherwise each worker would load them, which
    takes 60 MB per worker.
    """
    # nothing imported is garbage, and searching for garbage takes a quarter of the time
    with no_garbage_collection():
        import torch._dynamo  # noqa: F401

        import samestep.run  # noqa: F401


def launch(fn: Callable[..., Any], *args: Any, workers: int = 2, **options: Any) -> Any:
    """Run `fn(*args)` in new processes on this machine and return rank 0's result.

    This process must not have used CUDA, nor more than one thread for a torch operation. If a
    worker is killed from outside after the run has begun, all workers restart from the saved state,
    up to `max_restarts` consecutive times without a completed step. A signal that stops this
    process stops the workers first, which have `grace_period` seconds to save a snapshot.

    Args:
        fn: Body of each worker; may be a lambda or a closure. Its result must be picklable.
        *args: Arguments of `fn`.
        workers: Number of processes.
        **options: Options of `samestep.init`, which they override in the workers.

    Returns:
        Rank 0's result, with its tensors on the CPU.

    Raises:
        ConfigError: An option is invalid. No worker was started.
        LaunchError: The workers cannot be started.
        WorkerError: A worker failed; with the traceback of the first one that did.

    Example:
        >>> def train():
        ...     with ss.init(lanes=4) as run:
        ...         return run.all_gather(run.rank)
        >>> ss.launch(train, workers=2)
        [0, 1]
    """
    return start(partial(fn, *args), workers, options)


def start(
    body: Callable[[], Any],
    workers: int,
    options: Mapping[str, Any],
    spec: ClusterSpec | None = None,
    *,
    preloads: bool = True,
) -> Any:
    """Launch workers that run `body()`; with a `spec`, as one of several hosts.

    Returns None on hosts without rank 0. With `preloads`, imports what training needs first.
    """
    merge(options, {})
    variables = {f"{PREFIX}{name.upper()}": _as_text(value) for name, value in options.items()}
    config = merge({}, {**os.environ, **variables})
    if workers < 1:
        raise LaunchError(f"workers must be at least 1, got {workers}")
    with ExitStack() as exits:
        client = None
        if spec is not None:
            from samestep.launch.coordinator_client import join_cluster  # imports asyncio

            variables[TOKEN] = spec.token
            client = exits.enter_context(join_cluster(spec, workers, config))
        open_standard_files()
        if preloads:
            preload()
        import torch

        from samestep.launch.supervisor import LocalCoordinator, Supervisor
        from samestep.launch.worker import Job, StopSignals

        if torch.cuda.is_initialized():
            raise LaunchError(
                "CUDA is already in use in this process, so forked workers cannot use it; "
                "launch before the first use of a GPU"
            )
        folder = exits.enter_context(socket_folder())
        state = exits.enter_context(open_launcher_state(workers))
        environment = {STARTED_BY: "samestep", **folder, **state.environment, **variables}
        signals = StopSignals()
        exits.enter_context(signals.recorded())
        coordinator = client or exits.enter_context(closing(LocalCoordinator(workers, config)))
        job = Job(body, config, environment, state, signals, os.getpid())
        result = Supervisor(job, coordinator).run()
    if signals.received:
        _stop_by_signal(signals.received[0])
    return result


def _as_text(value: Any) -> str:
    """Write an option as `samestep.config.parse` reads it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _stop_by_signal(number: signal.Signals) -> None:
    """Raise a recorded signal again, now that the workers have exited."""
    signal.raise_signal(number)
    if signal.getsignal(number) is signal.SIG_DFL:  # the first process of a container survives it
        raise SystemExit(128 + number)
    raise LaunchError(f"stopped by {number.name}")


def run_script(
    script: str,
    arguments: Sequence[str],
    workers: int,
    options: Mapping[str, Any],
    *,
    as_module: bool = False,
    spec: ClusterSpec | None = None,
) -> None:
    """Run a Python script, or a module like `python -m`, in workers of this host.

    Options and errors are those of `launch`. Raises `ConfigError` if the script does not exist.
    """
    if not as_module and not Path(script).is_file():
        raise ConfigError(f"script {script!r} does not exist; for a module, add -m")
    body = partial(_run_as_main, script, arguments, as_module=as_module)
    start(body, workers, options, spec)


def _run_as_main(script: str, arguments: Sequence[str], *, as_module: bool) -> None:
    sys.argv = [script, *arguments]
    if as_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
