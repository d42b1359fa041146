from __future__ import annotations

from pathlib import Path

import pytest

from samestep.tools.doctor import disk, measured
from tests.tools.doctor.fabricated import case_of, told


def row(name, *seconds, nbytes=0):
    return {"name": name, "seconds": seconds, "bytes": nbytes}


def examined(tmp_path, *rows, **others):
    return measured.examine(case_of(tmp_path, torch={"measured": rows, **others}))


def test_figures_are_medians_with_their_spread(tmp_path):
    section = examined(
        tmp_path, row("all-to-all", 0.5, 0.25, 4.0, nbytes=25_000_000), row("import of torch", 1.5)
    )
    assert section.facts == {
        "all-to-all, 25 MB": {
            "bytes": 25_000_000,
            "times": 3,
            "median_seconds": 0.5,
            "lowest_seconds": 0.25,
            "highest_seconds": 4.0,
        },
        "import of torch": {
            "bytes": None,
            "times": 1,
            "median_seconds": 1.5,
            "lowest_seconds": 1.5,
            "highest_seconds": 1.5,
        },
    }


@pytest.mark.parametrize(
    ("measurement", "says"),
    [
        (row(measured.WRITE, 1.0, nbytes=50_000_000), "a snapshot of 1 GB needs 20 s"),
        (row(measured.SYNC, 0.1, nbytes=4096), "a small file needs 100 ms"),
        (row(measured.IMPORT, 40.0), "importing torch took 40 s"),
    ],
)
def test_what_is_slow_is_noted_and_no_more(tmp_path, measurement, says):
    section = examined(tmp_path, measurement)
    assert [finding.tone for finding in section.findings] == ["note"]
    assert says in told(section, "note")


def test_what_is_fast_is_good(tmp_path):
    rows = [
        row(measured.EXCHANGE, 0.01, nbytes=25_000_000),
        row(measured.ALL_REDUCE, 0.04, nbytes=25_000_000),
    ]
    section = examined(
        tmp_path,
        row(measured.WRITE, 1.0, nbytes=1 << 30),
        row(measured.EXCHANGE, 9.0, nbytes=4000),
        *rows,
    )
    assert [finding.tone for finding in section.findings] == ["good", "good"]
    assert "1 GiB a second" in told(section, "good")
    assert "25 MB of gradients in 10.0 ms; gloo's all-reduce takes 40.0 ms" in told(section, "good")


def test_workers_that_cannot_talk_have_to_be_mended(tmp_path):
    section = examined(tmp_path, workers_error="timed out after 5 s waiting for worker 1")
    assert "timed out after 5 s waiting for worker 1" in told(section, "change")


def test_a_process_that_cannot_import_torch_says_why(tmp_path, monkeypatch):
    (tmp_path / "torch.py").write_text(
        "raise ImportError('libwrong.so: cannot open shared object file')"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found, failure = measured.measure(tmp_path, quick=True, gpus=False)
    assert found == {}
    assert failure.endswith("status 1: ImportError: libwrong.so: cannot open shared object file")


def test_a_python_that_is_gone_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(measured.sys, "executable", str(tmp_path / "python"))
    assert "a process could not be started" in measured.measure(tmp_path, quick=True, gpus=False)[1]


def test_a_disk_is_measured_and_left_clean(tmp_path):
    found = {
        name: (seconds, nbytes) for name, seconds, nbytes in disk.measure(tmp_path, quick=True)
    }
    assert found[measured.WRITE][1] == found["file read, not cached"][1] == disk.LARGE_BYTES
    assert all(second > 0 for seconds, _ in found.values() for second in seconds)
    assert not list(tmp_path.iterdir())


def test_a_directory_that_takes_no_files_is_not_measured():
    assert disk.measure(Path("/proc/sys/kernel"), quick=True) == []
