"""Alerts of complete runs: the option `on_event` with a web server, and with functions."""

from __future__ import annotations

import json
import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import samestep as ss
from samestep.config import Config
from samestep.errors import ConfigError
from samestep.record import open_record
from samestep.record.cursor import Cursor
from samestep.record.sinks import HOOK, begin_hook
from tests.jobs import STEPS, events, image_job, train
from tests.python import run_python

SCRIPT = """
import os, signal, sys
import samestep as ss

with ss.init(dir=sys.argv[1], lanes=2) as run:
    run.log(loss=1.0)
    if sys.argv[2] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[2] == "raise" and run.rank == 1:
        raise ValueError("the data is wrong")
    run.batches  # any public name: the run ends here
"""


class Hooks:
    """The events that a web server received, by order of arrival."""

    def __init__(self, statuses: list[int]) -> None:
        self.statuses, self.events = statuses, []

    @property
    def kinds(self) -> list[str]:
        return [event["event"] for event in self.events]


@contextmanager
def web_server(*statuses: int) -> Iterator[tuple[str, Hooks]]:
    """Serve POST on loopback, first with these statuses and then with 200."""
    hooks = Hooks(list(statuses))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            status = hooks.statuses.pop(0) if hooks.statuses else 200
            if status == 200:
                assert self.headers["Content-Type"] == "application/json"
                hooks.events.append(json.loads(content))
            self.send_response(status)
            self.send_header("Location", "/elsewhere")
            self.end_headers()

        def do_GET(self) -> None:  # after a redirect, which must not be followed
            hooks.events.append({"event": "GET"})
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/secret", hooks
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run_script(tmp_path, fault, *flags):
    script = tmp_path / "job.py"
    script.write_text(SCRIPT)
    command = ("-m", "samestep", "run", "--dir", tmp_path / "run", *flags)
    return run_python(*command, script, tmp_path / "run", fault, cwd=tmp_path)


def test_the_end_of_a_run_is_posted_and_the_url_stays_secret(tmp_path):
    with web_server() as (url, hooks):
        train(image_job, tmp_path, {"on_event": url})
    (event,) = hooks.events
    assert event.items() >= {"event": "finished", "step": STEPS, "run": str(tmp_path)}.items()
    assert "secret" not in (tmp_path / "events.jsonl").read_text()
    assert events(tmp_path, "started")[0]["config"]["on_event"] == "a URL"


def test_a_failure_is_posted(tmp_path):
    with (
        web_server() as (url, hooks),
        pytest.raises(ZeroDivisionError),
        ss.init(dir=tmp_path, on_event=url),
    ):
        raise ZeroDivisionError("no samples")
    (event,) = hooks.events
    assert (event["event"], event["error"]) == ("failed", "ZeroDivisionError: no samples")


def test_nan_is_posted_once_per_name_and_start(tmp_path):
    with web_server() as (url, hooks):
        for _ in range(2):
            with ss.init(dir=tmp_path, on_event=url, resume="never") as run:
                for loss in (1.0, math.nan, math.inf):
                    run.log(loss=loss, accuracy=0.5)
                run.log(accuracy=math.nan)
    posted = [event.get("names", event["event"]) for event in hooks.events]
    assert posted == [["loss"], ["accuracy"], "finished"] * 2


def test_a_worker_that_failed_is_named_by_at_most_two_events(tmp_path):
    with web_server() as (url, hooks):
        ended = run_script(tmp_path, "raise", "-n", "2", "--on-event", url)
    assert ended.returncode == 1
    assert "ValueError: the data is wrong" in [event["error"] for event in hooks.events]
    assert hooks.kinds in (["failed"], ["failed", "failed"])


def test_a_failure_that_is_recorded_before_the_start_is_posted(tmp_path):
    early = {"event": "failed", "error": "an earlier run's", "time": 1.0}
    started = {"event": "started", "time": 2.0}
    failed = {"event": "failed", "error": "this run's", "time": 3.0}
    lines = [json.dumps(event) + "\n" for event in (early, failed, started)]
    (tmp_path / "events.jsonl").write_text("".join(lines))
    begin_hook(tmp_path)
    assert Cursor(tmp_path).offset(HOOK) == len(lines[0])


