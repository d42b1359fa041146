"""Snapshots that somebody else wrote: read in bounds, and described without control characters."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch

import samestep as ss
from samestep.errors import SnapshotError
from samestep.run.environment import differences
from samestep.snapshot.manifest import NAME
from samestep.snapshot.read import check, inspect, load
from tests.security.hostile import ESCAPE, TERABYTE, run_limited
from tests.snapshot.saving import save_once, small_state
from tests.snapshot.test_read import signed

STEP = "step-00000002"
SEGMENT = 2**28


@pytest.fixture
def run(tmp_path):
    save_once(tmp_path, 1, small_state(1))
    save_once(tmp_path, 2, small_state(2))
    return tmp_path


def change(run: Path, **fields) -> None:
    manifest = run / STEP / NAME
    manifest.write_bytes(signed({**json.loads(manifest.read_bytes()), **fields}))


def declare_a_terabyte(run: Path) -> None:
    """Make a consistent snapshot of one tensor, whose file is a hole."""
    name = next(path.name for path in (run / STEP).iterdir() if path.name != NAME)
    os.truncate(run / STEP / name, TERABYTE)
    tensors = {"model/weight": [["uint8", [TERABYTE], [0]], [[0, 0, TERABYTE, 0]]]}
    files = [[name, TERABYTE, SEGMENT, ["0" * 32] * (TERABYTE // SEGMENT)]]
    state = {"dict": [["model", {"dict": [["weight", {"tensor": "model/weight"}]]}]]}
    change(run, tensors=tensors, files=files, state=state)


def test_a_terabyte_that_no_host_can_hold_is_refused_before_it_is_read(run):
    declare_a_terabyte(run)
    assert inspect(run / STEP).size == TERABYTE  # the list shows it
    for read in (load, ss.read_snapshot):
        with pytest.raises(SnapshotError, match=f"tensors take {TERABYTE} bytes, but this host"):
            read(run / STEP)
    with pytest.raises(SnapshotError, match="do not match their checksum"):
        check(run / STEP)


def test_a_tensor_that_claims_more_than_its_file_has_is_refused(run):
    body = json.loads((run / STEP / NAME).read_bytes())
    (dtype, shape, order), [[file, start, _, offset]] = body["tensors"]["model/weight"]
    size = shape[0] * 10**6
    claim = [[dtype, [size, *shape[1:]], order], [[file, start, size * shape[1], offset]]]
    change(run, tensors={**body["tensors"], "model/weight": claim})
    with pytest.raises(SnapshotError, match="places pieces outside of the"):
        ss.read_snapshot(run, step=2)


@pytest.mark.parametrize("name", [NAME, "data"])
def test_links_to_files_are_not_followed(run, name, tmp_path_factory):
    files = {path.name == NAME: path for path in (run / STEP).iterdir()}
    file = files[name == NAME]
    file.rename(outside := tmp_path_factory.mktemp("outside") / "file")
    file.symlink_to(outside)
    for read in (inspect, check, load):
        with pytest.raises(SnapshotError, match="not a regular file"):
            read(run / STEP)
    assert ss.read_snapshot(run).step == 1  # the newest complete one


def test_a_snapshot_may_be_named_by_a_link_and_be_a_link(run, tmp_path_factory):
    other = tmp_path_factory.mktemp("other")
    (other / STEP).symlink_to(run / STEP)
    (other / "latest").symlink_to(run)
    assert ss.read_snapshot(other).step == ss.read_snapshot(other / "latest").step == 2


def test_deep_and_large_manifests_are_refused(run):
    for content in (b"[" * 10**6, b'{"a":' * 10**5):
        (run / STEP / NAME).write_bytes(content)
        with pytest.raises(SnapshotError, match="is damaged"):
            inspect(run / STEP)
    os.truncate(run / STEP / NAME, TERABYTE)
    with pytest.raises(SnapshotError, match="must have at most"):
        inspect(run / STEP)


@pytest.mark.parametrize("action", [pytest.param("list", marks=pytest.mark.long), "check"])
def test_the_command_escapes_what_a_snapshot_names_and_goes_on(run, action):
    body = json.loads((run / STEP / NAME).read_bytes())
    spec, _ = body["tensors"]["model/weight"]
    change(run, tensors={**body["tensors"], ESCAPE: [spec, []]})
    (run / f"step-{ESCAPE}").mkdir()
    os.mkfifo(run / "step-00000003")
    ended = run_limited("-m", "samestep", "snapshots", action, run)
    assert r"tensor \x1b]0;owned\x07 is incomplete" in ended.stdout
    assert "complete" in ended.stdout or "step-00000001: valid" in ended.stdout
    assert "\x1b" not in ended.stdout + ended.stderr


def test_a_newer_format_is_escaped(run):
    change(run, format=9, samestep=ESCAPE)
    with pytest.raises(SnapshotError, match=r"install samestep \\x1b\]0;owned") as caught:
        inspect(run / STEP)
    assert "\x1b" not in str(caught.value)


def test_a_resume_escapes_the_environment_of_the_snapshot():
    assert differences({"torch": ESCAPE}, {"torch": "2"}) == r"  torch: \x1b]0;owned\x07 -> 2"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_pipe_in_a_checkpoint_is_not_waited_for(tmp_path):
    from torch.distributed.checkpoint import save

    save({"weight": torch.ones(2)}, checkpoint_id=tmp_path, no_dist=True)
    part = next(tmp_path.glob("*.distcp"))
    part.unlink()
    os.mkfifo(part)
    with pytest.raises(SnapshotError, match="not a regular file"):
        ss.read_dcp(tmp_path)
    (tmp_path / ".metadata").unlink()
    os.mkfifo(tmp_path / ".metadata")
    with pytest.raises(SnapshotError, match="there is no checkpoint"):
        ss.read_dcp(tmp_path)
