"""A step that computes alone while TCP carries as many bytes as its gradients have, both ways.

Unlike an ideal link, TCP needs the CPUs that compute. As soon as autograd has completed enough
gradients, the first worker of each host sends that many bytes from a thread, and another thread
receives those of the other host. Nothing is copied or added, and the optimizer waits for nothing.
"""

from __future__ import annotations

import os
import socket
import time
from queue import SimpleQueue
from threading import Semaphore, Thread

import torch
from torch import Tensor

from benchmarks.contenders.stopwatch import Stopwatch
from benchmarks.contenders.with_plain_loop import train_parts
from benchmarks.jobs import Job

PART_BYTES = 1 << 20
CONNECT_SECONDS = 60


def train(job: Job, *, itemsize: int = 4) -> dict[str, float]:
    """Train on a part of each batch; return the speed of all workers with such a connection."""
    parts = job.build()
    watch = Stopwatch(job)
    if os.environ["LOCAL_RANK"] == "0":
        sizes = [one.numel() * itemsize for one in parts.model.parameters()]
        watch = NetworkStopwatch(job, connect(), sum(sizes))
        for parameter, size in zip(parts.model.parameters(), sizes, strict=True):
            watch.send_with(parameter, size)
    train_parts(parts, watch, job.batch_size // int(os.environ["WORLD_SIZE"]), fused=True)
    return watch.figures()


def connect() -> socket.socket:
    """Connect the first workers of two hosts."""
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if os.environ["RANK"] == "0":
        with socket.create_server(address) as server:
            server.settimeout(CONNECT_SECONDS)
            connection = server.accept()[0]
    else:
        deadline = time.monotonic() + CONNECT_SECONDS
        while True:
            try:
                connection = socket.create_connection(address)
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
    connection.settimeout(None)
    return connection


class NetworkStopwatch(Stopwatch):
    """Ends a step once `nbytes` were sent and received."""

    def __init__(self, job: Job, connection: socket.socket, nbytes: int) -> None:
        super().__init__(job)
        self._connection, self._nbytes = connection, nbytes
        self._missing, self._ready = nbytes, 0  # bytes of gradients
        self._parts: SimpleQueue[int] = SimpleQueue()
        self._ends = Semaphore(0), Semaphore(0)
        for work in (self._send, self._receive):
            Thread(target=work, daemon=True).start()

    def send_with(self, parameter: torch.nn.Parameter, size: int) -> None:
        """Send `size` bytes when autograd has completed the parameter's gradient."""

        def complete(_: Tensor) -> None:
            self._missing, self._ready = self._missing - size, self._ready + size
            if self._ready >= PART_BYTES or not self._missing:
                self._parts.put(self._ready)
                self._ready = 0

        parameter.register_post_accumulate_grad_hook(complete)

    def step(self, loss: torch.Tensor | float) -> bool:
        """Count a step."""
        for end in self._ends:
            end.acquire()
        self._missing = self._nbytes
        return super().step(loss)

    def _send(self) -> None:
        data = memoryview(bytes(self._nbytes))
        while True:
            left = self._nbytes
            while left:
                size = self._parts.get()
                self._connection.sendall(data[:size])
                left -= size
            self._ends[0].release()

    def _receive(self) -> None:
        data = memoryview(bytearray(self._nbytes))
        while True:
            left = data
            while left:
                received = self._connection.recv_into(left, len(left), socket.MSG_WAITALL)
                if not received:
                    return
                left = left[received:]
            self._ends[1].release()
