"""Train on a mixture whose weights change, in batches that grow."""

from __future__ import annotations

import samestep as ss
from tests.run.test_mixtures import growing, mixture_job

if __name__ == "__main__":
    with ss.init(lanes=4) as run:
        mixture_job(run, batch_size=growing)
