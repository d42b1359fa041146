"""Checks of requests: authorization, headers for browsers, and query parameters.

Without a token the server listens on loopback only, and answers only requests for a loopback name.
A page of another site whose name resolves to this machine (DNS rebinding) sends that name as Host.
With a token any name is accepted, because such a page has no token. A form exchanges the token for
a cookie, so that the token is in no URL, history or log.
"""

from __future__ import annotations

import math
import re
import time
from typing import Final
from urllib.parse import parse_qs

from starlette.datastructures import MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from samestep.comm.signing import derive, is_equal

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LONGEST_PARAMETER: Final = 4096  # characters
LOGIN: Final = "/login"
NOTES: Final = "/api/notes"  # the only path that writes
LONGEST_FORM: Final = 4096  # bytes
MOST_FAILURES: Final = 10  # from an address, within `FAILURE_SECONDS`
FAILURE_SECONDS: Final = 60.0
MOST_ADDRESSES: Final = 1000  # with failures; for one more, the oldest is dropped
_HOST: Final = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/@\s]+))(?::\d+)?")
_FORM: Final = """\
<!doctype html><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>samestep: log in</title>
<form method="post" action="login">
<p><label>Token <input type="password" name="token" required autofocus
autocomplete="current-password"></label> <button>Log in</button></p>
<p role="alert">{text}</p>
</form>
"""


class Guard:
    """Middleware that passes on only permitted requests, and adds `HEADERS` to every response.

    A request that writes must be a PUT, which no form can send, and a browser's must come from the
    page itself: not from another site, nor from another port of this machine.
    """

    def __init__(
        self, app: ASGIApp, *, token: str | None, host: str, port: int, read_only: bool = False
    ) -> None:
        self._app = app
        self._read_only = read_only
        self._token = token
        self._names = LOOPBACK_NAMES | {host.lower()}
        self._cookie = f"samestep-{port}"  # browsers share cookies between ports
        self._failures = Failures()
        self._pass = derive(token or "", "watch cookie").hex()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in {**HEADERS, "Cache-Control": "no-store"}.items():
                    headers.setdefault(name, value)
            await send(message)

        request = Request(scope, receive)
        response = self._respond(request)
        if response is None and request.method == "POST":
            response = await self._log_in(request)
        await (response or self._app)(scope, receive, send_with_headers)

    def _respond(self, request: Request) -> Response | None:
        """Return the response to a request that must not pass, else None."""
        is_login = self._token is not None and request.scope["path"] == LOGIN
        is_notes = not self._read_only and request.scope["path"] == NOTES
        writing = {"POST"} if is_login else {"PUT"} if is_notes else set[str]()
        if request.method not in {"GET", "HEAD"} | writing:
            text = "this address is read-only: expected GET or HEAD"
            return PlainTextResponse(text, 405, {"Allow": "GET, HEAD"})
        if not self._is_host_allowed(request):
            text = "expected a loopback name as host, such as localhost or 127.0.0.1"
            return PlainTextResponse(text, 421)
        has_pass = is_equal(request.cookies.get(self._cookie, ""), self._pass)
        if self._token is not None and not has_pass:
            response = self._authorize(request, self._token)
            if response is not None:
                return response
        if request.method == "PUT" and not _is_from_page(request):
            text = "expected JSON from the page itself; a proxy must pass on the Host header"
            return PlainTextResponse(text, 403)
        return None

    def _authorize(self, request: Request, token: str) -> Response | None:
        """Return the response to a request without a cookie, None if it may pass."""
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        is_bearer, is_login = scheme.lower() == "bearer", request.method == "POST"
        seconds = self._failures.seconds_left(_address(request))
        if seconds and (is_bearer or is_login):
            text = f"too many failed attempts; try again in {seconds} s"
            return PlainTextResponse(text, 429, {"Retry-After": str(seconds)})
        if is_login or (is_bearer and is_equal(secret.strip(), token)):
            return None
        if is_bearer:
            self._failures.add(_address(request))
        if request.scope["path"] in {"/", LOGIN}:
            return _form("")
        text = "a token is required: log in at /, or send Authorization: Bearer ..."
        return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})

    async def _log_in(self, request: Request) -> Response:
        """Exchange the token for a cookie."""
        body = await read_body(request, LONGEST_FORM)
        if body is None:
            return PlainTextResponse("the form is too long", 413)
        token = parse_qs(body.decode(errors="replace")).get("token", [""])[0].strip()
        if not is_equal(token, self._token or ""):
            self._failures.add(_address(request))
            return _form("Wrong token.")
        response = RedirectResponse("./", 303)
        secure = request.scope["scheme"] == "https"
        response.set_cookie(
            self._cookie, self._pass, httponly=True, samesite="strict", secure=secure
        )
        return response

    def _is_host_allowed(self, request: Request) -> bool:
        if self._token is not None:
            return True
        hosts = request.headers.getlist("host")
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        return match is not None and (match[1] or match[2]).lower() in self._names


