from __future__ import annotations

import pytest

from samestep.tools.doctor import network
from tests.tools.doctor.fabricated import case_of, told

FASTER = {"sys/class/net/ib0/operstate": "up", "sys/class/net/ib0/speed": "200000"}
ONE_OF_TWO_HOSTS = {
    "RANK": "0",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.5",
    "MASTER_PORT": "29500",
}


def test_interfaces_are_told_with_speed_and_addresses(tmp_path):
    files = {"proc/net/if_inet6": "fe8000000000000000fc00fffe000001 04 40 20 80     eth0\n"}
    section = network.examine(case_of(tmp_path, files=files))
    assert section.facts["interfaces"] == [
        {
            "name": "eth0",
            "state": "up",
            "megabits": 10000,
            "addresses": ["10.0.0.5", "fe80::fc:ff:fe00:1"],
        },
        {"name": "lo", "state": "unknown", "megabits": None, "addresses": ["127.0.0.1"]},
    ]
    assert section.facts["gloo_takes"] == "eth0"
    assert section.facts["nccl_takes"] == ["eth0"]
    assert "reached by eth0 (10 Gbit/s)" in told(section, "good")
    assert told(section, "change") == told(section, "note") == ""


def test_a_faster_interface_has_to_be_chosen_where_there_are_other_hosts(tmp_path):
    alone = network.examine(case_of(tmp_path, files=FASTER))
    assert "GLOO_SOCKET_IFNAME=ib0 NCCL_SOCKET_IFNAME=ib0" in told(alone, "note")
    assert told(alone, "change") == ""
    one_of_two = network.examine(case_of(tmp_path, files=FASTER, environment=ONE_OF_TWO_HOSTS))
    assert "eth0 (10 Gbit/s), and ib0 is faster (200 Gbit/s)" in told(one_of_two, "change")
    chosen = network.examine(
        case_of(
            tmp_path, files=FASTER, environment={**ONE_OF_TWO_HOSTS, "GLOO_SOCKET_IFNAME": "ib0"}
        )
    )
    assert chosen.facts["gloo_takes"] == "ib0"
    assert told(chosen, "change") == ""


def test_an_interface_that_is_down_or_inside_this_host_is_no_faster_way(tmp_path):
    files = {
        "sys/class/net/ib0/operstate": "down",
        "sys/class/net/ib0/speed": "200000",
        "sys/class/net/docker0/operstate": "up",
        "sys/class/net/docker0/speed": "100000",
    }
    assert told(network.examine(case_of(tmp_path, files=files)), "note") == ""


def test_a_variable_that_names_no_interface_is_found(tmp_path):
    section = network.examine(case_of(tmp_path, environment={"GLOO_SOCKET_IFNAME": "eth0,eth7"}))
    assert "GLOO_SOCKET_IFNAME names eth7, and this host has eth0, lo" in told(section, "change")
    assert "export GLOO_SOCKET_IFNAME=eth0" in told(section, "change")


def test_the_loopback_leads_to_no_other_host(tmp_path):
    section = network.examine(
        case_of(tmp_path, environment={**ONE_OF_TWO_HOSTS, "GLOO_SOCKET_IFNAME": "lo"})
    )
    assert "unset GLOO_SOCKET_IFNAME" in told(section, "change")
    assert (
        told(network.examine(case_of(tmp_path, environment={"GLOO_SOCKET_IFNAME": "lo"})), "change")
        == ""
    )


@pytest.mark.parametrize(
    ("variable", "takes"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth1", ["eth1"]),
        ("=eth", []),
        ("^eth", ["ib0", "lo"]),
        ("^=eth0,lo", ["eth1", "ib0"]),
        ("", ["ib0"]),
    ],
)
def test_nccl_takes_what_its_variable_says(tmp_path, variable, takes):
    system = case_of(tmp_path, environment={"NCCL_SOCKET_IFNAME": variable}).system
    assert network.nccl_takes(system, ["eth0", "eth1", "ib0", "lo"]) == takes


def test_a_variable_that_leaves_nccl_nothing_is_found(tmp_path):
    section = network.examine(case_of(tmp_path, environment={"NCCL_SOCKET_IFNAME": "=eth"}))
    assert "NCCL_SOCKET_IFNAME==eth leaves none of eth0, lo" in told(section, "change")
