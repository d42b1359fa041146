"""Which hosts take part in a run: decided by what they tell and by the clock, without any socket."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from typing import Any, Final

from samestep.launch.exit_report import Failure

Message = Mapping[str, Any]

LOST_SECONDS: Final = 5.0  # without a word a host is lost
COME_SECONDS: Final = 30.0  # for as many hosts as are needed at least
LOAD_SECONDS: Final = 300.0  # for a host that came, to load torch
SETTLE_SECONDS: Final = 1.0  # for more hosts, once there are enough
EXIT_SECONDS: Final = 2.0  # after a failure on a single host, for its other workers to exit
GRACE_SECONDS: Final = 0.2  # after a failure, for news of an earlier one from another host
EXPLAIN_SECONDS: Final = LOST_SECONDS + 1.0  # after workers that missed others, for news of those
FAREWELL_SECONDS: Final = 5.0  # after workers are to be gone, for their host to say that they are
ASKED_TO_STOP: Final = 128 + signal.SIGTERM  # the status of a worker that snapshotted on SIGTERM


@dataclass(frozen=True)
class ElasticPolicy:
    """What holds for the whole run: from `least` to `most` hosts, of which all workers together are at most `lanes`.

    `max_restarts` are attempts in a row that may fail without a new step, `grace_period` is how
    long workers have to snapshot, in seconds.
    """

    least: int
    most: int
    lanes: int | None
    max_restarts: int
    grace_period: float


@dataclass(eq=False)
class Node:
    """A host that joined, with room for so many workers; `tell` sends it a message, and `hang_up` ends the connection to it."""

    name: str
    room: int
    tell: Callable[[Message], None]
    hang_up: Callable[[], None]
    joined_at: float
    heard_at: float
    leads: bool
    ready: bool = False
    leaving: bool = False
    first_rank: int = 0
    busy: bool = False  # it has workers of the present attempt


class Phase(Enum):
    """What is being waited for: hosts, the end of the run, the end of an attempt, nothing any more."""

    GATHERING = auto()
    RUNNING = auto()
    STOPPING = auto()
    OVER = auto()


class Why(Enum):
    """Why an attempt is being stopped: it failed and the run goes on, or does not; hosts come or go; a signal asked for the run's end."""

    RESTART = auto()
    FAILURE = auto()
    CHANGE = auto()
    SIGNAL = auto()


@dataclass(frozen=True)
class WorkerFailure(Failure):
    """How the worker `rank` failed, with `at` on the coordinator's clock."""

    rank: int = field(kw_only=True)

    @classmethod
    def read(cls, told: Message, at: float) -> WorkerFailure:
        """Take what a host told. Raises `KeyError`, `TypeError` or `ValueError` for what makes no sense."""
        return cls(
            rank=int(told["rank"]),
            at=at,
            summary=str(told["summary"]),
            traceback=str(told["traceback"]),
            status=int(told["status"]),
            is_secondary=bool(told["is_secondary"]),
            is_retryable=bool(told["is_retryable"]),
            step=None if told["step"] is None else int(told["step"]),
            host=str(told["host"]),
        )


@dataclass
class Attempt:
    """One start of all workers, on `nodes` in the order of their ranks."""

    number: int
    nodes: list[Node] = field(default_factory=list)
    faults: list[WorkerFailure] = field(default_factory=list)
    decide_at: float = math.inf
    why: Why | None = None
    signal: int = 0
    ended_as_asked: bool = False  # workers snapshotted and ended, to be dealt anew
    kill_at: float = math.inf
    overdue: bool = False  # at `kill_at`, because the grace period is over
    give_up_at: float = math.inf

    @property
    def first(self) -> WorkerFailure | None:
        """The earliest failure that is not because of others, as far as is known by now."""
        return min(self.faults, key=lambda fault: (fault.is_secondary, fault.at), default=None)

    @property
    def nodes_at_work(self) -> list[Node]:
        """Those that have workers still."""
        return [node for node in self.nodes if node.busy]


