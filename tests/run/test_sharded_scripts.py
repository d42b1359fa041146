"""What a script does with a sharded optimizer has the bits of one that is not, or is refused."""

from __future__ import annotations

import pickle
from collections import defaultdict
from copy import deepcopy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils.data import TensorDataset

import samestep as ss
from samestep.errors import OptimizerError
from tests.bits import digest
from tests.workers import run_workers

STEPS = 9
WORKERS = (1, 2, 3)


def data():
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(12, 8, generator=generator), torch.randint(4, (12,), generator=generator)
    )


class Layers(nn.Module):
    """Layers of sizes that are divided in the middle, of which one is left out in some steps."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.head = nn.Linear(8, 64), nn.Linear(64, 65), nn.Linear(64, 4)
        self.uses_second = True

    def forward(self, points):
        points = self.first(points).relu()
        return self.head(points + self.second(points)[:, 1:] if self.uses_second else points)


def loss_of(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def parameters_of(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


class Script:
    """A loop with `use`, which is called before and after each update as `use(script, when)`."""

    def __init__(self, run, use, *, shards, make):
        self.run, self.kept = run, {}
        self.model = run.replicate(Layers())
        named = dict(self.model.named_parameters())
        weights = [parameter for name, parameter in named.items() if "weight" in name]
        biases = [parameter for name, parameter in named.items() if "bias" in name]
        groups = [{"params": weights}, {"params": biases, "weight_decay": 0.0}]
        self.make, others = make, []
        if make is muon:  # matrices only
            groups = [{"params": weights[:2]}, {"params": weights[2:], "weight_decay": 0.0}]
            others = [adam([{"params": biases}])]
        self.optimizer = make(groups)
        use(self, "made")
        if shards:
            self.optimizer, *others = map(run.shard, (self.optimizer, *others))
        use(self, "sharded")
        more = {f"other{number}": other for number, other in enumerate(others)}
        run.track(model=self.model, optimizer=self.optimizer, **more)
        goes_back = use in {back_to_a_copy, back_to_no_state}
        for batch in run.batches(data(), 4, epochs=3 if goes_back else 2):
            use(self, "begin")
            run.backward(loss_of, self.model, batch)
            use(self, "before")
            for optimizer in (*others, self.optimizer):
                optimizer.step()
            use(self, "after")
            for optimizer in (*others, self.optimizer):
                optimizer.zero_grad()


def adam(groups):
    return torch.optim.AdamW(groups, lr=0.02)


def muon(groups):
    return torch.optim.Muon(groups, lr=0.02)


def adafactor(groups):
    return torch.optim.Adafactor(groups, lr=0.02)


MAKES = [adam, adafactor, *([muon] if hasattr(torch.optim, "Muon") else [])]


def trained(use, *, shards, make=adam):
    """Return a digest of the parameters that a script ends with."""
    with ss.init(lanes=4) as run:
        return digest([*Script(run, use, shards=shards, make=make).model.parameters()])


def lookahead(script, when):
    parameters = parameters_of(script.optimizer)
    if when == "sharded":
        script.kept["slow"] = [parameter.data.clone() for parameter in parameters]
    if when == "after" and script.run.step % 3 == 2:
        for slow, parameter in zip(script.kept["slow"], parameters, strict=True):
            slow.add_(parameter.data - slow, alpha=0.5)
            parameter.data.copy_(slow)


def clipped_weights(script, when):
    if when == "after":
        for parameter in parameters_of(script.optimizer):
            parameter.data.clamp_(-0.1, 0.1)


@torch.no_grad()
def noise(script, when):
    if when == "after":
        for parameter in parameters_of(script.optimizer):
            parameter.add_(torch.randn_like(parameter), alpha=0.001)


@torch.no_grad()
def to_norms(optimizer, *_):
    """Give each weight at most the norm 2, which depends on all of its elements."""
    for parameter in parameters_of(optimizer):
        parameter.mul_((2 / parameter.norm()).clamp(max=1))


def hook_from_before(script, when):
    if when == "made":
        script.optimizer.register_step_post_hook(to_norms)
        script.optimizer.register_step_pre_hook(to_norms)


def hook_after(script, when):
    if when == "sharded":
        script.optimizer.register_step_post_hook(to_norms)


def hook_before(script, when):
    if when == "sharded":
        script.optimizer.register_step_pre_hook(to_norms)


def hook_in_a_step(script, when):
    if when == "before":
        script.kept["hook"] = script.optimizer.register_step_post_hook(to_norms)
    if when == "after":
        script.kept["hook"].remove()


def hooks_of_all_optimizers(script, when):
    if when == "before":
        script.kept["hooks"] = [
            register_optimizer_step_pre_hook(to_norms),
            register_optimizer_step_post_hook(to_norms),
        ]
    if when == "after":
        for hook in script.kept["hooks"]:
            hook.remove()


def own_step(script, when):
    if when == "made":
        step, optimizer = script.optimizer.step, script.optimizer

        def step_to_norms(closure=None):
            step(closure)
            to_norms(optimizer)

        script.optimizer.step = step_to_norms


def options(script, when):
    if when == "sharded":
        script.kept["schedule"] = torch.optim.lr_scheduler.OneCycleLR(
            script.optimizer,
            0.05,
            total_steps=STEPS,
            cycle_momentum=script.make is not adafactor,  # which has none
        )
    if when == "after":
        script.kept["schedule"].step()
        assert script.optimizer.param_groups[0]["lr"] == script.kept["schedule"].get_last_lr()[0]
        script.optimizer.param_groups[1].update(weight_decay=0.1 * script.run.step)
        if script.make is not adafactor:  # which has two of them
            script.optimizer.param_groups[1].update(eps=1e-4)
        script.optimizer.param_groups[0] = {**script.optimizer.param_groups[0], "betas": (0.8, 0.9)}


def back_to_a_copy(script, when):
    """Load the state from before steps in which other parameters had a gradient."""
    script.model.uses_second = script.run.step not in {1, 4, 5}
    if when == "after" and script.run.step == 3:
        script.kept["copy"] = deepcopy((script.model.state_dict(), script.optimizer.state_dict()))
    if when == "after" and script.run.step == 6:
        script.model.load_state_dict(script.kept["copy"][0])
        script.optimizer.load_state_dict(script.kept["copy"][1])


def back_to_no_state(script, when):
    """Begin anew, as ReLoRA does with its moments."""
    if when == "sharded":
        script.kept["new"] = script.optimizer.state_dict()
    if when == "after" and script.run.step == 5:
        script.optimizer.load_state_dict(script.kept["new"])


def state_of_another(script, when):
    """Load the state of an optimizer that is not sharded, as from a file."""
    if when == "sharded":
        groups = [[p.detach().clone() for p in g["params"]] for g in script.optimizer.param_groups]
        other = script.make([{"params": parameters} for parameters in groups])
        generator = torch.Generator().manual_seed(3)
        for parameter in parameters_of(other):
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        other.step()
        script.optimizer.load_state_dict(other.state_dict())


def frozen_and_cleared(script, when):
    if when == "begin":
        script.model.second.requires_grad_(script.run.step % 3 > 0)
    if when == "before" and script.run.step % 2:
        script.model.first.zero_grad()
    if when == "before" and script.run.step == 4:
        script.optimizer.zero_grad()


def clipped_gradients(script, when):
    if when == "before":
        script.run.clip_grad_norm(script.model, 0.1)


def looked_at(script, when):
    """Look at what does not depend on slices, which changes nothing."""
    norms = [parameter.detach().norm() for parameter in parameters_of(script.optimizer)]
    names = {id(parameter) for parameter in script.model.parameters()}
    assert {id(parameter) for parameter in parameters_of(script.optimizer)} <= names
    assert len(norms) == (3 if script.make is muon else 6)
    assert "lr: 0.02" in repr(script.optimizer)
    numbers = [group["params"] for group in script.optimizer.state_dict()["param_groups"]]
    assert numbers == ([[0, 1], [2]] if script.make is muon else [[0, 1, 2], [3, 4, 5]])


ACCEPTED = [
    lookahead,
    clipped_weights,
    noise,
    hook_from_before,
    hook_after,
    hook_before,
    hook_in_a_step,
    hooks_of_all_optimizers,
    own_step,
    options,
    back_to_a_copy,
    back_to_no_state,
    state_of_another,
    frozen_and_cleared,
    clipped_gradients,
    looked_at,
]


def all_trained(*, shards):
    results = {
        (use.__name__, make.__name__): trained(use, shards=shards, make=make)
        for use in ACCEPTED
        for make in MAKES
    }
    for make in torch.optim.NAdam, lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9):
        for use in lookahead, back_to_a_copy:
            results[use.__name__, make.__name__] = trained(use, shards=shards, make=make)
    return results


@pytest.mark.parametrize("workers", [*(pytest.param(n, marks=pytest.mark.long) for n in (1, 2)), 3])
def test_a_script_has_the_bits_of_an_optimizer_that_is_not_sharded(workers):
    (expected,) = run_workers(lambda: all_trained(shards=False), 1)
    assert len({*expected.values()}) > len(expected) / 2  # some hooks do the same
    assert run_workers(lambda: all_trained(shards=True), workers) == [expected] * workers


def is_in_state(optimizer):
    return parameters_of(optimizer)[0] in optimizer.state


def delete_state(optimizer):
    del optimizer.state[parameters_of(optimizer)[0]]


def zero_state(optimizer):
    optimizer.state[parameters_of(optimizer)[0]]["exp_avg"][:3] = 0


def read_saved_state(optimizer):
    return optimizer.state_dict()["state"][0]["exp_avg"].norm()


def read_copied_state(optimizer):
    return deepcopy(optimizer.state_dict())["state"][0]


def pickle_state(optimizer):
    return pickle.dumps({"step": 1, "optimizer": optimizer.state_dict()})


AT_ONCE = [
    is_in_state,
    delete_state,
    zero_state,
    read_saved_state,
    read_copied_state,
    pickle_state,
    lambda optimizer: optimizer.state.clear(),
    lambda optimizer: optimizer.state.get(parameters_of(optimizer)[0], {}),
    lambda optimizer: [*optimizer.state.values()],
    lambda optimizer: [*optimizer.state],
    lambda optimizer: dict(optimizer.state),
    lambda optimizer: len(optimizer.state),
    lambda optimizer: not optimizer.state,
    deepcopy,
    pickle.dumps,
]


def replace_state(optimizer):
    optimizer.state = defaultdict(dict)


def leave_out(optimizer):
    optimizer.param_groups[0]["params"].pop()


def leave_out_group(optimizer):
    optimizer.param_groups.pop()


def move_to_other_group(optimizer):
    first, second = optimizer.param_groups
    second["params"].insert(0, first["params"].pop())


def copy_parameters(optimizer):
    group = optimizer.param_groups[0]
    group["params"] = [nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]


AT_THE_STEP = [replace_state, leave_out, leave_out_group, move_to_other_group, copy_parameters]


def scaled_gradients(optimizer, *_):
    """Scale gradients by the norms of layers, as LARS does."""
    for parameter in parameters_of(optimizer):
        parameter.grad.mul_(parameter.detach().norm() / parameter.grad.norm())


def refused(script, when):
    """Do all that is refused, after which the script goes on as if it had not been done."""
    optimizer = script.optimizer
    if when == "after" and script.run.step in {0, 4}:
        for use in AT_ONCE:
            with pytest.raises(OptimizerError, match=r"use it without run.shard\Z"):
                use(optimizer)
    if when != "before" or script.run.step not in {3, 4}:
        return
    for use in AT_THE_STEP:
        groups, state = optimizer.param_groups, optimizer.state
        kept = [(group, [*group["params"]]) for group in groups]
        use(optimizer)
        with pytest.raises(OptimizerError, match=r"use it without run.shard\Z"):
            optimizer.step()
        optimizer.state, groups[:] = state, [group for group, _ in kept]
        for group, parameters in kept:
            group["params"][:] = parameters


@pytest.mark.parametrize("make", MAKES)
def test_what_would_not_act_on_slices_is_refused_at_once(make):
    (expected,) = run_workers(lambda: trained(lambda *_: None, shards=False, make=make), 1)
    for workers in WORKERS:
        found = run_workers(lambda: trained(refused, shards=True, make=make), workers)
        assert found == [expected] * workers


@pytest.mark.parametrize("place", ["made", "sharded"])
def test_gradients_scaled_by_norms_of_layers_are_refused(place):
    def use(script, when):
        if when == place:
            script.optimizer.register_step_pre_hook(scaled_gradients)

    def body():
        with pytest.raises(OptimizerError, match=r"use it without run.shard\Z"):
            trained(use, shards=True)

    for workers in (1, 2):
        run_workers(body, workers)


def test_a_parameter_with_other_memory_is_refused():
    def use(script, when):
        if when == "after" and script.run.step == 1:
            script.model.head.weight.data = script.model.head.weight.data.clone()

    def body():
        with pytest.raises(OptimizerError, match="was moved or converted"):
            trained(use, shards=True)

    for workers in (1, 2):
        run_workers(body, workers)


def test_a_closure_sees_complete_parameters():
    def body():
        with ss.init(lanes=2) as run:
            model = run.replicate(nn.Linear(8, 4))
            optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
            shapes = []
            for batch in run.batches(data(), 4, epochs=1):

                def closure(batch=batch):
                    optimizer.zero_grad()
                    shapes.append([tuple(p.shape) for p in parameters_of(optimizer)])
                    with pytest.raises(OptimizerError, match="cannot be read or changed"):
                        len(optimizer.state)
                    return run.backward(loss_of, model, batch)["loss"]

                optimizer.step(closure)
            return shapes, digest([*model.parameters()])

    (alone,) = run_workers(body, 1)
    assert alone[0] == [[(4, 8), (4,)]] * 3
    assert run_workers(body, 2) == [alone, alone]


def test_a_wrapper_that_saves_the_state_of_a_sharded_optimizer_is_refused(tmp_path):
    class Wrapper:
        def __init__(self, base):
            self.base = base

        def state_dict(self):
            return {"base": self.base.state_dict()}

        def load_state_dict(self, state):
            self.base.load_state_dict(state["base"])

    with ss.init(dir=tmp_path) as run:
        model = run.replicate(nn.Linear(8, 4))
        optimizer = run.shard(torch.optim.SGD(model.parameters(), lr=0.1))
        run.track(model=model, wrapper=Wrapper(optimizer))
        with pytest.raises(OptimizerError, match=r"use it without run.shard\Z"):
            run.snapshot(now=True)
        run._session.snapshots.tracked.objects.clear()
