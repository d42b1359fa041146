"""How GPUs exchange is decided once, from the GPUs of all workers."""

from __future__ import annotations

import os

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.step import exchange, overlap
from tests.gpu.machines import enter_machine
from tests.gpu.simulated import VISIBLE
from tests.jobs import classify, events, images


def chosen(visible, variables, directory):
    """Return the exchange of this worker, given the devices that each worker sees."""
    rank = int(os.environ["RANK"])
    os.environ[VISIBLE] = visible[rank]
    os.environ.update({name: value.format(rank=rank) for name, value in variables.items()})
    with ss.init(timeout=60, dir=directory) as run:
        return run._world.backend


@pytest.mark.parametrize(
    ("visible", "variables", "exchange"),
    [
        pytest.param(["0,1", "0,1"], {}, "NCCL", id="all are visible"),
        pytest.param(["2", "3"], {}, "NCCL", id="one each"),
        pytest.param(["0,1", "1,2"], {}, "NCCL", id="different numbers", marks=pytest.mark.long),
        pytest.param(["0", "0"], {}, "host memory", id="the same one"),
        pytest.param(
            ["0", "0"],
            {"NCCL_HOSTID": "{rank}"},
            "NCCL",
            id="the same one, two hosts",
            marks=pytest.mark.long,
        ),
        pytest.param(["0,1,2", "3,0"], {}, "host memory", id="one is shared by chance"),
    ],
)
def test_exchange_is_chosen_from_the_gpus_of_all(visible, variables, exchange, gpus, tmp_path):
    assert gpus.workers(2, chosen, visible, variables, tmp_path) == [exchange] * 2
    assert [event["exchange"] for event in events(tmp_path, "started")] == [exchange]
    assert ("NCCL refuses two workers on one GPU" in gpus.printed) == (exchange != "NCCL")


def chosen_by_old_torch(visible, directory):
    from tests.gpu.simulated import device

    device.hides_addresses = True
    return chosen(visible, {}, directory)


@pytest.mark.parametrize(("visible", "exchange"), [("23", "NCCL"), ("22", "host memory")])
def test_gpus_are_known_without_bus_addresses(visible, exchange, gpus, tmp_path):
    assert gpus.workers(2, chosen_by_old_torch, visible, tmp_path) == [exchange] * 2


def found_without(names, directory):
    """Return the exchange and device of this worker, whose launcher does not set some variables."""
    for name in names:
        del os.environ[name]
    with ss.init(timeout=60, dir=directory) as run:
        return run._world.backend, str(run.device)


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(["LOCAL_WORLD_SIZE"], id="as DeepSpeed's", marks=pytest.mark.long),
        pytest.param(["LOCAL_WORLD_SIZE", "LOCAL_RANK"], id="only MASTER_ADDR and ranks"),
    ],
)
def test_launchers_without_local_numbers_have_nccl_and_a_gpu_per_worker(names, gpus, tmp_path):
    backends = gpus.workers(3, found_without, names, tmp_path)
    assert backends == [("NCCL", f"cuda:{rank}") for rank in range(3)]


def test_worker_without_a_gpu_is_named(gpus, tmp_path):
    for end in gpus.ends_of(2, chosen, ["0", ""], {}, tmp_path):
        assert isinstance(end.error, ss.ConfigError)
        assert "torch finds no GPU on worker 1" in str(end.error)


def peak_of_step(options, first_ranks=()):
    """Return the most memory of the first device in a step, beyond that before, in gradients."""
    from tests.gpu.simulated.device import LIBRARY

    if first_ranks:
        enter_machine(first_ranks)
    exchange.BUCKET_BYTES = 1 << 16
    with ss.init(timeout=60, **options) as run:
        inner = [nn.Linear(128, 128, bias=False) for _ in range(30)]
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128, bias=False), *inner)
        model = run.replicate(model)
        index = run.devices[0].index
        # hashes of the state are compared in the first two steps, and take memory of their own
        for batch in run.batches(images(12), 4, steps=3):
            model.zero_grad()
            LIBRARY.sim_peak_bytes(index)  # since here
            before = LIBRARY.sim_peak_bytes(index)
            run.backward(classify, model, batch)
            peak = LIBRARY.sim_peak_bytes(index) - before
        return peak / sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize(
    ("first_ranks", "largest"),
    [
        pytest.param([], 1.1, id="1 machine"),
        pytest.param([0, 2], 1.6, id="2 machines", marks=pytest.mark.long),
    ],
)
def test_exchange_takes_little_more_memory_than_the_gradients(first_ranks, largest, gpus):
    for peak in gpus.workers(4, peak_of_step, {"lanes": 4}, first_ranks):
        assert 1.0 <= peak < largest


@pytest.mark.long
def test_sums_of_other_devices_are_fetched_in_turn(gpus):
    assert 1.0 <= gpus.call(peak_of_step, {"lanes": 4, "devices": 4}) < 3.3


def in_two_streams(steps):
    """Return the losses, and the numbers of exchanges that began during a backward pass.

    One parameter belongs to another stream, in which autograd then adds to its gradient.
    """
    from tests.gpu.simulated.device import LIBRARY

    exchange.LEAST_BUCKET_BYTES = exchange.BUCKET_BYTES = 1 << 8
    put, early = overlap.EarlyExchange._put_next, []

    def logged_put(exchanges, gradients):
        if exchanges._active:
            early.append(exchanges._put)
        put(exchanges, gradients)

    overlap.EarlyExchange._put_next = logged_put
    with ss.init(lanes=2, timeout=60) as run:
        torch.manual_seed(0)
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 10)))
        stream = torch.cuda.Stream(run.device)

        def enter(_):
            LIBRARY.sim_exchange_stream(stream.device_index, stream.stream_id)

        model[1].bias.register_hook(enter)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for batch in run.batches(images(64), 8, steps=steps):
            losses.append(run.backward(classify, model, batch)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    return losses, early


@pytest.mark.long
def test_gradients_of_another_stream_are_exchanged_after_backward(gpus):
    expected, _ = gpus.call(in_two_streams, 3)
    for losses, early in gpus.workers(2, in_two_streams, 3, **{VISIBLE: "0,1"}):
        assert losses == expected
        assert early == [0, 1]  # in the first step, the layer before
