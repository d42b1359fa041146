from __future__ import annotations

import gc
import os
import signal
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
# torch's code in C++ imports NumPy, and goes on without it after any exception.
SIGNALED_IN_AN_IMPORT = """
import os
import sys
from samestep.cli import main_and_exit

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "numpy.lib":
            sys.stderr.write("signaled\\n")
            os.kill(os.getpid(), int(os.environ["NUMBER"]))
        elif name == "torch.optim":
            sys.stderr.write("imported on\\n")
            sys.meta_path.remove(self)

sys.meta_path.insert(0, Finder())
main_and_exit()
"""


@pytest.mark.long
@pytest.mark.parametrize("program", [LOADED_BEFORE_THE_FORK, ASKS_NO_GPU_AND_STARTS_NO_THREAD])
def test_preloading_leaves_a_process_that_can_fork(program):
    subprocess.run([sys.executable, "-c", program], check=True)


def run_signaled(number, *words):
    """Run a command of samestep that gets a signal while it imports torch."""
    return subprocess.run(
        [sys.executable, "-c", SIGNALED_IN_AN_IMPORT, *words],
        env={**os.environ, "NUMBER": str(int(number))},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(
    ("number", "status", "printed"),
    [
        pytest.param(
            signal.SIGINT,
            130,
            ["imported on", "samestep: run was interrupted"],
            marks=pytest.mark.long,
        ),
        (signal.SIGTERM, -signal.SIGTERM, []),
    ],
)
def test_a_signal_while_torch_is_imported_ends_the_run(number, status, printed, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('training')")
    ended = run_signaled(number, "run", "-n", "2", script)
    assert (ended.returncode, ended.stdout) == (status, "")
    assert ended.stderr.splitlines() == ["signaled", *printed]


@pytest.mark.long
@pytest.mark.parametrize(
    "words",
    [
        ["snapshots", "list", "."],
        ["replay", ".", "--step", "1", "train.py"],
        ["verify", "train.py"],
        ["run", "-n", "auto", "train.py"],
    ],
)
def test_ctrl_c_while_a_command_imports_torch_ends_it(words, tmp_path):
    script = tmp_path / "train.py"
    script.write_text("print('training')")
    words = [str(script) if word == "train.py" else word for word in words]
    ended = run_signaled(signal.SIGINT, *words)
    assert ended.returncode == 130, ended.stderr
    *before, line = ended.stderr.splitlines()
    assert before == ["signaled", "imported on"]
    assert line.startswith(f"samestep: {words[0]} was interrupted")


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
