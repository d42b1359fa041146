"""Lanes as CUDA graphs: the bits of eager lanes, and what is refused or computed eagerly."""

from __future__ import annotations

import os
import types
from contextlib import contextmanager
from functools import partial
from itertools import count, groupby
from threading import Thread

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.plugins import lane_graph
from samestep.plugins.graph_choice import NOTES, REFUSALS, Action, LaneKind
from samestep.step import exchange, lane_results, overlap
from tests.gpu import test_compiled, test_float16
from tests.gpu.simulated import VISIBLE
from tests.gpu.test_same_bits import contrast, moved
from tests.jobs import Net, classify, fingerprint, images

settings = types.ModuleType("settings")  # whose numbers no search sees
settings.kl_weight = 0.5
STEPS = 7  # the fourth one captures


@contextmanager
def counted():
    """Yield a list that gets a graph of a lane with each replay."""
    replays, forward = [], lane_graph.LaneGraph.forward

    def logged(graph, work):
        replays.append(graph)
        return forward(graph, work)

    lane_graph.LaneGraph.forward = logged
    yield replays


def trained(graphs, loss_fn=classify, *, before=None, steps=STEPS, lanes=2, batch_size=8, **rest):
    """Train; return hashes of results, or the error, and the number of replays.

    `before` is called with the number of each step. A `Maker` makes a loss function for each.
    """
    calls = {name: rest.pop(name) for name in ("count", "embed") if name in rest}
    loop = {name: rest.pop(name) for name in ("collate_fn", "epochs") if name in rest}
    size, shards = rest.pop("size", 64), rest.pop("shards", False)
    with counted() as replays, ss.init(lanes=lanes, timeout=60, graphs=graphs, **rest) as run:
        torch.manual_seed(0)
        model = run.replicate(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        if shards:
            optimizer = run.shard(optimizer)
        run.track(model=model, optimizer=optimizer)
        losses = []
        for batch in run.batches(images(size), batch_size, steps=steps, **loop):
            if before is not None:
                before(run.step)
            fn = loss_fn() if isinstance(loss_fn, Maker) else loss_fn
            try:
                means = run.backward(fn, model, batch, **calls)
            except ss.LossError as error:
                return str(error), len(replays)
            losses.append([float(run.clip_grad_norm(model, 1.0)), *means.values()])
            optimizer.step()
            optimizer.zero_grad()
    return fingerprint(moved([model.state_dict(), losses])), len(replays)


@pytest.mark.long
def test_graphs_have_the_bits_of_eager_lanes_with_float16(gpus):
    options = {"fused": True, "shards": False, "steps": STEPS}
    with_graphs = gpus.call(test_float16.trained, {"graphs": "on"}, **options)
    assert "eagerly" not in gpus.printed
    assert with_graphs == gpus.call(test_float16.trained, {}, **options)


class Maker:
    """Makes a new loss function in each step."""

    def __call__(self):
        def loss_fn(model, batch):
            return classify(model, batch)

        return loss_fn


def with_pairs(model, batch):
    """Return the losses of even and odd labels, of which a graph keeps the sums and counts."""
    loss, metrics = classify(model, batch)
    losses = nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none").detach()
    odd = batch[1] % 2 == 1
    return loss, {**metrics, "odd": ((losses * odd).sum(), odd.sum()), "all": (losses.sum(), 4)}


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"lanes": 1}, id="one lane"),
        pytest.param({"lanes": 2, "loss_fn": with_pairs}, id="pairs"),
        pytest.param(
            {
                "lanes": 4,
                "batch_size": 16,
                "devices": 2,
                "precision": "bfloat16",
                "exchange_dtype": "bfloat16",
            },
            id="two devices, 16 bits",
        ),
    ],
)
def test_graphs_have_the_bits_of_eager_lanes(options, gpus):
    expected, replays = gpus.call(trained, "off", **options)
    assert replays == 0
    result, replays = gpus.call(trained, "on", **options)
    assert replays == (STEPS - 3) * options["lanes"]  # some are only compared
    assert result == expected


