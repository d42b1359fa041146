"""The SHA-256 of the state in a snapshot: the same, whatever number of workers wrote it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

from samestep.errors import SnapshotError
from samestep.snapshot.manifest import Manifest
from samestep.snapshot.read import inspect
from samestep.snapshot.state import canonical, no_tensor, restore
from samestep.storage import open_regular

RUN: Final = "run"  # the state of the run itself, which has times and options
CHUNK_BYTES: Final = 2**22
SMALL_BYTES: Final = 2**26  # so much is read at once: small states always have a digest


def state_digest(path: Path, is_given_up: Callable[[], bool] = lambda: False) -> str | None:
    """Return the SHA-256 of all tracked objects in a snapshot, None if a large one is given up.

    It is that of the plain state, and of each tensor in the order of names: its specification, and
    its bytes in storage order. Reads every byte once, in little memory, without checking the
    snapshot's own checksums. Raises `SnapshotError` if the snapshot is incomplete, and `OSError`.
    """
    manifest = inspect(path)
    objects = [pair for pair in manifest.state["dict"] if pair[0] != RUN]
    digest = hashlib.sha256(canonical(sorted_plain({"dict": objects})).encode())
    files, size = list[int](), 0
    with ExitStack() as opened:
        for file in manifest.files:
            files.append(open_regular(path / file.name))
            opened.callback(os.close, files[-1])
        for name, spec in sorted(manifest.specs.items()):
            if name.partition("/")[0] == RUN:
                continue
            digest.update(canonical([name, spec.to_json()]).encode())
            for piece in manifest.pieces[name]:
                start = piece.offset
                stop = start + (piece.stop - piece.start) * spec.dtype.itemsize
                while start < stop:
                    chunk = os.pread(files[piece.file], min(CHUNK_BYTES, stop - start), start)
                    if not chunk:
                        short = path / manifest.files[piece.file].name
                        raise SnapshotError(f"{short} is shorter than its manifest says")
                    digest.update(chunk)
                    start, size = start + len(chunk), size + len(chunk)
                    if size > SMALL_BYTES and is_given_up():
                        return None
    return digest.hexdigest()


def run_state(manifest: Manifest, name: str) -> Any:
    """Return a plain value of the run's own state in a snapshot, None if it is not there."""
    pairs = manifest.state["dict"]
    for key in (RUN, name):
        plain: Any = next((value for found, value in pairs if found == key), {})
        pairs = plain.get("dict", []) if isinstance(plain, dict) else []
    return restore(plain, no_tensor) if plain != {} else None


def sorted_plain(plain: Any) -> Any:
    """Return plain state with sorted dicts: the order of keys depends on the worker that saves."""
    if isinstance(plain, dict):
        return {
            tag: sorted(map(sorted_plain, value), key=canonical)
            if tag == "dict"
            else sorted_plain(value)
            for tag, value in plain.items()
        }
    return [sorted_plain(value) for value in plain] if isinstance(plain, list) else plain
