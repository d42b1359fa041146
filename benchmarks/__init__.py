"""samestep beside its peers, one command each: `python -m benchmarks.versus_ddp`."""
