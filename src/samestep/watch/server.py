"""The page's server. It only reads, and everything it tells comes from records.

    GET /, /page/NAME          the page and its files GET /api/runs              {"runs": [{id,
    name, state, started, updated, step, epoch, workers, lanes}],
                                "faults": [{location, text}]}, the places that cannot be read now
    GET /api/run?id=           all of a run but its curves: progress, scalars, images, workers,
    parts, events, config, sinks GET /api/curve?id=&name=   {x, value, low, high, smooth, points,
    exact}; further from=, to=, points=1000, smooth=0, x=step|time GET /api/timing?id=        {x,
    parts, workers}: seconds a step; further from=, to=, points=500 GET /api/image?id=&number= an
    image, as the type that its first bytes tell GET /api/changes           server-sent events:
    {"ids": [...]} of the runs that changed, none where faults did, at most one in 0.75 s

States are running, stopped, finished, failed and silent; times are Unix seconds; a number that is
not finite is null. A wrong parameter is answered with 400 and what was expected, an unknown run,
curve or image with 404, both as plain text.
"""

from __future__ import annotations

import json
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from samestep.errors import RecordError
from samestep.watch.curves import AXES, Request
from samestep.watch.pictures import recognized
from samestep.watch.query import Query, WrongQueryError
from samestep.watch.security import Guard

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from starlette import requests

    from samestep.watch.changes import Changes
    from samestep.watch.view import View, Views

Answer = TypeVar("Answer")

PAGE: Final = Path(__file__).parent / "page"
MEDIA_TYPES: Final = {
    ".css": "text/css",
    ".html": "text/html",
    ".js": "text/javascript",
    ".png": "image/png",
    ".svg": "image/svg+xml",
    ".txt": "text/plain",
}
MOST_POINTS: Final = 20_000
MOST_SPANS: Final = 5_000
MOST_IMAGES: Final = 10**9
LARGEST_SMOOTHING: Final = 0.999


def make_app(
    views: Views,
    changes: Changes,
    *,
    token: str | None = None,
    host: str = "127.0.0.1",
    port: int = 0,
) -> Starlette:
    """Return the application that serves `views` and tells `changes`, to be called as `host` and `port`; with a `token`, to who has it."""
    answers = Answers(views, changes)
    files = {path.name: path.read_bytes() for path in PAGE.iterdir() if path.suffix in MEDIA_TYPES}

    def page(request: requests.Request) -> Response:
        name = request.path_params.get("name", "index.html")
        if name not in files:
            return PlainTextResponse("the page has no such file", 404)
        return Response(
            files[name],
            media_type=MEDIA_TYPES[Path(name).suffix],
            headers={"Cache-Control": "no-cache"},
        )

    @asynccontextmanager
    async def follow(_: Starlette) -> AsyncIterator[None]:
        changes.begin()
        yield
        changes.end()
        await changes.wait()

    routes = [
        Route("/", page),
        Route("/page/{name}", page),
        Route("/api/runs", answers.runs),
        Route("/api/run", answers.run),
        Route("/api/curve", answers.curve),
        Route("/api/timing", answers.timing),
        Route("/api/image", answers.image),
        Route("/api/changes", answers.changes),
    ]
    app = Starlette(
        routes=routes,
        middleware=[Middleware(Guard, token=token, host=host, port=port)],
        exception_handlers={WrongQueryError: _wrong_query, HTTPException: _not_found},
        lifespan=follow,
    )
    app.router.redirect_slashes = False
    return app


class Answers:
    """What is asked of runs. Starlette calls all but `changes` in threads."""

    def __init__(self, views: Views, changes: Changes) -> None:
        self._views, self._changes = views, changes

    def runs(self, request: requests.Request) -> Response:
        Query(request.query_params)
        faults = [{"location": place, "text": text} for place, text in self._changes.faults.items()]
        return _json({"runs": [view.row() for view in self._views.values()], "faults": faults})

    def run(self, request: requests.Request) -> Response:
        query = Query(request.query_params, "id")
        return _json(self._view(query).summary())

    def curve(self, request: requests.Request) -> Response:
        query = Query(request.query_params, "id", "name", "from", "to", "points", "smooth", "x")
        asked = Request(
            query.number("from", None),
            query.number("to", None),
            query.count("points", 1000, MOST_POINTS),
            query.number("smooth", 0.0, 0.0, LARGEST_SMOOTHING) or 0.0,
            query.choice("x", AXES),
        )
        view, name = self._view(query), query.text("name")
        return _json(_found(lambda: view.curve(name, asked), "the run has no scalar of that name"))

    def timing(self, request: requests.Request) -> Response:
        query = Query(request.query_params, "id", "from", "to", "points")
        start, end, points = (
            query.number("from", None),
            query.number("to", None),
            query.count("points", 500, MOST_SPANS),
        )
        return _json(self._view(query).timing(start, end, points))

    def image(self, request: requests.Request) -> Response:
        query = Query(request.query_params, "id", "number")
        view, number = self._view(query), query.count("number", None, MOST_IMAGES)
        image = _found(lambda: view.image(number), "the run has no image of that number")
        try:
            size, pieces = view.source.open_image(image.path)
            kind, pieces = recognized(pieces)
        except RecordError:
            return PlainTextResponse("the image is not there, or cannot be read", 404)
        if kind is None:
            return PlainTextResponse("the file is no PNG, JPEG, WebP or GIF", 415)
        if request.method == "HEAD":
            pieces = iter(())
        return StreamingResponse(pieces, media_type=kind, headers={"Content-Length": str(size)})

    async def changes(self, request: requests.Request) -> Response:
        Query(request.query_params)
        if self._changes.is_full:
            return PlainTextResponse("too many listen already; close a page", 503)
        if request.method == "HEAD":
            return Response(media_type="text/event-stream")
        return StreamingResponse(self._changes.stream(), media_type="text/event-stream")

    def _view(self, query: Query) -> View:
        id = query.text("id")  # noqa: A001  the page's word
        return _found(lambda: self._views[id], "there is no run of that id")


def _found(action: Callable[[], Answer], otherwise: str) -> Answer:
    try:
        return action()
    except KeyError:
        raise HTTPException(404, otherwise) from None


def _json(value: Any) -> Response:
    # As ASCII, so that a lone surrogate in a name is written as it came.
    return Response(
        json.dumps(value, allow_nan=False, separators=(",", ":")), media_type="application/json"
    )


def _wrong_query(_: requests.Request, error: Exception) -> Response:
    return PlainTextResponse(str(error), 400)


def _not_found(_: requests.Request, error: Exception) -> Response:
    status, text = (
        (error.status_code, error.detail)
        if isinstance(error, HTTPException)
        else (404, "there is no such page")
    )
    return PlainTextResponse(text, status)
