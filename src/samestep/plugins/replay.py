"""What `samestep replay` sees of the step that it repeats: losses, gradients, values and samples.

The command starts the script with a request in the environment. Each worker looks at its own lanes
of one step and writes what it saw to the folder of the request; the command puts it together.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.modules.module import register_module_forward_hook

from samestep.data.batch import Batch
from samestep.data.nested import mapped, tensors_in
from samestep.data.origin import name_of
from samestep.data.random_state import key, keyed
from samestep.record.events import to_json
from samestep.step.gradients import Gradients
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import LanePass, StepPlugin, StepResult
from samestep.step.lane_results import split_loss, worst_of
from samestep.step.shard import Shard
from samestep.storage import write_atomically

REQUEST: Final = "SAMESTEP_INTERNAL_REPLAY"  # JSON; set by samestep replay


@dataclass(frozen=True)
class Request:
    """What to look at: the lanes of a step, and one `lane` of them closely (None: the worst).

    `debug` starts a debugger in that lane. `folder` gets the files; `saves_state` says whether the
    run's last snapshot is taken, and `keeps_values` whether `StepValues` writes there as well.
    """

    step: int
    folder: str
    lane: int | None = None
    debug: bool = False
    saves_state: bool = False
    keeps_values: bool = False

    @classmethod
    def from_environment(cls) -> Request | None:
        """Return the request of `samestep replay`, None in other runs."""
        text = os.environ.get(REQUEST)
        return None if text is None else cls(**json.loads(text))

    @property
    def environment(self) -> dict[str, str]:
        """The variable that `from_environment` reads."""
        return {REQUEST: json.dumps(asdict(self))}


@dataclass
class LaneReport:
    """What one lane did: its number, items, loss and metrics, gradient norms, samples.

    `norms` are 2-norms of the gradient of the lane's own loss by parameter group. `nonfinite` says
    where the first NaN or infinity was. `samples` has [index, name, largest input, loss] of each
    sample, the latter two None if unknown or not asked for.
    """

    lane: int
    call: int
    worker: int
    count: float = 0
    metrics: dict[str, Any] = field(default_factory=dict)
    norms: dict[str, float] = field(default_factory=dict)
    nonfinite: str = ""
    samples: list[list[Any]] = field(default_factory=list)


class Replay(StepPlugin):
    """Looks at the lanes of this worker in the step of a request."""

    def __init__(self, request: Request, rank: int) -> None:
        self.request, self._rank = request, rank
        self._optimizers: list[tuple[str, torch.optim.Optimizer, Shard | None]] = []
        self._reports: dict[tuple[int, int], LaneReport] = {}  # by call and lane
        self._seen: dict[int, tuple[LanePass, Any]] = {}  # of the current call, by lane
        self._worst: dict[int, int | None] = {}  # the lane to look at closely, if any, by call
        self._where = ""  # the first value that is not finite in the current lane's forward
        self._pass: LanePass | None = None  # of the step to look at

    def track(self, name: str, optimizer: torch.optim.Optimizer, shard: Shard | None) -> None:
        """Note an optimizer, whose parameter groups have gradient norms."""
        self._optimizers.append((name, optimizer, shard))

    def begin(self, lane_pass: LanePass) -> None:
        """Look at the lanes of the step, all of whose gradients stay until backward has ended."""
        self._pass = lane_pass if lane_pass.seed[0] == self.request.step else None
        if self._pass is not None:
            lane_pass.keep_gradients()

    def lane(self, lane_pass: LanePass, lane: int, batch: Any) -> AbstractContextManager[None]:
        """Return a context around a lane's passes."""
        return nullcontext() if self._pass is None else self._look(lane_pass, lane, batch)

    @contextmanager
    def _look(self, lane_pass: LanePass, lane: int, batch: Any) -> Iterator[None]:
        call = lane_pass.seed[1]
        report = LaneReport(lane, call, self._rank)
        self._reports[call, lane] = report
        indices = _indices(lane_pass.batch, lane)
        self._seen[lane] = lane_pass, batch
        self._where = _nonfinite_input(batch, indices)

        paths = module_names(lane_pass)

        def look_at(module: torch.nn.Module, _: object, output: Any) -> None:
            # inner modules end first: the first one is where the value arose
            if not (self._where or torch.compiler.is_compiling()) and not _is_finite(output):
                kind = type(module).__name__
                self._where = f"the output of {paths.get(id(module), kind)} ({kind})"

        hook = register_module_forward_hook(look_at)
        try:
            if self.request.debug and lane == self.request.lane:
                breakpoint()  # noqa: T100  what the option --debug is for
            yield
        finally:
            hook.remove()
            report.nonfinite = self._where or report.nonfinite

    def after_lane(self, lane_pass: LanePass, lane: int, gradients: Gradients) -> None:
        """Add the norms of a lane's gradients, one per parameter or None, by parameter group."""
        report = self._reports.get((lane_pass.seed[1], lane))
        if self._pass is None or report is None:  # the latter without samples
            return
        weight = lane_pass.weights.get(lane)
        scale = 1.0 if weight is None else float(weight.flatten()[0])
        squares: dict[str, float] = {}
        groups = self._groups()
        names = parameter_names(lane_pass)
        for parameter, gradient in zip(lane_pass.parameters, gradients, strict=True):
            if gradient is None:
                continue
            group = groups.get(id(parameter), "in no tracked optimizer")
            square = float(gradient.detach().double().square().sum())
            squares[group] = squares.get(group, 0.0) + square
            if not math.isfinite(square) and not (self._where or report.nonfinite):
                report.nonfinite = f"the gradient of {names.get(id(parameter), 'a parameter')}"
        report.norms = {
            group: math.sqrt(square) / scale if scale and not math.isnan(square) else math.nan
            for group, square in squares.items()
        }

    def _groups(self) -> dict[int, str]:
        """Return the parameter group of each parameter, by its id."""
        groups: dict[int, str] = {}
        for name, optimizer, shard in self._optimizers:
            if shard is not None:
                numbers = shard.groups()
            else:
                numbers = {
                    id(parameter): number
                    for number, group in enumerate(optimizer.param_groups)
                    for parameter in group["params"]
                }
            groups |= {place: f"{name} {number}" for place, number in numbers.items()}
        return groups

    def end(self, result: StepResult) -> None:
        """Add the results of all lanes; write the reports of this worker's lanes."""
        lane_pass, self._pass = self._pass, None
        if lane_pass is None:
            return
        batch, number = lane_pass.batch, lane_pass.seed[1]
        worst = self.request.lane
        # a loss of the whole batch is that of all lanes, so none is the worst
        if worst is None and result.results and not lane_pass.is_shared:
            losses = [lane.metrics["loss"] for lane in result.results]
            worst = result.results[worst_of(losses)].lane
        self._worst[number] = worst
        for lane in result.results:
            report = self._reports.get((number, lane.lane))
            if report is None or lane.rank != self._rank:
                continue
            report.count, report.metrics = lane.count, lane.metrics
            if not math.isfinite(lane.metrics["loss"]):
                report.nonfinite = report.nonfinite or "the loss, after all modules"
            report.samples = self._samples(batch, lane.lane, closely=lane.lane == worst)
        self._seen.clear()
        reports = [asdict(report) for report in self._reports.values()]
        text = to_json(
            {"reports": reports, "worst": [*self._worst.items()], "skipped": result.skipped or ""}
        )
        write_atomically(Path(self.request.folder) / f"replay-{self._rank}.json", text.encode())

    def _samples(self, batch: Batch, lane: int, *, closely: bool) -> list[list[Any]]:
        """Return [index, name, largest input, loss] of each sample of a lane."""
        indices = _indices(batch, lane)
        if indices is None:
            return []
        lane_pass, data = self._seen[lane]
        largest: list[float | None] = [None] * len(indices)
        losses = largest
        if closely and _has_rows(data, len(indices)):
            rows = [_row(data, number) for number in range(len(indices))]
            largest = [_largest(row) for row in rows]
            losses = _losses(lane_pass, lane, rows)
        dataset = None if batch.origin is None else batch.origin.dataset
        names = [name_of(dataset, index) for index in indices]
        return [list(sample) for sample in zip(indices, names, largest, losses, strict=True)]


