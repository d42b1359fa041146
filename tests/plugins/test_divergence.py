"""Detection of workers with different state, without false alarms."""

from __future__ import annotations

import re
import socket
from types import SimpleNamespace

import pytest
import torch

import samestep as ss
from samestep.launch.attempt import WorkerFailure
from samestep.plugins import divergence
from samestep.plugins.divergence import LaneObserver, checksums, digest
from samestep.step.lane_pass import LossSpec
from tests.jobs import Net, events, fit, image_job, images, snapshots, train
from tests.run import kinds
from tests.workers import run_workers, try_workers

HOST = re.escape(socket.gethostname())


def flip(tensor):
    """Flip the lowest bit of a tensor's first element."""
    tensor.detach().view(-1).view(torch.uint8)[0] ^= 1


def job(run, flipped, ranks, at=3):
    """Train for 8 steps, and flip a bit on some workers in the body of step `at`."""
    model = run.replicate(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)

    def after_step(_):
        if run.step == at and run.rank in ranks:
            flip(flipped(model, optimizer))

    return fit(run, model, optimizer, images(32), batch_size=8, after_step=after_step)


def test_states_are_read_once_per_snapshot(tmp_path):
    """They are compared, and the same ones are saved."""

    class Counted:
        def __init__(self):
            self.reads = []

        def state_dict(self):
            self.reads.append(self.run.step)
            return {"number": 1}

        def load_state_dict(self, state):
            pass

    def body(directory):
        with ss.init(dir=directory, lanes=2, snapshot_every=1, check_every=None) as run:
            counted = Counted()
            counted.run = run
            model = run.replicate(Net())
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            tracked = {"counted": counted}
            fit(run, model, optimizer, images(32), batch_size=8, epochs=2, tracked=tracked)
            return counted.reads

    first = 1  # memory for the first snapshot is allocated before it
    for reads in run_workers(body, 2, tmp_path):
        assert reads == [first, *range(1, 9)]


def weight(model, _):
    return model.second.weight  # the same tensor as `first.weight`


def messages(workers, flipped, ranks, directory=None, **options):
    """Return the error message of each worker."""
    ends = try_workers(
        train,
        workers,
        lambda run: job(run, flipped, ranks),
        directory,
        {"lanes": 4, "check_every": 2, **options},
    )
    assert [type(end.error) for end in ends] == [ss.errors.DivergenceError] * workers
    return [str(end.error) for end in ends]


@pytest.mark.parametrize(
    ("flipped", "name"),
    [
        (weight, "model/first.weight"),
        (lambda model, _: model.features[1].running_mean, "model/features.1.running_mean"),
        (
            lambda model, _: model.features[1].num_batches_tracked,
            "model/features.1.num_batches_tracked",
        ),
        (
            lambda model, optimizer: optimizer.state[model.head.bias]["momentum_buffer"],
            "optimizer/state/8/momentum_buffer",
        ),
    ],
)
def test_one_flipped_bit_is_detected_and_named(flipped, name):
    first, second = messages(2, flipped, [1])
    assert first == second
    assert first.startswith(f"workers differ after step 4 in '{name}': there is no majority: ")
    assert "equal after step 2: resume from a snapshot of that step or an earlier one" in first


def test_workers_that_differ_from_the_majority_are_named(tmp_path):
    first, *_ = messages(3, weight, [1], tmp_path)
    assert re.search(
        rf": worker 1 \({HOST}\) differs from the majority; expected the same bits on all workers",
        first,
    )
    assert {
        event["rank"]: event["error"].partition(":")[0] for event in events(tmp_path, "failed")
    } == dict.fromkeys(range(3), "DivergenceError")


@pytest.mark.parametrize("recheck_every", [None, 2])
def test_with_recheck_every_those_outside_the_majority_are_blamed(recheck_every):
    """Otherwise, user code is a likelier cause than hardware."""
    options = {"lanes": 4, "check_every": 2, "recheck_every": recheck_every}
    ends = try_workers(train, 3, lambda run: job(run, weight, [1]), None, options)
    for rank, end in enumerate(ends):
        error, blames = end.error, recheck_every is not None
        assert (error.ranks, error.hosts) == ((1,), (socket.gethostname(),))
        assert (error.step, error.tensor) == (4, "model/first.weight")
        assert error.is_certain == error.is_retryable == blames
        assert error.is_secondary == (blames and rank != 1)
        assert WorkerFailure.of_error(rank, error).is_faulty == (blames and rank == 1)


def test_two_workers_are_not_blamed_for_a_difference_between_them():
    options = {"lanes": 4, "recheck_every": 2}
    for end in try_workers(train, 2, lambda run: job(run, weight, [1]), None, options):
        assert end.error.ranks == (0, 1)
        assert not end.error.is_certain
        assert not end.error.is_retryable


def test_both_sides_are_named_without_a_majority():
    first, *_ = messages(4, weight, [1, 2])
    assert re.search(
        rf"no majority: worker 0 \({HOST}\), 3 \({HOST}\) "
        rf"and worker 1 \({HOST}\), 2 \({HOST}\) differ from each other",
        first,
    )