def with_kl(model, batch):
    """Return a loss whose KL term has a weight that no search sees: that of a module of Python."""
    logits = model(batch[0])
    divergence = -logits.log_softmax(1).mean()  # from the uniform distribution, plus a constant
    loss = nn.functional.cross_entropy(logits, batch[1]) + settings.kl_weight * divergence
    return loss, {"kl": divergence}


def raise_weight(step, first=0):
    settings.kl_weight = 0.5 + max(0, step - first)


class Loss:
    """Losses with a state."""

    def __init__(self):
        self.weight, self.calls = 1.0, 0

    def __call__(self, model, batch):
        loss, metrics = classify(model, batch)
        return loss * self.weight, metrics

    def counting(self, model, batch):
        self.calls += 1
        return classify(model, batch)


state = Loss()


def scheduled(model, batch):
    return state(model, batch)


def raise_attribute(step):
    state.weight = 1.0 + step


def drawing_on_host(model, batch):
    loss, metrics = classify(model, batch)
    return loss * torch.rand(()), metrics


def reading(model, batch):
    loss, metrics = classify(model, batch)
    return loss * (2.0 if loss.item() > 1 else 1.0), metrics


def with_number(model, batch):
    loss, metrics = classify(model, batch)
    return loss, {**metrics, "weight": 0.5}


class Recomputed(torch.autograd.Function):
    """A layer that is computed again in the backward pass, whose gradients it adds to `.grad`."""

    @staticmethod
    def forward(ctx, layer, hidden):
        ctx.layer, ctx.hidden = layer, hidden.detach()
        return layer(hidden)

    @staticmethod
    def backward(ctx, gradient):
        hidden = ctx.hidden.requires_grad_()
        with torch.enable_grad():
            ctx.layer(hidden).backward(gradient)
        return None, hidden.grad


class Nested(torch.autograd.Function):
    """A layer that is computed again in the backward pass, which returns its gradients."""

    @staticmethod
    def forward(ctx, layer, hidden, *parameters):
        ctx.layer, ctx.hidden, ctx.parameters = layer, hidden.detach(), parameters
        return layer(hidden)

    @staticmethod
    def backward(ctx, gradient):
        inputs = [ctx.hidden.requires_grad_(), *ctx.parameters]
        with torch.enable_grad():
            hidden = ctx.layer(inputs[0])
        return None, *torch.autograd.grad(hidden, inputs, gradient)


def nesting(model, batch):
    """Return a loss whose tied weight gets a part of its gradient in a pass within the pass."""
    hidden = model.first(model.features(batch[0]))
    logits = model.head(Nested.apply(model.second, hidden, *model.second.parameters()))
    return nn.functional.cross_entropy(logits, batch[1])


def recomputing(model, batch):
    logits = Recomputed.apply(model.head, model.first(model.features(batch[0])))
    return nn.functional.cross_entropy(logits, batch[1])


def clamping(model, batch):
    """Return a loss whose gradient a hook changes where autograd adds it to `.grad`."""
    if not hasattr(state, "hook"):
        state.hook = model.head.bias.register_post_accumulate_grad_hook(clamp)
    return classify(model, batch)


def clamp(parameter):
    parameter.grad.clamp_(-1e-3, 1e-3)


def refuse_capture(step):
    """Let the only capture fail."""
    from tests.gpu.simulated import graphs
    from tests.gpu.simulated.device import AcceleratorError

    if step == 0:
        graphs.refusals.append(AcceleratorError("operation not permitted when capturing"))


def make_compiled_graphs(step):
    """Let torch.compile have graphs of its own on the device."""
    if step == 0:
        test_compiled.pretend()


class Record:
    """A batch of a class that a graph does not know."""

    def __init__(self, samples):
        self.pictures = torch.stack([picture for picture, _ in samples])
        self.labels = torch.stack([label for _, label in samples])

    def __len__(self):
        return len(self.labels)

    def to(self, device, **options):
        self.pictures = self.pictures.to(device)
        self.labels = self.labels.to(device)
        return self


