"""Requests to the page's server, and the rules for its answers."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from urllib.parse import quote, unquote

from starlette.applications import Starlette

from samestep.comm.signing import derive
from samestep.watch.runs import Changes, Views
from samestep.watch.security import HEADERS
from samestep.watch.server import PAGE, make_app
from tests.fuzz import mutate
from tests.fuzz.records import BREAK_OUT, NAMES, SECRET, write_notes, write_run
from tests.fuzz.target import Target

TOKEN = "a-token-of-many-letters"
PORT = 7007
PASS = derive(TOKEN, "watch cookie").hex()
STATUSES = {200, 400, 401, 403, 404, 405, 409, 413, 415, 421}
LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:[0-9]+)?", re.IGNORECASE)
METHODS = ("GET",) * 30 + ("HEAD", "HEAD", "POST", "PUT", "get", "TRACE", "")
NOTES = "/api/notes"
GIVEN = {"tags": ["a"], "note": BREAK_OUT, "version": None}  # of no file, so nothing is written
API = ("/api/run", "/api/curve", "/api/timing", "/api/system", "/api/log", "/api/image")
PATHS = (
    *API * 3, NOTES, "/", "/api/runs", "/api/changes", "/page/main.js", "/page/../server.py",
    "/page//etc/passwd", "/api/runs/", "/none", "/login",
)  # fmt: skip
PARAMETERS = {
    "id": (*["one"] * 30, ".", "../one", "two", ""),
    "name": (*NAMES, "score", "norm", BREAK_OUT),
    "worker": (*"0000", "1", "1000000"),
    "search": ("line", "<b>", ""),
    "have": ("0", "1"),
    "number": (*"0000", *"1111", *"23456"),
    "from": ("0", "2", "-1e308", "1700000000"),
    "to": ("2", "1e308", "1e-320"),
    "points": ("0", "1", "2", "20000", "5000"),
    "smooth": ("0", "0.9", "0.999"),
    "x": ("step", "time"),
    "token": (TOKEN,),
    "path": ("../secret.png",),
}
ASKED = {
    "/api/run": ("id",),
    "/api/curve": ("id", "name", "from", "to", "points", "smooth", "x"),
    "/api/timing": ("id", "from", "to", "points"),
    "/api/system": ("id", "from", "to"),
    "/api/log": ("id", "worker", "search", "have"),
    "/api/image": ("id", "number"),
    NOTES: ("id",),
    "/": ("token",),
}
HEADER_VALUES = {
    "host": ("localhost", "LOCALHOST:7007", "127.0.0.1:7007", "[::1]:7007", "localhost.example",
    "localhost@example", "example"),
    "authorization": (f"Bearer {TOKEN}", f"bearer  {TOKEN}", f"Basic {TOKEN}", "Bearer",
    f"Bearer {PASS}"),
    "cookie": (f"samestep-{PORT}={PASS}", f'a=b; samestep-{PORT}="{PASS}"',
    f"samestep-{PORT}={TOKEN}", "samestep-1=x", ";=;"),
    "range": ("bytes=0-1",),
    "x-forwarded-host": ("localhost",),
    "origin": ("http://localhost", "http://example", "null"),
    "sec-fetch-site": ("same-origin", "cross-site"),
    "content-type": (*["application/json"] * 3, "text/plain"),
    "content-length": ("99",),
}  # fmt: skip
SIGNATURES = {
    "image/png": b"\x89PNG\r\n",
    "image/jpeg": b"\xff\xd8",
    "image/gif": b"GIF8",
    "image/webp": b"RIFF",
}
GOOD_HEADERS = [("host", "localhost"), ("authorization", f"Bearer {TOKEN}")]


@dataclass(frozen=True)
class Asked:
    """A parsed HTTP request."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    form: bytes  # the body

    def scope(self) -> dict[str, Any]:
        """Return the request as uvicorn passes it to an application."""
        return {
            "type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1", "scheme": "http", "root_path": "",
            "method": self.method, "path": unquote(self.path), "raw_path": self.path.encode(),
            "query_string": self.query,
            "headers": self.headers, "client": ("127.0.0.1", 1), "server": ("127.0.0.1", PORT),
            "state": {},
        }  # fmt: skip