def roots_of(lane_pass: LanePass) -> list[torch.nn.Module]:
    """Return the replicated modules."""
    context = lane_pass.context
    assert isinstance(context, LaneEngine)  # noqa: S101  the only one that trains
    return context.models.modules


def module_names(lane_pass: LanePass) -> dict[int, str]:
    """Return the name of each module by its id, as in the first replicated module that has it."""
    return {
        id(module): f"{type(root).__name__}.{path}".removesuffix(".")
        for root in reversed(roots_of(lane_pass))
        for path, module in root.named_modules()
    }


def parameter_names(lane_pass: LanePass) -> dict[int, str]:
    """Return the name of each parameter by its id, as in the first module that has it."""
    return {
        id(parameter): name
        for root in reversed(roots_of(lane_pass))
        for name, parameter in root.named_parameters()
    }


def _indices(batch: Batch, lane: int) -> list[int] | None:
    return None if batch.origin is None else batch.origin.indices(lane)


def _is_finite(value: Any) -> bool:
    return all(
        bool(tensor.isfinite().all()) for _, tensor in tensors_in(value) if _is_dense_float(tensor)
    )


def _is_dense_float(tensor: Tensor) -> bool:
    is_float = tensor.is_floating_point() or tensor.is_complex()
    return is_float and tensor.layout == torch.strided and not tensor.is_nested


