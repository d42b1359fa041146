"""Membership, with a clock that the tests move."""

from __future__ import annotations

import signal
from contextlib import suppress
from itertools import accumulate
from random import Random

import pytest

from samestep.launch.attempt import ElasticPolicy, Node, Phase
from samestep.launch.membership import (
    CAUSE_SECONDS,
    JOIN_SECONDS,
    KILL_SECONDS,
    LOAD_SECONDS,
    LOST_SECONDS,
    PROBATION_SECONDS,
    Membership,
)

POLICY = {
    "min_nodes": 1,
    "max_nodes": 4,
    "lanes": None,
    "max_restarts": 3,
    "grace_period": 30.0,
}


class Hosts:
    """A membership, and the orders to each host."""

    def __init__(self, **policy):
        self.now = 100.0
        self.log = []
        self.attempts = []
        self.nodes = {}
        self.sent = {}
        self.membership = Membership(
            ElasticPolicy(**{**POLICY, **policy}),
            self.now,
            open_attempt=self.attempts.append,
            log=self.log.append,
        )

    def join(self, name, workers=1, *, ready=True, leads=False):
        sent = []
        node = Node(name, workers, sent.append, self.now, leads=leads)
        self.membership.join(node)
        self.nodes[node.name], self.sent[node.name] = node, sent
        if ready:
            self.report(node.name, "ready")
        return node.name

    def report(self, name, what, **fields):
        self.membership.receive(
            self.nodes[name],
            {"report": what, "attempt": len(self.attempts) - 1, **fields},
            self.now,
        )

    def fail(self, name, *, age=0.0, **failure):
        defaults = {
            "rank": 0,
            "at": 0.0,
            "summary": "failed",
            "traceback": "",
            "status": 1,
            "is_secondary": False,
            "is_retryable": False,
        }
        self.report(
            name, "failed", age=age, failure={**defaults, "step": None, "host": name, **failure}
        )

    def lose(self, name):
        self.membership.leave(self.nodes.pop(name), "its launcher ended", self.now)

    def end(self, *names):
        for name in names:
            self.report(name, "ended")
        self.wait(0)

    def wait(self, seconds):
        """Let time pass, with heartbeats."""
        end = self.now + seconds
        while True:
            self.membership.update(self.now)
            if self.now >= end:
                return
            self.now = min(self.now + 0.5, end)
            for name in self.nodes:
                self.report(name, "heartbeat")

    def orders(self, name):
        """Return the orders to a host since the last call, without its attempt."""
        sent, self.sent[name][:] = list(self.sent[name]), []
        return [{key: value for key, value in order.items() if key != "attempt"} for order in sent]

    def last(self, name):
        return self.orders(name)[-1]


def start_of(first_rank, local_workers, workers):
    return {
        "order": "start",
        "first_rank": first_rank,
        "local_workers": local_workers,
        "workers": workers,
    }


@pytest.fixture
def two():
    """Two hosts in a run that has begun, so that workers can be restarted."""
    hosts = Hosts(max_nodes=2)
    hosts.join("a", 2)
    hosts.join("b", 1)
    hosts.wait(0)
    hosts.report("a", "heartbeat", step=5)
    assert hosts.orders("a") == [start_of(0, 2, 3)]
    assert hosts.orders("b") == [start_of(2, 1, 3)]
    return hosts


def test_ranks_follow_the_order_of_joining():
    hosts = Hosts(min_nodes=2, max_nodes=2)
    hosts.join("b", 3)
    hosts.wait(5)
    assert not hosts.orders("b")
    hosts.join("a", 1)
    hosts.wait(0)
    assert hosts.orders("b") == [start_of(0, 3, 4)]
    assert hosts.orders("a") == [start_of(3, 1, 4)]


def test_the_host_that_leads_has_the_first_ranks():
    hosts = Hosts(min_nodes=2, max_nodes=2)
    hosts.join("b")
    hosts.join("a", leads=True)
    hosts.wait(0)
    assert hosts.orders("a") == [start_of(0, 1, 2)]


