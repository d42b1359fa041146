"""The options of a run: typed, frozen, with units.

Defaults, the arguments of `samestep.init`, and the environment are merged here and nowhere else.
`samestep run --lanes 8` sets `SAMESTEP_LANES=8` for its workers, so flags and environment are one
channel. Whoever starts a job has the last word: environment over arguments over defaults.
"""

from __future__ import annotations

import difflib
import os
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Any

from samestep.errors import ConfigError

PREFIX = "SAMESTEP_"
TOKEN = "SAMESTEP_TOKEN"  # noqa: S105  what the hosts of a run share: a secret, and no option
PRECISIONS = ("float32", "bfloat16")
SINKS = ("tensorboard", "mlflow", "wandb")
MOST_SECONDS = 10**9  # clocks count nanoseconds in 64 bits
MOST_DEVICES = 1000


def option(default: Any, description: str) -> Any:
    """Make a field that says what it does; `samestep run --help` prints `description`."""
    return field(default=default, metadata={"description": description})


@dataclass(frozen=True)
class Config:
    """Every option of a run. Raises `ConfigError` that names the option when a value cannot be used."""

    lanes: int | None = option(
        None, "fixed slices of every global batch; default: the number of workers"
    )
    seed: int = option(0, "everything random is a function of it; 0 to 2**63 - 1")
    dir: Path | None = option(None, "output directory of the run; without it nothing is kept")
    resume: str = option(
        "auto",
        "auto (newest whole snapshot in dir or remote), never, or the path or URL of a snapshot",
    )
    precision: str = option("float32", "float32, or bfloat16 for autocast in forward passes")
    device: str = option("auto", "auto (a GPU a worker when there are any), cpu or cuda")
    devices: int | tuple[str, ...] = option(
        1, "devices that one worker drives: how many, or their names, as in cuda:0,cuda:1"
    )
    threads: int = option(1, "intra-op threads a worker on its CPU; bits depend on it")
    snapshot_every: str | None = option(
        "10min", 'steps ("500") or minutes ("10min") between snapshots, or none'
    )
    hot_every: str | None = option(
        "auto",
        "steps between copies of the state in memory, from which killed workers' successors continue; "
        "auto: as often as costs one percent of the time; or none",
    )
    keep_last: int = option(3, "newest snapshots that are kept")
    keep_best: int = option(1, "snapshots of the highest score that are kept besides")
    remote: str | None = option(
        None, "URL (as of fsspec) to which whole snapshots are copied, such as s3://bucket/runs/one"
    )
    transfer: str | None = option(
        None, "module:function that is called with the path of every file of a whole snapshot"
    )
    sinks: tuple[str, ...] | None = option(
        None,
        "where the record goes besides dir: URLs (as of fsspec), tensorboard, mlflow, wandb or module:Class, comma-separated",
    )
    nonfinite_loss: str = option("stop", "stop or continue when a loss is NaN or infinite")
    check_every: int | None = option(
        1000, "steps between comparisons of what all workers hold alike, or none"
    )
    deterministic: bool = option(True, "ask torch for deterministic kernels")
    timeout: float = option(
        120.0, "seconds that a worker waits for another before all stop and tell where each was"
    )
    max_restarts: int = option(
        3,
        "how often in a row workers that were killed from outside are replaced without a new step in between",
    )
    grace_period: float = option(
        30.0, "seconds that workers get to snapshot after SIGTERM or Ctrl-C"
    )
    stop_after: int | None = option(
        None, "steps after which the run snapshots and exits with status 0"
    )

    def __post_init__(self) -> None:
        _at_least(self, 1, "lanes", "threads", "keep_last", "stop_after", "check_every")
        _at_least(self, 0, "seed", "keep_best", "max_restarts")
        _one_of(self, "precision", PRECISIONS)
        _one_of(self, "device", ("auto", "cpu", "cuda"))
        _one_of(self, "nonfinite_loss", ("stop", "continue"))
        if self.seed >= 2**63:
            raise ConfigError(f"seed={self.seed} was given; expected at most 2**63 - 1")
        self._check_devices()
        if not 0 < self.timeout <= MOST_SECONDS:
            raise ConfigError(
                f"timeout={self.timeout} was given; expected a number above 0 and at most {MOST_SECONDS}"
            )
        if not 0 <= self.grace_period <= MOST_SECONDS:
            raise ConfigError(
                f"grace_period={self.grace_period} was given; expected a number from 0 to {MOST_SECONDS}"
            )
        if self.hot_every not in {None, "auto"} and not re.fullmatch(
            r"0*[1-9]\d{0,17}", self.hot_every
        ):
            raise ConfigError(
                f'hot_every={self.hot_every!r} was given; expected steps such as "100", auto or none'
            )
        self._check_remote()
        self._check_sinks()
        # a wrong value is found here, not at the first snapshot
        self.snapshot_steps, self.snapshot_seconds  # noqa: B018

    def _check_remote(self) -> None:
        if self.remote is not None and not is_url(self.remote):
            raise ConfigError(
                f"remote={self.remote!r} was given; expected a URL such as s3://bucket/runs/one"
            )
        if self.transfer is not None and not _is_name(self.transfer):
            raise ConfigError(f"transfer={self.transfer!r} was given; expected module:function")
        given = {
            "remote": self.remote,
            "transfer": self.transfer,
            "resume": self.resume if is_url(self.resume) else None,
        }
        for name, value in given.items():
            if value is not None and self.dir is None:
                raise ConfigError(
                    f"{name}={value!r} was given; expected a dir with it, where snapshots are first"
                )

    def _check_sinks(self) -> None:
        for sink in self.sinks or ():
            if sink not in SINKS and not is_url(sink) and not _is_name(sink):
                near = difflib.get_close_matches(sink, SINKS, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise ConfigError(
                    f"sinks={sink!r} was given; expected a URL, {', '.join(SINKS)} or module:Class{hint}"
                )
        if self.sinks and self.dir is None:
            raise ConfigError(
                f"sinks={','.join(self.sinks)!r} was given; expected a dir with it, where the record is first"
            )

    def _check_devices(self) -> None:
        if isinstance(self.devices, int):
            _at_least(self, 1, "devices")
            if self.devices > MOST_DEVICES:
                raise ConfigError(
                    f"devices={self.devices} was given; expected at most {MOST_DEVICES}"
                )
            return
        kinds = {name.partition(":")[0] for name in self.devices}
        if len(kinds) != 1 or not all(
            re.fullmatch(r"cpu|cuda:\d{1,3}", name) for name in self.devices
        ):
            raise ConfigError(
                f"devices={','.join(self.devices)} was given; expected a number, or names of one kind such as cuda:0,cuda:1 or cpu,cpu"
            )
        if self.device not in {"auto", *kinds}:
            raise ConfigError(
                f"devices={','.join(self.devices)} was given with device={self.device!r}; give one of the two"
            )

    @property
    def snapshot_steps(self) -> int | None:
        """Steps between snapshots, when `snapshot_every` is in steps."""
        return _interval(self.snapshot_every)[0]

    @property
    def snapshot_seconds(self) -> float | None:
        """Seconds between snapshots, when `snapshot_every` is in minutes."""
        return _interval(self.snapshot_every)[1]


def is_url(text: str) -> bool:
    """Tell whether a text is a URL, and no path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://.", text) is not None


def _is_name(text: str) -> bool:
    """Tell whether a text names something in a module."""
    return re.fullmatch(r"\w+(\.\w+)*:\w+(\.\w+)*", text) is not None


def merge(arguments: Mapping[str, Any], environment: Mapping[str, str] | None = None) -> Config:
    """Merge arguments and environment (default `os.environ`) over the defaults; the environment wins."""
    values = {name: _checked(name, value) for name, value in arguments.items()}
    for name, text in (os.environ if environment is None else environment).items():
        if name.startswith(PREFIX) and not name.startswith(PREFIX + "INTERNAL_") and name != TOKEN:
            option_name = _known(name.removeprefix(PREFIX).lower(), name)
            values[option_name] = parse(option_name, text, name)
    return Config(**values)


def parse(option_name: str, text: str, given_as: str) -> Any:
    """Read an option's value from text. `given_as` is how the user named it, for the error."""
    kinds = _kinds(option_name)
    if NoneType in kinds and text.strip().lower() in {"", "none"}:
        return None
    kind = next(k for k in kinds if k is not NoneType)
    try:
        if tuple in kinds and not text.strip().isdigit():
            return tuple(part.strip() for part in text.split(","))
        if kind is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.strip().lower()]
        return kind(text)
    except (ValueError, KeyError):
        raise ConfigError(f"{given_as}={text!r} was given; expected {_type_words(kinds)}") from None


