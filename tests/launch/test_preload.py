from __future__ import annotations

import gc
import subprocess
import sys

import pytest

from samestep.host import no_garbage_collection

# With functions by which imports could query GPUs in a torch with CUDA.
PROGRAM = """
import gc
import os
import sys
import samestep

assert "torch" not in sys.modules
import torch

asked = []
for name in ("_cuda_getDeviceCount", "_cuda_init", "_cuda_getCurrentRawStream"):
    setattr(torch._C, name, lambda *_, name=name: asked.append(name) or 0)
threads = os.listdir("/proc/self/task")
names = ("torch._dynamo", "samestep.run")
assert not any(name in sys.modules for name in names)
is_loaded = samestep.launch(
    lambda: [name in sys.modules for name in names], workers=1, device="cpu"
)
assert is_loaded == [True, True], is_loaded
assert gc.get_freeze_count() == 0  # what is garbage by now can be collected
assert os.listdir("/proc/self/task") == threads
assert not asked, asked
torch.cuda.is_available()
assert asked  # a query would be noticed
"""


def test_preloading_leaves_a_process_that_can_fork():
    subprocess.run([sys.executable, "-c", PROGRAM], check=True)


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
