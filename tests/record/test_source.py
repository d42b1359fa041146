from __future__ import annotations

import os
import shutil

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from samestep.errors import ConfigError, RecordError
from samestep.record import source as module
from samestep.record.files import EventChunk
from samestep.record.source import RunLocation, open_source

STREAM = b"".join(b'{"step":%d}\n' % step for step in range(40))
CUTS = [0, *(index + 1 for index, byte in enumerate(STREAM) if byte == ord("\n"))]


@pytest.fixture(params=["folder", "url"])
def location(request, tmp_path):
    """Return a function that turns a folder into a location: its path, or a URL."""
    return {"folder": str, "url": lambda folder: f"file://{folder}"}[request.param]


def read_all(source, offset=0):
    pieces = []
    while data := source.read(offset):
        assert data.endswith(b"\n")
        pieces.append(data)
        offset += len(data)
    return b"".join(pieces)


def write_chunk(folder, first, end, stream=STREAM):
    file = folder / EventChunk(first, end).path
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(stream[first:end])


def test_events_are_read_while_they_are_written(location, tmp_path):
    source = open_source(location(tmp_path / "run"))
    assert source.read(0) == b""
    before = source.version()
    (tmp_path / "run").mkdir()
    with (tmp_path / "run" / "events.jsonl").open("ab", buffering=0) as file:
        file.write(STREAM[: CUTS[3]])
        assert source.version() != before
        assert read_all(source) == STREAM[: CUTS[3]]
        assert source.read(CUTS[3]) == b""
        file.write(STREAM[CUTS[3] : CUTS[5] + 4])  # the last line is incomplete
        assert read_all(source, CUTS[3]) == STREAM[CUTS[3] : CUTS[5]]
        file.write(STREAM[CUTS[5] + 4 :])
        assert read_all(source, CUTS[5]) == STREAM[CUTS[5] :]
        same = source.version()
        assert source.version() == same


@pytest.mark.parametrize("size", [1, 13, 100])
def test_long_records_are_read_in_pieces_of_complete_lines(location, tmp_path, monkeypatch, size):
    monkeypatch.setattr(module, "READ_BYTES", size)
    (tmp_path / "events.jsonl").write_bytes(STREAM)
    assert read_all(open_source(location(tmp_path))) == STREAM


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("parts")


@given(
    st.lists(st.tuples(st.sampled_from(CUTS), st.sampled_from(CUTS)), max_size=12),
    st.integers(0, 3),
)
@example([(CUTS[0], CUTS[20]), (CUTS[10], CUTS[40]), (CUTS[5], CUTS[8])], 1)
def test_any_chunks_read_as_the_bytes_before_the_first_gap(scratch, cuts, seed):
    """Chunks may overlap, contain each other and appear in any order."""
    parts = [(first, end) for first, end in cuts if first < end]
    shutil.rmtree(scratch)
    scratch.mkdir()
    source, reached = open_source(scratch), 0
    for number, (first, end) in enumerate(parts):
        write_chunk(scratch, first, end)
        if number % 3 >= seed:  # some are read immediately, others later
            reached += len(source.read(reached))
    assert STREAM[:reached] + read_all(source, reached) == STREAM[: covered_by(parts)]


def covered_by(parts):
    held = {byte for first, end in parts for byte in range(first, end)}
    return next(byte for byte in range(len(STREAM) + 1) if byte not in held)


def test_small_chunks_may_be_replaced_by_larger_ones_during_reading(location, tmp_path):
    for first, end in ((0, CUTS[1]), (CUTS[1], CUTS[2]), (CUTS[2], CUTS[3])):
        write_chunk(tmp_path, first, end)
    source = open_source(location(tmp_path))
    assert source.read(0) == STREAM[: CUTS[1]]
    shutil.rmtree(tmp_path / "record")
    write_chunk(tmp_path, 0, CUTS[3])
    assert source.read(CUTS[1]) == STREAM[CUTS[1] : CUTS[3]]


def test_an_incomplete_chunk_is_not_read(location, tmp_path):
    write_chunk(tmp_path, 0, CUTS[2])
    write_chunk(tmp_path, CUTS[2], CUTS[9], STREAM[: CUTS[9] - 1])
    assert read_all(open_source(location(tmp_path))) == STREAM[: CUTS[2]]