def targets(folder: Path) -> list[Target]:
    """Return targets for the page's server, with and without a token; runs are under `folder`."""
    loop = cache(asyncio.new_event_loop)
    page = {path.read_bytes() for path in PAGE.iterdir()}

    def served(token: str | None) -> Target:
        def make(random: Random) -> tuple[Views, Starlette, Asked]:
            run = write_run(folder / "runs" / "one", random if random.random() < 0.5 else None)
            write_notes(run, random)
            views = Views(folder / "runs")
            return views, make_app(views, Changes(views), token=token, port=PORT), _request(random)

        def read(case: tuple[Views, Starlette, Asked]) -> None:
            views, app, asked = case
            views.scan(views.locations[0])
            views["one"].refresh()
            status, headers, body = loop().run_until_complete(_answer(app, asked))
            _check(asked, status, headers, body, page)
            assert str(folder).encode() not in body
            assert status in {401, 405, 421} or _may_pass(asked, token), (
                "an unauthorized request was answered"
            )

        return Target("page" if token is None else "token", make, read, (), is_slow=True)

    return [served(None), served(TOKEN)]


def _request(random: Random) -> Asked:
    path = random.choice(PATHS)
    names = [
        name
        for name in ASKED.get(path, ())
        if name in {"id", "name", "number"} or random.random() < 0.3
    ]
    if random.random() < 0.2:
        names.append(random.choice(list(PARAMETERS)))
    pairs = [
        f"{name}={quote(_likely(random, PARAMETERS[name]), errors='replace')}" for name in names
    ]
    query, path = (
        "&".join(pairs).encode(),
        quote(
            path if random.random() < 0.9 else mutate.text(random, path),
            errors="replace",
            safe="/.",
        ),
    )
    if random.random() < 0.1:
        query = mutate.of_bytes(random, query)
    headers = random.choices((GOOD_HEADERS, []), (3, 1))[0] + [
        (name, _likely(random, HEADER_VALUES[name]))
        for name in random.sample(list(HEADER_VALUES), random.choice((0, 0, 1, 3)))
    ]
    encoded = [
        (name.encode(), re.sub(rb"[\0\r\n]", b"", value.encode(errors="surrogatepass")))
        for name, value in headers
    ]
    method, form = random.choice(METHODS), b"token=wrong"
    if path == NOTES and random.random() < 0.9:
        method, form = "PUT", json.dumps(GIVEN).encode()
        encoded.append((b"content-type", b"application/json"))
    if random.random() < 0.5:
        form = mutate.of_bytes(random, form)
    return Asked(method, path, re.sub(rb"[^\x21-\x7e]", b"", query), encoded, form)


def _likely(random: Random, values: tuple[str, ...]) -> str:
    return random.choice(values) if random.random() < 0.9 else mutate.text(random, *values)


async def _answer(app: Starlette, asked: Asked) -> tuple[int, Mapping[str, str], bytes]:
    """Return status, headers and body; of the change stream, only the first message."""
    messages: list[Any] = []
    is_gone = asyncio.Event()

    form = iter([{"type": "http.request", "body": asked.form}])

    async def receive() -> dict[str, Any]:
        if message := next(form, None):
            return message
        await is_gone.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        messages.append(message)
        if asked.path == "/api/changes" and message.get("body"):
            is_gone.set()

    await app(asked.scope(), receive, send)
    start, *rest = messages
    headers = [
        (name.decode("latin-1").lower(), value.decode("latin-1"))
        for name, value in start["headers"]
    ]
    assert all(re.fullmatch(r"[^\0\r\n]*", text) for header in headers for text in header)
    return start["status"], dict(headers), b"".join(message.get("body", b"") for message in rest)


def _check(
    asked: Asked, status: int, headers: Mapping[str, str], body: bytes, page: set[bytes]
) -> None:
    """Check that an answer is a documented one and reveals nothing about the machine."""
    assert status in STATUSES, status
    assert all(headers.get(name.lower()) == value for name, value in HEADERS.items())
    assert b"Traceback" not in body
    assert SECRET not in body
    if asked.method == "HEAD":  # uvicorn removes the body
        return
    kind = headers["content-type"].partition(";")[0]
    if status != 200:
        if kind == "text/html":
            assert status == 401
            assert body.startswith(b"<!doctype html>")
            assert b'<form method="post" action="login">' in body
            return
        assert kind == "text/plain"
        assert len(body) < 300, "it repeats much of the request"
    elif kind == "application/json":
        json.loads(body, parse_constant=_refuse)
    elif kind.startswith("image/"):
        assert body.startswith(SIGNATURES[kind])
        assert int(headers["content-length"]) == len(body)
    elif kind != "text/event-stream":
        assert body in page or b"http-equiv" in body


def _refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def _may_pass(asked: Asked, token: str | None) -> bool:
    """Return whether the request names the right host, or has the secret in a valid place."""
    headers = [(name.decode(), value.decode("latin-1")) for name, value in asked.headers]
    if token is None:
        hosts = [value for name, value in headers if name == "host"]
        return len(hosts) == 1 and LOOPBACK.fullmatch(hosts[0]) is not None
    secrets = {"authorization": token, "cookie": PASS}
    return any(name in secrets and secrets[name] in value for name, value in headers)
