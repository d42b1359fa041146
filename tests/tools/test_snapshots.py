from __future__ import annotations

import argparse

import pytest
import torch
from safetensors.torch import load_file

from samestep.errors import ConfigError, SnapshotError
from samestep.tools import snapshots
from tests.faults import cut, flip_byte
from tests.snapshot.saving import save, team


def run(*words: object) -> int:
    parser = argparse.ArgumentParser()
    snapshots.add_arguments(parser)
    return snapshots.main(parser.parse_args([str(word) for word in words]))


@pytest.fixture
def directory(tmp_path):
    """Three snapshots: the second has a flipped byte, the third is cut."""
    path = tmp_path / "run"
    with team(path, 2) as (writers, _):
        for step in (1, 2, 3):
            save(
                writers,
                step,
                {"model": {"weight": torch.full((600,), float(step)), "note": "x"}},
                score=step / 3,
            )
    flip_byte(next((path / "step-00000002").glob("tensors*")), -1)
    cut(next((path / "step-00000003").glob("tensors*")), 10)
    return path


@pytest.mark.parametrize("words", [["list"], []])
def test_list(directory, capsys, words):
    assert run(*words, directory) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["snapshot", "age", "size", "workers", "score", "state"]
    first = lines[1].split()
    assert [first[0], first[2], *first[4:]] == [
        "step-00000001",
        "s",
        "KiB",
        "2",
        "0.333333",
        "complete",
    ]
    assert lines[2].endswith("complete")
    assert lines[3].startswith("step-00000003")
    assert not lines[3].endswith("complete")


def test_check_reads_every_byte(directory, capsys):
    assert run("check", directory) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step-00000001: valid"
    assert "is damaged" in lines[1]
    assert "bytes, got 10" in lines[2]
    assert run("check", directory / "step-00000001") == 0
    assert run("check", directory / "step-00000002") == 1


@pytest.mark.parametrize("location", ["", "step-00000001"])
def test_export_uses_the_newest_valid_snapshot(directory, tmp_path, capsys, location):
    assert run("export", directory / location, tmp_path / "x.safetensors") == 0
    assert torch.equal(load_file(tmp_path / "x.safetensors")["weight"], torch.ones(600))
    printed = capsys.readouterr()
    assert printed.out.splitlines() == [
        f"exported model of step-00000001 to {tmp_path / 'x.safetensors'}",
        "skipped (not tensors): note",
    ]
    assert printed.err.count("snapshot_rejected") == (0 if location else 2)


def test_export_of_another_object(directory, tmp_path):
    with pytest.raises(SnapshotError, match="ema"):
        run("export", directory, tmp_path / "x.safetensors", "--object", "ema")


@pytest.mark.parametrize("name", ["new/", "empty"])
def test_export_to_a_directory_in_shards(directory, tmp_path, name):
    (tmp_path / "empty").mkdir()
    assert run("export", directory, f"{tmp_path}/{name}") == 0
    # one tensor of 2400 bytes: one file, and no index
    assert [path.name for path in (tmp_path / name).iterdir()] == ["model.safetensors"]
    with pytest.raises(SnapshotError, match="is not empty; choose a new one"):
        run("export", directory, f"{tmp_path}/{name}")


def test_export_for_torch_distributed_checkpoint(directory, tmp_path):
    assert run("export", directory, tmp_path / "dcp", "--format", "dcp") == 0
    assert (tmp_path / "dcp" / ".metadata").exists()


def test_a_directory_without_snapshots(tmp_path, capsys):
    assert run(tmp_path) == 0
    assert capsys.readouterr().out == f"no snapshots in {tmp_path}\n"
    for words in (["check", tmp_path], ["export", tmp_path, tmp_path / "x"]):
        with pytest.raises(SnapshotError, match=r"no (valid )?snapshots? to"):
            run(*words)


def test_wrong_use(directory, tmp_path):
    with pytest.raises(ConfigError, match="expected the directory of a run or snapshot"):
        run("list", tmp_path / "none")
    with pytest.raises(ConfigError, match="export requires a file or directory to write"):
        run("export", directory)
    with pytest.raises(ConfigError, match="list takes no output file"):
        run("list", directory, tmp_path / "x")


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-3, "0 s"),
        (119, "119 s"),
        (120, "2 min"),
        (5400, "90 min"),
        (7200, "2 h"),
        (86400 * 3, "3 d"),
    ],
)
def test_ages(seconds, text):
    assert snapshots._age(seconds) == text


@pytest.fixture
def url(directory):
    return f"file://{directory}"


def test_list_of_a_remote(directory, url, capsys):
    assert run("list", url) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == [
        "snapshot",
        "step-00000001",
        "step-00000002",
        "step-00000003",
    ]
    assert f"{url}/step-00000003" in lines[3]
    assert run(f"{url}/none") == 0
    assert capsys.readouterr().out == f"no snapshots in {url}/none\n"


def test_check_of_a_remote_reads_every_byte(url, capsys):
    assert run("check", url) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step-00000001: valid"
    assert "is damaged" in lines[1]
    assert "bytes, got 10" in lines[2]
    assert run("check", f"{url}/step-00000001") == 0


@pytest.mark.parametrize("location", ["", "/step-00000001"])
def test_export_from_a_remote(url, tmp_path, capsys, location):
    assert run("export", f"{url}{location}", tmp_path / "x.safetensors") == 0
    assert torch.equal(load_file(tmp_path / "x.safetensors")["weight"], torch.ones(600))
    assert "exported model of step-00000001 to" in capsys.readouterr().out
