"""What a sink is: it takes a run's events, beside training, to where people look at them."""

from __future__ import annotations

from functools import reduce
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Protocol, cast

from samestep.config import is_url
from samestep.errors import ConfigError
from samestep.storage import Storage

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping
    from pathlib import Path


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
