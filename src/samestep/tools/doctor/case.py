"""What the examination is about: a machine, and the run that it is to carry."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from samestep.tools.doctor.gpus import Gpu
    from samestep.tools.doctor.system import System


@dataclass(frozen=True)
class Case:
    """A run of so many `workers` on this `system`, in a `directory`.

    `torch` is what a process that had imported torch told of it and of its measurements; `failure`
    says why it told nothing.
    """

    system: System
    directory: Path
    workers: int
    gpus: Sequence[Gpu] = ()
    torch: Mapping[str, Any] = field(default_factory=dict)
    failure: str = ""
