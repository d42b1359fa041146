"""Where this process stands among the workers of a run, as whoever started it says in the environment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal

from samestep.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

NEEDED: Final = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
LOCAL: Final = {"LOCAL_RANK": "RANK", "LOCAL_WORLD_SIZE": "WORLD_SIZE"}  # where not set, all workers are on one host
VARIABLES: Final = (*NEEDED, *LOCAL)
STARTED_BY: Final = "SAMESTEP_INTERNAL_STARTED_BY"
WHAT_TO_DO: Final = f"set all of {', '.join(NEEDED)} as torchrun does, or unset all to run one worker alone"


@dataclass(frozen=True)
class Place:
    """One worker's place: `rank` of `workers`, on its host `local_rank` of `local_workers`, and where rank 0's store listens."""

    rank: int
    workers: int
    local_rank: int
    local_workers: int
    address: str
    port: int
    started_by: Literal["alone", "torchrun", "samestep"]


def find_place(environment: Mapping[str, str]) -> Place:
    """Read the place from RANK, WORLD_SIZE and so on, as torchrun sets them. None of them set: alone.

    Raises `ConfigError` when some are missing, are no numbers, or contradict each other.
    """
    given = [f"{name}={environment[name]}" for name in VARIABLES if name in environment]
    missing = [name for name in NEEDED if name not in environment]
    if not given:
        return Place(rank=0, workers=1, local_rank=0, local_workers=1, address="127.0.0.1", port=0, started_by="alone")
    if missing:
        raise ConfigError(f"{', '.join(given)} is set and {', '.join(missing)} is not; {WHAT_TO_DO}")
    environment = {**{name: environment[default] for name, default in LOCAL.items()}, **environment}
    place = Place(
        rank=_number(environment, "RANK"),
        workers=_number(environment, "WORLD_SIZE"),
        local_rank=_number(environment, "LOCAL_RANK"),
        local_workers=_number(environment, "LOCAL_WORLD_SIZE"),
        address=environment["MASTER_ADDR"],
        port=_number(environment, "MASTER_PORT"),
        started_by="samestep" if environment.get(STARTED_BY) == "samestep" else "torchrun",
    )
    possible = place.local_rank < place.local_workers <= place.workers and place.local_rank <= place.rank < place.workers
    if not possible or not place.address or not 0 < place.port < 2**16:
        raise ConfigError(f"{', '.join(given)} contradict each other; ranks count from 0 to the world size less 1; {WHAT_TO_DO}")
    return place


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not (text.isascii() and text.isdigit()):
        raise ConfigError(f"{name}={text!r} was given; expected a whole number; {WHAT_TO_DO}")
    return int(text)
