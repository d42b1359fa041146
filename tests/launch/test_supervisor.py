"""Runs on several hosts, simulated by network namespaces, with failures and lost hosts."""

from __future__ import annotations

import json
import signal
import subprocess
import time
from functools import partial

import pytest

from samestep.launch import coordinator, coordinator_client, membership
from tests.faults import stalling_disk
from tests.jobs import events, image_job, left_by, left_in
from tests.launch.launchers import JOB, PORT, launchers
from tests.launch.processes import end_soon
from tests.namespaces import hosts


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the result of the job with one worker on one host."""
    return left_by(image_job, tmp_path_factory.mktemp("alone"), 1, lanes=8, snapshot_every=1)


@pytest.fixture
def nodes():
    with hosts(2) as pair:
        yield pair


@pytest.fixture
def start(start_in, tmp_path):
    """Start a launcher on a host by its number, with the job in the folder `run`."""
    return partial(start_in, tmp_path)


@pytest.fixture
def start_in(nodes, tmp_path):
    """Start a launcher with the folder `run` in another folder."""
    with launchers() as start_on:

        def start_launcher(folder, number, *flags, fault=None):
            flags = [
                "run",
                "--master",
                f"{nodes[0].address}:{PORT}",
                *flags,
                str(JOB),
                str(folder / "run"),
            ]
            return start_on(
                nodes[number],
                tmp_path / f"log-{number}",
                *flags,
                *([json.dumps(fault)] if fault else []),
            )

        yield start_launcher


@pytest.fixture
def impatient(monkeypatch):
    """Hosts are lost after three seconds of silence, and then try to join for one."""
    for module in (coordinator, membership):
        monkeypatch.setattr(module, "LOST_SECONDS", 3.0)
    monkeypatch.setattr(coordinator_client, "SILENCE_SECONDS", 2.5)
    monkeypatch.setattr(coordinator_client, "QUIET_SECONDS", 1.5)
    monkeypatch.setattr(coordinator_client, "JOIN_SECONDS", 1.0)
    monkeypatch.setattr(membership, "PROBATION_SECONDS", 0.1)


def at(workers, rank, step, does):
    return {"workers": workers, "rank": rank, "step": step, "does": does}


def left_by_nodes(folder):
    return left_in(image_job, folder, lanes=8)


def test_two_hosts_leave_the_same_bits_as_one_worker(start, alone, tmp_path):
    first, other = start(0, "--nodes", "2", "-n", "1"), start(1, "--nodes", "2", "-n", "2")
    assert first.end() == other.end() == 0, first.output() + other.output()
    assert "trained at 3 workers" in first.output()
    assert "[2] trained at 3 workers" in other.output()
    assert left_by_nodes(tmp_path / "run") == alone


@pytest.mark.long
def test_a_killed_worker_restarts_on_its_host(start, alone, tmp_path):
    fault = at(2, 1, 3, "kill")
    first, other = start(0, "--nodes", "2", fault=fault), start(1, "--nodes", "2", fault=fault)
    assert first.end() == other.end() == 0, first.output() + other.output()
    assert first.output().count("worker 1: killed by SIGKILL") == 1
    assert [event["rank"] for event in events(tmp_path / "run", "restarting")] == [1]
    assert left_by_nodes(tmp_path / "run") == alone


@pytest.mark.parametrize(
    ("flipped", "error"),
    [
        ("flip", "RecheckError: worker 2 ("),
        pytest.param("flip parameter", "DivergenceError: workers differ", marks=pytest.mark.long),
    ],
)
def test_a_run_goes_on_without_a_host_whose_hardware_is_faulty(
    flipped, error, start, alone, tmp_path
):
    """The gradients or the parameters of its worker differ from those of two others."""
    flags = "--nodes", "1:2", "--lanes", "8", "--recheck-every", "1"
    fault = at(3, 2, 3, flipped)
    first = start(0, *flags, "-n", "2", fault=fault)
    other = start(1, *flags, "-n", "1", fault=fault)
    assert other.end() == 1
    assert first.end() == 0, first.output()
    assert error in other.output()
    left_out = f"is left out, because its hardware is faulty: {error.partition(' ')[0]}"
    assert left_out in first.output()
    assert "trained at 2 workers" in first.output()
    assert left_by_nodes(tmp_path / "run") == alone


def test_a_host_that_is_killed_is_left_out(start, alone, tmp_path):
    fault = at(2, 1, 3, "wait")
    first, other = (
        start(0, "--nodes", "1:2", "--lanes", "8", fault=fault),
        start(1, "--nodes", "1:2", "--lanes", "8", fault=fault),
    )
    first.wait_until((tmp_path / "run" / "fault").exists)
    other.send(signal.SIGKILL)
    assert first.end() == 0, first.output()
    assert "trained at 1 workers" in first.output()
    assert end_soon([int((tmp_path / "run" / "fault").read_text())])
    assert left_by_nodes(tmp_path / "run") == alone


@pytest.mark.long
def test_a_host_that_is_killed_is_replaced(start, alone, tmp_path):
    fault = at(2, 1, 3, "wait")
    first, other = start(0, "--nodes", "2", fault=fault), start(1, "--nodes", "2", fault=fault)
    first.wait_until((tmp_path / "run" / "fault").exists)
    other.send(signal.SIGKILL)
    first.wait_for("was lost")
    another = start(1, "--nodes", "2")
    assert first.end() == another.end() == 0, first.output() + another.output()
    assert "trained at 2 workers" in first.output()
    assert left_by_nodes(tmp_path / "run") == alone


def test_a_later_host_joins_and_an_unauthenticated_peer_is_refused(start, nodes, alone, tmp_path):
    first = start(0, "--nodes", "1:2", "--lanes", "8", fault=at(1, 0, 3, "wait"))
    first.wait_until((tmp_path / "run" / "fault").exists)
    subprocess.run(
        nodes[1].command("bash", "-c", f"echo garbage > /dev/tcp/{nodes[0].address}/{PORT}"),
        check=True,
    )
    first.wait_for(f"refused a connection from {nodes[1].address}")
    other = start(1, "--nodes", "1:2", "--lanes", "8")
    assert first.end() == other.end() == 0, first.output() + other.output()
    assert "trained at 2 workers" in first.output()
    assert left_by_nodes(tmp_path / "run") == alone


def test_the_first_host_prints_the_traceback_and_others_one_line(start, tmp_path):
    fault = at(2, 1, 3, "raise")
    first, other = start(0, "--nodes", "2", fault=fault), start(1, "--nodes", "2", fault=fault)
    assert first.end() == other.end() == 1
    line = "worker 1 failed first: ValueError: the data is wrong [step 3, host "
    assert first.output().count(line) == other.output().count(line) == 1
    assert first.output().count("Traceback") == 1
    assert "Traceback" not in other.output()


def test_a_signal_on_one_host_lets_all_snapshot_and_stop(start, tmp_path):
    fault = at(2, 0, 3, "wait")
    first, other = start(0, "--nodes", "2", fault=fault), start(1, "--nodes", "2", fault=fault)
    first.wait_until((tmp_path / "run" / "fault").exists)
    other.send(signal.SIGTERM)
    assert first.end() == other.end() == -signal.SIGTERM
    assert (tmp_path / "run" / "step-00000004" / "manifest.json").exists()


def test_a_preempted_host_leaves_and_the_run_continues(start, alone, tmp_path):
    fault = at(2, 0, 3, "wait")
    first, other = (
        start(number, "--nodes", "1:2", "--lanes", "8", fault=fault) for number in range(2)
    )
    first.wait_until((tmp_path / "run" / "fault").exists)
    other.send(signal.SIGTERM)
    assert other.end() == -signal.SIGTERM
    assert first.end() == 0, first.output()
    assert len(events(tmp_path / "run", "resumed")) == 1
    assert "trained at 1 workers" in first.output()
    assert left_by_nodes(tmp_path / "run") == alone


@pytest.mark.usefixtures("impatient")
def test_nothing_is_left_when_the_first_host_is_killed_and_another_one_is_stopped(start, tmp_path):
    fault = at(2, 1, 3, "wait")
    coordinator_client.JOIN_SECONDS = 1e6  # `impatient` restores it
    first, other = start(0, "--nodes", "2", fault=fault), start(1, "--nodes", "2", fault=fault)
    first.wait_until((tmp_path / "run" / "fault").exists)
    first.send(signal.SIGKILL)
    other.wait_for("trying to join again")
    other.send(signal.SIGTERM)
    assert other.end() == 1
    assert "stopped by a signal" in other.output()
    assert end_soon([int((tmp_path / "run" / "fault").read_text())])


@pytest.mark.usefixtures("impatient")
def test_a_disconnected_host_is_left_out_and_stops(start, nodes, alone, tmp_path):
    fault = at(2, 1, 3, "wait")
    first, other = (
        start(0, "--nodes", "1:2", "--lanes", "8", fault=fault),
        start(1, "--nodes", "1:2", "--lanes", "8", fault=fault),
    )
    first.wait_until((tmp_path / "run" / "fault").exists)
    nodes[1].plug(into=False)
    assert first.end() == 0, first.output()
    assert other.end() == 1
    assert "lost the connection to the first host" in other.output()
    assert left_by_nodes(tmp_path / "run") == alone


@pytest.mark.long
def test_a_cut_network_stops_nothing(start, nodes, alone, tmp_path):
    fault = at(2, -1, 3, "pause")
    first, other = start(0, "--nodes", "2", fault=fault), start(1, "--nodes", "2", fault=fault)
    first.wait_until((tmp_path / "run" / "fault").exists)
    nodes[0].plug(into=False)
    # nothing may happen in this time, in which a host once had to respond
    time.sleep(5.5)
    nodes[0].plug(into=True)
    assert first.end() == other.end() == 0, first.output() + other.output()
    assert not events(tmp_path / "run", "restarting")
    assert "lost" not in first.output() + other.output()
    assert left_by_nodes(tmp_path / "run") == alone


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_a_host_that_was_lost_joins_again(start, nodes, alone, tmp_path):
    fault = at(2, 1, 3, "wait once")
    coordinator_client.JOIN_SECONDS = 60.0
    first = start(0, "--nodes", "2", fault=fault)
    other = start(1, "--nodes", "2", fault=fault)
    first.wait_until((tmp_path / "run" / "fault").exists)
    nodes[1].plug(into=False)
    first.wait_for("was lost (no message for 3 s)")
    nodes[1].plug(into=True)
    # the workers of the next attempt are not told to wait
    other.wait_for("trying to join again")
    first.wait_until(lambda: events(tmp_path / "run", "resumed"))
    assert (first.end(), other.end()) == (0, 0), first.output() + other.output()
    assert left_by_nodes(tmp_path / "run") == alone


@pytest.mark.long
def test_a_first_host_that_is_killed_and_started_again_finds_the_others(start, alone, tmp_path):
    fault = at(2, 0, 3, "wait")
    first, other = start(0, "--nodes", "2", fault=fault), start(1, "--nodes", "2", fault=fault)
    first.wait_until((tmp_path / "run" / "fault").exists)
    first.send(signal.SIGKILL)
    first.wait_for_exit()
    again = start(0, "--nodes", "2")
    assert again.end() == other.end() == 0, again.output() + other.output()
    assert len(events(tmp_path / "run", "resumed")) == 1
    assert left_by_nodes(tmp_path / "run") == alone


@pytest.mark.long
@pytest.mark.usefixtures("impatient")
def test_a_disk_that_stalls_loses_no_host(start_in, alone):
    with stalling_disk() as (folder, stall, recover):
        fault = at(2, -1, 3, "pause")
        first, other = (
            start_in(folder, number, "--nodes", "2", fault=fault) for number in range(2)
        )
        first.wait_until((folder / "run" / "fault").exists)
        stall()
        # nothing may happen in this time, which is more than a host has to respond
        time.sleep(4.5)
        assert "made step 4" not in first.output()
        recover()
        assert first.end() == other.end() == 0, first.output() + other.output()
        assert not events(folder / "run", "restarting")
        assert "lost" not in first.output() + other.output()
        assert left_by_nodes(folder / "run") == alone
