"""CUDA graphs of the simulated devices: kernels are recorded without effect, and replayed.

As in CUDA, a graph has the arguments of its capture: numbers of Python, values of CPU scalars, and
the memory of tensors. Its results are in memory that its next replay writes, and a replay of
another graph of the same pool, too. What the host may not do during a capture is an error.
"""

from __future__ import annotations

import itertools
from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.gpu.simulated import device

LIBRARY = device.LIBRARY
GARBAGE = 0xFF
_pools = itertools.count(1)
_graphs: dict[int, list[CUDAGraph]] = {}  # by pool
captures: list[CUDAGraph] = []
refusals: list[Exception] = []  # to raise in the next captures


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    storage = tensor.untyped_storage()
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class _Recorder(TorchDispatchMode):
    """Records each kernel, with what it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = []
        self.outside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # memory, and its content
        self.inside: dict[int, torch.Tensor] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        inputs = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        for tensor in inputs:
            place = _memory(tensor)
            if tensor.is_cuda and place and place not in self.inside and place not in self.outside:
                memory = _bytes_of(tensor)
                self.outside[place] = memory, memory.clone()
        outputs = func(*args, **kwargs)
        tensors = [part for part in tree_leaves(outputs) if isinstance(part, torch.Tensor)]
        if any(tensor.is_cuda for tensor in (*inputs, *tensors)):
            addresses = {_memory(tensor) for tensor in inputs}
            new = [_memory(tensor) not in addresses for tensor in tensors]
            for tensor, is_new in zip(tensors, new, strict=True):
                if is_new and tensor.is_cuda:
                    self.inside[_memory(tensor)] = _bytes_of(tensor)
            frozen = tree_map(_frozen, (args, kwargs))
            self.calls.append((func, frozen, [tensor.detach() for tensor in tensors], new))
        return outputs


def _frozen(part):
    """Return an argument as a graph keeps it: memory of a device, values of the host."""
    if not isinstance(part, torch.Tensor):
        return part
    return part.detach() if part.is_cuda else part.detach().clone()


class CUDAGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._recorder = _Recorder()
        self._is_captured = False

    def begin(self, pool, stream) -> None:
        self._stream, self._pool = stream, pool
        generator = torch.cuda.default_generators[stream.device_index]
        self._generator, self._seed = generator, generator.get_state()
        LIBRARY.sim_capture(stream.device_index, stream.stream_id)
        self._recorder.__enter__()

    def end(self, outer: int) -> None:
        """End the capture; work that is not captured goes to the stream `outer`."""
        LIBRARY.sim_exchange_stream(self._stream.device_index, outer)
        self._recorder.__exit__(None, None, None)
        LIBRARY.sim_capture(-1, -1)
        for memory, before in self._recorder.outside.values():
            memory.copy_(before)  # nothing was computed
        self._spoil()
        self._generator.set_state(self._seed)
        if refusals:  # torch stays in the stream of the capture
            LIBRARY.sim_exchange_stream(self._stream.device_index, self._stream.stream_id)
            raise refusals.pop(0)
        self._is_captured = True
        captures.append(self)
        _graphs.setdefault(self._pool, []).append(self)

    def _spoil(self) -> None:
        for memory in self._recorder.inside.values():
            memory.fill_(GARBAGE)

    @torch.no_grad()
    def replay(self) -> None:
        assert self._is_captured
        for other in _graphs[self._pool]:
            other._spoil()
        with torch._C._AutoDispatchBelowADInplaceOrView():  # versions count calls of Python
            for func, (args, kwargs), tensors, new in self._recorder.calls:
                if not any(new) and not func._schema.is_mutable and not _writes(func):
                    continue  # a view
                outputs = [
                    part
                    for part in tree_leaves(func(*args, **kwargs))
                    if isinstance(part, torch.Tensor)
                ]
                for tensor, output, is_new in zip(tensors, outputs, new, strict=True):
                    if is_new:
                        tensor.copy_(output)


def _writes(func) -> bool:
    """Return whether a kernel writes to what its schema does not say: statistics of BatchNorm."""
    return "batch_norm" in func._schema.name


@contextmanager
def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
    """Capture, as `torch.cuda.graph` does."""
    assert capture_error_mode == "thread_local"
    before = LIBRARY.sim_exchange_stream(stream.device_index, stream.stream_id)
    cuda_graph.begin(pool, stream)
    try:
        yield
    finally:
        cuda_graph.end(before)


def install() -> None:
    """Replace the graphs of `torch.cuda`, and its search for waits."""
    torch.cuda.CUDAGraph, torch.cuda.graph = CUDAGraph, graph
    torch.cuda.is_current_stream_capturing = lambda: bool(LIBRARY.sim_is_capturing())
    torch.cuda.graph_pool_handle = lambda: next(_pools)
    torch.cuda.get_sync_debug_mode = LIBRARY.sim_sync_debug_mode
    torch.cuda.set_sync_debug_mode = lambda mode: LIBRARY.sim_set_sync_debug_mode(
        {"default": 0, "warn": 1}.get(mode, mode)
    )
