"""Targets that read snapshots, parts that workers write before a commit, and torch checkpoints."""

from __future__ import annotations

import json
import math
import threading
import warnings
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
from torch.distributed import checkpoint

from samestep.errors import SnapshotError
from samestep.snapshot import load
from samestep.snapshot.commit import CommitProtocol, combine
from samestep.snapshot.dcp import METADATA, read_dcp
from samestep.snapshot.files import checksum
from samestep.snapshot.manifest import NAME, Manifest
from samestep.snapshot.owner import Owner
from samestep.snapshot.state import canonical, flatten, no_tensor, restore
from tests.fuzz import mutate
from tests.fuzz.target import Target
from tests.snapshot.saving import small_state, team


def targets(folder: Path) -> list[Target]:
    """Return the targets that read snapshots; their files are under `folder`."""
    return [*_read(folder), *_commits(folder), *_checkpoints(folder)]


def _saved(folder: Path) -> dict[str, bytes]:
    """Return the files of a snapshot of two workers."""
    with team(folder, 2) as (writers, _):
        for writer in writers:
            writer.save(2, small_state(2), {}, {"note": [1, "two", (3.0, None)]}, 0.5)
        for writer in writers:
            writer.wait()
    return {path.name: path.read_bytes() for path in (folder / "step-00000002").iterdir()}


def _signed(body: dict[str, Any]) -> bytes:
    """Return a manifest with a valid checksum if it can be serialized."""
    body = {name: value for name, value in body.items() if name != "checksum"}
    with suppress(ValueError):
        body["checksum"] = checksum(canonical(body).encode())
    return json.dumps(body, sort_keys=True, separators=(",", ":")).encode()


def _read(folder: Path) -> list[Target]:
    saved = _saved(folder / "saved")
    body = json.loads(saved[NAME])
    place = folder / "step-00000002"
    place.mkdir()
    values = {"a": [1, 2.5, "three", (None, {4})], "b": b"seven", "c": 8j, "d": torch.float16}
    plain, _ = flatten({**values, 5: np.float32(6)})

    def manifest(random: Random) -> bytes:
        what = random.random()
        if what < 0.3:
            return mutate.of_bytes(random, saved[NAME])
        changed = mutate.of_json(random, body)
        is_signed = what < 0.8 and isinstance(changed, dict)
        return _signed(changed) if is_signed else mutate.as_json(random, changed)

    def snapshot(random: Random) -> Path:
        files = dict(saved)
        if random.random() < 0.7:
            files[NAME] = manifest(random)
        else:
            name = random.choice(sorted(saved))
            files[name] = mutate.of_bytes(random, saved[name])
            changed = json.loads(saved[NAME])
            for file in changed["files"]:
                content = files[file[0]]
                file[1:] = [len(content), 2**20, [checksum(content)] if content else []]
            files[NAME] = _signed(changed)
        for name, content in files.items():
            (place / name).write_bytes(content)
        return place

    owner = json.loads(Owner("0" * 16, "/runs/one", "train.py", origin=("1" * 16, 3)).to_bytes())

    def changed_owner(random: Random) -> bytes:
        return mutate.as_json(random, mutate.of_json(random, owner))

    def read_owner(data: bytes) -> None:
        read = Owner.from_bytes(data, "run")
        assert str(read).isprintable()
        assert Owner.from_bytes(read.to_bytes(), "run") == read or math.isnan(read.beat)

    def state(random: Random) -> Any:
        changed = mutate.of_json(random, plain)
        with suppress(RecursionError, ValueError):
            changed = json.loads(mutate.as_json(random, changed))
        return changed

    return [
        Target("manifest", manifest, Manifest.from_bytes, (SnapshotError,)),
        Target("snapshot", snapshot, load, (SnapshotError,)),
        Target("owner", changed_owner, read_owner, (SnapshotError,)),
        Target("state", state, lambda flattened: restore(flattened, no_tensor), (SnapshotError,)),
    ]


def _commits(folder: Path) -> list[Target]:
    """Any error is allowed here, because the writer turns it into a `SnapshotError`."""
    meetings = [
        CommitProtocol(folder / "met", "first", rank, 2, 0.0, threading.Event())
        for rank in range(2)
    ]
    (folder / "met").mkdir()
    manifest = json.loads(_saved(folder / "parts")[NAME])
    entries = {name: form for name, (form, _) in manifest["tensors"].items()}
    pieces = [
        (name, piece)
        for name, (_, tensor_pieces) in manifest["tensors"].items()
        for piece in tensor_pieces
    ]
    parts = [
        {
            "state": manifest["state"] if rank == 0 else {"dict": []},
            "specs": entries,
            "pieces": [
                [name, start, stop, offset, None]
                for name, (file, start, stop, offset) in pieces
                if file == rank
            ],
            "file": manifest["files"][rank],
        }
        for rank in range(2)
    ]

    def part(random: Random) -> CommitProtocol:
        for rank, intact_part in enumerate(parts):
            plain = mutate.of_json(random, intact_part) if random.random() < 0.6 else intact_part
            changed = mutate.as_json(random, plain)
            path = meetings[0].directory / f"part-first-{rank}.json"
            path.write_bytes(mutate.of_bytes(random, changed) if random.random() < 0.2 else changed)
        return meetings[0]

    def commit(meeting: CommitProtocol) -> None:
        combine(meeting.receive_parts(), step=2, attempt="first", info={}, score=None).to_bytes()

    def failed(random: Random) -> CommitProtocol:
        reason = "worker 0 could not write its part: disque plein, désolé"
        words = mutate.of_bytes(random, reason.encode())
        (meetings[1].directory / "failed-second-0.txt").write_bytes(words)
        return CommitProtocol(folder / "met", "second", 1, 2, 0.0, threading.Event())

    return [
        Target("part", part, commit, (Exception,)),
        Target("failed", failed, CommitProtocol.receive_parts, (Exception,)),
    ]


def _checkpoints(folder: Path) -> list[Target]:
    place = folder / "checkpoint"
    state = {"model": {"weight": torch.arange(6.0).view(2, 3), "bias": torch.ones(3)}, "step": 7}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as it should be
        checkpoint.save(state, checkpoint_id=place, no_dist=True)
    saved = {path.name: path.read_bytes() for path in sorted(place.iterdir())}

    def damaged(random: Random) -> Path:
        for name, content in saved.items():
            is_changed = random.random() < (0.7 if name == METADATA else 0.4)
            (place / name).write_bytes(mutate.of_bytes(random, content) if is_changed else content)
        return place

    return [Target("checkpoint", damaged, read_dcp, (SnapshotError,))]
