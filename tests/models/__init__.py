"""Models of other packages under `samestep verify`; `python -m tests.models`, not part of CI."""
