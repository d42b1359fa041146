"""Checks of requests: authorization, headers for browsers, and query parameters.

Without a token the server listens on loopback only, and answers only requests for a loopback name.
A page of another site whose name resolves to this machine (DNS rebinding) sends that name as Host.
With a token any name is accepted, because such a page has no token.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import re
from typing import Final

from starlette.datastructures import MutableHeaders, QueryParams
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
        "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
LONGEST_PARAMETER: Final = 4096  # characters
_HOST: Final = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/@\s]+))(?::\d+)?")
# After a link from another site, a redirect would arrive without the SameSite=Strict cookie.
_ENTRANCE: Final = (
    '<!doctype html><meta http-equiv="refresh" content="0; url=./"><title>samestep</title>'
)


class Guard:
    """Middleware that passes on only permitted requests, and adds `HEADERS` to every response."""

    def __init__(self, app: ASGIApp, *, token: str | None, host: str, port: int) -> None:
        self._app = app
        self._token = token
        self._names = LOOPBACK_NAMES | {host.lower()}
        self._cookie = f"samestep-{port}"  # browsers share cookies between ports
        self._pass = hashlib.sha256(f"samestep watch {token}".encode()).hexdigest()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        response = self._respond(Request(scope))
        await (response or self._app)(scope, receive, send_with_headers)

    def _respond(self, request: Request) -> Response | None:
        """Return the response to a request that must not pass, else None."""
        if request.method not in {"GET", "HEAD"}:
            text = "this server is read-only: expected GET or HEAD"
            return PlainTextResponse(text, 405, {"Allow": "GET, HEAD"})
        if not self._is_host_allowed(request):
            text = "expected a loopback name as host, such as localhost or 127.0.0.1"
            return PlainTextResponse(text, 421)
        if self._token is None or self._is_authorized(request, self._token):
            return None
        if request.url.path == "/" and _equal(request.query_params.get("token", ""), self._token):
            response = HTMLResponse(_ENTRANCE)
            response.set_cookie(self._cookie, self._pass, httponly=True, samesite="strict")
            return response
        text = "a token is required: open /?token=... once, or send Authorization: Bearer ..."
        return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})

    def _is_host_allowed(self, request: Request) -> bool:
        if self._token is not None:
            return True
        hosts = request.headers.getlist("host")
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        return match is not None and (match[1] or match[2]).lower() in self._names

    def _is_authorized(self, request: Request, token: str) -> bool:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        is_bearer = scheme.lower() == "bearer" and _equal(secret.strip(), token)
        return is_bearer or _equal(request.cookies.get(self._cookie, ""), self._pass)


def _equal(given: str, expected: str) -> bool:
    """Compare in a time that does not depend on where the strings differ."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), expected.encode())


class Query:
    """The query parameters of a request. Only `names` are valid, and no value is used as a path.

    Raises `HTTPException` with status 400 for any other parameter and for invalid values.
    """

    def __init__(self, params: QueryParams, *names: str) -> None:
        self._params = params
        for name, value in params.multi_items():
            if name not in names:
                known = " or ".join(names) or "no parameters"
                raise HTTPException(400, f"unknown parameter: expected {known}, got {_short(name)}")
            if len(value) > LONGEST_PARAMETER:
                most = f"at most {LONGEST_PARAMETER} characters"
                raise HTTPException(400, f"{name} must have {most}, got {len(value)}")
            if len(params.getlist(name)) > 1:
                raise HTTPException(400, f"{name} must be given only once")

    def text(self, name: str) -> str:
        """Return a required parameter."""
        if name not in self._params:
            raise HTTPException(400, f"{name} is missing")
        return self._params[name]

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
