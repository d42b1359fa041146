from __future__ import annotations

import pytest

from samestep import cli
from samestep.config import TOKEN
from samestep.launch import command
from samestep.launch.cluster_spec import ClusterSpec, Nodes

SECRET = "a secret of the tests"


@pytest.fixture
def gathered(monkeypatch):
    """Run `samestep run` with flags, whose script is never run; return where it would gather, or its exit status."""

    def gather(*flags):
        found = []
        monkeypatch.setattr(
            command, "run_script", lambda *_, gathering, **__: found.append(gathering)
        )
        status = cli.main(["run", *flags, "train.py"])
        return found[0] if found else status

    return gather


def test_flags_say_where_hosts_gather(gathered, monkeypatch, tmp_path):
    monkeypatch.setenv(TOKEN, SECRET)
    assert gathered("--nodes", "2", "--master", "node1:29400") == ClusterSpec(
        ("node1", 29400), SECRET, Nodes(2, 2)
    )
    assert gathered("--nodes", "1:4", "--master", "node1:29400").nodes == Nodes(1, 4)
    file = tmp_path / "token"
    file.write_text(f"{SECRET[::-1]}\n")
    file.chmod(0o600)
    assert (
        gathered("--nodes", "2", "--master", "node1:29400", "--token-file", str(file)).token
        == SECRET[::-1]
    )


def test_without_them_this_host_is_alone(gathered):
    assert gathered() is None
    assert gathered("--nodes", "1") is None


@pytest.mark.parametrize(
    "nodes", ["0", "x", "2:1", "1:", ":2", "1:2:3", "-1", "1.5", "٣", "9999999"]
)
def test_a_number_of_nodes_that_makes_no_sense_is_named(gathered, capsys, nodes):
    assert gathered(f"--nodes={nodes}", "--master", "node1:1") == 2
    assert (
        f"--nodes {nodes} was given; expected a number of hosts such as 2"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes", "2"], "--nodes 2 was given without --master"),
        (["--master", "node1:29400"], "--master node1:29400 was given without --nodes"),
        (["--nodes", "2", "--master", "node1"], "--master must be HOST:PORT, such as"),
        (
            ["--nodes", "2", "--master", "node1:29400"],
            "--nodes 2 was given, and no token; make one by `python -c",
        ),
        (
            ["--nodes", "2", "--master", "node1:29400", "--token-file", "none"],
            "--token-file none was given, and cannot be read",
        ),
        (["--ssh", "rsh"], "--ssh 'rsh' was given without --hosts"),
    ],
)
def test_flags_that_do_not_fit_are_named(gathered, capsys, flags, said):
    assert gathered(*flags) == 2
    assert said in capsys.readouterr().err


def test_a_short_token_is_an_error_that_does_not_tell_it(gathered, capsys, monkeypatch):
    monkeypatch.setenv(TOKEN, "hunter2")
    assert gathered("--nodes", "2", "--master", "node1:29400") == 2
    told = capsys.readouterr().err
    assert f"{TOKEN} has 7 characters; expected at least 16" in told
    assert "hunter2" not in told


def test_a_token_that_others_may_read_is_an_error(gathered, capsys, tmp_path):
    file = tmp_path / "token"
    file.write_text(SECRET)
    file.chmod(0o644)
    assert gathered("--nodes", "2", "--master", "node1:29400", "--token-file", str(file)) == 2
    assert f"chmod 600 {file}" in capsys.readouterr().err
