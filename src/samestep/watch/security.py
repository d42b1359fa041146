"""Who may read, and what a browser may do with it.

Without a token the server listens on loopback only, and answers only those who call it by a
loopback name: a page of another site that has its own name point here (DNS rebinding) sends that
name as Host. With a token any name will do, since such a page has none.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from typing import TYPE_CHECKING, Final

from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse

if TYPE_CHECKING:
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES: Final = frozenset({"localhost", "127.0.0.1", "::1"})
HEADERS: Final = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; frame-ancestors 'none'; "
        "base-uri 'none'; form-action 'none'"
    ),
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_HOST: Final = re.compile(r"(?:\[([0-9a-fA-F:.]+)\]|([^:\[\]/@\s]+))(?::\d+)?")
# A redirect would come without the cookie where a link on another site led here: SameSite=Strict
# looks at who began.
_ENTRANCE: Final = (
    '<!doctype html><meta http-equiv="refresh" content="0; url=./"><title>samestep</title>'
)


class Guard:
    """Lets requests pass to an application that only read and come from who may; gives every answer the headers above."""

    def __init__(self, app: ASGIApp, *, token: str | None, host: str, port: int) -> None:
        self._app = app
        self._token = token
        self._names = LOOPBACK_NAMES | {host.lower()}
        self._cookie = f"samestep-{port}"  # cookies do not tell ports apart
        self._pass = (
            "" if token is None else hashlib.sha256(f"samestep watch {token}".encode()).hexdigest()
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                headers.update(HEADERS)
                headers.setdefault("Cache-Control", "no-store")
            await send(message)

        answer = self._answer(Request(scope))
        await (self._app if answer is None else answer)(scope, receive, send_with_headers)

    def _answer(self, request: Request) -> Response | None:
        """Return what is answered here, None for what may pass."""
        if request.method not in {"GET", "HEAD"}:
            return PlainTextResponse(
                "this page only reads: expected GET or HEAD", 405, {"Allow": "GET, HEAD"}
            )
        if not self._is_called_rightly(request):
            return PlainTextResponse(
                "expected to be called by a loopback name, such as localhost or 127.0.0.1", 421
            )
        if self._token is None or self._has_pass(request):
            return None
        if request.url.path == "/" and _equal(request.query_params.get("token", ""), self._token):
            response = HTMLResponse(_ENTRANCE)
            response.set_cookie(self._cookie, self._pass, httponly=True, samesite="strict")
            return response
        text = "a token is needed: open /?token=... with it once, or send it as Authorization: Bearer ..."
        return PlainTextResponse(text, 401, {"WWW-Authenticate": "Bearer"})

    def _is_called_rightly(self, request: Request) -> bool:
        if self._token is not None:
            return True
        hosts = request.headers.getlist("host")
        match = _HOST.fullmatch(hosts[0]) if len(hosts) == 1 else None
        return match is not None and (match[1] or match[2]).lower() in self._names

    def _has_pass(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        bears = scheme.lower() == "bearer" and _equal(given.strip(), self._token or "")
        return bears or _equal(request.cookies.get(self._cookie, ""), self._pass)


def _equal(given: str, expected: str) -> bool:
    """Compare in a time that tells nothing of where they differ."""
    return hmac.compare_digest(given.encode(errors="surrogatepass"), expected.encode())
