"""Trained in one place, watched in another: the record goes by a real S3 server, or by a user's function, while the page is open."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import time
from contextlib import ExitStack
from io import BytesIO

import httpx
import numpy as np
import pytest
from PIL import Image

import samestep as ss
from samestep.errors import ConfigError
from samestep.record.events import parse_events
from samestep.record.files import Part
from samestep.storage import Storage
from samestep.watch.view import open_views
from tests.jobs import STEPS, image_job, train
from tests.s3 import KEY, SECRET, s3_server
from tests.watch import bring
from tests.watch.relay import relay
from tests.watch.serving import serving
from tests.watch.writing import lines, scalars, started
from tests.workers import free_port, run_workers, try_workers

SECONDS = 60.0
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
    """What this process's children find the storage by."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)


def until(condition):
    """Return what a condition gave when it held."""
    deadline = time.monotonic() + SECONDS
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)
    return found


def picture(step):
    return np.full((4, 6, 3), [step, 100, 200], np.uint8)


def job(run, hook=lambda step: None):
    """Train with an image at every step."""

    def draw(step):
        run.log_image("sample", picture(step))
        hook(step)

    return image_job(run, hook=draw)


def steps_at(client):
    """Return the steps whose loss the page draws now, of the run "one"."""
    answer = client.get("/api/curve", params={"id": "one", "name": "loss"})
    return answer.json()["x"] if answer.status_code == 200 else []


def train_until_seen(directory, address):
    """Train until news of the run have come from the page, and it draws a step; the first worker is killed there."""
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
                os.kill(os.getpid(), signal.SIGKILL)

        train(lambda run: job(run, hook), directory, OPTIONS)


def check_images(served, run, directories):
    """Compare what the page gives of every image with the file that was written, and with what was drawn."""
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


def check_that_each_step_counts_once(served, directory):
    """Compare the page's curve with what the run that went on, in a directory of its own, has of the steps that it made."""
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


@pytest.mark.usefixtures("environment")
def test_a_run_is_watched_by_s3_while_it_is_made_killed_and_goes_on_elsewhere(tmp_path):
    here, there = tmp_path / "here", tmp_path / "there"
    with serving(RUNS) as served:
        assert served.json("/api/runs") == {"runs": [], "faults": []}
        outcomes = try_workers(train_until_seen, 2, here, served.address)
        assert outcomes[0].exitcode == -signal.SIGKILL
        assert max(steps_at(served.client)) < STEPS - 1
        run_workers(train, 2, job, there, OPTIONS)
        until(lambda: [run["state"] for run in served.json("/api/runs")["runs"]] == ["finished"])
        run = served.json("/api/run", id="one")
        assert (run["step"], run["attempts"], len(run["workers"])) == (STEPS, 2, 2)
        assert [
            event["kind"]
            for event in run["events"]
            if event["kind"] in {"started", "resumed", "finished"}
        ] == [*("started", "resumed", "finished")]
        check_that_each_step_counts_once(served, there)
        check_images(served, run, [here, there])
        assert SECRET not in json.dumps([run, served.json("/api/runs")])
        assert KEY not in json.dumps([run, served.json("/api/runs")])


def test_a_run_is_watched_where_a_function_brings_it(tmp_path):
    (tmp_path / "far").mkdir()
    with serving(tmp_path / "far") as served:
        assert served.json("/api/runs") == {"runs": [], "faults": []}
        train(job, tmp_path / "one", {"transfer": f"{bring.__name__}:{bring.to_far.__name__}"})
        until(lambda: [run["state"] for run in served.json("/api/runs")["runs"]] == ["finished"])
        assert steps_at(served.client) == list(range(STEPS))
        check_images(served, served.json("/api/run", id="one"), [tmp_path / "one"])
    brought = {path.name for path in (tmp_path / "far" / "one").iterdir()}
    assert brought > {"images", "record"}
    assert "events.jsonl" not in brought


def put(url, *events):
    """Write a record of these events, as one part."""
    data = lines(*events)
    Storage(url).write(Part(0, len(data)).path, data)


@pytest.mark.usefixtures("environment")
def test_a_storage_that_went_away_is_told_and_read_again_when_it_is_back(server, monkeypatch):
    folder, port = "s3://bucket/away", free_port()
    run_workers(put, 1, f"{folder}/one", started(), scalars(0, loss=1.0))
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    with ExitStack() as ending:
        with relay(port, server.port):
            served = ending.enter_context(serving(folder))
            until(lambda: steps_at(served.client) == [0])
        run_workers(put, 1, f"{folder}/two", started(), environment=server.environment)
        told = served.process.stderr.readline()
        assert re.match(
            rf"{folder}(/one)? cannot be read now, and is tried again: StorageError: cannot list {folder}",
            told,
        )
        assert not any(secret in told for secret in (KEY, SECRET))
        (fault, *_) = served.json("/api/runs")["faults"]
        assert told.startswith(
            f"{fault['location']} cannot be read now, and is tried again: {fault['text']}"
        )
        assert steps_at(served.client) == [0]
        with relay(port, server.port):
            until(lambda: [run["id"] for run in served.json("/api/runs")["runs"]] == ["one", "two"])
            until(lambda: served.json("/api/runs")["faults"] == [])


@pytest.mark.usefixtures("environment")
def test_wrong_credentials_are_told_at_the_start(monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", wrong := "a-wrong-secret")
    text = "cannot list s3://bucket/runs: PermissionError: The request signature we calculated does not match"
    with pytest.raises(AssertionError, match=text) as told, serving(RUNS):
        pass
    assert not any(secret in str(told.value) for secret in (KEY, wrong))


@pytest.mark.parametrize("option", ["remote", "sinks", "resume"])
def test_a_password_in_a_url_of_a_run_is_refused_and_not_repeated(option, tmp_path):
    with (
        pytest.raises(ConfigError, match="expected a URL without a password") as told,
        ss.init(dir=tmp_path, **{option: SECRET_URL}),
    ):
        pass
    assert SECRET not in str(told.value)
    assert not any(SECRET in path.read_text() for path in tmp_path.rglob("*.*"))


def test_a_password_in_a_url_that_is_watched_is_refused_and_not_repeated():
    with pytest.raises(
        ConfigError,
        match=r"expected a URL without a password.* got ftp://\*\*\*@example.org/runs/step-00000001; put",
    ) as told:
        open_views(SECRET_URL)
    assert SECRET not in str(told.value)


def test_at_rest_a_look_for_runs_asks_none_of_them_and_a_look_at_one_is_one_request(
    tmp_path, monkeypatch
):
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
