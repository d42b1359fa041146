"""Process groups that exist are joined, and stay as they are."""

from __future__ import annotations

import os
from multiprocessing import get_context

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchmetrics import MeanMetric

import samestep as ss
from samestep import host
from samestep.cluster import find_process
from samestep.comm.connect import connect, find_worker
from samestep.comm.rendezvous import locate
from samestep.config import Config
from samestep.errors import ConfigError, LaunchError
from tests.jobs import classify, fingerprint, image_job, images
from tests.ports import free_port
from tests.workers import run_workers, try_workers

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def own_rank():
    """Remove what the test's launcher has set; return the rank, which the script knows itself."""
    rank = int(os.environ["RANK"])
    for name in VARIABLES:
        del os.environ[name]
    return rank


def trained():
    """Train; return the position in the run, the kind of world and the model."""
    with ss.init(lanes=4) as run:
        model = image_job(run)["model"]
        return run.rank, run.world_size, type(run._world).__name__, fingerprint(model.state_dict())


def sum_over_group():
    total = torch.ones(1)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total)


@pytest.fixture(scope="module")
def model():
    with ss.init(lanes=4) as run:
        return fingerprint(image_job(run)["model"].state_dict())


@pytest.mark.parametrize(
    "method",
    [
        pytest.param("tcp", marks=pytest.mark.long),
        pytest.param("file", marks=pytest.mark.long),
        "variables",
    ],
)
def test_a_group_is_joined_by_several_runs_and_stays(method, model, tmp_path):
    port = free_port()

    def body():
        rank, address = own_rank(), None
        if method == "variables":  # as in PyTorch's tutorials
            os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        else:
            address = f"tcp://127.0.0.1:{port}" if method == "tcp" else f"file://{tmp_path}/store"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
        return [trained(), trained(), sum_over_group()]

    expected = [(rank, 2, "Shared", model) for rank in range(2)]
    assert run_workers(body, 2) == [[each, each, 2] for each in expected]


@pytest.mark.long
def test_a_group_of_two_hosts_is_joined_by_a_new_group(model, monkeypatch, tmp_path):
    port = free_port()

    def body():
        rank = own_rank()
        (tmp_path / f"boot-{rank // 2}").write_text(f"host {rank // 2}")
        monkeypatch.setattr(host, "BOOT_ID", tmp_path / f"boot-{rank // 2}")
        method = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=method, rank=rank, world_size=3)
        process = locate(find_worker(os.environ), 60)
        local = process.local_rank, process.local_world_size
        return [local, trained(), trained(), sum_over_group()]

    expected = [(rank, 3, "Distributed", model) for rank in range(3)]
    local = [(0, 2), (1, 2), (0, 1)]
    results = run_workers(body, 3)
    assert results == [[pair, each, each, 3] for pair, each in zip(local, expected, strict=True)]


def test_a_group_is_destroyed_and_made_again_at_the_same_address():
    port, destroyed = free_port(), get_context("fork").Barrier(2)

    def body():
        rank, gathered = own_rank(), []
        for _ in range(2):
            method = f"tcp://127.0.0.1:{port}"
            dist.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
            with ss.init(lanes=2) as run:
                gathered.append(run.all_gather(run.rank))
            dist.barrier()
            dist.destroy_process_group()
            destroyed.wait()  # a worker may not connect to the store that another is closing
        return gathered

    assert run_workers(body, 2) == [[[0, 1], [0, 1]]] * 2


def test_a_group_of_one_is_a_run_of_one():
    def body():
        own_rank()
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        with ss.init(lanes=2) as run:
            return run.world_size, dist.is_initialized()

    assert run_workers(body, 1) == [(1, True)]


def test_processes_of_a_group_do_not_launch_separate_runs():
    port = free_port()

    def body():
        method = f"tcp://127.0.0.1:{port}"
        dist.init_process_group("gloo", init_method=method, rank=own_rank(), world_size=2)
        with pytest.raises(LaunchError, match=r"each of 2 processes \(torch.distributed's default"):
            ss.launch(os.getpid)
        return sum_over_group()

    assert run_workers(body, 2) == [2, 2]


