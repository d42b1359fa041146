"""A world over torch.distributed: gloo for host memory, NCCL for GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.comm.base import Sizes, World
from samestep.comm.rendezvous import Rendezvous
from samestep.comm.shared_memory import share
from samestep.comm.status import FORMING, mismatched_calls, no_response

# A row is a message to all other workers: the length of its data, `what`, and the data.
LENGTH_BYTES = 8
WHAT_BYTES = 200
HEAD_BYTES = LENGTH_BYTES + WHAT_BYTES
ROW_BYTES = 1024  # of the first row for each `what`; later rows are as long as needed
KEPT_ROW_BYTES = 64 << 10  # the longest row whose length and tables are kept for the next one
LATE = 0.95  # of the timeout: a later error is the backend's timeout
# renamed in torch 2.13
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Distributed(World):
    """A world over torch.distributed's default process group; hosts share memory over a mesh."""

    def __init__(self, rendezvous: Rendezvous, *, cuda: bool) -> None:
        self.rank, self.size, self.hosts = rendezvous.rank, rendezvous.size, rendezvous.hosts
        self.status = rendezvous.status
        self._mesh = rendezvous.mesh
        self._row_bytes: dict[str, int] = {}  # by `what`, if not `ROW_BYTES`
        self._tables: dict[int, Tensor] = {}  # by row size
        self._turn = 0
        self._failure = ""
        self._timeout_seconds = rendezvous.timeout_seconds
        with self._waiting(FORMING):
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=rendezvous.store,
                rank=self.rank,
                world_size=self.size,
                timeout=timedelta(seconds=self._timeout_seconds),
            )

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Explain a backend error; all further calls fail immediately, as in a mesh."""
        if self._failure:
            raise no_response(self.rank, what, self._failure)
        self._failure = f"an earlier call failed, while {what}"
        started = time.monotonic()
        with self.status.waiting(what):
            try:
                yield
            except RuntimeError as error:
                timed_out = time.monotonic() - started >= LATE * self._timeout_seconds
                reason = str(error).strip().partition("\n")[0]
                failure = self.status.explain(what, reason, timed_out=timed_out)
                if self._mesh is not None:
                    self._mesh.close()  # the others of this host may be waiting there
                raise failure from error
        self._failure = ""

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Exchange rows as long as the last ones for `what`; if too short, exchange again."""
        size = self._row_bytes.get(what, ROW_BYTES)
        while True:
            rows = self._all_gather_rows(_row(data, what, size), what).numpy()
            calls = [row[LENGTH_BYTES:HEAD_BYTES].tobytes() for row in rows]
            for rank, call in enumerate(calls):
                if call != calls[self.rank]:
                    other_what = call.rstrip(b"\0").decode(errors="replace")
                    raise mismatched_calls(self.rank, what, rank, other_what)
            ends = [HEAD_BYTES + _length(row[:LENGTH_BYTES].tobytes()) for row in rows]
            if max(ends) <= size:
                self.barriers += 1
                return [row[HEAD_BYTES:end].tobytes() for row, end in zip(rows, ends, strict=True)]
            size = 2 * max(ends)
            if size <= KEPT_ROW_BYTES:
                self._row_bytes[what] = size

    def _all_gather_rows(self, own: Tensor, what: str) -> Tensor:
        """Return every worker's row by rank, to be read before the next call.

        The workers of a host share a table of rows; the first of them fetches those of other hosts.
        Two tables are used in turn: a worker that writes to one has passed the barriers of the
        other, and so have all workers that read this one before.
        """
        tables = self._tables.get(len(own))
        if tables is None:
            tables = self.shared(2 * self.size * len(own))[0].view(2, self.size, len(own))
            if len(own) <= KEPT_ROW_BYTES:
                self._tables[len(own)] = tables
        table = tables[self._turn]
        self._turn = 1 - self._turn
        table[self.rank] = own
        self.barrier_on_host(what)
        if self.rank == self.host.start:
            with self._waiting(what):
                self._fetch_rows(table)
        self.barrier_on_host(what)
        return table

    def _fetch_rows(self, table: Tensor) -> None:
        """Fetch the rows of other hosts in ceil(log2(hosts)) rounds (Bruck et al. 1997).

        gloo's ring takes one round per host. Here each host sends all rows that it has to one other
        host, so each round doubles the number of hosts whose rows a host has.
        """
        hosts, own, have = self.hosts, self.hosts.index(self.host), 1
        while have < len(hosts):
            new = min(have, len(hosts) - have)
            left, right = hosts[own - have], hosts[(own + have) % len(hosts)]
            sent = torch.cat([_rows(table, hosts[(own + n) % len(hosts)]) for n in range(new)])
            targets = [_rows(table, hosts[(own + have + n) % len(hosts)]) for n in range(new)]
            sending = dist.isend(sent, left.start)
            rows = table.new_empty(sum(map(len, targets)), table.shape[1])
            dist.recv(rows, right.start)
            for target, received in zip(targets, rows.split(list(map(len, targets))), strict=True):
                target.copy_(received)
            # None only for workers outside of the group: there are none
            sending.wait()  # type: ignore[union-attr]
            have += new

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        """Gather lengths on all ranks, then the bytes on rank 0."""
        own_length = len(data).to_bytes(LENGTH_BYTES, "little")
        lengths = list(map(_length, self.all_gather_bytes(own_length, what)))
        own = _padded(data, max(lengths))
        rows = [torch.empty_like(own) for _ in lengths] if self.rank == 0 else None
        with self._waiting(what):
            dist.gather(own, rows, dst=0)
        if rows is None:
            return None
        return [row[:n].numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]

    def all_gather(self, out: Tensor, own: Tensor, what: str) -> None:
        with self._waiting(what):
            _all_gather_flat(out, own)
        self.barriers += 1

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, own: Tensor, own_sizes: Sizes, what: str
    ) -> None:
        self.begin_all_to_all(out, out_sizes, own, own_sizes, what)()

    def begin_all_to_all(
        self, out: Tensor, out_sizes: Sizes, own: Tensor, own_sizes: Sizes, what: str
    ) -> Callable[[], None]:
        with self._waiting(what):
            work = dist.all_to_all_single(out, own, list(out_sizes), list(own_sizes), async_op=True)
        self.barriers += 1

        # keeps the memory alive until everything is sent
        def end(kept: Tensor = own) -> None:
            with self._waiting(what):
                work.wait()
            del kept

        return end

    def shared(self, nbytes: int) -> list[Tensor]:
        return super().shared(nbytes) if self._mesh is None else share(self._mesh, nbytes)

    def broadcast(self, tensor: Tensor, what: str) -> None:
        with self._waiting(what):
            dist.broadcast(tensor, src=0)

    def barrier(self, what: str) -> None:
        self.all_gather_bytes(b"", what)

    def barrier_on_host(self, what: str) -> None:
        if self._mesh is not None:
            with self._waiting(what):
                self._mesh.barrier(what)

    def close(self) -> None:
        self.status.close()  # first, so that workers that find this one gone know why
        if self._mesh is not None:
            self._mesh.close()
        dist.destroy_process_group()


def _row(data: bytes, what: str, size: int) -> Tensor:
    """Return a worker's row, uint8 [size], with as much data as fits."""
    what_bytes = what.encode()[:WHAT_BYTES].ljust(WHAT_BYTES, b"\0")
    head = len(data).to_bytes(LENGTH_BYTES, "little") + what_bytes
    return _padded(head + data[: size - HEAD_BYTES], size)


def _padded(data: bytes, size: int) -> Tensor:
    if size == 0:
        return torch.empty(0, dtype=torch.uint8)
    return torch.frombuffer(bytearray(data.ljust(size, b"\0")), dtype=torch.uint8)


def _length(data: bytes) -> int:
    return int.from_bytes(data, "little")


def _rows(table: Tensor, host: range) -> Tensor:
    return table[host.start : host.stop]
