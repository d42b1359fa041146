"""Launching workers on this host, and the command `samestep run`."""

from __future__ import annotations

import argparse
import gc
import itertools
import logging
import os
import re
import runpy
import secrets
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing, suppress
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from samestep.cluster import STARTED_BY, find_process
from samestep.cluster.launchers import is_host
from samestep.config import PREFIX, TOKEN, Config, flag_name, merge, parse
from samestep.errors import ConfigError, LaunchError
from samestep.handoff import (
    LauncherState,
    LoggedValues,
    ScriptArguments,
    finished_directories,
    open_launcher_state,
)
from samestep.host import (
    SIGNALED,
    interrupts_deferred,
    no_garbage_collection,
    open_standard_files,
    raise_file_limit,
    socket_folder,
    usable_cores,
)
from samestep.launch.attempt import UsageExit
from samestep.launch.cluster_spec import ClusterSpec, add_node_arguments, cluster_spec
from samestep.launch.missing import advice_on
from samestep.launch.screen import terminal_variables
from samestep.terminal import starting
from samestep.user_code import imported_modules

EPILOG = """\
examples:
  samestep run -n 2 train.py --epochs 10
  samestep run -n 4 --lanes 8 --dir runs/one -m recipes.vit.train
  samestep run -n auto train.py
  samestep run --gpus 2,3 train.py
  samestep run -n 4 --mode dp train.py
  samestep run -n 3 --dir runs/one --resume runs/one/step-00001200 train.py
  samestep run --nodes 2 --master node1:29400 --token-file run.token -n 4 train.py   # on both hosts
  samestep run --hosts hosts.txt -n 4 train.py

The script calls samestep.init(). Options given here override the arguments of that call. Everything
after the script is passed to the script. On Ctrl-C or SIGTERM, workers save a snapshot and exit
within the grace period; a second Ctrl-C kills them immediately.
"""


MAX_GPUS = 1000  # of a host
OnLog = Callable[[int, dict[str, float]], object]


def preload() -> None:
    """Import what training needs once, before workers are forked.

    No torch operation runs and no GPU is queried; either would break forked workers. Otherwise
    each worker would load these modules, which takes 60 MB per worker.
    """
    # nothing imported is garbage, and searching for garbage takes a quarter of the time
    with no_garbage_collection(), starting():
        with interrupts_deferred():
            import samestep.run  # noqa: F401
        from samestep.record.events import samestep_version
        from samestep.torch_internals import preload_compiler

        with interrupts_deferred():  # again, because each import takes a second
            preload_compiler()
        samestep_version()
        is_host("localhost")  # loads the codec of names of hosts
        imported_modules.note()


def start(
    body: Callable[[], Any],
    workers: int,
    options: Mapping[str, Any],
    spec: ClusterSpec | None = None,
    *,
    on_log: OnLog | None = None,
) -> Any:
    """Launch workers that run `body()`; with a `spec`, as one of several hosts.

    Returns None on hosts without rank 0. `on_log(step, values)` is called in this process with what
    rank 0 logs.
    """
    merge(options, {}, is_complete=False)
    variables = _variables(options)
    config = merge({}, {**os.environ, **variables}, is_complete=False)
    if workers < 1:
        raise ConfigError(f"workers must be at least 1, got {workers}")
    if spec is None:
        _refuse_separate_runs(os.environ)
    raise_file_limit()
    with ExitStack() as exits:
        client = None
        variables[TOKEN] = secrets.token_hex() if spec is None else spec.token
        if spec is not None:
            from samestep.launch.coordinator_client import join_cluster  # imports asyncio

            client = exits.enter_context(join_cluster(spec, workers, config))
        open_standard_files()
        state = exits.enter_context(open_launcher_state(workers))
        with no_garbage_collection():
            preload()
            from samestep.launch.preemption import watching
            from samestep.launch.supervisor import LocalCoordinator, Supervisor
            from samestep.launch.worker import NVML_CHECK, Job, StopSignals

            # a collection of what torch has imported takes 0.1 s, and this process starts workers
            gc.freeze()
            exits.callback(gc.unfreeze)
        _refuse_lost_gpus(config)
        folder = exits.enter_context(socket_folder())
        launcher = {STARTED_BY: "samestep", **NVML_CHECK, **terminal_variables()}
        logged = None
        if on_log is not None:
            logged = exits.enter_context(closing(LoggedValues(on_log)))
            launcher.update(logged.environment)
        environment = {**launcher, **folder, **state.environment, **variables}
        signals = StopSignals()
        exits.enter_context(signals.recorded())
        coordinator = client or exits.enter_context(
            closing(LocalCoordinator(workers, config, variables[TOKEN]))
        )
        job = Job(body, config, environment, state, signals, os.getpid(), logged)
        exits.enter_context(watching(config.preemption, job.notices.append, signals.notice))
        result = Supervisor(job, coordinator).run()
        if state.directory and state.has_finished:
            finished_directories.add(state.directory)
        end = _describe_end(state) if signals.received else ""
    if signals.received:
        _stop_by_signal(signals.received[0], end)
    return result


