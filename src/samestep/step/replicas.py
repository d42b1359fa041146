"""Equal copies of a module: on all workers, and on all devices of one worker.

Module objects stay the same: while a device computes, its copies replace the module's own tensors.
So user code that holds a module, a submodule or a dict of them uses the tensors of the current
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from samestep.comm.base import World
from samestep.data.batch import BatchCopier
from samestep.errors import ModelError
from samestep.step.layout import GPU_ALIGNMENT_BYTES, Layout, lanes_of, view_like
from samestep.torch_internals import SHARDED, buffers_in, foreach_copy_, move_module, parameters_in

# Larger tensors are sent separately: joining them would use memory and copy them twice.
LARGE_BYTES: Final = 1 << 20
WHAT: Final = "replicating a model"
# torch's own data parallelism; importing all of its classes takes seconds
WRAPPERS: Final = frozenset(
    {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel", "FSDPModule"}
)


def replicate(
    module: Module, device: torch.device, world: World, *, may_be_meta: bool = False
) -> None:
    """Move a module to `device` and overwrite its parameters and buffers with rank 0's.

    Names, shapes, dtypes and `requires_grad` are compared first. Raises `ModelError` with the first
    difference, on all workers. With `may_be_meta`, what is on the meta device stays there.
    """
    if not isinstance(module, Module):
        raise ModelError(f"run.replicate expected a torch.nn.Module, got {type(module).__name__}")
    check_unwrapped(module)
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    _refuse_without_values(tensors, may_be_meta=may_be_meta)
    if may_be_meta:
        move_module(module, device)
    else:
        module.to(device)
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    specs = {name: [list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors.items()}
    _compare(specs, world)
    _broadcast([tensor for tensor in tensors.values() if not tensor.is_meta], world)


def _refuse_without_values(tensors: Mapping[str, Tensor], *, may_be_meta: bool) -> None:
    """Raise `ModelError` for a tensor without a shape, or without values."""
    for name, tensor in tensors.items():
        if torch.nn.parameter.is_lazy(tensor):
            advice = "run the model once on a sample before run.replicate"
            raise ModelError(f"parameter {name!r} has no shape yet; {advice}")
        if tensor.is_meta and not may_be_meta:
            raise ModelError(
                f"{name!r} is on the meta device, so it has no values: make the model on another"
                " device, or pass shard='full' and weights=, the path of a safetensors file"
            )


@torch.no_grad()
def _broadcast(tensors: Sequence[Tensor], world: World) -> None:
    """Overwrite tensors with rank 0's."""
    together: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.nbytes >= LARGE_BYTES:
            values = tensor.contiguous()  # a copy for channels last, since memory is sent
            world.broadcast(values, WHAT)
            if values is not tensor:
                tensor.copy_(values)
        else:
            together.setdefault(tensor.dtype, []).append(tensor)
    for small in together.values():
        flat = torch.cat([tensor.reshape(-1) for tensor in small])  # 1-D, one message per dtype
        world.broadcast(flat, WHAT)
        parts = flat.split([tensor.numel() for tensor in small])
        for tensor, values in zip(small, parts, strict=True):
            tensor.copy_(values.view(tensor.shape))


def check_unwrapped(module: Module) -> None:
    """Raise `ModelError` if torch's own data parallelism is around the module or a part of it.

    It would add up gradients a second time, between workers that are at different lanes.
    """
    for name, part in module.named_modules():
        for kind in type(part).__mro__:
            is_torchs = kind.__name__ in WRAPPERS and kind.__module__.startswith("torch.")
            if is_torchs and part not in SHARDED:
                place = f"{name!r} of the model" if name else "the model"
                raise ModelError(
                    f"{place} is a {kind.__name__}, but samestep itself divides batches and adds up"
                    " gradients; pass the module that it wraps: model = run.replicate(Net())"
                )


def _compare(specs: dict[str, list[object]], world: World) -> None:
    first, *others = world.all_gather_json(specs, "comparing models")
    for rank, other in enumerate(others, start=1):
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                raise ModelError(
                    f"models differ between workers: {name!r} is {_spec(first.get(name))} on"
                    f" worker 0 and {_spec(other.get(name))} on worker {rank}; build the model from"
                    " the same configuration and data on every worker"
                )
        if list(first) != list(other):
            order = f"worker {rank} has its parameters in a different order than worker 0"
            raise ModelError(f"models differ between workers: {order}")


