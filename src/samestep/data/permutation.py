"""A random permutation with random access and O(1) memory."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from math import isqrt
from typing import Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from samestep.errors import DataError

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


def _round(round_key: np.uint64, modulus: int, half: Values) -> Values:
    return (_mix(half, round_key) % np.uint64(modulus)).astype(np.int64)


def _mix(x: Values, round_key: np.uint64) -> NDArray[np.uint64]:
    """Hash 64 bits with a key: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    mixed: NDArray[np.uint64] = x.astype(np.uint64) + np.uint64(1)
    mixed = mixed * np.uint64(0x9E3779B97F4A7C15) ^ round_key
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))
