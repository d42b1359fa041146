"""A job for workers of other launchers: each prints its `ProcessInfo` as a line of JSON.

With the argument `train` also the hash of a trained model.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import asdict
from pathlib import Path

from samestep.cluster import find_process

ROOT = Path(__file__).parents[2]
PRINT = (sys.executable, "-m", "tests.cluster.started")
TRAIN = (*PRINT, "train")


def trained():
    """Train, alone or as one of several workers; return a hash of the model."""
    import samestep as ss
    from tests.jobs import fingerprint, image_job

    with ss.init(lanes=4) as run:
        return str(fingerprint(image_job(run)["model"].state_dict()))


def printed(output):
    """Return what workers printed, by rank."""
    return sorted(map(json.loads, output.splitlines()), key=lambda line: line["rank"])


if __name__ == "__main__":
    process = asdict(find_process(os.environ))
    sys.stdout.write(
        json.dumps({**process, "trained": trained()} if sys.argv[1:] else process) + "\n"
    )
