"""The file with the scores of an evaluation."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import samestep as ss

SCORES_FILE = "scores.json"


def write_scores(
    run: ss.Run, directory: Path | None, scores: Mapping[str, float], **more: Any
) -> None:
    """Write the scores of the current step, and `more`, into a directory, on rank 0."""
    if run.is_main and directory is not None:
        directory.mkdir(parents=True, exist_ok=True)
        content = {"step": run.step, **more, "scores": scores}
        (directory / SCORES_FILE).write_text(json.dumps(content, indent=2) + "\n")
