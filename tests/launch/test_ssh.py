"""`samestep run --hosts` over real and simulated remote shells."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from samestep.cli import EXIT_INTERRUPTED
from tests.jobs import image_job, left_by, left_in
from tests.launch.launchers import HERE, JOB, TOKEN, launchers, wait_until
from tests.launch.processes import end_soon
from tests.namespaces import hosts
from tests.needs import needs

REPOSITORY = Path(__file__).parents[2]
SSHD = """\
Port 22
ListenAddress {address}
HostKey "{folder}/host-key"
AuthorizedKeysFile "{folder}/user-key.pub"
PidFile none
StrictModes no
UsePAM no
"""


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Return the result of the job with one worker on one host."""
    return left_by(image_job, tmp_path_factory.mktemp("alone"), 1, lanes=8, snapshot_every=1)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start `samestep run --hosts` on a host, with the job in the folder `run`."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with launchers() as start_on:

        def start_here(names, shell, *flags, fault=None, on=HERE):
            (tmp_path / "hosts.txt").write_text("\n".join(names))
            flags = [
                "--hosts",
                str(tmp_path / "hosts.txt"),
                "--ssh",
                shell,
                *flags,
                str(JOB),
                str(tmp_path / "run"),
            ]
            return start_on(on, tmp_path / "log", "run", *flags, *([fault] if fault else []))

        yield start_here


def simulated(folder, does):
    """Return a remote shell that runs commands on this host."""
    shell = folder / "shell"
    shell.write_text(f"#!/bin/sh\nhost=$1; shift\n{does}\n")
    shell.chmod(0o700)
    return shlex.quote(str(shell))


@contextmanager
def ssh_servers(nodes, folder):
    """Start ssh servers on hosts; yield a remote shell with a key for them."""
    needs("/usr/sbin/sshd")
    Path("/run/sshd").mkdir(exist_ok=True)  # sshd requires it
    for name in ("host-key", "user-key"):
        subprocess.run(
            ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / name], check=True
        )
    with ExitStack() as exits:
        for node in nodes:
            configuration = folder / f"sshd-{node.name}"
            configuration.write_text(SSHD.format(address=node.address, folder=folder))
            server = subprocess.Popen(
                node.command("/usr/sbin/sshd", "-D", "-e", "-f", str(configuration)),
                stderr=subprocess.PIPE,
            )
            exits.callback(server.communicate)
            exits.callback(server.kill)
            while b"listening" not in (line := server.stderr.readline()):
                assert line, "sshd ended"
        options = ("StrictHostKeyChecking=no", "UserKnownHostsFile=/dev/null", "LogLevel=ERROR")
        yield f"ssh -F none -i {shlex.quote(str(folder / 'user-key'))} -o {' -o '.join(options)}"


@pytest.mark.long
def test_a_run_over_ssh_ends_with_its_launcher_and_resumes(start, alone, tmp_path):
    with hosts(2) as nodes, ssh_servers(nodes, tmp_path) as shell:
        names = [f"root@{nodes[0].address} workers=1", nodes[1].address]
        first = start(
            names,
            shell,
            "-n",
            "2",
            fault=json.dumps({"workers": 3, "rank": 0, "step": 3, "does": "wait"}),
            on=nodes[1],
        )
        first.wait_until((tmp_path / "run" / "fault").exists)
        assert not any(TOKEN in line for line in command_lines())
        first.send(signal.SIGKILL)
        wait_until(lambda: end_soon([int((tmp_path / "run" / "fault").read_text())]))
        assert (tmp_path / "run" / "step-00000004" / "manifest.json").exists()
        second = start(names, shell, "-n", "2", on=nodes[1])
        assert second.end() == 0, second.output()
        assert {
            "trained at 3 workers",
            "[1] trained at 3 workers",
            "[2] trained at 3 workers",
        } <= set(second.output().splitlines())
        assert left_in(image_job, tmp_path / "run", lanes=8) == alone


def test_ctrl_c_lets_workers_snapshot_on_their_hosts(start, tmp_path):
    fault = json.dumps({"workers": 1, "rank": 0, "step": 3, "does": "wait"})
    launcher = start(["localhost"], simulated(tmp_path, 'exec sh -c "$*"'), "-n", "1", fault=fault)
    launcher.wait_until((tmp_path / "run" / "fault").exists)
    launcher.send(signal.SIGINT)
    assert launcher.end() == EXIT_INTERRUPTED
    assert (tmp_path / "run" / "step-00000004" / "manifest.json").exists()


def test_output_is_printed_in_complete_lines_and_the_first_failure_is_the_status(start, tmp_path):
    shell = simulated(
        tmp_path,
        'printf "out of $host, "; echo "errors of $host" >&2; echo and more; '
        "printf unfinished; if [ $host = b ]; then exit 3; fi",
    )
    launcher = start(["a", "b"], shell)
    assert launcher.end() == 3
    assert Counter(launcher.output().splitlines()) == Counter(
        [
            "out of a, and more",
            "errors of a",
            "unfinished",
            "out of b, and more",
            "errors of b",
            "unfinished",
        ]
    )


def test_a_missing_remote_shell_is_an_error(start):
    launcher = start(["a"], "nowhere/ssh")
    assert launcher.end() == 1
    assert "cannot start the remote shell 'nowhere/ssh'" in launcher.output()


def test_a_missing_directory_on_a_host_is_an_error(tmp_path):
    order = json.dumps({"arguments": [], "directory": str(tmp_path / "none"), "environment": {}})
    command = [sys.executable, "-m", "samestep.launch.ssh"]
    ended = subprocess.run(command, input=order + "\n", capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "all hosts need the same directories" in ended.stderr


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_text()
