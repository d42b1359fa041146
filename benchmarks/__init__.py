"""Benchmarks of samestep and its peers, one command each; `make bench` runs the main one."""
