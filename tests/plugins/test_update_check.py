"""Updates of sharded optimizers that another worker repeats, with bits flipped in one of them."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import nn

import samestep as ss
from samestep.config import Config
from samestep.errors import OptimizerError, RecheckError
from samestep.guards import plugins_of
from samestep.plugins import update_check
from samestep.plugins.update_check import UpdateCheck
from samestep.step import shard
from samestep.step.exchange import all_gather
from samestep.step.lane_engine import LaneEngine
from samestep.step.layout import Assignment
from samestep.step.shard import SHARDABLE, WHOLE, Shard
from tests.bits import bits
from tests.jobs import Net, classify, images
from tests.step.test_lane_engine import LANES, backward, model_of
from tests.workers import run_workers
from tests.worlds import on_hosts

STEPS = 6
AT = 4  # the step of a fault


def flip(tensor):
    """Flip the highest bit of the first element's mantissa, as a fault of the memory does.

    Torch does not count this as a change, as it does for changes by code.
    """
    tensor.detach().numpy().view("int32")[0] ^= 1 << 22


def segments(contents, is_sticky):
    """Return what an optimizer updates of this worker's slice, of a sticky fault the last one."""
    parameters = [parameter for group in contents.updated for parameter in group]
    return parameters[-1:] if is_sticky else parameters


@contextmanager
def before_gather(act):
    """Call `act` in the block after each update, before its parameters are sent."""

    def gather_after(*arguments):
        act()
        all_gather(*arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shard, "all_gather", gather_after)
        yield


def train_with(fault, *, is_sticky=False, make=torch.optim.AdamW, steps=STEPS, model_of=Net):
    """Return (error, its step) of training with a fault of the worker whose update is repeated.

    A sticky fault is in one place, until its turn comes.
    """
    with ss.init(lanes=6, recheck_every=1, check_every=None) as run:
        model = run.replicate(model_of())
        optimizer = run.shard(make(model.parameters(), lr=0.01))
        run.track(model=model, optimizer=optimizer)

        def flip_all(name=None):
            contents = run._lanes.shards[0].contents
            for segment in segments(contents, is_sticky):
                flip(segment if name is None else contents.state[segment][name])

        for batch in run.batches(images(24), 12, steps=steps):
            step = run._progress.step
            is_guilty = run.rank == AT % run.world_size
            now = fault if is_guilty and (step >= AT if is_sticky else step == AT) else None
            run.backward(classify, model, batch)
            if now == "parameters":
                flip_all()
            faults = {"update": flip_all, "new state": partial(flip_all, "exp_avg_sq")}
            with before_gather(faults.get(now, lambda: None)):
                try:
                    optimizer.step()
                except RecheckError as error:
                    return error, step
            optimizer.zero_grad()
    return None, steps


TENSORS = {
    "new state": "'exp_avg_sq' of the parameter ",
    "parameters": "the parameter ",
    "update": "the parameter ",
}


def faults_of(kinds):
    errors = [train_with(fault) for fault in kinds]
    return [*errors, train_with("update", is_sticky=True, steps=40)]


def test_three_workers_find_the_one_whose_update_is_wrong():
    kinds = [None, *TENSORS]
    by_rank = run_workers(faults_of, 3, kinds)
    owner = AT % 3
    for rank, ((none, steps), *found) in enumerate(by_rank):
        assert (none, steps) == (None, STEPS)
        assert len(found) == len(TENSORS) + 1
        for fault, (error, step) in zip([*TENSORS, "sticky"], found, strict=True):
            if fault == "sticky":
                assert step >= AT
            else:
                assert step == AT
            assert (error.ranks, error.step, error.lane) == ((owner,), step, None)
            assert error.is_certain
            assert error.is_retryable
            assert error.is_secondary == (rank != owner)
            assert error.tensor.startswith(TENSORS.get(fault, "the parameter "))
            assert f"worker {owner} ({error.hosts[0]}, cpu)" in str(error)


