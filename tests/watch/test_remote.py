"""Watching a run through a real S3 server, or through a user's transfer function."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from contextlib import ExitStack
from io import BytesIO

import httpx
import numpy as np
import pytest
from PIL import Image

import samestep as ss
from samestep.errors import ConfigError
from samestep.record import exporter
from samestep.record.events import parse_events
from samestep.record.files import EventChunk
from samestep.snapshot import owner
from samestep.snapshot.remote import RemoteDirectory
from samestep.storage import Storage
from samestep.watch.runs import open_views
from tests.jobs import STEPS, image_job, steps_of, train
from tests.s3 import KEY, SECRET, s3_server
from tests.watch import transfer
from tests.watch.relay import relay
from tests.watch.serving import SECONDS, serving, until
from tests.watch.writing import lines, scalars, started
from tests.workers import free_port, run_workers, try_workers

RUNS = "s3://bucket/runs"
ONE = f"{RUNS}/one"
SECRET_URL = f"ftp://me:{SECRET}@example.org/runs/step-00000001"
OPTIONS = {"remote": ONE, "snapshot_every": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def environment(server, monkeypatch):
    """Environment variables that point child processes to the storage."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


def picture(step):
    return np.full((4, 6, 3), [step, 100, 200], np.uint8)


def job(run, hook=lambda step: None):
    """Train with an image at every step."""

    def draw(step):
        run.log_image("sample", picture(step))
        hook(step)

    return image_job(run, hook=draw)


def steps_at(client):
    """Return the steps of run "one" whose loss the page draws now."""
    answer = client.get("/api/curve", params={"id": "one", "name": "loss"})
    return answer.json()["x"] if answer.status_code == 200 else []


def train_until_seen(directory, address):
    """Train until the page draws a step and a snapshot was copied, then kill the first worker."""
    remote = RemoteDirectory(ONE)
    with (
        httpx.Client(base_url=address, trust_env=False, timeout=SECONDS) as client,
        client.stream("GET", "/api/changes") as changes,
    ):

        def hook(step):
            if step == 5 and os.environ["RANK"] == "0":
                assert (
                    next(line for line in changes.iter_lines() if line.startswith("data: "))
                    == 'data: {"ids": ["one"]}'
                )
                until(lambda: 3 in steps_at(client))
                remote.storage.open()
                until(lambda: any(map(remote.has_manifest, steps_of(2, 4))))
                os.kill(os.getpid(), signal.SIGKILL)

        train(lambda run: job(run, hook), directory, OPTIONS)


def check_images(served, run, directories):
    """Compare every image that the page serves with its file and with the logged pixels."""
    (named,) = run["images"]
    assert [item["step"] for item in named["items"]] == list(range(STEPS))
    for item in named["items"]:
        answer = served.get("/api/image", params={"id": "one", "number": item["number"]})
        files = [
            directory / "images" / f"sample-{item['step']:08d}.png" for directory in directories
        ]
        assert answer.content in [file.read_bytes() for file in files if file.exists()]
        assert np.array_equal(
            np.asarray(Image.open(BytesIO(answer.content))), picture(item["step"])
        )


def check_each_step_counts_once(served, directory):
    """Compare the page's curve with the record of the resumed run in its own directory."""
    curve = served.json("/api/curve", id="one", name="loss")
    assert curve["x"] == list(range(STEPS))
    written = [
        event
        for event in parse_events((directory / "events.jsonl").read_bytes())
        if event["event"] == "scalars"
    ]
    made = {event["step"]: event["values"]["loss"] for event in written}
    assert len(made) < STEPS
    assert {
        step: loss for step, loss in zip(curve["x"], curve["value"], strict=True) if step in made
    } == made


@pytest.mark.long
@pytest.mark.usefixtures("environment")
def test_a_run_on_s3_that_is_killed_and_resumed_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(owner, "LOST_SECONDS", 2.0)  # the killed run is dead
    monkeypatch.setattr(exporter, "FINISH_SECONDS", SECONDS)  # all is sent on a busy machine, too
    killed, resumed = tmp_path / "here", tmp_path / "there"
    with serving(RUNS) as served:
        assert served.json("/api/runs") == {"runs": [], "faults": []}
        outcomes = try_workers(train_until_seen, 2, killed, served.address)
        assert outcomes[0].exitcode == -signal.SIGKILL
        assert max(steps_at(served.client)) < STEPS - 1
        run_workers(train, 2, job, resumed, OPTIONS)
        until(lambda: [run["state"] for run in served.json("/api/runs")["runs"]] == ["finished"])
        run = served.json("/api/run", id="one")
        assert (run["step"], run["attempts"], len(run["workers"])) == (STEPS, 2, 2)
        assert [
            event["kind"]
            for event in run["events"]
            if event["kind"] in {"started", "resumed", "finished"}
        ] == [*("started", "resumed", "finished")]
        check_each_step_counts_once(served, resumed)
        check_images(served, run, [killed, resumed])
        assert SECRET not in json.dumps([run, served.json("/api/runs")])
        assert KEY not in json.dumps([run, served.json("/api/runs")])


