"""A small script before and after samestep, for docs/from-one-device.md."""
