"""The interface of every world, and the world of a single worker.

Calls are collective: all workers make the same calls in the same order.
"""

from __future__ import annotations

import io
import json
import pickle
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from samestep.comm.signing import sign, verified
from samestep.comm.status import WorkerStatus, mismatched_calls
from samestep.config import TOKEN
from samestep.errors import WorldError

MAX_WHAT = 200  # characters of another worker's call that an error quotes
EMPTY = torch.empty(0, dtype=torch.uint8)  # uint8 [0], where a call has no tensor

Sizes = Sequence[int]
Value = TypeVar("Value")


class Arrival(NamedTuple):
    """The end of a swap or a sum: `is_there` returns whether `wait` would return at once."""

    wait: Callable[[], None]
    is_there: Callable[[], bool] = lambda: False


class Share(NamedTuple):
    """A worker's share of a tensor that partners add up; each of them has a share.

    `received` gets their sums of this share, by rank, and `totals` get those of the other shares.
    `add` computes this one's `total` once all sums are there.
    """

    received: Mapping[int, Sequence[Tensor]]  # each [share_size], like `total`
    add: Callable[[], None]
    total: Tensor  # [share_size], in the dtype of the sums
    totals: Mapping[int, Tensor]  # each [share_size of that worker]


Send = Callable[[Iterable[Tensor]], list[Arrival]]
SendSums = Callable[[Iterable[Mapping[int, Sequence[Tensor]]]], list[Arrival]]


class Partners(Protocol):
    """The workers in the same place on other hosts, over connections of their own."""

    def begin_sums(self, shares: Sequence[Share], what: str) -> SendSums:
        """Begin to add up 1-D CPU tensors with the partners, which make the same call.

        Returns a call that takes, for each tensor, this worker's sums of each partner's share, by
        rank, and begins to send them. They must stay as they are until the tensor is complete, but
        may be the memory of `totals`. That call returns what completes each tensor. Another thread
        may call a share's `add`, as soon as all sums are there.
        """