def records(samples):
    return Record(samples)


def of_record(model, batch):
    return classify(model, (batch.pictures, batch.labels))


# a reason in `REFUSALS`, the options of a training, and a part of the error; those of a reason that
# is tried already are for the long tests
REFUSED = [
    ("bits", {"loss_fn": scheduled, "before": raise_attribute, "lanes": 1}, "step 4, lane 0"),
    ("bits", {"loss_fn": drawing_on_host}, "lane 1 has other bits"),
    ("bits", {"loss_fn": with_kl, "before": raise_weight}, "step 4, lane 1"),
    ("capture", {"loss_fn": reading}, "A lane must not wait for the device, as item()"),
    ("metric", {"loss_fn": with_number}, "the metric 'weight' is not a tensor on the device"),
    (
        "batch",
        {"loss_fn": of_record, "collate_fn": records, "count": len},
        "a batch contains a Record",
    ),
    ("capture", {"before": refuse_capture}, "failed: AcceleratorError: operation not permitted"),
    ("capture", {"loss_fn": recomputing}, "a torch.autograd.Function calls backward() itself"),
    ("capture", {"loss_fn": clamping}, "a parameter has a hook of register_post_accumulate"),
    ("compiled", {"before": make_compiled_graphs}, "torch.compile makes CUDA graphs of its own"),
]


@pytest.mark.parametrize(
    ("reason", "options", "line"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case[0] in [r for r, *_ in REFUSED[:n]]))
        for n, case in enumerate(REFUSED)
    ],
)
def test_lane_that_a_graph_would_not_repeat_is_an_error(reason, options, line, gpus):
    error, replays = gpus.call(trained, "on", **options)
    assert error.startswith('graphs="on": ')
    assert error.endswith('graphs="off" computes every lane eagerly')
    assert line in error
    assert (replays > 0) == (reason == "bits")


def test_each_reason_is_tested():
    assert {reason for reason, _, _ in REFUSED} == REFUSALS.keys()


def test_kl_weight_that_grows_after_the_first_steps_is_an_error(gpus):
    grow = partial(raise_weight, first=10)
    result, replays = gpus.call(trained, "on", with_kl, before=grow, steps=40)
    # its 16th lane, in the eighth step of the graph, is before that, its 32nd is compared next
    assert 'graphs="on": at step 18, lane 1 has other bits as a CUDA graph than eagerly' in result
    assert "first in the loss" in result
    assert "weight.fill_(x)" in result
    assert replays == 32


def raise_tensor(step):
    state.weight = state.weight if step else torch.zeros((), device="cuda")
    state.weight.fill_(step / 4)


def test_weight_in_a_tensor_may_grow(gpus):
    options = {"loss_fn": scheduled, "before": raise_tensor}
    expected, _ = gpus.call(trained, "off", **options)
    result, replays = gpus.call(trained, "on", **options)
    assert result == expected
    assert replays == (STEPS - 3) * 2


def embedded(model, batch):
    return model(batch[0])


def in_body(steps):
    """Train with the losses in the body of a loop; return the number of replays."""
    with counted() as replays, ss.init(lanes=2, timeout=60, graphs="on") as run:
        model = run.replicate(Net())
        for batch in run.batches(images(64), 8, steps=steps):
            for lane_batch in batch.lanes(model):
                batch.backward(classify(model, lane_batch)[0])
            model.zero_grad()
    return len(replays)


def numbered(steps):
    """Train with a number in each batch; return the number of replays."""
    parts = images(8).tensors
    with counted() as replays, ss.init(lanes=2, timeout=60, graphs="on") as run:
        model = run.replicate(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))
        batches = run.streams(lambda _: ((*parts, n) for n in count()), steps=steps, name="numbers")
        for batch in batches:
            run.backward(first_parts, model, batch, count=lambda batch: 8)
            model.zero_grad()
    return len(replays)


def first_parts(model, batch):
    return classify(model, batch[:2])


