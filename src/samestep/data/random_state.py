"""Keyed randomness: seeds, generators and permutations that depend only on a key."""

from __future__ import annotations

import ctypes
import hashlib
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from math import isqrt
from typing import Any, Final
from zlib import crc32

import numpy as np
import torch
from numpy.random import mtrand
from numpy.typing import ArrayLike, NDArray

from samestep.errors import DataError

_UNUSED: Final[list[np.random.MT19937]] = []  # bit generators not in use
_SEEDERS: Final[list[Callable[[int], Any]]] = []  # of user code
_STATE_BYTES: Final = 4 * (624 + 1)  # of MT19937 in NumPy: 624 words and a position


def key(seed: int, scope: str, *numbers: int) -> int:
    """Return 63 bits that depend on all arguments (BLAKE2b)."""
    text = ",".join([str(seed), scope, *map(str, numbers)]).encode(errors="surrogatepass")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def set_generators(value: int) -> None:
    """Seed every generator with `value` (NumPy's with its low 32 bits)."""
    random.seed(value)
    bits = mtrand.get_bit_generator()
    if isinstance(bits, np.random.MT19937):
        np.random.seed(value % 2**32)
    else:  # user code replaced the bit generator; NumPy can only seed MT19937
        bits.state = type(bits)(value % 2**32).state
    torch.default_generator.manual_seed(value)
    # torch.manual_seed would queue one call per uninitialized GPU library, each time
    if torch.cuda.is_initialized():
        for generator in torch.cuda.default_generators:
            generator.manual_seed(value)
    for number, seeder in enumerate(_SEEDERS):
        seeder(key(value, "seeder", number) % 2**32)


def add_seeder(seeder: Callable[[int], Any]) -> Callable[[], None]:
    """Call `seeder` with 32 bits in every `set_generators`; return a function that removes it."""
    _SEEDERS.append(seeder)
    return partial(_SEEDERS.remove, seeder)


@contextmanager
def keyed(value: int) -> Iterator[None]:
    """Seed every generator for the block, then restore their states."""
    with generators_restored():
        set_generators(value)
        yield


@contextmanager
def generators_restored() -> Iterator[None]:
    """Restore every generator's state after the block, which must call `set_generators` first."""
    generators = [
        torch.default_generator,
        *(torch.cuda.default_generators if torch.cuda.is_initialized() else ()),
    ]
    states = [generator.get_state() for generator in generators]
    state = random.getstate()
    with _numpy_restored():
        try:
            yield
        finally:
            random.setstate(state)
            for generator, generator_state in zip(generators, states, strict=True):
                generator.set_state(generator_state)


@contextmanager
def _numpy_restored() -> Iterator[None]:
    """Replace the bits of NumPy's global generator: far faster than setting its state."""
    bits, temporary = mtrand.get_bit_generator(), _UNUSED.pop() if _UNUSED else np.random.MT19937(0)
    cached = _take_cached_normal(bits)
    mtrand.set_bit_generator(temporary)
    try:
        yield
    finally:
        mtrand.set_bit_generator(bits)
        _UNUSED.append(temporary)
        if cached is not None:
            state = np.random.get_state(legacy=False)
            np.random.set_state({**state, "has_gauss": 1, "gauss": cached})


def numpy_position() -> int:
    """Return a number that identifies the position of NumPy's global generator."""
    bits = mtrand.get_bit_generator()
    if isinstance(bits, np.random.MT19937):
        return crc32(_state_of(bits))
    return crc32(repr(bits.state).encode())


def _state_of(bits: np.random.MT19937) -> bytes:
    return ctypes.string_at(bits.ctypes.state_address, _STATE_BYTES)


def _take_cached_normal(bits: np.random.BitGenerator) -> float | None:
    """Return the second of a pair of normal variates, if NumPy's global generator has cached it.

    Replacing the bits would discard it. Drawing detects it, because only a cached variate uses no
    bits; reading the state takes thirty times as long.
    """
    if not isinstance(bits, np.random.MT19937):
        state = np.random.get_state(legacy=False)
        return state["gauss"] if state["has_gauss"] else None
    before = _state_of(bits)
    drawn = np.random.standard_normal()
    if _state_of(bits) == before:
        return drawn
    ctypes.memmove(bits.ctypes.state_address, before, _STATE_BYTES)
    return None


ROUNDS: Final = 8
# Up to this size a table costs little, and a network would not make all orders equally likely.
SMALL: Final = 1024
# Positions that `span` evaluates together: enough that NumPy's arithmetic outweighs its calls.
BLOCK: Final = 8192
CACHED_BLOCKS: Final = 4
TABULATED: Final = 2**32  # up to this size, the tables of all rounds fit in 4 MiB

Values = NDArray[np.int64]
Round = Callable[[Values], Values]  # the value added to one half, as a function of the other


