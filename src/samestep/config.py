"""The options of a run, and merging of their defaults, arguments and environment variables.

`samestep run --lanes 8` sets `SAMESTEP_LANES=8` for its workers, so flags and environment variables
are equivalent. The environment overrides the arguments of `samestep.init`, because the person who
starts a job takes precedence over its script.
"""

from __future__ import annotations

import difflib
import os
import re
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import cache, cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from samestep.errors import ConfigError

PREFIX = "SAMESTEP_"
TOKEN = "SAMESTEP_TOKEN"  # noqa: S105  the variable of the secret that a run's hosts share
SINKS = ("tensorboard", "mlflow", "wandb")
CLOUDS = ("aws", "gcp", "azure")
MAX_SECONDS = 10**9  # clocks count nanoseconds in 64 bits
MAX_DEVICES = 1000
MEANT = {"gpu": "cuda", "fp16": "float16", "fp32": "float32", "half": "float16"}  # by other names
TYPE_NAMES = {
    int: "an integer",
    float: "a number",
    str: "text",
    bool: "true or false",
    Path: "a path",
    NoneType: "none",
    tuple: "names",
}


def option(default: Any, description: str) -> Any:
    """Return a field whose `description` is printed by `samestep run --help`."""
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True)
class Config:
    """The options of a run. Raises `ConfigError` that names an option with an invalid value."""

    lanes: int | None = option(
        None, "number of slices of each global batch (default: the number of devices)"
    )
    seed: int = option(0, "seed for all random numbers, 0 to 2**63 - 1")
    dir: Path | None = option(None, "output directory of the run; without it, nothing is saved")
    resume: str = option(
        "auto",
        "auto (newest complete snapshot in dir or remote), never, or the path or URL of a snapshot",
    )
    resume_strict: bool = option(
        False,
        "refuse to resume if results may differ, because versions, threads, devices, ... changed",
    )
    read_only: bool = option(
        False, "only read snapshots of dir or remote, of any run, and write nothing: to evaluate"
    )
    precision: str = option(
        "float32", "float32, or bfloat16 or float16 for autocast in forward passes"
    )
    exchange_dtype: str | None = option(
        None,
        "dtype of exchanged gradients; bfloat16 rounds gradients and their sums, and halves the "
        "traffic (default: the dtype of the parameters)",
    )
    device: str = option("auto", "auto (one GPU per worker if there are any), cpu or cuda")
    devices: int | tuple[str, ...] = option(
        1, "devices per worker: a number, or names such as cuda:0,cuda:1"
    )
    threads: int = option(1, "intra-op CPU threads per worker; results depend on it")
    snapshot_every: str | None = option(
        "10min", 'steps ("500") or minutes ("10min") between snapshots, or none'
    )
    hot_every: str | None = option(
        "auto",
        "steps between in-memory snapshots for restarts, auto (about one percent of the time), or "
        "none",
    )
    keep_last: int = option(3, "number of newest snapshots to keep")
    keep_best: int = option(1, "number of snapshots with the highest scores to keep in addition")
    remote: str | None = option(None, "fsspec URL for copies of snapshots, such as s3://bucket/one")
    transfer: str | None = option(
        None, "module:function to call with the path of each file of a complete snapshot"
    )
    sinks: tuple[str, ...] | None = option(
        None,
        "additional destinations of the record: fsspec URLs, tensorboard, mlflow, wandb, "
        "module:Class",
    )
    on_event: str | None = option(
        None, "module:function or http(s) URL to call on failure, NaN, stall and end of the run"
    )
    nonfinite_loss: str = option(
        "stop",
        "what to do if a loss, or its gradient, is NaN or infinite: "
        "stop, skip the batch, or continue",
    )
    skip_batches: str | None = option(
        None,
        "steps whose batches make no update, such as 5000:5001 or 10:12,40:41 (the second number "
        "is not included); snapshots save them",
    )
    check_every: int | None = option(
        1000, "steps between checks that replicated state is equal on all workers, or none"
    )
    recheck_every: int | None = option(
        None,
        "steps between checks of the hardware, for which another worker computes a lane again "
        "(default: none)",
    )
    system_every: float | None = option(
        5.0,
        "seconds between samples of each host's CPU, memory, GPUs, disk and network for the "
        "record, or none",
    )
    progress: bool = option(
        True, "show step, loss, speed and time left on rank 0's terminal, if it prints nothing else"
    )
    deterministic: bool = option(True, "use deterministic torch kernels")
    graphs: str = option(
        "off",
        "whether GPUs compute lanes as CUDA graphs: off, or on for losses that can be captured (a "
        "graph with other bits than an eager lane is an error)",
    )
    process_group: bool = option(
        False,
        "make torch.distributed's default process group for libraries that use it (default: only "
        "runs on several hosts or GPUs have one)",
    )
    timeout: float = option(
        120.0, "seconds to wait for another worker before the run stops with a hang report"
    )
    max_restarts: int = option(3, "maximum number of consecutive restarts without a completed step")
    grace_period: float = option(
        30.0, "seconds to save a snapshot and exit after SIGTERM or Ctrl-C"
    )
    preemption: str | None = option(
        None,
        "aws, gcp or azure: the launcher asks this cloud's metadata server whether it takes the "
        "host away, and then stops as on SIGTERM (default: none)",
    )
    stop_after: int | None = option(
        None, "total number of steps after which the run saves a snapshot and exits"
    )
    profile: str | None = option(
        None,
        "steps to trace with torch.profiler into dir/profiles, such as 20:25 (the second number is "
        "not included)",
    )

    def __post_init__(self) -> None:
        self._check_minimum(1, "lanes", "threads", "keep_last", "stop_after", "check_every")
        self._check_minimum(1, "recheck_every")
        self._check_minimum(0, "seed", "keep_best", "max_restarts")
        self._check_choice("precision", "float32", "bfloat16", "float16")
        if self.exchange_dtype not in {None, "bfloat16"}:
            raise _error("exchange_dtype", "bfloat16 or none", self.exchange_dtype, ["bfloat16"])
        self._check_choice("device", "auto", "cpu", "cuda")
        self._check_choice("nonfinite_loss", "stop", "skip", "continue")
        self.skipped_steps  # noqa: B018  also reported here
        self.profiled_steps  # noqa: B018
        if self.preemption is not None:
            self._check_choice("preemption", *CLOUDS)
        if self.graphs not in {"on", "off"}:
            raise _error("graphs", "on or off", self.graphs, ["on", "off"])
        if self.graphs == "on" and not self.deterministic:
            raise ConfigError(
                'graphs="on" requires deterministic=True, because lanes are compared bit by bit'
            )
        if self.graphs != "off" and self.recheck_every is not None:
            raise ConfigError(
                f"graphs={self.graphs!r} and recheck_every={self.recheck_every} do not go together:"
                " a lane that is checked is computed from Python; leave out one of them"
            )
        if self.seed >= 2**63:
            raise _error("seed", "at most 2**63 - 1", self.seed)
        self._check_devices()
        self._check_seconds()
        hot_every = self.hot_every
        if hot_every is not None and not re.fullmatch(r"auto|0*[1-9]\d{0,17}", hot_every):
            raise _error("hot_every", 'steps such as "100", auto or none', hot_every)
        self._check_remote()
        self._check_sinks()
        # report an invalid value here, not at the first snapshot
        self.snapshot_steps, self.snapshot_seconds  # noqa: B018

    def _check_minimum(self, minimum: int, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if value is not None and value < minimum:
                raise _error(name, f"at least {minimum}", value)

    def _check_seconds(self) -> None:
        positive = f"a positive number of seconds (at most {MAX_SECONDS})"
        if not 0 < self.timeout <= MAX_SECONDS:
            raise _error("timeout", positive, self.timeout)
        if not 0 <= self.grace_period <= MAX_SECONDS:
            expected = f"a number of seconds from 0 to {MAX_SECONDS}"
            raise _error("grace_period", expected, self.grace_period)
        if self.system_every is not None and not 0 < self.system_every <= MAX_SECONDS:
            raise _error("system_every", f"{positive}, or none", self.system_every)

    def _check_choice(self, name: str, *choices: str) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise _error(name, f"one of {', '.join(choices)}", value, choices)

    def _check_remote(self) -> None:
        if self.remote is not None and not is_url(self.remote):
            raise _error("remote", "a URL such as s3://bucket/runs/one", self.remote)
        if self.transfer is not None and not _is_entry_point(self.transfer):
            raise _error("transfer", "module:function", self.transfer)
        if self.on_event is not None and not (
            re.match(r"https?://.", self.on_event) or _is_entry_point(self.on_event)
        ):
            raise _error("on_event", "module:function or an http(s) URL", self.on_event)

    def _check_sinks(self) -> None:
        for sink in self.sinks or ():
            if sink not in SINKS and not is_url(sink) and not _is_entry_point(sink):
                raise _error("sinks", f"a URL, {', '.join(SINKS)} or module:Class", sink, SINKS)

    def check_dir(self) -> None:
        """Raise `ConfigError` if an option needs `dir`, once all options are known."""
        if self.dir is not None or self.read_only:
            return
        resume = self.resume if is_url(self.resume) else None
        options = {"remote": self.remote, "transfer": self.transfer, "resume": resume}
        for name, value in options.items():
            if value is not None:
                raise ConfigError(f"{name}={value!r} requires dir, where snapshots are saved first")
        sinks = ",".join(self.sinks or ())
        for name, value in {"sinks": sinks, "on_event": self.on_event}.items():
            if value:
                message = f"{name}={value!r} requires dir, where the record is written first"
                raise ConfigError(message)
        if self.profile is not None:
            raise ConfigError(f"profile={self.profile!r} requires dir, where the trace is written")

    def _check_devices(self) -> None:
        if isinstance(self.devices, int):
            self._check_minimum(1, "devices")
            if self.devices > MAX_DEVICES:
                raise _error("devices", f"at most {MAX_DEVICES}", self.devices)
            return
        names = ",".join(self.devices)
        kinds = {name.partition(":")[0] for name in self.devices}
        are_valid = all(re.fullmatch(r"cpu|cuda:\d{1,3}", name) for name in self.devices)
        if len(kinds) != 1 or not are_valid:
            expected = "a number, or names of one kind such as cuda:0,cuda:1 or cpu,cpu"
            raise _error("devices", expected, names)
        if self.device not in {"auto", *kinds}:
            raise ConfigError(
                f"devices={names} requires device={kinds.pop()} or auto, got {self.device!r}"
            )

    def without_writing(self) -> Config:
        """Return the options of a run that writes no file and makes no step."""
        names = "dir", "remote", "transfer", "sinks", "on_event", "snapshot_every", "hot_every"
        nothing: dict[str, Any] = dict.fromkeys(names)
        return replace(self, **nothing)

    @cached_property  # each step asks for it
    def skipped_steps(self) -> tuple[range, ...]:
        """The steps of `skip_batches`."""
        return _ranges("skip_batches", self.skip_batches)

    @property
    def profiled_steps(self) -> range | None:
        """The steps of `profile`."""
        ranges = _ranges("profile", self.profile)
        if len(ranges) > 1:
            raise _error("profile", "one range of steps, such as 20:25", self.profile)
        return ranges[0] if ranges else None

    def skips(self, step: int) -> bool:
        """Return whether `skip_batches` leaves out the batch of a step."""
        return any(step in steps for steps in self.skipped_steps)

    @property
    def snapshot_steps(self) -> int | None:
        """Steps between snapshots, if `snapshot_every` is in steps."""
        return _interval(self.snapshot_every)[0]

    @property
    def snapshot_seconds(self) -> float | None:
        """Seconds between snapshots, if `snapshot_every` is in minutes."""
        return _interval(self.snapshot_every)[1]


def is_url(text: str) -> bool:
    """Return whether a text is a URL, not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://.", text) is not None


def _is_entry_point(text: str) -> bool:
    """Return whether a text names an object in a module, as in `module:name` or `module.name`."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*|\w+(\.\w+)+", text) is not None


