"""What a run drew into its record."""

from __future__ import annotations

import hashlib


def pictures(directory):
    """Return a hash of each picture in a run's directory, by its file's name."""
    return {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for file in (directory / "images").iterdir()
    }
