from __future__ import annotations

import httpx
import pytest

from samestep.watch.security import HEADERS, LOOPBACK_NAMES
from tests.watch.serving import serving
from tests.watch.writing import started, write

TOKEN = "a-token-of-many-letters"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    write(folder, started())
    return folder


@pytest.fixture(scope="module")
def open_server(run):
    with serving(run) as served:
        yield served


@pytest.fixture(scope="module")
def address(run, tmp_path_factory):
    file = tmp_path_factory.mktemp("token") / "token"
    file.write_text(f"{TOKEN}\n")
    with serving(run, "--token-file", file, "--host", "0.0.0.0") as served:
        yield served.address.replace("0.0.0.0", "127.0.0.1").rstrip("/")


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/api/runs", "/api/run", "/none"])
def test_every_answer_has_the_headers(open_server, path):
    headers = open_server.get(path).headers
    assert HEADERS.items() <= {name: headers.get(name) for name in HEADERS}.items()
    assert (
        "default-src 'none'; script-src 'self'; style-src 'self'"
        in headers["content-security-policy"]
    )
    assert headers["cache-control"] == (
        "no-cache" if path in {"/", "/page/main.js"} else "no-store"
    )
    assert "server" not in headers


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "ODD"])
def test_nothing_but_reading(open_server, method):
    for path in ("/", "/api/runs", "/none"):
        response = open_server.client.request(method, path)
        assert (response.status_code, response.headers["allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:7007",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "127.0.0.2",
        "",
        "[::1",
        "a@localhost",
    ],
)
def test_without_a_token_a_name_of_another_site_gets_nothing(open_server, host):
    response = open_server.get("/api/runs", headers={"Host": host})
    assert response.status_code in {400, 421}
    assert "runs" not in response.text


@pytest.mark.parametrize(
    "host", [*(LOOPBACK_NAMES - {"::1"}), "[::1]", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:80"]
)
def test_a_loopback_name_will_do_at_any_port(open_server, host):
    assert open_server.get("/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/page/main.js",
        "/api/runs",
        "/api/changes",
        "/none",
        "/?token=wrong",
        "/?token=",
        f"/api/runs?token={TOKEN}",
    ],
)
def test_without_the_token_nothing(address, path):
    response = httpx.get(f"{address}{path}", trust_env=False)
    assert response.status_code == 401
    assert TOKEN not in response.text
    assert "set-cookie" not in response.headers


@pytest.mark.parametrize(
    "value",
    [
        "Bearer wrong",
        f"Basic {TOKEN}",
        f"Bearer {TOKEN}x",
        "Bearer",
        "",
        f"Bearer {TOKEN[:-1]}",
        "Bearer \xff",
    ],
)
def test_a_wrong_header_is_none(address, value):
    response = httpx.get(
        f"{address}/api/runs", headers={"Authorization": value.encode("latin-1")}, trust_env=False
    )
    assert response.status_code == 401


def test_the_token_as_a_header(address):
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {TOKEN}"}
        assert httpx.get(f"{address}/api/runs", headers=headers, trust_env=False).status_code == 200


def test_the_token_once_in_the_address_then_a_cookie(address):
    with httpx.Client(base_url=address, trust_env=False) as client:
        entrance = client.get("/", params={"token": TOKEN})
        assert (entrance.status_code, entrance.headers["cache-control"]) == (200, "no-store")
        cookie = entrance.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie + entrance.text
        assert "url=./" in entrance.text
        assert client.get("/").status_code == 200
        assert client.get("/api/runs").status_code == 200
        client.cookies.set(next(iter(client.cookies)), "0" * 64)
    name = cookie.partition("=")[0]
    assert (
        httpx.get(
            f"{address}/api/runs", headers={"Cookie": f"{name}={'0' * 64}"}, trust_env=False
        ).status_code
        == 401
    )


def test_with_a_token_any_name_will_do(address):
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "node7.cluster:7007"}
    assert httpx.get(f"{address}/api/runs", headers=headers, trust_env=False).status_code == 200