def test_there_are_at_most_as_many_workers_as_lanes():
    hosts = Hosts(lanes=3, max_nodes=3)
    for name in "abc":
        hosts.join(name, 2)
    hosts.wait(0)
    assert hosts.orders("a") == [start_of(0, 2, 3)]
    assert hosts.orders("b") == [start_of(2, 1, 3)]
    assert hosts.orders("c") == []
    hosts.end("a", "b")
    assert [hosts.last(name) for name in "abc"] == 3 * [{"order": "end"}]


def test_an_elastic_run_waits_for_hosts_that_load_torch():
    hosts = Hosts()
    hosts.join("a")
    hosts.join("b", ready=False)
    hosts.wait(10)
    assert not hosts.orders("a")
    hosts.report("b", "ready")
    hosts.wait(1)
    assert hosts.orders("a") == [start_of(0, 1, 2)]


def test_too_few_hosts_end_the_run():
    hosts = Hosts(min_nodes=3)
    hosts.join("a")
    hosts.join("b", ready=False)
    hosts.wait(JOIN_SECONDS + 1)
    (end,) = hosts.orders("a")
    assert end["error"].startswith(
        "only 2 of 3 to 4 hosts (a, b) joined within 30 s; start the same command"
    )


def test_a_host_that_never_loads_ends_the_run():
    hosts = Hosts(min_nodes=2)
    hosts.join("a")
    hosts.join("b", ready=False)
    hosts.wait(LOAD_SECONDS - 1)
    assert not hosts.orders("a")
    hosts.wait(2)
    assert "error" in hosts.last("a")


def test_a_name_that_is_taken_gets_a_number():
    hosts = Hosts()
    assert [hosts.join("a"), hosts.join("a"), hosts.join("a")] == ["a", "a (2)", "a (3)"]


def test_a_host_that_is_lost_is_left_out(two):
    two.lose("b")
    two.wait(0.5)
    assert two.orders("a") == [{"order": "stop", "kill": True}]
    two.end("a")
    assert two.orders("a")[-1] == start_of(0, 2, 2)
    assert two.attempts == [0, 1]


def test_a_silent_host_is_lost(two):
    silent = two.nodes.pop("b")
    two.wait(LOST_SECONDS + 1)
    assert two.orders("a") == [{"order": "stop", "kill": True}]
    assert silent not in two.membership._nodes


def test_a_host_that_flaps_stops_the_others_less_and_less():
    """It is lost every 20 seconds for an hour; each time it is used again, all restart twice."""
    hosts = Hosts(max_nodes=2)
    hosts.join("a", leads=True)
    hosts.join("b")
    hosts.wait(0)
    for step in range(180):
        hosts.report("a", "heartbeat", step=step)
        hosts.lose("b")
        hosts.wait(0.5)
        hosts.join("b")
        for _ in range(39):
            hosts.wait(0.5)
            if "signal" in [order["order"] for order in hosts.orders("a")]:
                hosts.fail("a", status=143)
            if hosts.membership.phase is Phase.STOPPING:
                hosts.end(*(name for name, node in hosts.nodes.items() if node.busy))
    assert len(hosts.attempts) <= 6
    hosts.wait(PROBATION_SECONDS * 2**9)  # it is used once it stays
    assert "signal" in [order["order"] for order in hosts.orders("a")]


def test_a_host_that_flaps_is_used_at_once_if_it_is_needed():
    hosts = Hosts(min_nodes=2, max_nodes=2)
    hosts.join("a", leads=True)
    hosts.join("b")
    hosts.wait(0)
    for step in range(5):
        hosts.report("a", "heartbeat", step=step)
        hosts.lose("b")
        hosts.wait(0.5)
        hosts.end("a")
        hosts.join("b")
        hosts.wait(0)
        assert hosts.orders("a")[-1] == start_of(0, 1, 2)


