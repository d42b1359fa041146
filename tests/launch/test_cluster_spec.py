from __future__ import annotations

from contextlib import suppress
from random import Random

import pytest

from samestep import cli
from samestep.config import TOKEN
from samestep.errors import ConfigError
from samestep.launch import local as command
from samestep.launch.cluster_spec import ClusterSpec, Host, Nodes, parse_hosts, read_hosts

SECRET = "a secret of the tests"


@pytest.fixture
def spec_of(monkeypatch):
    """Return the cluster spec of `samestep run` with flags, or its exit status. No script runs."""

    def run(*flags):
        specs = []
        monkeypatch.setattr(command, "run_script", lambda *_, spec, **__: specs.append(spec))
        status = cli.main(["run", *flags, "train.py"])
        return specs[0] if specs else status

    return run


def test_flags_give_the_address_token_and_number_of_hosts(spec_of, monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN, SECRET)
    assert spec_of("--nodes", "2", "--master", "node1:29400") == ClusterSpec(
        ("node1", 29400), SECRET, Nodes(2, 2)
    )
    assert spec_of("--nodes", "1:4", "--master", "node1:29400").nodes == Nodes(1, 4)
    file = tmp_path / "token"
    file.write_text(f"{SECRET[::-1]}\n")
    file.chmod(0o600)
    assert (
        spec_of("--nodes", "2", "--master", "node1:29400", "--token-file", str(file)).token
        == SECRET[::-1]
    )


def test_without_flags_this_host_is_alone(spec_of):
    assert spec_of() is None
    assert spec_of("--nodes", "1") is None


@pytest.mark.parametrize(
    "nodes", ["0", "x", "2:1", "1:", ":2", "1:2:3", "-1", "1.5", "٣", "9999999"]
)
def test_an_invalid_number_of_nodes_is_an_error(spec_of, capsys, nodes):
    assert spec_of(f"--nodes={nodes}", "--master", "node1:1") == 2
    assert "--nodes must be a number of hosts such as 2, or a range" in (
        printed := capsys.readouterr().err
    )
    assert f"got {nodes}" in printed


@pytest.mark.parametrize("nodes", ["257", "1:257"])
def test_more_nodes_than_one_host_can_coordinate_are_refused(spec_of, monkeypatch, capsys, nodes):
    monkeypatch.setenv(TOKEN, SECRET)
    assert spec_of("--nodes", "256", "--master", "node1:1").nodes == Nodes(256, 256)
    assert spec_of("--nodes", nodes, "--master", "node1:1") == 2
    printed = capsys.readouterr().err
    assert (
        f"--nodes must be at most 256, because one host coordinates all others, got {nodes}; "
        in (printed)
    )
    assert "torchrun, Slurm's srun or one Kubernetes pod each" in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--nodes", "2"], "--nodes 2 requires --master"),
        (["--master", "node1:29400"], "--master node1:29400 requires --nodes"),
        (["--nodes", "2", "--master", "node1"], "--master must be HOST:PORT, such as"),
        (
            ["--nodes", "2", "--master", "node1:29400"],
            "--nodes 2 requires a token; create one with `python -c",
        ),
        (
            ["--nodes", "2", "--master", "node1:29400", "--token-file", "none"],
            "--token-file none cannot be read",
        ),
        (["--ssh", "rsh"], "--ssh 'rsh' requires --hosts"),
    ],
)
def test_missing_or_invalid_flags_are_errors(spec_of, capsys, flags, message):
    assert spec_of(*flags) == 2
    assert message in capsys.readouterr().err


def test_a_short_token_is_an_error_that_does_not_print_it(spec_of, capsys, monkeypatch):
    monkeypatch.setenv(TOKEN, "hunter2")
    assert spec_of("--nodes", "2", "--master", "node1:29400") == 2
    printed = capsys.readouterr().err
    assert f"{TOKEN} must have at least 16 characters, got 7" in printed
    assert "hunter2" not in printed


def test_a_token_that_others_may_read_is_an_error(spec_of, capsys, tmp_path):
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(0o644)
    assert spec_of("--nodes", "2", "--master", "node1:29400", "--token-file", str(file)) == 2
    assert f"chmod 600 {file}" in capsys.readouterr().err


def write_hosts(folder, text):
    path = folder / "hosts.txt"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_line_is_a_host_with_or_without_workers(tmp_path):
    text = "# ours\nnode1 workers=4\n\n  me@node2.example.org  # slow\n"
    text += "10.0.0.3\tworkers=12\r\nfd00::4\n"
    assert read_hosts(write_hosts(tmp_path, text)) == [
        Host("node1", 4),
        Host("me@node2.example.org", None),
        Host("10.0.0.3", 12),
        Host("fd00::4", None),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("node1 slots=4", "line 1: expected HOST or HOST workers=N"),
        ("\n# none\nnode1 workers=0", "line 3: expected HOST"),
        ("-oProxyCommand=true", "got '-oProxyCommand=true'"),
        ("node1;reboot", "line 1"),
        ("node1\nnode2\nme@node1", "line 3: 'me@node1' has the same host as line 1"),
        ("# none\n", "has no host"),
        (b"\xff\n", "cannot be read"),
        ("node1\n" * 200_000, "bytes"),
    ],
)
def test_an_invalid_line_is_an_error(text, message, tmp_path):
    with pytest.raises(ConfigError, match=r"--hosts .*hosts\.txt") as caught:
        read_hosts(write_hosts(tmp_path, text))
    assert message in str(caught.value)


def test_a_missing_hosts_file_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"--hosts .*none\.txt cannot be read"):
        read_hosts(tmp_path / "none.txt")


def test_any_text_gives_hosts_or_an_error_and_no_shell_syntax():
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
    host_count = 0
    for _ in range(20_000):
        text = "".join(random.choices(pieces, k=random.randrange(12)))
        with suppress(ConfigError):
            for host in parse_hosts(text, "hosts"):
                host_count += 1
                assert not host.name.startswith("-")
                assert not set(host.name) & set(" ;`$(\x00[")
    assert host_count > 1000
