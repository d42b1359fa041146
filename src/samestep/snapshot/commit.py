"""From the workers' parts to one manifest."""

from __future__ import annotations

import time
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch

from samestep.errors import SnapshotError
from samestep.snapshot.manifest import Form, Manifest, Piece
from samestep.snapshot.state import merge

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from samestep.snapshot.part import Part


def combined(
    parts: Sequence[Part], *, step: int, attempt: str, info: Mapping[str, Any], score: float | None
) -> Manifest:
    """Put the parts of all workers together, by rank.

    Raises `SnapshotError` where they differ in what they should hold alike, or do not make up every
    tensor.
    """
    return Manifest(
        step=step,
        attempt=attempt,
        created=time.time(),
        workers=len(parts),
        torch=str(torch.__version__),
        score=score,
        info=info,
        state=reduce(merge, (part.state for part in parts)),
        forms=_forms(parts),
        pieces=_pieces(parts),
        files=tuple(part.file for part in parts),
    )


def _forms(parts: Sequence[Part]) -> dict[str, Form]:
    forms: dict[str, Form] = {}
    for rank, part in enumerate(parts):
        for name, form in part.forms.items():
            if forms.setdefault(name, form) != form:
                raise SnapshotError(
                    f"worker {rank} holds tensor {name} as {form.to_json()}, a worker before it as {forms[name].to_json()}"
                )
    return forms


def _pieces(parts: Sequence[Part]) -> dict[str, tuple[Piece, ...]]:
    """Return the pieces of each tensor; of those that several workers wrote alike, the first."""
    pieces: dict[str, list[Piece]] = {name: [] for part in parts for name in part.forms}
    digests: dict[tuple[str, int, int], str | None] = {}
    for rank, part in enumerate(parts):
        for name, start, stop, offset, digest in part.pieces:
            known = digests.setdefault((name, start, stop), digest)
            if known != digest:
                raise SnapshotError(
                    f"worker {rank} holds other values of tensor {name} than a worker before it; expected equal ones"
                )
            if digest is None or not any(
                (piece.start, piece.stop) == (start, stop) for piece in pieces[name]
            ):
                pieces[name].append(Piece(rank, start, stop, offset))
    return {
        name: tuple(sorted(found, key=lambda piece: piece.start)) for name, found in pieces.items()
    }
