from __future__ import annotations

import asyncio

import httpx
import pytest
from starlette.datastructures import QueryParams
from starlette.exceptions import HTTPException

from samestep.watch import security
from samestep.watch.security import HEADERS, LONGEST_PARAMETER, LOOPBACK_NAMES, Query
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
    file.chmod(0o600)
    with serving(run, "--token-file", file, "--host", "0.0.0.0") as served:
        yield served.address.replace("0.0.0.0", "127.0.0.1").rstrip("/")


@pytest.mark.parametrize("path", ["/", "/page/main.js", "/api/runs", "/api/run", "/none"])
def test_every_response_has_the_headers(open_server, path):
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
def test_other_methods_are_rejected(open_server, method):
    for path in ("/", "/api/runs", "/none", *["/api/notes"] * (method != "PUT")):
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
def test_without_a_token_names_of_other_sites_are_rejected(open_server, host):
    response = open_server.get("/api/runs", headers={"Host": host})
    assert response.status_code in {400, 421}
    assert "runs" not in response.text


JSON = {"Content-Type": "application/json"}


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"Origin": "http://evil.example"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),  # another program's page on this machine
        ({"Origin": "http://localhost"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": ""}, 403),
        ({"Origin": "http://evil.example", "Host": "evil.example"}, 421),  # DNS rebinding
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-site"}, 403),
        ({"Content-Type": "text/plain"}, 403),
        ({"Content-Type": "application/x-www-form-urlencoded"}, 403),
    ],
)
def test_only_the_page_itself_may_write_notes(open_server, run, headers, status):
    body = b'{"tags": [], "note": "from elsewhere", "version": null}'
    response = open_server.client.put("/api/notes?id=.", content=body, headers={**JSON, **headers})
    assert response.status_code == status
    assert not (run / "notes.json").exists()


def test_notes_are_written_from_the_page_and_with_the_token_only(address, open_server, run):
    body = {"tags": [], "note": "", "version": None}
    path = "/api/notes?id=."
    same_origin = {"Origin": address, "Sec-Fetch-Site": "same-origin"}
    assert (
        httpx.put(f"{address}{path}", json=body, headers=same_origin, trust_env=False).status_code
        == 401
    )
    wrong = {**same_origin, "Authorization": "Bearer wrong"}
    assert (
        httpx.put(f"{address}{path}", json=body, headers=wrong, trust_env=False).status_code == 401
    )
    assert not (run / "notes.json").exists()
    with httpx.Client(base_url=address, trust_env=False) as client:
        client.post("/login", data={"token": TOKEN})
        evil = {"Origin": "http://127.0.0.1:1"}  # gets the cookie, since ports share it
        assert client.put(path, json=body, headers=evil).status_code == 403
        assert client.put(path, json=body, headers=same_origin).status_code == 204
    (run / "notes.json").unlink()
    same_origin = {"Origin": open_server.address.rstrip("/")}
    assert open_server.client.put(path, json=body, headers=same_origin).status_code == 204
    (run / "notes.json").unlink()


@pytest.mark.parametrize(
    "host",
    [*sorted(LOOPBACK_NAMES - {"::1"}), "[::1]", "LOCALHOST:1", "127.0.0.1:8080", "[::1]:80"],
)
def test_loopback_names_are_accepted_with_any_port(open_server, host):
    assert open_server.get("/api/runs", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/page/main.js",
        "/api/runs",
        "/api/changes",
        "/none",
        "/login",
        f"/api/runs?token={TOKEN}",
    ],
)
def test_requests_without_the_token_are_rejected(address, path):
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
def test_wrong_authorization_headers_are_rejected(address, value):
    response = httpx.get(
        f"{address}/api/runs", headers={"Authorization": value.encode("latin-1")}, trust_env=False
    )
    assert response.status_code == 401


def test_the_token_in_a_header(address):
    for scheme in ("Bearer", "bearer"):
        headers = {"Authorization": f"{scheme} {TOKEN}"}
        assert httpx.get(f"{address}/api/runs", headers=headers, trust_env=False).status_code == 200


def test_the_form_exchanges_the_token_for_a_cookie(address):
    with httpx.Client(base_url=address, trust_env=False) as client:
        page = client.get("/")
        assert (page.status_code, page.headers["cache-control"]) == (401, "no-store")
        assert '<form method="post" action="login">' in page.text
        assert "form-action 'self'" in page.headers["content-security-policy"]
        entrance = client.post("/login", data={"token": f"{TOKEN} "})
        assert (entrance.status_code, entrance.headers["location"]) == (303, "./")
        assert entrance.headers["cache-control"] == "no-store"
        cookie = entrance.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=strict" in cookie
        assert TOKEN not in cookie + entrance.text
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