def of_sizes(sizes, rounds):
    """Train with lanes of some numbers of samples in turn; return the number of replays."""
    pictures, labels = images(64).tensors

    def stream(lane):
        for _ in range(rounds):
            for size in sizes:
                yield pictures[:size], labels[:size]

    with counted() as replays, ss.init(lanes=2, timeout=60, graphs="on") as run:
        torch.manual_seed(0)
        model = run.replicate(Net())
        for batch in run.streams(stream, steps=rounds * len(sizes), name="sizes"):
            run.backward(classify, model, batch)
            model.zero_grad()
    return len(replays)


def copied_during_capture():
    """Return whether a thread can copy from the device, and wait for it, within a capture."""
    source = torch.arange(4.0, device="cuda")
    settings.copies = []

    def copy():
        settings.copies.append(source.to("cpu").tolist())
        torch.cuda.synchronize()

    def copying(model, batch):
        if torch.cuda.is_current_stream_capturing():
            thread = Thread(target=copy)
            thread.start()
            thread.join()
        return classify(model, batch)

    _, replays = trained("on", copying)
    return settings.copies == [[0.0, 1.0, 2.0, 3.0]] and replays > 2


NOTED = [
    ("embed", trained, ("on", contrast), {"embed": embedded}, "a loss with embed= has two passes"),
    ("body", in_body, (6,), {}, "pass the loss to run.backward(loss_fn, model, batch)"),
    ("kinds", numbered, (17,), {}, "define the loss function once before the loop"),
    ("kinds", trained, ("on", Maker()), {"steps": 17}, "and use tensors of few shapes"),
    ("graphs", of_sizes, ((4, 5, 6, 7, 8), 5), {}, "the device has 4 graphs already"),
]


@pytest.mark.parametrize(
    ("reason", "job", "arguments", "options", "line"),
    [
        pytest.param(*case, marks=[pytest.mark.long] * (case[0] in {"batches", "graphs", "memory"}))
        for case in NOTED
    ],
)
def test_lanes_that_are_always_eager_are_said_once(reason, job, arguments, options, line, gpus):
    assert reason in NOTES
    result = gpus.call(job, *arguments, **options)
    assert gpus.printed.count("lanes are computed eagerly, not as CUDA graphs") == 1
    assert line in gpus.printed
    replays = result if isinstance(result, int) else result[1]
    assert (replays > 0) == (reason == "graphs")
    if job is trained:
        assert result[0] == gpus.call(trained, "off", *arguments[1:], **options)[0]


def test_each_note_is_tested():
    assert {reason for reason, *_ in NOTED} == NOTES.keys()


def trained_after_a_failure():
    """Train after a capture that failed while its backward pass was cut."""
    from tests.gpu.simulated import graphs

    exchange.LEAST_BUCKET_BYTES = exchange.BUCKET_BYTES = 1 << 10
    begin, settings.begun = graphs.CUDAGraph.capture_begin, 0

    def capture_begin(graph, **options):
        settings.begun += 1
        if settings.begun == 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        begin(graph, **options)

    graphs.CUDAGraph.capture_begin = capture_begin
    error, _ = trained("on")
    return error, trained("off")[0], settings.begun


@pytest.mark.long
def test_pass_that_fails_while_it_is_captured_leaves_nothing_for_the_next_lane(gpus):
    expected = gpus.call(trained, "off")[0]
    for error, result, begun in gpus.workers(2, trained_after_a_failure, **{VISIBLE: "0,1"}):
        assert "the capture failed: OutOfMemoryError: CUDA out of memory" in error
        assert result == expected
        assert begun == 4
    assert "stream does not match" not in gpus.printed  # of a node that such a pass would leave


def cut_in_another_stream():
    """Return the error, and whether the capture has ended."""
    cuts = lane_graph.Cuts(torch.cuda.graph_pool_handle(), [])
    streams = [torch.cuda.Stream("cuda") for _ in range(2)]
    try:
        with torch.cuda.stream(streams[0]), cuts.capture(), torch.cuda.stream(streams[1]):
            cuts.cut()
    except RuntimeError as error:
        with torch.cuda.stream(streams[0]):
            return str(error), not torch.cuda.is_current_stream_capturing()


