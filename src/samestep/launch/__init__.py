"""Starting and supervising workers."""

from samestep.launch.local import launch

__all__ = ["launch"]
