"""Results on simulated GPUs have the same bits at any number of devices and workers."""

from __future__ import annotations

import os
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torchmetrics
from torch import nn

import samestep as ss
from samestep import host as this_host
from samestep.comm import rendezvous
from samestep.comm.distributed import Distributed
from samestep.step import exchange
from tests.gpu.machines import enter_machine
from tests.gpu.simulated import VISIBLE
from tests.jobs import Net, classify, fingerprint, images
from tests.ports import free_port
from tests.run.kinds import streams_job
from tests.run.test_same_bits import cast_once


def moved(state):
    """Return nested state on the CPU."""
    if isinstance(state, torch.Tensor):
        return state.cpu()
    if isinstance(state, dict):
        return {name: moved(value) for name, value in state.items()}
    return [moved(value) for value in state] if isinstance(state, (list, tuple)) else state


def trained(options, *, shards=True, calls=1, loader_workers=0):
    """Return hashes of all results of a short training on this worker's devices, and them."""
    with ss.init(lanes=4, timeout=60, **options) as run:
        torch.manual_seed(0)
        model = run.replicate(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if shards:
            optimizer = run.shard(optimizer)
        run.track(model=model, optimizer=optimizer)
        losses = []
        for batch in run.batches(images(40), 16, steps=3, loader_workers=loader_workers):
            assert all(part.device.type == "cpu" for part in next(iter(batch)))
            for _ in range(calls):
                means = run.backward(classify, model, batch)
            losses.append([float(run.clip_grad_norm(model, 1.0)), *means.values()])
            optimizer.step()
            optimizer.zero_grad()
        scores = evaluated(run, model)
        return fingerprint(moved([model.state_dict(), losses, scores])), list(map(str, run.devices))


def evaluated(run, model):
    metric = torchmetrics.classification.MulticlassConfusionMatrix(10).to(run.device)

    def score(model, batch):
        assert batch[0].is_cuda
        metric.update(model(batch[0]), batch[1])
        return {"loss": classify(model, batch)[0], "counts": metric}

    means = run.evaluate(score, model, images(37), 5)
    outputs = run.evaluate(lambda model, batch: model(batch[0]), model, images(37), 5, gather=True)
    assert (outputs is None) == (run.rank > 0)
    return dict(means)


@pytest.fixture(scope="module")
def expected(gpus):
    """Return the results of one worker with one device."""
    return gpus.call(trained, {})[0]


@pytest.mark.parametrize(
    ("workers", "devices", "visible"),
    [
        pytest.param(1, 2, "0,1", id="1 worker, 2 devices", marks=pytest.mark.long),
        pytest.param(1, 3, "0,1,2", id="1 worker, 3 devices", marks=pytest.mark.long),
        pytest.param(1, 4, "0,1,2,3", id="1 worker, 4 devices", marks=pytest.mark.long),
        pytest.param(2, 1, "0,1", id="2 workers with NCCL"),
        pytest.param(3, 1, "0,1,2", id="3 workers with NCCL", marks=pytest.mark.long),
        pytest.param(4, 1, "0,1,2,3", id="4 workers with NCCL", marks=pytest.mark.long),
        pytest.param(2, 2, "0,1,2,3", id="2 workers with 2 devices and NCCL"),
        pytest.param(2, 1, "0", id="2 workers that share a device"),
        pytest.param(3, 1, "0,1", id="3 workers that share 2 devices", marks=pytest.mark.long),
    ],
)
def test_results_have_the_same_bits(workers, devices, visible, gpus, expected):
    results = gpus.workers(workers, trained, {"devices": devices}, **{VISIBLE: visible})
    used = {device for _, names in results for device in names}
    assert len(used) == min(workers * devices, len(visible.split(",")))
    assert all(device.startswith("cuda:") for device in used)
    assert [result for result, _ in results] == [expected] * workers


def joined(backend, port, hosts):
    """Train twice in a group that exists; return the results, and sums over the group around them.

    `hosts` has the number of this worker's host by rank.
    """
    rank, size = int(os.environ["RANK"]), len(hosts)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR"):
        del os.environ[name]
    local_ranks = [other for other, host in enumerate(hosts) if host == hosts[rank]]
    os.environ[VISIBLE] = ",".join(map(str, local_ranks))
    name = f"host {hosts[rank]}"
    this_host.kernel_id = rendezvous.kernel_id = lambda *_: name  # as Linux tells hosts apart
    torch.cuda.set_device(local_ranks.index(rank))
    method = f"tcp://127.0.0.1:{port}"
    dist.init_process_group(backend, init_method=method, rank=rank, world_size=size)
    results, init = [sum_over_group()], Distributed.__init__

    def noted_init(world, *arguments, **options):
        init(world, *arguments, **options)
        results.append(world.backend)

    Distributed.__init__ = noted_init
    for _ in range(2):
        result, devices = trained({})
        results += [result, devices == [f"cuda:{local_ranks.index(rank)}"], sum_over_group()]
    dist.destroy_process_group()
    return results


def sum_over_group():
    total = torch.ones(1, device="cuda")
    dist.all_reduce(total)
    return total.item()


@pytest.mark.parametrize(
    ("backend", "hosts"),
    [
        pytest.param("nccl", [0, 0], id="NCCL"),
        pytest.param("nccl", [0, 0, 1], id="NCCL on 2 hosts", marks=pytest.mark.long),
        pytest.param("cpu:gloo,cuda:nccl", [0, 0], id="gloo and NCCL", marks=pytest.mark.long),
    ],
)
def test_a_group_that_exists_is_joined_and_stays(backend, hosts, gpus, expected):
    results = gpus.workers(len(hosts), joined, backend, free_port(), hosts)
    size = float(len(hosts))
    assert results == [[size, *(["NCCL", expected, True, size] * 2)]] * len(hosts)


@pytest.mark.parametrize(
    ("options", "others"),
    [
        pytest.param({}, {"shards": False}, marks=pytest.mark.long),
        pytest.param({"precision": "bfloat16"}, {}, marks=pytest.mark.long),
        ({"exchange_dtype": "bfloat16"}, {"calls": 2, "loader_workers": 1}),
    ],
)
def test_options_have_the_same_bits(options, others, gpus):
    alone = gpus.call(trained, options, **others)[0]
    both = gpus.workers(2, with_options, options, others)
    assert [result for result, _ in both] == [alone] * 2


def with_options(options, others):
    return trained(options, **others)


def on_machines(first_ranks, *, shards=True):
    """Return the result of training on machines, and how many numbers it sent to other ones."""
    machine = enter_machine(first_ranks)
    exchange.BUCKET_BYTES = 1 << 12  # several exchanges, also during backward
    begin, sent = Distributed.begin_all_to_all, []

    def begin_all_to_all(world, out, out_sizes, source, source_sizes, what, **options):
        if what == "exchanging gradients":
            assert source.is_cuda
            sent.append(sum(size for to, size in enumerate(source_sizes) if to not in machine))
        return begin(world, out, out_sizes, source, source_sizes, what, **options)

    Distributed.begin_all_to_all = begin_all_to_all
    return trained({}, shards=shards)[0], sum(sent)


def unsharded_on_machines():
    return on_machines([0, 2], shards=False)[0]


def test_machines_give_all_workers_the_gradients_of_unsharded_optimizers(gpus, expected):
    assert gpus.workers(4, unsharded_on_machines) == [expected] * 4


@pytest.mark.long
def test_machines_add_up_gradients_before_they_send_them(gpus, expected):
    sent = {}
    for first_ranks in ([0, 2], [0, 3], [0, 1, 2, 3]):
        results = gpus.workers(4, on_machines, first_ranks)
        assert [result for result, _ in results] == [expected] * 4
        sent[len(first_ranks), first_ranks[1]] = sum(each for _, each in results)
    # In gradients: alone, each worker sends a quarter to each other one. A machine of two sends one
    # sum. One of three has two sums, of lanes 0 and 1 and of lane 2, but only a quarter is needed.
    all_gradients = sent[4, 1] / 3
    assert sent == {(4, 1): 3 * all_gradients, (2, 2): all_gradients, (2, 3): 5 / 4 * all_gradients}


def with_matrices(first_ranks=None, *, shards=True):
    """Return the result of training with Muon for matrices and AdamW for all else."""
    if first_ranks is not None:
        enter_machine(first_ranks)
        exchange.BUCKET_BYTES = 1 << 12
    with ss.init(lanes=4, timeout=60) as run:
        torch.manual_seed(0)
        sizes = pairwise([64, 48, 32, 32, 10])
        model = run.replicate(nn.Sequential(nn.Flatten(), *(nn.Linear(*size) for size in sizes)))
        matrices = [parameter for parameter in model.parameters() if parameter.ndim == 2]
        others = [parameter for parameter in model.parameters() if parameter.ndim != 2]
        optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=0.01)]
        if shards:
            optimizers = [*map(run.shard, optimizers)]
        for batch in run.batches(images(40), 16, steps=3):
            run.backward(classify, model, batch)
            norm = float(run.clip_grad_norm(model, 1.0))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return fingerprint(moved([model.state_dict(), norm]))


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon is in torch since 2.9")
@pytest.mark.parametrize(
    ("workers", "first_ranks"), [(3, None), pytest.param(4, [0, 3], marks=pytest.mark.long)]
)
def test_matrices_with_one_owner_have_the_same_bits(workers, first_ranks, gpus):
    alone = gpus.call(with_matrices, shards=False)
    visible = {} if first_ranks else {VISIBLE: "0,1,2"}
    assert gpus.workers(workers, with_matrices, first_ranks, **visible) == [alone] * workers