def test_a_run_that_needs_all_hosts_waits_for_a_replacement():
    hosts = Hosts(min_nodes=2, max_nodes=2)
    hosts.join("a")
    hosts.join("b")
    hosts.wait(0)
    hosts.report("a", "heartbeat", step=1)
    hosts.lose("b")
    hosts.wait(0.5)
    hosts.end("a")
    hosts.wait(20)
    hosts.join("c")
    hosts.wait(0)
    assert hosts.orders("a")[-1] == start_of(0, 1, 2)
    hosts.lose("c")
    hosts.report("a", "heartbeat", step=2)
    hosts.wait(0.5)
    hosts.end("a")
    hosts.wait(JOIN_SECONDS + 1)
    assert hosts.last("a")["error"].startswith(
        "host c was lost (its launcher ended) and was not replaced: only 1 of 2 hosts (a) joined"
    )


def test_the_earliest_primary_failure_decides(two):
    two.fail("a", rank=0, is_secondary=True, age=3.0)
    two.wait(1)
    assert not two.orders("a")
    two.fail("b", rank=2, summary="late", age=0.1)
    two.fail("a", rank=1, summary="early", age=0.2)
    two.wait(0.5)
    assert two.orders("a") == [{"order": "stop", "kill": False}]
    two.end("a", "b")
    for name in "ab":
        assert two.last(name)["failure"]["summary"] == "early"


def test_secondary_failures_wait_for_their_cause_and_then_end_the_run(two):
    two.fail("a", is_secondary=True, summary="no answer")
    two.wait(CAUSE_SECONDS - 0.5)
    assert not two.orders("b")
    two.wait(1)
    two.end("a", "b")
    assert two.last("b")["failure"]["summary"] == "no answer"


def test_killed_workers_restart_until_they_make_no_progress(two):
    for step in (6, 7, 7, 7, 7):
        assert two.membership.phase is Phase.RUNNING
        two.report("b", "heartbeat", step=step)
        two.fail("b", is_retryable=True, summary="killed")
        two.wait(0.5)
        two.end("a", "b")
    assert two.attempts == [0, 1, 2, 3, 4]
    assert two.last("a")["failure"]["summary"] == "killed"


FAULT = {"rank": 2, "is_retryable": True, "is_faulty": True, "step": 7, "summary": "other bits"}


@pytest.mark.parametrize("exits_first", [False, True])
def test_a_run_goes_on_without_a_host_whose_hardware_is_faulty(two, exits_first):
    two.report("a", "heartbeat", step=7)
    two.fail("a", is_secondary=True, summary="the bits of worker 2 are wrong")
    two.fail("b", **FAULT)
    if not exits_first:
        two.wait(1)
        assert two.last("b") == {"order": "stop", "kill": True}
    two.end("a", "b")
    two.wait(1)
    end = two.last("b")
    assert (end["order"], end["failure"]["summary"]) == ("end", "other bits")
    assert two.last("a") == start_of(0, 2, 2)
    assert two.log[-1] == (
        "host b is left out, because its hardware is faulty: other bits [step 7, host b]"
    )
    two.join("b")  # started once more: it waits, as the run does not need it
    two.wait(60)
    assert len(two.attempts) == 2


@pytest.mark.parametrize(("min_nodes", "rank"), [(2, 1), (1, 0)])
def test_faulty_hardware_of_a_host_that_is_needed_ends_the_run(min_nodes, rank):
    """It is one of the least number of hosts, or the first host."""
    hosts = Hosts(min_nodes=min_nodes, max_nodes=2)
    hosts.join("a", leads=True)
    hosts.join("b")
    hosts.wait(2)
    hosts.report("a", "heartbeat", step=7)
    hosts.fail("ab"[rank], **{**FAULT, "rank": rank})
    hosts.wait(1)
    assert hosts.last("a") == {"order": "stop", "kill": False}
    hosts.end("a", "b")
    for name in "ab":
        assert hosts.last(name)["failure"]["summary"] == "other bits"


