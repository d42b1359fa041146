"""Start workers on this machine by forking this process, which has imported torch already."""

from __future__ import annotations

import os
import signal
from functools import partial
from typing import TYPE_CHECKING, Any

from samestep.config import PREFIX, TOKEN, merge
from samestep.errors import LaunchError
from samestep.launch.files import one_folder, open_standard_files
from samestep.launch.kept import keep
from samestep.launch.place import STARTED_BY
from samestep.launch.preload import NEEDED, preload
from samestep.launch.signals import StopSignals

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from samestep.config import Config
    from samestep.launch.nodes.member import Member
    from samestep.launch.nodes.options import Gathering


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
    gathering: Gathering | None = None,
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
        from samestep.launch.nodes.member import take_part

        with take_part(gathering, workers, config) as member:
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
    member: Member | None = None,
) -> Any:
    open_standard_files()
    preload(needed)
    import torch

    from samestep.launch.agent import Agent
    from samestep.launch.nodes.agent import HostAgent
    from samestep.launch.worker import Job

    if torch.cuda.is_initialized():
        raise LaunchError(
            "CUDA is in use in this process, and forked workers could not use it: launch before the first use of a GPU"
        )
    with one_folder() as folder, keep(workers) as kept:
        environment = {STARTED_BY: "samestep", **folder, **kept.environment, **environment}
        job = Job(body, workers, config, environment, kept, signals, os.getpid())
        with signals.noted():
            return (HostAgent(job, member) if member else Agent(job)).run()


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
