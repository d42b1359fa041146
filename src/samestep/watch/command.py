"""`samestep watch`: serve a page that shows runs as they go."""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from samestep.config import is_url
from samestep.errors import ConfigError

if TYPE_CHECKING:
    import argparse

DEFAULT_PORT: Final = 7007
LARGEST_PORT: Final = 65535
SHORTEST_TOKEN: Final = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `samestep watch` to its parser; `main` takes what it parses."""
    parser.add_argument(
        "locations",
        metavar="LOCATION",
        nargs="+",
        help="a run's folder, a folder of runs, or the URL of either",
    )
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        help="address to listen at (default: %(default)s); any but loopback needs a token",
    )
    parser.add_argument(
        "--port",
        type=int,
        default=DEFAULT_PORT,
        help="port to listen at (default: %(default)s); 0 takes any that is free",
    )
    parser.add_argument(
        "--token-file",
        type=Path,
        help="a file with one line: the secret that the page then asks for",
    )


def main(options: argparse.Namespace) -> int:
    """Run `samestep watch` until it is stopped. Raises `ConfigError` for wrong use, `RecordError` where a location cannot be read."""
    try:
        from samestep.watch.serving import serve
    except ImportError as error:
        raise ConfigError(
            f'samestep watch needs its server; expected it to be there: pip install "samestep[watch]" ({error})'
        ) from error
    from samestep.watch.view import open_views

    token = None if options.token_file is None else read_token(options.token_file)
    if token is None and not is_loopback(options.host):
        raise ConfigError(
            f"--host {options.host} was given, which others can reach; expected a loopback address, or --token-file FILE with a secret"
        )
    for location in options.locations:
        if not is_url(location) and not Path(location).is_dir():
            raise ConfigError(
                f"{location} was given; expected the folder of a run or of runs, or a URL; of a run to come, the folder above"
            )
    views = open_views(*options.locations)
    with _listen(options.host, options.port) as listener:
        hint = "" if token is None else f"?token=... with the line in {options.token_file}"
        address = _address(options.host, listener.getsockname()[1])
        sys.stdout.write(f"samestep: {_runs(len(views))} at {address}{hint}\n")
        sys.stdout.flush()
        serve(views, listener, options.host, token)
    return 0


def read_token(file: Path) -> str:
    """Return the token that is the only line of a file. Raises `ConfigError`."""
    try:
        token = file.read_text(encoding="ascii").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--token-file {file} was given, and cannot be read: {error}; expected a file of one line, in ASCII"
        ) from error
    if len(token) < SHORTEST_TOKEN or not token.isprintable() or " " in token:
        raise ConfigError(
            f"--token-file {file} was given; expected one line of at least {SHORTEST_TOKEN} characters without spaces: "
            "python -c 'import secrets; print(secrets.token_urlsafe())' makes one"
        )
    return token


def is_loopback(host: str) -> bool:
    """Tell whether a host name or address is this machine's own, which no other can reach."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _listen(host: str, port: int) -> socket.socket:
    if not 0 <= port <= LARGEST_PORT:
        raise ConfigError(f"--port {port} was given; expected 0 to {LARGEST_PORT}")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM
        )[0]
        with ExitStack() as exits:
            # With its protocol named, asyncio has answers sent at once; else their bodies would
            # wait until headers are acknowledged.
            listener = exits.enter_context(socket.socket(family, kind, protocol))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            listener.listen()
            exits.pop_all()
            return listener
    except OSError as error:
        reason = (
            os.strerror(error.errno)
            if isinstance(error.errno, int) and error.errno > 0
            else str(error)
        )
        raise ConfigError(
            f"--host {host} --port {port} was given, and nothing can listen there: {reason}; expected a free port, such as --port 0 finds"
        ) from error


def _address(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


def _runs(count: int) -> str:
    return f"{count} run{'s' * (count != 1)}" if count else "no run yet"
