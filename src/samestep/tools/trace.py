"""What a run's steps left behind, as hashes that can be compared."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from samestep.errors import RecordError, VerifyError
from samestep.record import read_events
from samestep.snapshot.read import list_snapshots, load
from samestep.snapshot.state import flatten

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path


@dataclass(frozen=True)
class StepTrace:
    """A completed step: a hash by name for its metrics, the tensors of modules, and all other tracked state."""

    step: int
    hashes: Mapping[str, str]

    def digest(self) -> str:
        """Return one short hash of everything."""
        return _hash(json.dumps(sorted(self.hashes.items())).encode())[:12]

    def first_difference(self, other: StepTrace) -> str | None:
        """Return the first name whose hash differs, metrics first, then tensors in their order."""
        names = dict.fromkeys([*self.hashes, *other.hashes])
        return next(
            (name for name in names if self.hashes.get(name) != other.hashes.get(name)), None
        )


def read_traces(directory: Path) -> list[StepTrace]:
    """Return the traces of the steps that a run directory holds snapshots of, in order."""
    metrics: dict[int, dict[str, float]] = {}
    for event in read_events(directory):
        if event["event"] == "scalars":
            metrics.setdefault(event["step"] + 1, {}).update(_plain(event["values"]))
    traces = []
    for path in list_snapshots(directory):
        snapshot = load(path)
        hashes = {
            f"metric {name}": _hash(repr(value).encode())
            for name, value in metrics.get(snapshot.step, {}).items()
        }
        for name, state in snapshot.state.items():
            plain, tensors = flatten({name: state})
            hashes.update((path, _hash_tensor(tensor)) for path, tensor in tensors.items())
            hashes[f"plain state of {name}"] = _hash(json.dumps(_sorted(plain)).encode())
        traces.append(StepTrace(snapshot.step, hashes))
    return traces


def read_start(directory: Path) -> dict[str, Any]:
    """Return the event with which the newest attempt of a run started. Raises `VerifyError` where there is none."""
    try:
        return [
            event for event in read_events(directory) if event["event"] in {"started", "resumed"}
        ][-1]
    except (RecordError, IndexError):
        raise VerifyError("the script started no run: it never called samestep.init") from None


def _plain(values: Mapping[str, float]) -> dict[str, float]:
    return {name: math.nan if math.isnan(value) else value for name, value in values.items()}


def _sorted(plain: Any) -> Any:
    """Return a plain state with the pairs of its dicts in one order: workers' parts of it come in any."""
    if isinstance(plain, dict):
        return {
            tag: sorted(map(_sorted, value), key=json.dumps) if tag == "dict" else _sorted(value)
            for tag, value in plain.items()
        }
    return [_sorted(value) for value in plain] if isinstance(plain, list) else plain


def _hash_tensor(tensor: Any) -> str:
    whole = tensor.detach().contiguous()
    return _hash(
        f"{whole.dtype} {tuple(whole.shape)}".encode()
        + whole.reshape(-1).view(torch.uint8).numpy().tobytes()
    )


def _hash(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
