"""A coordinator in its own process for tests, and the first host's client without any workers."""

from __future__ import annotations

from contextlib import contextmanager

from samestep.config import Config
from samestep.launch.cluster_spec import ClusterSpec, Nodes
from samestep.launch.coordinator_client import join_cluster
from tests.launch.launchers import wait_until
from tests.workers import free_port

SECRET = "a secret of the tests"


class Leader:
    """The first host's launcher, driven by tests."""

    def __init__(self, client, spec):
        self.client, self.spec = client, spec
        self.address = client.address
        self.attempt = -1
        self.received = []

    def start(self):
        """Wait until the next attempt starts."""
        self.client.report("ready")
        self.wait_for("start")

    def restart(self):
        """End the attempt as if a worker had been killed; wait until the next one starts."""
        failure = {
            "rank": 0,
            "summary": "killed",
            "traceback": "",
            "status": 137,
            "is_secondary": False,
            "is_retryable": True,
            "step": 1,
            "host": "here",
        }
        self.client.report("failed", attempt=self.attempt, age=0.0, step=1, failure=failure)
        self.wait_for("stop")
        self.client.report("ended", attempt=self.attempt, step=1)
        self.wait_for("start")

    def end(self):
        """End the run."""
        self.client.report("ended", attempt=self.attempt, step=1)
        self.wait_for("end")

    def wait_for(self, order):
        """Wait for an order; it and all orders before it are in `received`."""

        def has_arrived():
            for message in self.client.orders(1):
                self.received.append(message)
                self.attempt = message["attempt"]
            return any(message["order"] == order for message in self.received)

        self.received.clear()
        wait_until(has_arrived)


@contextmanager
def coordinator(min_nodes=1, max_nodes=1, **options):
    """Yield the leader of a run."""
    spec = ClusterSpec(("127.0.0.1", free_port()), SECRET, Nodes(min_nodes, max_nodes))
    with join_cluster(spec, 1, Config(**options)) as client:
        yield Leader(client, spec)
