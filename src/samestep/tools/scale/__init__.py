"""`samestep scale`: measure a job at several numbers of workers, and say what limits it and what to expect of more."""
