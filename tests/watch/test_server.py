from __future__ import annotations

import signal
import socket
import threading
from pathlib import Path

import numpy as np
import pytest

from samestep.record import FileRecord
from samestep.watch.server import PAGE
from tests.watch.serving import SECONDS, serving, until
from tests.watch.writing import scalars, started, timing, write

BIG = 50_000_000
PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with a run "one" that has all kinds of events and invalid images."""
    folder = tmp_path_factory.mktemp("runs")
    run = folder / "one"
    bad = [
        ("images/text.png", "text"),
        ("images/page.png", "page"),
        ("../secret.png", "out"),
        ("images/none.png", "none"),
        ("images/big.png", "big"),
    ]
    write(
        run,
        started(),
        *[
            scalars(step, **{"loss": 1 / (step + 1), "<script>&x=1": 2.0, "nan": "nan"})
            for step in range(100)
        ],
        timing(0, (0.1, 0.2, 0.0, 0.0, 0.0), (0.1, 0.2, 0.0, 0.0, 0.0)),
        {"event": "system", "host": "<b>", "cpu": 0.25},
        *[
            {"event": "image", "step": 1, "name": name, "path": path, "width": 1, "height": 1}
            for path, name in bad
        ],
    )
    record = FileRecord(run)
    record.image(3, "picture", np.zeros((4, 6, 3), dtype=np.uint8))
    record.close()
    (run / "images" / "text.png").write_text("no image")
    (run / "images" / "page.png").write_text("<html><script>alert(1)</script>")
    (folder / "secret.png").write_bytes(PNG)
    with (run / "images" / "big.png").open("wb") as file:
        file.write(PNG)
        file.truncate(BIG)
    return folder


@pytest.fixture(scope="module")
def server(runs):
    with serving(runs) as served:
        until(
            lambda: (
                [len(name["items"]) for name in served.json("/api/run", id="one")["images"]]
                == [1] * 6
            )
        )
        yield served


def number_of(server, name):
    return next(
        image["items"][0]["number"]
        for image in server.json("/api/run", id="one")["images"]
        if image["name"] == name
    )


def test_runs(server):
    (run,) = server.json("/api/runs")["runs"]
    assert run.keys() == {
        "id",
        "name",
        "state",
        "started",
        "updated",
        "elapsed",
        "nonfinite",
        "step",
        "epoch",
        "workers",
        "lanes",
        "noted",
        "owner",
        "forked",
        "principal",
        "share",
    }
    assert (run["id"], run["step"], run["workers"], run["lanes"]) == ("one", 99, 2, 8)


def test_a_run(server):
    run = server.json("/api/run", id="one")
    assert run.keys() == {
        *(
            "id",
            "name",
            "state",
            "started",
            "updated",
            "elapsed",
            "nonfinite",
            "now",
            "reading",
            "step",
            "epoch",
            "lanes",
            "attempts",
            "progress",
        ),
        *(
            "scalars",
            "images",
            "histograms",
            "workers",
            "parts",
            "samples",
            "samples_used",
            "events",
            "config",
            "sinks",
            "dropped_events",
            "dropped_images",
        ),
        *(
            "skipped_lines",
            "failure",
            "stall",
            "settings",
            "defaults",
            "command",
            "commit",
        ),
        *("environment", "hosts"),
        *("noted", "tags", "note", "locked", "share", "principal", "principals"),
        *("owner", "forked"),
    }
    assert [scalar["name"] for scalar in run["scalars"]] == ["loss", "<script>&x=1", "nan"]


def test_curves(server):
    curve = server.json(
        "/api/curve", id="one", name="loss", points=8, smooth=0.5, **{"from": 10, "to": 90}
    )
    names = {"x", "value", "low", "high", "smooth", "runs", "spans", "points", "exact"}
    assert curve.keys() == names
    assert (curve["points"], curve["exact"], curve["x"][0], curve["x"][-1]) == (81, False, 10, 90)
    assert (
        server.json("/api/curve", id="one", name="<script>&x=1", x="time")["value"] == [2.0] * 100
    )
    assert server.json("/api/curve", id="one", name="nan")["value"] == [None] * 100


def test_the_mean_of_a_group(server):
    group = server.json("/api/group", id=["one", "one"], name="loss", points=500)
    assert group["value"] == server.json("/api/curve", id="one", name="loss")["value"]
    assert group["runs"] == [2] * 100


def test_timing(server):
    answer = server.json("/api/timing", id="one", points=5)
    assert (answer["x"], answer["workers"]) == ([0], [[pytest.approx(0.3)]] * 2)


def test_the_use_of_hosts(server):
    (curve,) = server.json("/api/system", id="one")["curves"]
    assert curve.items() >= {"host": "<b>", "name": "cpu", "value": [25.0]}.items()
    assert server.json("/api/system", id="one", **{"from": curve["x"][0] + 1})["curves"] == [
        {"host": "<b>", "name": "cpu", "x": [], "value": []}
    ]


def test_notes_are_written_to_the_directory_of_the_run(server, runs, tmp_path):
    def put(body, run="one", **options):
        return server.client.put("/api/notes", params={"id": run}, json=body, **options)

    before = server.json("/api/run", id="one")
    assert (before["tags"], before["note"], before["locked"], before["noted"]) == (
        [],
        "",
        None,
        None,
    )
    notes = {"tags": ["<b>", "base"], "note": "a\nb", "version": None}
    assert put(notes).status_code == 204
    run, (row,) = server.json("/api/run", id="one"), server.json("/api/table")["runs"]
    assert run["tags"] == row["tags"] == ["<b>", "base"]
    assert run["note"] == row["note"] == "a\nb"
    response = put(notes)
    assert (response.status_code, "changed in the meantime" in response.text) == (409, True)
    file, content = runs / "one" / "notes.json", (runs / "one" / "notes.json").read_bytes()
    for wrong in ({}, [], 3, {**notes, "tags": ["a b"]}, {**notes, "note": 1}):
        assert put(wrong).status_code == 400
    assert put({**notes, "note": "x" * 2**18}).status_code == 413
    assert put(notes, run="../one").status_code == 404
    assert server.get("/api/notes", params={"id": "one"}).status_code == 405
    assert file.read_bytes() == content
    file.write_text("{")
    run = server.json("/api/run", id="one")
    assert "notes.json is damaged and was left as it is" in run["locked"]
    response = put({**notes, "version": run["noted"]})
    assert (response.status_code, response.text) == (409, run["locked"])
    file.unlink()


@pytest.mark.long
def test_notes_of_a_run_at_a_url_and_of_a_read_only_server(runs):
    notes = {"tags": [], "note": "", "version": None}
    with serving(f"file://{runs}") as served:
        assert "at a URL" in served.json("/api/run", id="one")["locked"]
        response = served.client.put("/api/notes", params={"id": "one"}, json=notes)
        assert (response.status_code, response.text) == (409, "a run at a URL is read-only")
    with serving(runs, "--read-only") as served:
        assert "--read-only" in served.json("/api/run", id="one")["locked"]
        response = served.client.put("/api/notes", params={"id": "one"}, json=notes)
        assert response.status_code == 405
    assert not (runs / "one" / "notes.json").exists()


def test_the_page_and_its_files(server):
    assert server.get("/").text == (PAGE / "index.html").read_text()
    for path in PAGE.iterdir():
        response = server.get(f"/page/{path.name}")
        assert (response.status_code, response.content) == (200, path.read_bytes())
    assert server.get("/").headers["content-type"] == "text/html; charset=utf-8"
    assert server.get("/page/main.js").headers["content-type"].startswith("text/javascript")


@pytest.mark.parametrize(
    "path",
    [
        "/page/../server.py",
        "/page/%2e%2e/server.py",
        "/page/..%2fserver.py",
        "/page//etc/passwd",
        "/page/",
        "/etc/passwd",
        "/api/none",
    ],
)
def test_paths_outside_the_page_are_not_served(server, path):
    host, port = server.client.base_url.host, server.client.base_url.port
    with socket.create_connection((host, port)) as connection:  # clients normalize paths
        connection.sendall(
            f"GET {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode()
        )
        answer = connection.makefile("rb").read()
    assert answer.startswith(b"HTTP/1.1 404 ")
    assert b"Traceback" not in answer


@pytest.mark.parametrize(
    ("path", "status", "text"),
    [
        ("/api/runs?id=one", 400, "expected no parameters"),
        ("/api/run", 400, "id is missing"),
        ("/api/run?id=two", 404, "no such run"),
        ("/api/run?id=../one", 404, "no such run"),
        ("/api/run?id=%ED%A0%80", 404, "no such run"),
        ("/api/curve?id=one", 400, "name is missing"),
        ("/api/curve?id=one&name=none", 404, "no such scalar"),
        ("/api/histogram?id=one", 400, "name is missing"),
        ("/api/histogram?id=one&name=none", 404, "no such histogram"),
        ("/api/curve?id=one&name=loss&points=1e9", 400, "must be an integer"),
        ("/api/curve?id=one&name=loss&points=20001", 400, "from 0 to 20000"),
        ("/api/curve?id=one&name=loss&smooth=1", 400, "must be a number from 0 to 0.999"),
        ("/api/curve?id=one&name=loss&from=nan", 400, "must be a number"),
        ("/api/curve?id=one&name=loss&x=value", 400, "must be step or time or samples"),
        ("/api/curve?id=one&name=loss&x=samples", 404, "the run has no such scalar"),
        ("/api/curve?id=one&id=one&name=loss", 400, "id must be given only once"),
        ("/api/group?name=loss", 400, "id must be given 1 to 1000 times, got 0"),
        ("/api/group?name=loss&id=one&id=none", 404, "there is no such run"),
        ("/api/group?name=loss&name=loss&id=one", 400, "name must be given only once"),
        ("/api/group?name=none&id=one", 404, "one of the runs has no such scalar"),
        ("/api/timing?id=one&points=x", 400, "must be an integer"),
        ("/api/system?id=one&from=x", 400, "must be a number"),
        ("/api/log?id=one", 400, "worker is missing"),
        ("/api/log?id=one&worker=../1", 400, "must be an integer"),
        ("/api/log?id=one&worker=0&have=-1", 400, "must be an integer"),
        ("/api/log?id=one&worker=0&path=x", 400, "expected id or worker or search or have"),
        ("/api/image?id=one", 400, "number is missing"),
        ("/api/image?id=one&number=-1", 400, "must be an integer"),
        ("/api/image?id=one&number=999", 404, "no such image"),
        ("/api/image?id=one&path=events.jsonl", 400, "expected id or number"),
        ("/api/changes?id=one", 400, "expected no parameters"),
        (f"/api/run?id={'x' * 5000}", 400, "must have at most 4096"),
    ],
)
def test_errors_are_plain_text(server, path, status, text):
    response = server.get(path)
    assert (response.status_code, response.headers["content-type"]) == (
        status,
        "text/plain; charset=utf-8",
    )
    assert text in response.text


@pytest.mark.parametrize("points", [0, 1, 2, 3])
def test_a_very_small_number_of_points_is_valid(server, points):
    assert len(server.json("/api/curve", id="one", name="loss", points=points)["x"]) <= 4
    server.json("/api/timing", id="one", points=points)


def test_the_first_bytes_of_an_image_determine_its_type(server, runs):
    response = server.get(
        "/api/image", params={"id": "one", "number": number_of(server, "picture")}
    )
    file = next((runs / "one" / "images").glob("picture*"))
    assert (response.content, response.headers["content-type"]) == (file.read_bytes(), "image/png")
    assert int(response.headers["content-length"]) == file.stat().st_size


@pytest.mark.parametrize(
    ("name", "status"), [("text", 415), ("page", 415), ("out", 404), ("none", 404)]
)
def test_files_that_are_not_images_of_the_run_are_not_served(server, name, status):
    assert (
        server.get(
            "/api/image", params={"id": "one", "number": number_of(server, name)}
        ).status_code
        == status
    )


def test_a_large_image_is_not_held_in_memory(server):
    def peak_memory():
        status = Path(f"/proc/{server.process.pid}/status").read_text()
        return 1024 * next(
            int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")
        )

    before, size = peak_memory(), 0
    with server.client.stream(
        "GET", "/api/image", params={"id": "one", "number": number_of(server, "big")}
    ) as response:
        for data in response.iter_bytes():
            size += len(data)
    assert size == BIG
    assert peak_memory() - before < BIG / 2


def test_torch_is_not_loaded(server):
    assert "numpy" in (maps := Path(f"/proc/{server.process.pid}/maps").read_text())
    assert "torch" not in maps


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/api/runs",
        "/api/run?id=one",
        "/api/changes",
        "/api/image?id=one&number=0",
        "/page/main.js",
    ],
)
def test_head_responses_have_no_body(server, path):
    response = server.client.head(path)
    assert response.content == b""
    assert response.headers["x-content-type-options"] == "nosniff"


def test_a_stalled_reader_does_not_block_others(server):
    host, port = server.client.base_url.host, server.client.base_url.port
    number = number_of(server, "big")
    with socket.create_connection((host, port)) as stalled:
        stalled.sendall(
            f"GET /api/image?id=one&number={number} HTTP/1.1\r\nHost: {host}\r\n\r\n".encode()
        )
        assert stalled.recv(100).startswith(b"HTTP/1.1 200 ")
        assert server.json("/api/runs")["runs"]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGTERM]
)
def test_the_server_stops_with_open_connections(tmp_path, number):
    write(tmp_path, started())
    with serving(tmp_path) as served:
        ended = threading.Event()

        def listen():
            with served.client.stream("GET", "/api/changes") as response:
                listening.set()
                for _ in response.iter_lines():
                    pass
            ended.set()

        listening = threading.Event()
        thread = threading.Thread(target=listen)
        thread.start()
        assert listening.wait(SECONDS)
        served.process.send_signal(number)
        _, errors = served.process.communicate(timeout=SECONDS)
        thread.join()
        assert ended.is_set()  # the response ended; the connection was not broken
        assert errors == ""
        assert served.process.returncode == (130 if number == signal.SIGINT else -signal.SIGTERM)
