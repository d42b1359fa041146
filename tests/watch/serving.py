"""A server of the page in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from collections.abc import Iterator

END_SECONDS = 20.0


class Served:
    """A server that listens: its process, its address, and a client of it."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address
        self.client = httpx.Client(base_url=address, trust_env=False, timeout=20.0)

    def get(self, path: str, **options) -> httpx.Response:
        return self.client.get(path, **options)

    def json(self, path: str, **parameters):
        response = self.get(path, params=parameters)
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def serving(*arguments: object) -> Iterator[Served]:
    """Run `samestep watch` with a port of its own, and end it as Ctrl-C does."""
    command = [sys.executable, "-m", "samestep", "watch", "--port", "0", *map(str, arguments)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        line = process.stdout.readline()
        address = next((word for word in line.split() if word.startswith("http")), None)
        if address is None:
            raise AssertionError(process.communicate()[1])
        served = Served(process, address.partition("?")[0])
        try:
            with served.client:
                yield served
        finally:
            process.terminate()
            process.communicate(timeout=END_SECONDS)
