"""The page's server. All its data comes from records; it writes only notes.

GET /, /page/NAME          the page and its files
GET /api/runs              {"runs": [{id, name, state, started, updated, step, epoch, workers,
                           lanes, share, principal}], "faults": [{location, text}]};
                           faults: unreadable locations
GET /api/run?id=           progress, scalars, images, histograms, workers, parts, events, config,
                           sinks
GET /api/curve?id=&name=   {x, value, low, high, smooth, runs, spans, points, exact}; optional:
                           from=, to=, points=1000, smooth=0, x=step|time|samples
GET /api/group?id=&id=&name= the same for the mean over runs, with their number: runs; x=time is
                           seconds since the start of each
GET /api/histogram?id=&name= {"items": [{step, bins, nan, inf, -inf}]}; bins: [edge, count]
GET /api/timing?id=        {x, parts, workers, quantiles}: seconds; optional: from=, to=, points=500
GET /api/system?id=        {"curves": [{host, name, x, value}]}, x: Unix time; optional: from=, to=
GET /api/log?id=&worker=   {"workers", "size", "cut", "lines"}: the end of a worker's log; optional:
                           search=words, have=SIZE (lines is null if that is still its size)
GET /api/image?id=&number= an image; its first bytes determine its media type
PUT /api/notes?id=         replace {"tags", "note"} of "version", the file's `noted` in /api/run
GET /api/changes           server-sent events: {"ids": [...]} of the runs that changed, empty if
                           faults changed, at most one per 0.75 s

States are running, stalled, silent, stopped, finished and failed. Times are Unix seconds. Nonfinite
numbers are null. The status is 400 for an invalid parameter, 404 for an unknown run, curve or
image, and 409 for notes that cannot be written.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any, Final, TypeVar

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from samestep.comm.admission import (
    ACCEPTED_AT_ONCE,
    connections_within,
    first_of_busiest,
    limit_errors,
)
from samestep.errors import RecordError
from samestep.watch.curves import AXES
from samestep.watch.groups import mean_curve
from samestep.watch.runs import Changes, Views
from samestep.watch.security import NOTES, Guard, Query, read_body
from samestep.watch.view import View

Result = TypeVar("Result")

PAGE: Final = Path(__file__).parent / "page"
MEDIA_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".png": "image/png",
    ".txt": "text/plain",
}
CURVE: Final = ("id", "name", "from", "to", "points", "smooth", "x")  # parameters
MOST_RUNS: Final = 1000  # of a group
MOST_POINTS: Final = 20_000
MOST_SPANS: Final = 5_000
MOST_IMAGES: Final = 10**9
MOST_WORKERS: Final = 10**6
MOST_BYTES: Final = 10**15
LONGEST_NOTES: Final = 2**17  # bytes of a request
LARGEST_SMOOTHING: Final = 0.999
REQUEST_SECONDS: Final = 10.0  # for a request to arrive
MOST_WAITING: Final = 100  # connections without a complete request
TRUSTED_PROXIES: Final = "FORWARDED_ALLOW_IPS"  # uvicorn's variable: their X-Forwarded-For is used


class Connection(H11Protocol):
    """A connection whose requests must arrive completely within `REQUEST_SECONDS`.

    At most `MOST_WAITING` may be without a complete one: one more closes the oldest of the address
    that has most of them. uvicorn would wait forever, and count them as requests.
    """

    limit: asyncio.TimerHandle | None = None  # of the wait for the next request

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_request()
        connections: set[Any] = self.connections
        waiting = [each for each in connections if each.awaits_request]
        if len(waiting) > connections_within(MOST_WAITING):
            waiting.sort(key=lambda each: each.limit.when())
            addresses = {each: str(each.client and each.client[0]) for each in waiting}
            first_of_busiest(addresses).transport.abort()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.limit is not None:
            self.limit.cancel()

    @property
    def awaits_request(self) -> bool:
        """Whether a part of the next request, or all of it, is still missing."""
        is_missing = self.conn.their_state in {h11.IDLE, h11.SEND_BODY}
        return is_missing and not self.transport.is_closing()

    def _await_request(self) -> None:
        if self.limit is not None:
            self.limit.cancel()
        self.limit = self.loop.call_later(REQUEST_SECONDS, self._end_wait)

    def _end_wait(self) -> None:
        if self.awaits_request:
            self.transport.abort()


class Server(uvicorn.Server):
    """A server that ends the streams of changes first; otherwise it would wait for them."""

    def __init__(self, config: uvicorn.Config, changes: Changes) -> None:
        super().__init__(config)
        self._changes = changes

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        limit_errors()
        await super().startup(sockets)
        for listener in sockets or ():
            listener.listen(socket.SOMAXCONN)  # more than asyncio accepts at once

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._changes.stop()
        super().handle_exit(sig, frame)


def serve(
    views: Views, listener: socket.socket, host: str, token: str | None, *, read_only: bool
) -> None:
    """Serve the page on an open socket until SIGINT or SIGTERM."""
    changes, port = Changes(views), listener.getsockname()[1]
    config = uvicorn.Config(
        make_app(views, changes, token=token, host=host, port=port, read_only=read_only),
        access_log=False,
        backlog=ACCEPTED_AT_ONCE,
        http=Connection,
        limit_concurrency=500,
        log_level="warning",
        # anyone could claim another address, with more attempts to log in
        proxy_headers=TRUSTED_PROXIES in os.environ,
        server_header=False,
        timeout_graceful_shutdown=1,
        ws="none",
    )
    Server(config, changes).run(sockets=[listener])


def make_app(
    views: Views,
    changes: Changes,
    *,
    token: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
    read_only: bool = False,
) -> Starlette:
    """Return the application that serves `views`, with a `token` only to requests that have it.

    `read_only` refuses to write notes.
    """
    files = {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in MEDIA_TYPES}

    def page(request: Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return PlainTextResponse("the page has no such file", 404)
        media_type, headers = MEDIA_TYPES[Path(name).suffix], {"Cache-Control": "no-cache"}
        return Response(files[name], media_type=media_type, headers=headers)

    @asynccontextmanager
    async def follow(_: Starlette) -> AsyncIterator[None]:
        changes.start()
        yield
        changes.stop()
        await changes.join()

    api = Api(views, changes, read_only=read_only)
    data = (api.runs, api.table, api.run, api.curve, api.group, api.histogram, api.timing)
    app = Starlette(
        routes=[
            Route("/", page),
            Route("/page/{name}", page),
            *(
                Route(f"/api/{endpoint.__name__}", endpoint)
                for endpoint in (*data, api.system, api.log, api.image, api.changes)
            ),
            Route(NOTES, api.notes, methods=["PUT"]),
        ],
        middleware=[Middleware(Guard, token=token, host=host, port=port, read_only=read_only)],
        lifespan=follow,
    )
    app.router.redirect_slashes = False
    return app


class Api:
    """The endpoints under /api. Starlette calls all but `notes` and `changes` in threads."""

    def __init__(self, views: Views, changes: Changes, *, read_only: bool) -> None:
        self._views, self._changes, self._read_only = views, changes, read_only

    def runs(self, request: Request) -> Response:
        Query(request.query_params)
        faults = [{"location": place, "text": text} for place, text in self._changes.faults.items()]
        return _json({"runs": [view.row() for view in self._views.values()], "faults": faults})

    def table(self, request: Request) -> Response:
        Query(request.query_params)
        return _json({"runs": [view.table_row() for view in self._views.values()]})

    def run(self, request: Request) -> Response:
        summary = self._view(Query(request.query_params, "id")).summary()
        if self._read_only:
            summary["locked"] = summary["locked"] or "this server was started with --read-only"
        return _json(summary)

    def curve(self, request: Request) -> Response:
        query = Query(request.query_params, *CURVE)
        curve = partial(self._view(query).curve, *_drawn(query))
        return _json(_find(curve, "the run has no such scalar"))

    def group(self, request: Request) -> Response:
        query = Query(request.query_params, *CURVE, repeated="id")
        views = [self._view_of(run) for run in query.texts("id", MOST_RUNS)]
        curve = partial(mean_curve, views, *_drawn(query))
        return _json(_find(curve, "one of the runs has no such scalar"))

    def histogram(self, request: Request) -> Response:
        query = Query(request.query_params, "id", "name")
        view, name = self._view(query), query.text("name")
        return _json(_find(lambda: view.histogram(name), "the run has no such histogram"))

    def timing(self, request: Request) -> Response:
        query = Query(request.query_params, "id", "from", "to", "points")
        start, end = query.number("from"), query.number("to")
        points = query.count("points", 500, MOST_SPANS)
        return _json(self._view(query).timing(start, end, points))

    def system(self, request: Request) -> Response:
        query = Query(request.query_params, "id", "from", "to")
        start, end = query.number("from"), query.number("to")
        return _json(self._view(query).system(start, end))

    def log(self, request: Request) -> Response:
        query = Query(request.query_params, "id", "worker", "search", "have")
        view, worker = self._view(query), query.count("worker", None, MOST_WORKERS)
        have, search = query.count("have", 0, MOST_BYTES), query.text("search", "")
        try:
            return _json(view.log(worker, search, have))
        except RecordError:
            return PlainTextResponse("the log cannot be read", 404)

    def image(self, request: Request) -> Response:
        query = Query(request.query_params, "id", "number")
        view, number = self._view(query), query.count("number", None, MOST_IMAGES)
        try:
            kind, size, chunks = _find(lambda: view.open_image(number), "the run has no such image")
        except RecordError:
            return PlainTextResponse("the image is missing or cannot be read", 404)
        if kind is None:
            return PlainTextResponse("the file is not a PNG, JPEG, WebP or GIF", 415)
        if request.method == "HEAD":
            chunks = iter(())
        return StreamingResponse(chunks, media_type=kind, headers={"Content-Length": str(size)})

    async def notes(self, request: Request) -> Response:
        view = self._view(Query(request.query_params, "id"))
        body = await read_body(request, LONGEST_NOTES)
        if body is None:
            return PlainTextResponse(f"notes must have at most {LONGEST_NOTES} bytes", 413)
        try:
            fields = json.loads(body)
            tags, note, version = (fields[name] for name in ("tags", "note", "version"))
            await run_in_threadpool(view.write_notes, tags, note, version)
        except RecordError as error:
            return PlainTextResponse(str(error), 409)
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            text = ascii(str(error))[:200]
            return PlainTextResponse(f"expected tags, note and version: {text}", 400)
        self._changes.publish({view.id})
        return Response(status_code=204)

    async def changes(self, request: Request) -> Response:
        Query(request.query_params)
        if self._changes.is_full:
            return PlainTextResponse("too many open pages; close one", 503)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(self._changes.stream(), media_type="text/event-stream")

    def _view(self, query: Query) -> View:
        return self._view_of(query.text("id"))

    def _view_of(self, run: str) -> View:
        return _find(lambda: self._views[run], "there is no such run")


def _drawn(query: Query) -> tuple[str, float | None, float | None, int, float, str]:
    """Return what to draw of a curve: its scalar, range, number of points, smoothing and axis."""
    smooth = query.number("smooth", 0.0, LARGEST_SMOOTHING) or 0.0
    points = query.count("points", 1000, MOST_POINTS)
    name, start, end = query.text("name"), query.number("from"), query.number("to")
    return name, start, end, points, smooth, query.choice("x", AXES)


def _find(action: Callable[[], Result], missing: str) -> Result:
    try:
        return action()
    except KeyError:
        raise HTTPException(404, missing) from None


def _json(value: Any) -> Response:
    # ASCII, so that a lone surrogate in a name can be encoded
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return Response(text, media_type="application/json")
