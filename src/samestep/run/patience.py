"""Early stopping."""

from __future__ import annotations

from typing import Any

from samestep.errors import ConfigError


class Patience:
    """Counts values in a row that are no improvement, to stop a run early.

    Track it, so that it continues after a resume. See `Prechelt, 1998
    <https://doi.org/10.1007/3-540-49430-8_3>`__.

    Args:
        patience: Number of values without an improvement after which to stop, at least 1.
        mode: "min" if lower values are better, such as losses, or "max".

    Attributes:
        best (float | None): The best value; of equal ones, the first. None before the first one.
        count (int): Number of values since then.

    Raises:
        ConfigError: `patience` or `mode` has another value.

    Example:
        >>> patience = ss.Patience(2)
        >>> [patience.step(loss) for loss in (0.9, 0.8, 0.8, 0.85)]
        [False, False, False, True]
        >>> patience.best, patience.count
        (0.8, 2)
    """

    def __init__(self, patience: int, *, mode: str = "min") -> None:
        if isinstance(patience, bool) or not isinstance(patience, int) or patience < 1:
            raise ConfigError(f"patience must be a whole number of at least 1, got {patience!r}")
        if mode not in {"min", "max"}:
            raise ConfigError(f"mode must be 'min' or 'max', got {mode!r}")
        self.patience, self.mode = patience, mode
        self.best: float | None = None
        self.count = 0

    def step(self, value: float) -> bool:
        """Count a value, the same one on all workers; return whether to stop.

        NaN is no improvement.
        """
        value = float(value)
        is_better = value == value and (  # noqa: PLR0124  not NaN
            self.best is None or (value < self.best if self.mode == "min" else value > self.best)
        )
        self.best, self.count = (value, 0) if is_better else (self.best, self.count + 1)
        return self.count >= self.patience

    def state_dict(self) -> dict[str, Any]:
        """Return the best value and the count; `patience` and `mode` belong to the script."""
        return {"best": self.best, "count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state."""
        self.best, self.count = state["best"], state["count"]
