"""Notices of clouds, from a metadata server on loopback."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from contextlib import contextmanager
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import samestep as ss
from samestep import config
from samestep.errors import ConfigError
from samestep.launch import preemption, worker
from samestep.launch.preemption import (
    AWS_TOKEN,
    AZURE_EVENTS,
    AZURE_NAME,
    CLOUDS,
    asking,
    server_of,
    watching,
)
from samestep.launch.worker import StopSignals
from tests.jobs import events, snapshots, steps_of
from tests.launch.launchers import HERE, JOB, launchers, wait_until
from tests.ports import free_port

ACTION = "/latest/meta-data/spot/instance-action"
REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
PREEMPTED = "/computeMetadata/v1/instance/preempted"
MAINTENANCE = "/computeMetadata/v1/instance/maintenance-event"
TERMINATE = json.dumps({"action": "terminate", "time": "2026-01-01T00:00:00Z"})
# of launchers, while the thread of the server runs, since Python 3.12
forks = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
# the headers without which each cloud refuses
NEEDED = {
    "/latest/meta-data": (AWS_TOKEN, "the token"),
    "/computeMetadata": ("Metadata-Flavor", "Google"),
    "/metadata": ("Metadata", "true"),
}


class Answers(dict):
    """Texts, or statuses, by path; another path is not found."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.asked = []
        self.server = ""


