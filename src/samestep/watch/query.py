"""What a client asks for, checked: nothing of it is ever used as a path."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from starlette.datastructures import QueryParams

LONGEST: Final = 4096  # characters of a name


class WrongQueryError(Exception):
    """A parameter is missing, unknown or of no use; the text says which, and what is expected."""


class Query:
    """The parameters of a request, of which `names` are known. Raises `WrongQueryError` for others, and for what cannot be used."""

    def __init__(self, given: QueryParams, *names: str) -> None:
        for name, value in given.multi_items():
            if name not in names:
                raise WrongQueryError(
                    f"parameter {_short(name)} was given; expected {' or '.join(names) or 'none'}"
                )
            if len(value) > LONGEST:
                raise WrongQueryError(
                    f"{name} has {len(value)} characters; expected at most {LONGEST}"
                )
            if len(given.getlist(name)) > 1:
                raise WrongQueryError(f"{name} was given more than once")
        self._given = given

    def text(self, name: str) -> str:
        """Return a parameter that must be there."""
        try:
            return self._given[name]
        except KeyError:
            raise WrongQueryError(f"{name} is missing") from None

    def number(
        self, name: str, default: float | None, low: float = -math.inf, high: float = math.inf
    ) -> float | None:
        """Return a finite number from `low` to `high`, or the default."""
        if name not in self._given:
            return default
        try:
            value = float(self._given[name])
        except ValueError:
            value = math.nan
        if math.isfinite(value) and low <= value <= high:
            return value
        bounds = f" from {low:g} to {high:g}" if math.isfinite(high) else ""
        raise WrongQueryError(
            f"{name}={_short(self._given[name])} was given; expected a number{bounds}"
        )

    def count(self, name: str, default: int | None, high: int) -> int:
        """Return a whole number from 0 to `high`; it must be there unless there is a default."""
        given = self.text(name) if default is None else self._given.get(name, str(default))
        if (
            len(given) <= len(str(high))
            and given.isascii()
            and given.isdigit()
            and int(given) <= high
        ):
            return int(given)
        raise WrongQueryError(
            f"{name}={_short(given)} was given; expected a whole number from 0 to {high}"
        )

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of some words; the first of them is the default."""
        value = self._given.get(name, choices[0])
        if value in choices:
            return value
        raise WrongQueryError(f"{name}={_short(value)} was given; expected {' or '.join(choices)}")


def _short(text: str) -> str:
    # enough to know it by
    return ascii(text if len(text) <= 40 else f"{text[:40]}...")