def test_a_replaced_record_raises(location, tmp_path):
    (tmp_path / "events.jsonl").write_bytes(STREAM)
    source = open_source(location(tmp_path))
    end = len(read_all(source))
    (tmp_path / "events.jsonl").write_bytes(STREAM[: CUTS[1]])
    with pytest.raises(
        RecordError, match=f"has no byte {end}: another record replaced it; read it from the start"
    ):
        source.read(end)
    assert source.read(0) == STREAM[: CUTS[1]]


def test_images_are_read_in_pieces(location, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "READ_BYTES", 3)
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "a-00000001.png").write_bytes(b"12345678")
    size, pieces = open_source(location(tmp_path)).open_image("images/a-00000001.png")
    assert (size, list(pieces)) == (8, [b"123", b"456", b"78"])


HOSTILE = [
    "../secret",
    "images/../secret",
    "images/../../run/secret",
    "images/sub/../../secret",
    "images//secret",
    "images/..",
    "images/.",
    "images/",
    "images",
    "",
    "secret",
    "/etc/passwd",
    "images/\0",
    "images\\secret",
    "images/..\\secret",
    "file:///etc/passwd",
    "images/.hidden",
    "images/%2e%2e",
    "images/a.png?b",
    "images/*",
    "images/a.png\n",
    "images/nothing.png",
    "images/sub",
]


@pytest.mark.parametrize("path", HOSTILE)
def test_no_image_path_leads_out_of_the_run(location, tmp_path, path):
    run = tmp_path / "run"
    (run / "images" / "sub").mkdir(parents=True)
    for file in (run / "secret", tmp_path / "secret", run / "images" / ".hidden"):
        file.write_text("secret")
    with pytest.raises(RecordError):
        open_source(location(run)).open_image(path)


def test_no_link_leads_out_of_the_run(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.png").write_text("secret")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "images").symlink_to(outside)
    (tmp_path / "other" / "images").mkdir(parents=True)
    (tmp_path / "other" / "images" / "a.png").symlink_to(outside / "a.png")
    for run, reason in (("run", "there is no image"), ("other", "not a regular file")):
        with pytest.raises(RecordError, match=reason):
            open_source(tmp_path / run).open_image("images/a.png")


def test_a_pipe_is_not_an_image(tmp_path):
    (tmp_path / "images").mkdir()
    os.mkfifo(tmp_path / "images" / "a.png")
    with pytest.raises(RecordError, match="not a regular file"):
        open_source(tmp_path).open_image("images/a.png")


def test_runs_are_found_at_and_below_a_location(location, tmp_path):
    assert RunLocation(location(tmp_path / "nowhere")).find() == []
    for run in (".", "b", "a/one", "a/two/deep"):
        (tmp_path / run).mkdir(parents=True, exist_ok=True)
        (tmp_path / run / "events.jsonl").touch()
    (tmp_path / "sent").mkdir()
    write_chunk(tmp_path / "sent", 0, CUTS[1])
    for no_run in (
        "step-00000010",
        "images",
        "record",
        "tensorboard",
        ".git",
        "empty/record",
        "superseded-1",
    ):
        (tmp_path / no_run).mkdir(parents=True)
        if no_run != "empty/record":
            (tmp_path / no_run / "events.jsonl").touch()
    assert RunLocation(location(tmp_path)).find() == [".", "a/one", "a/two/deep", "b", "sent"]


def test_a_link_to_a_run_is_not_listed_as_a_run(tmp_path):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    (tmp_path / "runs" / "a" / "events.jsonl").touch()
    (tmp_path / "runs" / "latest").symlink_to("a")
    (tmp_path / "link").symlink_to("runs")
    for name in ("runs", "link"):
        assert RunLocation(tmp_path / name).find() == ["a"]


def test_a_url_that_cannot_be_used_is_told():
    with pytest.raises(
        ConfigError, match=r"expected a URL that fsspec knows, .* got s4://bucket/run"
    ):
        open_source("s4://bucket/run")
