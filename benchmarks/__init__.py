"""samestep beside its peers, one command each; `make bench` runs `python -m benchmarks.table`."""