def test_capture_ends_also_where_the_lane_is_in_another_stream(gpus):
    error, has_ended = gpus.call(cut_in_another_stream)
    assert "must end on the same stream" in error
    assert has_ended


@pytest.mark.parametrize("lanes", [1, 3, 4])
def test_each_lane_is_compared_in_turn(lanes):
    kind = LaneKind([], graph=object())
    compared = [n for n in range(101 * lanes) if kind.advance(0) is Action.COMPARE]
    assert compared[:4] == [0, 1, 3, 7]
    seldom = [n for n in compared if (n + 1) % 101 == 0]
    assert {n % lanes for n in seldom} == set(range(lanes))


def test_lanes_are_captured_after_some_calls():
    kind = LaneKind([])
    actions = [kind.advance(call) for call in (1, 1, 1, 1, 2, 5, 5, 6)]
    assert actions == [Action.EAGER] * 7 + [Action.CAPTURE]


def test_threads_may_use_the_device_during_a_capture(gpus):
    assert gpus.call(copied_during_capture)


class AtOnce(torch.autograd.Function):
    """A network whose gradients are computed by a single node, as those of compiled code are."""

    @staticmethod
    def forward(ctx, inputs, first, second):
        ctx.save_for_backward(inputs, first, second)
        return (inputs @ first).relu() @ second

    @staticmethod
    def backward(ctx, gradient):
        inputs, first, second = ctx.saved_tensors
        hidden = inputs @ first
        of_hidden = (gradient @ second.T) * (hidden > 0)
        return None, inputs.T @ of_hidden, hidden.relu().T @ gradient


def without_kernels_between_gradients():
    """Return the losses of steps with graphs and without, and how many graphs a lane has."""
    exchange.LEAST_BUCKET_BYTES = exchange.BUCKET_BYTES = 1 << 8
    numbers, losses = [], []
    for graphs in ("on", "off"):
        with counted() as replays, ss.init(lanes=4, timeout=60, graphs=graphs) as run:
            torch.manual_seed(0)
            layers = [nn.Linear(64, 8, bias=False), nn.Linear(8, 10, bias=False)]
            model = run.replicate(nn.Sequential(*layers))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for batch in run.batches(images(64), 16, steps=STEPS):
                losses.append(run.backward(of_at_once, model, batch)["loss"])
                optimizer.step()
                optimizer.zero_grad()
        numbers += [len(graph._graphs) for graph in replays]
    return losses, numbers


def of_at_once(model, batch):
    logits = AtOnce.apply(batch[0].flatten(1), model[0].weight.T, model[1].weight.T)
    return nn.functional.cross_entropy(logits, batch[1])


@pytest.mark.long
def test_graphs_may_be_empty(gpus):
    for losses, numbers in gpus.workers(2, without_kernels_between_gradients, **{VISIBLE: "0,1"}):
        assert losses[:STEPS] == losses[STEPS:]
        assert set(numbers) == {3}
    assert "graph is empty" not in gpus.printed.lower()


def trained_in_buckets(steps, **options):
    """Train with small buckets; return the results, and what happened in lanes with graphs.

    That is, in each lane: "copy" for its losses to the host, "graph" for each graph of its backward
    pass, and "put" for each bucket that went into its exchange.
    """
    exchange.LEAST_BUCKET_BYTES = exchange.BUCKET_BYTES = 1 << 10
    events = []
    forward, backward = lane_graph.LaneGraph.forward, lane_graph.LaneGraph.backward
    put, note = overlap.EarlyExchange._put_next, lane_results.LaneScalars.note

    def logged_forward(graph, work):
        events.append([])
        return forward(graph, work)

    def logged_backward(*arguments):
        for gradients in backward(*arguments):
            events[-1].append("graph")
            yield gradients

    def logged_note(scalars, *arguments):
        if events:
            events[-1].append("copy")
        note(scalars, *arguments)

    def logged_put(early, gradients):
        if events:
            events[-1].append("put")
        put(early, gradients)

    lane_graph.LaneGraph.forward, lane_graph.LaneGraph.backward = logged_forward, logged_backward
    overlap.EarlyExchange._put_next = logged_put
    lane_results.LaneScalars.note = logged_note
    return trained("on", steps=steps, **options)[0], events


