"""Sharded parameters have the bits of replicated ones, or are refused."""

from __future__ import annotations

import copy
import os

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import samestep as ss
from samestep.errors import ConfigError, LossError, ModelError, OptimizerError, WorldError
from samestep.record.chain import Chain
from tests.gpu.machines import enter_machine
from tests.jobs import events
from tests.namespaces import hosts
from tests.needs import needs
from tests.run.test_histogram import histograms
from tests.sharded.jobs import (
    JOBS,
    WORDS,
    Block,
    Words,
    adamw,
    digest,
    digests,
    loss_fn,
    texts,
    train,
)
from tests.workers import WorkerFailedError, run_workers

FULL = {"shard": "full"}
SOME = ("tied", "short", "joined", "evaluated", "few", "averaged")
HOSTS = {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}  # each worker is a host


@pytest.fixture(scope="module")
def replicated():
    """What all jobs end with, replicated, on one worker."""
    (results,) = run_workers(digests, 1, None, {})
    return results


def of(results, names):
    return {name: results[name] for name in names}


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.long), 3])
def test_all_jobs_have_the_bits_of_replicated_parameters(workers, replicated):
    assert len(replicated) == len(JOBS)
    assert run_workers(digests, workers, None, FULL) == [replicated] * workers


@pytest.mark.long
@pytest.mark.parametrize("keep", ["lane", "step"])
def test_units_may_be_kept(keep, replicated):
    shard = {**FULL, "keep": keep}
    assert run_workers(digests, 3, SOME, shard) == [of(replicated, SOME)] * 3


def test_several_hosts_have_the_same_bits(replicated):
    results = run_workers(digests, 2, SOME, FULL, environment=HOSTS)
    assert results == [of(replicated, SOME)] * 2


def on_hosts_of_two(names):
    enter_machine([0, 2])
    return digests(names, FULL)


def test_hosts_of_different_sizes_gather_in_the_middle_of_user_code(replicated):
    """Their messages are torch.distributed's, as those between GPUs are."""
    assert run_workers(on_hosts_of_two, 3, ("tied",)) == [of(replicated, ("tied",))] * 3


@pytest.mark.long
def test_two_hosts_have_the_same_bits(replicated):
    with hosts(2) as pair:

        def body():
            pair[int(os.environ["RANK"])].enter()
            return digests(SOME, FULL)

        place = {"MASTER_ADDR": pair[0].address, "GLOO_SOCKET_IFNAME": pair[0].device}
        results = run_workers(body, 2, environment={**HOSTS, **place})
    assert results == [of(replicated, SOME)] * 2


@pytest.mark.long
@pytest.mark.parametrize("workers", [2, 4, 5])
def test_any_number_of_workers_has_the_same_bits(workers, replicated):
    assert run_workers(digests, workers, None, FULL) == [replicated] * workers


@pytest.mark.parametrize(
    ("lanes", "workers", "options"),
    [
        (1, 1, {}),
        (7, 3, {}),
        pytest.param(8, 2, {"precision": "bfloat16"}, marks=pytest.mark.long),
        pytest.param(8, 2, {"exchange_dtype": "bfloat16"}, marks=pytest.mark.long),
    ],
    ids=["one lane", "seven lanes", "bfloat16", "gradients in bfloat16"],
)
def test_options_have_the_bits_of_replicated_parameters(lanes, workers, options):
    names = ("tied", "checkpoints")
    (expected,) = run_workers(in_one_run, 1, names, {}, lanes, options)
    assert run_workers(in_one_run, workers, names, FULL, lanes, options) == [expected] * workers


def in_one_run(names, shard, lanes, options):
    return digests(names, shard, lanes, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("compiled", {}),
        ("inductor", {}),
        ("scaled", {"precision": "float16"}),
    ],
)
@pytest.mark.long
def test_compiled_blocks_and_float16_have_the_bits_of_replicated_parameters(name, options):
    if name == "inductor":
        needs("g++")
    (expected,) = run_workers(in_one_run, 1, (name,), {}, 8, options)
    for workers in (1, 3):
        results = run_workers(in_one_run, workers, (name,), FULL, 8, options)
        assert results == [expected] * workers


