"""The server's process: from the first request to Ctrl-C."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import uvicorn

from samestep.watch.changes import Changes
from samestep.watch.server import make_app

if TYPE_CHECKING:
    import socket
    from types import FrameType

    from samestep.watch.view import Views

GRACE_SECONDS: Final = 1  # for answers that are under way when the server is stopped
MOST_CONNECTIONS: Final = 500


class Server(uvicorn.Server):
    """A server that ends those who listen to changes first, or it would wait for them."""

    def __init__(self, config: uvicorn.Config, changes: Changes) -> None:
        super().__init__(config)
        self._changes = changes

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._changes.end()
        super().handle_exit(sig, frame)


def serve(views: Views, listener: socket.socket, host: str, token: str | None) -> None:
    """Serve the page at an open socket until SIGINT or SIGTERM, which then acts as it does without a server."""
    changes = Changes(views)
    config = uvicorn.Config(
        make_app(views, changes, token=token, host=host, port=listener.getsockname()[1]),
        access_log=False,
        http="h11",
        limit_concurrency=MOST_CONNECTIONS,
        log_level="warning",
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
        ws="none",
    )
    Server(config, changes).run(sockets=[listener])
