"""Decisions about the hosts of a run, based only on their reports and the time."""

from __future__ import annotations

import itertools
import math
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Final

from samestep.host import SIGNALED
from samestep.launch.attempt import (
    Attempt,
    ElasticPolicy,
    Message,
    Node,
    Phase,
    RestartBudget,
    StopReason,
    WorkerFailure,
)

LOST_SECONDS: Final = 20.0  # a host that sends nothing for this long is lost
JOIN_SECONDS: Final = 30.0  # time for the minimum number of hosts to join
LOAD_SECONDS: Final = 300.0  # time that a joining host has to load torch
SETTLE_SECONDS: Final = 1.0  # time for more hosts to join once there are enough
EXIT_SECONDS: Final = 2.0  # time for the other workers of a single host to exit after a failure
REORDER_SECONDS: Final = 0.2  # time for an earlier failure of another host to arrive
CAUSE_SECONDS: Final = LOST_SECONDS + 1.0  # time for the cause of a secondary failure to arrive
# time for a host to report that its workers were killed: longer than they may wait for a disk
KILL_SECONDS: Final = 40.0
PROBATION_SECONDS: Final = 10.0  # time until the run stops for a host that was lost; doubles
FORGET_SECONDS: Final = 3600.0  # time after which an earlier loss of a host no longer counts
MOST_LOSSES: Final = 10  # as which faulty hardware counts: the host is used only if it is needed
STATUS_ON_SIGTERM: Final = SIGNALED + signal.SIGTERM  # exit status of a worker that took a snapshot


