"""Simulated GPUs: torch with four "cuda" devices, in a process of their own.

The environment variables of that process. Tests may set the last four.
"""

LIBRARY_FILE = "SIMULATED_GPU_LIBRARY"
CUDA_BUILD = "SIMULATED_CUDA_BUILD"  # a library that registers what a CUDA build of torch does

VISIBLE = "SIMULATED_GPUS"  # indices of devices, such as "0,1": in place of CUDA_VISIBLE_DEVICES
HANGS_AT = "SIMULATED_NCCL_HANGS_AT"  # the collective that never ends, as in "broadcast 1"
FAILS_AT = "SIMULATED_NCCL_FAILS_AT"  # one that raises the error FAILURE
FAILURE = "SIMULATED_NCCL_FAILURE"
