"""Exponential moving averages of curves."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK: Final = 64


class Average:
    """The exponential moving average of values that more are appended to, with the bias of its start taken out.

    m_t = weight * m_(t-1) + (1 - weight) * x_t from m_0 = 0, divided by 1 - weight**t: the
    correction of Adam (Kingma and Ba 2015, section 3), so that the first values are not drawn to 0.
    Values that are no finite numbers are passed over; there it is NaN. Averages over blocks are
    products with one triangular matrix; what follows a block weighs its end less and less.
    """

    def __init__(self, weight: float) -> None:
        """Average with `weight` on what came before, 0 to below 1."""
        self.weight = weight
        powers = np.arange(BLOCK)[:, None] - np.arange(BLOCK)[None, :]
        # [BLOCK, BLOCK]
        self._within = np.where(powers >= 0, (1 - weight) * weight ** np.maximum(powers, 0), 0.0)
        self._decay = weight ** np.arange(1, BLOCK + 1)
        self._carry = 0.0  # the average at the end of all whole blocks
        self._done = np.empty(0)  # of all values up to the end of the last whole block
        self._finite = 0  # how many values that end is after

    def over(self, values: NDArray[Any]) -> NDArray[Any]:
        """Return the average at each of `values`, which begin with those of the call before, float64 [N]."""
        start = len(self._done)
        is_finite = np.isfinite(values[start:])
        fresh = values[start:][is_finite]
        averages, carries = self._averages(fresh)
        result = np.full(len(values) - start, np.nan)
        result[is_finite] = averages
        whole = len(fresh) // BLOCK
        if whole:
            end = int(np.flatnonzero(is_finite)[whole * BLOCK - 1]) + 1
            self._done = np.concatenate([self._done, result[:end]])
            self._carry = carries[whole]
            self._finite += whole * BLOCK
            return np.concatenate([self._done, result[end:]])
        return np.concatenate([self._done, result])

    def _averages(self, values: NDArray[Any]) -> tuple[NDArray[Any], list[float]]:
        """Return the corrected averages at finite values, and the uncorrected ones before each block and after the last."""
        count = len(values)
        blocks = -(-count // BLOCK)
        padded = np.zeros(blocks * BLOCK)
        padded[:count] = values
        raw = padded.reshape(blocks, BLOCK) @ self._within.T  # [blocks, BLOCK]
        carries = [self._carry]
        decay = float(self._decay[-1])
        for end in raw[:, -1].tolist():
            carries.append(end + decay * carries[-1])
        raw += np.asarray(carries[:-1])[:, None] * self._decay
        corrections = 1 - self.weight ** np.arange(self._finite + 1.0, self._finite + count + 1.0)
        return raw.reshape(-1)[:count] / corrections, carries
