"""The tests mirror `src/samestep`; `house/` tests the project itself."""