def _refuse_lost_gpus(config: Config) -> None:
    """Raise `LaunchError` if the workers are to use GPUs, and forks of this process cannot."""
    from samestep.launch.worker import can_use_gpus

    if config.device != "cpu" and not can_use_gpus():
        raise LaunchError(
            "CUDA is already in use in this process, so forked workers cannot use it; launch "
            "before the first use of a GPU and of torch.cuda.is_available(), or set "
            "PYTORCH_NVML_BASED_CUDA_CHECK=1 for the latter, or device='cpu'"
        )


def _refuse_separate_runs(environment: Mapping[str, str]) -> None:
    """Raise `LaunchError` if this process is one of several, each of which would start a run."""
    size, source, remedy = 1, "", "unset these variables"
    with suppress(ConfigError):  # leftover variables, which workers do not read
        process = find_process(environment)
        size, source = process.world_size, process.source
    group = sys.modules.get("torch.distributed")  # without it, there is no group
    if size == 1 and group and group.is_available() and group.is_initialized():
        size, source = group.get_world_size(), "torch.distributed's default group"
        remedy = "call destroy_process_group before"
    if size > 1:
        raise LaunchError(
            f"each of {size} processes ({source}) would start workers of a "
            "separate run; call samestep.init in these processes instead of launching, start one "
            f"process per host with samestep run --nodes, or {remedy}"
        )


def _variables(options: Mapping[str, Any]) -> dict[str, str]:
    return {f"{PREFIX}{name.upper()}": as_text(value) for name, value in options.items()}


def as_text(value: Any) -> str:
    """Write an option as `samestep.config.parse` reads it."""
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _describe_end(state: LauncherState) -> str:
    """Return what is left of a run that a signal has stopped, and where."""
    if state.step is None:
        return " before it had begun; nothing was saved"
    if not state.directory:
        return f" at step {state.step}; nothing was saved"
    from samestep.snapshot.manifest import NAME
    from samestep.snapshot.read import list_snapshots

    saved = [path for path in list_snapshots(Path(state.directory)) if (path / NAME).exists()]
    if not saved:
        return f" at step {state.step}, before the first snapshot in {state.directory}"
    return f" at step {state.step}; the same command resumes from {saved[-1]}"


def _stop_by_signal(number: signal.Signals, end: str) -> None:
    """Raise a recorded signal again, now that the workers have exited, with the run's end."""
    try:
        signal.raise_signal(number)
    except KeyboardInterrupt as interrupt:  # or what another handler raises
        raise KeyboardInterrupt(*interrupt.args or [end]) from None
    if signal.getsignal(number) is signal.SIG_DFL:  # the first process of a container survives it
        raise SystemExit(SIGNALED + number)
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
    check_script(script, as_module=as_module)
    body = partial(_run_as_main, script, arguments, as_module=as_module)
    start(body, workers, options, spec)


def check_script(script: str, *, as_module: bool = False) -> None:
    """Raise `ConfigError` if a script does not exist."""
    if not as_module and not Path(script).is_file():
        raise ConfigError(f"script {script!r} does not exist; for a module, add -m")


