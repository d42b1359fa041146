"""`samestep run --hosts`: what a hosts file may say, and runs over real and pretended remote shells."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from random import Random

import pytest

from samestep.cli import EXIT_INTERRUPTED
from samestep.errors import ConfigError
from samestep.launch.ssh import Host, parse_hosts, read_hosts
from tests.jobs import image_job, left_by, left_in
from tests.launch.launchers import HERE, JOB, TOKEN, launchers, wait_until
from tests.launch.processes import end_soon
from tests.namespaces import hosts
from tests.needs import needs

REPOSITORY = Path(__file__).parents[2]
SSHD = """\
Port 22
ListenAddress {address}
HostKey {folder}/host-key
AuthorizedKeysFile {folder}/user-key.pub
PidFile none
StrictModes no
UsePAM no
"""


def write(folder, text):
    path = folder / "hosts.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_line_is_a_host_with_workers_or_without(tmp_path):
    text = "# ours\nnode1 workers=4\n\n  me@node2.example.org  # slow\n10.0.0.3\tworkers=12\r\nfd00::4\n"
    assert read_hosts(write(tmp_path, text)) == [
        Host("node1", 4),
        Host("me@node2.example.org", None),
        Host("10.0.0.3", 12),
        Host("fd00::4", None),
    ]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("node1 slots=4", "line 1: 'node1 slots=4' was given; expected HOST or HOST workers=N"),
        ("\n# none\nnode1 workers=0", "line 3: 'node1 workers=0'"),
        ("-oProxyCommand=true", "line 1: '-oProxyCommand=true'"),
        ("node1;reboot", "line 1"),
        ("node1\nnode2\nme@node1", "line 3: 'me@node1' was given, and line 1 has the same host"),
        ("# nobody\n", "names no host"),
        (b"\xff\n", "cannot be read"),
        ("node1\n" * 200_000, "bytes"),
    ],
)
def test_a_wrong_line_is_named(text, said, tmp_path):
    with pytest.raises(ConfigError, match=r"--hosts .*hosts\.txt") as caught:
        read_hosts(write(tmp_path, text))
    assert said in str(caught.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"--hosts .*none\.txt was given, and cannot be read"):
        read_hosts(tmp_path / "none.txt")


def test_any_text_gives_hosts_or_an_error_and_no_word_that_a_shell_would_take_for_its_own():
    random = Random(0)
    pieces = [
        "node1",
        "me@",
        "10.0.0.1",
        "::1",
        " workers=",
        "3",
        "#",
        "\n",
        "-",
        " ",
        "\t",
        ";",
        "`",
        "$(",
        "é",
        "\x00",
        "99999999",
        "[",
        "%",
    ]
    found = 0
    for _ in range(20_000):
        text = "".join(random.choices(pieces, k=random.randrange(12)))
        with suppress(ConfigError):
            for host in parse_hosts(text, "hosts"):
                found += 1
                assert not host.name.startswith("-")
                assert not set(host.name) & set(" ;`$(\x00[")
    assert found > 1000


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """What one worker on one host leaves of the job."""
    return left_by(image_job, tmp_path_factory.mktemp("alone"), 1, lanes=8, snapshot_every=1)


@pytest.fixture
def start(tmp_path, monkeypatch):
    """Start `samestep run --hosts` on a host, for hosts of these names and with the job in the folder `run`."""
    monkeypatch.chdir(REPOSITORY)
    monkeypatch.setenv("PYTHONPATH", str(REPOSITORY))
    with launchers() as start_on:

        def start_here(names, shell, *flags, fault=None, on=HERE):
            flags = [
                "--hosts",
                str(write(tmp_path, "\n".join(names))),
                "--ssh",
                shell,
                *flags,
                str(JOB),
                str(tmp_path / "run"),
            ]
            return start_on(on, tmp_path / "log", "run", *flags, *([fault] if fault else []))

        yield start_here


def pretended(folder, does):
    """Return a remote shell that does something here instead."""
    shell = folder / "shell"
    shell.write_text(f"#!/bin/sh\nhost=$1; shift\n{does}\n")
    shell.chmod(0o700)
    return str(shell)


@contextmanager
def ssh_servers(nodes, folder):
    """Let everybody with a key log in on hosts; yield the remote shell that has it."""
    needs("/usr/sbin/sshd")
    Path("/run/sshd").mkdir(exist_ok=True)  # of sshd, into which it locks itself
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
        yield f"ssh -F none -i {folder}/user-key -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null -o LogLevel=ERROR"


def test_a_run_over_ssh_ends_with_its_starter_and_is_taken_up_again(start, alone, tmp_path):
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
    launcher = start(["localhost"], pretended(tmp_path, 'exec sh -c "$*"'), "-n", "1", fault=fault)
    launcher.wait_until((tmp_path / "run" / "fault").exists)
    launcher.send(signal.SIGINT)
    assert launcher.end() == EXIT_INTERRUPTED
    assert (tmp_path / "run" / "step-00000004" / "manifest.json").exists()


def test_what_hosts_print_passes_in_whole_lines_and_the_first_failure_is_the_status(
    start, tmp_path
):
    shell = pretended(
        tmp_path,
        'printf "out of $host, "; echo "errors of $host" >&2; echo and more; printf unfinished; if [ $host = b ]; then exit 3; fi',
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


def test_a_remote_shell_that_is_not_there_is_named(start):
    launcher = start(["a"], "nowhere/ssh")
    assert launcher.end() == 1
    assert "the remote shell 'nowhere/ssh' cannot be started" in launcher.output()


def test_a_folder_that_is_not_there_on_a_host_is_named(tmp_path):
    order = json.dumps({"arguments": [], "directory": str(tmp_path / "none"), "environment": {}})
    command = [sys.executable, "-m", "samestep.launch.ssh"]
    ended = subprocess.run(command, input=order + "\n", capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "expected the same folders on all hosts" in ended.stderr


def command_lines():
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            yield path.read_text()