def continued(directory, steps, devices=1):
    """Train up to a step, from the snapshot in a directory if there is one."""
    with ss.init(lanes=4, timeout=60, dir=directory, devices=devices) as run:
        torch.manual_seed(0)
        model = run.replicate(Net())
        optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9))
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(images(64), 16, steps=steps):
            run.backward(contrast, model, batch, embed=lambda model, batch: model(batch[0]))
            optimizer.step()
            optimizer.zero_grad()
        return fingerprint(moved(model.state_dict()))


def contrast(model, logits):
    return (logits @ logits.T).logsumexp(1).mean()


def test_run_resumes_with_the_same_bits_on_other_devices(gpus, tmp_path):
    expected = gpus.call(continued, tmp_path / "straight", 4)
    gpus.workers(2, continued, tmp_path / "resumed", 2)
    assert gpus.call(continued, tmp_path / "resumed", 4, devices=2) == expected


def streamed(devices):
    with ss.init(lanes=4, timeout=60, devices=devices) as run:
        torch.manual_seed(0)
        return fingerprint(moved(streams_job(run)["model"].state_dict()))


@pytest.mark.long
def test_streams_have_the_same_bits(gpus):
    alone = gpus.call(streamed, 1)
    assert gpus.call(streamed, 2) == alone
    assert gpus.workers(2, streamed, 1, **{VISIBLE: "0,1"}) == [alone] * 2