def trained(folder, shard, steps, stop_after=None):
    torch.set_num_threads(1)
    with ss.init(dir=folder, lanes=6, stop_after=stop_after, progress=False) as run:
        torch.manual_seed(1)
        model = run.replicate(Words(), **({"units": (Block,), **shard} if shard else {}))
        optimizer = adamw(run, model, fused=True)
        mean = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        run.track(model=model, optimizer=optimizer, mean=mean)
        for batch in run.batches(texts(), 16, steps=steps):
            run.backward(loss_fn, model, batch)
            optimizer.step()
            optimizer.zero_grad()
            mean.update_parameters(model)
        assert run.step == steps
        run.snapshot(score=1.0)
        model_of_best = run.best_snapshot().state["model"]
        assert list(model_of_best) == list(Words().state_dict())
        assert int(run.best_snapshot().state["mean"]["n_averaged"]) == steps
        return digest(run, nn.ModuleList([model, mean.module]))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (({}, 2), (FULL, 3)),
        ((FULL, 3), (FULL, 2)),
        pytest.param((FULL, 2), ({}, 1), marks=pytest.mark.long),
        pytest.param((FULL, 1), (FULL, 2), marks=pytest.mark.long),
    ],
    ids=["replicated to sharded", "three to two", "sharded to replicated", "one to two"],
)
def test_snapshots_are_those_of_any_way(tmp_path, before, after):
    (expected,) = run_workers(trained, 1, tmp_path / "whole", {}, 6)
    shard, workers = before
    run_workers(trained, workers, tmp_path / "run", shard, 6, 3)
    shard, workers = after
    assert run_workers(trained, workers, tmp_path / "run", shard, 6) == [expected] * workers
    histories = [Chain.open(tmp_path / name) for name in ("whole", "run")]
    assert len({history.head_after(6) for history in histories}) == 1
    assert [event["keep"] for event in events(tmp_path / "run", "sharded_model")] == [
        "forward" for shard, _ in (before, after) if shard
    ]


def counted(folder, shard):
    with ss.init(dir=folder, lanes=4, progress=False) as run:
        torch.manual_seed(1)
        model = run.replicate(Words(), **({"units": (Block,), **shard} if shard else {}))
        optimizer = adamw(run, model)
        for batch in run.batches(texts(), 8, steps=2):
            run.backward(loss_fn, model, batch)
            run.log_histogram("gradients", model, grad=True)
            optimizer.step()
            optimizer.zero_grad()
            run.log_histogram("parameters", model)


def test_histograms_count_the_rows_of_all_workers(tmp_path):
    run_workers(counted, 1, tmp_path / "whole", {})
    run_workers(counted, 3, tmp_path / "parts", FULL)
    whole = histograms(tmp_path / "whole")
    assert len(whole) == 2 * 2 * len([*Words().parameters()])
    assert histograms(tmp_path / "parts") == whole


# -- what is refused


def refused(use, error, **options):
    """Return the message of the error that a script raises."""
    torch.set_num_threads(1)
    with (
        ss.init(lanes=4, progress=False, **options) as run,
        pytest.raises(error) as caught,
    ):
        use(run)
    return str(caught.value)


def sharded(run):
    return run.replicate(Words(), shard="full", units=(Block,))


def read_in_the_loss(run):
    model = sharded(run)

    def loss(model, batch):
        return loss_fn(model, batch) + sum(p.square().sum() for p in model.parameters())

    train(run, model, adamw(run, model), loss)


def read_outside(run):
    sharded(run).embedding.weight.norm()


def read_data(run):
    _ = sharded(run).embedding.weight.data


def read_state(run):
    sharded(run).state_dict()


def without_shard(run):
    model = sharded(run)
    train(run, model, torch.optim.AdamW(model.parameters()))


def embedded(run):
    model = sharded(run)
    for batch in run.batches(texts(), 8, steps=1):
        run.backward(lambda _, logits: logits.mean(), model, batch, embed=lambda m, b: m(b[0]))


def with_others(run):
    model, other = sharded(run), nn.Parameter(torch.zeros(3))
    run.shard(torch.optim.SGD([*model.parameters(), other], lr=0.1))


def late(run):
    model = run.replicate(nn.Linear(7, 7))
    run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
    sharded(run)


def without_units(run):
    run.replicate(Words(), shard="full", units=(nn.Conv2d,))


def with_graph(run):
    model = sharded(run)
    copy.deepcopy(model).embedding.weight.mul_(2)


def whole_into_rows(run):
    with torch.no_grad():
        sharded(run).embedding.weight.copy_(torch.zeros(WORDS, 20))


def mixed_rows(run):
    model = sharded(run)
    with torch.no_grad():
        model.blocks[0].up.weight.lerp_(model.blocks[0].down.weight, 0.5)


def shown_rows(run):
    rows = sharded(run).embedding.weight.detach()
    assert repr(rows) == "rows of a sharded parameter"
    rows.tolist()


def summed_rows(run):
    (sharded(run).embedding.weight.detach() * 2).sum()


def summed_into_rows(run):
    weight = sharded(run).embedding.weight
    with torch.no_grad():
        torch.add(weight, weight, out=weight)


def copied_block(run):
    copy.deepcopy(sharded(run).blocks[0])


def twice_sharded(run):
    run.replicate(sharded(run), shard="full", units=(Block,))


