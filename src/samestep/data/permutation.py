"""A random permutation with random access and O(1) memory."""

from __future__ import annotations

import hashlib
from math import isqrt
from typing import TYPE_CHECKING, Final

import numpy as np

from samestep.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike, NDArray

ROUNDS: Final = 8
SMALL: Final = 1024  # up to here a table costs little, and a network would not make all orders equally likely


class Permutation:
    """A keyed permutation of `range(size)`: `permutation[positions]` gives int64 values of the same shape.

    A generalised Feistel network over Z_a x Z_b with cycle walking (Black and Rogaway, "Ciphers with
    arbitrary finite domains", CT-RSA 2002). a and b are near the root of `size`, so that the domain
    exceeds `size` by less than a and a walk of more than one cycle is rare. `size` is 1 to 2**62; small ones are
    sorted by random numbers.
    """

    def __init__(self, size: int, key: int) -> None:
        if not 1 <= size <= 2**62:
            raise DataError(f"a permutation of {size} items was asked for; expected 1 to 2**62")
        self.size = size
        self._a = np.uint64(isqrt(size - 1) + 1)
        self._b = np.uint64(-(-size // int(self._a)))
        words = hashlib.blake2b(str(key).encode(), digest_size=8 * ROUNDS).digest()
        self._round_keys = np.frombuffer(words, dtype=np.uint64)
        self._table = np.argsort(_mix(np.arange(size, dtype=np.uint64), self._round_keys[0])) if size <= SMALL else None

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, positions: ArrayLike) -> NDArray[np.int64]:
        """Return the values at `positions`, each in [0, size); raises IndexError outside."""
        at = np.asarray(positions)
        if at.size and (at.min() < 0 or at.max() >= self.size):
            raise IndexError(f"positions {at.min()} to {at.max()} of a permutation of {self.size} items")
        if self._table is not None:
            return self._table[at.astype(np.intp)]
        values = self._network(np.atleast_1d(at).astype(np.uint64))
        while (outside := values >= self.size).any():
            values[outside] = self._network(values[outside])
        return values.astype(np.int64).reshape(at.shape)

    def _network(self, x: NDArray[np.uint64]) -> NDArray[np.uint64]:
        left, right = x // self._b, x % self._b
        for number, round_key in enumerate(self._round_keys):
            if number % 2 == 0:
                left = (left + _mix(right, round_key) % self._a) % self._a
            else:
                right = (right + _mix(left, round_key) % self._b) % self._b
        return left * self._b + right


def _mix(x: NDArray[np.uint64], round_key: np.uint64) -> NDArray[np.uint64]:
    """Hash 64 bits with a key: the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    x = (x + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15) ^ round_key
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