def _spec(entry: list[Any] | None) -> str:
    if entry is None:
        return "missing"
    shape, dtype, requires_grad = entry
    return f"{dtype} {tuple(shape)}{', trained' if requires_grad else ''}"


class Home(NamedTuple):
    """The location of a tensor: a name in the parameters or buffers of the module that owns it."""

    owner: Module
    registry: dict[str, Any]
    name: str

    @property
    def tensor(self) -> Any:
        """The tensor that is here now."""
        return self.registry[self.name]

    @property
    def is_there(self) -> bool:
        """Whether the module still has a tensor here."""
        return self.registry.get(self.name) is not None

    def put(self, tensor: Tensor) -> None:
        """Store a tensor here."""
        if type(self.owner).__setattr__ is Module.__setattr__:
            self.registry[self.name] = tensor
        else:  # recurrent layers also have a list of their weights
            setattr(self.owner, self.name, tensor)


class StagedTensors(NamedTuple):
    """Small tensors of one dtype: `views` of the first of `flats`, of which each device has one."""

    homes: list[Home]
    views: list[Tensor]  # one per home, of its shape
    flats: list[Tensor]  # [devices, flat_size]


class Replica:
    """A device and its lanes; device number 0 uses the modules' own tensors."""

    def __init__(self, number: int, device: torch.device, lanes: range) -> None:
        self.number, self.device, self.lanes = number, device, lanes
        self.is_own_cpu = number == 0 and device.type == "cpu"  # nothing to swap or make current
        self.copier = BatchCopier(device)
        # One per home, none on device 0. While this device computes, the tensors that it replaced.
        self.tensors: list[Tensor] = []
        self.twins: dict[int, Tensor] = {}  # by the ids of the modules' own tensors
        self.staged: set[int] = set()  # ids of those that lie in a `StagedTensors`

    def of(self, parameters: Sequence[Parameter]) -> Sequence[Parameter]:
        """Return this device's replicas of parameters."""
        if self.number == 0:
            return parameters
        # the twin of a parameter is a parameter
        return [self.twins[id(parameter)] for parameter in parameters]  # type: ignore[misc]

    def add(self, tensor: Tensor, memory: Tensor | None) -> None:
        """Make a replica for the next home; a tensor with several homes gets one replica.

        It lies in `memory` if that is given.
        """
        if id(tensor) not in self.twins:
            if memory is None:
                twin = tensor.detach().to(self.device, copy=True)
            else:
                twin = memory.copy_(tensor.detach())
            if isinstance(tensor, Parameter):
                twin = Parameter(twin, tensor.requires_grad)
            if memory is not None:
                self.staged.add(id(twin))
            self.twins[id(tensor)] = twin
        # tied weights share one twin here as well
        self.tensors.append(self.twins[id(tensor)])


