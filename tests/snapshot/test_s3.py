"""Snapshots in a real S3; separate processes use it, since a client's threads never end."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from samestep.errors import SnapshotError
from samestep.snapshot.hooks import Mirror
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import inspect
from samestep.snapshot.remote import RemoteDirectory
from samestep.storage import Retries, Storage, StorageError
from tests.jobs import STEPS, events, image_job, left_by, left_in, snapshots, steps_of, train
from tests.s3 import s3_server
from tests.snapshot.saving import save, team
from tests.workers import run_workers, try_workers


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


def _listed(url):
    return RemoteDirectory(url).names()


@pytest.mark.long
def test_a_run_resumes_with_the_same_bits_on_an_empty_machine(server, tmp_path):
    old, new, url = tmp_path / "old", tmp_path / "new", "s3://bucket/runs/one"
    run_workers(
        train,
        2,
        image_job,
        old,
        {"remote": url, "stop_after": 5, "snapshot_every": 5},
        environment=server.environment,
    )
    run_workers(
        train,
        1,
        image_job,
        new,
        {"remote": url, "snapshot_every": 8},
        environment=server.environment,
    )
    (resumed,) = events(new, "resumed")
    assert (resumed["step"], resumed["snapshot"]) == (5, str(new / steps_of(5)[0]))
    assert (
        run_workers(_listed, 1, url, environment=server.environment)
        == [snapshots(new)]
        == [steps_of(5, 8)]
    )
    undisturbed = left_by(image_job, tmp_path / "undisturbed", 1, lanes=8)
    left = left_in(image_job, new, lanes=8)
    assert left == {name: value for name, value in undisturbed.items() if name in left}
    assert sum(name.endswith(f"at step {STEPS - 1}") for name in left) == 2


@pytest.mark.long
def test_a_wrong_secret_is_reported_and_does_not_stop_training(server, tmp_path):
    wrong = {**server.environment, "AWS_SECRET_ACCESS_KEY": "wrong"}
    options = {"remote": "s3://bucket/runs/two", "resume": "never", "snapshot_every": 2}
    (ended,) = try_workers(train, 1, image_job, tmp_path / "run", options, environment=wrong)
    assert isinstance(ended.error, SnapshotError)
    assert str(ended.error).startswith(
        f"the last snapshot is complete in {tmp_path / 'run'}, but could not be copied to "
        "s3://bucket/runs/two"
    )
    (reported,) = events(tmp_path / "run", "remote_failed")
    assert reported["reason"].startswith(
        "cannot list s3://bucket/runs/two: PermissionError: The request signature"
    )
    assert snapshots(tmp_path / "run") == steps_of(4, 6, 8)
    (refused,) = try_workers(
        train, 1, image_job, tmp_path / "new", {"remote": "s3://bucket/runs/two"}, environment=wrong
    )
    assert "The storage may hold the snapshot to resume from" in str(refused.error)


def _race(url):
    def create(number):
        try:
            Storage(url).create("manifest.json", b"%d" % number)
        except StorageError as error:
            return str(error)
        return number

    with ThreadPoolExecutor(2) as writers:
        outcomes = list(writers.map(create, range(2)))
    return outcomes, int(Storage(url).read("manifest.json", 0, 1))


@pytest.mark.long
def test_one_of_two_concurrent_writes_of_a_manifest_wins(server):
    ((outcomes, written),) = run_workers(
        _race, 1, "s3://bucket/race", environment=server.environment
    )
    assert [outcome for outcome in outcomes if isinstance(outcome, int)] == [written]
    assert (
        sum("another run wrote this file in the meantime" in str(outcome) for outcome in outcomes)
        == 1
    )


def _send_one_file_and_die(directory, url):
    send = Storage.send

    def send_and_die(storage, source, path):
        send(storage, source, path)
        os.kill(os.getpid(), signal.SIGKILL)

    Storage.send = send_and_die
    RemoteDirectory(url).send(directory)


class Counted(Retries):
    """Counts retries."""

    retries = 0

    def delays(self):
        for delay in super().delays():
            Counted.retries += 1
            yield delay


def _mirror(directory, url, sign):
    """Copy missing files once their signs are gone; return sizes before, events and retries."""
    remote, reported = (
        RemoteDirectory(url, Counted(tries=100, first_seconds=0.1, longest_seconds=0.1)),
        [],
    )
    state = random.getstate()
    before = remote.storage.sizes(steps_of(1)[0])
    send = Storage.send

    def send_on_sign(storage, source, path):
        sign.touch()
        while sign.exists():
            time.sleep(0.001)
        send(storage, source, path)

    Storage.send = send_on_sign
    mirror = Mirror(
        remote,
        directory,
        keep_last=1,
        keep_best=0,
        report=lambda kind, **fields: reported.append((kind, fields)),
    )
    mirror.finish()
    mirror.close()
    assert random.getstate() == state  # it belongs to training
    return before, reported, Counted.retries


def _fetch(url, directory):
    return inspect(RemoteDirectory(url).fetch(steps_of(1)[0], directory)).attempt


def test_killed_uploads_and_servers_repeat_only_the_current_file(tmp_path):
    url, sign = "s3://bucket/runs/three", tmp_path / "sign"
    with team(tmp_path / "run", 2) as (writers, _):
        save(writers, 1, {"weight": torch.arange(2.0**20)})
    (path,) = (tmp_path / "run").iterdir()
    first, second = (file.size for file in inspect(path).files)
    with s3_server(tmp_path) as server:
        (killed,) = try_workers(
            _send_one_file_and_die, 1, path, url, environment=server.environment
        )
        assert killed.exitcode == -signal.SIGKILL
        breaking = threading.Thread(target=_break, args=(server, sign), daemon=True)
        breaking.start()
        ((before, reported, pauses),) = run_workers(
            _mirror, 1, path.parent, url, sign, environment=server.environment
        )
        breaking.join()
        assert pauses > 0
        assert list(before.values()) == [first]
        assert [(kind, fields["bytes"]) for kind, fields in reported] == [
            ("snapshot_copied", second + (path / NAME).stat().st_size)
        ]
        assert run_workers(_fetch, 1, url, tmp_path / "new", environment=server.environment) == [
            inspect(path).attempt
        ]


def _break(server, sign):
    """Kill the server during an upload, and start it again."""
    while not sign.exists():
        time.sleep(0.001)
    server.stop_answering()
    sign.unlink()
    server.wait_for_request()
    server.kill()
    server.start()
