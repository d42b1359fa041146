"""User functions for the option `transfer`; without torch, since the exporter imports them."""

from __future__ import annotations

from pathlib import Path


def note(path: str) -> None:
    """Append the path to a file in the run's directory."""
    with (Path(path).parents[1] / "noted").open("a") as file:
        file.write(f"{path}\n")


def refuse(path: str) -> None:
    """Raise `ConnectionError`."""
    raise ConnectionError("no route")
