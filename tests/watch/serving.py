"""The page's server in its own process."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import httpx

Result = TypeVar("Result")

SECONDS = 240.0


def until(condition: Callable[[], Result], pause: float = 0.02) -> Result:
    """Wait until a condition is true, and return its result."""
    deadline = time.monotonic() + SECONDS
    while not (result := condition()):
        assert time.monotonic() < deadline, "timed out"
        time.sleep(pause)
    return result


class Served:
    """A running server: its process, its address, and a client."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self.process = process
        self.address = address
        self.client = httpx.Client(base_url=address, trust_env=False, timeout=SECONDS)

    def get(self, path: str, **options) -> httpx.Response:
        return self.client.get(path, **options)

    def json(self, path: str, **parameters):
        response = self.get(path, params=parameters)
        assert response.status_code == 200, response.text
        return response.json()


@contextmanager
def serving(*arguments: object, prefix: Sequence[str] = ()) -> Iterator[Served]:
    """Run `samestep watch` on a free port, after a `prefix`, and terminate it at the end."""
    command = [*prefix, sys.executable, "-m", "samestep", "watch", "--port", "0"]
    command += map(str, arguments)
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
            process.communicate(timeout=SECONDS)