class Failures:
    """Failed attempts to log in, by address, in seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._times: dict[str, list[float]] = {}

    def add(self, address: str) -> None:
        """Count a failed attempt."""
        times = self._times.pop(address, [])
        self._times[address] = [*times, time.monotonic()][-MOST_FAILURES:]
        if len(self._times) > MOST_ADDRESSES:
            del self._times[next(iter(self._times))]

    def seconds_left(self, address: str) -> int:
        """Return the seconds until an address may try again, 0 if it may now."""
        times = self._times.get(address, [])
        if len(times) < MOST_FAILURES:
            return 0
        return max(0, math.ceil(times[0] + FAILURE_SECONDS - time.monotonic()))


async def read_body(request: Request, limit: int) -> bytes | None:
    """Return the body of a request, None if it has more than `limit` bytes."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > limit:
            return None
    return body


def _is_from_page(request: Request) -> bool:
    """Return whether a request is JSON, and no page but the server's own sent it."""
    origins, hosts = (request.headers.getlist(name) for name in ("origin", "host"))
    is_own = not origins or (len(hosts) == 1 and origins[0].partition("://")[2] == hosts[0])
    site = request.headers.get("sec-fetch-site", "same-origin")
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    return len(origins) <= 1 and is_own and site == "same-origin" and kind == "application/json"


def _address(request: Request) -> str:
    return request.client.host if request.client else ""


def _form(text: str) -> Response:
    return HTMLResponse(_FORM.format(text=text), 401, {"WWW-Authenticate": "Bearer"})


class Query:
    """The query parameters of a request. Only `names` are valid, and no value is used as a path.

    Only the `repeated` parameter may have several values.

    Raises `HTTPException` with status 400 for any other parameter and for invalid values.
    """

    def __init__(self, params: QueryParams, *names: str, repeated: str = "") -> None:
        self._params = params
        for name, value in params.multi_items():
            if name not in names:
                valid = " or ".join(names) or "no parameters"
                raise HTTPException(400, f"unknown parameter: expected {valid}, got {_short(name)}")
            if len(value) > LONGEST_PARAMETER:
                limit = f"at most {LONGEST_PARAMETER} characters"
                raise HTTPException(400, f"{name} must have {limit}, got {len(value)}")
            if name != repeated and len(params.getlist(name)) > 1:
                raise HTTPException(400, f"{name} must be given only once")

    def text(self, name: str, default: str | None = None) -> str:
        """Return a parameter, which is required if the default is None."""
        if name in self._params:
            return self._params[name]
        if default is None:
            raise HTTPException(400, f"{name} is missing")
        return default

    def texts(self, name: str, most: int) -> list[str]:
        """Return the values of a parameter, from 1 to `most`."""
        values = self._params.getlist(name)
        if 0 < len(values) <= most:
            return values
        raise HTTPException(400, f"{name} must be given 1 to {most} times, got {len(values)}")

    def number(self, name: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        """Return a finite number from `low` to `high`, None if the parameter is missing."""
        if name not in self._params:
            return None
        try:
            value = float(self._params[name])
        except ValueError:
            value = math.nan
        if math.isfinite(value) and low <= value <= high:
            return value
        bounds = f" from {low:g} to {high:g}" if math.isfinite(high) else ""
        text = _short(self._params[name])
        raise HTTPException(400, f"{name} must be a number{bounds}, got {text}")

    def count(self, name: str, default: int | None, high: int) -> int:
        """Return an integer from 0 to `high`; the parameter is required if the default is None."""
        text = self.text(name) if default is None else self._params.get(name, str(default))
        is_short = len(text) <= len(str(high))
        if is_short and text.isascii() and text.isdigit() and int(text) <= high:
            return int(text)
        raise HTTPException(400, f"{name} must be an integer from 0 to {high}, got {_short(text)}")

    def choice(self, name: str, choices: tuple[str, ...]) -> str:
        """Return one of several words; the first is the default."""
        value = self._params.get(name, choices[0])
        if value in choices:
            return value
        raise HTTPException(400, f"{name} must be {' or '.join(choices)}, got {_short(value)}")


def _short(text: str) -> str:
    return ascii(text if len(text) <= 40 else f"{text[:40]}...")
