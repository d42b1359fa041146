from __future__ import annotations

import os
import subprocess
import sys

import pytest

from samestep.cluster import gloo_interface, interface_towards
from tests.namespaces import hosts

ASK = """
import sys
from samestep.cluster import interface_towards

print(*map(interface_towards, sys.argv[1:]))
"""


def interfaces(host, *targets):
    """Return the interface that a host finds for each target."""
    done = subprocess.run(
        host.command(sys.executable, "-c", ASK, *targets),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_all_hosts_are_reached_through_the_cable():
    with hosts(2) as (first, second):
        for host in (first, second):
            assert interfaces(host, first.address, second.address) == ["cable", "cable"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_a_loopback_address_uses_the_loopback_interface(host):
    assert interface_towards(host) == "lo"


def test_a_name_that_stands_for_the_loopback_means_the_default_route():
    name = "127.1"  # is looked up as 127.0.0.1
    with hosts(1) as (host,):
        assert interfaces(host, name) == ["None"]
        subprocess.run(
            host.command("ip", "route", "add", "default", "dev", host.device), check=True
        )
        assert interfaces(host, name) == ["cable"]


def test_an_ipv6_address_is_found():
    with hosts(1) as (host,):
        subprocess.run(
            host.command("ip", "address", "add", "fd00:213::1/64", "dev", host.device, "nodad"),
            check=True,
        )
        assert interfaces(host, "fd00:213::1", "fd00:213::2") == ["cable", "cable"]


@pytest.mark.parametrize("host", ["", "a" * 64, "a..b"])
def test_an_unknown_host_means_the_default_route(host):
    assert interface_towards(host) == interface_towards("127.1")


def test_gloo_interface_is_set_in_the_block_unless_it_is_set_already(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with gloo_interface("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with gloo_interface("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