def test_workers_killed_before_the_run_began_end_it():
    hosts = Hosts(max_nodes=1)
    hosts.join("a")
    hosts.wait(0)
    hosts.fail("a", is_retryable=True)
    hosts.wait(0.5)
    hosts.end("a")
    assert "failure" in hosts.last("a")


def test_a_new_host_takes_part_after_a_snapshot(two):
    two.lose("b")
    two.wait(0.5)
    two.end("a")
    two.join("c")
    two.orders("a")
    two.wait(2)
    assert two.orders("a") == [{"order": "signal", "signal": signal.SIGTERM}]
    two.fail("a", status=143)
    two.fail("a", rank=1, is_secondary=True)
    two.end("a")
    assert two.orders("a") == [start_of(0, 2, 3)]
    assert two.orders("c") == [start_of(2, 1, 3)]


def test_a_failure_during_a_resize_ends_the_run():
    hosts = Hosts()
    hosts.join("a")
    hosts.wait(2)
    hosts.join("b")
    hosts.wait(2)
    hosts.fail("a", summary="wrong")
    hosts.wait(0.5)
    hosts.end("a")
    assert hosts.last("b")["failure"]["summary"] == "wrong"


def test_a_spare_host_waits_and_replaces_one_that_is_lost(two):
    two.join("c", 5)
    two.wait(3)
    assert two.orders("a") == two.orders("c") == []
    two.lose("b")
    two.wait(0.5)
    two.end("a")
    assert two.orders("c")[-1] == start_of(2, 5, 7)


def test_a_signal_is_sent_to_one_host_and_ends_the_run(two):
    two.report("b", "signaled", signal=2, again=False)
    assert two.orders("a") == [{"order": "signal", "signal": 2}]
    assert two.orders("b") == []
    two.fail("a", status=130)
    two.end("a", "b")
    assert two.last("a") == two.last("b") == {"order": "end", "signal": 2}


def test_a_spare_host_leaves_on_sigterm_after_a_snapshot(two):
    two.report("b", "signaled", signal=15, again=False)
    assert two.orders("a") == [{"order": "signal", "signal": 15}]
    two.fail("a", status=143)
    two.fail("b", is_secondary=True)
    two.end("a", "b")
    assert two.orders("b") == [{"order": "end", "signal": 15}]
    assert two.orders("a") == [start_of(0, 2, 2)]
    two.lose("b")
    two.wait(2)
    assert two.orders("a") == []


@pytest.mark.parametrize(("min_nodes", "name"), [(2, "b"), (1, "a")])
def test_a_required_host_stops_the_run_on_sigterm(min_nodes, name):
    hosts = Hosts(min_nodes=min_nodes, max_nodes=2)
    hosts.join("a", leads=True)
    hosts.join("b")
    hosts.wait(0)
    hosts.report(name, "signaled", signal=15, again=False)
    hosts.end("a", "b")
    assert hosts.last("a") == hosts.last("b") == {"order": "end", "signal": 15}


def test_an_idle_host_leaves_on_sigterm_without_disturbing_others(two):
    two.join("c")
    two.report("c", "signaled", signal=15, again=False)
    two.wait(0)
    assert two.orders("c") == [{"order": "end", "signal": 15}]
    assert two.orders("a") == []


def test_a_second_signal_does_not_wait(two):
    two.report("b", "signaled", signal=2, again=False)
    two.report("b", "signaled", signal=2, again=True)
    two.wait(0)
    assert two.last("a") == {"order": "stop", "kill": True}