@contextmanager
def answering(answers):
    """Serve answers at `answers.server`, as a metadata server does, to those with the headers."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            self.answer(answers.get(self.path, 404))

        def do_PUT(self):
            has_ttl = int(self.headers.get(f"{AWS_TOKEN}-ttl-seconds", 0)) > 0
            self.answer("the token" if has_ttl and self.path == "/latest/api/token" else 400)

        def answer(self, what):
            answers.asked.append(self.path)
            header, value = next(
                (need for path, need in NEEDED.items() if self.path.startswith(path)), ("", None)
            )
            if value not in {None, self.headers.get(header)}:
                what = 403
            status, text = (what, "") if isinstance(what, int) else (200, what)
            self.send_response(status)
            self.send_header("Location", REBALANCE)  # for redirects
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    answers.server = f"127.0.0.1:{server.server_port}"
    try:
        yield answers
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def azure(*scheduled):
    return json.dumps({"DocumentIncarnation": 1, "Events": list(scheduled)})


def event(kind, *resources, before="Mon, 19 Sep 2026 18:29:47 GMT"):
    return {"EventType": kind, "Resources": resources, "NotBefore": before, "EventId": "1"}


@pytest.mark.parametrize(
    ("cloud", "answers", "says"),
    [
        ("aws", {}, None),
        ("aws", {ACTION: TERMINATE}, "will terminate this instance at 2026-01-01T00:00:00Z"),
        ("aws", {REBALANCE: '{"noticeTime": "now"}'}, "may interrupt this instance"),
        ("aws", {ACTION: TERMINATE, REBALANCE: "{}"}, "will terminate"),
        ("aws", {ACTION: '{"action": "none"}'}, ValueError),
        ("aws", {ACTION: "<html>Log in</html>"}, ValueError),
        ("aws", {ACTION: "[" * 100_000}, RecursionError),
        ("aws", {ACTION: 500}, OSError),
        ("aws", {ACTION: 302}, OSError),  # to REBALANCE
        ("gcp", {PREEMPTED: "FALSE", MAINTENANCE: "NONE"}, None),
        ("gcp", {PREEMPTED: "FALSE", MAINTENANCE: "MIGRATE_ON_HOST_MAINTENANCE"}, None),
        ("gcp", {PREEMPTED: "TRUE\n"}, "preempts this VM"),
        ("gcp", {PREEMPTED: "FALSE", MAINTENANCE: "TERMINATE_ON_HOST_MAINTENANCE"}, "terminate"),
        ("gcp", {}, ValueError),
        ("gcp", {PREEMPTED: "true"}, ValueError),
        ("azure", {AZURE_EVENTS: azure()}, None),
        ("azure", {AZURE_EVENTS: azure(event("Preempt", "vm_2", "vm_1"))}, "will preempt this VM"),
        ("azure", {AZURE_EVENTS: azure(event("Terminate", "vm_1", before=""))}, "at once"),
        ("azure", {AZURE_EVENTS: azure(event("Preempt", "vm_2"))}, None),
        ("azure", {AZURE_EVENTS: azure(event("Freeze", "vm_1"))}, None),
        ("azure", {AZURE_EVENTS: azure({"EventType": ["Preempt"], "Resources": 1})}, None),
        ("azure", {AZURE_EVENTS: azure({"EventType": "Preempt", "Resources": 1})}, None),
        ("azure", {AZURE_EVENTS: azure("Preempt")}, ValueError),
        ("azure", {AZURE_EVENTS: "{}"}, ValueError),
        ("azure", {AZURE_EVENTS: azure(event("Preempt", "")), AZURE_NAME: 404}, ValueError),
        ("azure", {AZURE_EVENTS: 429}, OSError),
    ],
)
def test_notices_are_read_and_other_answers_are_errors(cloud, answers, says):
    with answering(Answers({AZURE_NAME: "vm_1", **answers})) as served:
        ask = asking(server_of(CLOUDS[cloud], {CLOUDS[cloud].variable: served.server}))
        if isinstance(says, type):
            with pytest.raises(says):
                CLOUDS[cloud].ask(ask)
            return
        notice = CLOUDS[cloud].ask(ask)
    assert (notice is None) == (says is None)
    assert notice is None or says in notice.text
    assert notice is None or notice.is_certain == ("may" not in notice.text)


def test_another_clouds_server_is_no_silence():
    """It knows none of the paths of AWS."""
    with pytest.raises(ValueError, match="token"):
        CLOUDS["aws"].ask(lambda *_: None)


def test_each_cloud_of_the_option_is_known_and_asked_at_its_address():
    assert tuple(CLOUDS) == config.CLOUDS
    for cloud in CLOUDS.values():
        assert server_of(cloud, {}) == "http://169.254.169.254"
        assert server_of(cloud, {cloud.variable: "http://[::1]:80/"}) == "http://[::1]:80"


@contextmanager
def watched(name, monkeypatch, server):
    """Watch a server; yield the lines that are told, and what is added at each stop."""
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(preemption, "ANSWER_SECONDS", 0.1)
    monkeypatch.setenv(CLOUDS[name].variable, server)
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # which nothing may use
    told, stops = [], []
    with watching(name, told.append, lambda: stops.append("stop")):
        yield told, stops


def test_a_recommendation_is_told_and_only_the_notice_stops_once(monkeypatch):
    with (
        answering(Answers({REBALANCE: '{"noticeTime": "now"}'})) as answers,
        watched("aws", monkeypatch, answers.server) as (told, stops),
    ):
        wait_until(lambda: answers.asked.count(REBALANCE) > 3)
        assert (len(told), stops) == (1, [])
        answers[ACTION] = TERMINATE
        wait_until(lambda: stops)
        del answers[ACTION]  # it is withdrawn
    assert stops == ["stop"]
    assert [line.partition(" (")[0] for line in told] == [
        "AWS may interrupt this instance",
        "AWS will terminate this instance at 2026-01-01T00:00:00Z",
    ]


def test_a_server_that_fails_is_told_once_and_asked_again(monkeypatch):
    with (
        answering(Answers({PREEMPTED: 503, MAINTENANCE: "NONE"})) as answers,
        watched("gcp", monkeypatch, answers.server) as (told, stops),
    ):
        wait_until(lambda: answers.asked.count(PREEMPTED) > 3)
        answers[PREEMPTED] = "TRUE"
        wait_until(lambda: stops)
    assert "HTTP Error 503" in told[0]
    assert told[1:] == ["Google Cloud preempts this VM"]


@pytest.mark.parametrize("server", ["127.0.0.1:{}", "http://[", "http://127.0.0.1:x"])
def test_a_server_that_is_not_there_is_told_once(server, monkeypatch):
    with watched("azure", monkeypatch, server.format(free_port())) as (told, stops):
        wait_until(lambda: told)
        time.sleep(0.1)  # several times as long as it takes to ask again
    assert len(told) == 1
    assert told[0].startswith("Azure at http://")
    assert "leave out preemption=azure" in told[0]
    assert stops == []


def test_a_server_that_does_not_answer_is_told_once(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with watched("aws", monkeypatch, address) as (told, stops):
            connections = [silent.accept()[0] for _ in range(3)]  # it asks again
            assert "timed out" in told[0]
        assert (len(told), stops) == (1, [])
        for connection in connections:
            connection.close()


def test_a_notice_counts_as_a_sigterm_that_its_echo_does_not_repeat(monkeypatch):
    monkeypatch.setattr(worker, "ECHO_SECONDS", 0.0)
    signals = StopSignals()
    with signals.recorded():
        signals.notice()
        signal.raise_signal(signal.SIGTERM)  # of the host, which shuts down
        assert signals.received == [signal.SIGTERM]
        signal.raise_signal(signal.SIGINT)
        assert signals.received == [signal.SIGTERM, signal.SIGINT]
    other = StopSignals()
    with other.recorded():
        signal.raise_signal(signal.SIGINT)
        other.notice()
        assert other.received == [signal.SIGINT]


WAITS = {"workers": 1, "rank": 0, "step": 3, "does": "wait"}  # until it is stopped


@contextmanager
def launching(tmp_path, monkeypatch, cloud):
    """Yield the answers of a cloud, and `start(name, *flags, fault)` for launchers of one job."""
    monkeypatch.setattr(preemption, "POLL_SECONDS", 0.05)
    with answering(Answers()) as answers, launchers() as start:
        monkeypatch.setenv(CLOUDS[cloud].variable, answers.server)

        def launch(name, *flags, fault):
            job = str(JOB), str(tmp_path / "run"), json.dumps(fault)
            return start(HERE, tmp_path / name, "run", *flags, *job)

        yield answers, launch


@forks
def test_a_notice_stops_a_run_after_a_snapshot(tmp_path, monkeypatch):
    with launching(tmp_path, monkeypatch, "aws") as (answers, launch):
        launcher = launch("log", "--preemption", "aws", fault=WAITS)
        launcher.wait_until((tmp_path / "run" / "fault").exists)
        answers[ACTION] = TERMINATE
        assert launcher.end() == -signal.SIGTERM, launcher.output()
    assert launcher.output().count("samestep: AWS will terminate this instance") == 1
    stopped = events(tmp_path / "run", "stopped")[-1]
    assert stopped["signal"] == signal.SIGTERM
    assert snapshots(tmp_path / "run")[-1:] == steps_of(stopped["step"])


@forks
@pytest.mark.long
def test_a_run_on_two_hosts_goes_on_without_the_one_that_gets_a_notice(tmp_path, monkeypatch):
    elastic = ("--nodes", "1:2", "--lanes", "8", "--master", f"127.0.0.1:{free_port()}")
    fault = {**WAITS, "workers": 2}
    with launching(tmp_path, monkeypatch, "gcp") as (answers, launch):
        answers.update({PREEMPTED: "FALSE", MAINTENANCE: "NONE"})
        first = launch("first", *elastic, fault=fault)
        first.wait_for("joined")
        other = launch("other", *elastic, "--preemption", "gcp", fault=fault)
        first.wait_until((tmp_path / "run" / "fault").exists)
        answers[PREEMPTED] = "TRUE"
        assert other.end() == -signal.SIGTERM, other.output()
        assert first.end() == 0, first.output()
    assert "Google Cloud preempts this VM" in other.output()
    assert "trained at 1 workers" in first.output()


@pytest.mark.parametrize("launched", [False, True])
def test_a_script_that_asks_when_its_launcher_does_not_is_refused(launched):
    body = partial(ss.init, preemption="aws")
    with pytest.raises(ConfigError, match="is for the launcher") as caught:
        ss.launch(body, workers=1) if launched else body()
    assert "samestep run --preemption aws" in str(caught.value)
