from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import contextmanager

import pytest

from tests.cluster.started import ROOT, trained
from tests.jobs import events
from tests.workers import free_port

SECONDS = 240.0
# A single worker stays in its fourth step until torchrun stops it because another node joined.
JOB = """
import signal, sys, threading
from pathlib import Path
import samestep as ss
from tests.jobs import fingerprint, image_job

directory = Path(sys.argv[1])
stopped = threading.Event()

with ss.init(lanes=4, dir=directory / "run") as run:
    def wait_for_another(step):
        if run.world_size == 1 and step == 4:
            act = signal.getsignal(signal.SIGTERM)
            signal.signal(signal.SIGTERM, lambda *received: (stopped.set(), act(*received)))
            (directory / "alone").touch()
            stopped.wait()

    left = fingerprint(image_job(run, hook=wait_for_another)["model"].state_dict())
    (directory / f"left-{run.rank}").write_text(str(left))
"""
# In the first attempt, worker 1 is killed. Worker 0 waits until its torchrun stops it for the sake
# of the other node, which it does not count as a restart.
KILLED = """
import os, signal, sys, threading
from pathlib import Path
import samestep as ss
from tests.jobs import fingerprint, image_job

directory = Path(sys.argv[1])
killed = directory / "killed"
stopped = threading.Event()

with ss.init(lanes=4, dir=directory / "run") as run:
    is_first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"

    def kill_one(step):
        if step == 4 and run.rank == 1 and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        if step == 4 and is_first and not first_over.exists():
            first_over.touch()
            signal.signal(signal.SIGTERM, lambda *_: os._exit(1))
            stopped.wait()

    first_over = directory / "first-over"
    left = fingerprint(image_job(run, hook=kill_one)["model"].state_dict())
    count = os.environ["TORCHELASTIC_RESTART_COUNT"]
    (directory / f"left-{run.rank}").write_text(f"{left} {count}")
"""
# Nodes import torch at the same time, and join one after the other.
NODE = """
import sys, time
from pathlib import Path
from torch.distributed.run import main

started_after = Path(sys.argv.pop(1))
while not started_after.exists():
    time.sleep(0.01)
main()
"""


@contextmanager
def node(directory, port, started_after, nodes="1:2", own_store="1"):
    """Run torchrun for one of at most two nodes."""
    rendezvous = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=7",
        "--rdzv-conf=last_call_timeout=1",
    ]
    options = [
        f"--nnodes={nodes}",
        "--max-restarts=1",
        "--nproc-per-node=1",
        "--local-addr=127.0.0.1",
        *rendezvous,
    ]
    command = [sys.executable, "-c", NODE, started_after, *options, directory / "job.py", directory]
    # without its own store, torchrun of torch 2.13 hides the first node's address
    variables = {
        "PYTHONPATH": str(ROOT),
        "TMPDIR": str(directory),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": own_store,
    }
    with (directory / "printed").open("ab") as output:
        process = subprocess.Popen(
            command, env={**os.environ, **variables}, stdout=output, stderr=output
        )
    try:
        yield process
    finally:
        process.kill()  # no effect if it has exited
        process.wait()


@pytest.mark.long
def test_a_late_node_joins_and_changes_nothing_else(tmp_path):
    (tmp_path / "job.py").write_text(JOB)
    port, deadline = free_port(), time.monotonic() + SECONDS
    with (
        node(tmp_path, port, tmp_path / "job.py") as first,
        node(tmp_path, port, tmp_path / "alone") as second,
    ):
        ended = [process.wait(deadline - time.monotonic()) for process in (first, second)]
    assert ended == [0, 0], (tmp_path / "printed").read_text()
    assert [
        len(event["workers"])
        for event in events(tmp_path / "run")
        if "workers" in event and "attempt" in event
    ] == [1, 2]
    left = [(tmp_path / f"left-{rank}").read_text() for rank in range(2)]
    assert left == [trained()] * 2


@pytest.mark.long
def test_after_a_kill_workers_find_each_other_in_a_store_that_outlives_them(tmp_path):
    (tmp_path / "job.py").write_text(KILLED)
    port, deadline = free_port(), time.monotonic() + SECONDS
    script = tmp_path / "job.py"
    with (
        node(tmp_path, port, script, nodes="2", own_store="0") as first,
        node(tmp_path, port, script, nodes="2", own_store="0") as second,
    ):
        ended = [process.wait(deadline - time.monotonic()) for process in (first, second)]
    assert ended == [0, 0], (tmp_path / "printed").read_text()
    left = [(tmp_path / f"left-{rank}").read_text().rsplit(maxsplit=1) for rank in range(2)]
    assert [bits for bits, _ in left] == [trained()] * 2
    assert {count for _, count in left} == {"0", "1"}  # only one counts it