class Membership:
    """The hosts of a run, in the order of their ranks, which is that in which they joined, and what they are to do.

    Orders: `start` workers; send them a `signal`; `stop` them, at once with `kill`; they are
    `restarting`, and why; `end` the run. A host tells `ready`, `failed` for each worker that
    failed, `ended` when it has no worker left, `signalled`, and `beat`.
    """

    def __init__(
        self,
        terms: ElasticPolicy,
        now: float,
        *,
        open_attempt: Callable[[int], None],
        log: Callable[[str], None],
    ) -> None:
        self.phase = Phase.GATHERING
        self._terms = terms
        self._nodes: list[Node] = []
        self._attempt = Attempt(-1)
        self._open_attempt, self._log = open_attempt, log
        self._since = now
        self._room_at = math.inf
        self._lost: str | None = None  # which host was the last
        self._step: int | None = None  # the furthest that any host told
        self._furthest = -1
        self._in_vain = 0

    def join(
        self,
        name: str,
        room: int,
        tell: Callable[[Message], None],
        hang_up: Callable[[], None],
        now: float,
        *,
        leads: bool = False,
    ) -> Node:
        """Take a host in; a name that is taken gets a number. The one that `leads` has the first ranks, whoever comes before it."""
        taken = {node.name for node in self._nodes}
        numbered = (f"{name} ({number})" for number in range(2, len(taken) + 2))
        name = (
            name if name not in taken else next(other for other in numbered if other not in taken)
        )
        node = Node(name, room, tell, hang_up, now, now, leads)
        self._nodes.insert(0 if leads else len(self._nodes), node)
        self._log(f"host {node.name} came with {room} workers: {self._present()}")
        return node

    def leave(self, node: Node, reason: str, now: float) -> None:
        """Count a host as lost."""
        if node not in self._nodes:
            return
        self._nodes.remove(node)
        node.hang_up()
        if self.phase is not Phase.OVER:
            self._lost = f"host {node.name} was lost ({reason})"
            self._log(f"{self._lost}: {self._present()}")
        if node.busy:
            node.busy = False
            summary = f"its host was lost: {reason}"
            self._note(
                WorkerFailure(
                    now,
                    summary,
                    rank=node.first_rank,
                    is_retryable=True,
                    step=self._step,
                    host=node.name,
                )
            )

    def hear(self, node: Node, message: Message, now: float) -> None:
        """Take what a host tells. Raises `ValueError` for what makes no sense."""
        node.heard_at = now
        try:
            self._hear(node, message, now)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"a host told {dict(message)!r:.200}") from error

    def _hear(self, node: Node, message: Message, now: float) -> None:
        step = message.get("step")
        if step is not None:
            self._step = max(self._step or 0, int(step))
        present = node.busy and message.get("attempt") == self._attempt.number
        match message["tell"]:
            case "beat":
                pass
            case "ready":
                node.ready = True
                self._room_at = min(self._room_at, now + SETTLE_SECONDS)
            case "failed" if present:
                self._note(
                    WorkerFailure.read(message["failure"], now - max(0.0, float(message["age"])))
                )
            case "ended" if present:
                node.busy = False
            case "failed" | "ended":
                pass  # of an attempt that is over
            case "signalled":
                self._stop_by_signal(
                    node, signal.Signals(message["signal"]), now, again=bool(message["again"])
                )
            case other:
                raise ValueError(f"a host told {other!r:.200}")

    def update(self, now: float) -> None:
        """Do what is due."""
        for node in [
            node for node in self._nodes if node.ready and now - node.heard_at > LOST_SECONDS
        ]:
            self.leave(node, f"nothing was heard of it for {LOST_SECONDS:g} s", now)
        for node in [node for node in self._nodes if node.leaving and not node.busy]:
            self._nodes.remove(node)
            node.tell({"order": "end", "attempt": self._attempt.number, "signal": signal.SIGTERM})
        if self.phase is Phase.GATHERING:
            self._gather(now)
        elif self.phase is Phase.RUNNING:
            self._watch(now)
        elif self.phase is Phase.STOPPING:
            self._wait_for_ends(now)

    def _gather(self, now: float) -> None:
        ready = [node for node in self._nodes if node.ready]
        loading = [
            node for node in self._nodes if not node.ready and now - node.joined_at < LOAD_SECONDS
        ]
        # who goes on waits for nobody
        settled = self._attempt.number >= 0 or (not loading and now >= self._room_at)
        if len(ready) >= self._terms.most or (len(ready) >= self._terms.least and settled):
            self._deal(ready[: self._terms.most])
        elif now - self._since > COME_SECONDS and len(ready) + len(loading) < self._terms.least:
            lost = "" if self._lost is None else f"{self._lost}, and none came in its place: "
            self._end(
                {
                    "error": f"{lost}{self._present()} are here after {COME_SECONDS:g} s; start the same command on the others"
                }
            )

    def _deal(self, nodes: list[Node]) -> None:
        """Start an attempt: ranks in the order of joining, no more workers than lanes."""
        self.phase, self._room_at = Phase.RUNNING, math.inf
        self._attempt = attempt = Attempt(self._attempt.number + 1)
        self._open_attempt(attempt.number)
        workers = min(sum(node.room for node in nodes), self._terms.lanes or sys.maxsize)
        first_rank = 0
        for node in nodes:
            local_workers = min(node.room, workers - first_rank)
            if local_workers:
                node.busy, node.first_rank = True, first_rank
                attempt.nodes.append(node)
                place = {
                    "first_rank": first_rank,
                    "local_workers": local_workers,
                    "workers": workers,
                }
                node.tell({"order": "start", "attempt": attempt.number, **place})
                first_rank += local_workers

    def _watch(self, now: float) -> None:
        attempt = self._attempt
        if not attempt.nodes_at_work:
            self._end_attempt(now)
        elif attempt.faults:
            self._decide(now)
        elif (
            now >= self._room_at
            and attempt.nodes_at_work == attempt.nodes
            and self._has_use_for_more()
        ):
            self._log(f"workers snapshot, and go on with more hosts: {self._present()}")
            self._ask_to_stop(Why.CHANGE, signal.SIGTERM, now)

    def _has_use_for_more(self) -> bool:
        nodes = self._attempt.nodes
        spare = any(node.ready and node not in nodes for node in self._nodes)
        return (
            spare
            and len(nodes) < self._terms.most
            and sum(node.room for node in nodes) < (self._terms.lanes or sys.maxsize)
        )

    def _note(self, fault: WorkerFailure) -> None:
        attempt = self._attempt
        if attempt.why is Why.CHANGE and fault.status == ASKED_TO_STOP:
            attempt.ended_as_asked = True
            return
        attempt.faults.append(fault)
        attempt.decide_at = min(attempt.decide_at, fault.at + self._decision_delay(fault))

    def _decision_delay(self, fault: WorkerFailure) -> float:
        """Return how long to wait for an earlier failure, or for workers that fail because of this one."""
        if len(self._attempt.nodes) > 1:
            return EXPLAIN_SECONDS if fault.is_secondary else GRACE_SECONDS
        return 0.0 if self._may_go_on(fault) else EXIT_SECONDS

    def _decide(self, now: float) -> None:
        """When all is known that explains a failure, end the attempt, and the run unless it can go on."""
        fault = self._attempt.first
        if fault is not None and now >= self._attempt.decide_at:
            go_on = self._may_go_on(fault)
            self._tell_all({"order": "stop", "kill": go_on})
            self._stop(Why.RESTART if go_on else Why.FAILURE, now + FAREWELL_SECONDS)

    def _may_go_on(self, fault: WorkerFailure) -> bool:
        in_vain = 0 if self._step is not None and self._step > self._furthest else self._in_vain
        return fault.is_retryable and self._step is not None and in_vain < self._terms.max_restarts

    def _stop_by_signal(self, node: Node, number: int, now: float, *, again: bool) -> None:
        attempt = self._attempt
        if again:
            attempt.kill_at, attempt.overdue = min(attempt.kill_at, now), False
        elif number == signal.SIGTERM and self._can_spare(node):
            node.leaving = True
            self._log(
                f"host {node.name} was told to leave by SIGTERM, and the run goes on without it: {self._present()}"
            )
            if self.phase is Phase.RUNNING and node.busy:
                self._ask_to_stop(Why.CHANGE, number, now)
        elif self.phase is Phase.GATHERING:
            self._end({"signal": number})
        elif self.phase is Phase.RUNNING:
            attempt.signal = number
            self._ask_to_stop(Why.SIGNAL, number, now)
            if attempt.faults:  # there is nothing left to snapshot
                attempt.kill_at = now
        elif self.phase is Phase.STOPPING:
            attempt.signal = attempt.signal or number

    def _can_spare(self, node: Node) -> bool:
        others = [
            other
            for other in self._nodes
            if other.ready and not other.leaving and other is not node
        ]
        return not node.leads and len(others) >= self._terms.least

    def _ask_to_stop(self, why: Why, number: int, now: float) -> None:
        """Let workers snapshot and end. One host is told: its workers agree with all others on the step, and none is disturbed twice."""
        for node in self._attempt.nodes_at_work[:1]:
            node.tell({"order": "signal", "attempt": self._attempt.number, "signal": number})
        self._stop(why, now + self._terms.grace_period)
        self._attempt.overdue = True

    def _stop(self, why: Why, kill_at: float) -> None:
        self.phase = Phase.STOPPING
        self._attempt.why, self._attempt.kill_at, self._attempt.give_up_at = why, kill_at, math.inf

    def _wait_for_ends(self, now: float) -> None:
        attempt = self._attempt
        if not attempt.nodes_at_work:
            self._end_attempt(now)
        elif (
            attempt.why is Why.CHANGE
            and attempt.first is not None
            and not attempt.first.is_secondary
        ):
            self._decide(now)
        elif now >= attempt.give_up_at:
            for node in attempt.nodes_at_work:
                self.leave(node, f"its workers did not end within {FAREWELL_SECONDS:g} s", now)
        elif now >= attempt.kill_at:
            overdue = {"overdue": True} if attempt.overdue else {}
            self._tell_all({"order": "stop", "kill": True, **overdue})
            attempt.kill_at, attempt.give_up_at = math.inf, now + FAREWELL_SECONDS

    def _end_attempt(self, now: float) -> None:
        attempt, fault = self._attempt, self._attempt.first
        if attempt.signal:
            self._end({"signal": attempt.signal})
        elif attempt.ended_as_asked and (fault is None or fault.is_secondary):
            self._go_on(now)
        elif fault is None:
            self._end({})
        elif attempt.why is not Why.FAILURE and self._may_go_on(fault):
            step = self._step or 0
            self._in_vain = 1 if step > self._furthest else self._in_vain + 1
            self._furthest = max(self._furthest, step)
            self._tell_all({"order": "restarting", "failure": asdict(fault)})
            self._go_on(now)
        else:
            self._end({"failure": asdict(fault)})

    def _go_on(self, now: float) -> None:
        self.phase, self._since = Phase.GATHERING, now
        self._gather(now)

    def _end(self, outcome: Message) -> None:
        self.phase = Phase.OVER
        self._tell_all({"order": "end", **outcome})

    def _tell_all(self, order: Message) -> None:
        for node in self._nodes:
            node.tell({"attempt": self._attempt.number, **order})

    def _present(self) -> str:
        names = ", ".join(node.name for node in self._nodes) or "none"
        few, many = self._terms.least, self._terms.most
        return f"{len(self._nodes)} of {few if few == many else f'{few} to {many}'} hosts ({names})"
