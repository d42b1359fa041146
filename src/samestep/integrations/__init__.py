"""Trainers of other packages, with the steps of a run; each needs the extra of its name."""