class World(ABC):
    """The workers of a run and how they communicate; this worker is `rank` of `size`.

    `hosts` has one range of ranks per host, in rank order. Workers of one host share memory; a
    worker that shares none counts as a separate host. `machines` has the ranks of each machine if
    those are not `hosts`: with NCCL, workers share no memory but are near each other. `local_ranks`
    are the ranks that were started on this host, None for those of `host`. `made_group`:
    `connect` created torch.distributed's default group only for user code; its caller destroys it
    with `end_group`. `barriers` counts the calls in which every worker waited for all others:
    barriers and all gathering calls. `what` describes the purpose of a call in error messages.
    Calls raise `WorldError` if a worker has exited or times out. `backend` names what carries
    gradients. `abandoned` is set once this worker has failed: the others may not have failed, so
    no orderly shutdown is possible. `is_exchanging`: a backward pass has begun to send gradients,
    and has not ended. `partners` add up sums while they arrive, None if this world has none.

    README.md in this folder lists the methods, and the worlds that implement each.

    samestep's own messages are JSON and tensors. Only users' objects are pickled; with a
    `signing_key`, each is signed by its sender and verified before it is unpickled.
    """

    rank: int
    size: int
    hosts: Sequence[range]
    machines: Sequence[range] = ()
    barriers: int = 0
    local_ranks: range | None = None
    signing_key: bytes | None = None
    made_group: bool = False
    backend: str = "none"
    abandoned: bool = False
    is_exchanging: bool = False
    partners: Partners | None = None

    def abandon(self) -> None:
        """Record that this worker has failed."""
        self.abandoned = True

    @cached_property
    def status(self) -> WorkerStatus:
        """This worker's status, which a watchdog may publish to the others."""
        return WorkerStatus()

    @cached_property
    def host(self) -> range:
        """The ranks that see this worker's memory, including its own."""
        return next(host for host in self.hosts if self.rank in host)

    @cached_property
    def shares_memory(self) -> bool:
        """Whether any workers share memory, on any host: the same value on all workers."""
        return any(len(host) > 1 for host in self.hosts)

    @abstractmethod
    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        """Return every worker's bytes, of any length, by rank."""

    def begin_all_gather_bytes(self, data: bytes, what: str) -> Callable[[], list[bytes]]:
        """Start an `all_gather_bytes`; return a call that completes it and returns the result."""
        gathered = self.all_gather_bytes(data, what)  # at once: only some worlds overlap calls
        return lambda: gathered

    @abstractmethod
    def gather_bytes(self, data: bytes, what: str) -> list[bytes] | None:
        """Return every worker's bytes by rank on rank 0, None elsewhere."""

    @abstractmethod
    def all_gather(self, out: Tensor, sent: Tensor, what: str) -> None:
        """Fill `out` [size * n] by rank with every worker's `sent` [n], perhaps a view of `out`."""

    @abstractmethod
    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, sent: Tensor, sent_sizes: Sizes, what: str
    ) -> None:
        """Send consecutive `sent_sizes[r]` elements of `sent` to rank r; fill `out` likewise."""

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
        """Start an `all_to_all`; return a call that completes it and frees `out` and `sent`.

        Unless `polled`, `wait_for_gpu` does not wait for it; a later call must follow.
        """
        self.all_to_all(out, out_sizes, sent, sent_sizes, what)
        return lambda: None

    def begin_all_gather(self, out: Tensor, sent: Tensor, what: str) -> Callable[[], None]:
        """Start an `all_gather`; return a call that completes it and frees `out` and `sent`."""
        self.all_gather(out, sent, what)
        return lambda: None

    def begin_swap(self, partner: int, received: Sequence[Tensor], what: str) -> Send:
        """Begin to receive 1-D CPU tensors from a worker that also begins a swap with this one.

        Returns a call that begins to send it others of the same sizes. That call returns what
        completes each pair; a tensor must stay as it is until then. Both workers send in the same
        order.
        """
        # without a connection of its own, each swap is an all-to-all in which only partners send
        sizes = [[len(out) * (rank == partner) for rank in range(self.size)] for out in received]

        def send(sent: Iterable[Tensor]) -> list[Arrival]:
            return [
                Arrival(self.begin_all_to_all(out, counts, tensor, counts, what))
                for out, counts, tensor in zip(received, sizes, sent, strict=True)
            ]

        return send

    def begin_transfer(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], what: str
    ) -> Callable[[], None]:
        """Begin to send 1-D CPU tensors of one dtype, by rank, and to receive others.

        Both sides know the sizes. All workers make this call, even those that transfer nothing.
        Returns a call that completes the transfer.
        """
        ranks, none = range(self.size), next(iter([*sent.values(), *received.values()]), EMPTY)[:0]
        sizes = [[len(part.get(rank, none)) for rank in ranks] for part in (received, sent)]
        out = none.new_empty(sum(sizes[0]))  # [elements received], by rank
        joined = torch.cat([none, *(sent.get(rank, none) for rank in ranks)])  # [elements sent]
        self.all_to_all(out, sizes[0], joined, sizes[1], what)
        for rank, part in enumerate(out.split(sizes[0])):
            received.get(rank, none).copy_(part)  # [0] into [0] where nothing was sent
        return lambda: None

    def transfer(
        self, sent: Mapping[int, Tensor], received: Mapping[int, Tensor], what: str
    ) -> None:
        """Do what `begin_transfer` does, and complete it."""
        self.begin_transfer(sent, received, what)()

    def shared(self, nbytes: int) -> list[Tensor]:
        """Return zeros, uint8 [nbytes], for each worker of this host by rank, shared among them."""
        return [torch.zeros(nbytes, dtype=torch.uint8)]

    @abstractmethod
    def broadcast(self, tensor: Tensor, what: str) -> None:
        """Overwrite `tensor` with that of rank 0."""

    @abstractmethod
    def barrier(self, what: str) -> None:
        """Return when every worker has arrived."""

    def barrier_on_host(self, what: str) -> None:
        """Wait at least for the workers of this host; `barriers` may not count it."""
        self.barrier(what)

    def wait_for_gpu(self) -> None:  # noqa: B027  only GPUs complete calls later
        """Wait until this worker's GPU has completed earlier calls; raises as they would."""

    @abstractmethod
    def close(self) -> None:
        """Leave the world; no call may follow."""

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        """Return every worker's JSON value by rank. Floats keep their bits, also NaN and infinity.

        Raises `WorldError` if another worker made another call.
        """
        return self.begin_all_gather_json(value, what)()

    def begin_all_gather_json(self, value: Any, what: str) -> Callable[[], list[Any]]:
        """Start an `all_gather_json`, ahead of later transfers; return a call that completes it."""
        receive = self.begin_all_gather_bytes(json.dumps([what, value]).encode(), what)

        def end() -> list[Any]:
            values = []
            for rank, data in enumerate(receive()):
                try:
                    other_what, other = json.loads(data)
                except (TypeError, ValueError, RecursionError):  # not JSON, such as pickled objects
                    other_what, other = "making another call", None
                if other_what != what:
                    raise mismatched_calls(self.rank, what, rank, str(other_what)[:MAX_WHAT])
                values.append(other)
            return values

        return end

    def broadcast_json(self, value: Any, what: str) -> Any:
        """Return rank 0's JSON value."""
        return self.all_gather_json(value if self.rank == 0 else None, what)[0]

    def gather_signed(self, data: bytes, what: str) -> list[bytes] | None:
        """Like `gather_bytes`, but raise `WorldError` for bytes that no worker signed."""
        call = self.barriers  # equal on all workers, and the gather increases it
        gathered = self.gather_bytes(self._sign(data, self.rank, call, what), what)
        if gathered is None:
            return None
        return [self._verify(each, rank, call, what) for rank, each in enumerate(gathered)]

    def all_gather_object(self, value: Any, what: str) -> list[Any]:
        """Return every worker's object by rank. Raises `WorldError` as `gather_signed` does."""
        call = self.barriers
        gathered = self.all_gather_bytes(
            self._sign(pickle.dumps(value), self.rank, call, what), what
        )
        verified = [self._verify(data, rank, call, what) for rank, data in enumerate(gathered)]
        return list(map(_unpickle, verified))

    def gather_object(self, value: Any, what: str) -> list[Any] | None:
        """Return every worker's object by rank on rank 0, None elsewhere."""
        gathered = self.gather_signed(pickle.dumps(value), what)
        return None if gathered is None else list(map(_unpickle, gathered))

    def broadcast_object(self, value: Any, what: str) -> Any:
        """Return rank 0's object."""
        call = self.barriers
        data = self._sign(pickle.dumps(value), 0, call, what) if self.rank == 0 else b""
        return _unpickle(self._verify(self.all_gather_bytes(data, what)[0], 0, call, what))

    def _sign(self, data: bytes, rank: int, call: int, what: str) -> bytes:
        key = self.signing_key
        return data if key is None else sign(key, json.dumps([rank, call, what]), data)

    def _verify(self, signed: bytes, rank: int, call: int, what: str) -> bytes:
        """Return the bytes that worker `rank` signed. `call` numbers them, to prevent replays."""
        if self.signing_key is None:
            return signed
        data = verified(self.signing_key, json.dumps([rank, call, what]), signed)
        if data is None:
            raise WorldError(
                f"worker {self.rank} refused an object from worker {rank} while {what}: it is not "
                f"signed with this run's token; it came from another process, or {TOKEN} differs "
                "between hosts"
            )
        return data


