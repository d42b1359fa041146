"""Import what training needs once, in the process that workers are forked from, and not once in each of them."""

from __future__ import annotations

import os
import runpy
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from samestep.cluster import STARTED_BY
from samestep.config import PREFIX, TOKEN, Config, merge
from samestep.errors import ConfigError, LaunchError
from samestep.handoff import open_launcher_state
from samestep.host import no_garbage_collection, open_standard_files, socket_folder
from samestep.launch.cluster_spec import ClusterSpec
from samestep.launch.signals import StopSignals

if TYPE_CHECKING:
    from samestep.launch.coordinator_client import CoordinatorClient

# By name, because `run` stands below `launch` in the reading order. torch's optimizers import
# torch._dynamo when they are made: 800 modules, which each worker would wait for, and hold in 60 MB
# of its own.
NEEDED: Final = ("samestep.run", "torch._dynamo")


def preload(needed: Iterable[str] = NEEDED) -> None:
    """Import what workers need: by default, to train. No torch operation runs and no GPU is asked for: a fork would break either."""
    # collecting among so many new objects, of which none is garbage, takes a quarter of the time
    with no_garbage_collection():
        for name in needed:
            import_module(name)


def launch(fn: Callable[..., Any], *args: Any, workers: int = 2, **options: Any) -> Any:
    """Run `fn(*args)` in `workers` new processes on this machine and return rank 0's result, its tensors on the CPU.

    `fn` may be a lambda or a closure; its result must be picklable. `options` are those of
    `samestep.init`, in its workers they have the last word. This process must not have used CUDA,
    nor more than one thread for a torch operation.

    A worker that is killed from outside after the run began is replaced, up to `max_restarts` times
    in a row without a new step: all workers start again from the state that is kept. Raises
    `ConfigError` for a wrong option and `LaunchError` when workers cannot be started, both before
    any is; `WorkerError` with the traceback of the first worker that fails, when all have ended. A
    signal that stops this process stops the workers first, which get `grace_period` seconds to
    snapshot.
    """
    return start(partial(fn, *args), workers, options)


def start(
    body: Callable[[], Any],
    workers: int,
    options: Mapping[str, Any],
    gathering: ClusterSpec | None = None,
    needed: Sequence[str] = NEEDED,
) -> Any:
    """Do what `launch` does; with a `gathering`, as one host of several. On those without rank 0 the result is None.

    Modules that are `needed` in workers are imported before they are forked.
    """
    merge(options, {})
    environment = {f"{PREFIX}{name.upper()}": _as_text(value) for name, value in options.items()}
    config = merge({}, {**os.environ, **environment})
    if workers < 1:
        raise LaunchError(f"workers={workers} was given; expected at least 1")
    signals = StopSignals()
    if gathering is None:
        result = _run(body, workers, environment, config, signals, needed)
    else:
        # asyncio is for those who need it
        from samestep.launch.coordinator_client import join_cluster

        with join_cluster(gathering, workers, config) as member:
            result = _run(
                body,
                workers,
                {**environment, TOKEN: gathering.token},
                config,
                signals,
                needed,
                member,
            )
    if signals.received:
        _stop_as_asked(signals.received[0])
    return result


def _run(
    body: Callable[[], Any],
    workers: int,
    environment: Mapping[str, str],
    config: Config,
    signals: StopSignals,
    needed: Sequence[str],
    member: CoordinatorClient | None = None,
) -> Any:
    open_standard_files()
    preload(needed)
    import torch

    from samestep.launch.local_coordinator import LocalCoordinator
    from samestep.launch.supervisor import Supervisor
    from samestep.launch.worker import Job

    if torch.cuda.is_initialized():
        raise LaunchError(
            "CUDA is in use in this process, and forked workers could not use it: launch before the first use of a GPU"
        )
    with socket_folder() as folder, open_launcher_state(workers) as kept:
        environment = {STARTED_BY: "samestep", **folder, **kept.environment, **environment}
        job = Job(body, workers, config, environment, kept, signals, os.getpid())
        with signals.noted(), LocalCoordinator(workers, config) as local:
            return Supervisor(job, member or local).run()


def _as_text(value: Any) -> str:
    """Write an option as `samestep.config.parse` reads it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _stop_as_asked(number: signal.Signals) -> None:
    """Let a signal do, now that the workers have ended, what it does without workers: mostly end this process."""
    signal.raise_signal(number)
    if signal.getsignal(number) is signal.SIG_DFL:  # the first process of a container outlives it
        raise SystemExit(128 + number)
    raise LaunchError(f"stopped by {number.name}")


def run_script(
    script: str,
    arguments: Sequence[str],
    workers: int,
    options: Mapping[str, Any],
    *,
    as_module: bool = False,
    gathering: ClusterSpec | None = None,
) -> None:
    """Run `python script arguments…` (or `python -m script arguments…`) in `workers` workers of this host, one of several that gather.

    Options and errors are those of `launch`; a script that is not there is a `ConfigError`.
    """
    if not as_module and not Path(script).is_file():
        raise ConfigError(
            f"script {script!r} was given, and there is no such file; expected a Python script, or a module after -m"
        )
    start(
        partial(_run_as_main, script, arguments, as_module=as_module), workers, options, gathering
    )


def _run_as_main(script: str, arguments: Sequence[str], *, as_module: bool) -> None:
    sys.argv = [script, *arguments]
    if as_module:
        sys.path[0] = str(Path.cwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(script).resolve().parent)
        runpy.run_path(script, run_name="__main__")
