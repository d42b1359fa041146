"""Targets that read what an earlier process of a run left: memory, locks and whole snapshots."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from safetensors import safe_open

from recipes.detect.coco import AnnotationError, read_annotations
from samestep.comm.base import Alone
from samestep.errors import ConfigError, RecordError, SnapshotError
from samestep.handoff import LauncherState
from samestep.host import anonymous_file, read_secret
from samestep.record.files import DirectoryLock
from samestep.snapshot import memory_slot
from samestep.snapshot.files import checksum
from samestep.snapshot.manifest import NAME
from samestep.snapshot.memory_slot import MemorySlot, SlotContent
from samestep.snapshot.part import contribution_of
from samestep.snapshot.read import export
from samestep.snapshot.remote import RemoteDirectory
from samestep.snapshot.resume import load_newest
from samestep.snapshot.state import canonical
from tests.fuzz import mutate
from tests.fuzz.target import Target
from tests.snapshot.saving import save_once, small_state

HOLDER = {"host": "node1", "pid": 7, "boot": "one", "started": "2026-01-01T00:00:00+0000"}
STEPS = ("step-00000001", "step-00000002")


def targets(folder: Path) -> list[Target]:
    """Return the targets; their files are under `folder`."""
    folder.mkdir()
    return [*_memory(folder), *_resumes(folder), *_lists(folder)]


def _filled(data: bytes, file: int) -> int:
    os.ftruncate(file, 0)
    os.pwrite(file, data, 0)
    return file


def _memory(folder: Path) -> list[Target]:
    slot, board, modules, lock = (anonymous_file("fuzz") for _ in range(4))
    contributed, tensors = contribution_of(small_state(2), {}, 0, 1)
    label = {"run": "one", "key": [2, "first", 1, 0], "rank": 0}
    MemorySlot(slot).write(label, contributed, tensors)
    slot_bytes = os.pread(slot, 2**20, 0)
    content = memory_slot.read(slot)
    assert content is not None
    end = memory_slot.START + contributed.nbytes
    part = json.loads(content.part.to_bytes())

    def slots(random: Random) -> int:
        if random.random() < 0.4:
            return _filled(mutate.of_bytes(random, slot_bytes), slot)
        text = (
            canonical(label).encode() + b"\n" + mutate.as_json(random, mutate.of_json(random, part))
        )
        if random.random() < 0.3:
            text = mutate.of_bytes(random, text)
        size = random.choice((len(text), len(text), len(text), 2**40, 2**63))
        header = memory_slot._HEADER.pack(b"samestep", end, size, checksum(text).encode())
        return _filled(header + slot_bytes[len(header) : end] + text, slot)

    def read_slot(file: int) -> None:
        slot_content = memory_slot.read(file)
        assert slot_content is None or isinstance(slot_content, SlotContent)

    state = LauncherState.from_files(board, modules, 0, 0)
    state.report_start(str(folder), 3)
    start = os.pread(board, 4096, 0)

    def boards(random: Random) -> LauncherState:
        _filled(mutate.of_bytes(random, start).ljust(4096, b"\0"), board)
        names = mutate.as_json(random, mutate.of_json(random, ["numpy", "torch"]))
        _filled(mutate.of_bytes(random, names), modules)
        return state

    def read_board(launcher_state: LauncherState) -> None:
        assert launcher_state.step is None or launcher_state.step >= -(2**63)
        assert isinstance(launcher_state.directory, str)
        assert launcher_state.is_under_way in {True, False}
        names = launcher_state.modules_reported
        assert names is None or all(isinstance(name, str) for name in names)

    def locks(random: Random) -> DirectoryLock:
        data = mutate.as_json(random, mutate.of_json(random, HOLDER))
        _filled(mutate.of_bytes(random, data) if random.random() < 0.5 else data, lock)
        held = object.__new__(DirectoryLock)
        held._file, held._path = lock, folder / "lock"
        return held

    def refuse(held: DirectoryLock) -> None:
        raise held._refusal(held._holder())

    return [
        Target("slot", slots, read_slot, (SnapshotError,)),
        Target("board", boards, read_board, ()),
        Target("lock", locks, refuse, (RecordError,)),
    ]


def _resumes(folder: Path) -> list[Target]:  # noqa: C901  short functions
    for step in (1, 2):
        save_once(folder / "saved", step, small_state(step))
    saved = {
        name: {path.name: path.read_bytes() for path in (folder / "saved" / name).iterdir()}
        for name in STEPS
    }
    body = json.loads(saved[STEPS[1]][NAME])
    out = folder / "out"
    out.mkdir()

    def damaged(name: str) -> Callable[[Random], Path]:  # noqa: C901
        """Return what makes a run with an intact snapshot and a newer one that is damaged."""

        run = folder / name
        for step in STEPS:
            (run / step).mkdir(parents=True)
            for file, content in saved[step].items():
                (run / step / file).write_bytes(content)

        def make(random: Random) -> Path:
            for old in (
                *out.iterdir(),
                *(path for path in run.iterdir() if path.name not in STEPS),
            ):
                shutil.rmtree(old) if old.is_dir() else old.unlink()
            for file, content in saved[STEPS[1]].items():
                (run / STEPS[1] / file).write_bytes(content)
            chosen = run / STEPS[1] / random.choice(sorted(saved[STEPS[1]]))
            content = chosen.read_bytes()
            if random.random() < 0.1:
                chosen.unlink()
            elif chosen.name == NAME and random.random() < 0.7:
                changed = mutate.of_json(random, body)
                if isinstance(changed, dict) and random.random() < 0.7:
                    changed.pop("checksum", None)
                    try:
                        changed["checksum"] = checksum(canonical(changed).encode())
                    except ValueError:
                        changed["checksum"] = ""
                chosen.write_bytes(mutate.as_json(random, changed))
            else:
                chosen.write_bytes(mutate.of_bytes(random, content))
            if random.random() < 0.3:
                odd = random.choice(("step-1", "step-99999999999999", "step-00000003", "step-x"))
                (run / odd).touch()
            return run

        return make

    def resume(run: Path) -> None:
        snapshot = load_newest(run, Alone(), lambda *_, **__: None)
        assert snapshot is not None, "it found no snapshot, but the first one is intact"

    def exporting(run: Path) -> None:
        export(run / STEPS[1], out / "model.safetensors")
        with safe_open(out / "model.safetensors", "pt") as file:
            assert isinstance(file.keys(), list)

    def download(run: Path) -> None:
        remote = RemoteDirectory(f"file://{run}")
        assert STEPS[0] in remote.names()
        assert remote.fetch(STEPS[1], out).parent == out

    return [
        Target("resume", damaged("resume"), resume, ()),
        Target("export", damaged("export"), exporting, (SnapshotError,), writes=True),
        Target("download", damaged("remote"), download, (SnapshotError,), writes=True),
    ]


def _lists(folder: Path) -> list[Target]:
    path = folder / "file"
    box = {"image_id": 1, "category_id": 3, "bbox": [1, 1, 4, 4], "area": 16.0, "iscrowd": 0}
    annotations = {
        "categories": [{"id": 3, "name": "cat"}],
        "images": [{"id": 1, "file_name": "one.jpg", "width": 8, "height": 8}],
        "annotations": [
            {**box, "segmentation": [[1.0, 1.0, 5.0, 1.0, 5.0, 5.0]]},
            {**box, "segmentation": {"size": [8, 8], "counts": [60, 4]}},
            {**box, "segmentation": {"size": [8, 8], "counts": "l1T0"}},
        ],
    }

    def written(data: bytes) -> Path:
        path.unlink(missing_ok=True)  # the previous one may be read-only
        path.write_bytes(data)
        return path

    def annotated(random: Random) -> Path:
        data = mutate.as_json(random, mutate.of_json(random, annotations))
        return written(mutate.of_bytes(random, data) if random.random() < 0.3 else data)

    def secret(random: Random) -> Path:
        written(mutate.of_bytes(random, b"a token of the fuzzer\n"))
        path.chmod(random.choice((0o600, 0o400, 0o644)))
        return path

    def read_token(token_file: Path) -> None:
        text = read_secret(token_file, "--token-file")
        assert text.isascii()
        assert token_file.stat().st_mode & 0o077 == 0, "others may read it"

    def read_all(annotation_file: Path) -> Any:
        return read_annotations(annotation_file)

    return [
        Target("secret", secret, read_token, (ConfigError,)),
        Target("annotations", annotated, read_all, (AnnotationError,)),
    ]
