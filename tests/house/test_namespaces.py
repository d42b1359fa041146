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


def call(host, address, answers):
    """Put into `answers` whether somebody lets this host in at an address within half a second."""
    host.enter()
    try:
        socket.create_connection(address, timeout=0.5).close()
    except OSError as error:
        answers.put(type(error))
    else:
        answers.put("let in")


def on(host, address):
    answers = FORK.SimpleQueue()
    caller = FORK.Process(target=call, args=(host, address, answers))
    caller.start()
    caller.join()
    return answers.get()


def listen(host, port):
    host.enter()
    with socket.create_server((host.address, 0)) as listener:
        port.put(listener.getsockname()[1])
        signal.pause()


def test_hosts_reach_each_other_until_a_cable_is_pulled():
    with hosts(3) as (first, second, third):
        port = FORK.SimpleQueue()
        listener = FORK.Process(target=listen, args=(first, port))
        listener.start()
        address = (first.address, port.get())
        assert on(second, address) == on(third, address) == "let in"
        second.plug(into=False)
        assert on(second, address) != "let in"
        assert on(third, address) == "let in"
        second.plug(into=True)
        assert on(second, address) == "let in"
        listener.kill()
        listener.join()


def test_a_command_runs_on_a_host_and_nothing_of_it_is_left():
    with hosts(1) as (host,):
        code = "import socket; print(sorted(name for _, name in socket.if_nameindex()))"
        there = subprocess.run(
            host.command(sys.executable, "-c", code), check=True, capture_output=True, text=True
        )
        assert there.stdout == "['cable', 'lo']\n"
        assert Path("/run/netns", host.name).exists()
    assert not Path("/run/netns", host.name).exists()
    with pytest.raises(FileNotFoundError):
        host.enter()
