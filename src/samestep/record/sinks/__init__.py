"""Sinks: everything that receives a run's record outside of its directory, or parts of it."""

from __future__ import annotations

import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final, NamedTuple, Protocol, cast
from urllib.request import HTTPRedirectHandler, Request, build_opener

from samestep.config import Config, is_url
from samestep.errors import FAILED_FIRST, ConfigError, RecordError
from samestep.masking import mask_urls
from samestep.record.cursor import Cursor, Destination
from samestep.record.events import FILE_NAME, parse_events, read_lines, to_json
from samestep.record.files import FOLDER
from samestep.record.source import STARTS, Source
from samestep.storage import Storage, make_folder, open_regular

# class and required package by name; samestep's extras have the sinks' names
NAMED: Final = {
    "tensorboard": ("samestep.record.sinks.trackers:TensorBoardSink", "tensorboard"),
    "mlflow": ("samestep.record.sinks.trackers:MlflowSink", "mlflow"),
    "wandb": ("samestep.record.sinks.trackers:WandbSink", "wandb"),
}
PAUSE_SECONDS: Final = 0.5
# errors that a retry would not change
EVENT_ERRORS: Final = (ValueError, TypeError, LookupError, AttributeError)
HOOK: Final = "on_event"
# of the exporter, by option
FLAGS: Final = {"sinks": "--to", "transfer": "--transfer", HOOK: "--on-event"}
# in addition to failures and NaN
ALERTS: Final = ("restarting", "stalled", "stopped", "finished", "loss_alert")
HOOK_SECONDS: Final = 5.0  # to connect, and for the response
CAUSE_SECONDS: Final = 3.0  # for a failed worker to record its error, after another has named it


class SinkSpec(NamedTuple):
    """A sink as a user names it: by the value of the option `sinks`, `transfer` or `on_event`."""

    option: str
    value: str

    @property
    def name(self) -> str:
        """The name in the record, without secrets; the URL of a hook is often one."""
        return HOOK if self.option == HOOK else mask_urls(self.value)

    @property
    def flag(self) -> str:
        """The arguments with which the exporter's command sends to this sink."""
        return f"{FLAGS[self.option]} {'VALUE' if self.option == HOOK else self.name}"


def sinks_of(config: Config) -> list[SinkSpec]:
    """Return all sinks of a run. A `remote`, which receives the snapshots, is one as well."""
    locations = dict.fromkeys((config.remote, *(config.sinks or ())))
    pairs = [*(("sinks", location) for location in locations)]
    pairs += [("transfer", config.transfer), (HOOK, config.on_event)]
    return [SinkSpec(option, value) for option, value in pairs if value is not None]


class Sink(Protocol):
    """Receives every event of a record, in order.

    A user's class, named as module:Class, is called with the run's directory. Exceptions are
    reported, and the call is repeated after a pause. A `ValueError`, `TypeError`, `LookupError` or
    `AttributeError` rejects the event itself, which is then skipped and counted. After a kill,
    the events since the last `flush` are sent again.
    """

    def take(self, event: Mapping[str, Any]) -> None:
        """Receive an event. An image event is also received here, before `image`."""

    def image(self, event: Mapping[str, Any], data: bytes) -> None:
        """Receive an image: its event, and the content of its file."""

    def flush(self) -> None:
        """Return once everything received is safe."""

    def close(self) -> None:
        """Release resources; no call follows."""


def open_sink(name: str, directory: Path) -> Sink:
    """Return a sink for the run in `directory`, by name or as module:Class.

    Raises `ConfigError` if its class or package is missing.
    """
    return _find_class(NAMED[name][0] if name in NAMED else name)(directory)


def check_sinks(sinks: Iterable[SinkSpec]) -> None:
    """Raise `ConfigError` for sinks that can never work."""
    for option, value in sinks:
        if option == HOOK:
            find_hook(value)
        elif option == "transfer":
            find_function(value)
        elif is_url(value):
            Storage(value).open()
        elif value not in NAMED:
            _find_class(value)
        elif find_spec(NAMED[value][1]) is None:
            raise package_error(value)


def package_error(name: str) -> ConfigError:
    """Return the error for a sink whose package is missing."""
    return ConfigError(
        f'sinks={name!r} requires the package {NAMED[name][1]}: pip install "samestep[{name}]"'
    )


def _find_class(name: str) -> Callable[[Path], Sink]:
    return _import("sinks", "module:Class", "a class that takes the run's directory", name)


def find_hook(name: str) -> Callable[[dict[str, Any]], object]:
    """Return the function of the option `on_event`, or one that sends events to its URL.

    Raises `ConfigError` if a function is missing.
    """
    if is_url(name):
        return partial(_post, name)
    return _import(HOOK, "module:function", "a function that takes an event", name)


def _post(url: str, event: Mapping[str, Any]) -> None:
    """Send an event as JSON. Raises `OSError`, including for a status other than 2xx."""
    headers = {"Content-Type": "application/json", "User-Agent": "samestep"}
    request = Request(url, to_json(event).encode(), headers)  # noqa: S310  the option has http(s)
    with build_opener(NoRedirects).open(request, timeout=HOOK_SECONDS):
        pass


class NoRedirects(HTTPRedirectHandler):
    """Sends nothing to other addresses, which could be those of internal servers."""

    def redirect_request(self, *arguments: Any, **_: Any) -> None:
        raise ConnectionError(f"the server redirects to {arguments[-1]}; use that URL")