def test_hosts_whose_workers_do_not_exit_are_lost(two):
    two.fail("a", summary="wrong")
    two.wait(0.5)
    two.end("a")
    two.wait(2 * KILL_SECONDS + 1)
    assert two.last("a")["failure"]["summary"] == "wrong"
    assert two.orders("b") == [{"order": "stop", "kill": False}, {"order": "stop", "kill": True}]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"report": None},
        {"report": "failed", "attempt": 0},
        {"report": "heartbeat", "step": "x"},
        {"report": "signaled", "signal": None},
    ],
)
def test_an_invalid_report_is_an_error(two, message):
    with pytest.raises(ValueError, match=r"invalid|valid"):
        two.membership.receive(two.nodes["a"], message, two.now)


def test_any_report_is_handled_or_an_error():
    random = Random(0)
    values = [
        None,
        True,
        0,
        -1,
        15,
        10**30,
        0.5,
        float("inf"),
        float("nan"),
        "",
        "x",
        [],
        {},
        {"rank": 0},
    ]
    failure = dict.fromkeys(
        [
            "rank",
            "summary",
            "traceback",
            "status",
            "is_secondary",
            "is_retryable",
            "step",
            "host",
        ]
    )
    hosts = Hosts()
    handled = 0
    for _ in range(20_000):
        if not hosts.nodes or hosts.membership.phase is Phase.FINISHED:
            hosts = Hosts(max_nodes=1)
            hosts.join("a")
            hosts.wait(0)
        names = random.sample(
            ["attempt", "step", "age", "failure", "signal", "again"], k=random.randrange(7)
        )
        message = {name: random.choice(values) for name in names}
        message["report"] = random.choice(
            ["heartbeat", "ready", "failed", "ended", "signaled", random.choice(values)]
        )
        if "failure" in message:
            message["failure"] = {name: random.choice(values) for name in failure}
        with suppress(ValueError):
            hosts.membership.receive(hosts.nodes["a"], message, hosts.now)
            handled += 1
        hosts.wait(random.choice([0, 0, 0, 1]))
    assert handled > 1000


def cause_event(hosts, name, node, random):
    """Cause a random event on a host, or none."""
    event = random.randrange(40)
    if event == 0:
        hosts.lose(name)
    elif event in {1, 2} and node.busy:
        failure = {
            "is_retryable": random.random() < 0.9,
            "is_secondary": random.random() < 0.3,
        }
        hosts.fail(name, status=random.choice([1, 143]), **failure)
    elif event < 12 and node.busy:
        hosts.report(name, "ended", step=random.randrange(100))
    elif event < 20:
        hosts.report(name, "ready")
    elif event == 20:
        hosts.report(name, "signaled", signal=signal.SIGTERM, again=random.random() < 0.2)


@pytest.mark.parametrize("seed", range(40))
def test_attempts_never_overlap_and_every_host_receives_the_end(
    seed,
):
    random = Random(seed)
    hosts = Hosts(min_nodes=random.randint(1, 2), max_nodes=random.randint(2, 4))
    names = iter(f"host {number}" for number in range(1000))
    for _ in range(500):
        if len(hosts.nodes) < 5 and random.random() < 0.2:
            hosts.join(next(names), random.randint(1, 3), ready=False)
        for name, node in list(hosts.nodes.items()):
            cause_event(hosts, name, node, random)
        busy = [node for node in hosts.nodes.values() if node.busy]
        hosts.wait(random.choice([0, 0.5, 2]))
        # not lost
        hosts.nodes = {
            name: node for name, node in hosts.nodes.items() if node in hosts.membership._nodes
        }
        started = {
            name: [order for order in hosts.orders(name) if order["order"] in {"start", "end"}]
            for name in hosts.nodes
        }
        if hosts.membership.phase is Phase.FINISHED:
            assert all(orders[-1]["order"] == "end" for orders in started.values())
            return
        started_ranks = sorted(
            (orders[-1]["first_rank"], node.max_workers)
            for node, orders in zip(hosts.nodes.values(), started.values(), strict=True)
            if orders
        )
        assert not started_ranks or not set(busy) & set(hosts.nodes.values())
        assert [rank for rank, _ in started_ranks] == list(
            accumulate([0, *(count for _, count in started_ranks)])
        )[: len(started_ranks)]
