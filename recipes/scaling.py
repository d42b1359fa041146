"""Learning rates for another batch size, by the linear rule.

Goyal et al. 2017, arXiv 1706.02677.
"""

from __future__ import annotations

from collections.abc import Mapping


def scaled(rate: float, reference: int | None, batch_size: int) -> float:
    """Return a learning rate at `batch_size`; without a reference batch size, it is not scaled."""
    return rate * batch_size / (reference or batch_size)


def describe_scaling(rates: Mapping[str, float], reference: int | None, batch_size: int) -> str:
    """Describe learning rates, by what they are called, and how they were scaled."""
    texts = (f"{name} {scaled(rate, reference, batch_size):g}" for name, rate in rates.items())
    now = ", ".join(texts)
    if reference is None:
        return f"{now}, not scaled with the batch size"
    before = ", ".join(f"{rate:g}" for rate in rates.values())
    return f"{now} at batch size {batch_size}, scaled from {before} at batch size {reference}"