def _checked(name: str, value: Any) -> Any:
    kinds = _kinds(_known(name, name))
    if Path in kinds and isinstance(value, (str, os.PathLike)):
        return Path(value)
    if tuple in kinds and int not in kinds and isinstance(value, str):
        return parse(name, value, name)
    if tuple in kinds and isinstance(value, (list, tuple)):
        return tuple(map(str, value))  # torch.device, too
    if (
        name in {"snapshot_every", "hot_every", "resume"}
        and isinstance(value, (int, os.PathLike))
        and not isinstance(value, bool)
    ):
        return str(value)
    if float in kinds and isinstance(value, int) and not isinstance(value, bool):
        return value
    if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
        raise ConfigError(f"{name}={value!r} was given; expected {_type_words(kinds)}")
    return value


def _known(name: str, given_as: str) -> str:
    names = [f.name for f in fields(Config)]
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"options are {', '.join(names)}"
        raise ConfigError(f"{given_as} is no option of samestep; {hint}")
    return name


@cache
def _hints() -> dict[str, Any]:
    return typing.get_type_hints(Config)


def _kinds(name: str) -> tuple[type, ...]:
    hint = _hints()[name]
    kinds = typing.get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return tuple(typing.get_origin(kind) or kind for kind in kinds)


def _type_words(kinds: tuple[type, ...]) -> str:
    words = {
        int: "a whole number",
        float: "a number",
        str: "text",
        bool: "true or false",
        Path: "a path",
        NoneType: "none",
        tuple: "names",
    }
    return " or ".join(words[kind] for kind in kinds)


def _at_least(config: Config, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name}={value} was given; expected at least {least}")


def _one_of(config: Config, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in choices:
        near = difflib.get_close_matches(value, choices, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise ConfigError(f"{name}={value!r} was given; expected one of {', '.join(choices)}{hint}")


def _interval(text: str | None) -> tuple[int | None, float | None]:
    if text is None:
        return None, None
    match = re.fullmatch(r"\s*(\d{1,18})\s*(min)?\s*", text)
    if match is None or int(match[1]) == 0:
        raise ConfigError(
            f'snapshot_every={text!r} was given; expected steps such as "500", minutes such as "10min", or none'
        )
    return (None, 60.0 * int(match[1])) if match[2] else (int(match[1]), None)