def trained_copy(run):
    run.replicate(copy.deepcopy(sharded(run)), shard="full", units=(Block,))


def tied_units(run):
    net = Words()
    net.blocks[0].up.weight = net.blocks[1].up.weight
    run.replicate(net, shard="full", units=(Block,))


def unknown_keep(run):
    run.replicate(Words(), shard="full", units=(Block,), keep="always")


def unknown_shard(run):
    run.replicate(Words(), shard="half")


def units_alone(run):
    run.replicate(Words(), units=(Block,))


def updated_in_a_block(run):
    model = sharded(run)
    optimizer = adamw(run, model)
    for batch in run.batches(texts(), 8, steps=1):
        run.backward(loss_fn, model, batch)
        with run.full_parameters(model):
            optimizer.step()


def edited(run):
    model = sharded(run)
    optimizer = adamw(run, model)
    for batch in run.batches(texts(), 8, steps=1):
        run.backward(loss_fn, model, batch)
        model.embedding.weight.grad.mul_(2)
        optimizer.step()


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (read_in_the_loss, ModelError, "read by square"),
        (read_outside, ModelError, "read by norm"),
        (read_data, ModelError, "read by data"),
        (read_state, ModelError, "run.full_parameters"),
        (without_shard, OptimizerError, "write optimizer = run.shard(AdamW(model.parameters()"),
        (embedded, LossError, "embed= cannot be used with a model that is sharded"),
        (with_others, OptimizerError, "make an optimizer for each"),
        (late, ModelError, "before run.shard"),
        (with_graph, ModelError, "read by mul_"),
        (whole_into_rows, ModelError, "read by copy_"),
        (mixed_rows, ModelError, "read by lerp_"),
        (shown_rows, ModelError, "read by tolist"),
        (summed_rows, ModelError, "read by sum"),
        (summed_into_rows, ModelError, "read by add with out="),
        (copied_block, ModelError, "cannot be copied alone"),
        (twice_sharded, ModelError, "is sharded already"),
        (trained_copy, ModelError, "or a copy of a sharded model"),
        (tied_units, ModelError, "are one parameter"),
        (without_units, ModelError, "found no units in Words"),
        (unknown_keep, ConfigError, "keep must be one of"),
        (unknown_shard, ConfigError, "shard must be 'full' or None"),
        (units_alone, ConfigError, "add shard='full'"),
        (updated_in_a_block, ModelError, "leave the block before"),
        (edited, OptimizerError, "stored in slices"),
    ],
)
def test_what_would_be_wrong_is_refused(use, error, message):
    (text,) = run_workers(refused, 1, use, error)
    assert message in text


def test_repeated_updates_are_refused():
    (text,) = run_workers(refused_with_recheck, 1)
    assert "cannot be used with recheck_every" in text


def refused_with_recheck():
    return refused(sharded, ConfigError, recheck_every=1)


def skips_a_unit(run, step):
    model = sharded(run)
    whole = model.forward

    def forward(words):
        model.order = [0, 2] if run.rank and run.step == step else [0, 1, 2]
        return whole(words)

    model.forward = forward
    train(run, model, adamw(run, model))


@pytest.mark.parametrize(
    ("step", "environment"),
    [
        (0, {}),
        (1, HOSTS),
        pytest.param(0, HOSTS, marks=pytest.mark.long),
        pytest.param(1, {}, marks=pytest.mark.long),
    ],
)
def test_another_order_of_units_is_an_error_with_both_names(step, environment):
    """In the first lanes, workers say what they do; later, each call has the unit's name."""

    def message(error):
        while error is not None and not isinstance(error, WorldError | LossError):
            error = error.__cause__
        return str(error)

    with pytest.raises(WorkerFailedError) as caught:
        run_workers(in_order, 2, step, environment=environment)
    assert "unit 'blocks.1'" in message(caught.value)
    assert "unit 'blocks.2'" in message(caught.value)


def in_order(step):
    with ss.init(lanes=4, progress=False) as run:
        skips_a_unit(run, step)


def copies(workers_of_run):
    """A copy that is made of whole parameters is a plain model, and what is written is kept."""
    with ss.init(lanes=4, progress=False) as run:
        torch.manual_seed(1)
        model = sharded(run).eval()
        words = texts().tensors[0][:3]
        with torch.no_grad(), run.full_parameters(model), run.full_parameters(model):
            twin = copy.deepcopy(model)
            assert type(twin) is Words
            assert torch.equal(twin(words), model(words))
            model.embedding.weight.zero_()
        with torch.no_grad():
            assert not model(words).any()  # all workers call it
            assert twin(words).any()
        assert run.world_size == workers_of_run


def test_whole_parameters_are_those_of_a_plain_model():
    run_workers(copies, 2, 2)