def find_function(name: str) -> Callable[[str], object]:
    """Return the function of the option `transfer`, which takes a file's path as text.

    Raises `ConfigError` if it is missing.
    """
    return _import("transfer", "module:function", "a function that takes a file's path", name)


def _import(option: str, form: str, description: str, name: str) -> Callable[..., Any]:
    module, _, path = name.partition(":") if ":" in name else name.rpartition(".")
    if (folder := str(Path.cwd())) not in sys.path:  # only python -m searches it
        sys.path.append(folder)
    try:
        imported: Any = reduce(getattr, path.split("."), import_module(module))
    except (Exception, SystemExit) as error:  # a script without `if __name__ == "__main__"`
        expected = f"{option} must name an importable {form}"
        raise ConfigError(f"{expected}, got {name!r}: {type(error).__name__}: {error}") from error
    if not callable(imported):
        kind = type(imported).__name__
        raise ConfigError(f"{option} must name {description}, got {name!r}, which is a {kind}")
    return cast("Callable[..., Any]", imported)


class SinkAdapter(Destination):
    """Passes each event to a sink once; after a failure it continues with the failed event."""

    pause_seconds = PAUSE_SECONDS
    _sink: Sink
    _completed = 0  # successful calls for the current lines

    def open(self) -> int:
        """Open the sink, and return the offset after the last flushed event."""
        self._sink = open_sink(self.name, self._directory)
        return self._cursor.offset(self.name)

    def send(self, offset: int, lines: bytes) -> None:
        """Pass each event of the lines, and each image that they name, and flush the sink."""
        for call in islice(self._calls(lines), self._completed, None):
            try:
                call()
            except EVENT_ERRORS as error:
                self._drop(error)
            self._completed += 1
        self._flush()
        self._completed = 0
        self._cursor.save(self.name, offset + len(lines))

    def _flush(self) -> None:
        self._sink.flush()

    def _calls(self, lines: bytes) -> Iterator[Callable[[], None]]:
        for event in parse_events(lines):
            yield partial(self._sink.take, event)
            if event.get("event") == "image":
                yield partial(self._send_image, event)

    def _send_image(self, event: Mapping[str, Any]) -> None:
        try:
            data = self._source.read_image(str(event.get("path")))
        except RecordError as error:  # the file was removed
            self._drop(error)
        else:
            self._sink.image(event, data)

    def _drop(self, error: Exception) -> None:
        if not self.dropped:
            message = "sink %s cannot store an event (%s: %s); such events are skipped and counted"
            kind = type(error).__name__
            logging.getLogger("samestep").warning(message, self.name, kind, error)
        self.dropped += 1

    def close(self) -> None:
        self._sink.close()


class HookAdapter(SinkAdapter):
    """Calls the hook of the option `on_event` for each event that a person wants to know.

    These are `ALERTS`, the first failure of a start and the first one that no other worker caused,
    and `nonfinite`, for scalars that are NaN or infinite for the first time since the start.
    """

    _failure = 0  # 1 after a failure that another worker caused, 2 after its own
    _nonfinite: frozenset[str] = frozenset()

    def __init__(self, hook: str, directory: Path, source: Source, cursor: Cursor) -> None:
        super().__init__(HOOK, directory, source, cursor)
        self._hook_name = hook

    def open(self) -> int:
        """Find the hook, and return the offset after the last event that it received."""
        self._hook = find_hook(self._hook_name)
        return self._cursor.offset(self.name)

    def _flush(self) -> None:
        """Do nothing: a call of the hook is its delivery."""

    close = _flush

    def _calls(self, lines: bytes) -> Iterator[Callable[[], None]]:
        return (partial(self._take, event) for event in parse_events(lines))

    def _take(self, event: dict[str, Any]) -> None:
        kind = event.get("event")
        if kind in STARTS:
            self._failure, self._nonfinite, self.waits_until = 0, frozenset(), 0.0
        elif kind in ALERTS:
            self._call(event)
        elif kind == "failed":
            failure = 1 if event.get("is_secondary") else 2
            if failure > self._failure:
                self._call(event)
                self._failure = failure
                self.waits_until = 0.0
                if failure == 1 and FAILED_FIRST in str(event.get("error")):
                    # the other worker is about to record its own event
                    self.waits_until = event["time"] + CAUSE_SECONDS
        elif kind == "scalars":
            values = event["values"].items()
            names = {name for name, value in values if not math.isfinite(value)} - self._nonfinite
            if names:
                position = {name: event[name] for name in ("time", "step", "epoch")}
                self._call({**position, "event": "nonfinite", "names": sorted(names)})
                self._nonfinite |= names

    def _call(self, event: dict[str, Any]) -> None:
        self._hook({"run": str(self._directory.resolve()), **event})


def begin_hook(directory: Path) -> None:
    """If a run has a hook for the first time, let it begin with the run's last start.

    A worker that fails at once may record that before worker 0 has recorded the start.
    """
    cursor = Cursor(directory)
    if cursor.get(HOOK) is not None:
        return
    make_folder(directory / FOLDER)
    offset = last = 0
    failures: list[tuple[float, int]] = []  # since the last start: times and offsets
    with os.fdopen(open_regular(directory / FILE_NAME), "rb") as lines:
        for line in read_lines(lines):
            for event in parse_events([line]):
                kind, time = event.get("event"), event.get("time")
                since = time if isinstance(time, float) else math.inf  # of a damaged event
                if kind in STARTS:
                    later = (at for then, at in failures if since <= then < math.inf)
                    last, failures = min(later, default=offset), []
                elif kind == "failed":
                    failures.append((since, offset))
            offset += len(line)
    cursor.save(HOOK, last)
