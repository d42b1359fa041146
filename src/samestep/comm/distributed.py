"""A world over torch.distributed: gloo for host memory, NCCL for GPUs.

CPU workers on up to 64 hosts with the same number of workers have a `Channel` to the worker in
their place on each other host.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from samestep.cluster import gloo_address
from samestep.comm.base import EMPTY, Arrival, Send, Sizes, World
from samestep.comm.channel import Channel, ChannelPartners, Listener, connect_partners
from samestep.comm.rendezvous import Rendezvous
from samestep.comm.shared_memory import share
from samestep.comm.status import FORMING, mismatched_calls, no_response
from samestep.comm.store import destroy_group, within
from samestep.torch_internals import set_group_timeout

# A row is a message to all other workers: the length of its data, `what`, and the data.
LENGTH_BYTES = 8
WHAT_BYTES = 200
HEAD_BYTES = LENGTH_BYTES + WHAT_BYTES
ROW_BYTES = 1024  # size of the first row for each `what`; grows as needed
KEPT_ROW_BYTES = 64 << 10  # the longest row whose length and tables are kept for the next one
# gloo sends one large message at a time; pieces in flight fill both directions of a link
PIECE_BYTES = 1 << 20
CHANNEL_PIECE_BYTES = 16 << 20  # each shows that a connection makes progress
TAGS = 1 << 20  # number of tags that transfers use in turn, from 1: rows have tag 0
# gloo then reads the addresses of all workers in one request, and each has the same few bytes
GLOO_FEW_REQUESTS = ("GLOO_ENABLE_STORE_V2_API", "GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")
# with more, a worker would have too many connections and threads: two of each per partner
MOST_HOSTS = 64
MESSAGE_BYTES = 16 << 10  # that two workers can send each other at once without a reader
SLACK_SECONDS = 1.0  # time after the backend's own timeout, if the store does not respond
LATE = 0.95  # fraction of the timeout after which an error counts as a timeout
KEPT_GROUPS: list[object] = []  # user-created groups kept alive until exit
# NCCL ends the process without a report when a call exceeds its own limit: after ours, in seconds
NCCL_EXTRA_SECONDS = 120.0
# renamed in torch 2.13
_all_gather_flat = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Distributed(World):
    """A world over torch.distributed; hosts share memory over a mesh.

    It makes the default process group, or a new group of it if one exists, which stays as it is.
    """

    def __init__(self, rendezvous: Rendezvous, *, cuda: bool) -> None:
        self.rank, self.size, self.hosts = rendezvous.rank, rendezvous.size, rendezvous.hosts
        self.machines = rendezvous.machines
        self.status, self.signing_key = rendezvous.status, rendezvous.signing_key
        self._mesh = rendezvous.mesh
        self._row_bytes: dict[str, int] = {}  # by `what`, if not `ROW_BYTES`
        self._tables: dict[int, Tensor] = {}  # by row_bytes: uint8 [turns, size, row_bytes]
        self._turn = 0
        self._transfers = 0
        self._channels: dict[int, Channel] = {}  # to the partners, by rank
        self._failure = ""
        self._timeout_seconds = rendezvous.timeout_seconds
        self.backend = "NCCL" if cuda else "gloo"
        self._cuda = cuda
        for name in GLOO_FEW_REQUESTS:
            os.environ.setdefault(name, "1")
        self._group: dist.ProcessGroup | None = None  # the default group
        backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
        timeout = timedelta(seconds=self._timeout_seconds)

        def form() -> None:
            if dist.is_initialized():  # the script made the default group
                self._group = dist.new_group(backend=backend, timeout=timeout)
            else:
                dist.init_process_group(
                    backend,
                    # the status of this worker uses the other connection
                    store=rendezvous.store.clone(),  # type: ignore[attr-defined]  # in no stub
                    rank=self.rank,
                    world_size=self.size,
                    timeout=timeout,
                )

        with self._waiting(FORMING):
            within(self._timeout_seconds + SLACK_SECONDS, form)
        own_group = self._group or dist.group.WORLD
        # others should notice when this worker leaves
        KEPT_GROUPS[:] = [group for group in KEPT_GROUPS if group is not own_group]
        if cuda:
            limit = timedelta(seconds=self._timeout_seconds + NCCL_EXTRA_SECONDS)
            set_group_timeout(own_group, torch.device("cuda"), limit)
        try:
            self._channels = self._open_channels()
            if self._channels:
                self.partners = ChannelPartners(self._channels, self._next_tag, self._arrival)
        except BaseException:
            self.close()
            raise

    def _open_channels(self) -> dict[int, Channel]:
        """Connect to the worker in the same place on each other host, if all hosts have one size.

        Addresses and secrets travel through the group. Returns nothing if a worker has no address:
        the group, which may have other means, then carries everything.
        """
        if self._cuda or len({*map(len, self.hosts)}) > 1 or not 1 < len(self.hosts) <= MOST_HOSTS:
            return {}
        partners = [host[self.rank - self.host.start] for host in self.hosts if host != self.host]
        with ExitStack() as exits:
            offer = listener = None
            last = self.hosts[-1].start  # from here on, workers only connect to others
            if self.rank < last:
                with suppress(OSError):
                    listener = exits.enter_context(Listener(gloo_address()))
                    offer = listener.offer
            offers = self.all_gather_json(offer, FORMING)
            if None in offers[:last]:
                return {}
            with self._waiting(FORMING):
                return connect_partners(
                    self.rank, partners, offers, listener, self._timeout_seconds
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
            except (RuntimeError, OSError) as error:
                if _is_of_gpu(error):
                    raise
                is_late = time.monotonic() - started >= LATE * self._timeout_seconds
                timed_out = is_late or isinstance(error, TimeoutError)
                reason = _reason(error)
                failure = self.status.explain(what, reason, timed_out=timed_out)
                if self._mesh is not None:
                    self._mesh.close()  # the others of this host may be waiting there
                for channel in self._channels.values():
                    channel.close()
                raise failure from error
        self._failure = ""

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return self.begin_all_gather_bytes(data, what)()

    def begin_all_gather_bytes(self, data: bytes, what: str) -> Callable[[], list[bytes]]:
        """Exchange rows as long as the last ones for `what`; if too short, exchange again."""
        first = self._row_bytes.get(what, ROW_BYTES)
        receive = self._begin_rows(_row(data, what, first), what)

        def end() -> list[bytes]:
            size, rows = first, receive().numpy()  # uint8 [workers, size]
            while True:
                calls = [row[LENGTH_BYTES:HEAD_BYTES].tobytes() for row in rows]
                for rank, call in enumerate(calls):
                    if call != calls[self.rank]:
                        other_what = call.rstrip(b"\0").decode(errors="replace")
                        raise mismatched_calls(self.rank, what, rank, other_what)
                ends = [HEAD_BYTES + _length(row[:LENGTH_BYTES].tobytes()) for row in rows]
                if max(ends) <= size:
                    self.barriers += 1
                    return [
                        row[HEAD_BYTES:end].tobytes() for row, end in zip(rows, ends, strict=True)
                    ]
                size = 2 * max(ends)
                if size <= KEPT_ROW_BYTES:
                    self._row_bytes[what] = size
                rows = self._begin_rows(_row(data, what, size), what)().numpy()

        return end

    def _begin_rows(self, row: Tensor, what: str) -> Callable[[], Tensor]:
        """Begin to exchange rows; return a call that returns every worker's row by rank.

        They must be read before the next call.
        The workers of a host share a table of rows; the first of them fetches those of other hosts.
        Two tables are used in turn: a worker that writes to one has passed the barriers of the
        other, and so have all workers that read this one before.
        """
        tables = self._tables.get(len(row))
        if tables is None:  # in memory of the host's first worker
            tables = self.shared(2 * self.size * len(row))[0].view(2, self.size, len(row))
            if len(row) <= KEPT_ROW_BYTES:
                self._tables[len(row)] = tables
        table = tables[self._turn]  # uint8 [size, row_bytes]
        self._turn = 1 - self._turn
        table[self.rank] = row
        self.barrier_on_host(what)
        rounds = self._fetch_rows(table)
        if self.rank == self.host.start:
            with self._waiting(what):
                next(rounds, None)

        def end() -> Tensor:
            if self.rank == self.host.start:
                with self._waiting(what):
                    for _ in rounds:
                        pass
            self.barrier_on_host(what)
            return table

        if self.shares_memory:  # other workers of this host wait for the rows
            end()
            return lambda: table
        return end

    def _fetch_rows(self, table: Tensor) -> Iterator[None]:
        """Fetch the rows of other hosts in ceil(log2(hosts)) rounds (Bruck et al. 1997).

        Yields when a round's messages are on their way.
        gloo's ring takes one round per host. Here each host sends all rows that it has to one other
        host, so each round doubles the number of hosts whose rows a host has.
        """
        hosts, index, have = self.hosts, self.hosts.index(self.host), 1
        while have < len(hosts):
            new = min(have, len(hosts) - have)
            left, right = hosts[index - have], hosts[(index + have) % len(hosts)]
            # `sent` and `rows`: [rows of `new` hosts, row_bytes]; `targets`: views of the table
            sent = torch.cat([_rows(table, hosts[(index + n) % len(hosts)]) for n in range(new)])
            targets = [_rows(table, hosts[(index + have + n) % len(hosts)]) for n in range(new)]
            rows = table.new_empty(sum(map(len, targets)), table.shape[1])
            end = self._begin_message(sent.view(-1), left.start, rows.view(-1), right.start)
            yield
            end()
            for target, received in zip(targets, rows.split(list(map(len, targets))), strict=True):
                target.copy_(received)
            have += new

    def _begin_message(
        self, sent: Tensor, receiver: int, received: Tensor, sender: int
    ) -> Callable[[], None]:
        """Begin to send bytes to a worker and to receive as many; return a call that completes it.

        A channel carries short ones, and the first bytes of others, which show whether their sizes
        are the same.
        """
        outgoing, incoming = self._channels.get(receiver), self._channels.get(sender)
        works = list[dist.Work | None]()
        few = MESSAGE_BYTES if outgoing is not None else 0
        if len(sent) > few:  # gloo sends to a posted receive
            works.append(dist.irecv(received[few:], sender, self._group))
            works.append(dist.isend(sent[few:], receiver, self._group))
        if outgoing is not None:
            outgoing.send_message(sent[:few])

        def end() -> None:
            if incoming is not None:
                incoming.receive_message(received[:few], self._timeout_seconds)
            for work in works:
                work.wait()  # type: ignore[union-attr]  # None only outside of the group

        return end

    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        """Gather lengths on all ranks, then the bytes on rank 0."""
        own_length = len(data).to_bytes(LENGTH_BYTES, "little")
        lengths = list(map(_length, self.all_gather_bytes(own_length, what)))
        row = _padded(data, max(lengths))  # uint8 [longest], as gloo gathers equal sizes
        rows = [torch.empty_like(row) for _ in lengths] if self.rank == 0 else None
        with self._waiting(what):
            dist.gather(row, rows, dst=0, group=self._group)
        if rows is None:
            return None
        return [row[:n].numpy().tobytes() for row, n in zip(rows, lengths, strict=True)]

    def all_gather(self, out: Tensor, sent: Tensor, what: str) -> None:
        self.begin_all_gather(out, sent, what)()

    def begin_all_gather(self, out: Tensor, sent: Tensor, what: str) -> Callable[[], None]:
        with self._waiting(what):
            if sent.is_cuda:  # NCCL, which only queues it on the GPU
                waits = [_all_gather_flat(out, sent, self._group, async_op=True).wait]
            else:
                parts = dict(enumerate(out.split(len(sent)) if len(sent) else ()))  # each [n]
                if parts and parts[self.rank].data_ptr() != sent.data_ptr():
                    parts[self.rank].copy_(sent)
                waits = self._transfer(dict.fromkeys(parts, sent), parts)
        self.barriers += 1
        return self._end_of(waits, what, sent)

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, sent: Tensor, sent_sizes: Sizes, what: str
    ) -> None:
        self.begin_all_to_all(out, out_sizes, sent, sent_sizes, what)()

    def begin_all_to_all(
        self,
        out: Tensor,
        out_sizes: Sizes,
        sent: Tensor,
        sent_sizes: Sizes,
        what: str,
        *,
        polled: bool = True,
    ) -> Callable[[], None]:
        with self._waiting(what):
            if sent.is_cuda:
                sizes = list(out_sizes), list(sent_sizes)
                work = dist.all_to_all_single(out, sent, *sizes, self._group, async_op=True)
                waits = [work.wait]
            else:
                outgoing = dict(enumerate(sent.split(list(sent_sizes))))  # each [sent_sizes[rank]]
                incoming = dict(enumerate(out.split(list(out_sizes))))
                incoming[self.rank].copy_(outgoing[self.rank])
                waits = self._transfer(outgoing, incoming)
        return self._end_of(waits, what, sent, polled=polled)

    def begin_swap(self, partner: int, received: Sequence[Tensor], what: str) -> Send:
        channel = self._channels.get(partner)
        if channel is None:  # a worker had no address to connect to
            return super().begin_swap(partner, received, what)
        tag = self._next_tag()
        arriving = [channel.receive((tag, number), part) for number, part in enumerate(received)]

        def begin_send(number: int, part: Tensor) -> Arrival:
            sending, receiving = channel.send((tag, number), part), arriving[number]

            def wait(seconds: float) -> None:
                channel.wait(receiving, seconds)
                channel.wait(sending, seconds)

            return self._arrival(wait, lambda: receiving.is_done and sending.is_done, what)

        def send(sent: Iterable[Tensor]) -> list[Arrival]:
            return [begin_send(number, part) for number, part in enumerate(sent)]

        return send

    def _arrival(
        self, wait: Callable[[float], None], is_there: Callable[[], bool], what: str
    ) -> Arrival:
        def end() -> None:
            if not is_there():
                with self._waiting(what):
                    wait(self._timeout_seconds)

        return Arrival(end, is_there)

    def _end_of(
        self, waits: Sequence[Callable[[], object]], what: str, sent: Tensor, *, polled: bool = True
    ) -> Callable[[], None]:
        """Return a call that completes a transfer, whose input `sent` stays in memory until then.

        NCCL lets go of `sent` as soon as the call returns, in whatever stream that is.
        """

        def end(kept: Tensor = sent) -> None:
            with self._waiting(what):
                for wait in waits:
                    wait()
                if kept.is_cuda:
                    kept.record_stream(torch.cuda.current_stream(kept.device))
                    if polled:
                        self.status.gpu_calls.note(what, kept.device)
            del kept

        return end

    def wait_for_gpu(self) -> None:
        calls = self.status.gpu_calls
        if calls.last:
            with self._waiting(calls.last):
                calls.wait(self._timeout_seconds)

    def _transfer(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor]
    ) -> list[Callable[[], object]]:
        """Start to send and receive 1-D CPU tensors by rank; return what completes the transfer.

        All workers make the same transfers in the same order. Each transfer has its own tag,
        because several may be in flight; messages with one tag keep their order.
        """
        tag = self._next_tag()
        # from the next rank on, so that not all workers serve rank 0 first
        ranks = [(self.rank + offset) % self.size for offset in range(1, self.size)]
        return [
            wait
            for tensors in (received, sent)
            for rank in ranks
            for wait in self._pass(rank, tensors.get(rank), tag, sends=tensors is sent)
        ]

    def _pass(
        self, rank: int, tensor: Tensor | None, tag: int, *, sends: bool
    ) -> list[Callable[[], object]]:
        if tensor is None or not len(tensor):
            return []
        if (channel := self._channels.get(rank)) is None:  # not a partner: gloo
            call = dist.isend if sends else dist.irecv
            # isend and irecv return None only outside the group
            return [call(piece, rank, self._group, tag).wait for piece in _pieces(tensor)]  # type: ignore[union-attr]
        begin = channel.send if sends else channel.receive
        transfers = [
            begin((tag, number), piece)
            for number, piece in enumerate(_pieces(tensor, CHANNEL_PIECE_BYTES))
        ]
        return [partial(channel.wait, transfer, self._timeout_seconds) for transfer in transfers]

    def _next_tag(self) -> int:
        self._transfers = self._transfers % TAGS + 1
        return self._transfers

    def begin_transfer(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], what: str
    ) -> Callable[[], None]:
        with self._waiting(what):
            waits = self._transfer(sent, received)
        return self._end_of(waits, what, EMPTY)  # what is in flight holds its tensors itself

    def shared(self, nbytes: int) -> list[Tensor]:
        return super().shared(nbytes) if self._mesh is None else share(self._mesh, nbytes)

    def broadcast(self, tensor: Tensor, what: str) -> None:
        with self._waiting(what):
            # NCCL knows few dtypes, such as no integers of 16 bits
            data = tensor.view(-1).view(torch.uint8) if tensor.is_cuda else tensor
            dist.broadcast(data, src=0, group=self._group)
            if tensor.is_cuda:
                self.status.gpu_calls.note(what, tensor.device)

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
        for channel in self._channels.values():
            channel.close()
        # NCCL may wait forever for workers that have not failed
        if not (self._cuda and (self._failure or self.abandoned)):
            destroy_group(self._group)


def _is_of_gpu(error: Exception) -> bool:
    """Return whether an error is the GPU's own: a failed assertion or no memory."""
    kinds = (torch.OutOfMemoryError, getattr(torch, "AcceleratorError", torch.OutOfMemoryError))
    return isinstance(error, kinds) or str(error).startswith("CUDA error")


def _reason(error: Exception) -> str:
    """Return the first line of a message, and the last error of NCCL if it has one."""
    first, *lines = str(error).strip().splitlines() or [type(error).__name__]
    last = lines[lines.index("Last error:") + 1 :] if "Last error:" in lines else []
    text = " ".join(filter(None, map(str.strip, last)))
    return f"{first}; NCCL's last error: {text}" if text else first


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


def _pieces(tensor: Tensor, nbytes: int = PIECE_BYTES) -> tuple[Tensor, ...]:
    # a small rest is not sent as a separate piece
    pieces: tuple[Tensor, ...] = tensor.detach().chunk(max(1, tensor.nbytes // nbytes))
    return pieces


def _rows(table: Tensor, host: range) -> Tensor:
    return table[host.start : host.stop]
