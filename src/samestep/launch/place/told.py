"""What a launcher tells a worker of its place, by variables of its own."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from samestep.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

LOOPBACK: Final = "127.0.0.1"
# for derived ones: below those that Linux gives to outgoing connections, and torchrun's 29500
PORTS: Final = range(20_000, 29_000)
_WHOLE_NUMBER = re.compile(r"[0-9]{1,18}")


class Number(NamedTuple):
    """A number, and where it is from as a message says it: SLURM_PROCID=1."""

    value: int
    source: str


@dataclass(frozen=True)
class Told:
    """`rank` of `workers`, on its host `local_rank` of `local_workers`, and where rank 0 listens: None where the launcher does not say.

    `what_to_do` ends the message of an error, should the numbers contradict each other.
    """

    rank: Number
    workers: Number
    local_rank: Number
    local_workers: Number
    what_to_do: str
    address: str | None = None
    port: int | None = None


@dataclass(frozen=True)
class Variables:
    """The environment, read with errors that say what a variable says and, in the words of `what_to_do`, how to mend it."""

    environment: Mapping[str, str]
    what_to_do: str

    def require(self, *names: str, beside: Sequence[str] = ()) -> None:
        """Raise `ConfigError` where some are not set, which tells of those that are, and of those `beside` them."""
        missing = [name for name in names if name not in self.environment]
        if missing:
            there = [
                f"{name}={self.environment[name]}"
                for name in (*names, *beside)
                if name in self.environment
            ]
            raise ConfigError(
                f"{', '.join(there)} is set and {', '.join(missing)} is not; {self.what_to_do}"
            )

    def number(self, name: str) -> Number:
        """Return what one says. Raises `ConfigError` where that is no whole number."""
        text = self.environment[name]
        if not _WHOLE_NUMBER.fullmatch(text):
            raise self.error(name, "a whole number")
        return Number(int(text), f"{name}={text}")

    def numbers(self, *names: str) -> list[Number]:
        """Return what several say. Raises `ConfigError` where one is not set or no whole number."""
        self.require(*names)
        return [self.number(name) for name in names]

    def host(self, name: str) -> str:
        """Return a host's name or address. Raises `ConfigError` where it cannot be one."""
        if not is_host(self.environment[name]):
            raise self.error(name, "a host name or an address")
        return self.environment[name]

    def port(self, name: str) -> int:
        """Return a port. Raises `ConfigError` where it cannot be one."""
        port = self.number(name).value
        if not 0 < port < 2**16:
            raise self.error(name, "a port from 1 to 65535")
        return port

    def error(self, name: str, expected: str) -> ConfigError:
        """Return the error of a variable that does not say what is expected."""
        return ConfigError(
            f"{name}={self.environment[name]!r} was given; expected {expected}; {self.what_to_do}"
        )


def is_host(text: str) -> bool:
    """Tell whether a text can be looked up as a host."""
    try:
        return text.encode("idna") != b"" and text.isprintable() and " " not in text
    except UnicodeError:  # a label that is empty or too long
        return False
