from __future__ import annotations

import argparse
import socket
import subprocess
import sys

import pytest

from samestep import watch as command
from samestep.errors import ConfigError
from samestep.host import is_loopback
from tests.watch.serving import serving
from tests.watch.writing import started, write

TOKEN = "a-token-of-many-letters"


def watch(*words):
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return command.main(parser.parse_args([str(word) for word in words]))


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.1", "example.org"])
def test_other_hosts_require_a_token(tmp_path, host):
    with pytest.raises(ConfigError, match=r"must be a loopback address, got .*--token-file"):
        watch(tmp_path, "--host", host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "LocalHost"])
def test_loopback(host):
    assert is_loopback(host)


def test_a_missing_location(tmp_path):
    with pytest.raises(
        ConfigError, match=r"expected a run's folder, .*, got .*none; .*parent folder"
    ):
        watch(tmp_path / "none")
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="expected a run's folder"):
        watch(file)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short\n",
        b"two words of a long token",
        b"two\nlines-of-a-long-token",
        "t\u00f6ken-of-many-letters".encode(),
        b"\x00" * 20,
    ],
)
def test_invalid_tokens(tmp_path, content):
    file = tmp_path / "token"
    file.write_bytes(content)
    file.chmod(0o600)
    with pytest.raises(ConfigError, match=r"--token-file .* (one line of|expected one line)"):
        watch(tmp_path, "--token-file", file)
    file.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        watch(tmp_path, "--token-file", file)


def test_a_token_is_the_line_of_its_file(tmp_path):
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    file.chmod(0o600)
    assert command.read_token(file) == TOKEN
    file.chmod(0o644)
    with pytest.raises(ConfigError, match=r"must be readable only by you; run chmod 600 .*token"):
        command.read_token(file)


def test_a_taken_and_an_invalid_port(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"--port {port}: .*in use.*--port 0"):
            watch(tmp_path, "--port", port)
    for port in (-1, 65536):
        with pytest.raises(ConfigError, match=f"must be from 0 to 65535, got {port}"):
            watch(tmp_path, "--port", port)


def test_a_missing_package_is_named(tmp_path):
    code = (
        "import sys; sys.modules['uvicorn'] = None; sys.argv = ['samestep', 'watch', '.']; "
        "from samestep.cli import main; sys.exit(main())"
    )
    command = [sys.executable, "-c", code]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert 'pip install "samestep[watch]"' in ended.stderr


def test_two_locations_one_without_a_run(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
    write(tmp_path / "a" / "x", started())
    with serving(tmp_path / "a", tmp_path / "b") as served:
        assert [run["id"] for run in served.json("/api/runs")["runs"]] == ["a/x"]
