"""CUDA graphs of the simulated devices: kernels are recorded without effect, and replayed.

As in CUDA, a graph has the arguments of its capture: numbers of Python, values of CPU scalars, and
the memory of tensors. Its results are in memory that its next replay writes, and a replay of
another graph of the same pool, too: of an earlier one, or of a later one at whose capture the
memory was free. What the host may not do during a capture is an error.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter
from threading import get_ident

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode
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
    """Records each kernel, with what it writes, for the graph that is captured now.

    After each node of a backward pass, autograd restores the recorder with which the pass began,
    although a hook may have continued with another graph.
    """

    graph: CUDAGraph | None = None

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if self.graph is None:
            return func(*args, **kwargs)
        return self.graph.record(func, args, kwargs)


def _frozen(part):
    """Return an argument as a graph keeps it: memory of a device, values of the host."""
    if not isinstance(part, torch.Tensor):
        return part
    return part.detach() if part.is_cuda else part.detach().clone()


class CUDAGraph:
    """`torch.cuda.CUDAGraph`."""

    def __init__(self) -> None:
        self._calls = []
        self._outside: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # memory, and its content
        self._inside: dict[int, torch.Tensor] = {}
        self._is_captured = False

    def capture_begin(self, pool=None, capture_error_mode="global") -> None:
        assert capture_error_mode == "thread_local"
        assert _Recorder.graph is None
        self._stream, self._pool = torch.cuda.current_stream(), pool
        self._thread = get_ident()
        # of earlier graphs
        self._occupied = {place for graph in _graphs.get(pool, []) for place in graph.in_use()}
        index = self._stream.device_index
        self._generator = torch.cuda.default_generators[index]
        self._seed = self._generator.get_state()
        LIBRARY.sim_capture(index, self._stream.stream_id)
        _Recorder.graph = self
        _Recorder().__enter__()

    def capture_end(self) -> None:
        if _Recorder.graph is not self:
            raise RuntimeError("capture_end() called before capture_begin().")
        if torch.cuda.current_stream() != self._stream:
            raise RuntimeError("Capture must end on the same stream it began on.")
        assert get_ident() == self._thread, "operation failed: the capture began in another thread"
        _Recorder.graph = None
        _pop_mode()
        LIBRARY.sim_capture(-1, -1)
        with torch.cuda.stream(torch.cuda.default_stream(self._stream.device)):
            for memory, before in self._outside.values():
                memory.copy_(before)  # nothing was computed
        self._generator.set_state(self._seed)
        if refusals:
            refusal = refusals.pop(0)  # one that is kept would keep the frames that raise it
            raise type(refusal)(*refusal.args)
        if all(func.is_view for func, *_ in self._calls):
            warnings.warn("The CUDA Graph is empty. This usually means ...", stacklevel=2)
        self._is_captured = True
        captures.append(self)
        _graphs.setdefault(self._pool, []).append(self)

    def record(self, func, args, kwargs):
        """Compute, and record it."""
        inputs = [part for part in tree_leaves((args, kwargs)) if isinstance(part, torch.Tensor)]
        for tensor in inputs:
            place = _memory(tensor)
            is_new = place not in self._inside and place not in self._outside
            if tensor.is_cuda and place and is_new:
                memory = _bytes_of(tensor)
                self._outside[place] = memory, memory.clone()
        outputs = func(*args, **kwargs)
        tensors = [part for part in tree_leaves(outputs) if isinstance(part, torch.Tensor)]
        if any(tensor.is_cuda for tensor in (*inputs, *tensors)):
            addresses = {_memory(tensor) for tensor in inputs}
            new = [_memory(tensor) not in addresses for tensor in tensors]
            for tensor, is_new in zip(tensors, new, strict=True):
                if is_new and tensor.is_cuda:
                    self._inside[_memory(tensor)] = _bytes_of(tensor)
            frozen = tree_map(_frozen, (args, kwargs))
            self._calls.append((func, frozen, [tensor.detach() for tensor in tensors], new))
        return outputs

    def in_use(self) -> set[int]:
        """Return the memory of this graph that has other owners than its own record."""
        own = Counter(self._inside.keys())
        for _, frozen, tensors, _ in self._calls:
            parts = (*tree_leaves(frozen), *tensors)
            own.update(_memory(part) for part in parts if isinstance(part, torch.Tensor))
        in_use = set()
        for place, memory in self._inside.items():
            storage = memory.untyped_storage()  # an owner itself
            if torch._C._storage_Use_Count(storage._cdata) > own[place] + 1:
                in_use.add(place)
        return in_use

    def spoil(self, kept) -> None:
        for place, memory in self._inside.items():
            if place not in kept:
                memory.fill_(GARBAGE)

    @torch.no_grad()
    def replay(self) -> None:
        assert self._is_captured
        is_earlier = True
        for other in _graphs[self._pool]:
            is_earlier &= other is not self
            other.spoil(self._occupied if is_earlier else ())
        with torch._C._AutoDispatchBelowADInplaceOrView():  # versions count calls of Python
            for func, (args, kwargs), tensors, new in self._calls:
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


def install() -> None:
    """Replace the graphs of `torch.cuda`."""
    torch.cuda.CUDAGraph = CUDAGraph
    torch.cuda.is_current_stream_capturing = lambda: bool(LIBRARY.sim_is_capturing())
    torch.cuda.graph_pool_handle = lambda: next(_pools)
