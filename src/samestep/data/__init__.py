"""The assignment of samples to lanes, and loading."""
