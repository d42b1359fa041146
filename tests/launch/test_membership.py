"""Which hosts take part in a run, with a clock that the tests move."""

from __future__ import annotations

import signal
from contextlib import suppress
from itertools import accumulate
from random import Random

import pytest

from samestep.launch.membership import (
    COME_SECONDS,
    EXPLAIN_SECONDS,
    FAREWELL_SECONDS,
    LOAD_SECONDS,
    LOST_SECONDS,
    ElasticPolicy,
    Membership,
    Phase,
)

TERMS = {"least": 1, "most": 4, "lanes": None, "max_restarts": 3, "grace_period": 30.0}


class Hosts:
    """A membership, and what it told each host."""

    def __init__(self, **terms):
        self.now = 100.0
        self.log = []
        self.attempts = []
        self.nodes = {}
        self.told = {}
        self.membership = Membership(
            ElasticPolicy(**{**TERMS, **terms}),
            self.now,
            open_attempt=self.attempts.append,
            log=self.log.append,
        )

    def join(self, name, workers=1, *, ready=True, leads=False):
        told = []
        node = self.membership.join(name, workers, told.append, lambda: None, self.now, leads=leads)
        self.nodes[node.name], self.told[node.name] = node, told
        if ready:
            self.hear(node.name, "ready")
        return node.name

    def hear(self, name, what, **fields):
        self.membership.hear(
            self.nodes[name], {"tell": what, "attempt": len(self.attempts) - 1, **fields}, self.now
        )

    def fail(self, name, *, age=0.0, **failure):
        told = {
            "rank": 0,
            "at": 0.0,
            "summary": "failed",
            "traceback": "",
            "status": 1,
            "is_secondary": False,
            "is_retryable": False,
        }
        self.hear(name, "failed", age=age, failure={**told, "step": None, "host": name, **failure})

    def lose(self, name):
        self.membership.leave(self.nodes.pop(name), "its launcher ended", self.now)

    def end(self, *names):
        for name in names:
            self.hear(name, "ended")
        self.wait(0)

    def wait(self, seconds):
        """Let time pass; hosts beat each second."""
        end = self.now + seconds
        while True:
            self.membership.update(self.now)
            if self.now >= end:
                return
            self.now = min(self.now + 0.5, end)
            for name in self.nodes:
                self.hear(name, "beat")

    def orders(self, name):
        """Return what a host was told since the last time, without its attempt."""
        told, self.told[name][:] = list(self.told[name]), []
        return [{key: value for key, value in order.items() if key != "attempt"} for order in told]

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
    """Two hosts that run; whoever is lost or killed may be replaced, as the run has begun."""
    hosts = Hosts(most=2)
    hosts.join("a", 2)
    hosts.join("b", 1)
    hosts.wait(0)
    hosts.hear("a", "beat", step=5)
    assert hosts.orders("a") == [start_of(0, 2, 3)]
    assert hosts.orders("b") == [start_of(2, 1, 3)]
    return hosts


def test_ranks_are_dealt_in_the_order_of_joining_when_all_are_there():
    hosts = Hosts(least=2, most=2)
    hosts.join("b", 3)
    hosts.wait(5)
    assert not hosts.orders("b")
    hosts.join("a", 1)
    hosts.wait(0)
    assert hosts.orders("b") == [start_of(0, 3, 4)]
    assert hosts.orders("a") == [start_of(3, 1, 4)]


def test_the_host_that_leads_has_the_first_ranks():
    hosts = Hosts(least=2, most=2)
    hosts.join("b")
    hosts.join("a", leads=True)
    hosts.wait(0)
    assert hosts.orders("a") == [start_of(0, 1, 2)]


def test_no_more_workers_are_dealt_than_there_are_lanes():
    hosts = Hosts(lanes=3, most=3)
    for name in "abc":
        hosts.join(name, 2)
    hosts.wait(0)
    assert hosts.orders("a") == [start_of(0, 2, 3)]
    assert hosts.orders("b") == [start_of(2, 1, 3)]
    assert hosts.orders("c") == []
    hosts.end("a", "b")
    assert [hosts.last(name) for name in "abc"] == 3 * [{"order": "end"}]