def test_a_run_copied_by_a_transfer_function(tmp_path):
    (tmp_path / "far").mkdir()
    with serving(tmp_path / "far") as served:
        assert served.json("/api/runs") == {"runs": [], "faults": []}
        train(
            job,
            tmp_path / "one",
            {"transfer": f"{transfer.__name__}:{transfer.copy_to_far.__name__}"},
        )
        until(lambda: [run["state"] for run in served.json("/api/runs")["runs"]] == ["finished"])
        assert steps_at(served.client) == list(range(STEPS))
        check_images(served, served.json("/api/run", id="one"), [tmp_path / "one"])
    copied = {path.name for path in (tmp_path / "far" / "one").iterdir()}
    assert copied > {"images", "record"}
    assert "events.jsonl" not in copied


def put(url, *events):
    """Write a record of events as one part."""
    data = lines(*events)
    Storage(url).write(EventChunk(0, len(data)).path, data)


@pytest.mark.long
@pytest.mark.usefixtures("environment")
def test_an_unreachable_storage_is_reported_and_read_again_later(server, monkeypatch):
    folder, port = "s3://bucket/away", free_port()
    run_workers(put, 1, f"{folder}/one", started(), scalars(0, loss=1.0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with ExitStack() as stack:
        with relay(port, server.port):
            served = stack.enter_context(serving(folder))
            until(lambda: steps_at(served.client) == [0])
        run_workers(put, 1, f"{folder}/two", started(), environment=server.environment)
        warning = served.process.stderr.readline()
        cause = f"StorageError: cannot list {folder}"
        assert re.match(rf"cannot read {folder}(/one)?, will try again: {cause}", warning)
        assert not any(secret in warning for secret in (KEY, SECRET))
        (fault, *_) = served.json("/api/runs")["faults"]
        message = f"cannot read {fault['location']}, will try again: {fault['text']}"
        assert warning.startswith(message)
        assert steps_at(served.client) == [0]
        with relay(port, server.port):
            until(lambda: [run["id"] for run in served.json("/api/runs")["runs"]] == ["one", "two"])
            until(lambda: served.json("/api/runs")["faults"] == [])


@pytest.mark.usefixtures("environment")
@pytest.mark.long
def test_wrong_credentials_are_reported_at_the_start(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong := "a-wrong-secret")
    text = f"cannot list {RUNS}: PermissionError: The request signature we calculated"
    with pytest.raises(AssertionError, match=text) as raised, serving(RUNS):
        pass
    assert not any(secret in str(raised.value) for secret in (KEY, wrong))


@pytest.mark.parametrize("option", ["remote", "sinks", "resume"])
def test_a_password_in_a_url_option_is_rejected_and_not_repeated(option, tmp_path):
    with (
        pytest.raises(ConfigError, match="expected a URL without a password") as raised,
        ss.init(dir=tmp_path, **{option: SECRET_URL}),
    ):
        pass
    assert SECRET not in str(raised.value)
    assert not any(SECRET in path.read_text() for path in tmp_path.rglob("*.*"))


def test_a_password_in_a_watched_url_is_rejected_and_not_repeated():
    with pytest.raises(
        ConfigError,
        match=r"expected a URL without a password.*ftp://\*\*\*@example.org/runs/step-00000001",
    ) as raised:
        open_views(SECRET_URL)
    assert SECRET not in str(raised.value)


def test_a_scan_without_news_lists_folders_only_and_a_poll_is_one_request(tmp_path, monkeypatch):
    url = f"file://{tmp_path}"
    put(f"{url}/one", started())
    put(f"{url}/deep/two", started())
    views, listed, entries = open_views(url), [], Storage._entries
    assert views["one"].refresh()
    monkeypatch.setattr(
        Storage,
        "_entries",
        lambda storage, folder: listed.append(folder) or entries(storage, folder),
    )
    assert not views.scan(url)
    assert listed == ["", "deep"]
    assert not views["one"].refresh()
    assert listed == ["", "deep", "one/record"]
    shutil.rmtree(tmp_path / "deep")
    assert views.scan(url)
    assert list(views) == ["one"]
