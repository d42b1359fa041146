from __future__ import annotations

import subprocess
import sys

import pytest

from samestep.launch.interface import interface_towards
from tests.namespaces import hosts

ASK = "import sys; from samestep.launch.interface import interface_towards; print(*map(interface_towards, sys.argv[1:]))"


def answers(host, *targets):
    """Return the interface that a host names for each target."""
    done = subprocess.run(host.command(sys.executable, "-c", ASK, *targets), capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_hosts_are_reached_over_the_cable_and_a_host_itself_too():
    with hosts(2) as (first, second):
        for host in (first, second):
            assert answers(host, first.address, second.address) == ["cable", "cable"]


def test_the_loopback_is_never_the_answer():
    with hosts(1) as (host,):
        assert answers(host, "127.0.1.1", "localhost", "::1") == ["None"] * 3
        subprocess.run(host.command("ip", "route", "add", "default", "dev", host.device), check=True)
        assert answers(host, "127.0.1.1", "localhost", "::1") == ["cable"] * 3


def test_an_address_of_ipv6_is_found():
    with hosts(1) as (host,):
        subprocess.run(host.command("ip", "address", "add", "fd00:213::1/64", "dev", host.device, "nodad"), check=True)
        assert answers(host, "fd00:213::1", "fd00:213::2") == ["cable", "cable"]


@pytest.mark.parametrize("host", ["", "a" * 64, "a..b"])
def test_an_unknown_host_has_the_default_routes_interface_or_none(host):
    assert interface_towards(host) == interface_towards("127.0.0.1")
