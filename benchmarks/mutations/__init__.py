"""Faults planted in correct scripts, to see whether `samestep verify` finds them."""
