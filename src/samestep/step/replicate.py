"""Make a module equal on all workers."""

from __future__ import annotations

from itertools import chain
from typing import Final

import torch

from samestep.comm.base import World
from samestep.errors import ModelError

# of a tensor that travels by itself: together with others it would be copied twice, and held in
# memory
LARGE_BYTES: Final = 1 << 20
WHAT: Final = "replicating a model"


def replicate(module: torch.nn.Module, device: torch.device, world: World) -> None:
    """Move a module to `device` and overwrite its parameters and buffers with rank 0's.

    Names, shapes, dtypes and what requires a gradient are compared first; raises `ModelError` that
    names the first difference, on all workers.
    """
    if not isinstance(module, torch.nn.Module):
        raise ModelError(
            f"run.replicate was given {type(module).__name__}; expected a torch.nn.Module"
        )
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    lazy = [name for name, tensor in tensors.items() if torch.nn.parameter.is_lazy(tensor)]
    if lazy:
        raise ModelError(
            f"parameter {lazy[0]!r} has no shape yet; run the model once on a sample before run.replicate"
        )
    module.to(device)
    tensors = dict(chain(module.named_parameters(), module.named_buffers()))
    _compare(
        {
            name: [list(tensor.shape), str(tensor.dtype), tensor.requires_grad]
            for name, tensor in tensors.items()
        },
        world,
    )
    with torch.no_grad():
        together: dict[torch.dtype, list[torch.Tensor]] = {}
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
            for tensor, values in zip(
                small, flat.split([tensor.numel() for tensor in small]), strict=True
            ):
                tensor.copy_(values.view(tensor.shape))


def _compare(signature: dict[str, list[object]], world: World) -> None:
    first, *others = world.all_gather_json(signature, "comparing models")
    for rank, other in enumerate(others, start=1):
        for name in dict.fromkeys([*first, *other]):
            if first.get(name) != other.get(name):
                raise ModelError(
                    f"models differ between workers: {name!r} is {_words(first.get(name))} on worker 0 and {_words(other.get(name))} on "
                    f"worker {rank}; expected the same model on all: build it from the same configuration and data on every worker"
                )
        if list(first) != list(other):
            raise ModelError(
                f"models differ between workers: worker {rank} has its parameters in another order than worker 0"
            )


def _words(entry: list[object] | None) -> str:
    if entry is None:
        return "missing"
    shape, dtype, requires_grad = entry
    return f"{dtype} {tuple(shape)}{', trained' if requires_grad else ''}"  # type: ignore[arg-type]
