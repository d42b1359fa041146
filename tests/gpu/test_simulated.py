"""The simulated devices themselves: what they refuse, count and delay."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.gpu.test_same_bits import trained


def mixed():
    first, second = torch.ones(2, device="cuda:0"), torch.ones(2, device="cuda:1")
    for other in (second, torch.ones(2)):
        with pytest.raises(RuntimeError, match="on the same device, but found at least two"):
            first + other
    with pytest.raises(RuntimeError, match="same device"):
        F.linear(torch.ones(1, 2), first.view(1, 2))
    torch._foreach_add_([first, second], [first.clone(), second.clone()])
    with pytest.raises(RuntimeError, match="on the same device, but found at least two"):
        torch._foreach_add_([first], [second])
    return (first + torch.tensor(1.0) + second.to("cuda:0")).tolist()


def test_devices_cannot_be_mixed_in_one_operation(gpus):
    assert gpus.call(mixed) == [5.0, 5.0]


def copies():
    source = torch.ones(4).pin_memory()
    target = torch.zeros(4, device="cuda")
    target.copy_(source, non_blocking=True)
    source.fill_(2.0)  # too early
    late = target.tolist()
    back = torch.zeros(4, pin_memory=True)
    back.copy_(target, non_blocking=True)
    early = back.clone()
    torch.cuda.synchronize()
    target.copy_(source, non_blocking=True)
    target.add_(1.0)  # reads it, and the host goes on
    source.fill_(3.0)
    with pytest.raises(RuntimeError, match="pinned memory was written before a copy from it"):
        torch.cuda.synchronize()
    return late, early.isnan().all().item(), back.tolist()


def test_copies_that_are_not_waited_for_land_late(gpus):
    late, is_garbage, back = gpus.call(copies)
    assert late == [2.0] * 4 == back
    assert is_garbage


def streams(*, waits, records):
    """Use a copy of another stream, and free it."""
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        copy = torch.ones(4).pin_memory().to("cuda", non_blocking=True)
        event = other.record_event()
    if waits:
        torch.cuda.current_stream().wait_event(event)
    total = copy.sum()
    if records:
        copy.record_stream(torch.cuda.current_stream())
    del copy
    return total.item()


def test_streams_wait_for_each_other_and_record_memory(gpus):
    assert gpus.call(streams, waits=True, records=True) == 4.0
    with pytest.raises(AssertionError, match="a stream used a tensor without waiting for its copy"):
        gpus.call(streams, waits=False, records=True)
    with pytest.raises(AssertionError, match="freed while a stream used it that was not recorded"):
        gpus.call(streams, waits=True, records=False)


FREES = {
    "behind an event": ("use", "record", "wait", "free"),
    "behind an event that another stream has passed on": ("use", "record", "pass on", "free"),
    "without a wait": ("use", "record", "free"),
    "before the wait": ("use", "record", "free", "wait"),
    "behind an event of before": ("record", "use", "wait", "free"),
    "behind an event of before that was passed on": ("record", "use", "pass on", "free"),
    "behind a wait of another stream": ("use", "record", "other waits", "free"),
    "behind an event of another stream": ("use", "record", "other's event", "free"),
}


def frees(*order):
    """Use memory of the current stream in another one, and free it."""
    own, user, third = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()
    left, event = [torch.ones(4, device="cuda")], None
    for part in order:
        if part == "use":
            with torch.cuda.stream(user):
                left[0].add_(1.0)
        elif part == "record":
            event = user.record_event()
        elif part == "wait":
            own.wait_event(event)
        elif part == "free":
            left.clear()
        if part in {"pass on", "other waits"}:
            third.wait_event(event)
        if part in {"pass on", "other's event"}:
            own.wait_stream(third)


@pytest.mark.parametrize("name", FREES)
def test_memory_is_freed_behind_the_uses_of_other_streams(name, gpus):
    """CUDA's allocator reuses a block in the order of the stream that allocated it."""
    if name in [*FREES][:2]:
        gpus.call(frees, *FREES[name])
    else:
        with pytest.raises(AssertionError, match="freed while a stream used it"):
            gpus.call(frees, *FREES[name])


def used_in_turn(*order):
    """Let the current stream and another one use the same memory."""
    from tests.gpu.simulated.device import LIBRARY

    LIBRARY.sim_watch_uses()
    own, other = torch.cuda.current_stream(), torch.cuda.Stream()
    values = torch.ones(4, device="cuda")
    values.record_stream(other)
    other.wait_stream(own)
    for part in order:
        if part == "wait":
            own.wait_stream(other)
        with torch.cuda.stream(other if part.startswith("other") else own):
            if part.endswith("writes"):
                values.add_(1.0)
            elif part.endswith("reads"):
                values.sum()