def test_enough_hosts_settle_for_a_moment_and_wait_for_those_that_load_torch():
    hosts = Hosts()
    hosts.join("a")
    hosts.join("b", ready=False)
    hosts.wait(10)
    assert not hosts.orders("a")
    hosts.hear("b", "ready")
    hosts.wait(1)
    assert hosts.orders("a") == [start_of(0, 1, 2)]


def test_too_few_hosts_end_the_run_and_are_named():
    hosts = Hosts(least=3)
    hosts.join("a")
    hosts.join("b", ready=False)
    hosts.wait(COME_SECONDS + 1)
    (end,) = hosts.orders("a")
    assert end["error"].startswith(
        "2 of 3 to 4 hosts (a, b) are here after 30 s; start the same command"
    )


def test_a_host_that_never_loads_is_waited_for_in_vain():
    hosts = Hosts(least=2)
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


def test_a_host_that_says_nothing_is_lost(two):
    silent = two.nodes.pop("b")
    two.wait(LOST_SECONDS + 1)
    assert two.orders("a") == [{"order": "stop", "kill": True}]
    assert silent not in two.membership._nodes


def test_where_all_hosts_are_needed_a_lost_one_is_waited_for():
    hosts = Hosts(least=2, most=2)
    hosts.join("a")
    hosts.join("b")
    hosts.wait(0)
    hosts.hear("a", "beat", step=1)
    hosts.lose("b")
    hosts.wait(0.5)
    hosts.end("a")
    hosts.wait(20)
    hosts.join("c")
    hosts.wait(0)
    assert hosts.orders("a")[-1] == start_of(0, 1, 2)
    hosts.lose("c")
    hosts.hear("a", "beat", step=2)
    hosts.wait(0.5)
    hosts.end("a")
    hosts.wait(COME_SECONDS + 1)
    assert hosts.last("a")["error"].startswith(
        "host c was lost (its launcher ended), and none came in its place: 1 of 2 hosts (a) are here"
    )


def test_the_earliest_failure_that_is_not_because_of_others_decides(two):
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


def test_failures_because_of_others_wait_for_news_of_those_and_then_end_the_run(two):
    two.fail("a", is_secondary=True, summary="no answer")
    two.wait(EXPLAIN_SECONDS - 0.5)
    assert not two.orders("b")
    two.wait(1)
    two.end("a", "b")
    assert two.last("b")["failure"]["summary"] == "no answer"


def test_workers_killed_from_outside_are_replaced_until_they_make_no_step_any_more(two):
    for step in (6, 7, 7, 7, 7):
        assert two.membership.phase is Phase.RUNNING
        two.hear("b", "beat", step=step)
        two.fail("b", is_retryable=True, summary="killed")
        two.wait(0.5)
        two.end("a", "b")
    assert two.attempts == [0, 1, 2, 3, 4]
    assert two.last("a")["failure"]["summary"] == "killed"


def test_workers_killed_before_the_run_began_end_it():
    hosts = Hosts(most=1)
    hosts.join("a")
    hosts.wait(0)
    hosts.fail("a", is_retryable=True)
    hosts.wait(0.5)
    hosts.end("a")
    assert "failure" in hosts.last("a")


def test_a_host_that_comes_is_taken_in_after_a_snapshot(two):
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


def test_a_failure_while_room_is_made_ends_the_run():
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


def test_a_signal_reaches_the_workers_of_one_host_and_ends_the_run(two):
    two.hear("b", "signalled", signal=2, again=False)
    assert two.orders("a") == [{"order": "signal", "signal": 2}]
    assert two.orders("b") == []
    two.fail("a", status=130)
    two.end("a", "b")
    assert two.last("a") == two.last("b") == {"order": "end", "signal": 2}


def test_a_host_that_can_be_spared_leaves_on_sigterm_after_a_snapshot(two):
    two.hear("b", "signalled", signal=15, again=False)
    assert two.orders("a") == [{"order": "signal", "signal": 15}]
    two.fail("a", status=143)
    two.fail("b", is_secondary=True)
    two.end("a", "b")
    assert two.orders("b") == [{"order": "end", "signal": 15}]
    assert two.orders("a") == [start_of(0, 2, 2)]
    two.lose("b")
    two.wait(2)
    assert two.orders("a") == []


