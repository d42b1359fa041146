"""How workers talk: a world is a value that is passed, and one worker alone is its identity case."""

from samestep.world.alone import Alone
from samestep.world.base import World
from samestep.world.connect import connect

__all__ = ["Alone", "World", "connect"]