@pytest.mark.parametrize(
    ("order", "is_right"),
    [
        (("other writes", "wait", "reads"), True),
        (("other writes", "reads"), False),
        (("other writes", "wait", "other writes", "reads"), False),
        (("other reads", "reads"), True),
        (("other reads", "writes"), False),
        (("other reads", "wait", "writes"), True),
        (("other writes", "other reads"), True),
    ],
)
def test_streams_that_are_watched_wait_for_what_others_did(order, is_right, gpus):
    if is_right:
        gpus.call(used_in_turn, *order)
    else:
        with pytest.raises(AssertionError, match="a stream did not wait for another one"):
            gpus.call(used_in_turn, *order)


def resized(*, waits):
    """Give a storage other sizes, as FSDP2 does, and free its memory, which another stream uses."""
    storage, contents = torch.arange(4.0, device="cuda").untyped_storage(), []
    for nbytes in (8, 16, 0, 12):
        storage.resize_(nbytes)
        contents.append(torch.empty(0, device="cuda").set_(storage).nan_to_num(9.0).tolist())
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        torch.empty(0, device="cuda").set_(storage).fill_(1.0)
    if waits:
        torch.cuda.current_stream().wait_stream(other)
    storage.resize_(0)
    return contents


def test_storages_get_other_sizes(gpus):
    sizes = [[0.0, 1.0], [0.0, 1.0, 9.0, 9.0], [], [9.0] * 3]
    assert gpus.call(resized, waits=True) == sizes
    with pytest.raises(AssertionError, match="freed while a stream used it"):
        gpus.call(resized, waits=False)


def empty_use():
    """Let another stream use no element of a tensor, which then is freed."""
    unused = torch.ones(4, device="cuda")
    with torch.cuda.stream(torch.cuda.Stream()):
        return torch.cat([unused[:0], torch.zeros(2, device="cuda")]).tolist()


def test_a_tensor_without_elements_is_not_used(gpus):
    assert gpus.call(empty_use) == [0.0, 0.0]


class Cycle:
    def __init__(self, tensor):
        self.tensor, self.own = tensor, self


def left_in_a_cycle():
    """Leave memory that another stream uses to the garbage collector, and wait for nothing."""
    left = Cycle(torch.ones(4, device="cuda"))
    with torch.cuda.stream(torch.cuda.Stream()):
        left.tensor.add_(1.0)


def test_what_garbage_holds_is_checked_at_the_end(gpus):
    with pytest.raises(AssertionError, match="freed while a stream used it that was not recorded"):
        gpus.call(left_in_a_cycle)
    with pytest.raises(AssertionError, match="freed while a stream used it that was not recorded"):
        gpus.workers(1, left_in_a_cycle)


def waits():
    from tests.gpu.simulated.device import counted

    norm = nn.BatchNorm1d(3, device="cuda:1")
    with counted() as none:
        x = torch.full((8, 3), 0.5, device="cuda:1", requires_grad=True)
        norm(x).square().mean().backward()
        torch.optim.AdamW([x]).step()
        y = x.detach().to("cuda:0")
        pinned = torch.ones(3).pin_memory().to("cuda:0", non_blocking=True)
        (y + pinned).sum()
    with counted() as reasons:
        y.sum().item()
        torch.equal(y, y)
        y.tolist()
        torch.ones(3).to("cuda:0")
        y[y > 0]
        torch.cuda.synchronize(1)
        event = torch.cuda.current_stream().record_event()
        while not event.query():
            pass
        event.query()
    return none, reasons


def test_waits_of_the_host_are_counted(gpus):
    none, reasons = gpus.call(waits)
    assert none == []
    assert [reason.partition(" on ")[0] for reason in reasons] == [
        "item",
        "equal",
        "copy to host",
        "copy to device",
        "nonzero",
        "synchronize",
        "query",
    ]
    assert reasons[-2].endswith("cuda:1")


def running_statistics():
    norms = [nn.BatchNorm1d(3), nn.BatchNorm1d(3).cuda()]
    for norm in norms:
        norm(torch.arange(12.0).view(4, 3).to(norm.weight.device))
    return [[norm.running_mean.tolist(), norm.running_var.tolist()] for norm in norms]


def test_batch_norm_updates_its_running_statistics(gpus):
    on_cpu, on_device = gpus.call(running_statistics)
    assert on_cpu == on_device
    assert on_cpu != [[0.0] * 3, [1.0] * 3]


