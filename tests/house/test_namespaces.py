from __future__ import annotations

import signal
import socket
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import pytest

from tests.namespaces import hosts

FORK = get_context("fork")
WAIT_SECONDS = 60.0


def connect(host, address, is_reachable):
    """Connect to an address from a host until it has succeeded or failed as expected."""
    host.enter()
    while True:
        try:
            socket.create_connection(address, timeout=0.5).close()
        except OSError:
            if not is_reachable:
                return
        else:
            if is_reachable:
                return


def expect(host, address, *, is_reachable):
    caller = FORK.Process(target=connect, args=(host, address, is_reachable))
    caller.start()
    caller.join(WAIT_SECONDS)
    caller.kill()
    caller.join()
    assert caller.exitcode == 0


def listen(host, port):
    host.enter()
    with socket.create_server((host.address, 0)) as listener:
        port.put(listener.getsockname()[1])
        signal.pause()


def test_hosts_reach_each_other_until_one_is_disconnected():
    with hosts(3) as (first, second, third):
        port = FORK.SimpleQueue()
        listener = FORK.Process(target=listen, args=(first, port))
        listener.start()
        address = (first.address, port.get())
        expect(second, address, is_reachable=True)
        expect(third, address, is_reachable=True)
        second.plug(into=False)
        expect(second, address, is_reachable=False)
        expect(third, address, is_reachable=True)
        second.plug(into=True)
        expect(second, address, is_reachable=True)
        listener.kill()
        listener.join()


def test_a_command_runs_on_a_host_and_the_host_is_deleted():
    with hosts(1) as (host,):
        code = "import socket; print(sorted(name for _, name in socket.if_nameindex()))"
        completed = subprocess.run(
            host.command(sys.executable, "-c", code), check=True, capture_output=True, text=True
        )
        assert completed.stdout == "['cable', 'lo']\n"
        assert Path("/run/netns", host.name).exists()
    assert not Path("/run/netns", host.name).exists()
    with pytest.raises(FileNotFoundError):
        host.enter()