def test_difference_is_reported_at_a_later_check():
    first, _ = messages(2, weight, [1], check_every=6)
    assert "workers differ after step 6 in 'model/first.weight': " in first
    assert "all workers were equal after step 1: resume from a snapshot of that step" in first


@pytest.mark.parametrize(("at", "snapshot_every"), [(0, None), (7, None), (5, "3")])
def test_workers_are_compared_after_the_first_step_before_snapshots_and_at_the_end(
    at, snapshot_every, tmp_path
):
    step = 6 if snapshot_every else at + 1
    options = {"lanes": 4, "check_every": 1000, "snapshot_every": snapshot_every}
    ends = try_workers(
        train, 2, lambda run: job(run, weight, [0], at=at), tmp_path / "runs", options
    )
    words = f"workers differ after step {step} in 'model/first.weight': "
    assert [words in str(end.error) for end in ends] == [True, True]
    assert snapshots(tmp_path / "runs") == (["step-00000003"] if snapshot_every else [])
    assert not events(tmp_path / "runs", "finished")
    nothing = "nothing was compared earlier in this attempt: resume from a snapshot that you trust"
    assert (nothing in str(ends[0].error)) == (at == 0)


def test_no_snapshot_in_memory_is_made_of_workers_that_differ():
    options = {"lanes": 4, "check_every": None, "hot_every": "5", "snapshot_every": None}
    with pytest.raises(
        ss.WorkerError, match=r"workers differ after step 5 in 'model/first.weight'"
    ):
        ss.launch(train, lambda run: job(run, weight, [1]), None, options)


def test_replicated_module_that_is_not_tracked_is_compared():
    def body(run):
        other, model = run.replicate(torch.nn.BatchNorm1d(2)), run.replicate(Net())
        for batch in run.batches(images(32), 8):
            run.backward(lambda model, batch: model(batch[0]).mean(), model, batch)
            if (run.rank, run.step) == (1, 1):
                flip(other.running_var)

    ends = try_workers(train, 2, body, None, {"check_every": 2})
    assert [" in 'module 0 (BatchNorm1d)/running_var': " in str(end.error) for end in ends] == [
        True,
        True,
    ]


def test_first_of_several_tensors_is_named():
    def both(model, optimizer):
        flip(optimizer.state[model.head.bias]["momentum_buffer"])
        return model.head.bias

    first, _ = messages(2, both, [0])
    assert "after step 4 in 'model/head.bias' (the first of 2 values that differ): " in first


def numbers_job(run, change):
    """Train with numbers and texts in tracked state, which `change` makes differ in one step."""
    model = run.replicate(Net())
    optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.01))
    state = SimpleNamespace(
        optimizer=optimizer,
        shard=run._lanes.shards[0],
        patience=ss.Patience(3),
        dict={"seen": 0, "names": ["a"], f"of {run.rank}": run.rank},
        scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 100),
    )

    def after_step(_):
        if run.step == 3:
            change(state, run.rank)

    tracked = {"patience": state.patience, "dict": state.dict, "scheduler": state.scheduler}
    fit(run, model, optimizer, images(32), batch_size=8, after_step=after_step, tracked=tracked)


def set_option(name, value):
    def change(state, rank):
        if rank == 1:
            state.optimizer.param_groups[0][name] = value

    return change


def count_steps(state, rank):
    """Change the counters of parameters of which each worker updates a part."""
    if rank == 1:
        for values in state.shard.contents.state.values():
            values["step"] += 1


NUMBERS = [
    (set_option("lr", 0.005), "optimizer/param_groups/0/lr", "0.01", "0.005"),
    (set_option("betas", (0.9, 0.9)), "optimizer/param_groups/0/betas/1", "0.999", "0.9"),
    (count_steps, "optimizer/state/4/step", "4.0", "5.0"),
    (lambda state, rank: state.patience.step(0.5 + rank), "patience/best", "0.5", "1.5"),
    (lambda state, rank: state.dict.update(seen=rank), "dict/seen", "0", "1"),
    (lambda state, rank: state.dict["names"].append("b" * rank), "dict/names/1", "''", "'b'"),
    (lambda state, rank: rank and state.dict["names"].clear(), "dict/names", "1 items", "0 items"),
    (lambda state, rank: rank and state.scheduler.step(), "scheduler/last_epoch", "0", "1"),
]


@pytest.mark.parametrize(("change", "name", "first", "second"), NUMBERS)
def test_numbers_and_texts_that_differ_are_named_with_their_values(change, name, first, second):
    options = {"lanes": 4, "check_every": 4}
    for end in try_workers(train, 2, lambda run: numbers_job(run, change), None, options):
        assert type(end.error) is ss.errors.DivergenceError
        text = re.sub(rf" \({HOST}\)", "", str(end.error))
        assert f" after step 4 in '{name}" in text
        assert f": {first} on worker 0 and {second} on worker 1; expected the same value" in text


