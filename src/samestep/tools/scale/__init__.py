"""`samestep scale`: measure a script with several worker counts and predict larger runs."""