@pytest.mark.parametrize(("least", "told"), [(2, "b"), (1, "a")])
def test_a_host_that_leads_or_is_needed_stops_the_run_on_sigterm(least, told):
    hosts = Hosts(least=least, most=2)
    hosts.join("a", leads=True)
    hosts.join("b")
    hosts.wait(0)
    hosts.hear(told, "signalled", signal=15, again=False)
    hosts.end("a", "b")
    assert hosts.last("a") == hosts.last("b") == {"order": "end", "signal": 15}


def test_a_spare_leaves_on_sigterm_and_disturbs_nobody(two):
    two.join("c")
    two.hear("c", "signalled", signal=15, again=False)
    two.wait(0)
    assert two.orders("c") == [{"order": "end", "signal": 15}]
    assert two.orders("a") == []


def test_a_second_signal_does_not_wait(two):
    two.hear("b", "signalled", signal=2, again=False)
    two.hear("b", "signalled", signal=2, again=True)
    two.wait(0)
    assert two.last("a") == {"order": "stop", "kill": True}


def test_hosts_whose_workers_do_not_end_are_given_up(two):
    two.fail("a", summary="wrong")
    two.wait(0.5)
    two.end("a")
    two.wait(2 * FAREWELL_SECONDS + 1)
    assert two.last("a")["failure"]["summary"] == "wrong"
    assert two.orders("b") == [{"order": "stop", "kill": False}, {"order": "stop", "kill": True}]


@pytest.mark.parametrize(
    "message",
    [
        {},
        {"tell": None},
        {"tell": "failed", "attempt": 0},
        {"tell": "beat", "step": "x"},
        {"tell": "signalled", "signal": None},
    ],
)
def test_what_makes_no_sense_is_an_error(two, message):
    with pytest.raises(ValueError, match=r"told|valid"):
        two.membership.hear(two.nodes["a"], message, two.now)


def test_any_message_is_taken_or_an_error():
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
    taken = 0
    for _ in range(20_000):
        if not hosts.nodes or hosts.membership.phase is Phase.OVER:
            hosts = Hosts(most=1)
            hosts.join("a")
            hosts.wait(0)
        names = random.sample(
            ["attempt", "step", "age", "failure", "signal", "again"], k=random.randrange(7)
        )
        message = {name: random.choice(values) for name in names}
        message["tell"] = random.choice(
            ["beat", "ready", "failed", "ended", "signalled", random.choice(values)]
        )
        if "failure" in message:
            message["failure"] = {name: random.choice(values) for name in failure}
        with suppress(ValueError):
            hosts.membership.hear(hosts.nodes["a"], message, hosts.now)
            taken += 1
        hosts.wait(random.choice([0, 0, 0, 1]))
    assert taken > 1000


def happen(hosts, name, node, random):
    """Let something happen to a host, or nothing."""
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
        hosts.hear(name, "ended", step=random.randrange(100))
    elif event < 20:
        hosts.hear(name, "ready")
    elif event == 20:
        hosts.hear(name, "signalled", signal=signal.SIGTERM, again=random.random() < 0.2)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_happens_no_attempt_starts_before_the_one_before_has_ended_and_all_hear_of_the_end(
    seed,
):
    random = Random(seed)
    hosts = Hosts(least=random.randint(1, 2), most=random.randint(2, 4))
    names = iter(f"host {number}" for number in range(1000))
    for _ in range(500):
        if len(hosts.nodes) < 5 and random.random() < 0.2:
            hosts.join(next(names), random.randint(1, 3), ready=False)
        for name, node in list(hosts.nodes.items()):
            happen(hosts, name, node, random)
        busy = [node for node in hosts.nodes.values() if node.busy]
        hosts.wait(random.choice([0, 0.5, 2]))
        # neither gone nor given up
        hosts.nodes = {
            name: node for name, node in hosts.nodes.items() if node in hosts.membership._nodes
        }
        started = {
            name: [order for order in hosts.orders(name) if order["order"] in {"start", "end"}]
            for name in hosts.nodes
        }
        if hosts.membership.phase is Phase.OVER:
            assert all(orders[-1]["order"] == "end" for orders in started.values())
            return
        dealt = sorted(
            (orders[-1]["first_rank"], node.room)
            for node, orders in zip(hosts.nodes.values(), started.values(), strict=True)
            if orders
        )
        assert not dealt or not set(busy) & set(hosts.nodes.values())
        assert [rank for rank, _ in dealt] == list(accumulate([0, *(room for _, room in dealt)]))[
            : len(dealt)
        ]
