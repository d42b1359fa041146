"""Exact evaluation: every sample once, the same bits at any number of workers.

The data set is cut into fixed blocks of consecutive samples, which workers take in contiguous
ranges. What a block gives never depends on who computes it, and blocks are merged in their order at
the end, in one exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice
from typing import Any

import torch

from samestep.data.batch import to_device
from samestep.data.loader import Request, load
from samestep.data.random_state import key, keyed
from samestep.errors import ConfigError, DataError, EvaluationError
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import Count
from samestep.step.means import LaneResult, Means


@dataclass(frozen=True)
class BlockResult:
    """What the samples of one block gave; its means are read when all blocks are under way."""

    number: int
    count: int
    means: dict[str, Any]
    states: dict[str, dict[str, Any]]


class Evaluation:
    """One pass of a model over a data set: this worker's blocks of all, which its devices take in turns."""

    def __init__(
        self,
        lanes: LaneEngine,
        dataset: Any,
        batch_size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None,
        loader_workers: int,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(
                f"batch_size={batch_size!r} was given; expected a whole number of at least 1"
            )
        if len(dataset) == 0:
            raise DataError(
                "the data set to evaluate has no samples; expected at least 1: check its path and filters"
            )
        self._lanes, self._dataset, self._collate_fn, self._loader_workers = (
            lanes,
            dataset,
            collate_fn,
            loader_workers,
        )
        # of nothing else, so that the same bits come out at any number of lanes, too
        self._block_size = batch_size
        blocks, rank, workers = (
            -(-len(dataset) // self._block_size),
            lanes.world.rank,
            lanes.world.size,
        )
        self._metrics: dict[str, Any] = {}
        # rank 0 always has block 0
        self._own = range(-(-rank * blocks // workers), -(-(rank + 1) * blocks // workers))

    def means(
        self, fn: Callable[[Any, Any], Any], model: Any, count: Count | None
    ) -> dict[str, float]:
        """Return the means of what `fn` gives over all samples (or items that `count` counts), and merged metric objects' values."""
        blocks = [
            self._result(number, samples, batch, returned, count)
            for number, samples, batch, returned in self._outputs(fn, model)
        ]
        own = [
            replace(block, means={name: float(value) for name, value in block.means.items()})
            for block in blocks
        ]
        gathered = self._lanes.world.gather_object(own, "gathering results of an evaluation")
        found = (
            None
            if gathered is None
            else self._merge(list(chain.from_iterable(gathered)), self._metrics)
        )
        values = self._lanes.world.broadcast_object(found, "sharing results of an evaluation")
        if isinstance(values, EvaluationError):
            raise values
        return dict(values)

    def outputs(self, fn: Callable[[Any, Any], Any], model: Any) -> Any:
        """Return each sample's own output in data set order on rank 0, None elsewhere."""
        own, under_way = [], self._outputs(fn, model)
        # each device has a block before one is waited for
        while some := list(islice(under_way, len(self._lanes.devices))):
            own += [
                _checked(to_device(returned, "cpu"), samples) for _, samples, _, returned in some
            ]
        gathered = self._lanes.world.gather_object(own, "gathering outputs of an evaluation")
        return None if gathered is None else _joined(list(chain.from_iterable(gathered)))

    def _outputs(
        self, fn: Callable[[Any, Any], Any], model: Any
    ) -> Iterator[tuple[int, int, Any, Any]]:
        """Yield (block, samples in it, its batch, what `fn` returned for it)."""
        seed = self._lanes.config.seed
        size = self._block_size
        spans = {
            number: range(number * size, min((number + 1) * size, len(self._dataset)))
            for number in self._own
        }
        requests = [
            Request(f"block {n} of an evaluation", span, key(seed, "evaluate fetch", n))
            for n, span in spans.items()
        ]
        batches = load(
            self._dataset,
            requests,
            collate_fn=self._collate_fn,
            loader_workers=self._loader_workers,
            pin_memory=self._lanes.devices[0].type == "cuda",
        )
        replicas = self._lanes.replicas
        replicas.refresh()
        with evaluating(model), torch.no_grad():
            in_turns = cycle(replicas.holding(model))
            for (number, span), loaded in zip(spans.items(), batches, strict=True):
                replica = next(in_turns)
                batch = to_device(loaded, replica.device)
                if len(replicas.all) > 1:
                    for metric in self._metrics.values():
                        metric.to(replica.device)
                with (
                    replicas.on(replica),
                    keyed(key(seed, "evaluate", number)),
                    self._lanes.autocast(),
                ):
                    returned = fn(model, batch)
                yield number, len(span), batch, returned

    def _result(
        self, number: int, samples: int, batch: Any, returned: Any, count: Count | None
    ) -> BlockResult:
        means, states = {}, {}
        for name, value in _named(returned).items():
            if not hasattr(value, "compute"):
                means[name] = _scalar(name, value)
                continue
            # a MetricCollection has items
            for metric_name, metric in (
                value.items() if hasattr(value, "items") else [(name, value)]
            ):
                self._metrics[metric_name] = metric
                states[metric_name] = {
                    name: _copied(state, self._lanes.devices[0])
                    for name, state in metric.metric_state.items()
                }
            value.reset()
        return BlockResult(number, samples if count is None else int(count(batch)), means, states)

    @staticmethod
    def _merge(
        blocks: Sequence[BlockResult], metrics: Mapping[str, Any]
    ) -> dict[str, Any] | EvaluationError:
        results = [
            LaneResult(block.number, 0, block.count, block.means) for block in blocks if block.count
        ]
        if not results:  # the error is raised on every worker, not on this one alone
            return EvaluationError(
                "count gave 0 items for all of the data set; expected at least one item to evaluate"
            )
        values: dict[str, Any] = dict(Means(results))
        for name, metric in metrics.items():
            values[name] = merged_metric(
                metric, [block.states[name] for block in blocks if name in block.states]
            )
        return values


def merged_metric(metric: Any, states: Sequence[Mapping[str, Any]]) -> Any:
    """Return the value of a torchmetrics `Metric` over the states of blocks, merged as it merges those of processes."""
    # torchmetrics keeps no public list of them
    for name, reduction in metric._reductions.items():  # noqa: SLF001
        parts = [state[name] for state in states]
        if isinstance(parts[0], list):
            setattr(metric, name, list(chain.from_iterable(parts)))
        else:
            stacked = torch.stack(parts)
            setattr(metric, name, stacked if reduction is None else reduction(stacked))
    # otherwise compute warns that nothing was seen
    metric._update_count = len(states)  # noqa: SLF001
    # all is here: no exchange of its own
    available, metric.distributed_available_fn = metric.distributed_available_fn, lambda: False
    try:
        return _plain(metric.compute())
    finally:
        metric.distributed_available_fn = available
        metric.reset()


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model's modules in evaluation mode for a block, and each back as it was."""
    modules = list(model.modules()) if isinstance(model, torch.nn.Module) else []
    training = [module.training for module in modules]
    for module in modules:
        module.training = False
    try:
        yield
    finally:
        for module, mode in zip(modules, training, strict=True):
            module.training = mode


def _named(returned: Any) -> dict[str, Any]:
    """Return results by name: of a loss, (loss, dict), or dict."""
    if isinstance(returned, dict):
        return returned
    # (loss, dict)
    if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
        return {"loss": returned[0], **returned[1]}
    return {"loss": returned}


def _scalar(name: str, value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() != 1:
        raise EvaluationError(
            f"{name!r} is a tensor of shape {tuple(value.shape)}; expected a scalar, the mean over the block's samples, "
            "or gather=True for an output a sample"
        )
    try:
        return value.detach().clone() if isinstance(value, torch.Tensor) else float(value)
    except (TypeError, ValueError):
        raise EvaluationError(
            f"{name!r} is {type(value).__name__}; expected a scalar or a torchmetrics object"
        ) from None


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return float(value)
    return value.cpu() if isinstance(value, torch.Tensor) else value


def _copied(state: Any, device: torch.device) -> Any:
    return (
        [part.to(device, copy=True) for part in state]
        if isinstance(state, list)
        else state.to(device, copy=True)
    )


def _checked(output: Any, samples: int) -> Any:
    """Return a block's output if every part of it has one entry a sample."""
    parts = (
        output.values()
        if isinstance(output, dict)
        else output
        if isinstance(output, tuple)
        else [output]
    )
    for part in parts:
        scalar = isinstance(part, torch.Tensor) and part.ndim == 0
        length = len(part) if hasattr(part, "__len__") and not scalar else None
        if length != samples:
            raise EvaluationError(
                f"gather=True got {type(part).__name__} of length {length} for {samples} samples; expected one entry each"
            )
    return output


def _joined(outputs: Sequence[Any]) -> Any:
    """Join blocks' outputs: tensors and lists along samples, dicts and tuples part by part."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs))
    if isinstance(first, dict):
        return {name: _joined([output[name] for output in outputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(parts) for parts in zip(*outputs, strict=True))
    return list(chain.from_iterable(outputs))