def test_two_workers_are_both_named():
    for (error, _), _ in run_workers(faults_of, 2, ["update"]):
        assert (error.ranks, error.step) == ((0, 1), AT)
        assert "which a third worker could have found" in str(error)
        assert not error.is_certain
        assert not error.is_secondary


def trained_with_options(name, value):
    """Compare updates while the last worker has another option; return the comparisons."""
    with noted() as compared, ss.init(lanes=6, recheck_every=2, check_every=None) as run:
        model = run.replicate(Net())
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.01)))
        for batch in run.batches(images(24), 12, steps=4):
            run.backward(classify, model, batch)
            group, is_other = optimizer.param_groups[0], run.rank == run.world_size - 1
            before = group[name]
            group[name] = value if is_other else before
            optimizer.step()
            group[name] = before
    return compared


@pytest.mark.parametrize("workers", [2, 3])
def test_other_options_are_no_fault_of_the_hardware(workers):
    def body():
        values = {"lr": torch.tensor(0.02), "weight_decay": 0.5}
        return [trained_with_options(name, value) for name, value in values.items()]

    assert run_workers(body, workers) == [[[True] * 2] * 2] * workers


class Mixed(nn.Module):
    """Parameters of two dtypes, several groups of sizes that are no multiples of 64."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(64, 33)
        self.head = nn.Linear(33, 10).bfloat16()

    def forward(self, inputs):
        return self.head(self.first(inputs.flatten(1)).relu().bfloat16()).float()


class Matrices(nn.Sequential):
    """As many matrices as three workers have, which Muon takes."""

    def __init__(self):
        widths = [64, 64, 48, 10]
        layers = [nn.Linear(*sizes, bias=False) for sizes in pairwise(widths)]
        super().__init__(nn.Flatten(), *layers)


@contextmanager
def noted():
    """Note in the block, for each check, whether all workers have equal hashes of an update."""
    compared, compare = [], UpdateCheck._compare

    def noting(check, rows):
        compared.append(all(row[2] and row[2] == rows[0][2] for row in rows))
        compare(check, rows)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UpdateCheck, "_compare", noting)
        patch.setattr(update_check, "PART", 128)
        yield compared


def of_matrices(kind):
    """Return what makes an optimizer of the matrices among parameters, if it takes no others."""
    if kind.__name__ != "Muon":
        return kind
    return lambda parameters, lr: kind([p for p in parameters if p.ndim == 2], lr)


def repeated():
    """Train with every optimizer that can be sharded; return whether updates were repeated."""
    with noted() as compared:
        for kind in SHARDABLE:
            train_with(None, make=of_matrices(kind), steps=3, model_of=Mixed)
        for make in partial(torch.optim.SGD, momentum=0.9), partial(torch.optim.AdamW, fused=True):
            train_with(None, make=make, steps=3, model_of=Mixed)
    return compared


def test_every_optimizer_that_can_be_sharded_is_repeated_with_the_same_bits():
    first, second = run_workers(repeated, 2)
    assert first == second == [True] * 3 * (len(SHARDABLE) + 2)


def with_faulty_matrices():
    """Train with an owner whose matrices are wrong, and with matrices too large to be repeated."""
    results = []
    for kind in WHOLE:
        results.append(train_with("update", make=kind, model_of=Matrices))
        with noted() as compared, pytest.MonkeyPatch.context() as patch:
            patch.setattr(update_check, "MOST", 1)
            train_with(None, make=kind, steps=3, model_of=Matrices)
        assert compared == [False] * 3
    return results


def test_a_wrong_update_of_a_matrix_is_found():
    for by_kind in run_workers(with_faulty_matrices, 3):
        for error, step in by_kind:
            assert (error.ranks, error.step, step) == ((AT % 3,), AT, AT)
            assert error.tensor.startswith("the parameter ")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_an_update_of_compiled_code_is_refused():
    hook = partial(UpdateCheck._before_update, None, None, (), {})
    with pytest.raises(OptimizerError, match="do not compile optimizer"):
        torch.compile(hook, backend="eager")()


def changed_by_code():
    """Change what an update reads in each step; return whether the update was repeated."""
    with noted() as compared, ss.init(lanes=2, recheck_every=1) as run:
        model = run.replicate(Mixed())
        optimizer = run.shard(torch.optim.AdamW(model.parameters(), lr=0.01, fused=True))
        scaler = run.grad_scaler(init_scale=4.0)
        run.track(model=model, optimizer=optimizer, scaler=scaler)

        def loss_fn(model, batch):
            loss, scalars = classify(model, batch)
            return scaler.scale(loss), scalars

        def halve(optimizer, *_):
            optimizer.param_groups[0]["lr"] *= 0.5

        def add_hook():
            optimizer.register_step_pre_hook(halve)

        @torch.no_grad()
        def write_slice():
            model.head.weight.mul_(0.9)

        def clear_state():
            contents = run._lanes.shards[0].contents
            contents.state[contents.updated[0][0]]["exp_avg"].zero_()

        def load():
            optimizer.load_state_dict(optimizer.state_dict())

        actions = [
            lambda: None,
            add_hook,
            clear_state,
            load,
            write_slice,
            lambda: None,
        ]
        for batch, act in zip(run.batches(images(24), 12, steps=6), actions, strict=True):
            run.backward(loss_fn, model, batch)
            act()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return compared


def test_what_code_changes_is_no_fault():
    """The update of parameters that code has written cannot be repeated, which is no error."""
    assert run_workers(changed_by_code, 2) == [[True, True, True, True, False, True]] * 2


def with_two_optimizers():
    """Train two models in turn, as in a GAN; return the results of all comparisons by step."""
    by_step = []
    with noted() as compared, ss.init(lanes=2, timeout=60, recheck_every=2) as run:
        pairs = []
        for _ in range(2):
            model = run.replicate(Net())
            pairs.append((model, run.shard(torch.optim.AdamW(model.parameters(), lr=0.01))))
        for batch in run.batches(images(16), 4, steps=4):
            compared.clear()
            for model, optimizer in pairs:
                run.backward(classify, model, batch)
                optimizer.step()
                optimizer.zero_grad()
            by_step.append(list(compared))
    return by_step


def test_each_optimizer_is_checked_once_in_a_step():
    assert run_workers(with_two_optimizers, 2) == [[[], [True] * 2, [], [True] * 2]] * 2


def clipped(params, **options):
    """Return an optimizer that limits the weights after each update."""
    optimizer = torch.optim.AdamW(params, **options)

    @torch.no_grad()
    def clip(*_):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.data.clamp_(-0.02, 0.02)

    optimizer.register_step_post_hook(clip)
    return optimizer


def train_clipped():
    with noted() as compared:
        error, _ = train_with(None, make=clipped, steps=3)
    return error, compared


def test_what_a_hook_from_before_shard_writes_is_no_fault():
    assert run_workers(train_clipped, 2) == [(None, [True] * 3)] * 2


def divided_among_hosts(world, across):
    """Return whether the updates of an optimizer of several hosts were repeated, and its model."""
    with noted() as compared:
        engine = LaneEngine(world, Config(recheck_every=1), LANES, [torch.device("cpu")])
        engine.use(plugins_of(engine))
        model = model_of(engine)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        engine.shards.append(Shard(optimizer, Assignment(world.size, LANES), world, across=across))
        for step in range(6):
            backward(engine, model, step=step)
            optimizer.step()
    return compared, {name: bits(parameter) for name, parameter in model.named_parameters()}


def test_hosts_repeat_the_updates_of_others_unless_each_updates_everything():
    divided = on_hosts(2, 4, divided_among_hosts, "world")
    everywhere = on_hosts(2, 4, divided_among_hosts, "host")
    for rank in range(4):
        # the last worker's slice has only parameters without a gradient
        assert divided[rank][0] == [True, True, True, False, True, True]
        assert everywhere[rank] == ([], divided[0][1])
