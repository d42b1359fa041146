"""Equal copies of a module: on all workers, and on all devices of one worker.

Module objects stay the same: while a device computes, its copies replace the module's own tensors.
So user code that holds a module, a submodule or a dict of them uses the tensors of the current
device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module, Parameter

from samestep.comm.base import World
from samestep.data.batch import BatchCopier
from samestep.errors import ModelError
from samestep.step.layout import lanes_of

# Larger tensors are sent separately: concatenating them would use memory and copy them twice.
LARGE_BYTES: Final = 1 << 20
WHAT: Final = "replicating a model"


def replicate(module: Module, device: torch.device, world: World) -> None:
    """Move a module to `device` and overwrite its parameters and buffers with rank 0's.

    Names, shapes, dtypes and `requires_grad` are compared first. Raises `ModelError` with the first
    difference, on all workers.
    """
    if not isinstance(module, Module):
        raise ModelError(f"run.replicate expected a torch.nn.Module, got {type(module).__name__}")
    for name, tensor in chain(module.named_parameters(), module.named_buffers()):
        if torch.nn.parameter.is_lazy(tensor):
            advice = "run the model once on a sample before run.replicate"
            raise ModelError(f"parameter {name!r} has no shape yet; {advice}")
    module.to(device)
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    specs = {name: [list(t.shape), str(t.dtype), t.requires_grad] for name, t in tensors.items()}
    _compare(specs, world)
    with torch.no_grad():
        together: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors.values():
            if tensor.nbytes >= LARGE_BYTES:
                values = tensor.contiguous()
                world.broadcast(values, WHAT)
                if values is not tensor:
                    tensor.copy_(values)
            else:
                together.setdefault(tensor.dtype, []).append(tensor)
        for small in together.values():
            flat = torch.cat([tensor.reshape(-1) for tensor in small])
            world.broadcast(flat, WHAT)
            parts = flat.split([tensor.numel() for tensor in small])
            for tensor, values in zip(small, parts, strict=True):
                tensor.copy_(values.view(tensor.shape))


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

    def put(self, tensor: Tensor) -> None:
        """Store a tensor here."""
        if type(self.owner).__setattr__ is Module.__setattr__:
            self.registry[self.name] = tensor
        else:  # recurrent layers also have a list of their weights
            setattr(self.owner, self.name, tensor)


class Replica:
    """A device and its lanes; device number 0 uses the modules' own tensors."""

    def __init__(self, number: int, device: torch.device, lanes: range) -> None:
        self.number, self.device, self.lanes = number, device, lanes
        self.copier = BatchCopier(device)
        # One per home, none on device 0. While this device computes, the tensors that it replaced.
        self.tensors: list[Tensor] = []
        self.twins: dict[int, Tensor] = {}  # by the ids of the modules' own tensors

    def of(self, parameters: Sequence[Parameter]) -> list[Parameter]:
        """Return this device's replicas of parameters."""
        if self.number == 0:
            return list(parameters)
        # the twin of a parameter is a parameter
        return [self.twins[id(parameter)] for parameter in parameters]  # type: ignore[misc]

    def add(self, tensor: Tensor) -> None:
        """Make a replica for the next home; a tensor with several homes gets one replica."""
        if id(tensor) not in self.twins:
            twin = tensor.detach().to(self.device, copy=True)
            if isinstance(tensor, Parameter):
                twin = Parameter(twin, tensor.requires_grad)
            self.twins[id(tensor)] = twin
        self.tensors.append(self.twins[id(tensor)])


class Replicas:
    """All devices of a worker, each with a contiguous range of the worker's lanes."""

    def __init__(self, devices: Sequence[torch.device], own: range) -> None:
        ranges = [lanes_of(number, len(devices), len(own)) for number in range(len(devices))]
        self.all = [
            Replica(number, device, own[some.start : some.stop])
            for number, (device, some) in enumerate(zip(devices, ranges, strict=True))
        ]
        self._homes: dict[tuple[int, str], Home] = {}

    def add(self, module: Module) -> None:
        """Copy a module's new parameters and buffers to all devices."""
        for key, home in _homes(module).items():
            if key not in self._homes:
                self._homes[key] = home
                for replica in self.all[1:]:
                    replica.add(home.registry[home.name])

    def holding(self, model: Any) -> list[Replica]:
        """Return the devices that can run a model: only the first for an unreplicated module."""
        everywhere = not isinstance(model, Module) or _homes(model).keys() <= self._homes.keys()
        return self.all if everywhere else self.all[:1]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the modules' current values to all other devices."""
        for replica in self.all[1:]:
            pairs = {
                id(twin): (twin, home.registry[home.name])
                for twin, home in zip(replica.tensors, self._homes.values(), strict=True)
            }
            for twin, tensor in pairs.values():
                if twin.requires_grad != tensor.requires_grad:
                    twin.requires_grad_(tensor.requires_grad)
            if pairs:
                twins, tensors = zip(*pairs.values(), strict=True)
                torch._foreach_copy_(list(twins), list(tensors))

    @contextmanager
    def on(self, replica: Replica) -> Iterator[None]:
        """Make a device current, with its tensors in the modules, for the block."""
        with torch.cuda.device(replica.device) if replica.device.type == "cuda" else nullcontext():
            self._swap(replica)
            try:
                yield
            finally:
                self._swap(replica)

    def _swap(self, replica: Replica) -> None:
        homes = self._homes.values()
        for number, (home, tensor) in enumerate(zip(homes, replica.tensors, strict=False)):
            replica.tensors[number] = home.registry[home.name]
            home.put(tensor)


def _homes(module: Module) -> dict[tuple[int, str], Home]:
    return {
        (id(owner), name): Home(owner, registry, name)
        for owner in module.modules()
        for registry in (owner._parameters, owner._buffers)  # noqa: SLF001 (no public access)
        for name, tensor in registry.items()
        if tensor is not None
    }