def test_a_kill_is_posted_as_a_restart_and_then_as_a_failure(tmp_path):
    with web_server() as (url, hooks):
        ended = run_script(tmp_path, "kill", "--on-event", url, "--max-restarts", "1")
        wait_for(hooks, 2)  # the exporter outlives the worker
    assert ended.returncode == 128 + signal.SIGKILL
    assert hooks.kinds == ["restarting", "failed"]
    assert hooks.events[1]["error"].startswith("killed by SIGKILL")


def test_a_server_that_fails_or_redirects_gets_the_event_again(tmp_path, capfd):
    with web_server(302, 503) as (url, hooks), ss.init(dir=tmp_path, on_event=url) as run:
        run.log(loss=math.nan)
        wait_for(hooks, 1)
    assert hooks.kinds == ["nonfinite", "finished"]
    warning = "the record cannot be sent to on_event (ConnectionError: the server redirects to"
    assert warning in capfd.readouterr().err


def wait_for(hooks, count):
    reached = threading.Event()
    while len(hooks.events) < count:
        reached.wait(0.01)


HOOKS = """

from pathlib import Path

def note(event):
    print(event["event"], Path(event["run"]).name, file=open("noted", "a"))

def fail(event):
    raise ValueError("no such channel")

def leave(event):
    raise SystemExit("bye")
"""


def test_a_function_is_called_with_the_event(tmp_path):
    (tmp_path / "hooks.py").write_text(HOOKS)
    assert run_script(tmp_path, "none", "--on-event", "hooks:note").returncode == 0
    assert (tmp_path / "noted").read_text() == "finished run\n"


@pytest.mark.parametrize(("function", "error"), [("fail", "ValueError"), ("leave", "SystemExit")])
def test_a_function_that_fails_is_a_warning(tmp_path, function, error):
    (tmp_path / "hooks.py").write_text(HOOKS)
    ended = run_script(tmp_path, "none", "--on-event", f"hooks:{function}")
    assert ended.returncode == 0
    assert "on_event" in ended.stderr
    assert error in ended.stderr


def test_what_was_not_delivered_is_delivered_by_the_next_start_in_order(tmp_path, caplog):
    with web_server() as (url, _):
        pass
    with ss.init(dir=tmp_path, on_event=url):  # nobody listens there any more
        pass
    assert "bytes of the record were not sent to on_event" in caplog.text
    with web_server() as (url, hooks), ss.init(dir=tmp_path, on_event=url):
        pass
    assert hooks.kinds == ["finished", "finished"]


def test_a_first_hook_is_not_called_for_earlier_starts(tmp_path):
    with pytest.raises(ZeroDivisionError), ss.init(dir=tmp_path):
        raise ZeroDivisionError
    with web_server() as (url, hooks), ss.init(dir=tmp_path, on_event=url):
        pass
    assert hooks.kinds == ["finished"]


def test_a_stall_is_posted(tmp_path):
    with web_server() as (url, hooks), ss.init(dir=tmp_path, on_event=url):
        record = open_record(tmp_path, writes=True)
        record.event("stalled", step=0, reason="worker 1 is asleep")
        record.close()
    assert hooks.kinds == ["stalled", "finished"]


@pytest.mark.parametrize("value", ["ftp://host/x", "no function", "http://"])
def test_invalid_values_are_errors(value):
    with pytest.raises(ConfigError, match=r"on_event must be module:function or an http\(s\) URL"):
        Config(on_event=value)


def test_a_missing_function_or_directory_is_an_error_at_the_start(tmp_path):
    with pytest.raises(ConfigError, match="on_event must name an importable module:function"):
        ss.init(dir=tmp_path, on_event="nowhere:f")
    with pytest.raises(ConfigError, match="on_event='nowhere:f' requires dir"):
        ss.init(on_event="nowhere:f")
