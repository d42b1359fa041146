"""The devices of one worker: on each a replica of the parameters and buffers of every replicated module.

Modules stay the objects they are. While a device computes, its replica stands in the modules'
places, so user code that holds a module, a part of one, or a dict of them finds the tensors of the
device that it runs on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from samestep.step.tree import carried


class Home(NamedTuple):
    """Where a tensor stands: under a name among the parameters or buffers of the module that owns it."""

    owner: torch.nn.Module
    registry: dict[str, Any]
    name: str

    @property
    def key(self) -> tuple[int, str]:
        """Where this is, in a few words that can be looked up."""
        return id(self.owner), self.name

    def put(self, tensor: torch.Tensor) -> None:
        """Let a tensor stand here."""
        if type(self.owner).__setattr__ is torch.nn.Module.__setattr__:
            self.registry[self.name] = tensor
        else:  # recurrent layers keep a list of their weights besides
            setattr(self.owner, self.name, tensor)


class Replica:
    """A device with the lanes it carries; `number` 0 is the first device, whose tensors are the modules' own."""

    def __init__(self, number: int, device: torch.device, lanes: range) -> None:
        self.number, self.device, self.lanes = number, device, lanes
        # by home, and none on the first device; while this one computes, what stood there before
        self.tensors: list[torch.Tensor] = []
        # this device's tensors by the ids of the modules' own
        self.twins: dict[int, torch.Tensor] = {}

    def of(self, parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
        """Return this device's replicas of parameters."""
        if self.number == 0:
            return list(parameters)
        return [self.twins[id(parameter)] for parameter in parameters]  # type: ignore[misc]

    def add(self, tensor: torch.Tensor) -> None:
        """Make a replica for the next home; a tensor that stands in several homes gets one."""
        if id(tensor) not in self.twins:
            twin = tensor.detach().to(self.device, copy=True)
            is_parameter = isinstance(tensor, torch.nn.Parameter)
            self.twins[id(tensor)] = (
                torch.nn.Parameter(twin, tensor.requires_grad) if is_parameter else twin
            )
        self.tensors.append(self.twins[id(tensor)])


class Replicas:
    """All devices of a worker, with its lanes dealt over them in contiguous ranges."""

    def __init__(self, devices: Sequence[torch.device], own: range) -> None:
        ranges = [carried(number, len(devices), len(own)) for number in range(len(devices))]
        self.all = [
            Replica(n, device, own[some.start : some.stop])
            for n, (device, some) in enumerate(zip(devices, ranges, strict=True))
        ]
        self._homes: dict[tuple[int, str], Home] = {}

    def add(self, module: torch.nn.Module) -> None:
        """Replicate a module's parameters and buffers on all devices; parts that are known already stay as they are."""
        for home in _homes(module):
            if home.key not in self._homes:
                self._homes[home.key] = home
                for replica in self.all[1:]:
                    replica.add(home.registry[home.name])

    def holding(self, model: Any) -> list[Replica]:
        """Return the devices that a model can run on: a module that was not replicated has the first alone."""
        everywhere = not isinstance(model, torch.nn.Module) or all(
            home.key in self._homes for home in _homes(model)
        )
        return self.all if everywhere else self.all[:1]

    @torch.no_grad()
    def refresh(self) -> None:
        """Copy the values that stand in the modules now to all other devices."""
        for replica in self.all[1:]:
            pairs = {
                id(twin): (twin, home.registry[home.name])
                for twin, home in zip(replica.tensors, self._homes.values(), strict=True)
            }
            for twin, tensor in pairs.values():
                if twin.requires_grad != tensor.requires_grad:
                    twin.requires_grad_(tensor.requires_grad)
            if pairs:
                torch._foreach_copy_(
                    [twin for twin, _ in pairs.values()], [tensor for _, tensor in pairs.values()]
                )

    @contextmanager
    def on(self, replica: Replica) -> Iterator[None]:
        """Compute on a device for a block: it is the current one, and its replica stands in the modules' places."""
        with torch.cuda.device(replica.device) if replica.device.type == "cuda" else nullcontext():
            self._exchange(replica)
            try:
                yield
            finally:
                self._exchange(replica)

    def _exchange(self, replica: Replica) -> None:
        for number, (home, tensor) in enumerate(
            zip(self._homes.values(), replica.tensors, strict=False)
        ):
            replica.tensors[number] = home.registry[home.name]
            home.put(tensor)


def _homes(module: torch.nn.Module) -> Iterator[Home]:
    for owner in module.modules():
        for registry in (owner._parameters, owner._buffers):  # noqa: SLF001
            yield from (
                Home(owner, registry, name)
                for name, tensor in registry.items()
                if tensor is not None
            )
