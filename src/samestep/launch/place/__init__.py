"""Where this process stands among the workers of a run, as whoever started it says in the environment."""

from samestep.launch.place.find import STARTED_BY, Place, find_place

__all__ = ["STARTED_BY", "Place", "find_place"]