def _run_as_main(script: str, arguments: Sequence[str], *, as_module: bool) -> None:
    late = {position + 1: text for position, text in getattr(arguments, "late", {}).items()}
    words = ScriptArguments([script, *arguments], late)
    sys.argv = words if late else list(words)
    try:
        names = _run(script, as_module=as_module)  # the worker frees them  # noqa: F841
    except SystemExit as error:
        if error.code == ConfigError.status:  # argparse has the same one
            own = _flags_of_parsers(error.__traceback__)
            options = (text for text in late.values() if re.split("[ =]", text)[0] not in own)
            raise UsageExit(error.code, words.describe(options)) from error
        raise
    except ModuleNotFoundError as error:
        if advice := advice_on(error, script, as_module=as_module):
            raise ConfigError(f"{error}: {advice}") from error
        raise
    finally:
        _warn_if_alone(script)


def _flags_of_parsers(trace: TracebackType | None) -> set[str]:
    """Return the flags that a script takes, from the parsers of argparse that refused others."""
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    parsers = [frame.f_locals.get("self") for frame in frames]
    return {
        flag
        for parser in parsers
        if isinstance(parser, argparse.ArgumentParser)
        for flag in parser._option_string_actions  # noqa: SLF001  argparse has no public way
    }


def _warn_if_alone(script: str) -> None:
    """Warn if several workers ran the script without a common run."""
    state, workers = LauncherState.from_environment(os.environ), os.environ["WORLD_SIZE"]
    error = sys.exc_info()[1]
    failed = error is not None and not (isinstance(error, SystemExit) and error.code in {None, 0})
    if state and state.step is None and workers != "1" and os.environ["RANK"] == "0" and not failed:
        logging.getLogger("samestep").warning(
            "%s ended without calling samestep.init, so each of the %s workers ran all of it "
            "independently; call samestep.init, or start it with -n 1",
            script,
            workers,
        )


