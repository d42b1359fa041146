"""`samestep doctor`: what this machine has, how fast it is, and what to change before a run."""
