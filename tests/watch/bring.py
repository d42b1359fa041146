"""What a user's function for saved files may do: here without torch, since the process that forwards the record imports it, too."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path


def to_far(path: Path) -> None:
    """Copy a file of DIR/FOLDER/NAME to the folder "far" beside DIR, under DIR's name."""
    run = path.parents[1]
    to = run.parent / "far" / run.name / path.relative_to(run)
    to.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(path, to)
