from __future__ import annotations

import os
import subprocess
import sys

import pytest

from samestep.host import interface_towards, reached_from
from tests.namespaces import hosts

ASK = "import sys; from samestep.host import interface_towards; print(*map(interface_towards, sys.argv[1:]))"


def answers(host, *targets):
    """Return the interface that a host names for each target."""
    done = subprocess.run(
        host.command(sys.executable, "-c", ASK, *targets),
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.split()


def test_hosts_are_reached_over_the_cable_and_a_host_itself_too():
    with hosts(2) as (first, second):
        for host in (first, second):
            assert answers(host, first.address, second.address) == ["cable", "cable"]


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.1.1", "::1", "localhost"])
def test_a_run_that_meets_on_the_loopback_stays_there(host):
    assert interface_towards(host) == "lo"


def test_a_name_of_ones_own_that_stands_for_the_loopback_means_the_default_route():
    name = "127.1"  # is looked up as 127.0.0.1
    with hosts(1) as (host,):
        assert answers(host, name) == ["None"]
        subprocess.run(
            host.command("ip", "route", "add", "default", "dev", host.device), check=True
        )
        assert answers(host, name) == ["cable"]


def test_an_address_of_ipv6_is_found():
    with hosts(1) as (host,):
        subprocess.run(
            host.command("ip", "address", "add", "fd00:213::1/64", "dev", host.device, "nodad"),
            check=True,
        )
        assert answers(host, "fd00:213::1", "fd00:213::2") == ["cable", "cable"]


@pytest.mark.parametrize("host", ["", "a" * 64, "a..b"])
def test_of_what_cannot_be_looked_up_nothing_is_told_but_the_default_route(host):
    assert interface_towards(host) == interface_towards("127.1")


def test_gloo_listens_there_for_a_while_unless_told_where(monkeypatch):
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    with reached_from("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")
    with reached_from("127.0.0.1"):
        assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
