"""Exact evaluation: every sample once, with the same bits at any number of workers.

The data set is cut into fixed blocks of consecutive samples, and each worker evaluates a contiguous
range of blocks. The result of a block does not depend on the worker. Means are rounded once, after
an exact sum over all blocks; metric objects are merged along a fixed tree over the blocks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from itertools import chain, cycle
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from samestep.data.agreement import DataCheck
from samestep.data.batch import Incomplete, begin_to_host, samples_in
from samestep.data.loader import Request, compared, load, size_of
from samestep.data.random_state import key, keyed
from samestep.errors import ConfigError, DataError, EvaluationError
from samestep.metrics import Means, Metric, as_metric, merged_values, unique
from samestep.step.guards import check_divisors
from samestep.step.lane_engine import LaneEngine
from samestep.step.lane_pass import Count, LaneResult, LossFn, counted
from samestep.step.lane_results import (
    has_entries,
    is_empty,
    read_together,
    sum_and_count,
    sum_of_entries,
)
from samestep.torch_internals import Divisor, begin_compiled_graphs, noted_means
from samestep.torchmetrics import TorchMetrics

# Metrics that were returned before. A metric that is returned twice holds samples of two blocks.
_RETURNED: WeakValueDictionary[int, Any] = WeakValueDictionary()


class Block(NamedTuple):
    """The collated batch of a block, and the number of samples from which it was made."""

    number: int
    batch: Any
    planned: int
    is_exact: bool

    def samples(self) -> int:
        """Return the number of samples. Raises `DataError` as `samples_in` does."""
        where = f"block {self.number} of the evaluation"
        return samples_in(self.batch, self.planned, where, is_exact=self.is_exact)


class Evaluation:
    """One pass of a model over this worker's blocks of a data set; its devices take turns."""

    def __init__(
        self,
        lanes: LaneEngine,
        dataset: Any,
        batch_size: int,
        check: DataCheck,
        *,
        collate_fn: Callable[[list[Any]], Any] | None,
        loader_workers: int,
    ) -> None:
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ConfigError(f"batch_size must be an integer of at least 1, got {batch_size!r}")
        size = size_of(dataset)
        if size == 0:
            raise DataError("the data set to evaluate has no samples; check its path and filters")
        self._lanes, self._world, self._dataset = lanes, lanes.world, dataset
        self._check = check
        self._collate_fn, self._loader_workers = collate_fn, loader_workers
        self._size, self._is_exact = size, collate_fn is None
        self._block_size = batch_size  # not divided by lanes, so that results do not depend on them
        self._blocks = blocks = -(-size // batch_size)
        rank, size = self._world.rank, self._world.size
        # Rounded up, so that rank 0 always has block 0.
        self._own_blocks = range(-(-rank * blocks // size), -(-(rank + 1) * blocks // size))
        self._numbers = [*self._own_blocks]  # that are computed
        if lanes.takes_turns:  # all workers call a sharded model as often: some repeat a block
            again = self._numbers[-1] if self._numbers else 0
            self._numbers += [again] * (-(-blocks // size) - len(self._numbers))
        self._means: list[tuple[Tensor, Divisor]] = []  # of the current block
        self._torchmetrics: dict[str, Any] = {}  # move between devices if they are used again

    def means(self, fn: LossFn, model: Any, count: Count | None) -> dict[str, Any]:
        """Return means over all samples (or items that `count` counts) and values of metrics."""
        # Per block: items, scalars and metrics. Scalars are tensors of one element or floats; they
        # stay on the device until every block has been started.
        blocks = []
        divisors: list[Tensor] = []  # of the means of all own blocks, float64 [] each
        kinds: list[str] = []  # by block
        noted = noted_means(lambda *pair: self._means.append(pair))
        with noted if count is None else nullcontext():
            for block, returned in self._outputs(fn, model):
                own_divisors = self._divisors_of(returned)
                divisors += [torch.as_tensor(part.value) for part in own_divisors]
                kinds.append("".join(part.kind for part in own_divisors))
                where = f"block {block.number}"
                items = counted(count, block.batch, where) if count else block.samples()
                blocks.append((items, *self._results(returned)))
        values = [value for _, scalars, _ in blocks for value in scalars.values()]
        # float64 values of the tensors, in the order of `values`: [value] or [sum, count]
        tensors = [value for value in values if isinstance(value, Tensor)]
        read = iter(read_together([*divisors, *tensors]))
        divided = [(named, [next(read)[0] for _ in named]) for named in kinds]
        own_results = [
            (
                items,
                {
                    name: _number(next(read)) if isinstance(value, Tensor) else value
                    for name, value in scalars.items()
                },
                sorted(metrics),  # JSON holds only their names; `merged_values` sends the metrics
                *divided_by,
            )
            for (items, scalars, metrics), divided_by in zip(blocks, divided, strict=True)
        ]
        gathered = self._check.compare(own_results, "gathering results of an evaluation")
        all_results = list(chain.from_iterable(gathered))  # by block: ranks hold consecutive blocks
        check_divisors(
            [
                (number, items, kinds, divisors)
                for number, (items, _, _, kinds, divisors) in enumerate(all_results)
                if items
            ],
            *("block", "run.evaluate", EvaluationError),
        )
        results = [LaneResult(0, 0, items, scalars) for items, scalars, *_ in all_results if items]
        if not results:
            raise EvaluationError("count must return at least 1 item over the data set, got 0")
        expected = all_results[0][2]
        for number, (_, _, names, *_) in enumerate(all_results):
            if names != expected:
                raise EvaluationError(
                    f"fn must return the same metrics for every block, got {expected} for block 0 "
                    f"and {names} for block {number}"
                )
        metrics = [block[2] for block in blocks]
        merged = (
            merged_values(self._world, self._own_blocks, self._blocks, metrics) if expected else {}
        )
        return unique(Means(results), merged)

    def _divisors_of(self, returned: Any) -> list[Divisor]:
        """Return what the mean losses that `fn` returned for a block are divided by.

        Others, such as those of single samples, may be averaged in any way.
        """
        means, self._means = self._means, []
        values = _named(returned).values()
        return [
            divisor
            for loss, divisor in means
            if any(
                value is loss or (isinstance(value, float) and value == float(loss))
                for value in values
            )
        ]

    def outputs(self, fn: LossFn, model: Any) -> Any:
        """Return the outputs of all samples in data set order on rank 0, None elsewhere."""
        own_outputs: list[Any] = []  # per block, on the CPU: parts [samples, ...] or lists
        begun: deque[tuple[Block, Callable[[], Any]]] = deque()
        forms: list[tuple[int, str]] = []  # of the first own block

        def end_first() -> None:
            block, end = begun.popleft()
            own_outputs.append(_checked(end(), block))
            form = (block.number, _form(own_outputs[-1]))
            _check_forms([*forms, form])
            forms[:] = forms or [form]

        for block, output in self._outputs(fn, model):
            begun.append((block, begin_to_host(output)))
            if len(begun) > len(self._lanes.devices):  # the device has its next block
                end_first()
        while begun:
            end_first()
        # All workers compare their data, but only rank 0 gets the outputs.
        compared_forms = self._check.compare(forms, "comparing the data of an evaluation")
        _check_forms([(number, form) for rank in compared_forms for number, form in rank])
        gathered = self._world.gather_object(own_outputs, "gathering outputs of an evaluation")
        return None if gathered is None else _joined(list(chain.from_iterable(gathered)))

    def _outputs(self, fn: LossFn, model: Any) -> Iterator[tuple[Block, Any]]:
        """Yield (block, what `fn` returned) for each of this worker's blocks."""
        lanes, replicas, size = self._lanes, self._lanes.replicas, self._block_size
        seed, samples = lanes.config.seed, range(self._size)
        spans = [samples[number * size : (number + 1) * size] for number in self._numbers]
        requests = [
            Request(f"block {number} of an evaluation", span, key(seed, "evaluate fetch", number))
            for number, span in zip(self._numbers, spans, strict=True)
        ]
        use = self._check.begin(self._dataset, len(samples), "an evaluation")
        is_due = use.is_due(use.earlier)
        if is_due:  # the first answer is then digests, not a batch
            requests.insert(0, compared(use, use.earlier))
        batches = load(
            self._dataset,
            requests,
            collate_fn=self._collate_fn,
            loader_workers=self._loader_workers,
            pin_memory=lanes.devices[0].type == "cuda",
        )
        if is_due:
            self._check.add(use, use.earlier, next(batches))
        replicas.refresh()
        after_block = lanes.plugins.blocks(fn, model, len(spans)) if self._blocks > 1 else []
        with evaluating(model), torch.no_grad(), lanes.keep_casts():
            # a model without replicas stays on the first device
            turns = cycle(replicas.holding(model))
            for place, (span, loaded) in enumerate(zip(spans, batches, strict=True)):
                number = self._numbers[place]
                replica = next(turns)
                data, planned = loaded if isinstance(loaded, Incomplete) else (loaded, len(span))
                # parts [samples, ...], or what collate_fn makes of a block's samples
                batch = replica.copier.begin(data)()
                block = Block(number, data, planned, self._is_exact)  # not on a GPU, to count it
                if batch is None:
                    raise EvaluationError(
                        f"block {number} of the evaluation has no samples, because collate_fn"
                        " returned None; increase batch_size or leave out broken samples beforehand"
                    )
                if len(replicas.all) > 1:
                    for metric in self._torchmetrics.values():
                        metric.to(replica.device)
                block_key = key(seed, "evaluate", number)
                begin_compiled_graphs(lanes.devices)
                with replicas.on(replica), keyed(block_key), lanes.autocast():
                    returned = fn(model, batch)
                for look in after_block:
                    look()
                if place < len(self._own_blocks):
                    yield block, returned

    def _results(self, returned: Any) -> tuple[dict[str, Any], dict[str, Metric]]:
        """Return the scalars and metrics of one block by name."""
        scalars, metrics = {}, {}
        for name, value in _named(returned).items():
            if (metric := as_metric(name, value)) is None:
                if not is_empty(value):
                    scalars[name] = _scalar(name, value)
                continue
            if _RETURNED.get(id(metric)) is metric:
                raise EvaluationError(
                    f"{name!r} was returned before; create a new {type(metric).__name__} per call"
                )
            try:
                _RETURNED[id(metric)] = metrics[name] = metric
            except TypeError:
                raise EvaluationError(
                    f"{type(metric).__name__} must support weak references; "
                    'add "__weakref__" to its __slots__'
                ) from None
        for name, each in metrics.items():
            if isinstance(each, TorchMetrics):
                each.reset()  # not earlier: accuracy and 1 - accuracy share a state
                self._torchmetrics[name] = each.metric
        return scalars, metrics


@contextmanager
def evaluating(model: Any) -> Iterator[None]:
    """Put a model's modules in evaluation mode, and restore each module's mode at the end."""
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
    """Return results by name from a loss, (loss, dict), or dict."""
    if isinstance(returned, dict):
        return returned
    if isinstance(returned, tuple):
        if len(returned) != 2 or not isinstance(returned[1], dict):
            kinds = ", ".join(type(value).__name__ for value in returned)
            raise EvaluationError(
                "fn must return a loss, (loss, dict of scalars and metrics by name) or such a dict,"
                f" got ({kinds}); put all values into the dict, or use gather=True for outputs"
            )
        return unique({"loss": returned[0]}, returned[1])
    return {"loss": returned}


def _number(values: list[float]) -> float | list[float]:
    return values if len(values) > 1 else values[0]


def _scalar(name: str, value: Any) -> Any:
    if has_entries(value) and name != "loss":  # a lone result without gather=True is a mistake
        return sum_of_entries(value)
    if isinstance(value, tuple) and name != "loss":
        return sum_and_count(name, value, EvaluationError)
    if isinstance(value, torch.Tensor) and value.numel() == 1:
        return value.detach().clone()
    try:
        return float(value)
    except (RuntimeError, TypeError, ValueError):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
        raise EvaluationError(
            f"{name!r} must be a scalar (the mean over the block's samples), booleans or integers"
            f" with an entry per item, or a metric, got {type(value).__name__}{shape}; use"
            " gather=True for one output per sample"
        ) from None


def _checked(output: Any, block: Block) -> Any:
    """Return the output of a block if each part of it has one entry per sample."""
    samples = block.planned
    with suppress(DataError):  # a batch that cannot be counted has the planned number
        samples = block.samples()
    parts = output.values() if isinstance(output, dict) else output
    for part in parts if isinstance(output, (dict, tuple)) else [output]:
        is_scalar = isinstance(part, torch.Tensor) and part.ndim == 0  # len() of one raises
        length = len(part) if hasattr(part, "__len__") and not is_scalar else None
        if length != samples:
            raise EvaluationError(
                f"outputs must have one entry per sample ({samples}), got {type(part).__name__} "
                f"of length {length}"
            )
    return output


def _form(output: Any) -> str:
    """Describe the containers and shapes of a block's outputs, which all blocks must share."""
    if isinstance(output, torch.Tensor):
        return f"tensor [{', '.join(map(str, ['samples', *output.shape[1:]]))}]"
    if isinstance(output, dict):
        return f"{{{', '.join(f'{name!r}: {_form(part)}' for name, part in output.items())}}}"
    if isinstance(output, tuple):
        return f"({', '.join(map(_form, output))})"
    return "list"


def _check_forms(forms: Sequence[tuple[int, str]]) -> None:
    """Raise `EvaluationError` if the outputs of two blocks, (number, form), cannot be joined."""
    for number, form in forms:
        if form != forms[0][1]:
            raise EvaluationError(
                "outputs must have the same shape in every block, except for the number of"
                f" samples, got {forms[0][1]} in block {forms[0][0]} and {form} in block {number};"
                " for outputs of unequal lengths, such as generated text, return a list with an"
                " entry per sample, for example [row[:length] for row, length in zip(ids, lengths)]"
            )


def _joined(outputs: Sequence[Any]) -> Any:
    """Join the outputs of blocks along samples, each part of a dict or tuple separately."""
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(outputs))  # [samples of all blocks, ...]
    if isinstance(first, dict):
        return {name: _joined([output[name] for output in outputs]) for name in first}
    if isinstance(first, tuple):
        return tuple(_joined(parts) for parts in zip(*outputs, strict=True))
    return list(chain.from_iterable(outputs))
