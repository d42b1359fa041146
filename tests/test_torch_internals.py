"""Each function fails here if a new version of PyTorch changes what it needs."""

from __future__ import annotations

import ast
import copy
import importlib
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from pkgutil import resolve_name
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader
from tqdm import tqdm

from samestep import torch_internals as internals
from samestep.host import parse
from tests.ports import free_port
from tests.workers import run_workers

SOURCE = Path(internals.__file__).parent


PRIVATE = re.compile(r"_[a-zA-Z]\w*")


def private_names(tree):
    """Return private attributes, imports and the texts that could be passed to getattr."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            if PRIVATE.match(node.attr) and ast.unparse(node.value) not in {"self", "super()"}:
                names.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            names |= {part for alias in node.names for part in (node.module or "", alias.name)}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names.add(node.value)
    return set(filter(PRIVATE.fullmatch, names))


def chains(tree):
    """Return names such as torch.cuda._is_in_bad_fork."""
    chains = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and PRIVATE.match(node.attr):
            chains.add(ast.unparse(node))
        elif isinstance(node, ast.Import):
            chains |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            chains |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in chains if re.fullmatch(r"torch(\.\w+)*\._[a-zA-Z]\w*", name)}


def test_no_other_file_uses_what_is_private_in_torch():
    own = SOURCE / "torch_internals.py"
    private = private_names(parse(own.read_text()))
    assert private >= {"_version", "_workers", "_execution_engine", "_metadata", "_pg_map"}
    for path in SOURCE.rglob("*.py"):
        if path != own:
            # torchmetrics.py leaves out the attribute whose content it gets from `children`
            allowed = {"_modules"} if path.name == "torchmetrics.py" else set()
            tree = parse(path.read_text())
            assert not private & private_names(tree) - allowed, path
            assert not chains(tree), path


def test_calls_for_many_tensors():
    left, right = [torch.ones(2), torch.ones(3)], [torch.full((2,), 2.0), torch.zeros(3)]
    addresses = [tensor.data_ptr() for tensor in left]
    internals.foreach_add_(left, right)
    assert [tensor.tolist() for tensor in left] == [[3, 3], [1, 1, 1]]
    internals.foreach_mul_(left, torch.tensor(2.0))
    assert [tensor.tolist() for tensor in left] == [[6, 6], [2, 2, 2]]
    internals.foreach_copy_(left, [tensor.double() for tensor in right])  # also converts
    assert [tensor.tolist() for tensor in left] == [[2, 2], [0, 0, 0]]
    assert [tensor.data_ptr() for tensor in left] == addresses
    assert [norm.item() for norm in internals.foreach_norm(left)] == [pytest.approx(8**0.5), 0]
    assert internals.foreach_has_nonfinite(left) == 0
    left[1][2] = float("nan")
    assert internals.foreach_has_nonfinite(left) == 1
    assert [tensor.tolist() for tensor in left[:1]] == [[2, 2]]


def test_the_metadata_of_a_state_dict_says_which_version_a_module_has():
    state = nn.BatchNorm1d(2).state_dict()
    assert getattr(state, internals.STATE_METADATA) == {"": {"version": 2}}


def test_each_change_in_place_counts():
    tensor = torch.zeros(2)
    before = internals.versions_of([tensor, None])
    assert before == internals.versions_of([tensor, None])
    tensor.add_(1)
    changed, none = internals.versions_of([tensor, None])
    assert (changed > before[0], none) == (True, 0)


def test_a_subclass_without_storage():
    class Placeholder(Tensor):
        @classmethod
        def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
            raise NotImplementedError(func.overloadpacket.__name__)

    like = torch.zeros(2, 3, dtype=torch.bfloat16)
    placeholder = internals.without_storage(Placeholder, like)
    assert type(placeholder) is Placeholder
    assert (placeholder.shape, placeholder.dtype, placeholder.device) == (
        like.shape, like.dtype, like.device
    )  # fmt: skip
    assert placeholder.untyped_storage().nbytes() == 0 or placeholder.data_ptr() == 0
    parameter = nn.Parameter(like)
    parameter.grad = placeholder
    assert parameter.grad is placeholder
    with pytest.raises(NotImplementedError, match="add"):
        placeholder + 1


def test_a_module_reads_its_registries():
    shared = nn.ReLU()
    module = nn.Sequential(nn.BatchNorm1d(2), shared, shared)
    norm = module[0]
    assert internals.submodules_in(module) == {"0": norm, "1": shared, "2": shared}
    assert list(internals.parameters_in(norm)) == ["weight", "bias"]
    assert list(internals.buffers_in(norm)) == [
        "running_mean", "running_var", "num_batches_tracked"
    ]  # fmt: skip
    internals.buffers_in(norm)["running_mean"] = torch.ones(2)
    internals.parameters_in(norm)["bias"] = nn.Parameter(torch.ones(2))
    assert norm.running_mean.tolist() == norm.bias.tolist() == [1, 1]


@pytest.mark.parametrize("differentiate", [Tensor.backward, torch.autograd.backward])
def test_every_backward_pass_is_watched(differentiate):
    passes = []

    def around(run, roots):
        passes.append("begun")
        result = run()
        passes.append("done" if weight.grad is not None else "too late")
        return result

    weight = torch.ones(2, requires_grad=True)
    assert internals.backward_watcher() is None
    internals.watch_backward(around)
    try:
        assert internals.backward_watcher() is around
        torch.autograd.grad((2 * weight).sum(), weight)
        assert passes == []
        differentiate((2 * weight).sum())
        assert passes == ["begun", "done"]
        assert weight.grad.tolist() == [2, 2]
    finally:
        internals.watch_backward(None)
    assert internals.backward_watcher() is None
    differentiate((2 * weight).sum())
    assert len(passes) == 2


def test_what_belongs_behind_backward_is_noticed():
    model, calls = torch.nn.Linear(2, 1), []
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    schedules = [
        torch.optim.lr_scheduler.StepLR(optimizer, 1),
        torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer),
    ]
    average = torch.optim.swa_utils.AveragedModel(model)
    internals.watch_updates(lambda name, tensors_of: calls.append((name, tensors_of())))
    try:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with suppress(RuntimeError):  # without gradients
            torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        model(torch.ones(2)).sum().backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 1.0)
        names = ["clip_grad_norm_", "clip_grad_value_", "clip_grad_value_"]
        assert [name for name, _ in calls] == names
        assert [gradients for _, gradients in calls[:2]] == [None, None]
        assert [*map(id, calls[2][1])] == [id(weight.grad) for weight in model.parameters()]
        calls.clear()
        optimizer.step()
        optimizer.zero_grad()
        schedules[0].step()
        schedules[1].step(1.0)
        average.update_parameters(model)
        names = ["Optimizer.zero_grad", "LRScheduler.step", "ReduceLROnPlateau.step"]
        assert [name for name, _ in calls] == [*names, "AveragedModel.update_parameters"]
        for _, tensors in calls:
            assert [*map(id, tensors)] == [*map(id, model.parameters())]
        calls.clear()
        torch.amp.GradScaler("cpu", enabled=False).update()
        assert calls == [("GradScaler.update", None)]
    finally:
        internals.watch_updates(None)
    model.zero_grad()
    assert len(calls) == 1


def test_reentrant_checkpoints_are_noticed():
    inputs, seen = torch.ones(2, requires_grad=True), []
    with internals.before_reentrant_checkpoints(seen.append):
        checkpoint(torch.sin, inputs, use_reentrant=False)
        assert seen == []
        checkpoint(torch.sin, inputs, use_reentrant=True).sum().backward()
        ((*_, argument),) = seen
        assert argument is inputs
    checkpoint(torch.sin, inputs, use_reentrant=True)
    assert len(seen) == 1


def test_collectives_are_noticed(tmp_path):
    from torch.distributed import _functional_collectives as functional

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/s", rank=0, world_size=1)
    seen, values = [], torch.ones(2)
    try:
        with internals.before_collectives(seen.append):
            assert dist.get_rank() == dist.get_world_size() - 1 == 0
            assert seen == []
            dist.all_reduce(values)
            dist.broadcast(values, 0)
            dist.all_gather_object([None], 1)
            functional.all_reduce(values, "sum", dist.group.WORLD).wait()
            with ThreadPoolExecutor() as executor:
                executor.submit(dist.barrier).result()
        dist.all_reduce(values)
    finally:
        dist.destroy_process_group()
    assert {"all_reduce", "broadcast", "all_gather_object"} <= set(seen)
    assert seen[-1] == "all_reduce"
    assert "barrier" not in seen


def divisors(loss):
    return [(kind, float(value), n) for kind, value, n in internals.divisors_of(loss)]


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_divisor_of_a_cross_entropy(smoothing):
    logits, weight = torch.ones(3, 2, requires_grad=True), torch.tensor([0.5, 3.0])
    labels = torch.tensor([0, 1, -100])
    loss = nn.functional.cross_entropy(logits, labels, weight=weight, label_smoothing=smoothing)
    smoothed = [("q", 3.5, 0)] if smoothing else []
    assert sorted(divisors(loss * 2 + logits.mean())) == [("c", 3.5, 0), ("m", 6, 0), *smoothed]
    maps = nn.functional.cross_entropy(logits[None, :, :, None], labels[None, :2, None] * 0)
    assert sorted(divisors(maps + loss)) == [("c", 2, 0), ("c", 3.5, 0), *smoothed]
    total = nn.functional.cross_entropy(logits, labels, weight=weight, reduction="sum")
    assert divisors(total) == [("s", 1, 0)]
    assert divisors(total / 3) == [("q", 3, 0)]
    assert divisors(0.5 * total) == [("s", 2, 0)]


def test_the_divisors_of_means_and_quotients():
    x, divisor = torch.ones(3, 2, requires_grad=True), torch.tensor(4.0)
    assert divisors(x.mean() - x.square().mean((0, 1))) == [("m", 6, 0)] * 2
    assert divisors(nn.functional.mse_loss(torch.ones(3, 2), x)) == [("m", 6, 0)]
    for quotient in (
        x.sum() / divisor,
        x.sum() * 0.25,
        (1 / divisor) * x.sum(),
        (x / divisor).sum(),
    ):
        assert divisors(-quotient) == [("q", 4, 0)]
    assert divisors(x.sum()) == divisors(x.sum() / x.square().sum()) == []
    assert divisors(x.mean() / x.mean().detach()) == [("m", 6, 1)]


def test_the_means_that_a_loss_averages_itself():
    x = torch.ones(3, 2, requires_grad=True)
    parts = [x[0].mean(), x[1:].mean(), x.sum() / 5]
    for loss in (torch.stack(parts).mean(), sum(parts) / 3, sum(parts) * (1 / 3)):
        assert sorted(divisors(loss * 2)) == [("m", 2, 3), ("m", 4, 3), ("q", 5, 3)]
    for weighted in (parts[0] * 1, 1.0 * parts[0], parts[0] * torch.ones(())):
        assert divisors(weighted) == [("m", 2, 0)]  # a weight, and not one mean of one
    assert sorted(divisors(sum(parts) / 4)) == [("m", 2, 0), ("m", 4, 0), ("q", 5, 0)]
    assert sorted(divisors(torch.stack(parts).sum())) == [("m", 2, 0), ("m", 4, 0), ("q", 5, 0)]


def test_the_divisors_of_means_without_a_graph():
    scores, labels = torch.randn(4, 3), torch.tensor([0, 2, 2, 1])
    weight, noted = torch.tensor([1.0, 2.0, 0.25]), []
    functional = nn.functional
    with torch.no_grad(), internals.noted_means(lambda *pair: noted.append(pair)):
        losses = [
            functional.cross_entropy(scores, labels, weight, label_smoothing=0.1),
            functional.nll_loss(scores, labels, weight, ignore_index=0),
            *(
                getattr(functional, name)(scores.sigmoid(), scores.sigmoid())
                for names in internals.MEANS.values()
                for name in names
                if names[name] != internals.CROSS_ENTROPY
            ),
        ]
        functional.cross_entropy(scores, labels, reduction="sum")
        functional.cross_entropy(scores, torch.ones(4, 3) / 3)
        functional.mse_loss(scores, scores, reduction="sum")
    functional.cross_entropy(scores, labels)
    assert all(loss is noted_loss for loss, (noted_loss, _) in zip(losses, noted, strict=True))
    found = [(part.kind, float(part.value)) for _, part in noted]
    assert found == [("c", 3.5), ("c", 2.5), *[("m", 12)] * 7]


@pytest.mark.parametrize("decision", [0.0, 1.0])
def test_the_decision_to_skip_a_step_can_be_changed(decision):
    calls = []

    class Scaler(internals.GradScalerHooks):
        def before_unscale(self, optimizer):
            calls.append(optimizer)

        def after_unscale(self, optimizer, has_infinite):
            calls.append(has_infinite.item())
            return torch.full_like(has_infinite, decision)

    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    scaler = Scaler("cpu", init_scale=4.0, growth_interval=100)
    scaler.scale((weights * torch.tensor([1.0, float("inf")])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert calls == [optimizer, 1.0]
    assert weights[0].item() == (1.0 if decision else 0.0)
    assert scaler.get_scale() == (2.0 if decision else 4.0)


def test_a_decision_without_gradients():
    scaler = internals.GradScalerHooks("cpu", init_scale=4.0)
    scaler.scale(torch.zeros(()))
    scaler.step(torch.optim.SGD([nn.Parameter(torch.ones(2))], lr=1.0))
    scaler.update()
    assert scaler.get_scale() == 4.0


def test_a_scheduler_does_not_warn_of_a_first_step_that_overflowed():
    weights = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([weights], lr=1.0)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    scaler = internals.GradScalerHooks("cpu", init_scale=4.0)
    scaler.scale((weights * float("inf")).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    scheduler.step()  # a warning is an error here
    assert (weights.tolist(), scaler.get_scale(), scheduler.get_last_lr()) == ([1, 1], 2.0, [0.5])


def test_an_optimizer_steps_without_its_hooks():
    parameter = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    seen = []

    def hook(*_):
        seen.append("called")

    optimizer.register_step_pre_hook(hook)
    everywhere = register_optimizer_step_pre_hook(hook)
    try:
        assert list(internals.step_pre_hooks(optimizer)) == [hook]
        parameter.grad = torch.ones(1)
        internals.step_without_hooks(optimizer)(optimizer)
        assert (parameter.item(), seen) == (0.0, [])
        optimizer.step()
        assert (parameter.item(), seen) == (-1.0, ["called", "called"])
    finally:
        everywhere.remove()


def test_hooks_can_be_put_next_to_the_update():
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    seen = []

    def add(register, name):
        def hook(*_):
            seen.append(name)

        hook.name = name
        register(hook)

    for name in ("outer 1", "inner 1", "outer 2", "inner 2"):
        add(optimizer.register_step_pre_hook, name)
        add(optimizer.register_step_post_hook, name)

    def nest(*_):
        internals.nest_step_hooks(optimizer, lambda hook: hook.name.startswith("inner"))

    numbers = internals.step_hook_numbers(optimizer)
    everywhere = register_optimizer_step_pre_hook(nest)  # before those of the optimizer run
    try:
        optimizer.step()
    finally:
        everywhere.remove()
    assert len(numbers) == 8
    assert internals.step_hook_numbers(optimizer) != numbers
    assert sorted(internals.step_hook_numbers(optimizer)) == sorted(numbers)
    before, after = seen[:4], seen[4:]
    assert before == ["outer 1", "outer 2", "inner 1", "inner 2"]
    assert after == ["inner 1", "inner 2", "outer 1", "outer 2"]


def test_hooks_after_additions_to_gradients_are_listed():
    parameter = nn.Parameter(torch.ones(1))
    assert list(internals.post_accumulate_hooks(parameter)) == []
    parameter.register_hook(abs)
    parameter.register_post_accumulate_grad_hook(print)
    assert list(internals.post_accumulate_hooks(parameter)) == [print]


def test_loader_processes_are_listed_and_ended():
    batches = iter(DataLoader(range(4), num_workers=2))
    processes = internals.loader_processes(batches)
    assert [process.is_alive() for process in processes] == [True, True]
    assert os.getpid() not in {process.pid for process in processes}
    internals.end_loader_processes(batches)
    assert [process.is_alive() for process in processes] == [False, False]
    assert list(internals.loader_processes(iter(DataLoader(range(4))))) == []


def test_this_process_has_not_asked_cuda():
    assert internals.is_forked_after_cuda() is False  # tests/gpu/test_forks.py has the other case


@pytest.mark.long
def test_the_compiler_is_what_optimizers_import():
    program = """