def flag_name(option_name: str) -> str:
    """Return the command-line flag of an option, such as --snapshot-every for snapshot_every."""
    return f"--{option_name.replace('_', '-')}"


def merge(
    arguments: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
    *,
    is_complete: bool = True,
) -> Config:
    """Merge defaults, arguments and environment (default `os.environ`), which has precedence.

    A launcher's options are not complete: the script may set `dir`, which others need.
    """
    values = {name: _converted(name, value) for name, value in arguments.items()}
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(PREFIX) and not name.startswith(PREFIX + "INTERNAL_") and name != TOKEN:
            option_name = _checked_name(name.removeprefix(PREFIX).lower(), name)
            values[option_name] = parse(option_name, text, name)
    config = Config(**values)
    if is_complete:
        config.check_dir()
    return config


def parse(option_name: str, text: str, given_as: str) -> Any:
    """Read an option's value from text; errors call the option `given_as`."""
    types = _types(option_name)
    if NoneType in types and text.strip().lower() in {"", "none"}:
        return None
    kind = next(kind for kind in types if kind is not NoneType)
    try:
        if tuple in types and not text.strip().isdigit():
            return tuple(part.strip() for part in text.split(","))
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise _error(given_as, _names(types), text) from None


def _converted(name: str, value: Any) -> Any:
    types = _types(_checked_name(name, name))
    if isinstance(value, str):
        return parse(name, value, name)
    if Path in types and isinstance(value, os.PathLike):
        return Path(value)
    if tuple in types and isinstance(value, (list, tuple)):
        return tuple(map(str, value))  # also torch.device
    if not isinstance(value, bool):
        accepts_numbers_and_paths = name in {"snapshot_every", "hot_every", "resume"}
        if accepts_numbers_and_paths and isinstance(value, (int, os.PathLike)):
            return str(value)
        if float in types and isinstance(value, int):
            return value
    if not isinstance(value, types) or (isinstance(value, bool) and bool not in types):
        raise _error(name, _names(types), value)
    return value


