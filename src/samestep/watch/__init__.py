"""`samestep watch`: serve a page that shows runs while they train."""

from __future__ import annotations

import argparse
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from samestep.errors import ConfigError
from samestep.host import counted, is_loopback, read_secret
from samestep.watch.runs import LOCATIONS, check_locations, open_views

LARGEST_PORT: Final = 65535
SHORTEST_TOKEN: Final = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep watch` to its parser."""
    parser.add_argument("locations", **LOCATIONS)
    host = "address to listen on (default: %(default)s); any but loopback requires a token"
    parser.add_argument("--host", default="127.0.0.1", help=host)
    port = "port to listen on (default: %(default)s); 0 picks a free one"
    parser.add_argument("--port", type=int, default=7007, help=port)
    file = "file with one line, readable only by you: the token with which users log in"
    parser.add_argument("--token-file", type=Path, help=file)
    read_only = "disallow editing of tags and notes"
    parser.add_argument("--read-only", action="store_true", help=read_only)


def main(options: argparse.Namespace) -> int:
    """Serve until stopped. Raises `ConfigError`, or `RecordError` for an unreadable location."""
    try:
        from samestep.watch.server import serve
    except ImportError as error:
        text = f'samestep watch requires its server ({error}): pip install "samestep[watch]"'
        raise ConfigError(text) from error
    token = None if options.token_file is None else read_token(options.token_file)
    if token is None and not is_loopback(options.host):
        raise ConfigError(
            f"--host must be a loopback address, got {options.host}; "
            "to let others connect, add --token-file FILE with a secret"
        )
    check_locations(options.locations)
    views = open_views(*options.locations)
    with _listen(options.host, options.port) as listener:
        host = f"[{options.host}]" if ":" in options.host else options.host
        hint = "" if token is None else f" (log in with the token in {options.token_file})"
        runs = counted(len(views), "run") if views else "no run yet"
        sys.stdout.write(f"samestep: {runs} at http://{host}:{listener.getsockname()[1]}/{hint}\n")
        sys.stdout.flush()
        serve(views, listener, options.host, token, read_only=options.read_only)
    return 0


def read_token(file: Path) -> str:
    """Return the token that is the only line of a file. Raises `ConfigError`."""
    token = read_secret(file, f"--token-file {file}")
    if len(token) < SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--token-file {file} must have one line of at least {SHORTEST_TOKEN} characters "
            "without spaces; create one with: "
            "python -c 'import secrets; print(secrets.token_urlsafe())'"
        )
    return token


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= LARGEST_PORT:
        raise ConfigError(f"--port must be from 0 to {LARGEST_PORT}, got {port}")
    try:
        endpoint = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        family, kind, protocol, _, address = endpoint
        with ExitStack() as exits:
            # asyncio sets TCP_NODELAY only on sockets with a protocol; without it, response bodies
            # would wait until the headers are acknowledged
            listener = exits.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            exits.pop_all()
            return listener
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno and error.errno > 0 else str(error)
        raise ConfigError(
            f"cannot listen on --host {host} --port {port}: {reason}; "
            "use a free port, or --port 0 to pick one"
        ) from error