@pytest.mark.parametrize(
    ("size", "backend", "message"),
    [
        (1, "gloo", "group of 1.* contradicts RANK=0 of WORLD_SIZE=4; make it with all workers"),
        (4, "fake", "must use gloo or nccl to be joined, got fake"),
    ],
)
def test_a_group_that_cannot_be_joined_is_an_error(size, backend, message, monkeypatch):
    for name, value in zip(VARIABLES, ("0", "4", "0", "4", "127.0.0.1", "29500"), strict=True):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: size)
    monkeypatch.setattr(dist, "get_backend", lambda: backend)
    with pytest.raises(ConfigError, match=message):
        find_worker(os.environ)


def test_without_local_variables_workers_find_out_who_is_on_their_host(monkeypatch, tmp_path):
    def body():
        rank = int(os.environ["RANK"])
        del os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"]
        (tmp_path / f"boot-{rank % 2}").write_text(f"host {rank % 2}")
        monkeypatch.setattr(host, "BOOT_ID", tmp_path / f"boot-{rank % 2}")
        process = locate(find_process(os.environ), 60)
        connect(process, Config()).close()  # rank 0 serves the store until then
        return process.rank, process.local_rank, process.local_world_size

    assert run_workers(body, 3) == [(0, 0, 2), (1, 0, 1), (2, 1, 2)]


@pytest.mark.long
def test_a_default_group_on_request_ends_with_the_run():
    def body():
        seen, mean = [dist.is_initialized()], MeanMetric()

        def score(model, batch):
            mean.update(model(batch[0]).sum())
            return {"mean": mean}

        with ss.init(lanes=4, process_group=True) as run:
            seen += [dist.get_rank() == run.rank, dist.get_world_size() == run.world_size]
            total = torch.ones(1)
            dist.all_reduce(total)
            model = image_job(run)["model"]
            value = float(run.evaluate(score, model, images(10), 4)["mean"])
        return [*seen, dist.is_initialized()], int(total), value, fingerprint(model.state_dict())

    alone, two = run_workers(body, 1), run_workers(body, 2)
    expected = [False, True, True, False]
    assert [outcome[:2] for outcome in alone + two] == [(expected, 1), (expected, 2), (expected, 2)]
    assert alone[0][2:] == two[0][2:] == two[1][2:]


def reduce_tensor(tensor, world_size):
    """Return the mean over workers, as timm and other training scripts compute it."""
    reduced = tensor.clone()
    dist.all_reduce(reduced, op=dist.ReduceOp.SUM)
    reduced /= world_size
    return reduced


def test_a_script_may_destroy_the_group_before_the_run_ends(tmp_path):
    def body():
        with ss.init(lanes=2, dir=tmp_path) as run:
            run.log(value=1.0)
            dist.destroy_process_group()
        return (tmp_path / "run.lock").read_text()  # the run has released its directory

    environment = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # each worker is a host
    assert run_workers(body, 2, environment=environment)[0] == ""


def test_a_mean_over_the_group_is_that_of_the_workers():
    def body():
        with ss.init(lanes=4, process_group=True) as run:
            model = run.replicate(nn.Linear(64, 10))
            pairs = []
            for batch in run.batches(images(24), 8, epochs=1):
                own_loss = torch.stack([loss(model, lane) for lane in batch]).mean()
                means = run.backward(loss, model, batch)
                reduced = reduce_tensor(own_loss.detach(), dist.get_world_size())
                pairs.append((float(reduced), means["loss"]))
        return pairs

    def loss(model, lane):
        return lane[1].float().square().mean() + 0 * model.weight.sum()  # exact in float32

    for workers in (1, 2, 4):
        for pairs in run_workers(body, workers):
            assert len(pairs) == 3
            assert all(reduced == mean for reduced, mean in pairs)


def test_sync_batch_norm_on_cpus_is_batch_norm_and_refused_in_a_group():
    def body(kind, options):
        with ss.init(lanes=4, **options) as run:
            torch.manual_seed(0)
            model = nn.Sequential(kind(1), nn.Flatten(), nn.Linear(64, 10))
            model = run.replicate(model)
            for batch in run.batches(images(24), 8, epochs=1):
                run.backward(classify, model, batch)
        return fingerprint([model.state_dict(), [each.grad for each in model.parameters()]])

    expected = run_workers(body, 1, nn.BatchNorm2d, {})
    for workers in (1, 2):
        assert run_workers(body, workers, nn.SyncBatchNorm, {}) == expected * workers
        for end in try_workers(body, workers, nn.SyncBatchNorm, {"process_group": True}):
            assert "SyncBatchNorm expected input tensor to be on GPU" in str(end.error)
