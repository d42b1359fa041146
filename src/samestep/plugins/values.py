"""What `samestep compare --replay` keeps of a repeated step: all that its lanes compute, in order.

Each file has tensors by name, in the order of their numbers: what a call of `run.backward` begins
with; the batch of a lane, the outputs of its modules as they end and its loss; its gradients.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from samestep.data.nested import tensors_in
from samestep.plugins.replay import Request, module_names, parameter_names, roots_of
from samestep.step.gradients import Gradients
from samestep.step.lane_pass import LanePass, StepPlugin


def files_of(folder: Path, step: int) -> list[Path]:
    """Return the files of a step, in order."""
    return sorted(folder.glob(f"values-{step}/*.safetensors"))


class StepValues(StepPlugin):
    """Writes the values of the step of a request, and those of the step before it.

    The latter may already have made another update, although all that it logged is the same.
    """

    def __init__(self, request: Request) -> None:
        self._folder, self._first = Path(request.folder), request.step - 1
        self._kept: dict[str, Tensor] = {}  # in host memory, until they are written
        self._numbers = count()  # of files
        self._is_kept = False  # the current step

    def begin(self, lane_pass: LanePass) -> None:
        """Write the parameters and buffers with which a call begins."""
        self._is_kept = lane_pass.seed[0] >= self._first
        if self._is_kept:
            lane_pass.keep_gradients()
            for root in roots_of(lane_pass):
                for name, tensor in [*root.named_parameters(), *root.named_buffers()]:
                    self._keep(f"{name} of {type(root).__name__}, before its lanes", tensor)
            self._write(lane_pass)

    def lane(self, lane_pass: LanePass, lane: int, batch: Any) -> AbstractContextManager[None]:
        """Return a context around a lane's passes."""
        return self._look(lane_pass, lane, batch) if self._is_kept else nullcontext()

    @contextmanager
    def _look(self, lane_pass: LanePass, lane: int, batch: Any) -> Iterator[None]:
        names = module_names(lane_pass)

        def look_at(module: torch.nn.Module, _: object, output: Any) -> None:
            if not torch.compiler.is_compiling():
                kind = type(module).__name__
                name = f"lane {lane}, output of {names.get(id(module), kind)} ({kind})"
                self._keep(name, output)

        self._keep(f"lane {lane}, its batch", batch)
        with register_module_forward_hook(look_at):
            yield
        self._write(lane_pass)

    def loss(self, lane_pass: LanePass, lane: int, loss: Tensor) -> None:
        """Keep the loss of a lane."""
        if self._is_kept:
            self._keep(f"lane {lane}, its loss", loss)

    def after_lane(self, lane_pass: LanePass, lane: int, gradients: Gradients) -> None:
        """Write the gradients of a lane."""
        if self._is_kept:
            names = parameter_names(lane_pass)
            for parameter, gradient in zip(lane_pass.parameters, gradients, strict=True):
                name = names.get(id(parameter), "a parameter")
                self._keep(f"lane {lane}, gradient of {name}", gradient)
            self._write(lane_pass)

    def _keep(self, name: str, value: Any) -> None:
        """Keep copies of the tensors in a value, which later code may change."""
        for path, tensor in tensors_in(value):
            if tensor.layout == torch.strided and not tensor.is_nested:
                own = tensor.detach().to("cpu", copy=True).contiguous()
                own = torch.view_as_real(own) if own.is_complex() else own
                self._kept[f"{len(self._kept):06} {name}{f' {path!r}' if path else ''}"] = own

    def _write(self, lane_pass: LanePass) -> None:
        if self._kept:
            folder = self._folder / f"values-{lane_pass.seed[0]}"
            folder.mkdir(exist_ok=True)
            save_file(self._kept, folder / f"{next(self._numbers):06}.safetensors")
            self._kept = {}
