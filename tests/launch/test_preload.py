from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from samestep.host import no_garbage_collection

LOADED_BEFORE_THE_FORK = """
import gc
import sys
import samestep

assert "torch" not in sys.modules
names = ("torch", "torch._dynamo", "samestep.run")
is_loaded = samestep.launch(lambda: [name in sys.modules for name in names], workers=1)
assert is_loaded == [True, True, True], is_loaded
assert gc.get_freeze_count() == 0  # what is garbage by now can be collected
"""
# The functions by which imports could query GPUs in a torch with CUDA.
ASKS_NO_GPU_AND_STARTS_NO_THREAD = """
import os
import sys
import torch

asked = []
for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getCurrentRawStream"):
    setattr(torch._C, name, lambda *_, name=name: asked.append(name) or 0)
threads = os.listdir("/proc/self/task")
from samestep.launch.local import preload

preload()
assert "torch._dynamo" in sys.modules
assert os.listdir("/proc/self/task") == threads
assert not asked, asked
torch.cuda.is_available()
assert asked  # a query would be noticed
"""


@pytest.mark.parametrize("program", [LOADED_BEFORE_THE_FORK, ASKS_NO_GPU_AND_STARTS_NO_THREAD])
def test_preloading_leaves_a_process_that_can_fork(program):
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("enabled", [True, False])
def test_garbage_collection_is_restored_after_a_block_without_it(enabled):
    before = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with no_garbage_collection():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if before else gc.disable)()
