"""How often the host waits for a device in a step, and in an evaluation."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.comm.distributed import Distributed
from samestep.step import exchange
from tests.gpu.simulated import VISIBLE
from tests.jobs import classify, events, images, snapshots

PHASES = ("compute", "exchange", "optimizer")


def items(batch):
    return (batch[1] >= 0).sum()


def waits_of(lanes, *, layers=12, devices=1, shards=False, count=None, graphs="off", steps=3):
    """Return the reasons for waits in the last step, in its parts."""
    from tests.gpu.simulated.device import counted

    with ss.init(lanes=lanes, devices=devices, timeout=60, graphs=graphs) as run:
        norms = [nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)) for _ in range(layers)]
        head = [nn.Flatten(), nn.Linear(256, 10)]
        model = run.replicate(nn.Sequential(nn.Conv2d(1, 4, 1), *norms, *head))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        if shards:
            optimizer = run.shard(optimizer)
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(images(64), 16, steps=steps):
            with counted() as backward:
                run.backward(classify, model, batch, count=count)
            with counted() as rest:
                run.clip_grad_norm(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return backward, rest


@pytest.mark.parametrize(
    "lanes", [pytest.param(1, marks=pytest.mark.long), pytest.param(2, marks=pytest.mark.long), 4]
)
def test_step_waits_once_for_a_device(lanes, gpus):
    assert gpus.call(waits_of, lanes, count=items) == (["event on cuda:0"], [])


@pytest.mark.parametrize(
    "steps", [6, pytest.param(7, marks=pytest.mark.long)]
)  # of which the last one does not compare a lane, or does
def test_step_with_graphs_waits_once(steps, gpus):
    waits = gpus.call(waits_of, 2, graphs="on", steps=steps)
    assert waits == (["event on cuda:0"], [])


@pytest.mark.long
def test_step_waits_once_for_each_device(gpus):
    backward, rest = gpus.call(waits_of, 4, devices=2)
    assert sorted(backward) == ["event on cuda:0", "event on cuda:1"]
    assert rest == []


def sharded_waits(bucket_bytes):
    """Return the waits of a step, and how many exchanges of gradients three steps have."""
    exchange.BUCKET_BYTES = bucket_bytes
    begin, exchanges = Distributed.begin_all_to_all, []

    def begin_all_to_all(world, out, out_sizes, source, source_sizes, what, **options):
        exchanges.append(what)
        return begin(world, out, out_sizes, source, source_sizes, what, **options)

    Distributed.begin_all_to_all = begin_all_to_all
    return waits_of(4, shards=True), exchanges.count("exchanging gradients")


def test_step_of_several_workers_waits_for_nccl_and_once_for_a_device(gpus):
    for bucket_bytes, least in ((1 << 30, 3), (1 << 12, 6)):
        results = gpus.workers(2, sharded_waits, bucket_bytes, **{VISIBLE: "0,1"})
        for rank, (waits, exchanges) in enumerate(results):
            # first until NCCL's last call is complete, so that a hang is reported
            assert waits == ([f"query on cuda:{rank}", f"event on cuda:{rank}"], [])
            assert exchanges >= least


def waits_of_evaluation():
    from tests.gpu.simulated.device import counted

    with ss.init(timeout=60) as run:
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        with counted() as waits:
            run.evaluate(classify, model, images(40), 10, count=items)
        return waits


def test_evaluation_waits_once(gpus):
    assert gpus.call(waits_of_evaluation) == ["event on cuda:0"]


def waits_for_outputs(devices):
    """Return the waits of an evaluation with outputs, and how many were before each block."""
    from tests.gpu.simulated.device import LIBRARY, counted

    with ss.init(timeout=60, lanes=2, devices=devices) as run:
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        before = {}  # by block

        def outputs(model, batch):
            assert torch.cuda.current_stream() == torch.cuda.default_stream()
            before[len(before)] = LIBRARY.sim_waits() - start
            logits = model(batch[0])
            return {"logits": logits, "labels": batch[1], "classes": list(batch[1] >= 0)}

        start = LIBRARY.sim_waits()
        with counted() as waits:
            run.evaluate(lambda model, batch: model(batch[0]), model, images(40), 10, gather=True)
        start = LIBRARY.sim_waits()
        gathered = run.evaluate(outputs, model, images(40), 10, gather=True)
        expected = model(images(40).tensors[0].to(run.device))
        assert torch.equal(gathered["logits"], expected.cpu())
        assert torch.equal(gathered["labels"], images(40).tensors[1])
        assert not gathered["logits"].is_pinned()
        return waits, [*before.values()]


def test_outputs_are_copied_while_the_next_block_is_computed(gpus):
    for devices, before in ((1, [0, 0, 1, 2]), (2, [0, 0, 0, 1])):
        waits, before_block = gpus.call(waits_for_outputs, devices)
        assert sorted(waits) == [f"event on cuda:{n // (4 // devices)}" for n in range(4)]
        assert before_block == before


def waits_with_embed(norm):
    from tests.gpu.simulated.device import counted

    def embed(model, batch):
        return model(batch[0])

    with ss.init(lanes=4, timeout=60) as run:
        layers = [nn.Flatten(), nn.Linear(64, 10), *([nn.BatchNorm1d(10)] if norm else [])]
        model = run.replicate(nn.Sequential(*layers))
        for batch in run.batches(images(48), 16, steps=3):
            with counted() as waits:
                run.backward(lambda _, x: (x @ x.T).logsumexp(1).mean(), model, batch, embed=embed)
        return waits


def test_step_with_embed_waits_once(gpus):
    assert gpus.call(waits_with_embed, norm=False) == ["event on cuda:0"]
    assert gpus.call(waits_with_embed, norm=True) == ["event on cuda:0"]


def waits_of_streams():
    from tests.gpu.simulated.device import counted

    def stream(lane):
        return iter(images(64)[4 * n : 4 * n + 4] for n in range(3))

    with ss.init(lanes=4, timeout=60) as run:
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        for batch in run.streams(stream, steps=3, name="images"):
            with counted() as waits:
                run.backward(classify, model, batch)
        return waits


def test_step_with_streams_waits_once(gpus):
    assert gpus.call(waits_of_streams) == ["event on cuda:0"]


def order_of_step(lanes, devices, loss_factor=1.0, *, norm=None, steps=1):
    """Return in which order the last step computes, and records and waits for events."""
    order = []

    class LoggedEvent(torch.cuda.Event):
        def __init__(self, enable_timing=False):  # noqa: FBT002  as in torch
            super().__init__()
            self.is_clock = enable_timing

        def record(self, stream=None):
            super().record(stream)
            if not self.is_clock:
                order.append("record")

        def synchronize(self):
            super().synchronize()
            order.append("wait")

    def logged(model, batch):
        loss = classify(model, batch)[0] * loss_factor
        order.append("forward")
        loss.register_hook(lambda _: order.append("backward"))
        return loss

    torch.cuda.Event = LoggedEvent
    with ss.init(lanes=lanes, devices=devices, timeout=60) as run:
        layers = [nn.Flatten(), nn.Linear(64, 10), *([nn.BatchNorm1d(10)] if norm else [])]
        model = run.replicate(nn.Sequential(*layers))
        for batch in run.batches(images(16 * steps), 16, steps=steps):
            order.clear()
            try:
                run.backward(logged, model, batch)
            except ss.NonFiniteLossError as error:
                order.append(str(error))
    return order


def test_losses_are_copied_before_backward(gpus):
    lane = ["forward", "record", "backward"]
    assert gpus.call(order_of_step, 1, 1) == [*lane, "wait"]
    assert gpus.call(order_of_step, 2, 1) == [*lane, *lane, "wait"]
    assert gpus.call(order_of_step, 2, 2) == [*lane, *lane, "wait", "wait"]


def test_buffers_are_compared_before_backward(gpus):
    lane = ["forward", "record", "record", "backward"]
    order = gpus.call(order_of_step, 2, 1, norm=True)
    assert order == [*lane, *lane, "wait"]
    order = gpus.call(order_of_step, 2, 1, norm=True, steps=2)
    # the first one copies whether the gradient of the last step was finite
    assert order == ["record", *lane, *lane, "wait"]


def test_loss_that_is_not_finite_is_noticed_in_its_step(gpus):
    *_, waited, message = gpus.call(order_of_step, 2, 1, float("nan"))
    assert waited == "wait"
    assert message.startswith("the loss is nan at step 0 in lane 0")


def peer_copies_of(layers, norm):
    """Return how often tensors are copied between devices.

    Before an evaluation computes, before a step computes, and after it.
    """
    from tests.gpu.simulated.device import LIBRARY

    def copies_of(call, *args):
        before, during = LIBRARY.sim_peer_copies(), []

        def fn(model, batch):
            during.append(LIBRARY.sim_peer_copies() - before)
            return classify(model, batch)

        call(fn, model, *args)
        return during[0], LIBRARY.sim_peer_copies() - before - during[-1]

    with ss.init(lanes=2, devices=2, timeout=60) as run:
        norms = [nn.Sequential(nn.Linear(64, 64), norm(64)) for _ in range(layers)]
        model = run.replicate(nn.Sequential(nn.Flatten(), *norms, nn.Linear(64, 10)))
        for batch in run.batches(images(32), 16, steps=2):
            model.zero_grad()
            evaluated, _ = copies_of(run.evaluate, images(4), 4)
            trained = copies_of(run.backward, batch)
    return evaluated, *trained


@pytest.mark.parametrize(("norm", "dtypes"), [(nn.LayerNorm, 1), (nn.BatchNorm1d, 2)])
def test_small_tensors_of_a_dtype_are_copied_between_devices_together(norm, dtypes, gpus):
    evaluated, before, after = gpus.call(peer_copies_of, 9, norm)
    assert (evaluated, before) == (dtypes, dtypes)
    gradients, buffers = 2 * 19, dtypes if norm is nn.BatchNorm1d else 0
    assert after == gradients + buffers


def timings_of_steps(directory):
    """Return the seconds of each step, if each phase of a GPU takes 2 s."""
    torch.cuda.Event.elapsed_time = lambda self, end: 2000.0
    with ss.init(lanes=2, timeout=60, dir=directory) as run:
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        run.track(model=model, optimizer=optimizer)
        for batch in run.batches(images(16), 8, steps=2):
            for _ in range(2):
                run.backward(classify, model, batch)
            optimizer.step()
            optimizer.zero_grad()


def test_phases_of_a_step_are_measured_by_the_device(gpus, tmp_path):
    gpus.call(timings_of_steps, tmp_path)
    timings = events(tmp_path, "timing")
    assert [event["step"] for event in timings] == [0, 1]
    for event in timings:
        (seconds,) = event["workers"]
        assert [seconds[phase] for phase in PHASES] == [4.0, 4.0, 2.0]


def late_gradient(directory, at, *, snapshot_every=None, value="stop"):
    """Return the error of a run whose gradient is not finite in step `at`, and its last step."""
    options = {"snapshot_every": snapshot_every, "nonfinite_loss": value, "timeout": 60}

    def spoiled(model, batch):
        loss, _ = classify(model, batch)
        return loss + (loss * (run._progress.step != at)).square().sqrt() * 0

    try:
        with ss.init(lanes=2, dir=directory, **options) as run:
            model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            run.track(model=model, optimizer=optimizer)
            for batch in run.batches(images(64), 16, steps=4):
                run.backward(spoiled, model, batch)
                optimizer.step()
                optimizer.zero_grad()
    except ss.NonFiniteLossError as error:
        return str(error), run.step
    is_finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())
    return f"finite: {is_finite}", run.step


@pytest.mark.long
def test_a_gradient_that_is_not_finite_is_noticed_before_it_is_saved(gpus, tmp_path):
    start = "the gradient is not finite at step {} in one of the lanes 0, 1 (worker 0), although"
    # in the next step, before the first snapshot after it, and at the end
    for number, (at, every, step) in enumerate([(1, None, 2), (1, "2", 2), (3, None, 4)]):
        folder = tmp_path / str(number)
        text, stopped = gpus.call(late_gradient, folder, at, snapshot_every=every)
        assert text.startswith(start.format(at))
        assert stopped == step
        assert snapshots(folder) == []
    assert gpus.call(late_gradient, tmp_path / "skip", 1, value="skip") == ("finite: True", 4)