def test_numbers_that_differ_blame_no_hardware():
    """With three workers, two of which have the same parameters as well."""
    change = set_option("lr", 0.5)
    options = {"lanes": 4, "check_every": None, "recheck_every": 2}
    for end in try_workers(train, 3, lambda run: numbers_job(run, change), None, options):
        assert (end.error.ranks, end.error.tensor) == ((1,), "optimizer/param_groups/0/lr")
        assert not end.error.is_certain
        assert not end.error.is_retryable


def test_each_worker_may_have_keys_of_its_own():
    options = {"lanes": 4, "check_every": 1}
    run_workers(train, 2, lambda run: numbers_job(run, lambda *_: None), None, options)


def test_without_check_every_only_snapshots_are_checked(tmp_path):
    options = {"lanes": 4, "check_every": None}
    assert run_workers(train, 2, lambda run: job(run, weight, [1]), None, options) == [None, None]
    ends = try_workers(train, 2, lambda run: job(run, weight, [1]), tmp_path, options)
    assert ["workers differ after step 4" in str(end.error) for end in ends] == [True, True]
    assert snapshots(tmp_path)[-1] == "step-00000003"


def counted(job, options):
    """Run a job and return the number of steps, and of the steps at which workers compared."""
    with ss.init(**{"lanes": 8, "check_every": 1, **options}) as run:
        gather, compared = run._world.all_gather_json, []

        def watched(value, what):
            compared.extend([run.step] * (what == divergence.COMPARING))
            return gather(value, what)

        run._world.all_gather_json = watched
        job(run)
        steps = run.step
    return steps, len(compared)


def spoiled_job(run):
    """Train with a loss that is NaN from the second step."""
    return image_job(
        run,
        loss_fn=lambda model, batch: model(batch[0]).mean() * (float("nan") if run.step else 1.0),
    )


@pytest.mark.parametrize(
    ("job", "options"),
    [
        (image_job, {}),
        pytest.param(image_job, {"precision": "bfloat16"}, marks=pytest.mark.long),
        pytest.param(image_job, {"devices": ["cpu", "cpu"]}, marks=pytest.mark.long),
        (spoiled_job, {"nonfinite_loss": "continue"}),
        (kinds.vit_job(sharded=False), {}),
        (kinds.buffers_job, {}),
        pytest.param(kinds.streams_job, {}, marks=pytest.mark.long),
        pytest.param(kinds.mixed_dtypes_job, {}, marks=pytest.mark.long),
    ],
)
def test_ordinary_runs_raise_no_error(job, options):
    first, second = run_workers(counted, 2, job, options)
    assert first == second == (first[0], first[0])
    assert first[0] > 0


def test_state_that_moved_to_another_device_does_not_differ():
    def body():
        with ss.init(lanes=2) as run:
            run.replicate(torch.nn.Linear(2, 1))
            digests = iter([digest({}), "of the same values on a GPU"][run.rank :])
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(divergence, "digest", lambda _: next(digests))
                run._session.divergence.compare(1)
            return list(digests)

    # each worker took one digest, and no error followed
    assert run_workers(body, 2) == [["of the same values on a GPU"], []]


def test_one_worker_computes_no_checksums():
    assert counted(image_job, {}) == (8, 0)


def test_checksums_depend_on_bytes():
    def of(values):
        return checksums({"values": values})

    zero, nan = torch.zeros(3), torch.full((3,), torch.nan)
    assert of(zero) != of(-zero)
    assert of(nan) == of(nan.clone())
    assert of(nan) != of(-nan)
    assert of(zero) != of(zero.to(torch.int32))
    assert of(zero) != of(zero.view(3, 1))
    spread = torch.arange(12.0).view(3, 4)
    assert of(spread.t()) == of(spread.t().clone(memory_format=torch.contiguous_format))


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.bfloat16, torch.float8_e4m3fn, torch.complex64, torch.int64]
)
@pytest.mark.parametrize("shape", [(), (0, 2), (3, 2)])
def test_tensor_of_any_dtype_and_shape_has_a_checksum(dtype, shape):
    state = {
        "a": [torch.ones(shape).to(dtype)],
        1: {"b": (torch.ones(shape).to(dtype),)},
        "plain": "text",
    }
    sums = checksums(state)
    assert list(sums)[:1] == ["a/0"]
    assert set(sums.values()) == {sums["a/0"]}


def test_aliases_have_one_checksum():
    weight = torch.ones(3)
    assert list(
        checksums(
            {"tied": weight, "again": weight.detach(), "other": weight.clone(), "part": weight[:2]}
        )
    ) == [
        "tied",
        "other",
        "part",
    ]


def test_a_generator_from_which_embed_draws_is_observed(monkeypatch):
    noise, observed = torch.Generator(), []
    monkeypatch.setattr(divergence, "observe", lambda **fields: observed.append(fields))
    loss = LossSpec(None, None, embed=lambda model, batch: torch.rand(2, generator=noise))
    with LaneObserver(0, []).lane(SimpleNamespace(loss=loss, seed=(0, 0))):
        loss.embed(None, None)
    assert observed[-1] == {"kind": "generator", "step": 0, "name": "embed: noise"}
