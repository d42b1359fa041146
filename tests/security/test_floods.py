"""Floods of the live page: it responds to others meanwhile, and prints nothing."""

from __future__ import annotations

import socket
from collections import Counter
from contextlib import ExitStack, closing, contextmanager, suppress

import pytest

from samestep.watch import server as module
from samestep.watch.runs import open_views
from samestep.watch.server import serve
from tests.watch.serving import SECONDS, serving
from tests.worlds import FORK

FILES = 256
PARTS = {  # of a request
    "silent": b"",
    "headers": b"GET / HTTP/1.1\r\nHost: localh",
    "body": b"POST /login HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nto",
    "second request": b"GET /page/none HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HTTP/1.1\r\n",
}


@pytest.fixture(scope="module")
def token(tmp_path_factory):
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text("a token of the page\n".replace(" ", "-"))
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("part", [pytest.param("silent", marks=pytest.mark.long), "headers"])
def test_half_requests_do_not_keep_others_out(part, tmp_path, token):
    """There are more of them than files and than requests at once."""
    limit = ("sh", "-c", f'ulimit -n {FILES}; exec "$@"', "sh")
    with ExitStack() as exits:
        served = exits.enter_context(serving(tmp_path, "--token-file", token, prefix=limit))
        url = served.client.base_url
        for _ in range(2 * FILES):
            peer = exits.enter_context(closing(socket.create_connection((url.host, url.port), 60)))
            with suppress(ConnectionError):  # refused
                peer.sendall(PARTS[part])
        statuses = {served.get("/").status_code for _ in range(5)}
        served.process.terminate()
        assert (statuses, served.process.communicate(timeout=SECONDS)[1]) == ({401}, "")


@contextmanager
def page(tmp_path, seconds):
    """Yield the address of a page whose requests must arrive within so many seconds."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def run():
            module.REQUEST_SECONDS = seconds
            serve(open_views(str(tmp_path)), listener, "127.0.0.1", "token", read_only=True)

        process = FORK.Process(target=run)
        process.start()
        try:
            yield listener.getsockname()
        finally:
            process.terminate()
            process.join()


@pytest.mark.long
def test_a_request_must_arrive_in_time(tmp_path):
    with page(tmp_path, 0.3) as address:
        for part in PARTS.values():
            with socket.create_connection(address, SECONDS) as peer, suppress(ConnectionError):
                peer.sendall(part)
                while peer.recv(4096):  # until the server closes it
                    pass


@pytest.mark.parametrize("trusted", [None, pytest.param("127.0.0.1", marks=pytest.mark.long)])
def test_another_claimed_address_gives_no_more_attempts(trusted, tmp_path, token, monkeypatch):
    if trusted:
        monkeypatch.setenv(module.TRUSTED_PROXIES, trusted)
    with serving(tmp_path, "--token-file", token) as served:
        statuses = Counter(
            served.get(
                "/api/runs",
                headers={"Authorization": "Bearer wrong", "X-Forwarded-For": f"10.0.0.{number}"},
            ).status_code
            for number in range(15)
        )
    assert statuses == ({401: 15} if trusted else {401: 10, 429: 5})
