"""Simulated GPUs: the CPU build of torch with four "cuda" devices, in a process of their own.

The environment variables of that process, which tests may set:
"""

VISIBLE = "SIMULATED_GPUS"  # indices of devices, such as "0,1": in place of CUDA_VISIBLE_DEVICES
HANGS_AT = "SIMULATED_NCCL_HANGS_AT"  # the collective that never ends, as in "broadcast 1"
FAILS_AT = "SIMULATED_NCCL_FAILS_AT"  # one that raises the error FAILURE
FAILURE = "SIMULATED_NCCL_FAILURE"