class Membership:
    """The hosts of a run, in the order of their ranks, and the orders to send them.

    Orders: `start` workers; send them a `signal`; `stop` them, immediately if `kill` is true;
    `restarting` names the failure; `end` the run. Hosts report `ready`, `failed` for each worker
    that failed, `ended` when no worker is left, `signaled`, and `heartbeat`.
    """

    def __init__(
        self,
        policy: ElasticPolicy,
        now: float,
        *,
        open_attempt: Callable[[int], None],
        log: Callable[[str], None],
    ) -> None:
        self.phase = Phase.JOINING
        self._policy, self._joining_since = policy, now
        self._nodes: list[Node] = []
        self._attempt = Attempt(-1)
        self._open_attempt, self._log = open_attempt, log
        self._settled_at = math.inf
        self._last_loss = ""
        self._restarts = RestartBudget(policy.max_restarts)
        self._losses: dict[str, tuple[int, float]] = {}  # number and time of the last, by host

    def join(self, node: Node) -> None:
        """Add a host; one whose name is taken gets a number.

        Ranks follow the order of joining, except that the host that `leads` has the first ranks. A
        host that was lost before is used at once only if it is needed.
        """
        node.host = node.name
        losses, lost_at = self._losses.get(node.host, (0, -math.inf))
        if losses and node.joined_at - lost_at < FORGET_SECONDS:
            probation = min(PROBATION_SECONDS * 2 ** (losses - 1), FORGET_SECONDS)
            node.trusted_at = node.joined_at + probation
        used_names = {other.name for other in self._nodes}
        if node.name in used_names:
            names = (f"{node.name} ({number})" for number in itertools.count(2))
            node.name = next(name for name in names if name not in used_names)
        node.last_seen = node.joined_at
        self._nodes.insert(0 if node.leads else len(self._nodes), node)
        self._log(f"host {node.name} joined with {node.max_workers} workers: {self._present()}")

    def leave(self, node: Node, reason: str, now: float) -> None:
        """Remove a host that was lost."""
        if node not in self._nodes:
            return
        self._nodes.remove(node)
        node.disconnect()
        if self.phase is not Phase.FINISHED:
            losses, lost_at = self._losses.get(node.host, (0, now))
            self._losses[node.host] = (losses if now - lost_at < FORGET_SECONDS else 0) + 1, now
            self._last_loss = f"host {node.name} was lost ({reason})"
            self._log(f"{self._last_loss}: {self._present()}")
        if node.busy:
            node.busy = False
            summary = f"its host was lost: {reason}"
            failure = WorkerFailure(node.first_rank, now, summary, is_retryable=True)
            self._add_failure(replace(failure, step=self._restarts.step, host=node.name))

    def see_all(self, now: float) -> None:
        """Let each host have as much time as if it had just sent a message."""
        for node in self._nodes:
            node.last_seen = now

    def receive(self, node: Node, message: Message, now: float) -> None:
        """Handle a report from a host. Raises `ValueError` if it is invalid."""
        node.last_seen = now
        try:
            self._handle(node, message, now)
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(f"invalid report from a host: {dict(message)!r:.200}") from error

    def _handle(self, node: Node, message: Message, now: float) -> None:
        if (step := message.get("step")) is not None:
            self._restarts.report_step(int(step))
        is_current = node.busy and message.get("attempt") == self._attempt.number
        match message["report"]:
            case "heartbeat":
                pass
            case "ready":
                node.ready = True
                self._settled_at = min(self._settled_at, now + SETTLE_SECONDS)
            case "failed" if is_current:
                at = now - max(0.0, float(message["age"]))
                self._add_failure(WorkerFailure.of_message(message["failure"], at))
            case "ended" if is_current:
                node.busy = False
            case "failed" | "ended":
                pass  # from an earlier attempt
            case "signaled":
                number = signal.Signals(message["signal"])
                self._handle_signal(node, number, now, again=bool(message["again"]))
            case other:
                raise ValueError(f"invalid report from a host: {other!r:.200}")

    def update(self, now: float) -> None:
        """Make the decisions that are due."""
        for node in list(self._nodes):
            limit = LOST_SECONDS if node.ready else LOAD_SECONDS  # loading may block its thread
            if now - node.last_seen > limit:
                self.leave(node, f"no message for {limit:g} s", now)
            elif node.leaving and not node.busy:
                self._dismiss(node)
        if self.phase is Phase.JOINING:
            self._start_if_enough(now)
        elif self.phase is Phase.RUNNING:
            self._check_attempt(now)
        elif self.phase is Phase.STOPPING:
            self._check_exits(now)

    def _dismiss(self, node: Node) -> None:
        self._nodes.remove(node)
        failure = node.failure
        outcome: Message = {"failure": asdict(failure)} if failure else {"signal": signal.SIGTERM}
        node.send({"order": "end", "attempt": self._attempt.number, **outcome})

    def _start_if_enough(self, now: float) -> None:
        ready = [node for node in self._nodes if node.ready]
        recent = now - LOAD_SECONDS
        loading = [node for node in self._nodes if not node.ready and node.joined_at > recent]
        # a run that continues does not wait for more hosts
        settled = self._attempt.number >= 0 or (not loading and now >= self._settled_at)
        min_nodes, max_nodes = self._policy.min_nodes, self._policy.max_nodes
        trusted = [node for node in ready if now >= node.trusted_at]
        ready = trusted if len(trusted) >= min_nodes else ready
        if len(ready) >= max_nodes or (len(ready) >= min_nodes and settled):
            self._start_attempt(ready[:max_nodes])
        elif now - self._joining_since > JOIN_SECONDS and len(ready) + len(loading) < min_nodes:
            lost = f"{self._last_loss} and was not replaced: " if self._last_loss else ""
            error = f"{lost}only {self._present()} joined within {JOIN_SECONDS:g} s"
            self._end({"error": f"{error}; start the same command on the others"})

    def _start_attempt(self, nodes: list[Node]) -> None:
        """Assign ranks in the order of joining, with no more workers than lanes."""
        self.phase, self._settled_at = Phase.RUNNING, math.inf
        self._attempt = attempt = Attempt(self._attempt.number + 1)
        self._open_attempt(attempt.number)
        workers = min(sum(node.max_workers for node in nodes), self._policy.lanes or sys.maxsize)
        first_rank = 0
        for node in nodes:
            if local_workers := min(node.max_workers, workers - first_rank):
                node.busy, node.first_rank = True, first_rank
                attempt.nodes.append(node)
                order = {"order": "start", "attempt": attempt.number, "workers": workers}
                node.send({**order, "first_rank": first_rank, "local_workers": local_workers})
                first_rank += local_workers

    def _check_attempt(self, now: float) -> None:
        attempt = self._attempt
        if not attempt.busy_nodes:
            self._finish_attempt(now)
        elif attempt.failures:
            self._decide(now)
        elif now >= self._settled_at and self._can_use_more(now):
            self._log(f"taking a snapshot to continue on more hosts: {self._present()}")
            self._request_exit(StopReason.RESIZE, signal.SIGTERM, now)

    def _can_use_more(self, now: float) -> bool:
        nodes = self._attempt.nodes
        ready = [node for node in self._nodes if node.ready and now >= node.trusted_at]
        return (
            self._attempt.busy_nodes == nodes
            and any(node not in nodes for node in ready)
            and len(nodes) < self._policy.max_nodes
            and sum(node.max_workers for node in nodes) < (self._policy.lanes or sys.maxsize)
        )

    def _add_failure(self, failure: WorkerFailure) -> None:
        attempt = self._attempt
        if attempt.stop_reason is StopReason.RESIZE and failure.status == STATUS_ON_SIGTERM:
            attempt.exited_on_request = True
            return
        attempt.failures.append(failure)
        attempt.decide_at = min(attempt.decide_at, failure.at + self._decision_delay(failure))

    def _decision_delay(self, failure: WorkerFailure) -> float:
        """Return how long to wait for an earlier failure, or for workers that fail as a result."""
        if len(self._attempt.nodes) > 1:
            return CAUSE_SECONDS if failure.is_secondary else REORDER_SECONDS
        return 0.0 if self._allows(failure) else EXIT_SECONDS

    def _allows(self, failure: WorkerFailure) -> bool:
        """Return whether workers may be restarted, without the host if its hardware is faulty."""
        allows = self._restarts.allows(failure)
        return allows and (not failure.is_faulty or self._is_spare(self._node_of(failure.rank)))

    def _node_of(self, rank: int) -> Node:
        """Return the host of a worker of this attempt."""
        return [node for node in self._attempt.nodes if node.first_rank <= rank][-1]

    def _leave_out(self, failure: WorkerFailure, now: float) -> None:
        """Continue without the host of a worker whose hardware is faulty."""
        node = self._node_of(failure.rank)
        if not node.leaving:
            node.leaving, node.failure = True, failure
            self._losses[node.host] = MOST_LOSSES, now
            self._log(f"host {node.name} is left out, because its hardware is faulty: {failure}")
        if node in self._nodes and not node.busy:
            self._dismiss(node)

    def _decide(self, now: float) -> None:
        """Stop the attempt once reports of the cause of its failure have had time to arrive."""
        failure = self._attempt.first_failure
        if failure is not None and now >= self._attempt.decide_at:
            restarts = self._allows(failure)
            if restarts and failure.is_faulty:
                self._leave_out(failure, now)
            self._send_all({"order": "stop", "kill": restarts})
            self._stop(StopReason.RESTART if restarts else StopReason.FAILURE, now + KILL_SECONDS)

    def _handle_signal(self, node: Node, number: int, now: float, *, again: bool) -> None:
        attempt = self._attempt
        if again:
            attempt.kill_at, attempt.overdue = min(attempt.kill_at, now), False
        elif number == signal.SIGTERM and self._is_spare(node):
            node.leaving = True
            self._log(f"host {node.name} leaves on SIGTERM; the run continues: {self._present()}")
            if self.phase is Phase.RUNNING and node.busy:
                self._request_exit(StopReason.RESIZE, number, now)
        elif self.phase is Phase.JOINING:
            self._end({"signal": number})
        elif self.phase is Phase.RUNNING:
            attempt.signal = number
            self._request_exit(StopReason.SIGNAL, number, now)
            if attempt.failures:  # a snapshot is no longer possible
                attempt.kill_at = now
        elif self.phase is Phase.STOPPING:
            attempt.signal = attempt.signal or number

    def _is_spare(self, node: Node) -> bool:
        others = [other for other in self._nodes if other.ready and not other.leaving]
        return not node.leads and len(others) - (node in others) >= self._policy.min_nodes

    def _request_exit(self, reason: StopReason, number: int, now: float) -> None:
        """Let workers take a snapshot and exit.

        Only one host gets the signal: its workers agree with all others on the step.
        """
        for node in self._attempt.busy_nodes[:1]:
            node.send({"order": "signal", "attempt": self._attempt.number, "signal": number})
        self._stop(reason, now + self._policy.grace_period)
        self._attempt.overdue = True

    def _stop(self, reason: StopReason, kill_at: float) -> None:
        attempt, self.phase = self._attempt, Phase.STOPPING
        attempt.stop_reason, attempt.kill_at, attempt.give_up_at = reason, kill_at, math.inf

    def _check_exits(self, now: float) -> None:
        attempt, first = self._attempt, self._attempt.first_failure
        if not attempt.busy_nodes:
            self._finish_attempt(now)
        elif attempt.stop_reason is StopReason.RESIZE and first and not first.is_secondary:
            self._decide(now)
        elif now >= attempt.give_up_at:
            for node in attempt.busy_nodes:
                self.leave(node, f"its workers did not exit within {KILL_SECONDS:g} s", now)
        elif now >= attempt.kill_at:
            overdue = {"overdue": True} if attempt.overdue else {}
            self._send_all({"order": "stop", "kill": True, **overdue})
            attempt.kill_at, attempt.give_up_at = math.inf, now + KILL_SECONDS

    def _finish_attempt(self, now: float) -> None:
        attempt, failure = self._attempt, self._attempt.first_failure
        if attempt.signal:
            # without a failure of their own, workers have saved what they could
            unsaved = attempt.failure_besides(attempt.signal)
            self._end({"failure": asdict(unsaved)} if unsaved else {"signal": attempt.signal})
        elif attempt.exited_on_request and (failure is None or failure.is_secondary):
            self._continue(now)
        elif failure is None:
            self._end({})
        elif attempt.stop_reason is not StopReason.FAILURE and self._allows(failure):
            self._restarts.use()
            if failure.is_faulty:  # its workers exited before the decision
                self._leave_out(failure, now)
            self._send_all({"order": "restarting", "failure": asdict(failure)})
            self._continue(now)
        else:
            self._end({"failure": asdict(failure)})

    def _continue(self, now: float) -> None:
        self.phase, self._joining_since = Phase.JOINING, now
        self._start_if_enough(now)

    def _end(self, outcome: Message) -> None:
        self.phase = Phase.FINISHED
        self._send_all({"order": "end", **outcome})

    def _send_all(self, order: Message) -> None:
        for node in self._nodes:
            node.send({"attempt": self._attempt.number, **order})

    def _present(self) -> str:
        names = ", ".join(node.name for node in self._nodes) or "none"
        low, high = self._policy.min_nodes, self._policy.max_nodes
        return f"{len(self._nodes)} of {low if low == high else f'{low} to {high}'} hosts ({names})"
