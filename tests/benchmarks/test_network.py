from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import network
from benchmarks.contenders.with_ideal_link import least_seconds
from tests.needs import needs


@pytest.fixture
def _killed_run():
    needs("ip")
    needs("tc")
    subprocess.run(["ip", "netns", "add", "samestep-bench-0-1"], check=False)
    # also if it is there from tests that were killed
    is_present = Path("/run/netns/samestep-bench-0-1").exists()
    needs("permission to make network namespaces", is_present=is_present)


@pytest.mark.usefixtures("_killed_run")
@pytest.mark.parametrize("number", [2, 4])
def test_hosts_are_removed_after_an_error_and_those_of_killed_runs_at_the_next(number):
    with pytest.raises(KeyError), network.hosts("1gbit", number) as names:  # noqa: PT012
        listed = network.command("ip netns list")
        assert "samestep-bench-0-1" not in listed
        assert all(name in listed for name in names)
        assert len(names) == number
        for name in names:
            assert "tbf" in network.command(f"tc -n {name} qdisc show dev {network.DEVICE}")
        for other in range(2, number + 1):
            program = (
                f"import socket; print(socket.socket().connect_ex(('{network.address(other)}', 9)))"
            )
            enter = ["ip", "netns", "exec", names[0], sys.executable, "-c", program]
            assert int(subprocess.check_output(enter)) == errno.ECONNREFUSED
        raise KeyError
    assert f"samestep-bench-{os.getpid()}-" not in network.command("ip netns list")


def test_fast_links_may_send_more_at_once():
    assert network.burst("100mbit") == network.burst("1gbit") == 1 << 20
    assert network.burst("10gbit") == 2_500_000
    with pytest.raises(SystemExit, match="expected rates such as 100mbit or 10gbit, got fast"):
        network.burst("fast")


def test_tables_compare_equal_precision(monkeypatch, capsys):
    speeds = {"samestep": 3.0, "ddp": 2.0, "samestep-16": 9.0, "ddp-fp16": 6.0}

    def team(name, job, ranks, rate, port):
        yield SimpleNamespace(warm_up=lambda: None, turn=lambda: speeds[name] * len(ranks))

    monkeypatch.setattr(network, "team", contextmanager(team))
    arguments = ["--jobs", "mlp", "--turns", "2", "--contenders", *speeds]
    monkeypatch.setattr("sys.argv", ["network", *arguments])
    network.measure(["a", "b"], "1gbit", 2, network.arguments())
    full, in_16_bits = capsys.readouterr().out.strip().split("\n\n")
    assert "| samestep | ddp | samestep / best peer |" in full
    assert full.endswith(
        "| 12.00 (12.00 to 12.00) | 8.00 (8.00 to 8.00) | 1.50 (1.50 to 1.50) of ddp |"
    )
    assert "| samestep-16 | ddp-fp16 |" in in_16_bits


def test_an_ideal_link_is_busy_from_the_first_gradient_or_waits_for_the_last():
    completed = [(1.0, 100), (2.0, 10)]  # moment and bytes
    assert least_seconds(0.0, 3.0, completed, 1.0, 0) == 1.0 + 110
    assert least_seconds(0.0, 3.0, completed, 50.0, 0) == 1.0 + 2.2
    assert least_seconds(0.0, 3.0, completed, 50.0, 5) == 1.0 + 2.1
    assert least_seconds(0.0, 3.0, completed, 25.0, 200) == 4.4  # all of it, at the link's rate
    assert least_seconds(0.0, 3.0, [(1.0, 1), (2.0, 10)], 8.0, 0) == 2.0 + 1.25
    assert least_seconds(0.0, 9.0, completed, 50.0, 0) == 9.0