def strided_views():
    whole = torch.zeros(2, 3, 2, device="cuda")
    whole[..., 1] += torch.ones(2, 3, device="cuda")
    whole[:, 1].mul_(2)
    return whole.tolist()


def test_operations_in_place_keep_the_strides_of_views(gpus):
    assert gpus.call(strided_views) == [[[0.0, 1.0], [0.0, 2.0], [0.0, 1.0]]] * 2


def random_numbers():
    drawn = []
    for _ in range(2):
        torch.manual_seed(5)
        host = torch.rand(3)
        torch.manual_seed(5)
        for generator in torch.cuda.default_generators:
            generator.manual_seed(6)
        drawn.append([torch.rand(3, device=f"cuda:{n}").cpu() for n in (0, 1)])
        assert torch.equal(torch.rand(3), host)  # the host's generator is another one
        ones = torch.ones(64, device="cuda:1")
        drawn[-1].append(F.dropout(ones, 0.5).cpu())
    return all(map(torch.equal, *drawn)), torch.equal(*drawn[0][:2])


def test_each_device_draws_from_its_own_generator(gpus):
    assert gpus.call(random_numbers) == (True, True)


def memory():
    fresh = torch.empty(8, device="cuda")
    return fresh.isnan().all().item(), fresh.data_ptr() % 512


def test_new_memory_is_garbage(gpus):
    assert gpus.call(memory) == (True, 0)


def collectives():
    import os

    import torch.distributed as dist

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    from datetime import timedelta

    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    source = torch.arange(4.0, device="cuda") + 10 * rank
    out = torch.empty(4, device="cuda")
    kept = dist.all_to_all_single(out, source, [2, 2], [2, 2], async_op=True)
    before = out.tolist()
    kept.wait()
    after = out.tolist()
    changed = dist.all_to_all_single(out, source, [2, 2], [2, 2], async_op=True)
    source.fill_(7.0)
    changed.wait()
    reused = out.tolist()
    freed = dist.all_to_all_single(out, source.clone(), [2, 2], [2, 2], async_op=True)
    freed.wait()
    dist.destroy_process_group()
    return before, after, reused, out.tolist()


def test_collectives_are_deferred_and_use_memory_until_they_are_waited_for(gpus):
    (before, after, reused, freed), _ = gpus.workers(2, collectives)
    assert all(map(_is_nan, before))
    assert after == [0.0, 1.0, 10.0, 11.0]
    assert reused == [7.0] * 4
    assert all(map(_is_nan, freed))


def reused_addresses():
    """Free memory that a collective uses; count how often another stream gets its address."""
    from datetime import timedelta

    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("cpu:gloo,cuda:nccl", timeout=timedelta(seconds=60))
    reused = 0
    for size in (128, 5000, 1 << 14, 1 << 18) * 5:
        out, source = torch.empty(size, device="cuda"), torch.ones(size, device="cuda")
        address = source.data_ptr()
        freed = dist.all_to_all_single(out, source, async_op=True)
        del source
        freed.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            new = [torch.empty(size, device="cuda") for _ in range(8)]
        reused += address in [tensor.data_ptr() for tensor in new]
        del new
    dist.destroy_process_group()
    return reused


def test_use_by_a_collective_is_not_of_the_next_memory_at_its_address(gpus):
    assert gpus.workers(1, reused_addresses)[0] > 0


def _is_nan(number):
    return number != number  # noqa: PLR0124


def bad_fork():
    from tests.workers import run_workers

    return run_workers(torch.cuda._is_in_bad_fork, 1)[0]


def forks():
    import os

    before = bad_fork()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    torch.cuda.is_available()
    with_nvml = bad_fork()
    del os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"]
    torch.cuda.is_available()
    return before, with_nvml, bad_fork(), torch.cuda.is_initialized()


def test_is_available_spoils_forks_without_initializing(gpus):
    assert gpus.call(forks) == (False, False, True, False)


def replaced_kernels():
    from tests.gpu.simulated import device

    return device.REPLACED_KERNELS


@pytest.mark.long
def test_devices_take_the_place_of_those_of_a_cuda_build(gpus, gpus_of_cuda_build):
    """`make test-cuda-build` runs all these tests with the real one."""
    assert gpus_of_cuda_build.call(replaced_kernels) > 1000
    for part in (mixed, waits, running_statistics):
        assert gpus_of_cuda_build.call(part) == gpus.call(part)
    assert gpus_of_cuda_build.call(trained, {}) == gpus.call(trained, {})
    assert gpus_of_cuda_build.workers(2, trained, {}) == gpus.workers(2, trained, {})