def _nonfinite_input(batch: Any, indices: Sequence[int] | None) -> str:
    """Return which tensor and samples of a batch have values that are not finite, "" if none."""
    for name, tensor in tensors_in(batch):
        if not _is_dense_float(tensor) or _is_finite(tensor):
            continue
        text = f"{name or 'batch'!r} of the lane batch"
        if indices is not None and tensor.ndim and len(tensor) == len(indices):
            rows = (~tensor.isfinite()).reshape(len(tensor), -1).any(1).nonzero().flatten()
            text += f", sample {', '.join(str(indices[row]) for row in rows.tolist()[:8])}"
        return text
    return ""


def _has_rows(batch: Any, count: int) -> bool:
    """Return whether each tensor of a batch has a row for each of `count` samples."""
    tensors = [tensor for _, tensor in tensors_in(batch)]
    return bool(tensors) and all(tensor.ndim and len(tensor) == count for tensor in tensors)


def _row(batch: Any, number: int) -> Any:
    """Return the batch of one sample."""
    return mapped(
        batch, lambda part: part[number : number + 1] if isinstance(part, Tensor) else part
    )


def _largest(batch: Any) -> float | None:
    """Return the largest absolute value in the floating-point tensors of a batch."""
    values = [
        float(tensor.detach().abs().max())
        for _, tensor in tensors_in(batch)
        if _is_dense_float(tensor) and tensor.numel()
    ]
    return max(values, key=lambda value: math.inf if math.isnan(value) else value, default=None)


def _losses(lane_pass: LanePass, lane: int, rows: Sequence[Any]) -> list[float | None]:
    """Return the loss of each sample alone, None where the loss function needs others.

    A copy of the model computes them in evaluation mode, so that buffers stay as they are.
    """
    losses: list[float | None] = []
    loss, context, seed = lane_pass.loss, lane_pass.context, lane_pass.seed
    if loss.fn is None or loss.embed is not None:
        return [None] * len(rows)
    with suppress(Exception):  # of user code, which expects a lane
        model = deepcopy(loss.model).eval()  # a normalization of one sample has no spread
        for row in rows:
            value = None
            seeded = keyed(key(context.config.seed, "lane", *seed, lane))
            with suppress(Exception), seeded, context.autocast():
                value = float(split_loss(loss.fn(model, row), lane)[0].detach())
            losses.append(value)
    return losses or [None] * len(rows)