@pytest.mark.parametrize(
    ("lanes", "shards", "loss_fn", "visible"),
    [
        (2, False, classify, "0,1"),
        pytest.param(4, True, nesting, "0,1", marks=pytest.mark.long),
        pytest.param(2, False, classify, "0", id="one device, no NCCL", marks=pytest.mark.long),
    ],
)
def test_gradients_are_exchanged_between_the_graphs_of_the_last_lane(
    lanes, shards, loss_fn, visible, gpus
):
    options = {"lanes": lanes, "batch_size": 4 * lanes, "steps": STEPS, "loss_fn": loss_fn}
    expected, _ = gpus.call(trained, "off", **options)
    job = partial(trained_in_buckets, shards=shards, **options)
    results = gpus.workers(2, job, **{VISIBLE: visible})
    assert "graph is empty" not in gpus.printed.lower()
    for result, events in results:
        assert result == expected
        graphs = events[0].count("graph")
        assert graphs > 2
        # a compared lane is computed eagerly as well, and exchanged after that
        assert events[0][: graphs + 1] == ["graph"] * graphs + ["copy"]
        *others, last = events[lanes : lanes + lanes // 2]  # of the first step without a comparison
        # a graph may complete several buckets
        assert [event for event, _ in groupby(last)] == ["copy"] + ["graph", "put"] * graphs
        assert all(other == ["copy"] + ["graph"] * graphs for other in others)


SCRIPT = """
import sys
import torch
import samestep as ss
from tests.gpu import test_lane_graph as jobs

with ss.init(lanes=2, graphs="on") as run:
    model = run.replicate(jobs.Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.track(model=model, optimizer=optimizer)
    for batch in run.batches(jobs.images(64), 8, steps=5):
        jobs.raise_weight(run.step, first=FIRST)
        run.log(run.backward(jobs.with_kl, model, batch))
        optimizer.step()
        optimizer.zero_grad()
"""


def script_whose_weight_grows(first):
    """Return a script whose KL weight grows from a step on."""
    return SCRIPT.replace("FIRST", str(first))


def verified(folder, text, *flags):
    """Return the exit status of `samestep verify` of a script on devices."""
    from samestep import cli
    from samestep.tools import ISOLATED, OUTPUT, trace

    script = folder / "script.py"
    script.write_text(text)

    @contextmanager
    def started(command, workers, directory, flags, environment):
        """Start a script in a fork, which has the devices."""
        words = ["run", "-n", str(workers), "--dir", str(directory), *ISOLATED, *flags, *command]
        pid = os.fork()
        if pid == 0:
            os.environ.update(environment)
            with (directory / OUTPUT).open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
                os._exit(cli.main(words))
        yield types.SimpleNamespace(wait=lambda: os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    trace.started = started
    return cli.main(["verify", *flags, str(script)])


def test_verify_compares_graphs_with_eager_lanes(gpus, tmp_path):
    assert gpus.call(verified, tmp_path, script_whose_weight_grows(STEPS), "-n", "1") == 0
    assert "the same at every step: n=1, n=1, graphs=off" in gpus.printed
    assert "no lane was a CUDA graph" not in gpus.printed
    script = script_whose_weight_grows(3)
    assert gpus.call(verified, tmp_path, script, "-n", "1") != 0  # the fourth step captures
    assert "at step 4, lane 1 has other bits as a CUDA graph than eagerly" in gpus.printed


@pytest.mark.long
def test_verify_says_that_it_is_too_short_for_graphs(gpus, tmp_path):
    script = script_whose_weight_grows(STEPS)
    assert gpus.call(verified, tmp_path, script, "-n", "1", "--steps", "3") == 0
    assert "Note: no lane was a CUDA graph: they are captured in the fourth step" in gpus.printed
