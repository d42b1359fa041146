"""Workers that talk through torch.distributed: gloo for host memory, NCCL for GPUs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from samestep.comm.base import FORMING, World, another_call
from samestep.comm.rendezvous import Rendezvous
from samestep.comm.shared_memory import share
from samestep.comm.status import no_answer

LENGTH_BYTES = 8
WHAT_BYTES = 200  # of `what`, after the length
HEAD_BYTES = LENGTH_BYTES + WHAT_BYTES
# of the first message that a worker sends all others for a reason; later ones are as long as that
# needs
ROW_BYTES = 1024
# of the longest message whose length and tables are kept for the next one
KEPT_ROW_BYTES = 64 << 10
LATE = 0.95  # of the timeout: an error after that is the backend's own clock
# renamed in torch 2.13
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Distributed(World):
    """A world over torch.distributed's default process group; workers of one host share memory over their mesh."""

    def __init__(self, formation: Rendezvous, *, cuda: bool) -> None:
        self.rank, self.size, self.hosts = formation.rank, formation.size, formation.hosts
        self.status = formation.status
        self._mesh = formation.mesh
        self._row_bytes: dict[str, int] = {}  # by what is done, where it is not `ROW_BYTES`
        self._tables: dict[int, torch.Tensor] = {}  # by the bytes of a row
        self._turn = 0
        self._failure = ""
        self._timeout_seconds = formation.timeout_seconds
        timeout = timedelta(seconds=formation.timeout_seconds)
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        with self._answering(FORMING):
            dist.init_process_group(
                backend,
                store=formation.store,
                rank=self.rank,
                world_size=self.size,
                timeout=timeout,
            )

    @contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        """Wait for the others; turn a backend's error into one that says where this worker stood, and why they did not come.

        After a failure every further call fails at once, as those of a mesh do.
        """
        if self._failure:
            raise no_answer(self.rank, what, self._failure)
        self._failure = f"an earlier call failed, while {what}"
        started = time.monotonic()
        with self.status.waiting(what):
            try:
                yield
            except RuntimeError as error:
                late = time.monotonic() - started >= LATE * self._timeout_seconds
                failure = self.status.explain(
                    what, str(error).strip().partition("\n")[0], late=late
                )
                if self._mesh is not None:
                    self._mesh.close()  # where the others of this host may wait
                raise failure from error
        self._failure = ""

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """One exchange while messages are no longer than those of the same reason were; else another, long enough for all."""
        size = self._row_bytes.get(what, ROW_BYTES)
        while True:
            rows = self._all_gather_rows(_row(data, what, size), what).numpy()
            self._check_call([row[LENGTH_BYTES:HEAD_BYTES].tobytes() for row in rows], what)
            lengths = [int.from_bytes(row[:LENGTH_BYTES].tobytes(), "little") for row in rows]
            if max(lengths) + HEAD_BYTES <= size:
                self.meetings += 1
                return [
                    row[HEAD_BYTES : HEAD_BYTES + n].tobytes()
                    for row, n in zip(rows, lengths, strict=True)
                ]
            size = 2 * (max(lengths) + HEAD_BYTES)
            if size <= KEPT_ROW_BYTES:
                self._row_bytes[what] = size

    def _all_gather_rows(self, own: torch.Tensor, what: str) -> torch.Tensor:
        """Return every worker's row by rank, to be read before the next call.

        They lie in a table that the workers of a host share; the first of them fetches the rows of
        other hosts. There are two tables, used in turn: who writes its row to one has come to the
        meetings of the other, and so have all who read in this one before.
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
            with self._answering(what):
                self._fetch_rows(table)
        self.barrier_on_host(what)
        return table

    def _fetch_rows(self, table: torch.Tensor) -> None:
        """Fill the rows of other hosts in ceil(log2(hosts)) rounds, where gloo's ring takes a round for each (Bruck et al. 1997).

        In each round a host hands another one all rows that it has, so that it has those of twice
        as many hosts after it.
        """
        hosts, own, have = self.hosts, self.hosts.index(self.host), 1
        while have < len(hosts):
            new = min(have, len(hosts) - have)
            left, right = hosts[own - have], hosts[(own + have) % len(hosts)]
            sent = torch.cat([_rows(table, hosts[(own + n) % len(hosts)]) for n in range(new)])
            received = [_rows(table, hosts[(own + have + n) % len(hosts)]) for n in range(new)]
            sending = dist.isend(sent, left.start)
            rows = table.new_empty(sum(map(len, received)), table.shape[1])
            dist.recv(rows, right.start)
            for place, some in zip(
                received, rows.split([len(part) for part in received]), strict=True
            ):
                place.copy_(some)
            # it is None for workers outside of the group, and there are none
            sending.wait()  # type: ignore[union-attr]
            have += new

    def _check_call(self, told: Sequence[bytes], what: str) -> None:
        for rank, other in enumerate(told):
            if other != told[self.rank]:
                raise another_call(
                    self.rank, what, rank, other.rstrip(b"\0").decode(errors="replace")
                )

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        """Two collectives: lengths to all, then the bytes to rank 0."""
        lengths = [
            int.from_bytes(length, "little")
            for length in self.all_gather_bytes(len(data).to_bytes(LENGTH_BYTES, "little"), what)
        ]
        own = torch.zeros(max(lengths), dtype=torch.uint8)
        own[: len(data)] = (
            torch.frombuffer(bytearray(data), dtype=torch.uint8)
            if data
            else torch.empty(0, dtype=torch.uint8)
        )
        rows = [torch.empty_like(own) for _ in lengths] if self.rank == 0 else None
        with self._answering(what):
            dist.gather(own, rows, dst=0)
        return (
            None
            if rows is None
            else [row[:n].numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]
        )

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        with self._answering(what):
            _all_gather_flat(out, own)
        self.meetings += 1

    def all_to_all(
        self,
        out: torch.Tensor,
        out_sizes: Sequence[int],
        own: torch.Tensor,
        own_sizes: Sequence[int],
        what: str,
    ) -> None:
        self.begin_all_to_all(out, out_sizes, own, own_sizes, what)()

    def begin_all_to_all(
        self,
        out: torch.Tensor,
        out_sizes: Sequence[int],
        own: torch.Tensor,
        own_sizes: Sequence[int],
        what: str,
    ) -> Callable[[], None]:
        with self._answering(what):
            work = dist.all_to_all_single(out, own, list(out_sizes), list(own_sizes), async_op=True)
        self.meetings += 1

        # the sender's memory has to stay until all is sent
        def end(kept: torch.Tensor = own) -> None:
            with self._answering(what):
                work.wait()
            del kept

        return end

    def shared(self, nbytes: int) -> list[torch.Tensor]:
        return super().shared(nbytes) if self._mesh is None else share(self._mesh, nbytes)

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        with self._answering(what):
            dist.broadcast(tensor, src=0)

    def barrier(self, what: str) -> None:
        self.all_gather_bytes(b"", what)

    def barrier_on_host(self, what: str) -> None:
        if self._mesh is not None:
            with self._answering(what):
                self._mesh.meet(what)

    def close(self) -> None:
        self.status.close()  # first: those who find this worker gone then know why
        if self._mesh is not None:
            self._mesh.close()
        dist.destroy_process_group()


def _row(data: bytes, what: str, size: int) -> torch.Tensor:
    """Return what a worker tells all others, uint8 [size]: how long its data is, what it does, and as much of the data as fits."""
    row = bytearray(size)
    head = len(data).to_bytes(LENGTH_BYTES, "little") + what.encode()[:WHAT_BYTES].ljust(
        WHAT_BYTES, b"\0"
    )
    start = head + data[: size - HEAD_BYTES]
    row[: len(start)] = start
    return torch.frombuffer(row, dtype=torch.uint8)


def _rows(table: torch.Tensor, host: range) -> torch.Tensor:
    return table[host.start : host.stop]


class Staged(World):
    """A world of CPU workers that also takes tensors of GPUs, and copies them to the host and back. No memory is shared."""

    def __init__(self, world: World) -> None:
        self.rank, self.size, self.status = world.rank, world.size, world.status
        self.hosts = [range(rank, rank + 1) for rank in range(world.size)]
        self._world = world

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        self.meetings += 1
        return self._world.all_gather_bytes(data, what)

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        self.meetings += 1
        return self._world.gather_bytes(data, what)

    def all_gather(self, out: torch.Tensor, own: torch.Tensor, what: str) -> None:
        received = torch.empty(out.shape, dtype=out.dtype)
        self._world.all_gather(received, own.cpu(), what)
        out.copy_(received)
        self.meetings += 1

    def all_to_all(
        self,
        out: torch.Tensor,
        out_sizes: Sequence[int],
        own: torch.Tensor,
        own_sizes: Sequence[int],
        what: str,
    ) -> None:
        received = torch.empty(out.shape, dtype=out.dtype)
        self._world.all_to_all(received, out_sizes, own.cpu(), own_sizes, what)
        out.copy_(received)
        self.meetings += 1

    def broadcast(self, tensor: torch.Tensor, what: str) -> None:
        received = tensor.cpu()
        self._world.broadcast(received, what)
        tensor.copy_(received)
        self.meetings += 1

    def barrier(self, what: str) -> None:
        self._world.barrier(what)
        self.meetings += 1

    def close(self) -> None:
        self._world.close()