class Replicas:
    """All devices of a worker, each with a contiguous range of the worker's lanes."""

    def __init__(self, devices: Sequence[torch.device], own_lanes: range) -> None:
        # by device, counted from the worker's first lane
        ranges = [lanes_of(number, len(devices), len(own_lanes)) for number in range(len(devices))]
        self.all = [
            Replica(number, device, own_lanes[places.start : places.stop])
            for number, (device, places) in enumerate(zip(devices, ranges, strict=True))
        ]
        self._homes: dict[tuple[int, str], Home] = {}
        self._staged: list[StagedTensors] = []

    def give(self, own_lanes: range) -> None:
        """Give the only device other lanes of the worker."""
        (replica,) = self.all
        self.all = [Replica(0, replica.device, own_lanes)]

    def add(self, module: Module) -> None:
        """Copy a module's new parameters and buffers to all devices.

        All of them again if user code has replaced some, such as by others of another shape.
        """
        known = self._homes
        if self.all[1:] and not all(map(self._is_current, known.values())):
            self._homes, self._staged = {}, []
            for replica in self.all[1:]:
                for content in replica.tensors, replica.twins, replica.staged:
                    content.clear()
            self._add({key: home for key, home in known.items() if home.is_there})
        self._add(_homes(module))

    def _is_current(self, home: Home) -> bool:
        twin = self.all[1].twins.get(id(home.tensor)) if home.is_there else None
        return twin is not None and twin.shape == home.tensor.shape

    def _add(self, homes: dict[tuple[int, str], Home]) -> None:
        new = {key: home for key, home in homes.items() if key not in self._homes}
        self._homes |= new
        others = self.all[1:]  # none with one device, where nothing is copied or swapped
        memory = self._memory_of([*new.values()]) if others else {}
        for home in new.values():
            views = memory.get(id(home.tensor), [None] * len(others))
            for replica, view in zip(others, views, strict=True):
                replica.add(home.tensor, view)

    def _memory_of(self, homes: Sequence[Home]) -> dict[int, tuple[Tensor, ...]]:
        """Return memory on each other device for small tensors, by id; `refresh` fills it."""
        memory: dict[int, tuple[Tensor, ...]] = {}
        twins = self.all[1].twins
        small = {id(home.tensor): home for home in homes if _is_small(home.tensor)}
        new = [home for number, home in small.items() if number not in twins]
        for dtype in dict.fromkeys(home.tensor.dtype for home in new):
            same_dtype = [home for home in new if home.tensor.dtype == dtype]
            tensors = [home.tensor for home in same_dtype]
            sizes = tuple(tensor.numel() for tensor in tensors)
            # aligned as an allocator would do, so that kernels choose as for separate tensors
            layout = Layout(sizes, 1, GPU_ALIGNMENT_BYTES // dtype.itemsize)
            flats = [  # [devices, flat_size]
                torch.zeros(layout.flat_size, dtype=dtype, device=replica.device)
                for replica in self.all
            ]
            views = [  # [devices, tensors], of the shapes of the tensors
                [view_like(flat, n, t) for n, t in zip(layout.offsets, tensors, strict=False)]
                for flat in flats
            ]
            self._staged.append(StagedTensors(same_dtype, views[0], flats))
            # views count changes together; autograd asks each tensor whether it changed
            separate = [[view.data for view in device_views] for device_views in views[1:]]
            memory.update(zip(map(id, tensors), zip(*separate, strict=True), strict=True))
        return memory

    def holding(self, model: Any) -> list[Replica]:
        """Return the devices that can run a model: only the first for an unreplicated module."""
        everywhere = not isinstance(model, Module) or _homes(model).keys() <= self._homes.keys()
        return self.all if everywhere else self.all[:1]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the modules' current values to all other devices."""
        for staged in self._staged:  # one copy per dtype and device, instead of one per tensor
            foreach_copy_(staged.views, [home.tensor for home in staged.homes])
            for flat in staged.flats[1:]:
                flat.copy_(staged.flats[0], non_blocking=True)
        for replica in self.all[1:]:
            pairs = {
                id(twin): (twin, home.tensor)
                for twin, home in zip(replica.tensors, self._homes.values(), strict=True)
            }
            for twin, tensor in pairs.values():
                if twin.requires_grad != tensor.requires_grad:
                    twin.requires_grad_(tensor.requires_grad)
                if id(twin) not in replica.staged:  # or user code has replaced it
                    twin.copy_(tensor, non_blocking=True)

    def on(self, replica: Replica) -> AbstractContextManager[Any]:
        """Make a device current, with its tensors in the modules, for the block."""
        is_cuda = replica.device.type == "cuda"
        current = torch.cuda.device(replica.device) if is_cuda else nullcontext()
        return self._swapped(replica, current) if replica.tensors else current

    @contextmanager
    def _swapped(self, replica: Replica, current: AbstractContextManager[Any]) -> Iterator[None]:
        with current:
            self._swap(replica)
            try:
                yield
            finally:
                self._swap(replica)

    def _swap(self, replica: Replica) -> None:
        homes = self._homes.values()
        for number, (home, tensor) in enumerate(zip(homes, replica.tensors, strict=True)):
            replica.tensors[number] = home.tensor
            home.put(tensor)


def _is_small(tensor: Tensor) -> bool:
    is_plain = type(tensor) in {Tensor, Parameter} and tensor.layout == torch.strided
    return is_plain and tensor.nbytes < LARGE_BYTES


def _homes(module: Module) -> dict[tuple[int, str], Home]:
    return {
        (id(owner), name): Home(owner, registry, name)
        for owner in module.modules()
        for registry in (parameters_in(owner), buffers_in(owner))
        for name, tensor in registry.items()
        if tensor is not None
    }