class _Unpickler(pickle.Unpickler):
    """Puts GPU tensors on this worker's GPU, because the sender's device index may differ."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return _load_here
        return super().find_class(module, name)


def _load_here(data: bytes) -> Any:
    here = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_initialized() else "cpu"
    # as torch.storage does, for bytes that `_unpickle` may trust

    def place(storage: Any, tag: str) -> Any:
        if here == "cpu" or not tag.startswith("cuda"):
            return storage
        return torch.empty(0, dtype=torch.uint8).set_(storage).to(here).untyped_storage()

    return torch.load(io.BytesIO(data), map_location=place, weights_only=False)


def _unpickle(data: bytes) -> Any:
    # signed, or from a trusted network (docs/security.md)
    return _Unpickler(io.BytesIO(data)).load()


class Alone(World):
    """The world of a single worker: every call returns its input."""

    rank = 0
    size = 1
    hosts = (range(1),)

    def _after_barrier(self, value: Value) -> Value:
        self.barriers += 1
        return value

    def all_gather_bytes(self, data: bytes, what: str) -> list[bytes]:
        return self._after_barrier([data])

    gather_bytes = all_gather_bytes

    def all_gather(self, out: Tensor, sent: Tensor, what: str) -> None:
        self.all_to_all(out, [len(out)], sent, [len(sent)], what)

    def all_to_all(
        self, out: Tensor, out_sizes: Sizes, sent: Tensor, sent_sizes: Sizes, what: str
    ) -> None:
        if out.data_ptr() != sent.data_ptr():
            out.copy_(sent)  # [n], as a single worker receives what it sends
        self.barriers += 1

    def broadcast(self, tensor: Tensor, what: str) -> None:
        self.barriers += 1

    def barrier(self, what: str) -> None:
        self.barriers += 1

    def close(self) -> None:
        pass

    def all_gather_json(self, value: Any, what: str) -> list[Any]:
        return self._after_barrier([value])

    def begin_all_gather_json(self, value: Any, what: str) -> Callable[[], list[Any]]:
        values = self.all_gather_json(value, what)
        return lambda: values

    all_gather_object = gather_object = all_gather_json
    gather_signed = all_gather_bytes

    def broadcast_object(self, value: Any, what: str) -> Any:
        return self._after_barrier(value)
