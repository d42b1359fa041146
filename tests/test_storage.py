from __future__ import annotations

import errno
import os
import random
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from samestep import storage as module
from samestep.errors import ConfigError
from samestep.storage import (
    Retries,
    Storage,
    StorageError,
    make_directory,
    open_regular,
    read_regular,
)
from tests.snapshot.faulty import HASTY, URL, failing, faulty_storage

HOLDER = """
import fcntl, os, signal, sys
file = os.open(sys.argv[1], os.O_RDWR)
signal.signal(signal.SIGIO, lambda *_: fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_UNLCK))
fcntl.fcntl(file, fcntl.F_SETLEASE, fcntl.F_WRLCK)
print("held", flush=True)
sys.stdin.read()
"""


def test_a_lease_of_another_process_is_taken_back(tmp_path):
    """An NFS server gives its clients leases, also for files that the server itself opens."""
    (tmp_path / "file").write_bytes(b"content")
    command = [sys.executable, "-c", HOLDER, str(tmp_path / "file")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        if not holder.stdout.readline():
            holder.stdin.close()
            pytest.skip("this file system has no leases")
        os.close(open_regular(tmp_path / "file", os.O_RDWR))
        holder.stdin.close()
    assert read_regular(tmp_path / "file", 7) == b"content"
    with pytest.raises(OSError, match="larger than 6 bytes"):
        read_regular(tmp_path / "file", 6)


@pytest.fixture
def far():
    with faulty_storage() as files:
        yield files


@pytest.fixture
def storage(far):
    return Storage(URL, HASTY)


def test_names_of_new_directories_are_synced(tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(module, "sync", synced.append)
    make_directory(tmp_path / "a" / "b")
    assert sorted(synced) == [tmp_path, tmp_path / "a"]
    make_directory(tmp_path / "a" / "b")  # as after a kill before the sync
    assert synced[2:] == [tmp_path / "a"]


@pytest.mark.parametrize("method", ["write", "create", "send", "copy"])
def test_a_file_of_this_host_appears_complete_and_durable(tmp_path, monkeypatch, method):
    source, target = tmp_path / "source", tmp_path / "far" / "step" / "data"
    source.write_bytes(b"123")
    synced = []

    def sync(path):
        synced.append((path.read_bytes() if path.is_file() else path, target.exists()))

    monkeypatch.setattr(module, "sync", sync)
    storage = Storage(f"file://{tmp_path}", HASTY)
    if method in {"write", "create"}:
        getattr(storage, method)("far/step/data", b"123")
    else:
        getattr(storage, method)(source if method == "send" else "source", "far/step/data")
    assert sorted(synced[:2]) == [(tmp_path, False), (tmp_path / "far", False)]
    assert synced[2:] == [(b"123", False), (target.parent, True)]


@given(st.integers(1, 12), st.floats(0.01, 10), st.floats(0.01, 100))
def test_delays_double_up_to_the_longest_and_shorten_by_up_to_half(tries, first, longest):
    pauses = list(Retries(tries, first, longest).delays())
    assert len(pauses) == tries - 1
    for number, pause in enumerate(pauses):
        complete = min(first * 2**number, longest)
        assert 0.5 * complete <= pause <= complete


def test_delays_differ_and_do_not_use_the_generator_of_training():
    before = random.getstate()
    assert list(Retries().delays()) != list(Retries().delays())
    assert random.getstate() == before


def everything(storage, tmp_path):
    """Call all methods of a storage, and return the results."""
    source = tmp_path / "source"
    source.write_bytes(b"12345")
    storage.send(source, "a/data")
    storage.create("a/manifest", b"678")
    storage.write("a/part", b"9")
    storage.write("a/part", b"90")
    storage.copy("a/data", "b/data")
    sizes = [storage.sizes(folder) for folder in ("a", "b", "none")]
    data = storage.read("a/data", 1, 4)
    folders = sorted(storage.folders())
    object_sizes = [storage.size(path) for path in ("a/part", "a", "a/none")]
    storage.remove("a/part")
    storage.remove("a/manifest")
    storage.remove("b", folder=True)
    storage.remove("none")
    storage.remove("none", folder=True)
    return sizes, object_sizes, data, folders, storage.sizes("a"), storage.folders()


ALL = (
    [{"data": 5, "manifest": 3, "part": 2}, {"data": 5}, {}],
    [2, None, None],
    b"234",
    ["a", "b"],
    {"data": 5},
    ["a"],
)


@pytest.mark.parametrize("url", ["file://{}/far/run", "memory://far/run", "faulty://far/run"])
def test_files_are_written_found_read_copied_and_removed(far, tmp_path, url):
    assert everything(Storage(url.format(tmp_path), HASTY), tmp_path) == ALL


def test_failed_requests_are_retried(far, storage, tmp_path):
    fails = iter(range(10**6))

    def two_of_three(operation, path):
        if next(fails) % 3:
            raise ConnectionError("reset")

    far.before = staticmethod(two_of_three)
    *results, folders = everything(storage, tmp_path)
    assert results == list(ALL[:-1])
    assert set(folders) - {"b"} == set(ALL[-1])  # fsspec's memory may keep an empty folder


def test_an_error_is_raised_after_the_last_try(far, storage):
    far.before = staticmethod(failing(4, TimeoutError("no answer"), "cat_file"))
    with pytest.raises(
        StorageError,
        match=r"cannot read faulty://far/run/a/b: TimeoutError: no answer",
    ):
        storage.read("a/b", 0, 3)
    with pytest.raises(StorageError, match="FileNotFoundError"):  # the fifth call
        storage.read("a/b", 0, 3)


class NoCredentialsError(Exception):
    pass


@pytest.mark.parametrize(
    "error",
    [
        PermissionError("denied"),
        NoCredentialsError("none"),
        ValueError("bad"),
        NotImplementedError(),
    ],
)
def test_a_refused_request_is_not_retried(far, storage, error):
    far.before = staticmethod(failing(1, error))
    with pytest.raises(StorageError, match=type(error).__name__):
        storage.folders()
    assert storage.folders() == []


def test_requests_are_not_retried_after_giving_up(far):
    storage = Storage(URL, Retries(first_seconds=1000.0, longest_seconds=1000.0))
    storage.given_up.set()
    far.before = staticmethod(failing(1, ConnectionError()))
    with pytest.raises(StorageError):
        storage.folders()
    assert storage.folders() == []


def test_a_short_read_is_retried(far, storage, monkeypatch):
    storage.create("x", b"12345")
    answers = iter([b"12", b"1234"])
    complete = far.cat_file
    monkeypatch.setattr(
        far, "cat_file", lambda *args, **kwargs: next(answers, None) or complete(*args, **kwargs)
    )
    assert storage.read("x", 0, 5) == b"12345"


def test_sizes_that_a_listing_lacks_are_requested(far, storage, monkeypatch):
    storage.create("a/x", b"12345")
    storage.create("y", b"123")
    complete = far.ls
    monkeypatch.setattr(
        far,
        "ls",
        lambda *args, **kwargs: [{**entry, "size": None} for entry in complete(*args, **kwargs)],
    )
    assert (storage.sizes("a"), storage.sizes("")) == ({"x": 5}, {"y": 3})


def test_a_lost_response_is_not_a_conflict_but_another_file_is(far, storage, monkeypatch):
    arrive = far.pipe_file
    lost = [True]

    def arrive_and_fail(*args, **kwargs):
        arrive(*args, **kwargs)
        if lost.pop():
            raise ConnectionError("reset")

    monkeypatch.setattr(far, "pipe_file", arrive_and_fail)
    storage.create("manifest", b"mine")
    monkeypatch.undo()
    storage.create("manifest", b"mine")
    with pytest.raises(
        StorageError,
        match="another run wrote this file in the meantime; give every run its own URL",
    ):
        storage.create("manifest", b"yours")
    assert storage.read("manifest", 0, 4) == b"mine"


@pytest.mark.parametrize("has_links", [True, False])
def test_a_file_that_two_runs_create_at_the_same_instant_is_that_of_one(
    tmp_path, monkeypatch, has_links
):
    storage, other = (Storage(f"file://{tmp_path}", HASTY) for _ in range(2))
    sync, theirs = module.sync, [b"theirs"] if has_links else []

    def sync_while_another_run_creates_it(path):
        sync(path)
        if theirs and path.name.endswith(".tmp"):  # it is complete, but has no name yet
            (tmp_path / "manifest").write_bytes(theirs.pop())

    def link(*_):
        raise OSError(errno.EPERM, "not permitted")

    monkeypatch.setattr(module, "sync", sync_while_another_run_creates_it)
    if not has_links:
        monkeypatch.setattr(os, "link", link)
        other.create("manifest", b"theirs")
    with pytest.raises(StorageError, match="another run wrote this file"):
        storage.create("manifest", b"mine")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"manifest": b"theirs"}


def test_a_storage_without_conditional_writes_works(far, storage, monkeypatch):
    monkeypatch.setattr(far, "pipe_file", lambda self, path, value: far.store.update({path: None}))
    storage.create("manifest", b"mine")
    assert [path.rpartition("/")[2] for path in far.store] == ["manifest"]


@pytest.mark.parametrize(
    ("url", "message"),
    [
        (
            "s4://bucket/run",
            (
                "expected a URL that fsspec knows, such as s3://bucket/runs/one, "
                "got s4://bucket/run: Protocol not known: s4"
            ),
        ),
        (
            "adl://store/run",
            "adl://store/run needs a package for adl: install it",
        ),
    ],
)
def test_an_unusable_url_is_rejected_immediately(url, message):
    with pytest.raises(ConfigError) as caught:
        Storage(url).open()
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(("missing", "extra"), [("fsspec", "remote"), ("s3fs", "s3")])
def test_the_error_of_a_missing_package_shows_how_to_install_it(monkeypatch, missing, extra):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(
        ConfigError,
        match=rf's3://bucket/run needs .* pip install "samestep\[{extra}\]"',
    ):
        Storage("s3://bucket/run").open()
