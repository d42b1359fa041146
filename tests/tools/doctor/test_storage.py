from __future__ import annotations

from pathlib import Path

import pytest

from samestep.tools.doctor import storage
from samestep.tools.doctor.system import Folder, Space, System
from tests.tools.doctor.fabricated import DIRECTORY, GIGABYTE, case_of, told
from tests.tools.doctor.test_network import ONE_OF_TWO_HOSTS

POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}


def on(kind):
    return {
        "proc/self/mountinfo": f"22 1 8:1 / / rw - ext4 /dev/sda1 rw\n23 22 8:2 / /runs rw,noatime shared:1 - {kind} somewhere rw\n"
    }


def test_a_local_disk_is_good(tmp_path):
    section = storage.examine(case_of(tmp_path))
    assert (section.facts["file_system"], section.facts["mounted_at"]) == ("xfs", "/runs")
    assert section.facts["free_bytes"] == 50 * GIGABYTE
    assert [finding.tone for finding in section.findings] == ["good"]


@pytest.mark.parametrize(
    ("kind", "environment", "tone", "says"),
    [
        ("tmpfs", {}, "change", "is in memory (tmpfs)"),
        ("overlay", {}, "note", "docker run -v"),
        ("overlay", POD, "change", "PersistentVolumeClaim"),
        ("nfs4", {}, "note", "on another machine (nfs4)"),
        ("lustre", {}, "note", "on another machine (lustre)"),
        ("ext4", ONE_OF_TWO_HOSTS, "note", "must share it"),
    ],
)
def test_where_a_directory_lies_matters(tmp_path, kind, environment, tone, says):
    section = storage.examine(case_of(tmp_path, files=on(kind), environment=environment))
    assert [finding.tone for finding in section.findings] == [tone]
    assert says in told(section, tone)


def test_a_shared_disk_is_right_for_several_hosts(tmp_path):
    assert (
        told(
            storage.examine(case_of(tmp_path, files=on("nfs4"), environment=ONE_OF_TWO_HOSTS)),
            "note",
        )
        == ""
    )


def test_a_disk_that_is_full_is_found_by_bytes_and_by_files(tmp_path):
    section = storage.examine(
        case_of(tmp_path, spaces={str(DIRECTORY): Space(GIGABYTE, 1 << 20, 10)})
    )
    assert "1 MiB are free" in told(section, "change")
    assert "10 more files" in told(section, "change")


def test_a_directory_that_cannot_be_written_is_found(tmp_path):
    section = storage.examine(
        case_of(tmp_path, folder=Folder(DIRECTORY, writable=False, locks=None))
    )
    assert "nothing can be written in /runs/one" in told(section, "change")


def test_a_directory_without_locks_is_noted(tmp_path):
    section = storage.examine(
        case_of(tmp_path, folder=Folder(DIRECTORY, writable=True, locks=False))
    )
    assert "cannot be locked" in told(section, "note")


def test_the_real_folder_of_a_run_that_is_not_there_yet_is_tried_and_left_clean(tmp_path):
    assert System().folder(tmp_path / "runs" / "one") == Folder(tmp_path, writable=True, locks=True)
    assert not list(tmp_path.iterdir())


def test_a_real_folder_that_takes_no_files_is_found():
    assert System().folder(Path("/proc/sys/kernel")) == Folder(
        Path("/proc/sys/kernel"), writable=False, locks=None
    )