import sys
import torch
from samestep.torch_internals import preload_compiler

preload_compiler()
loaded = {name for name in sys.modules if name.startswith("torch._dynamo")}
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0).zero_grad()
assert loaded == {name for name in sys.modules if name.startswith("torch._dynamo")}, "more"
print(len(loaded))
"""
    assert int(subprocess.check_output([sys.executable, "-c", program])) > 1


def test_graphs_of_the_compiler_are_noticed(monkeypatch):
    gpu = torch.device("cuda", 0)
    trees = importlib.import_module("torch._inductor.cudagraph_trees")
    assert not internals.has_compiled_graphs([gpu, torch.device("cpu")])
    container = trees.get_container(0)  # whose manager needs a GPU
    monkeypatch.setattr(container, "tree_manager", object())
    assert internals.has_compiled_graphs([gpu])
    assert not internals.has_compiled_graphs([torch.device("cuda", 1), torch.device("cpu")])
    before = trees.MarkStepBox.mark_step_counter
    torch.compiler.cudagraph_mark_step_begin()
    assert trees.MarkStepBox.mark_step_counter == before - 1
    trees.MarkStepBox.mark_step_counter = before


def test_compiled_code_is_noticed(monkeypatch):
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # of torch's bar, whose thread would stay
    layer = nn.Linear(2, 2)
    compiled = torch.compile(layer, backend="aot_eager")
    assert internals.is_compiled(compiled(torch.ones(1, 2)).mul(2).sum())
    assert not internals.is_compiled(layer(torch.ones(1, 2)).sum())


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_calls_by_compiled_code_are_noticed():
    assert not internals.is_called_by_compiled_code()
    assert torch.compile(internals.is_called_by_compiled_code, backend="eager")()


def test_groups_at_the_master_s_port_use_another_store(monkeypatch):
    rendezvous = sys.modules["torch.distributed.rendezvous"]
    monkeypatch.setattr(rendezvous, "_create_c10d_store", rendezvous._create_c10d_store)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    calls, place = [], {"rank": 0, "world_size": 1}
    store = dist.HashStore()
    internals.on_new_group_store(lambda *values: calls.append(values) or store)
    for method in ("env://", f"tcp://127.0.0.1:{os.environ['MASTER_PORT']}"):
        limit = timedelta(seconds=7)
        assert next(dist.rendezvous(method, **place, timeout=limit)) == (store, 0, 1)
    assert calls == [(0, 1, limit)] * 2
    other, *_ = next(dist.rendezvous(f"tcp://127.0.0.1:{free_port()}", **place))
    assert isinstance(other, dist.TCPStore)


def test_process_groups(tmp_path):
    groups, earlier = [], []
    former = dist.distributed_c10d._pg_map
    internals.on_new_group(lambda group, live: groups.append(group) or earlier.append([*live]))
    try:
        store = f"file://{tmp_path / 'store'}"
        dist.init_process_group("gloo", init_method=store, rank=0, world_size=1)
        assert groups == [dist.group.WORLD]
        other = dist.new_group([0])
        assert groups[1:] == [other]
        assert earlier == [[], [dist.group.WORLD]]
        store = internals.default_store()
        store.set("name", "value")
        assert store.get("name") == b"value"
        internals.set_group_timeout(other, torch.device("cpu"), timedelta(seconds=3))
        assert other._get_backend(torch.device("cpu")).options._timeout == timedelta(seconds=3)
        dist.destroy_process_group()
    finally:
        dist.distributed_c10d._pg_map = former


def test_a_device_may_recover_from_a_capture():
    assert hasattr(torch._C, "_cuda_endAllocateToPool")
    assert hasattr(torch.Generator, "graphsafe_set_state")
    assert hasattr(torch.Generator, "clone_state")


def test_arrays_are_read_before_they_become_tensors():
    array, original = np.ones(2), torch.from_numpy
    with internals.reading_arrays(lambda value: value.array):
        assert torch.from_numpy(SimpleNamespace(array=array)).sum() == 2
    assert torch.from_numpy is original


class TwoLayers(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.second(self.first(x))


def look_into_sharded_layers():
    # a process of its own: torch keeps the sockets of a group as long as its mesh
    store = dist.TCPStore("127.0.0.1", free_port(), 1, is_master=True)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = TwoLayers()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    mesh = dist.device_mesh.DeviceMesh.from_group(dist.group.WORLD, "cpu")
    seen, complete, own = [], *torch.zeros(2, 2, 4)

    def after():
        internals.gather_in_place(model.second.weight, complete, own)
        complete.copy_(own)  # as in memory that workers share

    internals.fully_shard_all([model.first, model], mesh, before=seen.append, after=after)
    assert seen == [model.first, model]
    internals.copy_with(model, lambda module, _: module is model)
    assert copy.deepcopy(model) is True
    # a unit may be called before the root, and nothing is reduced
    model.first(torch.ones(1, 3)).sum().backward()
    assert model.first.weight.grad is None, "FSDP2 shows gradients that wait for a reduction"
    with torch.no_grad():
        assert model.second.weight.to_local().data_ptr() == own.data_ptr()
        before = model(torch.ones(1, 3))
        complete.zero_()
        assert torch.equal(model(torch.ones(1, 3)), model.second.bias.to_local()[None])
        complete.copy_(own)
        assert torch.equal(model(torch.ones(1, 3)), before)
    # a pass that failed is forgotten
    hook, state = model.second.register_forward_pre_hook(lambda *_: 1 / 0), model._get_fsdp_state()
    with pytest.raises(ZeroDivisionError):
        model(torch.ones(1, 3))
    hook.remove()
    assert state._state_ctx.iter_forward_root is state
    assert state._comm_ctx.post_forward_order
    internals.end_passes(model)
    assert state._state_ctx.iter_forward_root is None
    assert not state._comm_ctx.post_forward_order
    assert model in internals.SHARDED
    kind, hooks = type(model), len(model._forward_pre_hooks)
    with internals.without_fsdp(model):
        assert type(model) is TwoLayers
        assert not model._forward_pre_hooks
        assert not model._state_dict_pre_hooks
        assert not any("composable" in str(name) for name in vars(model))
        assert "__deepcopy__" not in vars(model)
    assert type(model) is kind
    assert len(model._forward_pre_hooks) == hooks
    assert torch.equal(model.first.weight.full_tensor(), values["first.weight"])


# what `fully_shard_all`, `gather_in_place` and samestep.sharded use of FSDP2
OF_FSDP = {
    "torch.distributed.fsdp:FSDPModule": (
        *("_get_fsdp_state", "reshard", "set_custom_all_gather", "set_requires_gradient_sync"),
        *("set_reshard_after_backward", "set_reshard_after_forward", "unshard"),
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_state:FSDPState": (
        "_fsdp_param_group",
        "_lazy_init",
    ),
    "torch.distributed.fsdp._fully_shard._fsdp_param_group:FSDPParamGroup": ("wait_for_unshard",),
    "torch.distributed.fsdp._fully_shard._fsdp_api:AllGather": ("__call__", "allocate"),
    "torch.distributed.tensor:DTensor": ("_local_tensor", "to_local"),
}


def missing_of_fsdp():
    """Return the names of `OF_FSDP` that this torch does not have."""
    return [
        f"{owner}.{name}"
        for owner, names in OF_FSDP.items()
        for name in names
        if not hasattr(resolve_name(owner), name)
    ]


@pytest.mark.skipif(not internals.can_shard_fully(), reason="needs PyTorch 2.9")
def test_fsdp_has_the_names_that_sharded_models_use(monkeypatch):
    assert missing_of_fsdp() == []
    monkeypatch.delattr("torch.distributed.fsdp.FSDPModule._get_fsdp_state")
    assert missing_of_fsdp() == ["torch.distributed.fsdp:FSDPModule._get_fsdp_state"]


@pytest.mark.skipif(not internals.can_shard_fully(), reason="needs PyTorch 2.9")
def test_fsdp_is_hidden_in_a_block():
    run_workers(look_into_sharded_layers, 1)


def test_lists_of_tensors_have_operations():
    assert all(hasattr(torch, name) for name in internals.FOREACH)


def test_what_is_on_the_meta_device_stays_there():
    model = TwoLayers()
    model.first.to("meta")
    internals.move_module(model.double(), torch.device("cpu"))
    assert [str(p.device) for p in model.first.parameters()] == ["meta", "meta"]
    assert model.second.weight.device.type == "cpu"


def test_an_object_gets_another_class():
    class Named(nn.Parameter):
        __slots__ = ()

        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return (
                func.__name__
                if func.__name__ == "sum"
                else internals.without_torch_function(func, *args, **(kwargs or {}))
            )

    parameter = nn.Parameter(torch.ones(3))
    internals.set_class(parameter, Named)
    assert parameter.sum() == "sum"
    assert parameter.amax() == 1
