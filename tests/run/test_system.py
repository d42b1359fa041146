"""The samples of each host's CPU, memory, GPUs, disk and network in the record."""

from __future__ import annotations

import logging
import sys
import threading
import time
from importlib import import_module
from types import SimpleNamespace

import pytest

import samestep as ss
from samestep.comm.status import WorkerStatus
from samestep.record import FileRecord
from samestep.run import process
from samestep.run.process import SystemSampler, SystemUse
from tests.jobs import events, image_job, left_in, train
from tests.workers import run_workers

SECONDS = 60.0
FEW_MILLISECONDS = 0.02


def wait_for_samples(directory, count):
    """Wait until the record has samples, and return them."""
    deadline = time.monotonic() + SECONDS
    while len(samples := events(directory, "system")) < count:
        assert time.monotonic() < deadline
        time.sleep(FEW_MILLISECONDS)
    return samples


def test_one_worker_of_a_host_samples_it(tmp_path):
    def body():
        with ss.init(dir=tmp_path, lanes=2, system_every=FEW_MILLISECONDS) as run:
            if run.rank == 0:
                wait_for_samples(tmp_path, 2)
            run.barrier("sampling")

    run_workers(body, 2)
    (start,) = events(tmp_path, "started")
    for sample in events(tmp_path, "system"):
        assert sample["host"] == start["workers"][0]["host"]
        assert 0 <= sample["cpu"] <= 1
        assert 0 < sample["memory"] < sample["memory_total"]
        assert min(sample["network_received"], sample["network_sent"]) >= 0
    assert events(tmp_path)[-1]["event"] == "finished"


@pytest.mark.parametrize("options", [{"system_every": None}, {}])
def test_without_the_option_or_before_its_first_interval_nothing_is_sampled(tmp_path, options):
    with ss.init(dir=tmp_path, **options):
        names = [thread.name for thread in threading.enumerate()]
    assert ("sample the host" in names) == (not options)
    assert events(tmp_path, "system") == []


def test_samples_change_no_bit(tmp_path):
    for name, every in (("with", 0.001), ("without", None)):
        train(image_job, tmp_path / name, {"lanes": 2, "system_every": every})
    assert left_in(image_job, tmp_path / "with") == left_in(image_job, tmp_path / "without")
    assert events(tmp_path / "with", "system")


class Peers(WorkerStatus):
    """Worker 0 of two hosts, of which the other sends `sample`."""

    def __init__(self, sample):
        super().__init__(0)
        self.sample = sample

    def share_sample(self, sample, others):
        assert others == [4]
        return [self.sample]


@pytest.mark.parametrize("sample", [{"cpu": 0.5, "time": 1, "other": 2}, None, "text"])
def test_samples_of_other_hosts_are_recorded_once(tmp_path, sample):
    record = FileRecord(tmp_path)
    sampler = SystemSampler(FEW_MILLISECONDS, {0: "a", 4: "b"}, Peers(sample), record)
    wait_for_samples(tmp_path, 4)
    sampler.close()
    record.close()
    samples = [event for event in events(tmp_path, "system") if event["host"] == "b"]
    assert [event.keys() for event in samples] == [{"time", "event", "host", "cpu"}] * isinstance(
        sample, dict
    )


def test_many_hosts_are_sampled_less_often(tmp_path):
    record = FileRecord(tmp_path)
    for count, seconds in ((1, 5.0), (8, 5.0), (9, 10.0), (128, 80.0)):
        sampler = SystemSampler(5.0, dict.fromkeys(range(count), "a"), WorkerStatus(), record)
        sampler.close()
        assert sampler._seconds == seconds
    record.close()


def test_a_host_that_cannot_be_sampled_is_a_warning(tmp_path, monkeypatch, caplog):
    def fail(self):
        raise PermissionError("no /proc")

    monkeypatch.setattr(process.SystemUse, "sample", fail)
    record = FileRecord(tmp_path)
    with caplog.at_level(logging.WARNING, "samestep"):
        sampler = SystemSampler(0.001, {0: "a"}, WorkerStatus(), record)
        sampler._thread.join(SECONDS)
    sampler.close()
    record.close()
    assert (
        "system samples of this host are no longer recorded: PermissionError: no /proc"
        in caplog.text
    )


def test_disk_and_network_are_per_second_since_the_last_sample(monkeypatch):
    clock, disk, lan, loopback = [10.0], [5_000, 100], [70, 0], [0, 0]
    psutil = import_module("psutil")
    monkeypatch.setattr(process.time, "monotonic", lambda: clock[0])
    counters = lambda: SimpleNamespace(read_bytes=disk[0], write_bytes=disk[1])  # noqa: E731
    monkeypatch.setattr(psutil, "disk_io_counters", counters)
    monkeypatch.setattr(
        psutil,
        "net_io_counters",
        lambda **_: {
            name: SimpleNamespace(bytes_recv=count[0], bytes_sent=count[1])
            for name, count in {"eth0": lan, "eth1": lan, "lo": loopback}.items()
        },
    )
    use = SystemUse()
    clock[0], disk[:], lan[:], loopback[:] = 14.0, (9_000, 300), (72, 8), (999, 999)
    sample = use.sample()
    rates = ("disk_read", "disk_written", "network_received", "network_sent")
    assert [sample[name] for name in rates] == [1000, 50, 1, 4]
    clock[0], disk[:] = 16.0, (9_500, 100)  # a disk was removed
    sample = use.sample()
    assert [sample[name] for name in rates] == [250, 0, 0, 0]


def test_a_container_without_counts_of_disks_has_no_rates_of_them(monkeypatch):
    psutil = import_module("psutil")
    monkeypatch.setattr(psutil, "disk_io_counters", lambda: None)
    use = SystemUse()
    assert {"disk_read", "disk_written"}.isdisjoint(use.sample())
    monkeypatch.undo()  # they appear while the run goes on
    assert {"disk_read", "disk_written"}.isdisjoint(use.sample())


class FakeNvml:
    """Two GPUs, of which the second does not report its utilization."""

    class NVMLError(Exception):
        pass

    nvmlInit = staticmethod(lambda: None)  # noqa: N815  names of NVML
    nvmlDeviceGetCount = staticmethod(lambda: 2)  # noqa: N815
    nvmlDeviceGetHandleByIndex = staticmethod(lambda index: index)  # noqa: N815

    @staticmethod
    def nvmlDeviceGetMemoryInfo(gpu):  # noqa: N802
        return SimpleNamespace(used=3 + gpu, total=12)

    @classmethod
    def nvmlDeviceGetUtilizationRates(cls, gpu):  # noqa: N802
        if gpu:
            raise cls.NVMLError
        return SimpleNamespace(gpu=75)


def test_gpus_are_sampled_by_nvml(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", FakeNvml)
    assert SystemUse().sample()["gpus"] == [
        {"memory": 3, "memory_total": 12, "use": 0.75},
        {"memory": 4, "memory_total": 12},
    ]


def test_without_nvml_there_are_no_gpus(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert "gpus" not in SystemUse().sample()