def _checked_name(name: str, given_as: str) -> str:
    names = [option.name for option in fields(Config)]
    if name not in names:
        hint = _suggestion(name, names) or f"; the options are {', '.join(names)}"
        raise ConfigError(f"{given_as} is not an option of samestep{hint}")
    return name


@cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def _types(name: str) -> tuple[type, ...]:
    hint = _hints()[name]
    types = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(typing.get_origin(kind) or kind for kind in types)


def _names(types: tuple[type, ...]) -> str:
    return " or ".join(TYPE_NAMES[kind] for kind in types)


def _error(name: str, expected: str, value: Any, choices: Sequence[str] = ()) -> ConfigError:
    hint = _suggestion(value, choices) if choices else ""
    return ConfigError(f"{name} must be {expected}, got {value!r}{hint}")


def _suggestion(text: str, choices: Sequence[str]) -> str:
    close = difflib.get_close_matches(MEANT.get(text.lower(), text), choices, n=1)
    return f"; did you mean {close[0]}?" if close else ""


@cache
def _interval(text: str | None) -> tuple[int | None, float | None]:
    if text is None:
        return None, None
    match = re.fullmatch(r"\s*(\d{1,18})\s*(min)?\s*", text)
    if match is None or int(match[1]) == 0:
        expected = 'steps such as "500", minutes such as "10min", or none'
        raise _error("snapshot_every", expected, text)
    return (None, 60.0 * int(match[1])) if match[2] else (int(match[1]), None)


def _ranges(name: str, text: str | None) -> tuple[range, ...]:
    ranges = []
    for part in text.split(",") if text is not None else ():
        match = re.fullmatch(r"\s*(\d{1,18}):(\d{1,18})\s*", part)
        if match is None or int(match[1]) >= int(match[2]):
            expected = "steps FIRST:END with FIRST below END, such as 5000:5001"
            raise _error(name, expected, text)
        ranges.append(range(int(match[1]), int(match[2])))
    return tuple(ranges)