def test_the_token_in_a_url_is_not_accepted(address):
    response = httpx.get(f"{address}/?token={TOKEN}", trust_env=False)
    assert response.status_code == 401
    assert "set-cookie" not in response.headers
    assert TOKEN not in response.text


def test_failed_attempts_are_limited(monkeypatch):
    monkeypatch.setattr(security, "FAILURE_SECONDS", 1e6)
    app = security.Guard(None, token=TOKEN, host="0.0.0.0", port=0)
    transport = httpx.ASGITransport(app, client=("10.0.0.9", 1))

    async def attack():
        async with httpx.AsyncClient(transport=transport, base_url="http://here") as client:
            for number in range(security.MOST_FAILURES // 2):
                wrong = await client.post("/login", data={"token": f"guess {number}"})
                assert wrong.status_code == 401
                assert "Wrong token" in wrong.text
                headers = {"Authorization": f"Bearer guess-{number}"}
                assert (await client.get("/api/runs", headers=headers)).status_code == 401
            late = await client.post("/login", data={"token": TOKEN})
            assert (late.status_code, int(late.headers["retry-after"]) > 1000) == (429, True)
            headers = {"Authorization": f"Bearer {TOKEN}"}
            assert (await client.get("/api/runs", headers=headers)).status_code == 429
        other = httpx.ASGITransport(app, client=("10.0.0.10", 1))
        async with httpx.AsyncClient(transport=other, base_url="http://here") as client:
            assert (await client.post("/login", data={"token": TOKEN})).status_code == 303
            assert (await client.post("/login", content=b"x" * 5000)).status_code == 413
            assert (await client.post("/api/runs", data={"token": TOKEN})).status_code == 405

    asyncio.run(attack())


def test_the_memory_of_failed_attempts_is_bounded():
    failures = security.Failures()
    for number in range(2 * security.MOST_ADDRESSES):
        failures.add(str(number))
    assert len(failures._times) == security.MOST_ADDRESSES


def test_with_a_token_any_host_name_is_accepted(address):
    headers = {"Authorization": f"Bearer {TOKEN}", "Host": "node7.cluster:7007"}
    assert httpx.get(f"{address}/api/runs", headers=headers, trust_env=False).status_code == 200


def query(text, *names):
    return Query(QueryParams(text), *names)


def test_valid_parameters():
    parameters = query("id=a%2Fb&from=-1.5&points=20&x=time", "id", "from", "to", "points", "x")
    assert parameters.text("id") == "a/b"
    assert (parameters.number("from"), parameters.number("to")) == (-1.5, None)
    assert parameters.count("points", 5, 100) == 20
    assert query("", "points").count("points", 5, 100) == 5
    assert parameters.choice("x", ("step", "time")) == "time"
    assert query("", "x").choice("x", ("step", "time")) == "step"


@pytest.mark.parametrize(
    "text", ["from=nan", "from=inf", "from=1e999", "from=", "from=1,5", "from=2", "from=-1"]
)
def test_invalid_numbers(text):
    with pytest.raises(HTTPException, match="must be a number from 0 to 1"):
        query(text, "from").number("from", 0, 1)


@pytest.mark.parametrize(
    "text",
    [
        "points=-1",
        "points=1.5",
        "points=101",
        "points=",
        "points=1e1",
        "points=²",
        "points=" + "9" * 4000,
    ],
)
def test_invalid_counts(text):
    with pytest.raises(HTTPException, match="must be an integer from 0 to 100"):
        query(text, "points").count("points", 5, 100)


def test_other_invalid_parameters():
    with pytest.raises(HTTPException, match="id is missing"):
        query("", "id").text("id")
    with pytest.raises(HTTPException, match="number is missing"):
        query("", "number").count("number", None, 9)
    with pytest.raises(HTTPException, match="expected id or name, got 'path'"):
        query("path=x", "id", "name")
    with pytest.raises(HTTPException, match="expected no parameters, got 'path'"):
        query("path=x")
    with pytest.raises(HTTPException, match="id must be given only once"):
        query("id=a&id=b", "id")
    with pytest.raises(HTTPException, match="x must be step or time, got 'value'"):
        query("x=value", "x").choice("x", ("step", "time"))
    with pytest.raises(HTTPException, match=f"at most {LONGEST_PARAMETER}"):
        query(f"id={'x' * (LONGEST_PARAMETER + 1)}", "id")


def test_errors_repeat_only_a_part_of_the_parameter():
    with pytest.raises(HTTPException) as refused:
        query(f"{'<' * 3000}=1")
    assert len(str(refused.value)) < 100
