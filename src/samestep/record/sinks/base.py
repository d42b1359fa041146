"""What a sink is: it takes a run's events, beside training, to where people look at them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial, reduce
from importlib import import_module
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Any, Final, Protocol, cast

from samestep.config import is_url
from samestep.errors import ConfigError, RecordError
from samestep.record.cursor import Cursor
from samestep.record.events import parse_events
from samestep.record.source import Source
from samestep.storage import Storage


class Sink(Protocol):
    """Takes every event of a record, in order. A class of one's own, named as module:Class, is called with the run's directory.

    What a call raises is told, and the call made again after a while; a `ValueError`, `TypeError`,
    `LookupError` or `AttributeError` is one of the event itself, which is then left out and
    counted. After a kill, the events since the last `flush` come again.
    """

    def take(self, event: Mapping[str, Any]) -> None:
        """Take an event. One of kind image comes here, too, before its file."""

    def image(self, event: Mapping[str, Any], data: bytes) -> None:
        """Take an image: its event, and the bytes of its file."""

    def flush(self) -> None:
        """Return when all that was taken is safe."""

    def close(self) -> None:
        """End; no call follows."""


# The class of each, and the package that it is for; extras of samestep have the sinks' names.
NAMED: Final = {
    "tensorboard": ("samestep.record.sinks.tensorboard:TensorBoardSink", "tensorboard"),
    "mlflow": ("samestep.record.sinks.mlflow:MlflowSink", "mlflow"),
    "wandb": ("samestep.record.sinks.wandb:WandbSink", "wandb"),
}


def open_sink(name: str, directory: Path) -> Sink:
    """Return the sink of a name, or of a class given as module:Class, for the run in `directory`. Raises `ConfigError`."""
    sink: Sink = _find_class(NAMED[name][0] if name in NAMED else name)(directory)
    return sink


def check_sinks(names: Iterable[str]) -> None:
    """Raise `ConfigError` for sinks that could never work."""
    for name in names:
        if is_url(name):
            Storage(name).open()
        elif name not in NAMED:
            _find_class(name)
        elif find_spec(NAMED[name][1]) is None:
            raise ConfigError(
                f'sinks={name!r} was given; expected {NAMED[name][1]} to be there: pip install "samestep[{name}]"'
            )


def _find_class(name: str) -> Callable[..., Any]:
    return find_callable(
        name, "sinks", "module:Class", "a class that is called with a run's directory"
    )


def find_callable(name: str, option: str, form: str, what: str) -> Callable[..., Any]:
    """Import what an option names in a `form` such as module:Class, and expects to be `what`. Raises `ConfigError`."""
    module, _, path = name.partition(":")
    try:
        found: Any = reduce(getattr, path.split("."), import_module(module))
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{option}={name!r} was given; expected the {form} to be there for import: {reason}"
        ) from error
    if not callable(found):
        raise ConfigError(
            f"{option}={name!r} was given; expected {what}, and it is {type(found).__name__}"
        )
    return cast("Callable[..., Any]", found)


PAUSE_SECONDS: Final = 0.5
# what another try would not change
OF_THE_EVENT: Final = (ValueError, TypeError, LookupError, AttributeError)


class SinkAdapter:
    """Gives each event to a sink once; after a failure it goes on with the event that failed."""

    def __init__(self, name: str, directory: Path, source: Source, forwarded: Cursor) -> None:
        self.name, self.pause_seconds, self.dropped = name, PAUSE_SECONDS, 0
        self._directory, self._source, self._forwarded = directory, source, forwarded
        self._sink: Sink
        self._called = 0  # of the calls that the lines which are sent next ask for

    def begin(self) -> int:
        """Open the sink, and go on after what was safe there."""
        self._sink = open_sink(self.name, self._directory)
        return self._forwarded.offset(self.name)

    def send(self, offset: int, lines: bytes) -> None:
        """Give it each event of the lines, and each image that they name."""
        for call in islice(self._calls(lines), self._called, None):
            try:
                call()
            except OF_THE_EVENT as error:
                self._leave_out(error)
            self._called += 1
        self._sink.flush()
        self._called = 0
        self._forwarded.keep(self.name, offset + len(lines))

    def _calls(self, lines: bytes) -> Iterator[Callable[[], None]]:
        for event in parse_events(lines):
            yield partial(self._sink.take, event)
            if event.get("event") == "image":
                yield partial(self._give_image, event)

    def _give_image(self, event: Mapping[str, Any]) -> None:
        try:
            data = self._source.read_image(str(event.get("path")))
        except RecordError as error:  # somebody removed it
            self._leave_out(error)
        else:
            self._sink.image(event, data)

    def _leave_out(self, error: Exception) -> None:
        if not self.dropped:
            text = "the sink %s cannot take an event: %s: %s; such ones are left out and counted"
            logging.getLogger("samestep").warning(text, self.name, type(error).__name__, error)
        self.dropped += 1

    def close(self) -> None:
        """Close the sink."""
        self._sink.close()
