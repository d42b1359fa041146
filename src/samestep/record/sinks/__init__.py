"""Sinks: destinations of a run's record."""