def _run(script: str, *, as_module: bool) -> dict[str, Any]:
    """Run a script and return its global names."""
    if as_module:
        sys.path[0] = str(Path.cwd())
        return runpy.run_module(script, run_name="__main__", alter_sys=True)
    sys.path[0] = str(Path(script).resolve().parent)
    return runpy.run_path(script, run_name="__main__")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep run`, with one flag for each option of a run."""
    parser.usage = "%(prog)s [-n N] [--OPTION VALUE ...] [-m] script ..."
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    workers = (
        "number of workers on this host; auto: one per GPU, or one per core if there are no GPUs, "
        "but at most one per lane of --lanes (default: 1, or one per GPU of --gpus)"
    )
    parser.add_argument("-n", "--workers", type=_number_or_auto, metavar="N", help=workers)
    gpus = "GPUs of this host to use, such as 2,3"
    parser.add_argument("--gpus", metavar="NUMBERS", help=gpus)
    mode = (
        "ddp: N workers with one device each; dp: one worker with N devices, like "
        "-n 1 --devices N (default: ddp)"
    )
    parser.add_argument("--mode", choices=("ddp", "dp"), default="ddp", help=mode)
    module = "run a module, like python -m, not a file"
    parser.add_argument("-m", "--module", action="store_true", help=module)
    add_options(parser)
    add_node_arguments(parser)
    parser.add_argument("script", help="Python script to run, or a module with -m")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="arguments of the script")
    parser.set_defaults(parser=parser)


def late_options(arguments: argparse.Namespace) -> dict[int, str]:
    """Return the options of samestep after the script by position, with their values.

    An option that was also given before the script is the script's own.
    """
    actions = arguments.parser._option_string_actions  # noqa: SLF001  argparse has no public way
    words = list(itertools.takewhile(lambda word: word != "--", arguments.arguments))
    late = {}
    for position, (word, value) in enumerate(itertools.zip_longest(words, words[1:])):
        flag = "-n" if re.fullmatch("-n[0-9]+", word) else word.partition("=")[0]
        action = actions.get(flag)
        if action is None or action.nargs == 0:  # -m and --help
            continue
        if getattr(arguments, action.dest) in {None, action.default}:
            has_value = flag == word and value and not value.startswith("-")
            late[position] = shlex.join([word, value] if has_value else [word])
    return late


def _number_or_auto(text: str) -> int | str:
    try:
        return text if text == "auto" else int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a number or auto, got {text!r}") from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add one flag for each option of a run, such as --snapshot-every for snapshot_every."""
    group = parser.add_argument_group("options of the run, as in samestep.init")
    for option in fields(Config):
        text = option.metadata["description"]
        if option.default is not None:
            text += f" (default: {str(option.default).lower()})"
        group.add_argument(flag_name(option.name), metavar="VALUE", help=text)


def given_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given options of a run by name. Raises `ConfigError` that names the flag."""
    return {
        option.name: parse(option.name, text, flag_name(option.name))
        for option in fields(Config)
        if (text := getattr(arguments, option.name, None)) is not None
    }


def choose_gpus(text: str) -> None:
    """Make only these of the visible GPUs visible to workers.

    Raises `ConfigError` that says how many GPUs there are.
    """
    numbers = [int(number) for number in re.findall(r"[0-9]+", text)]
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    names = list(map(str, range(MAX_GPUS))) if devices is None else devices.split(",")
    are_different = (
        bool(numbers) and text == ",".join(map(str, numbers)) and len(set(numbers)) == len(numbers)
    )
    if are_different and max(numbers) < len(names):
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(names[number] for number in numbers)
        if count_gpus() == len(numbers):
            return
        del os.environ["CUDA_VISIBLE_DEVICES"]  # to count all that are visible
        if devices is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = devices
    visible = "" if devices is None else f" with CUDA_VISIBLE_DEVICES={devices}"
    if not (count := count_gpus()):
        raise ConfigError(
            f"--gpus {text} needs GPUs, but torch finds none{visible}; check the driver and the "
            "build of torch, or leave out --gpus to train on the CPU"
        )
    raise ConfigError(
        f"--gpus must be different numbers of GPUs of this host, 0 to {count - 1}, got "
        f"{text}{visible}; nvidia-smi lists the GPUs"
    )


def count_gpus() -> int:
    """Return the number of visible GPUs.

    Another process counts them: a process that has used CUDA cannot fork workers that do.
    """
    with starting(), interrupts_deferred():
        import torch

    from samestep.launch.worker import FORK

    if torch.version.cuda is None and torch.version.hip is None:
        return 0
    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=lambda: sender.send(torch.cuda.device_count()))
    process.start()
    sender.close()
    count = 0
    with receiver, suppress(EOFError):  # if it crashed
        count = int(receiver.recv())
    process.join()
    return count


def worker_count(asked: int | str | None, gpus: int | None, options: Mapping[str, Any]) -> int:
    """Return the number of workers; with auto, as many as this host has devices for.

    With auto, it is at most the number of lanes. `gpus` is the number of GPUs chosen, if any.
    """
    if isinstance(asked, int) or (asked is None and gpus is None):
        return 1 if asked is None else int(asked)
    config = merge({}, {**os.environ, **_variables(options)}, is_complete=False)
    devices = config.devices if isinstance(config.devices, int) else len(config.devices)
    available = 0 if config.device == "cpu" else count_gpus() if gpus is None else gpus
    count = max(
        1, available // devices if available else usable_cores() // (devices * config.threads)
    )
    return min(count, config.lanes or count)


def main(arguments: argparse.Namespace) -> int:
    """Run the script; return the exit status."""
    options = given_options(arguments)
    if arguments.mode == "dp" and "devices" in options:
        raise ConfigError(
            "--devices cannot be combined with --mode dp, where -n is the number of devices"
        )
    if arguments.hosts is not None:
        from samestep.launch.ssh import run_on_hosts

        return run_on_hosts(arguments, options)
    gpus = None
    if arguments.gpus is not None:
        choose_gpus(arguments.gpus)
        gpus = arguments.gpus.count(",") + 1
    workers = worker_count(arguments.workers, gpus, options)
    if arguments.mode == "dp":
        workers, options["devices"] = 1, workers
    words = ScriptArguments(arguments.arguments, late_options(arguments))
    spec, as_module = cluster_spec(arguments), arguments.module
    run_script(arguments.script, words, workers, options, as_module=as_module, spec=spec)
    return 0