class Permutation:
    """A keyed permutation of `range(size)`; `permutation[positions]` is int64 of the same shape.

    A generalized Feistel network over Z_a x Z_b with cycle walking (Black and Rogaway, "Ciphers
    with arbitrary finite domains", CT-RSA 2002). a and b are near the root of `size`, so that the
    domain exceeds `size` by less than a and a walk of more than one cycle is rare. `size` is 1 to
    2**62; small permutations are sorted by random numbers.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 2**62:
            raise DataError(f"the size of a permutation must be 1 to 2**62, got {size}")
        self.size = size
        self._a = isqrt(size - 1) + 1
        self._b = -(-size // self._a)
        words = hashlib.blake2b(str(key).encode(), digest_size=8 * ROUNDS).digest()
        round_keys = np.frombuffer(words, dtype=np.uint64)
        self._rounds = [
            partial(_round, round_key, (self._a, self._b)[number % 2])
            for number, round_key in enumerate(round_keys)
        ]
        self._table = np.argsort(_mix(np.arange(size), round_keys[0])) if size <= SMALL else None
        self._blocks: dict[int, Values] = {}

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, positions: ArrayLike) -> Values:
        """Return the values at `positions`, each in [0, size); raises IndexError outside."""
        at = np.asarray(positions)
        if at.size and (at.min() < 0 or at.max() >= self.size):
            raise IndexError(f"positions must be in [0, {self.size}), got {at.min()} to {at.max()}")
        if self._table is not None:
            return self._table[at.astype(np.intp)]
        return self._evaluate(np.atleast_1d(at).astype(np.int64), self._rounds).reshape(at.shape)

    def inverse(self, values: ArrayLike) -> Values:
        """Return the positions of `values`, each in [0, size); raises IndexError outside."""
        of = np.asarray(values)
        if of.size and (of.min() < 0 or of.max() >= self.size):
            raise IndexError(f"values must be in [0, {self.size}), got {of.min()} to {of.max()}")
        if self._table is not None:
            return np.argsort(self._table)[of.astype(np.intp)]
        positions = self._backward(np.atleast_1d(of).astype(np.int64))
        while (outside := positions >= self.size).any():
            positions[outside] = self._backward(positions[outside])
        return positions.reshape(of.shape)

    def span(self, start: int, stop: int) -> Values:
        """Return the values at positions [start, stop), read-only.

        Complete blocks are evaluated and the last ones cached, so nearby spans take a fraction of
        the time of `permutation[positions]`. Raises IndexError outside [0, size].
        """
        if not 0 <= start <= stop <= self.size:
            raise IndexError(f"expected 0 <= start <= stop <= {self.size}, got {start} and {stop}")
        first, last = start // BLOCK, max(start, stop - 1) // BLOCK
        if first == last:
            values = self._block(first)
        else:
            values = np.concatenate([self._block(number) for number in range(first, last + 1)])
        return values[start - first * BLOCK : stop - first * BLOCK]

    def _block(self, number: int) -> Values:
        block = self._blocks.get(number)
        if block is None:
            positions = np.arange(number * BLOCK, min((number + 1) * BLOCK, self.size))
            tabulated = SMALL < self.size <= TABULATED
            block = self._evaluate(positions, self._tables) if tabulated else self[positions]
            block.flags.writeable = False
            if len(self._blocks) == CACHED_BLOCKS:
                self._blocks.pop(next(iter(self._blocks)))
            self._blocks[number] = block
        return block

    @cached_property
    def _tables(self) -> list[Round]:
        """The rounds as tables of O(sqrt(size)) values: a lookup is faster than the arithmetic."""
        return [
            one_round(np.arange((self._b, self._a)[number % 2])).__getitem__
            for number, one_round in enumerate(self._rounds)
        ]

    def _evaluate(self, x: Values, rounds: Sequence[Round]) -> Values:
        values = self._network(x, rounds)
        while (outside := values >= self.size).any():
            values[outside] = self._network(values[outside], rounds)
        return values

    def _network(self, x: Values, rounds: Sequence[Round]) -> Values:
        left = x // self._b
        right = x - left * self._b
        for number, one_round in enumerate(rounds):
            if number % 2 == 0:
                left += one_round(right)
                left -= self._a * (left >= self._a)
            else:
                right += one_round(left)
                right -= self._b * (right >= self._b)
        return left * self._b + right

    def _backward(self, y: Values) -> Values:
        """Undo `_network`: subtract what its rounds added, the last one first."""
        left = y // self._b
        right = y - left * self._b
        for number, one_round in reversed([*enumerate(self._rounds)]):
            if number % 2 == 0:
                left -= one_round(right)
                left += self._a * (left < 0)
            else:
                right -= one_round(left)
                right += self._b * (right < 0)
        return left * self._b + right


def _round(round_key: np.uint64, modulus: int, half: Values) -> Values:
    rounded: Values = (_mix(half, round_key) % np.uint64(modulus)).astype(np.int64)
    return rounded


def uniform(key: int, positions: Values) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each position, with 53 random bits that depend on the key."""
    bits = _mix(positions, np.uint64(key)) >> np.uint64(11)
    numbers: NDArray[np.float64] = bits.astype(np.float64) * np.float64(2.0**-53)
    return numbers


def _mix(x: Values, round_key: np.uint64) -> NDArray[np.uint64]:
    """Hash 64 bits with a key: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed: NDArray[np.uint64] = x.astype(np.uint64) + np.uint64(1)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15) ^ round_key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed ^= mixed >> np.uint64(31)
    return mixed
