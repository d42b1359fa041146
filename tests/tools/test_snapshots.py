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
    assert "bytes, got 10" in lines[3]


def test_check_reads_every_byte(directory, capsys):
    assert run("check", directory) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step-00000001: whole"
    assert "is damaged" in lines[1]
    assert "bytes, got 10" in lines[2]
    assert run("check", directory / "step-00000001") == 0
    assert run("check", directory / "step-00000002") == 1


@pytest.mark.parametrize("place", ["", "step-00000001"])
def test_export_takes_the_newest_whole_snapshot(directory, tmp_path, capsys, place):
    assert run("export", directory / place, tmp_path / "x.safetensors") == 0
    assert torch.equal(load_file(tmp_path / "x.safetensors")["weight"], torch.ones(600))
    told = capsys.readouterr()
    assert (
        told.out
        == f"model of {directory / 'step-00000001'} is in {tmp_path / 'x.safetensors'}; no tensors, so left out: note\n"
    )
    assert told.err.count("snapshot_rejected") == (0 if place else 2)


def test_export_of_another_object(directory, tmp_path):
    with pytest.raises(SnapshotError, match="it has no ema"):
        run("export", directory, tmp_path / "x.safetensors", "--object", "ema")


def test_a_directory_without_snapshots(tmp_path, capsys):
    assert run(tmp_path) == 0
    assert capsys.readouterr().out == f"{tmp_path} holds no snapshots\n"
    for words in (["check", tmp_path], ["export", tmp_path, tmp_path / "x"]):
        with pytest.raises(SnapshotError, match="holds no"):
            run(*words)


def test_wrong_use(directory, tmp_path):
    with pytest.raises(
        ConfigError, match="none was given; expected the directory of a run or of a snapshot"
    ):
        run("list", tmp_path / "none")
    with pytest.raises(ConfigError, match="export takes a file to write to"):
        run("export", directory)
    with pytest.raises(ConfigError, match="list takes no file"):
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


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**30, "1 GiB"), (2**45, "32 TiB")],
)
def test_sizes(count, text):
    assert snapshots.size(count) == text


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
    assert f"snapshot {url}/step-00000003: tensors" in lines[3]
    assert run(f"{url}/none") == 0
    assert capsys.readouterr().out == f"{url}/none holds no snapshots\n"


def test_check_of_a_remote_reads_every_byte(url, capsys):
    assert run("check", url) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "step-00000001: whole"
    assert "is damaged: bytes 0 to" in lines[1]
    assert "bytes, got 10" in lines[2]
    assert run("check", f"{url}/step-00000001") == 0


@pytest.mark.parametrize("place", ["", "/step-00000001"])
def test_export_from_a_remote(url, tmp_path, capsys, place):
    assert run("export", f"{url}{place}", tmp_path / "x.safetensors") == 0
    assert torch.equal(load_file(tmp_path / "x.safetensors")["weight"], torch.ones(600))
    assert f"model of {url}/step-00000001 is in" in capsys.readouterr().out
