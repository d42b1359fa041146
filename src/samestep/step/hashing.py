"""Hashes of the bytes of tensors, and texts of other values, by which workers compare them.

A GPU hashes its own memory, and sends 8 bytes per tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest, xxh3_64_intdigest

from samestep.data.nested import values_in

# GPUs hash this many bytes at a time: enough to keep one busy, little compared with its memory.
CHUNK_BYTES: Final = 1 << 26
# Shifts and multipliers of splitmix64 (Steele et al. 2014), as signed integers of 64 bits.
GOLDEN: Final = 0x9E3779B97F4A7C15 - (1 << 64)
MIXING: Final = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)))

# Not devices: workers have different ones.
PLAIN: Final = (
    bool, int, float, complex, str, bytes, type(None), np.generic, torch.dtype,
)  # fmt: skip


def texts_of(state: Any) -> dict[str, str]:
    """Return a text of each number, text, array and length in a nested state, by its path.

    Equal texts mean equal bits. Objects of other kinds have none.
    """
    texts = ((path, _text_of(value)) for path, value in values_in(state, "/"))
    return {path: text for path, text in texts if text is not None}


def _text_of(value: Any) -> str | None:
    if isinstance(value, PLAIN):
        return float.__repr__(value) if isinstance(value, float) else repr(value)
    if isinstance(value, (list, tuple)):
        return f"{len(value)} items"
    if isinstance(value, (set, frozenset)):  # their order differs between processes
        return str(sorted(map(repr, value)))
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return f"{value.dtype} {value.shape} {xxh3_64_hexdigest(value.tobytes())}"
    return None


def bytes_of(tensor: Tensor) -> Tensor:
    """Return the bytes of a tensor, uint8 [n], without a copy if it is contiguous."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def begin_hashes(tensors: Sequence[Tensor]) -> Callable[[], list[int]]:
    """Hash tensors of one device as they are now; return a call that returns a hash of each.

    Hashes of one kind of device can be compared. The call waits for a GPU.
    """
    # gradients of complex parameters may be conjugated when they are read
    tensors = [tensor.detach().resolve_conj().resolve_neg() for tensor in tensors]
    if not tensors or tensors[0].device.type == "cpu":
        hashes = [xxh3_64_intdigest(bytes_of(tensor).numpy().data) for tensor in tensors]
        return lambda: hashes
    on_device = device_hashes([*map(bytes_of, tensors)])  # int64 [tensors]
    return on_device.tolist


def hashes_of(tensors: Sequence[Tensor]) -> list[int]:
    """Return a hash of the bytes of each tensor; GPUs compute theirs, with one copy per device."""
    hashes = [0] * len(tensors)
    by_device: dict[torch.device, list[int]] = {}
    for number, tensor in enumerate(tensors):
        by_device.setdefault(tensor.device, []).append(number)
    for numbers in by_device.values():
        of_device = begin_hashes([tensors[number] for number in numbers])()
        for number, value in zip(numbers, of_device, strict=True):
            hashes[number] = value
    return hashes


def hash_of(values: Iterable[Tensor]) -> Tensor:
    """Return a hash, int64 [1], of uint8 [n] tensors, computed on their device.

    Every 8 bytes are mixed with their position. Their sum, of integers, is the same in any order.
    """
    sums = [words.sum() for words, _ in _mixed(values)]
    return torch.stack(sums).sum().view(1) if sums else torch.zeros(1, dtype=torch.int64)


def device_hashes(values: Sequence[Tensor]) -> Tensor:
    """Return a hash of each of the uint8 [n] tensors, int64 [tensors], computed on their device.

    The positions are those among the bytes of all tensors.
    """
    sums: list[list[Tensor]] = [[] for _ in values]  # of the pieces of each
    for words, pieces in _mixed(values):
        sizes = [size for _, size in pieces]
        for (number, _), piece in zip(pieces, words.split(sizes), strict=True):
            sums[number].append(piece.sum())
    return torch.stack([torch.stack(parts).sum() for parts in sums])


Pieces = list[tuple[int, int]]  # the tensor of each piece, by number, and its words


def _mixed(values: Iterable[Tensor]) -> Iterator[tuple[Tensor, Pieces]]:
    """Yield the mixed words of all tensors, int64 [bytes / 8], a chunk at a time."""
    # uint8 [at most CHUNK_BYTES]
    chunks = [
        (number, chunk) for number, value in enumerate(values) for chunk in value.split(CHUNK_BYTES)
    ]
    # Small tensors are joined up to a chunk: one kernel for many parameters.
    position, together, pieces, size = 0, list[Tensor](), Pieces(), 0
    for following, (number, chunk) in enumerate(chunks, start=1):
        together.append(torch.nn.functional.pad(chunk, (0, -len(chunk) % 8)))
        pieces.append((number, len(together[-1]) // 8))
        size += len(together[-1])
        if following == len(chunks) or size + len(chunks[following][1]) > CHUNK_BYTES:
            words = torch.cat(together).view(torch.int64)  # [bytes / 8]
            # int64 [bytes / 8]
            places = torch.arange(position, position + len(words), device=words.device)
            # Equal words in other places then count differently. Integers overflow the same way
            # everywhere.
            words.add_(places.add_(1).mul_(GOLDEN))
            for shift, factor in MIXING:
                logical = (1 << (64 - shift)) - 1  # `>>` copies the sign
                words.bitwise_xor_((words >> shift).bitwise_and_(logical)).mul_(factor)
            yield words, pieces
            position, together, pieces, size = position + len(words), [], [], 0