@pytest.mark.parametrize("embeds", [False, True])
def test_lanes_and_blocks_cast_a_parameter_once_on_a_device(embeds, gpus):
    assert gpus.call(cast_once, embeds=embeds) == "cuda"


def compared(flipped):
    """Return the waits of a comparison of equal workers, and the error after one differs."""
    from tests.gpu.simulated.device import counted

    with ss.init(lanes=2, timeout=60, check_every=None) as run:
        torch.manual_seed(0)
        model = run.replicate(Net())
        run.track(model=model)
        check = run._session.divergence
        check.expire()
        with counted() as waits:
            check.compare(1)
        if run.rank == 1:
            bits = model.get_parameter(flipped).data.view(torch.int32)
            bits.bitwise_xor_(torch.ones_like(bits))
        check.expire()
        try:
            check.compare(2)
        except ss.errors.DivergenceError as error:
            return waits, str(error)


def test_workers_that_differ_are_named_and_only_a_hash_is_copied(gpus):
    ends = gpus.workers(2, compared, "head.bias", **{VISIBLE: "0,1"})
    for rank, (waits, message) in enumerate(ends):
        assert waits == [f"{reason} on cuda:{rank}" for reason in ("query", "copy to host")]
        assert message.startswith("workers differ after step 2 in 'model/head.bias': ")
