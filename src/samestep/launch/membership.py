"""Which hosts take part in a run: decided by what they tell and by the clock, without any socket."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum, auto
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Message = Mapping[str, Any]

LOST_SECONDS: Final = 5.0  # without a word a host is lost
COME_SECONDS: Final = 30.0  # for as many hosts as are needed at least
LOAD_SECONDS: Final = 300.0  # for a host that came, to load torch
SETTLE_SECONDS: Final = 1.0  # for more hosts, once there are enough
GRACE_SECONDS: Final = 0.2  # after a failure, for news of an earlier one from another host
EXPLAIN_SECONDS: Final = LOST_SECONDS + 1.0  # after workers that missed others, for news of those
FAREWELL_SECONDS: Final = 5.0  # after workers are to be gone, for their host to say that they are
ASKED_TO_STOP: Final = 128 + 15  # the status of a worker that snapshotted on SIGTERM


@dataclass(frozen=True)
class Terms:
    """What holds for the whole run: from `least` to `most` hosts, of which all workers together are at most `lanes`.

    `restarts` are attempts in a row that may fail without a new step, `grace` is how long workers have to snapshot, in seconds.
    """

    least: int
    most: int
    lanes: int | None
    restarts: int
    grace: float


@dataclass(eq=False)
class Node:
    """A host that joined, with room for so many workers; `tell` sends it a message."""

    name: str
    room: int
    tell: Callable[[Message], None]
    joined_at: float
    heard_at: float
    ready: bool = False
    first_rank: int = 0
    busy: bool = False  # it has workers of the present attempt


class Phase(Enum):
    """What is being waited for: hosts, the end of the run, the end of an attempt, nothing any more."""

    GATHERING = auto()
    RUNNING = auto()
    STOPPING = auto()
    OVER = auto()


class Why(Enum):
    """Why an attempt is being stopped: it failed and the run goes on, or does not; a host came; a signal asked for it."""

    RESTART = auto()
    FAILURE = auto()
    ROOM = auto()
    SIGNAL = auto()


@dataclass
class Attempt:
    """One start of all workers, on `nodes` in the order of their ranks."""

    number: int
    nodes: list[Node] = field(default_factory=list)
    failures: list[dict[str, Any]] = field(default_factory=list)
    decide_at: float = math.inf
    why: Why | None = None
    signal: int = 0
    kill_at: float = math.inf
    give_up_at: float = math.inf

    @property
    def first_failure(self) -> dict[str, Any] | None:
        """The earliest failure that is not because of others, as far as is known by now."""
        return min(self.failures, key=lambda failure: (failure["because_of_others"], failure["at"]), default=None)


class Membership:
    """The hosts of a run, in the order in which they joined, and what they are to do.

    Orders: `start` an attempt; `snapshot` and end (for one host: its workers agree with the others); `stop`, at once with `kill`; `end`.
    A host tells `ready`, `failed` for each worker that failed, `ended` when no worker of it is left, `signalled`, and `beat`.
    """

    def __init__(self, terms: Terms, now: float, *, open_attempt: Callable[[int], None], log: Callable[[str], None]) -> None:
        self.phase = Phase.GATHERING
        self._terms = terms
        self._nodes: list[Node] = []
        self._attempt = Attempt(0)
        self._open_attempt, self._log = open_attempt, log
        self._since = now
        self._room_at = math.inf
        self._step: int | None = None  # the furthest that any host told
        self._furthest = -1
        self._in_vain = 0

    def join(self, name: str, room: int, tell: Callable[[Message], None], now: float) -> Node:
        """Take a host in; a name that is taken gets a number."""
        taken = {node.name for node in self._nodes}
        numbered = (f"{name} ({number})" for number in range(2, len(taken) + 2))
        node = Node(name if name not in taken else next(other for other in numbered if other not in taken), room, tell, now, now)
        self._nodes.append(node)
        self._log(f"host {node.name} came with {room} workers: {self._present()}")
        return node

    def leave(self, node: Node, reason: str, now: float) -> None:
        """Count a host as lost."""
        if node not in self._nodes:
            return
        self._nodes.remove(node)
        if self.phase is not Phase.OVER:
            self._log(f"host {node.name} is lost: {reason}; {self._present()}")
        if node.busy:
            node.busy = False
            self._note_failure({"rank": node.first_rank, "host": node.name, "summary": f"its host was lost: {reason}"}, now, outside=True)

    def hear(self, node: Node, message: Message, now: float) -> None:
        """Take what a host tells. Raises `ValueError` for what makes no sense."""
        node.heard_at = now
        if isinstance(message.get("step"), int):
            self._step = max(self._step or 0, message["step"])
        present = message.get("attempt") == self._attempt.number and node.busy
        match message.get("tell"):
            case "beat":
                pass
            case "ready":
                node.ready = True
                self._room_at = min(self._room_at, now + SETTLE_SECONDS)
            case "failed" if present:
                self._note_failure(message, now - float(message["age"]), outside=bool(message["from_outside"]))
            case "ended" if present:
                node.busy = False
            case "signalled":
                self._stop_by_signal(int(message["signal"]), now)
            case "failed" | "ended":
                pass  # of an attempt that is over
            case other:
                raise ValueError(f"a host told {other!r}")

    def update(self, now: float) -> None:
        """Do what is due."""
        for node in [node for node in self._nodes if node.ready and now - node.heard_at > LOST_SECONDS]:
            self.leave(node, f"nothing was heard of it for {LOST_SECONDS:g} s", now)
        if self.phase is Phase.GATHERING:
            self._gather(now)
        elif self.phase is Phase.RUNNING:
            self._watch(now)
        elif self.phase is Phase.STOPPING:
            self._wait_for_ends(now)

    def _gather(self, now: float) -> None:
        ready = [node for node in self._nodes if node.ready]
        loading = [node for node in self._nodes if not node.ready and now - node.joined_at < LOAD_SECONDS]
        settled = not loading and now >= self._room_at if self._attempt.number == 0 else True
        if len(ready) >= self._terms.most or (len(ready) >= self._terms.least and settled):
            self._deal(ready[: self._terms.most])
        elif now - self._since > COME_SECONDS and len(ready) + len(loading) < self._terms.least:
            self._end({"failure": self._too_few()})

    def _deal(self, nodes: list[Node]) -> None:
        left = self._terms.lanes or sum(node.room for node in nodes)
        sizes = []
        for node in nodes:
            sizes.append(min(node.room, left))
            left -= sizes[-1]
        self._attempt = Attempt(self._attempt.number + 1, [node for node, size in zip(nodes, sizes, strict=True) if size])
        self.phase, self._room_at = Phase.RUNNING, math.inf
        self._open_attempt(self._attempt.number)
        for node, size, end in zip(nodes, sizes, accumulate(sizes), strict=True):
            if size:
                node.busy, node.first_rank = True, end - size
                place = {"first_rank": end - size, "local_workers": size, "workers": sum(sizes)}
                node.tell({"order": "start", "attempt": self._attempt.number, **place})

    def _watch(self, now: float) -> None:
        attempt = self._attempt
        if attempt.failures:
            if now >= attempt.decide_at:
                self._decide(now)
        elif not any(node.busy for node in attempt.nodes):
            self._end({})
        elif self._has_use_for_more() and now >= self._room_at and all(node.busy for node in attempt.nodes):
            self._log(f"workers snapshot, and go on with more hosts: {self._present()}")
            attempt.nodes[0].tell({"order": "snapshot", "attempt": attempt.number})
            self._stop(Why.ROOM, now, kill_after=self._terms.grace)

    def _has_use_for_more(self) -> bool:
        nodes = self._attempt.nodes
        spare = any(node.ready and node not in nodes for node in self._nodes)
        return spare and len(nodes) < self._terms.most and sum(node.room for node in nodes) < (self._terms.lanes or math.inf)

    def _note_failure(self, failure: Message, at: float, *, outside: bool) -> None:
        told = {"because_of_others": False, "traceback": "", "status": 1, "step": self._step, **failure, "from_outside": outside, "at": at}
        attempt = self._attempt
        attempt.failures.append(told)
        attempt.decide_at = min(attempt.decide_at, at + (EXPLAIN_SECONDS if told["because_of_others"] else GRACE_SECONDS))

    def _decide(self, now: float) -> None:
        failure = self._attempt.first_failure
        if failure is not None and self._may_go_on(failure):
            self._tell_all({"order": "stop", "kill": True})
            self._stop(Why.RESTART, now, kill_after=0.0)
        else:
            self._tell_all({"order": "stop", "kill": False})
            self._stop(Why.FAILURE, now, kill_after=FAREWELL_SECONDS)

    def _may_go_on(self, failure: Message) -> bool:
        in_vain = 0 if self._step is not None and self._step > self._furthest else self._in_vain
        return failure["from_outside"] and self._step is not None and in_vain < self._terms.restarts

    def _stop_by_signal(self, number: int, now: float) -> None:
        attempt = self._attempt
        if self.phase is Phase.GATHERING:
            self._end({"signal": number})
        elif self.phase in {Phase.RUNNING, Phase.STOPPING}:
            # Only the workers of that host know of the signal: all agree on where to stop, and one that already snapshots is left alone.
            attempt.signal = attempt.signal or number
            self._stop(Why.SIGNAL, now, kill_after=0.0 if attempt.why is Why.SIGNAL else self._terms.grace)

    def _stop(self, why: Why, now: float, *, kill_after: float) -> None:
        self.phase = Phase.STOPPING
        self._attempt.why, self._attempt.kill_at = why, now + kill_after
        self._attempt.give_up_at = math.inf

    def _wait_for_ends(self, now: float) -> None:
        attempt = self._attempt
        late = [node for node in attempt.nodes if node.busy]
        if not late:
            self._end_attempt(now)
        elif attempt.why is Why.ROOM and self._failed_for_itself():
            self._decide(now)
        elif now >= attempt.give_up_at:
            for node in late:
                self.leave(node, f"its workers did not end within {FAREWELL_SECONDS:g} s", now)
        elif now >= attempt.kill_at:
            self._tell_all({"order": "stop", "kill": True})
            attempt.kill_at, attempt.give_up_at = math.inf, now + FAREWELL_SECONDS

    def _failed_for_itself(self) -> bool:
        """Tell whether a worker failed that was only to snapshot and end."""
        return any(not failure["because_of_others"] and failure["status"] != ASKED_TO_STOP for failure in self._attempt.failures)

    def _end_attempt(self, now: float) -> None:
        attempt, failure = self._attempt, self._attempt.first_failure
        if attempt.signal:
            self._end({"signal": attempt.signal})
        elif failure is None:
            self._end({})
        elif attempt.why is Why.FAILURE or (self._failed_for_itself() and not self._may_go_on(failure)):
            self._end({"failure": failure})
        else:
            if self._failed_for_itself():
                step = self._step or 0
                self._in_vain = 1 if step > self._furthest else self._in_vain + 1
                self._furthest = max(self._furthest, step)
                self._tell_all({"order": "restarting", "failure": failure})
            self.phase, self._since = Phase.GATHERING, now

    def _end(self, outcome: Message) -> None:
        self.phase = Phase.OVER
        self._tell_all({"order": "end", **outcome})

    def _tell_all(self, order: Message) -> None:
        for node in self._nodes:
            node.tell({"attempt": self._attempt.number, **order})

    def _too_few(self) -> dict[str, Any]:
        return {
            "summary": f"{self._present()} came within {COME_SECONDS:g} s; expected at least {self._terms.least}: "
            "start the same command on the others, and look there for an error"
        }

    def _present(self) -> str:
        names = ", ".join(node.name for node in self._nodes) or "none"
        few, many = self._terms.least, self._terms.most
        return f"{len(self._nodes)} of {few if few == many else f'{few} to {many}'} hosts ({names})"
