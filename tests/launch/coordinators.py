"""A coordinator for tests, in a process of its own, and a launcher's end of it without any workers."""

from __future__ import annotations

from contextlib import contextmanager

from samestep.config import Config
from samestep.launch.cluster_spec import ClusterSpec, Nodes
from samestep.launch.coordinator_client import join_cluster
from tests.launch.launchers import wait_until
from tests.workers import free_port

SECRET = "a secret of the tests"


class Leader:
    """The first host's launcher, as tests drive it."""

    def __init__(self, member, gathering):
        self.member, self.gathering = member, gathering
        self.coordinator = member.coordinator
        self.attempt = -1
        self.heard = []

    def start(self):
        """Return when the next attempt starts."""
        self.member.report("ready")
        self.wait_for("start")

    def restart(self):
        """End the attempt as if a worker had been killed; return when the next one starts."""
        failure = {
            "rank": 0,
            "summary": "killed",
            "traceback": "",
            "status": 137,
            "is_secondary": False,
            "is_retryable": True,
        }
        self.member.report(
            "failed",
            attempt=self.attempt,
            age=0.0,
            step=1,
            failure={**failure, "step": 1, "host": "here"},
        )
        self.wait_for("stop")
        self.member.report("ended", attempt=self.attempt, step=1)
        self.wait_for("start")

    def end(self):
        """End the run."""
        self.member.report("ended", attempt=self.attempt, step=1)
        self.wait_for("end")

    def wait_for(self, order):
        """Return when an order comes, with all before it in `heard`."""

        def came():
            for told in self.member.orders(1):
                self.heard.append(told)
                self.attempt = told["attempt"]
            return any(told["order"] == order for told in self.heard)

        self.heard.clear()
        wait_until(came)


@contextmanager
def coordinator(least=1, most=1, **options):
    """Yield the leader of a run."""
    gathering = ClusterSpec(("127.0.0.1", free_port()), SECRET, Nodes(least, most))
    with join_cluster(gathering, 1, Config(**options)) as member:
        yield Leader(member, gathering)
