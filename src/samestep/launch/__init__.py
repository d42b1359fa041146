"""Who starts workers: this process, by forking, or whoever started this process."""

from samestep.launch.local import launch
from samestep.launch.place import Place, find_place

__all__ = ["Place", "find_place", "launch"]
